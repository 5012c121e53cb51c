# SPDX-License-Identifier: Apache-2.0
"""What it costs to load KV that several ranks hold from one copy, and not from one for each rank.

A rank fills its blocks from mapped slots of a peer with as many ranks: from the arena of its own
number, which holds all slots, or from the arenas of all ranks that hold the same, each of which
holds a stripe of the slots. These are all ranks with MLA, and those of one KV head with fewer heads
than ranks. The two take turns, each beside a numpy copy of as many bytes.

    python benchmarks/stripes.py [--quick]

writes results/stripes.md beside this file. The exit status is 1 if other bytes arrived.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_plane import KIB, RESULTS, Memcpy, machine
from unlike_engines import InPlace, fill, load_all

from omni_connector.arena.arena import Arena
from omni_connector.copy.choice import make_copier
from omni_connector.copy.jobs import LoadSpec
from omni_connector.copy.loading import Loader
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import BlockSpans
from omni_connector.kv.stripes import by_stripe
from omni_connector.runtime.context import PROCESS_CONTEXT

RANKS = (2, 4, 8)
NEVER_S = 1e6

# Bytes of a page in KiB, and layers: those of DeepSeek V3, whose latents have 1,152 bytes a token,
# with blocks of 64 and of 16 tokens; one of the 4 KV heads of Qwen3 235B, which 2 ranks hold at TP
# 8; and many small blocks.
MODELS = {
    "64 tokens of DeepSeek V3": (72, 61),
    "16 tokens of DeepSeek V3": (18, 61),
    "16 tokens of a head of Qwen3 235B": (8, 94),
    "64 KiB": (16, 4),
}


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
        names = [f"model.layers.{number}" for number in range(layers)]
        buffer = torch.ones(layers * 2 * count * page_bytes, dtype=torch.int8)
        pages = buffer.view(layers, 2 * count, 1, 1, page_bytes)
        specs = tuple(LayerSpec(name, page_bytes, page_bytes) for name in names)
        canonical = canonicalize(
            [GroupSpec("mla_attention", 1, specs)],
            {name: pages[number] for number, name in enumerate(names)},
            2 * count,
        )
        group = GroupShape(
            kind="mla_attention",
            block_size=1,
            attention_type="all",
            layers=" ".join(names),
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


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
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
    for name, (page_kib, layers) in MODELS.items():
        for ranks in RANKS:
            copies, stripes, ratio, these = measure(page_kib, layers, ranks, megabytes, repeats)
            right = right and these
            lines.append(
                f"| {name} | {ranks} | 1/{ranks} | {copies:.2f} | {stripes:.2f} | {ratio:.2f} |"
            )
    text = "\n".join([*lines, ""])
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "stripes.md").write_text(text)
    print(text)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
