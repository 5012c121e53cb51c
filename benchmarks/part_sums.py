# SPDX-License-Identifier: Apache-2.0
"""What sums at the ends of parts cost a save, and what they spare a load of half of the layers.

Slots of several sizes and numbers of layers. Blocks are saved with the slots' checksums alone, and
with the sums of their parts, too, both in one go and layer by layer. Half of the layers are loaded
from slots that hold nothing else, from slots of all layers by their parts, and from such slots as a
whole. All in turns, in one process and the same memory, by processor time, each beside a numpy copy
of as many bytes.

    python benchmarks/part_sums.py [--quick] [--beside COMMIT]

writes results/part_sums.md beside this file. The exit status is 1 if other bytes arrived. With
`--beside`, saves of the package at that commit are measured in turns with those of this one, in the
same process and from and to the same memory.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from data_plane import KIB, RESULTS
from machine import machine
from paired import checkout

from omni_connector.arena.arena import Arena
from omni_connector.arena.part_sums import PartSums, SumsLayout
from omni_connector.copy.choice import make_copier
from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.copy.jobs import batch_blocks
from omni_connector.copy.layered import LayerRanges
from omni_connector.copy.native import SUMS, begin
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize
from omni_connector.kv.convert import PageRun
from omni_connector.kv.parts import inner_ends

SLOTS_KIB = (32, 512, 4096)
LAYERS = (2, 16, 64)


class Cache:
    """A KV cache of so many layers, and its copier."""

    def __init__(self, layers: int, page_bytes: int, blocks: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.buffer = torch.zeros(layers * blocks * page_bytes, dtype=torch.int8)
        self.buffer.numpy()[:] = draw.integers(-128, 128, len(self.buffer), np.int8)
        self.pages = self.buffer.view(layers, blocks, 1, 1, page_bytes)
        self.names = names = [f"layers.{number}" for number in range(layers)]
        specs = tuple(LayerSpec(name, page_bytes, page_bytes) for name in names)
        views = dict(zip(names, self.pages, strict=True))
        canonical = canonicalize([GroupSpec("full_attention", 16, specs)], views, blocks)
        self.layout = SlotLayout.of(canonical)
        addresses = [{name: view.data_ptr() for name, view in views.items()}]
        self.layer_ranges = LayerRanges.of(canonical, self.layout, addresses)
        self.copier: BlockCopier = make_copier(
            self.layer_ranges.canonical, self.layer_ranges.layout
        )


class Case:
    """Slots of one size and number of layers.

    Args:
        slot_bytes, layers: of them.
        moved: bytes of blocks.
    """

    def __init__(self, slot_bytes: int, layers: int, moved: int) -> None:
        page_bytes = slot_bytes // layers
        self.count = moved // slot_bytes
        self.length = slot_bytes
        self.cut = layers // 2 * page_bytes
        self.full = Cache(layers, page_bytes, 2 * self.count, seed=1)
        self.half = Cache(layers // 2, page_bytes, 2 * self.count, seed=2)
        self.ends = inner_ends([page_bytes] * layers)
        n_slots = self.count + max(1, self.count // 64) + 64
        layout = SumsLayout.of(n_slots, slot_bytes, len(self.ends))
        assert layout is not None
        self.row_bytes = 8 * layout.row_words
        self.arena = Arena.create(n_slots, slot_bytes)
        self.sums = PartSums.create(self.arena, layout)
        self.halves = Arena.create(self.count, self.half.layout.slot_bytes)
        self.arena.slots[: self.count] = 1
        self.halves.slots[:] = 1
        draw = np.random.default_rng(7)
        # Block 0 is the null block.
        self.blocks = 1 + draw.permutation(2 * self.count - 1)[: self.count].astype(np.int64)
        self.slots = np.arange(self.count, dtype=np.int64)
        # A state at the end of each half, whatever its layers are cut to.
        self.end = min(end for end in (*self.ends, slot_bytes) if end >= self.cut)
        self.generation = 0

    def load_alike(self) -> None:
        """Load slots that hold half of the layers."""
        for some in self._batches(self.half):
            ids = self.blocks[some], self.halves.slots, self.slots[some]
            self.half.copier.load(BlockCopy(0, *ids, checksum=True))

    def load_half(self, *, by_parts: bool) -> None:
        """Load the first half of the layers from slots of all."""
        runs = [PageRun(0, 0, self.cut)]
        copier = self.half.copier
        for some in self._batches(self.half):
            ids = self.blocks[some], self.arena.slots, self.slots[some]
            if not by_parts:
                found = copier.load_pages(BlockCopy(0, *ids, checksum=True), runs, self.length)
                headers = [self.arena.verify(slot, self.generation) for slot in some.tolist()]
                if found is None or found.tolist() != [each.checksum for each in headers]:
                    raise SystemExit("other bytes have arrived")
                continue
            sums = self.sums.read(some, np.full(len(some), self.generation), len(self.ends))
            states = begin(len(some), self.length)
            copy = BlockCopy(0, *ids, checksum=True, states=states)
            hashed = 0, self.end
            if sums is None or copier.load_pages(copy, runs, self.length, hashed) is None:
                raise SystemExit("there are no sums")
            if not (states[:, :SUMS] == sums[:, self.ends.index(self.end)]).all():
                raise SystemExit("other bytes have arrived")

    def is_right(self) -> bool:
        """Whether the half is that of the saved blocks."""
        half = self.half.pages[:, self.blocks]
        return torch.equal(half, self.full.pages[: len(half), self.blocks])

    def close(self) -> None:
        """Let go of the memory."""
        self.arena.close()
        self.halves.close()

    def _batches(self, cache: Cache) -> list[np.ndarray]:
        size = batch_blocks(cache.layout)[0]
        return [self.slots[at : at + size] for at in range(0, self.count, size)]


def processor_time(work: Callable[[], object]) -> float:
    """Seconds of this thread, user and system."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


MODULES: Final = (
    *("kv.canonical", "kv.spans", "copy.choice", "copy.jobs", "copy.layered", "copy.native"),
    "copy.threads",
)

Package = dict[str, ModuleType]


def ours() -> Package:
    """The modules of this package."""
    return {name: importlib.import_module(f"omni_connector.{name}") for name in MODULES}


@contextmanager
def package(tree: Path) -> Iterator[Package]:
    """The modules of another tree's package, loaded beside those of this one."""
    loaded = {name: each for name, each in sys.modules.items() if name.startswith("omni_connector")}
    for name in loaded:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    try:
        found = {name: importlib.import_module(f"omni_connector.{name}") for name in MODULES}
        assert all(str(tree) in str(each.__file__) for each in found.values())
        found["copy.native"].native_copy()  # looks for its code by the package's name
    finally:
        sys.path.remove(str(tree))
        for name in [each for each in sys.modules if each.startswith("omni_connector")]:
            del sys.modules[name]
        sys.modules.update(loaded)
    yield found


class Jobs:
    """Save jobs of one package, of the blocks and to the slots of a case.

    Args:
        modules: of the package.
        case: whose memory is read and written.
        sums: given to the saver, where the package knows sums.
    """

    def __init__(self, modules: Package, case: Case, **sums: Any) -> None:
        self._modules = modules
        self._case = case
        canonical = modules["kv.canonical"]
        cache = case.full
        views = dict(zip(cache.names, cache.pages, strict=True))
        size = cache.pages.shape[-1]
        specs = tuple(canonical.LayerSpec(name, size, size) for name in cache.names)
        groups = [canonical.GroupSpec("full_attention", 16, specs)]
        found = canonical.canonicalize(groups, views, cache.pages.shape[1])
        addresses = [{name: view.data_ptr() for name, view in views.items()}]
        ranges = modules["copy.layered"].LayerRanges.of(
            found, canonical.SlotLayout.of(found), addresses
        )
        copier = modules["copy.choice"].make_copier(ranges.canonical, ranges.layout)
        self._saver = modules["copy.jobs"].Saver(
            arena=case.arena, copier=copier, layer_ranges=ranges, checksum=True, **sums
        )

    def save(self, job: int, *, by_layer: bool) -> float:
        """Save all blocks, `job` of them at once; the seconds of a job."""
        case = self._case
        case.generation += 1
        spans = self._modules["kv.spans"].BlockSpans
        specs = [
            self._modules["copy.jobs"].SaveSpec(
                request_id="r",
                blocks=spans.of([(0, case.blocks[at : at + job])]),
                slots=case.slots[at : at + job],
                generations=np.full(len(case.slots[at : at + job]), case.generation),
                keys=[b""] * job,
            )
            for at in range(0, case.count, job)
        ]

        def save_all() -> None:
            for spec in specs:
                self._save(spec, by_layer)

        return processor_time(save_all) / len(specs)

    def _save(self, spec: object, by_layer: bool) -> None:
        forward = self._modules["copy.layered"].Forward()
        for name in self._case.full.names:
            forward.computed(name, None)
        if not by_layer:
            forward.end(None)
        pieces = self._saver.work(1, spec, forward)(lambda: False)
        while True:
            try:
                if next(pieces) == self._modules["copy.threads"].UNTIL_NOTIFIED:
                    forward.end(None)
            except StopIteration as end:
                if end.value.failure is not None:
                    raise SystemExit(f"a save failed: {end.value.failure}") from None
                return


def measure(slot_bytes: int, layers: int, moved: int, repeats: int) -> tuple[list[float], bool]:
    """A row of the table without its first two columns, and whether the right bytes arrived."""
    case = Case(slot_bytes, layers, moved)
    size = case.count * slot_bytes
    source = np.full(size, 3, np.uint8)
    target = np.full(size, 1, np.uint8)
    plain, summed = Jobs(ours(), case), Jobs(ours(), case, part_sums=case.sums)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "save": (size, lambda: plain.save(case.count, by_layer=False)),
        "with sums": (size, lambda: summed.save(case.count, by_layer=False)),
        "layers": (size, lambda: plain.save(case.count, by_layer=True)),
        "layers with sums": (size, lambda: summed.save(case.count, by_layer=True)),
        "alike": (size // 2, case.load_alike),
        "whole": (size // 2, lambda: case.load_half(by_parts=False)),
        "parts": (size // 2, lambda: case.load_half(by_parts=True)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    memcpies: dict[str, list[float]] = {name: [] for name in works}
    right = True
    for turn in range(repeats + 1):
        # Each comes before and after each other one as often.
        for name in list(works)[:: 1 if turn % 2 else -1]:
            if name == "parts":
                summed.save(case.count, by_layer=False)
            nbytes, work = works[name]
            copied = processor_time(partial(np.copyto, target[:nbytes], source[:nbytes]))
            took = processor_time(work)
            if turn:  # the first touches what no later one has to
                seconds[name].append(took)
                memcpies[name].append(took / copied)
            if name == "parts":
                right = right and case.is_right()
    case.close()

    def beside(name: str, other: str) -> float:
        pairs = zip(seconds[name], seconds[other], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)

    middle = {name: statistics.median(each) for name, each in memcpies.items()}
    return [
        len(case.ends) + 1,
        middle["save"],
        middle["with sums"],
        beside("with sums", "save"),
        middle["layers"],
        middle["layers with sums"],
        beside("layers with sums", "layers"),
        middle["alike"],
        middle["whole"],
        middle["parts"],
        beside("parts", "whole"),
        case.row_bytes / slot_bytes * 100,
    ], right


def beside(tree: Path, slot_bytes: int, layers: int, moved: int, repeats: int) -> list[float]:
    """A row of the second table without its first two columns."""
    case = Case(slot_bytes, layers, min(moved, 128 * slot_bytes))
    with package(tree) as there, package(tree) as again:
        sides = {
            "here": Jobs(ours(), case, part_sums=case.sums),
            "there": Jobs(there, case),
            "again": Jobs(again, case),
        }
        row: list[float] = []
        for job, by_layer in ((1, False), (8, False), (case.count, False), (1, True), (8, True)):
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(repeats + 1):
                order = list(sides)[turn % 3 :] + list(sides)[: turn % 3]
                for name in order[:: 1 if turn % 2 else -1]:
                    took = sides[name].save(job, by_layer=by_layer)
                    if turn:  # the first touches what no later one has to
                        seconds[name].append(took)
            if not row:
                row += [1e6 * statistics.median(seconds[name]) for name in ("there", "here")]
            for name in ("here", "again") if len(row) == 2 else ("here",):
                pairs = zip(seconds[name], seconds["there"], strict=True)
                row.append(statistics.median(theirs / own for own, theirs in pairs))
    case.close()
    return row


def second_table(rows: list[tuple[int, int, list[float]]], commit: str, repeats: int) -> str:
    """What the page says about another commit."""
    lines = [
        f"## Beside {commit}",
        "",
        "Saves with sums here, and saves of the package at that commit, which has none; both in "
        "one process, in turns, from and to the same memory. So these ratios are not those of the "
        "table above, which compares two savers of this package: what has become faster here "
        "since that commit is in both of them. *µs*: of a job of a single block. "
        "Ratios are of speeds, here by there: medians "
        f"of {repeats} rounds of processor time. *itself*: that package, loaded twice, beside "
        "itself.",
        "",
        "| slot KiB | layers | µs there | µs here | 1 block | itself | 8 blocks | all blocks "
        "| by layer, 1 block | by layer, 8 |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for slot_kib, layers, (there, here, *ratios) in rows:
        found = " | ".join(f"{each:.2f}" for each in ratios)
        lines.append(f"| {slot_kib} | {layers} | {there:.0f} | {here:.0f} | {found} |")
    return "\n".join([*lines, ""])


def markdown(rows: list[tuple[int, int, list[float]]], command: str, repeats: int) -> str:
    """The page."""
    lines = [
        "# Sums at the ends of parts",
        "",
        f"`{command}`: {machine()}.",
        "",
        "One thread, checksums, scattered blocks, everything in turns in one process. Times are "
        f"processor time: medians of {repeats} rounds, in numpy copies of as many bytes just "
        "before. *save*: blocks to slots, with the checksum of each slot alone, and with the sums "
        "of its parts; *ratio*: the speed with sums by that without, in the same round. *by "
        "layer*: the same as a forward pass computes its layers. *half*: half of the layers are "
        "loaded, from slots that hold these alone, from slots of all layers that are checked as a "
        "whole, and from such slots by their parts; *ratio*: the speed by parts by that of whole "
        "slots. *row*: what the sums of a slot take, in hundredths of the slot.",
        "",
        "| slot KiB | layers | parts | save | with sums | ratio | by layer | with sums | ratio "
        "| half, alike | whole slots | by parts | ratio | row % |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for slot_kib, layers, (parts, *others) in rows:
        found = " | ".join(f"{each:.2f}" for each in others)
        lines.append(f"| {slot_kib} | {layers} | {parts:.0f} | {found} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument("--beside", metavar="COMMIT", help="also measure its saves")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    moved, repeats = (32 << 20, 5) if arguments.quick else (64 << 20, 41)
    rows = []
    right = True
    for slot_kib in SLOTS_KIB:
        for layers in LAYERS:
            row, these = measure(slot_kib * KIB, layers, moved, repeats)
            rows.append((slot_kib, layers, row))
            right = right and these
    command = " ".join(["python benchmarks/part_sums.py", *sys.argv[1:]])
    text = markdown(rows, command, repeats)
    if arguments.beside is not None:
        with checkout(arguments.beside) as tree:
            pairs = [
                (slot_kib, layers, beside(tree, slot_kib * KIB, layers, moved, repeats))
                for slot_kib in SLOTS_KIB
                for layers in LAYERS
            ]
        text = "\n".join([text, second_table(pairs, arguments.beside, repeats)])
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "part_sums.md").write_text(text)
    print(text)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
