# SPDX-License-Identifier: Apache-2.0
"""What it costs to load KV that several ranks hold from one copy, and not from one for each rank.

A rank fills its blocks from mapped slots of a peer with as many ranks: from the arena of its own
number, which holds all slots, or from the arenas of all ranks that hold the same, each of which
holds a stripe of the slots. These are all ranks with MLA, and those of one KV head with fewer heads
than ranks. The two take turns, each beside a numpy copy of as many bytes.

Ranks load the same blocks at once. So each could copy only its own stripe, to memory that all have,
from which all fill their blocks once it is complete. That takes turns, in processes, with ranks of
which each reads all stripes.

    python benchmarks/stripes.py [--quick] [--at-once]

writes results/stripes.md beside this file. The exit status is 1 if other bytes arrived.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from data_plane import KIB, RESULTS, Memcpy
from machine import machine
from unlike_engines import InPlace, fill, load_all

from omni_connector.arena.arena import Arena
from omni_connector.copy.choice import make_copier
from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.copy.jobs import LoadSpec
from omni_connector.copy.loading import Loader
from omni_connector.kv.canonical import (
    CanonicalKVCaches,
    GroupSpec,
    LayerSpec,
    SlotLayout,
    canonicalize,
)
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import BlockSpans
from omni_connector.kv.stripes import by_stripe
from omni_connector.runtime.context import PROCESS_CONTEXT

RANKS = (2, 4, 8)
AT_ONCE = (2, 4)  # processes
NEVER_S = 1e6
MEET_S = 60.0  # longest wait of processes for each other

# Bytes of a page in KiB, and layers: those of DeepSeek V3, whose latents have 1,152 bytes a token,
# with blocks of 64 and of 16 tokens; one of the 4 KV heads of Qwen3 235B, which 2 ranks hold at TP
# 8; and many small blocks.
MODELS = {
    "64 tokens of DeepSeek V3": (72, 61),
    "16 tokens of DeepSeek V3": (18, 61),
    "16 tokens of a head of Qwen3 235B": (8, 94),
    "64 KiB": (16, 4),
}


def caches(page_bytes: int, layers: int, count: int) -> tuple[CanonicalKVCaches, torch.Tensor]:
    """KV caches of twice as many blocks as are loaded, and their pages by layer and block."""
    names = [f"model.layers.{number}" for number in range(layers)]
    buffer = torch.ones(layers * 2 * count * page_bytes, dtype=torch.int8)
    pages = buffer.view(layers, 2 * count, 1, 1, page_bytes)
    specs = tuple(LayerSpec(name, page_bytes, page_bytes) for name in names)
    views = {name: pages[number] for number, name in enumerate(names)}
    return canonicalize([GroupSpec("mla_attention", 1, specs)], views, 2 * count), pages


class Load:
    """Rank 0 of an engine, and the arenas of a peer like it.

    Args:
        page_bytes, layers: of the model.
        ranks: of each engine.
        stripes: over which the peer's slots are spread: `ranks` or 1.
        count: blocks that are loaded.
        stack: closes all.
    """

    def __init__(
        self,
        page_bytes: int,
        layers: int,
        ranks: int,
        stripes: int,
        count: int,
        stack: ExitStack,
    ) -> None:
        canonical, pages = caches(page_bytes, layers, count)
        group = GroupShape(
            kind="mla_attention",
            block_size=1,
            attention_type="all",
            layers=str(layers),
            replicated=True,
            pages=(f"C{page_bytes}",) * layers,
        )
        layout = SlotLayout.of(canonical)
        size = layout.group_bytes[0]
        transports = InPlace()
        arenas = []
        self._first = np.empty(0, np.uint8)
        rows = {rank: each for rank, _, each in by_stripe(np.arange(count), stripes)}
        for rank in range(ranks):
            # Of the copies of all ranks, this one reads its own.
            held = rows.get(rank, np.empty(0, np.int64))
            arena = stack.enter_context(Arena.create(max(1, len(held)), layout.slot_bytes))
            fill(arena, len(held), size, rank)
            if rank == 0:
                self._first = arena.slots[0, :size]
            arenas.append((transports.add(arena, f"{rank}"),))
        peer: Any = transports
        self._loader = Loader(
            transports=peer,
            copier=make_copier(canonical, layout),
            layout=layout,
            groups=(group,),
            rank=0,
            ranks=ranks,
            stripes=stripes,
            checksum=True,
            context=PROCESS_CONTEXT,
            notify=lambda: None,
        )
        stack.callback(self._loader.close)
        blocks = np.random.default_rng(7).permutation(2 * count)[:count]
        self.payload = count * size
        self._pages = pages
        self._block = int(blocks[0])
        self._spec = LoadSpec(
            request_id="r",
            blocks=BlockSpans.of([(0, blocks.tolist())]),
            slots=BlockSpans.of([(0, list(range(count)))]),
            generations=np.ones(count, np.int64),
            arenas=tuple(arenas),
            timeout=NEVER_S,
        )

    def run(self) -> None:
        """Load all."""
        load_all(self._loader, self._spec)

    def is_right(self) -> bool:
        """Whether the first block holds the first slot."""
        found = self._pages[:, self._block].numpy().view(np.uint8).reshape(-1)
        return bool(np.array_equal(found, self._first))


def measure(
    page_kib: int, layers: int, ranks: int, megabytes: int, repeats: int
) -> tuple[float, float, float, bool]:
    """Medians: GB/s from copies and from stripes, and the time from copies by that from stripes."""
    page_bytes = page_kib * KIB
    count = max(2 * ranks, megabytes * 1_000_000 // (page_bytes * layers))
    with ExitStack() as stack:
        loads = [Load(page_bytes, layers, ranks, each, count, stack) for each in (1, ranks)]
        memcpy = Memcpy(loads[0].payload)
        ratios: list[tuple[float, float]] = []
        speeds: tuple[list[float], list[float]] = [], []
        for turn in range(repeats + 1):
            relative = []
            order = loads if turn % 2 else loads[::-1]
            for load in order:
                copied, took = memcpy.beside(load.payload, load.run)
                relative.append(took / copied)
                if turn:  # the first touches what no later one has to
                    speeds[loads.index(load)].append(load.payload / took / 1e9)
            of_copies, of_stripes = relative if turn % 2 else relative[::-1]
            if turn:
                ratios.append((of_copies, of_stripes))
        ratio = statistics.median(copies / stripes for copies, stripes in ratios)
        right = all(load.is_right() for load in loads)
        return statistics.median(speeds[0]), statistics.median(speeds[1]), ratio, right


@dataclass(frozen=True)
class AtOnce:
    """Ranks that load the same blocks at once.

    Attributes:
        page_bytes, layers: of the model.
        ranks, count: how many ranks load, and blocks that each of them loads.
        slot_bytes: of a slot of all layers.
        folder: has the shared memory.
    """

    page_bytes: int
    layers: int
    ranks: int
    count: int
    slot_bytes: int
    folder: str

    def shared(self, name: str) -> np.ndarray:
        """Slots in shared memory, `(count, slot_bytes)`."""
        path, shape = Path(self.folder) / name, (self.count, self.slot_bytes)
        mode: Literal["r+", "w+"] = "r+" if path.exists() else "w+"
        return np.asarray(np.memmap(path, np.uint8, mode, shape=shape))


class AtOnceRank:
    """One of these ranks, in a process of its own. Each way to load ends with all blocks filled."""

    def __init__(self, setting: AtOnce, rank: int, between: Barrier) -> None:
        canonical, self._pages = caches(setting.page_bytes, setting.layers, setting.count)
        self._copier: BlockCopier = make_copier(canonical, SlotLayout.of(canonical))
        draw = np.random.default_rng(rank)
        self._blocks = draw.permutation(2 * setting.count)[: setting.count]
        self._between = between
        self._slots, self._staged = setting.shared("slots"), setting.shared("staged")
        self._stripes = [at for _, at, _ in by_stripe(np.arange(setting.count), setting.ranks)]
        self._own = self._stripes[rank]
        # The shared memory is to its copier a cache of one layer, in which a block is a slot.
        size = setting.slot_bytes
        view = torch.from_numpy(self._staged.view(np.int8)).view(setting.count, 1, 1, size)
        spec = GroupSpec("mla_attention", 1, (LayerSpec("staged", size, size),))
        shared = canonicalize([spec], {"staged": view}, setting.count)
        self._stager: BlockCopier = make_copier(shared, SlotLayout.of(shared))

    def read_all(self) -> None:
        """Load each stripe from its slots, with checksums."""
        for at in self._stripes:
            self._copier.load(BlockCopy(0, self._blocks[at], self._slots, at, checksum=True))

    def through_shared_memory(self) -> None:
        """Copy the own stripe with checksums, and load all when every rank has copied its own."""
        self._stager.load(BlockCopy(0, self._own, self._slots, self._own, checksum=True))
        self._between.wait(MEET_S)
        every = np.arange(len(self._blocks))
        self._copier.load(BlockCopy(0, self._blocks, self._staged, every, checksum=False))

    def is_right(self) -> bool:
        """Whether each block holds its slot; then none does."""
        size = self._pages.shape[0] * self._pages.shape[-1]
        right = True
        for block, slot in zip(self._blocks, self._slots, strict=True):
            page = self._pages[:, int(block)].numpy().view(np.uint8)
            right = right and np.array_equal(page.reshape(-1), slot[:size])
        self._pages.zero_()
        return right


WAYS: tuple[Callable[[AtOnceRank], None], ...] = (
    AtOnceRank.read_all,
    AtOnceRank.through_shared_memory,
)


def order_of(turn: int) -> list[int]:
    """In which order the ways take their turns."""
    return [0, 1] if turn % 2 else [1, 0]


def load_at_once(
    setting: AtOnce, rank: int, turns: int, meet: Barrier, between: Barrier, right: Any
) -> None:
    """The process of a rank: loads in turns, and checks the first turn."""
    torch.set_num_threads(1)
    one = AtOnceRank(setting, rank, between)
    found = True
    for turn in range(turns):
        for way in order_of(turn):
            meet.wait(MEET_S)
            WAYS[way](one)
            meet.wait(MEET_S)
            if turn == 0:
                found = one.is_right() and found
    right[rank] = found


def measure_at_once(
    page_kib: int, layers: int, ranks: int, megabytes: int, repeats: int
) -> tuple[float, float, float, bool]:
    """Medians: GB/s of each rank that reads all and that reads shared memory, and the time of the
    second way by that of the first."""
    page_bytes = page_kib * KIB
    count = max(2 * ranks, megabytes * 1_000_000 // (page_bytes * layers))
    payload = count * page_bytes * layers
    slot_bytes = SlotLayout.of(caches(page_bytes, layers, 1)[0]).slot_bytes
    context = multiprocessing.get_context("spawn")
    meet, between = context.Barrier(ranks + 1), context.Barrier(ranks)
    right = context.Array("b", ranks)
    took: tuple[list[float], list[float]] = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        setting = AtOnce(page_bytes, layers, ranks, count, slot_bytes, folder)
        draw = np.random.default_rng(5)
        setting.shared("slots")[:] = draw.integers(0, 256, (count, slot_bytes), np.uint8)
        setting.shared("staged")
        processes = [
            context.Process(
                target=load_at_once,
                args=(setting, rank, repeats + 1, meet, between, right),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for turn in range(repeats + 1):
            for way in order_of(turn):
                meet.wait(MEET_S)
                started = time.perf_counter()
                meet.wait(MEET_S)
                if turn:  # the first touches what no later one has to
                    took[way].append(time.perf_counter() - started)
        for process in processes:
            process.join(MEET_S)
    ratio = statistics.median(ours / all_ for all_, ours in zip(*took, strict=True))
    speeds = [payload / statistics.median(each) / 1e9 for each in took]
    return speeds[0], speeds[1], ratio, all(right[:])


def main() -> int:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument("--at-once", action="store_true", help="the second table, printed only")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    megabytes, repeats = (64, 5) if arguments.quick else (512, 21)
    command = " ".join(["python benchmarks/stripes.py", *sys.argv[1:]])
    lines = [
        "# Loads of KV that several ranks hold",
        "",
        f"`{command}`: {machine()}.",
        "",
        "One rank loads from mapped slots, with checksums and one thread, into scattered blocks: "
        "from one arena with all slots, as where each rank keeps a copy, and from the arenas of "
        "all ranks that hold the same, each with a stripe of them. Medians of "
        f"{repeats} rounds, GB/s; *ratio*: the time from copies by the time from stripes, each in "
        "numpy copies of as many bytes just before and after. Above 1 stripes are faster.",
        "",
        "| a block | ranks | arenas hold | copies | stripes | ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    right = True
    for name, (page_kib, layers) in () if arguments.at_once else MODELS.items():
        for ranks in RANKS:
            copies, stripes, ratio, these = measure(page_kib, layers, ranks, megabytes, repeats)
            right = right and these
            lines.append(
                f"| {name} | {ranks} | 1/{ranks} | {copies:.2f} | {stripes:.2f} | {ratio:.2f} |"
            )
    lines += [
        "",
        "## Ranks that load at once",
        "",
        "Ranks in processes of their own fill their blocks with the same slots, with checksums and "
        "one thread each: either every rank reads the slots of all stripes, or each copies its own "
        "stripe to shared memory and, when all have, fills its blocks from there. Medians of "
        f"{repeats} rounds in both orders, GB/s of each rank, until the last has all; *ratio*: the "
        "time through shared memory by the time of ranks that read all. Above 1 reading all is "
        "faster.",
        "",
        "| a block | ranks | read all | through shared memory | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (page_kib, layers) in MODELS.items():
        for ranks in AT_ONCE:
            each, passed, ratio, these = measure_at_once(
                page_kib, layers, ranks, megabytes // 4, repeats
            )
            right = right and these
            row = f"| {name} | {ranks} | {each:.2f} | {passed:.2f} | {ratio:.2f} |"
            print(row, flush=True)
            lines.append(row)
    if arguments.at_once:
        return int(not right)
    text = "\n".join([*lines, ""])
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "stripes.md").write_text(text)
    print(text)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
