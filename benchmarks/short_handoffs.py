# SPDX-License-Identifier: Apache-2.0
"""Hand-offs of short prompts of a small model, beside computing the prompt on the decode engine.

A load of a short prompt has costs that do not depend on its length: a lease request, a job, and a
step that hears of its end. So the decode engine may compute the prompt sooner. It knows both times
from what it has done before, and refuses hand-offs that are clearly slower
(`omni_connector/handoff/costs.py`).

For each length, fresh prompts take turns: one is computed on the decode engine, the next has been
prefilled on the prefill engine (not timed) and is handed off. The time to the first token is taken
at a client with a kept-alive connection. The first pairs teach the decode engine; each hand-off of
them is made. In the pairs after that it decides.

    python benchmarks/short_handoffs.py [--quick]
    PYTHONPATH=tests/e2e/site python benchmarks/short_handoffs.py    where the kernel is Linux 6.18

writes results/short_handoffs.md and results/short_handoffs.png beside this file.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from handoff import engines, first_token_seconds, random_prompt
from machine import machine, yields
from serving import RESULTS

from omni_connector.handoff.costs import EXPLORED, SAMPLES, SLOWER
from omni_connector.testing.engines import Client, Engine, completion, prefill
from omni_connector.testing.models import make_model

mpl.use("Agg")
import matplotlib.pyplot as plt

LENGTHS = (37, 73, 161, 321, 641)  # one of each class that the decode engine tells apart
CONFIG = {"kv_connector_extra_config": {"arena_gib": 0.25}}
TAUGHT = SAMPLES + 4  # pairs before the decode engine decides, and a few to spare
WARM_UP = 8
TOKEN_KIB = 4  # 4 layers x 2 heads x 64 x (K, V) x 4 bytes


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds to the first token, of pairs of a computed and a handed-off prompt.

    Attributes:
        made: pairs of which the hand-off was made in any case.
        decided: pairs of which the decode engine decided.
        refused: how many of these it refused.
    """

    made: list[tuple[float, float]]
    decided: list[tuple[float, float]]
    refused: int

    def row(self, tokens: int) -> str:
        cells = [str(tokens)]
        for pairs in (self.made, self.decided):
            computed, handed_off = (
                1e3 * statistics.median(each) for each in zip(*pairs, strict=True)
            )
            cells += [f"{computed:.1f}", f"{handed_off:.1f}", f"{ratio(pairs):.2f}"]
        cells.insert(4, f"{self.refused} of {len(self.decided)}")
        return f"| {' | '.join(cells)} |"


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Handed off over computed, median of the pairs."""
    return statistics.median(handed_off / computed for computed, handed_off in pairs)


def pair(
    prefiller: Client, decoder: Client, draw: random.Random, tokens: int, number: int
) -> tuple[float, float]:
    """Compute a fresh prompt on the decode engine, and hand another one off; in every second pair
    the other way round. The prefill engine computes a prompt before each."""

    def compute() -> float:
        prefiller.complete(random_prompt(draw, tokens), max_tokens=1)
        body = completion(random_prompt(draw, tokens), max_tokens=1)
        return first_token_seconds(decoder, body)

    def hand_off() -> float:
        prompt = random_prompt(draw, tokens)
        body = completion(prompt, max_tokens=1)
        body["kv_transfer_params"] = prefill(prefiller, prompt)
        return first_token_seconds(decoder, body)

    if number % 2:
        handed_off = hand_off()
        return compute(), handed_off
    return compute(), hand_off()


def refusals(decode: Engine) -> int:
    """How many hand-offs the decode engine has refused as slower than computing.

    Raises:
        RuntimeError: a hand-off failed otherwise, so its time means nothing.
    """
    name = "vllm:omni_connector_failures_total"
    refused = decode.metric(name, kind=SLOWER)
    if decode.metric(name) != refused:
        raise RuntimeError(f"hand-offs failed: {decode.samples(name)}")
    return int(refused)


def measure(model: Path, folder: Path, lengths: Sequence[int], repeats: int) -> dict[int, Times]:
    """Times by prompt length."""
    draw = random.Random(0)
    found = {}
    with (
        engines("OmniKVConnector", CONFIG, model, folder) as (first, second),
        first.client() as prefiller,
        second.client() as decoder,
    ):
        # Not of the lengths that are measured, so that these are still to be learnt.
        for number in range(WARM_UP):
            pair(prefiller, decoder, draw, 2 * max(lengths), number)
        for tokens in lengths:
            before = refusals(second)
            made = [pair(prefiller, decoder, draw, tokens, number) for number in range(TAUGHT)]
            taught = refusals(second)
            decided = [pair(prefiller, decoder, draw, tokens, number) for number in range(repeats)]
            found[tokens] = Times(made[:SAMPLES], decided, refusals(second) - taught)
            if taught > before + TAUGHT - SAMPLES:
                raise RuntimeError(f"refused before {SAMPLES} loads of {tokens} tokens were seen")
            print(found[tokens].row(tokens), flush=True)
    return found


def markdown(found: dict[int, Times], about: str) -> str:
    """The page."""
    repeats = len(next(iter(found.values())).decided)
    lines = [
        "# Hand-offs of short prompts",
        "",
        about,
        "",
        f"A small model, {TOKEN_KIB} KiB of KV a token; one core an engine. Milliseconds from "
        "sending to the first token at a client of the decode engine, medians; *ratio*: handed off "
        "over computed, median of pairs, every second one handed off first. The prefill "
        "engine computes a prompt before each; its time is not in them.",
        "",
        f"*each is made*: the first {SAMPLES} pairs of a length, of which the decode engine makes "
        f"every hand-off. *the engine decides*: the next {repeats}, of which it refuses those that "
        f"are slower than computing, but makes one in {EXPLORED} of these all "
        "the same ([why](../../docs/architecture.md#hand-offs-that-are-slower-than-computing)). It "
        "compares a load with what the load saves: a loaded prompt waits for a step too, which "
        "computes its last token.",
        "",
        "| tokens | each is made: computed | handed off | ratio | refused | the engine decides: "
        "computed | handed off | ratio |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [times.row(tokens) for tokens, times in found.items()]
    return "\n".join([*lines, "", "![Time to the first token](short_handoffs.png)", ""])


def plot(found: dict[int, Times], path: Path) -> None:
    """Ratios by prompt length."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    lengths = [str(tokens) for tokens in found]
    for label, ratios in (
        ("each is made", [ratio(times.made) for times in found.values()]),
        ("the decode engine decides", [ratio(times.decided) for times in found.values()]),
    ):
        axes.plot(lengths, ratios, "o-", label=label)
    axes.axhline(1.0, color="black", linestyle="--", label="computed on the decode engine")
    axes.set(
        title="Hand-offs of short prompts of a small model",
        xlabel="prompt tokens",
        ylabel="time to the first token, beside computing",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two lengths, fewer pairs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    lengths = (37, 641) if arguments.quick else LENGTHS
    repeats = EXPLORED if arguments.quick else 5 * EXPLORED
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = " ".join(["python benchmarks/short_handoffs.py", *sys.argv[1:]])
    about = f"`{command}`: {machine()}.{yields()}"
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        model = make_model("llama", Path(folder) / "model")
        found = measure(model, Path(folder), lengths, repeats)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "short_handoffs.md").write_text(markdown(found, about))
    plot(found, arguments.output / "short_handoffs.png")


if __name__ == "__main__":
    main()
