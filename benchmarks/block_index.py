# SPDX-License-Identifier: Apache-2.0
"""How long it takes to look up a prompt's blocks in the indexes of many engines.

Each engine's index is a memfd with a full table. A prompt of 1,000 blocks is looked up among 1, 4
and 16 of them: when all have all of its blocks, when the last has
them, when nobody has any, and when the engines have a hundred blocks each in turns, as after ten
turns of a conversation. Then an owner adds and removes blocks at several sizes of the arena, and
the memory is measured that a full directory takes: the index, `SlotPool` and what it is made of.

    python benchmarks/block_index.py [--quick]

writes results/block_index.md and results/block_index.png beside this file.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from machine import machine

from omni_connector.arena.block_index import (
    BlockIndex,
    BlockIndexView,
    Tags,
    find_prefix,
    tags_of,
)
from omni_connector.arena.slot_pool import SlotListing, SlotPool

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
BLOCKS: Final = 1000
PEERS: Final = (1, 4, 16)
TURN: Final = 100
CASES: Final = ("all have all", "the last has all", "in turns", "nobody has any")
EPOCH: Final = b"e" * 16
BATCH: Final = 1024
TURNOVERS: Final = 4


def random_tags(rng: np.random.Generator, count: int) -> Tags:
    return rng.integers(1, 1 << 64, count, np.uint64)


class Host:
    """The indexes of some engines, all slots of which hold blocks of other prompts at first."""

    def __init__(self, engines: int, slots: int) -> None:
        self.rng = np.random.default_rng(0)
        self.slots = slots
        self.owners = [BlockIndex.create(slots, EPOCH) for _ in range(engines)]
        self._next = [0] * engines
        for engine in range(engines):
            for _ in range(0, slots, BATCH):
                self.hold(engine, random_tags(self.rng, min(BATCH, slots)))
        self.views = [
            BlockIndexView.open(owner.fd, epoch=EPOCH, num_slots=slots) for owner in self.owners
        ]

    def hold(self, engine: int, tags: Tags) -> None:
        """Put blocks in slots that follow each other, as those of a prompt often do."""
        first = self._next[engine]
        if first + len(tags) > self.slots:
            first = 0
        self._next[engine] = first + len(tags)
        slots = np.arange(first, first + len(tags))
        self.owners[engine].add(tags, slots, slots + 1)

    def prompts(self, case: str, engines: int, count: int) -> list[Tags]:
        """Prompts that this many of the engines hold in the way of a case."""
        made = [random_tags(self.rng, BLOCKS) for _ in range(count)]
        for tags in made:
            for at in range(0, BLOCKS, TURN):
                part = tags[at : at + TURN]
                if case == "in turns":
                    self.hold(7 * (at // TURN) % engines, part)
                elif case == "the last has all":
                    self.hold(engines - 1, part)
                elif case == "all have all":
                    for engine in range(engines):
                        self.hold(engine, part)
        return made

    def close(self) -> None:
        for each in (*self.views, *self.owners):
            each.close()


def timed(calls: Iterator[Callable[[], Any]]) -> list[float]:
    """Microseconds of the processor's for each: none waits, and a busy machine counts as idle."""
    times = []
    for call in calls:
        start = time.thread_time()
        call()
        times.append(1e6 * (time.thread_time() - start))
    return times


def lookups(slots: int, count: int) -> dict[tuple[str, int], list[float]]:
    """Microseconds of each look-up: of a prompt that is looked up for the first time."""
    host = Host(max(PEERS), slots)
    results = {}
    for case in CASES:
        for engines in PEERS:
            views = host.views[:engines]
            prompts = host.prompts(case, engines, count)
            expected = 0 if case == "nobody has any" else BLOCKS
            assert len(find_prefix(views, prompts[-1])[0]) == expected
            results[case, engines] = timed(
                partial(find_prefix, views, tags) for tags in prompts[:-1]
            )
    host.close()
    return results


def tagging(count: int) -> list[float]:
    """Microseconds in which the tags of a prompt's hashes are made."""
    hashes = [os.urandom(32) for _ in range(BLOCKS)]
    return timed((lambda: tags_of(b"prefix", 0, hashes)) for _ in range(count))


def changes(slots: int, batch: int, count: int) -> tuple[float, float]:
    """Microseconds a block in which a full index has a batch replaced, and removed."""
    host = Host(1, slots)
    [index] = host.owners
    numbers = [host.rng.choice(slots, batch, replace=False) for _ in range(count)]
    tags = random_tags(host.rng, batch)
    added = timed(partial(index.add, tags, each, each) for each in numbers)
    removed = timed(partial(index.remove, each) for each in numbers)
    host.close()
    return statistics.median(added) / batch, statistics.median(removed) / batch


PARTS: Final = {
    "file": "the index's file",
    "arena/block_index.py": "the owner's part of it",
    "arena/slot_index.py": "`slot_index.py`",
    "benchmarks/block_index.py": "keys that stay alive",
    "arena/eviction.py": "`eviction.py`",
    "arena/slot_pool.py": "`slot_pool.py`",
}


def measure_memory(slots: int) -> None:
    """Print the bytes a slot of each part: when all slots are in use, and after each of them has
    held some more blocks."""
    tracemalloc.start(6)
    pool = SlotPool(slots)
    index = BlockIndex.create(slots, EPOCH)
    pool.listing = SlotListing(index, b"prefix")
    found = []
    for turns in (1, TURNOVERS):
        for start in range(0, turns * slots, BATCH):
            keys = [os.urandom(32) for _ in range(min(BATCH, turns * slots - start))]
            taken = pool.take([keys], [0])
            assert taken is not None
            [numbers], _ = taken
            pool.fill(0, keys, numbers)
            pool.filled(numbers)
            pool.let_go(numbers[::-1])
        gc.collect()
        parts = Counter(file=512 * os.fstat(index.fd).st_blocks)
        for each in tracemalloc.take_snapshot().statistics("traceback"):
            names = ["/".join(Path(frame.filename).parts[-2:]) for frame in each.traceback]
            parts[next((name for name in reversed(names) if name in PARTS), "")] += each.size
        found.append([parts[part] / slots for part in PARTS])
    print(json.dumps(found))


def memory(slots: int) -> list[list[float]]:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--memory", str(slots)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: list[list[float]] = json.loads(done.stdout)
    return measured


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def markdown(results: dict[str, Any], command: str) -> str:
    lines = [
        "# Looking blocks up in the indexes of peers",
        "",
        f"`{command}`: {machine()}, numpy {np.__version__}.",
        "",
        f"## A prompt of {BLOCKS} blocks, {results['slots']:,} slots an engine",
        "",
        f"Microseconds of processor time, medians of {results['count'] - 1} prompts, each looked "
        "up for the first time, and in brackets the 99th percentile. All slots of all engines are "
        f"in use. *in turns*: the engines have {TURN} blocks each, one after the other.",
        "",
        f"| who has the blocks | {' | '.join(f'peers: {each}' for each in PEERS)} |",
        "|---|---:|---:|---:|",
    ]
    for case in CASES:
        times = [results["lookups"][case, engines] for engines in PEERS]
        cells = [f"{statistics.median(each):.0f} ({p99(each):.0f})" for each in times]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    lines += [
        "",
        f"The tags of {BLOCKS} hashes of 32 bytes take {statistics.median(results['tags']):.0f} "
        "µs, once, however many peers there are.",
        "",
        "## Changes by the owner",
        "",
        "Microseconds of processor time a block in a full index, medians. *add*: to slots that "
        "held other blocks, which are removed by that.",
        "",
        "| slots | add 1 | add 1000 | remove 1 | remove 1000 |",
        "|---:|---:|---:|---:|---:|",
    ]
    for slots, (one, many) in results["changes"].items():
        lines.append(f"| {slots:,} | {one[0]:.1f} | {many[0]:.2f} | {one[1]:.1f} | {many[1]:.2f} |")
    lines += [
        "",
        "## Memory",
        "",
        "Bytes a slot of a directory whose slots all hold blocks that peers find, with keys of 32 "
        "bytes, as tracemalloc and the file system count them; in brackets after each slot has "
        f"held {TURNOVERS} more blocks.",
        "",
        f"| slots | {' | '.join(PARTS.values())} | together |",
        f"|---:|{'---:|' * len(PARTS)}---:|",
    ]
    for slots, measured in results["memory"].items():
        pairs = [*zip(*measured, strict=True), tuple(map(sum, measured))]
        parts = " | ".join(f"{full:.1f} ({later:.1f})" for full, later in pairs)
        lines.append(f"| {slots:,} | {parts} |")
    lines += ["", "![Time of a look-up by peers](block_index.png)"]
    return "\n".join([*lines, ""])


def plot(results: dict[str, Any], path: Path) -> None:
    """Look-ups by number of peers; changes by number of slots."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for case, colour in zip(
        CASES, ("tab:blue", "tab:orange", "tab:green", "tab:gray"), strict=True
    ):
        times = [statistics.median(results["lookups"][case, each]) for each in PEERS]
        left.plot(PEERS, times, "o-", color=colour, label=case)
    left.set(title=f"{BLOCKS} blocks are looked up", xlabel="peers", ylabel="µs (median)")
    left.set_xscale("log", base=2)
    left.set_xlim(0.2, 20)
    left.set_xticks(PEERS, [str(each) for each in PEERS])
    sizes = list(results["changes"])
    for number, verb in enumerate(("add", "remove")):
        for batch, style in ((0, "o-"), (1, "s:")):
            times = [results["changes"][each][batch][number] for each in sizes]
            count = (1, BLOCKS)[batch]
            colour = ("tab:blue", "tab:orange")[number]
            right.plot(sizes, times, style, color=colour, label=f"{verb} {count}")
    right.set(title="The owner changes a full index", xlabel="slots", ylabel="µs a block (median)")
    right.set_xscale("log")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=7)
    figure.suptitle("Indexes of blocks")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, and write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller arenas, fewer look-ups")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        measure_memory(arguments.memory)
        return
    quick = arguments.quick
    slots, count = (50_000, 21) if quick else (300_000, 51)
    sizes = (1 << 10, 1 << 16) if quick else (1 << 10, 1 << 16, 1 << 20)
    results: dict[str, Any] = {
        "slots": slots,
        "count": count,
        "lookups": lookups(slots, count),
        "tags": tagging(count),
        "changes": {
            each: (changes(each, 1, count), changes(each, BLOCKS, count)) for each in sizes
        },
        "memory": {each: memory(each) for each in sizes[1:]},
    }
    command = "python benchmarks/block_index.py" + (" --quick" if quick else "")
    text = markdown(results, command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "block_index.md").write_text(text)
    plot(results, arguments.output / "block_index.png")


if __name__ == "__main__":
    main()
