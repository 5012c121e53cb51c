# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a trace the slot pool still has, beside other policies; and what it costs.

Each prompt asks for its blocks, and hits are those before the first that is missing. Then all of
them are kept, as far as the policy admits them. Belady's policy knows the future, and is a bound.
Which new blocks an engine keeps is another benchmark's subject: admission.py.

    python benchmarks/eviction.py [--quick] [--trace FILE]

writes results/eviction.md and results/eviction.png beside this file. FILE is in the format of
Mooncake's traces and takes the place of the conversations made here.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from machine import machine
from policies import ARC, LRU, S3FIFO, SecondSight, belady, hits_of
from traces import Trace, agents, block_key, conversations, of_file

from omni_connector.arena.slot_index import SlotKey
from omni_connector.arena.slot_pool import SlotPool

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
SHARES = (0.01, 0.05, 0.20)
ARENAS = (1_000, 100_000, 1_000_000)
PROMPT = 512
OURS = "slot pool"


def copied(pool: SlotPool, keys: Sequence[SlotKey | None]) -> int:
    """Use a prompt's blocks, and copy those that are missing; returns how many were found."""
    taken = pool.take([keys], [0])
    assert taken is not None
    slots = taken[0][0]
    lacks = pool.lacks(slots)
    missing = np.flatnonzero(lacks)
    pool.fill(0, [keys[i] for i in missing.tolist()], slots[missing])
    pool.filled(slots[missing])
    pool.let_go(slots[::-1])
    return int(missing[0]) if len(missing) else len(slots)


def slot_pool(size: int, trace: Trace) -> int:
    """The hits of the slot pool."""
    pool = SlotPool(size)
    return sum(
        copied(pool, [block_key(block) for block in prompt])
        for prompt in trace
        if len(prompt) <= size
    )


POLICIES: dict[str, Callable[[int, Trace], int]] = {
    "LRU": lambda size, trace: hits_of(LRU(size), trace),
    "LRU, second hit": lambda size, trace: hits_of(SecondSight(size), trace),
    "ARC": lambda size, trace: hits_of(ARC(size), trace),
    "S3-FIFO": lambda size, trace: hits_of(S3FIFO(size), trace),
    OURS: slot_pool,
    "Belady": belady,
}


def replay(trace: Trace) -> dict[str, list[float]]:
    """Hits in percent of each policy, at each share of the distinct blocks."""
    distinct = len(set().union(*trace))
    total = sum(map(len, trace))
    return {
        name: [100 * hits(int(share * distinct), trace) / total for share in SHARES]
        for name, hits in POLICIES.items()
    }


def us(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - start)


def operations(slots: int, repeats: int) -> tuple[float, float, float]:
    """Microseconds a block, in an arena that is full: of a prompt that is new, of one that is
    cached, and of hits that are told."""
    pool = SlotPool(slots)
    size = min(PROMPT, slots // 4)

    def keys(prompt: int) -> list[SlotKey | None]:
        return [block_key(prompt, i) for i in range(size)]

    filled = slots // size + 1
    for prompt in range(filled):
        copied(pool, keys(prompt))
    new, again, told = [], [], []
    for prompt in range(filled, filled + repeats):
        mine = keys(prompt)
        new.append(us(partial(copied, pool, mine)))
        again.append(us(partial(copied, pool, mine)))
        numbers = pool.take([mine], [0])
        assert numbers is not None
        pool.let_go(numbers[0][0][::-1])
        told.append(us(partial(pool.touch, numbers[0][0][::-1], numbers[1][0][::-1])))
    each = [statistics.median(times) / size for times in (new, again, told)]
    return each[0], each[1], each[2]


def markdown(
    traces: dict[str, Trace],
    hits: dict[str, dict[str, list[float]]],
    costs: dict[int, tuple[float, float, float]],
    command: str,
) -> str:
    lines = [
        "# Which cached blocks go first",
        "",
        f"`{command}`: {machine()}.",
        "",
        "Hits in percent of all blocks that the prompts of a trace have, where a cache holds the "
        "share of its distinct blocks that stands above the column. A block is a hit if all before "
        "it are. *second hit*: a block is kept when it is seen again, and not when it is first "
        "seen. *Belady*: always the block goes that is used last; no policy that does not know the "
        "future can do better.",
    ]
    for name, trace in traces.items():
        total, distinct = sum(map(len, trace)), len(set().union(*trace))
        lines += [
            "",
            f"## {name.capitalize()}",
            "",
            f"{len(trace)} prompts, {total} blocks, {distinct} of them distinct.",
            "",
            "| policy | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |",
            "|---|" + "---:|" * len(SHARES),
        ]
        for policy, rates in hits[name].items():
            lines.append(f"| {policy} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |")
    lines += [
        "",
        "## Cost",
        "",
        f"Microseconds a block of the slot pool's calls, in a full arena, for prompts of {PROMPT} "
        "blocks (a quarter of the arena if that is less); medians. *new*: taken, filled and let "
        "go. *cached*: the same where nothing is missing. *told*: hits of readers.",
        "",
        "| slots | new | cached | told |",
        "|---:|---:|---:|---:|",
    ]
    for slots, times in costs.items():
        lines.append(f"| {slots:,} | " + " | ".join(f"{each:.2f}" for each in times) + " |")
    lines += ["", "![Hits by policy](eviction.png)"]
    return "\n".join(lines) + "\n"


def plot(hits: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Hits over the size of the cache."""
    figure, both = plt.subplots(1, len(hits), figsize=(12, 4.5), layout="constrained")
    for axes, (name, policies) in zip(both, hits.items(), strict=True):
        for policy, rates in policies.items():
            style = "k--" if policy == "Belady" else "o-"
            width = 2.5 if policy == OURS else 1.2
            axes.plot(
                [100 * share for share in SHARES], rates, style, linewidth=width, label=policy
            )
        axes.set(title=name, xlabel="cache / distinct blocks (%)", ylabel="hits (%)", xscale="log")
        axes.set_xticks([100 * share for share in SHARES], [f"{share:.0%}" for share in SHARES])
        axes.grid(alpha=0.3)
    both[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, and write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter traces, smaller arenas")
    parser.add_argument("--trace", type=Path, help="a trace of Mooncake's")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    traces = {
        "conversations": of_file(arguments.trace) if arguments.trace else conversations(),
        "agents": agents(),
    }
    if arguments.quick:
        traces = {name: trace[: len(trace) // 10] for name, trace in traces.items()}
    costs = {
        slots: operations(slots, 20 if arguments.quick else 200)
        for slots in ARENAS
        if slots <= 100_000 or not arguments.quick
    }
    hits = {name: replay(trace) for name, trace in traces.items()}
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/eviction.py"
    command += " --quick" if arguments.quick else ""
    command += f" --trace {arguments.trace.name}" if arguments.trace else ""
    text = markdown(traces, hits, costs, command)
    (arguments.output / "eviction.md").write_text(text)
    plot(hits, arguments.output / "eviction.png")
    print(text)


if __name__ == "__main__":
    main()
