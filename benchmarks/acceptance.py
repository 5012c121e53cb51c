# SPDX-License-Identifier: Apache-2.0
"""How many drafted tokens are accepted after a hand-off, and by an engine without a connector.

What vLLM's `spec_decode_acceptance_test.sh` asks of a connector: prompts are sent to a
prefill engine that drafts one token and a decode engine that drafts three, which answers with 256
tokens. The mean acceptance length (1 + accepted tokens a draft) and the part accepted at each
position lie within 5 % of those of one engine without a connector. vLLM's test has these baselines
written down for some models; here they are measured in the same run.

Made models are drafted for by EAGLE, EAGLE-3, a draft model and MTP. The control is a prefill
engine without a drafter: the drafter has no KV of the prompt, and fewer of its tokens are accepted.

    python benchmarks/acceptance.py [--quick]

writes results/acceptance.md beside this file. The exit status is 1 if a hand-off is not within the
5 %, or a control is. `--port` and `--decode-port` measure engines that run already, on GPUs for
instance.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, yields
from numpy.typing import NDArray
from serving import NONE, OURS, RESULTS, Place, cores, started

from omni_connector.cli.engines import running
from omni_connector.testing.engines import Engine
from omni_connector.testing.models import make_model

DRAFTS = 3
TOLERANCE = 0.05
OFTEN = 0.2  # of the drafts; where fewer are accepted, chance alone makes more than 5 %
MOST = 0.9  # of the prompts' tokens come from the prefill engine
CONTROL = f"{OURS}, no drafter at the prefill engine"
MOST_TOKENS = 1024
KV_CACHE_BYTES = 256 << 20
ARENA_GIB = 0.25


@dataclass(frozen=True, slots=True)
class Method:
    """How tokens are drafted.

    Attributes:
        model: recipe of the model that is drafted for.
        drafter: recipe of the drafter; None where the model has it.
    """

    model: str
    drafter: str | None


METHODS = {
    "eagle": Method("llama-drafted", "eagle-llama"),
    "eagle3": Method("llama-drafted", "eagle3-llama"),
    "draft_model": Method("llama-drafted", "draft-llama"),
    "mtp": Method("mimo", None),
}
"""By vLLM's names."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked.

    Attributes:
        prompts: how many.
        concurrent: how many of them at a time.
        prompt_tokens: of each, in the mean; of drawn prompts.
        answer_tokens: of each.
    """

    prompts: int
    concurrent: int
    prompt_tokens: int
    answer_tokens: int

    def send(self, place: Place, port: int) -> None:
        """Send it to a server."""
        arguments: dict[str, Any] = {
            "--num-prompts": self.prompts,
            "--max-concurrency": self.concurrent,
            "--random-input-len": self.prompt_tokens,
            "--random-range-ratio": '{"input": 0.8, "output": 0.0}',
            "--random-output-len": self.answer_tokens,
            "--seed": 1,
        }
        place.bench_serve(port, "random", arguments)

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts of {self.prompt_tokens} tokens in the mean, "
            f"{self.concurrent} at a time, answers of {self.answer_tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class Drafted:
    """What an engine has drafted.

    Attributes:
        drafts: how often.
        accepted: tokens of them, by position.
        remote: the part of the prompts' tokens that came through the connector.
    """

    drafts: float
    accepted: tuple[float, ...]
    remote: float

    @classmethod
    def counted(cls, engine: Engine, load: Callable[[], None]) -> "Drafted":
        """While a load is sent."""
        totals = (
            "vllm:spec_decode_num_drafts_total",
            "vllm:prompt_tokens_total",
            "vllm:external_prefix_cache_hits_total",
        )
        accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

        def read() -> NDArray[np.float64]:
            by_position = {
                int(labels["position"]): count for labels, count in engine.samples(accepted)
            }
            counts = [by_position[position] for position in sorted(by_position)]
            return np.array([*(engine.metric(name) for name in totals), *counts])

        before = read()
        load()
        drafts, asked, found, *counts = read() - before
        return cls(drafts, tuple(counts), found / asked)

    @property
    def length(self) -> float:
        """Mean acceptance length."""
        return 1 + sum(self.accepted) / self.drafts

    @property
    def rates(self) -> list[float]:
        """The part of the drafts accepted at each position."""
        return [count / self.drafts for count in self.accepted]

    def __str__(self) -> str:
        rates = ", ".join(f"{rate:.3f}" for rate in self.rates)
        return (
            f"{self.drafts:,.0f} drafts, mean acceptance length {self.length:.3f}, at each "
            f"position {rates}; {100 * self.remote:.1f} % of the prompts' tokens loaded"
        )

    def agrees(self, baseline: "Drafted") -> bool:
        """Whether the length, and the rates of positions that a baseline accepts often, lie within
        the tolerance of those of the baseline."""
        pairs = [(self.length, baseline.length)]
        for rate, other in zip(self.rates, baseline.rates, strict=True):
            if other >= OFTEN:
                pairs.append((rate, other))
        return all(abs(one - other) <= TOLERANCE * other for one, other in pairs)


@dataclass(frozen=True, slots=True)
class Setting:
    """The engines of one method.

    Attributes:
        place: with the model.
        speculative: `--speculative-config` without the number of tokens.
    """

    place: Place
    speculative: Mapping[str, Any]

    @classmethod
    def make(cls, folder: Path, method: str) -> "Setting":
        """Make the models in a folder."""
        recipes = METHODS[method]
        place = Place(folder, recipes.model, MOST_TOKENS, KV_CACHE_BYTES)
        speculative = {"method": method}
        if recipes.drafter is not None:
            # vLLM knows some drafters by the names of their folders.
            drafter = make_model(recipes.drafter, folder / recipes.drafter)
            speculative["model"] = str(drafter)
        return cls(place, speculative)

    def engine(self, name: str, role: str | None, core: int, drafts: int) -> Engine:
        """An engine on a core of its own, not started.

        Args:
            role: of its connector; None for no connector.
            drafts: tokens that it drafts; 0 without a drafter.
        """
        extra = {"arena_gib": ARENA_GIB}
        config = {"kv_connector": OURS, "kv_role": role, "kv_connector_extra_config": extra}
        engine = self.place.engine(name, None if role is None else config, core)
        if drafts:
            speculative = json.dumps({**self.speculative, "num_speculative_tokens": drafts})
            engine.arguments = (*engine.arguments, "--speculative-config", speculative)
        return engine

    @contextmanager
    def serving(self, name: str) -> Iterator[tuple[int, Engine]]:
        """The port that takes requests, and the engine that decodes."""
        first, second = cores()
        if name == NONE:
            engine = self.engine("alone", None, first, DRAFTS)
            with started([engine]):
                yield engine.port, engine
            return
        prefill = self.engine("prefill", "kv_producer", first, 0 if name == CONTROL else 1)
        decode = self.engine("decode", "kv_consumer", second, DRAFTS)
        with running(prefill, decode, self.place.folder) as deployment:
            yield deployment.router.port, decode

    def measure(self, name: str, load: Load) -> Drafted:
        """What one configuration drafts."""
        with self.serving(name) as (port, engine), self.place.logs_on_failure():
            return Drafted.counted(engine, lambda: load.send(self.place, port))


Results = Mapping[str, Mapping[str, Drafted]]
"""By method and configuration."""


def right(found: Mapping[str, Drafted]) -> bool:
    """Whether the configurations of a method do what they are to do."""
    agree = {name: each.agrees(found[NONE]) for name, each in found.items()}
    loaded = all(found[name].remote > MOST for name in (OURS, CONTROL))
    return loaded and agree[OURS] and not agree[CONTROL]


def markdown(results: Results, load: Load, about: str) -> str:
    lines = [
        "# Acceptance of drafted tokens after a hand-off",
        "",
        about,
        "",
        f"{load}, greedy. The prefill engine drafts 1 token, and the decode "
        f"engine {DRAFTS}; *no connector* is one engine that drafts {DRAFTS}. *length*: mean "
        "acceptance length, 1 + accepted tokens a draft; *at 1, 2, 3*: the part of the drafts "
        "accepted at each position; *ratio*: of the length, beside no connector; *within 5 %*: "
        "length, and the positions at which an engine without a connector accepts "
        f"{100 * OFTEN:.0f} % of the drafts or more; vLLM's `spec_decode_acceptance_test.sh` "
        "allows as much; *remote*: the part of the prompts' tokens whose KV came from the prefill "
        "engine. "
        "The control has no drafter at the prefill engine; it shows that lost KV of the drafter "
        "would be seen.",
        "",
        "vLLM's script itself was not run: it downloads its models and prompts, and needs two "
        "GPUs. It asks the same of a router, a prefill and a decode engine, with these "
        "differences. Its models are trained, and drafted for by EAGLE-3 or MTP; those here are "
        "made with random weights. Its prompts are those of MT-Bench, one at a time. It compares "
        "all positions; its models accept a third of the drafts and more at each. Its baselines "
        "are written down; here an engine without a connector is measured in the same run.",
        "",
        "| method | configuration | drafts | length | ratio | at 1 | at 2 | at 3 | within 5 % "
        "| remote % |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    for method, by_name in results.items():
        baseline = by_name[NONE]
        for name, each in by_name.items():
            rates = " | ".join(f"{rate:.3f}" for rate in each.rates)
            lines.append(
                f"| {method} | {name} | {each.drafts:,.0f} | {each.length:.3f} "
                f"| {each.length / baseline.length:.3f} | {rates} "
                f"| {'yes' if each.agrees(baseline) else 'no'} | {100 * each.remote:.1f} |"
            )
    return "\n".join([*lines, ""])


def compare(folder: Path, load: Load, methods: Sequence[str]) -> Iterator[Results]:
    """The results so far, after each method."""
    results: dict[str, dict[str, Drafted]] = {}
    for method in methods:
        (folder / method).mkdir()
        setting = Setting.make(folder / method, method)
        found = {}
        for name in (NONE, OURS, CONTROL):
            found[name] = setting.measure(name, load)
            print(f"{method}, {name}: {found[name]}", flush=True)
        results[method] = found
        yield results


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, only EAGLE")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--concurrent", type=int, default=8, help="prompts; vLLM's test sends 1")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="in the mean")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--method", action="append", choices=tuple(METHODS))
    parser.add_argument("--port", type=int, help="of a router or a server that runs already")
    parser.add_argument("--decode-port", type=int, help="of the engine that decodes behind it")
    parser.add_argument(
        "--model", type=Path, help="folder of the model that is served there as `model`"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    load = Load(
        arguments.prompts,
        arguments.concurrent,
        arguments.prompt_tokens,
        arguments.answer_tokens,
    )
    methods = arguments.method or tuple(METHODS)
    if arguments.quick:
        load = Load(8, 8, 100, 128)
        methods = ("eagle",)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = " ".join(["python benchmarks/acceptance.py", *sys.argv[1:]])
    about = f"`{command}`: {machine()}.{yields()}"
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        if arguments.port is not None:
            place = Place(Path(folder), given=arguments.model)
            decode = Engine(arguments.model, place.folder / "log", port=arguments.decode_port)
            print(Drafted.counted(decode, lambda: load.send(place, arguments.port)))
            return 0
        arguments.output.mkdir(parents=True, exist_ok=True)
        # Written after each method, so that a run cut short leaves what it measured.
        for results in compare(Path(folder), load, methods):
            text = markdown(results, load, about)
            (arguments.output / "acceptance.md").write_text(text)
    print(text)
    return 0 if all(map(right, results.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
