# SPDX-License-Identifier: Apache-2.0
"""What a hand-off costs in an arena that was never used, beside a used one and beside memcpy.

In each round, in turns: the blocks of a prompt are saved to slots and published, as the prefill
engine does it, then verified, loaded and verified again through a second mapping, as the decode
engine does it. One process does both, and one thread each.

    python benchmarks/fresh_arena.py [--quick]

writes results/fresh_arena.md beside this file.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from data_plane import FULL, LAYERS, RESULTS, Cache, Memcpy, block_ids, timed
from machine import machine

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.huge_pages import explain
from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.jobs import BATCH_BYTES
from omni_connector.runtime.turns import COPIES

PAGE_BYTES = 128 << 10  # 16 tokens of 8 heads of 128 float32, keys and values
BLOCKS = 128
USED, AT_ONCE, POPULATED, NEVER = KINDS = (
    "used before",
    "fresh, at once",
    "fresh, populated",
    "fresh, prefault off",
)
TARGET = 1.5


class Pair:
    """An arena and a reader's view of it.

    Args:
        slots: of the arena.
        slot_bytes: of each slot.
        prefault: whether it is populated in the background, as engines have it.
    """

    def __init__(self, slots: int, slot_bytes: int, prefault: bool) -> None:
        self.arena = Arena.create(slots, slot_bytes, prefault=prefault)
        self.view = ArenaView.open(
            self.arena.fd,
            epoch=self.arena.epoch,
            n_slots=slots,
            slot_bytes=slot_bytes,
            prefault=prefault,
        )
        self.generation = 0

    def wait(self) -> None:
        """Until all of it is there, and mapped by both."""
        for half in (self.arena, self.view):
            if half._prefaulter is not None:
                half._prefaulter._thread.join(600.0)

    def close(self) -> None:
        self.view.close()
        self.arena.close()


def batches(cache: Cache) -> list[slice]:
    size = max(1, BATCH_BYTES // cache.layout.slot_bytes)
    return [slice(at, at + size) for at in range(0, BLOCKS, size)]


def save(pair: Pair, cache: Cache, blocks: np.ndarray) -> None:
    pair.generation += 1
    slots = np.arange(BLOCKS, dtype=np.int64)
    length = cache.layout.group_bytes[0]
    with COPIES:
        for batch in batches(cache):
            for slot in slots[batch].tolist():
                pair.arena.begin_write(slot, pair.generation)
            sums = cache.copier.save(
                BlockCopy(0, blocks[batch], pair.arena.slots, slots[batch], True)
            )
            assert sums is not None  # as they were asked for
            for slot, each in zip(slots[batch].tolist(), sums.tolist(), strict=True):
                pair.arena.publish(slot, pair.generation, b"", length, each)


def load(pair: Pair, cache: Cache, blocks: np.ndarray) -> None:
    slots = np.arange(BLOCKS, dtype=np.int64)
    with COPIES:
        for batch in batches(cache):
            wanted = [
                pair.view.verify(slot, pair.generation).checksum for slot in slots[batch].tolist()
            ]
            sums = cache.copier.load(
                BlockCopy(0, blocks[batch], pair.view.slots, slots[batch], True)
            )
            for slot in slots[batch].tolist():
                pair.view.verify(slot, pair.generation)
            if sums.tolist() != wanted:
                raise SystemExit("the bytes that arrived are not those that were sent")


def measure(rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """For each kind of arena, in each round: seconds of a memcpy, of the save and of the load."""
    ours, theirs = (Cache(FULL, PAGE_BYTES, BLOCKS * 3 // 2, seed) for seed in (1, None))
    blocks = block_ids("scattered", BLOCKS, BLOCKS * 3 // 2)
    memcpy = Memcpy(ours.payload(BLOCKS))
    geometry = BLOCKS, ours.layout.slot_bytes
    used = Pair(*geometry, True)
    used.wait()
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}

    def once(pair: Pair) -> tuple[float, float, float]:
        halves = []

        def both() -> None:
            for half, cache in ((save, ours), (load, theirs)):
                halves.append(timed(bind(half, pair, cache, blocks)))

        plain, _ = memcpy.beside(ours.payload(BLOCKS), both)
        return plain, halves[0], halves[1]

    once(used)
    for turn in range(rounds):
        for kind in KINDS if turn % 2 else KINDS[::-1]:
            pair = used if kind == USED else Pair(*geometry, kind != NEVER)
            if kind == POPULATED:
                pair.wait()
            found[kind].append(once(pair))
            if kind != USED:
                pair.close()
            time.sleep(0.05)
    used.close()
    return found


def bind(half: Callable[..., None], *given: Any) -> Callable[[], None]:
    return lambda: half(*given)


def markdown(found: dict[str, list[tuple[float, float, float]]], command: str, size: int) -> str:
    """The table."""
    rounds = len(found[USED])
    lines = [
        "# A hand-off in an arena that was never used",
        "",
        f"`{command}`: {machine()}, numpy {np.__version__}. Pages: {explain()}.",
        "",
        f"{size / 1e6:.0f} MB ({BLOCKS} scattered blocks of {LAYERS} layers, pages of "
        f"{PAGE_BYTES >> 10} KiB), with checksums. Milliseconds, medians of {rounds} rounds; the "
        "ratios are medians over the rounds, to the memcpy just before and after, and to the used "
        "arena of the same round. *at once*: right after the arena was made. *populated*: when its "
        "memory had been allocated in the background, and the reader had mapped it. *prefault "
        f"off*: each page is allocated at its first touch. To be {TARGET} or less beside the used "
        "one.",
        "",
        "| arena | memcpy | save | load | both | x memcpy | x used |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, samples in found.items():
        plain, saved, loaded = (
            statistics.median(column) * 1e3 for column in zip(*samples, strict=True)
        )
        both = [sum(sample[1:]) for sample in samples]
        copies = statistics.median(b / s[0] for b, s in zip(both, samples, strict=True))
        beside = statistics.median(
            b / sum(other[1:]) for b, other in zip(both, found[USED], strict=True)
        )
        lines.append(
            f"| {kind} | {plain:.1f} | {saved:.1f} | {loaded:.1f} | "
            f"{statistics.median(both) * 1e3:.1f} | {copies:.2f} | {beside:.2f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, and no file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    found = measure(5 if arguments.quick else 21)
    size = BLOCKS * PAGE_BYTES * LAYERS
    text = markdown(found, "python benchmarks/fresh_arena.py", size)
    print(text)
    if not arguments.quick:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "fresh_arena.md").write_text(text)


if __name__ == "__main__":
    main()
