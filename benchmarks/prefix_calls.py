# SPDX-License-Identifier: Apache-2.0
"""What single calls of the shared prefix cache take of the engine's thread, at their largest.

    python benchmarks/prefix_calls.py [--quick]

writes results/prefix_calls.md beside this file. The times are of the processor, so that a busy
machine counts as idle.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from machine import machine

from omni_connector.arena.block_index import BlockIndex, BlockIndexView
from omni_connector.arena.slot_index import Ints
from omni_connector.arena.slot_pool import SlotListing, SlotPool
from omni_connector.kv.shapes import GroupShape
from omni_connector.prefix.hints import Candidate, FilledBlocks
from omni_connector.prefix.host_blocks import HostBlocks
from omni_connector.prefix.lookups import Held, reach
from omni_connector.prefix.neighbours import Neighbour
from omni_connector.runtime.context import PROCESS_CONTEXT

RESULTS: Final = Path(__file__).parent / "results"
SLOTS, NEIGHBOURS = 200_000, 16
NEW, UNKNOWN, KEPT = 512, 8192, 100_000
BLOCK, WINDOW = 16, 1024
EPOCH: Final = b"e" * 16
FULL: Final = GroupShape(
    kind="full_attention", block_size=BLOCK, attention_type="all", layers="even", pages=("H2",)
)
WINDOWED: Final = GroupShape(
    kind="sliding_window",
    block_size=BLOCK,
    attention_type="window",
    layers="even",
    pages=("H2",),
    window=WINDOW,
)


class Present:
    """The neighbours of an engine, none of which comes or goes."""

    def __init__(self, indexes: Sequence[BlockIndexView]) -> None:
        self._present = tuple(
            Neighbour(index, (), name=str(number)) for number, index in enumerate(indexes)
        )

    def present(self) -> Sequence[Neighbour]:
        return self._present

    def hit(self, neighbour: Neighbour, slots: Ints, generations: Ints) -> None:
        pass

    def avoid(self, arenas: Any) -> None:
        pass

    def close(self) -> None:
        pass


NOTHING: Final = FilledBlocks.of([])


def all_there(group: int, blocks: FilledBlocks) -> Any:
    return np.ones(len(blocks), bool)


def names(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


class Host:
    """An engine's arena of full attention and windows, and its neighbours, all of them full."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        owners = [BlockIndex.create(SLOTS, EPOCH) for _ in range(NEIGHBOURS)]
        for owner in owners:
            for at in range(0, SLOTS, KEPT):
                slots = np.arange(at, at + KEPT)
                owner.add(draw.integers(1, 1 << 64, KEPT, np.uint64), slots, slots + 1)
        self._owners = owners
        views = [BlockIndexView.open(o.fd, epoch=EPOCH, num_slots=SLOTS) for o in owners]
        index = BlockIndex.create(SLOTS, EPOCH)
        self.pool = SlotPool(SLOTS)
        self.pool.listing = SlotListing(index, b"prefix")
        self.blocks = HostBlocks(
            pool=self.pool,
            index=index,
            arenas=(),
            neighbours=Present(views),
            groups=(FULL, WINDOWED),
            key_prefix=b"prefix",
            load_timeout=1.0,
            context=PROCESS_CONTEXT,
        )

    def keep(self, count: int) -> Callable[[], Any]:
        """Keeps so many new blocks; returns the call."""
        hashes = names(count)
        filled = [
            Candidate(0, each, number + 1, prompt=number % 64) for number, each in enumerate(hashes)
        ]
        return lambda: self.end(
            self.blocks.keep([FilledBlocks.of(filled), NOTHING], SLOTS, 0, all_there)[0]
        )

    def end(self, spec: Any) -> None:
        """The workers have copied the blocks."""
        self.blocks.keeping[1] = spec
        self.blocks.kept(1, None)

    def close(self) -> None:
        self.blocks.close()


def timed(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Milliseconds of the processor of each call."""
    times = []
    for call in calls:
        start = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - start))
    return times


def measure(repeats: int) -> dict[str, tuple[list[float], float]]:
    """Milliseconds by call, and its target."""
    host = Host()
    found: dict[str, tuple[list[float], float]] = {}
    unknown = [names(UNKNOWN), names(UNKNOWN)]
    request: Any = SimpleNamespace(block_hashes=unknown[0])

    def look_up() -> None:
        hashes = [list(request.block_hashes) for _ in unknown]
        there = host.blocks.find(hashes, alone=True)
        held = [Held.of(of.there) for of in there.groups]
        pairs = list(zip((FULL, WINDOWED), held, strict=True))
        assert reach(pairs, BLOCK, 0, UNKNOWN * BLOCK) == 0

    found[f"look up {UNKNOWN:,} unknown blocks, full attention and windows"] = (
        timed([look_up] * repeats),
        1.0,
    )
    everything, nothing = Held.of([True] * UNKNOWN), Held.of([False] * UNKNOWN)
    scattered = Held.of([number % 3 > 0 for number in range(UNKNOWN)])
    for name, held in (("no window", nothing), ("parts of windows", scattered)):
        pairs = [(FULL, everything), (WINDOWED, held)]
        found[f"reach, {UNKNOWN:,} blocks, {name}"] = (
            timed([partial(reach, pairs, BLOCK, 0, UNKNOWN * BLOCK)] * repeats),
            1.0,
        )
    calls = [host.keep(NEW) for _ in range(repeats)]
    found[f"keep {NEW} new blocks, {NEIGHBOURS} neighbours, and end the copy"] = timed(calls), 1.0
    resets = []
    for _ in range(max(3, repeats // 10)):
        while host.pool.num_cached < KEPT:
            host.keep(4096)()
        resets += timed([lambda: host.blocks.rename(b"other")])
    found[f"a reset with {KEPT:,} kept blocks"] = resets, 2.0
    host.close()
    return found


def markdown(found: dict[str, tuple[list[float], float]], command: str) -> str:
    """The table."""
    lines = [
        "# The largest calls of the shared prefix cache",
        "",
        f"`{command}`: {machine()}.",
        "",
        "Milliseconds of the engine's thread, as the processor counts them; median, and the "
        "highest.",
        "",
        "| call | median | highest | target |",
        "|---|---:|---:|---:|",
    ]
    for name, (times, target) in found.items():
        lines.append(f"| {name} | {statistics.median(times):.2f} | {max(times):.2f} | {target} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    command = "python benchmarks/prefix_calls.py" + (" --quick" if arguments.quick else "")
    text = markdown(measure(10 if arguments.quick else 100), command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "prefix_calls.md").write_text(text)


if __name__ == "__main__":
    main()
