# SPDX-License-Identifier: Apache-2.0
"""What a rank pays that loads KV from an engine unlike its own, beside one that is alike.

A rank with 8 of 16 layers, or all of them, fills its blocks from mapped slots of a peer: of an
engine like its own, of other pipeline stages, of other tensor-parallel sizes, and with other block
sizes. Each load is timed beside a numpy copy of as many bytes as it fills, just before and after,
and the loads take turns.

    python benchmarks/unlike_engines.py [--quick]

writes results/unlike_engines.md beside this file. The exit status is 1 if other bytes arrived.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from machine import KIB, RESULTS, Memcpy, machine

from omni_connector.arena.arena import Arena
from omni_connector.copy.choice import make_copier
from omni_connector.copy.jobs import LoadSpec
from omni_connector.copy.loading import Loader
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import BlockSpans
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.transports import Endpoint
from omni_connector.transports.peer_arenas import OwnArena

LAYERS, HEADS, TOKENS = 16, 8, 16
STAGES = tuple(f"model.layers.{number}" for number in range(LAYERS))
NEVER_S = 1e6


@dataclass(frozen=True)
class Shape:
    """One side.

    Attributes:
        layers: of each pipeline stage.
        ranks: tensor-parallel size.
        block_size: tokens of a block.
    """

    layers: tuple[int, ...] = (LAYERS,)
    ranks: int = 1
    block_size: int = TOKENS


@dataclass(frozen=True)
class Scene:
    """What is read, and by whom.

    Attributes:
        name: as in the table.
        peer, ours: the two sides; rank 0 of stage 0 of ours reads.
    """

    name: str
    peer: Shape
    ours: Shape


HALF = (LAYERS // 2,) * 2
SCENES = (
    Scene("alike, 16 layers", Shape(), Shape()),
    Scene("alike, 8 layers of stage 0", Shape(HALF), Shape(HALF)),
    Scene("PP 1 to PP 2: 8 of 16 layers", Shape(), Shape(HALF)),
    Scene("PP 2 to PP 1: 16 layers of two stages", Shape(HALF), Shape()),
    Scene("TP 1 to TP 2: half of the heads", Shape(), Shape(ranks=2)),
    Scene("TP 2 to TP 1: heads of two ranks", Shape(ranks=2), Shape()),
    Scene("blocks of 32 to blocks of 16 tokens", Shape(block_size=2 * TOKENS), Shape()),
    Scene("blocks of 16 to blocks of 32 tokens", Shape(), Shape(block_size=2 * TOKENS)),
)


class InPlace:
    """Attaches arenas of this process."""

    supports_mapping = True

    def __init__(self) -> None:
        self._arenas: dict[str, OwnArena] = {}

    def add(self, arena: Arena, name: str) -> Endpoint:
        """Make an arena known under a name."""
        endpoint = Endpoint.of(arena, "shm", name)
        self._arenas[name] = OwnArena(endpoint, arena)
        return endpoint

    def choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[Any, Endpoint]:
        """See `Transports`."""
        return self, endpoints[0]

    def attach(self, endpoint: Endpoint, *, timeout: float) -> OwnArena:
        """See `ArenaTransport`."""
        return self._arenas[endpoint.address]


def fill(arena: Arena, slots: int, size: int, seed: int) -> None:
    """Publish the first slots of an arena, with `size` random bytes each, in generation 1."""
    draw = np.random.default_rng(seed)
    for slot in range(slots):
        arena.begin_write(slot, 1)
        content = arena.slots[slot, :size]
        content[:] = draw.integers(0, 256, size, np.uint8)
        arena.publish(slot, 1, b"", size, xxhash.xxh3_64_intdigest(content.data))


def load_all(loader: Loader, spec: LoadSpec) -> None:
    """Do a load on this thread."""
    work = loader.work(1, spec, None)(lambda: False)
    while True:
        try:
            waits = next(work)
        except StopIteration as end:
            if end.value.failure is not None:
                raise SystemExit(f"a load failed: {end.value.failure}") from None
            return
        if waits is not True:  # for its arenas, at the first time
            time.sleep(0.001)


def shapes(side: Shape, head_bytes: int) -> list[GroupShape]:
    """The only group, in each stage."""
    page = f"H{HEADS // side.ranks}.N{side.block_size}.C{head_bytes}"
    found: list[GroupShape] = []
    first = 0
    for count in side.layers:
        names = STAGES[first : first + count]
        first += count
        found.append(
            GroupShape(
                kind="full_attention",
                block_size=side.block_size,
                attention_type="all",
                layers=" ".join(names),
                pages=(page,) * count,
                names=names,
            )
        )
    return found


def compatibility(side: Shape, head_bytes: int) -> CompatibilityKey:
    """What a side says of itself."""
    first, *later = ((group,) for group in shapes(side, head_bytes))
    return CompatibilityKey(
        model="m",
        dtype="bfloat16",
        kv_dtype="auto",
        integrity="full",
        kv_heads=HEADS,
        ranks=side.ranks,
        groups=first,
        later_stages=tuple(later) or msgspec.UNSET,
    )


class Load:
    """One scene: a rank, and the arenas that it reads.

    Args:
        scene: which.
        head_bytes: of the keys and values of a token and head.
        tokens: that are loaded.
        stack: closes all.
    """

    def __init__(self, scene: Scene, head_bytes: int, tokens: int, stack: ExitStack) -> None:
        self.scene = scene
        ours = shapes(scene.ours, head_bytes)[0]
        page_bytes = HEADS // scene.ours.ranks * scene.ours.block_size * head_bytes
        count = tokens // scene.ours.block_size
        buffer = torch.ones(len(ours.pages) * 2 * count * page_bytes, dtype=torch.int8)
        pages = buffer.view(
            len(ours.pages), 2 * count, HEADS // scene.ours.ranks, scene.ours.block_size, head_bytes
        )
        specs = tuple(LayerSpec(name, page_bytes, page_bytes) for name in STAGES[: len(pages)])
        canonical = canonicalize(
            [GroupSpec("full_attention", scene.ours.block_size, specs)],
            {name: pages[number] for number, name in enumerate(STAGES[: len(pages)])},
            2 * count,
        )
        layout = SlotLayout.of(canonical)
        transports = InPlace()
        key = compatibility(scene.peer, head_bytes)
        slots = tokens // scene.peer.block_size
        self._content: list[np.ndarray] = []
        arenas = []
        for number in range(key.num_arenas):
            shape = key.stages[number // scene.peer.ranks][0]
            size = len(shape.pages) * scene.peer.block_size * head_bytes * shape.heads[0]
            arena = stack.enter_context(Arena.create(slots, size))
            fill(arena, slots, size, number)
            self._content.append(arena.slots)
            arenas.append((transports.add(arena, f"{number}"),))
        peer: Any = transports
        self._loader = Loader(
            transports=peer,
            copier=make_copier(canonical, layout),
            layout=layout,
            groups=(ours,),
            rank=0,
            ranks=scene.ours.ranks,
            checksum=True,
            context=PROCESS_CONTEXT,
            notify=lambda: None,
        )
        stack.callback(self._loader.close)
        blocks = np.random.default_rng(7).permutation(2 * count)[:count]
        self.payload = count * layout.group_bytes[0]
        self._pages, self._blocks = pages, blocks
        self._spec = LoadSpec(
            request_id="r",
            blocks=BlockSpans.of([(0, blocks.tolist())]),
            slots=BlockSpans.of([(0, list(range(slots)))]),
            generations=np.ones(slots, np.int64),
            arenas=tuple(arenas),
            timeout=NEVER_S,
            source=None if scene.peer == scene.ours else key,
        )

    def run(self) -> None:
        """Load all."""
        load_all(self._loader, self._spec)

    def is_right(self) -> bool:
        """Whether the first token's first byte of each layer and head is the peer's."""
        peer, ours = self.scene.peer, self.scene.ours
        for layer in range(len(self._pages)):
            stage, place = divmod(layer, peer.layers[0])
            for head in range(HEADS // ours.ranks):
                rank, at = divmod(head, HEADS // peer.ranks)
                content = self._content[stage * peer.ranks + rank][0]
                theirs = content.reshape(peer.layers[0], HEADS // peer.ranks, -1)[place, at, 0]
                found = self._pages[layer, self._blocks[0], head, 0, 0].numpy().view(np.uint8)
                if found != theirs:
                    return False
        return True


def measure(
    page_kib: int, megabytes: int, repeats: int
) -> tuple[list[tuple[float, float, float]], bool]:
    """For each scene memcpy and load in GB/s, and the median of memcpy's time by the load's."""
    head_bytes = page_kib * KIB // (HEADS * TOKENS)
    tokens = megabytes * 1_000_000 // (page_kib * KIB * LAYERS) // 2 * 2 * TOKENS
    with ExitStack() as stack:
        loads = [Load(scene, head_bytes, tokens, stack) for scene in SCENES]
        memcpy = Memcpy(max(load.payload for load in loads))
        samples: list[list[tuple[float, float]]] = [[] for _ in loads]
        for turn in range(repeats + 1):
            for load, found in zip(loads, samples, strict=True):
                seconds = memcpy.beside(load.payload, load.run)
                if turn:  # the first touches what no later one has to
                    found.append(seconds)
        rows = [
            (
                load.payload / statistics.median(m for m, _ in found) / 1e9,
                load.payload / statistics.median(took for _, took in found) / 1e9,
                statistics.median(took / m for m, took in found),
            )
            for load, found in zip(loads, samples, strict=True)
        ]
        return rows, all(load.is_right() for load in loads)


def markdown(tables: dict[int, Sequence[tuple[float, ...]]], command: str, repeats: int) -> str:
    """The tables."""
    lines = [
        "# Loads from engines that differ",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"{LAYERS} layers of {HEADS} KV heads. One thread loads from mapped slots, with checksums, "
        f"into scattered blocks. Medians of {repeats} rounds; GB/s of the bytes that are filled. "
        "*memcpies*: the time of a load in numpy copies of as many bytes, just before and after.",
    ]
    for page_kib, rows in tables.items():
        lines += [
            "",
            f"## Pages of {page_kib} KiB",
            "",
            "| the peer | memcpy | load | memcpies |",
            "|---|---:|---:|---:|",
        ]
        lines += [
            f"| {scene.name} | {row[0]:.1f} | {row[1]:.1f} | {row[2]:.2f} |"
            for scene, row in zip(SCENES, rows, strict=True)
        ]
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    megabytes, repeats = (32, 5) if arguments.quick else (256, 15)
    tables: dict[int, Sequence[tuple[float, ...]]] = {}
    right = True
    for page_kib in (16, 128):
        tables[page_kib], these = measure(page_kib, megabytes, repeats)
        right = right and these
    command = " ".join(["python benchmarks/unlike_engines.py", *sys.argv[1:]])
    text = markdown(tables, command, repeats)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "unlike_engines.md").write_text(text)
    print(text)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
