# SPDX-License-Identifier: Apache-2.0
"""What an engine pays for sharing its prefixes where no prompt ever comes again.

An engine without a connector and one that shares are bound to the same core, and get the same
random prompts, one at a time, in turns. The first prompts fill the arena.

    python benchmarks/share_cost.py [--prompts 60] [--quick]

writes results/share_cost.md and results/share_cost.png beside this file.
"""

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from machine import machine, yields
from serving import NONE, OURS, RESULTS, Place, cores, started

from omni_connector.testing.engines import completion
from omni_connector.testing.models import VOCAB_SIZE

mpl.use("Agg")
import matplotlib.pyplot as plt

TOKENS = 1024
TOKEN_BYTES = 128 << 10
FILLS = 24  # prompts that an arena holds
WARM_UPS = 4
TARGET = 0.99
SHARES = "shares"

Times = dict[str, list[float]]
"""Seconds to the first token by engine, one a prompt."""


def measure(place: Place, prompts: int) -> Times:
    """The times of those prompts that fill the arenas, and then of so many more."""
    core = cores()[1]
    gib = (FILLS + WARM_UPS) * TOKENS * TOKEN_BYTES / 2**30
    engines = {NONE: place.engine("plain", None, core)}
    extra = {"arena_gib": gib}
    config = {"kv_connector": OURS, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engines[SHARES] = place.engine(SHARES, config, core)
    draw = random.Random(0)
    times: Times = {name: [] for name in engines}
    with started(list(engines.values())), place.logs_on_failure(), contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(each.client()) for name, each in engines.items()}
        for number in range(WARM_UPS + FILLS + prompts):
            # The last block of a prompt is not full.
            prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(TOKENS + 1)]
            order = list(engines)
            draw.shuffle(order)
            for name in order:
                start = time.perf_counter()
                clients[name].post("/v1/completions", completion(prompt, max_tokens=1))
                if number >= WARM_UPS:
                    times[name].append(time.perf_counter() - start)
    return times


def row(phase: str, times: Times, part: slice) -> str:
    """Medians, and the quartiles of what no connector takes by what this engine does."""
    plain, theirs = times[NONE][part], times[SHARES][part]
    ratios = [one / other for one, other in zip(plain, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"| {phase} | {len(theirs)} | {1e3 * statistics.median(plain):.0f} "
        f"| {1e3 * statistics.median(theirs):.0f} | {middle:.3f} | {low:.3f} - {high:.3f} |"
    )


def markdown(times: Times, about: str) -> str:
    """The table."""
    phases = {"the arena fills": slice(0, FILLS), "the arena is full": slice(FILLS, None)}
    rows = [row(phase, times, part) for phase, part in phases.items()]
    lines = [
        "# What sharing costs where nothing is used again",
        "",
        about,
        "",
        f"Random prompts of {TOKENS + 1} tokens, {TOKEN_BYTES >> 10} KiB of KV a token, one at a "
        "time, to an engine without a connector and to one that shares, on one core, in turns. "
        "Milliseconds to the first token, medians; *ratio*: without a connector by with it, "
        "paired, median and quartiles.",
        "",
        "| | prompts | no connector | with it | ratio | quartiles |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"Target, in a full arena: {TARGET}.",
    ]
    lines += ["", "![Ratios in the order of the prompts](share_cost.png)"]
    return "\n".join([*lines, ""])


def plot(times: Times, path: Path) -> None:
    """The ratios in the order of the prompts, as medians of eight."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    ratios = [a / b for a, b in zip(times[NONE], times[SHARES], strict=True)]
    runs = range(8, len(ratios) + 1)
    axes.plot(runs, [statistics.median(ratios[i - 8 : i]) for i in runs], label=SHARES)
    axes.axvline(FILLS, color="grey", linestyle=":", label="the arena is full")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="prompt", ylabel="no connector / with it", title="Median of the last 8 prompts")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str]) -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=60, help="in full arenas")
    parser.add_argument("--quick", action="store_true", help="8 prompts")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    command = " ".join(["python benchmarks/share_cost.py", *arguments])
    about = f"`{command}`: {machine()}.{yields()}"
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        times = measure(Place(Path(folder)), 8 if given.quick else given.prompts)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "share_cost.md").write_text(text := markdown(times, about))
    plot(times, given.output / "share_cost.png")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
