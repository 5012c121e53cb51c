# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of a KV cache in two layouts, beside one plain copy of as many bytes."""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np
import torch
from device import Device
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.staged import GroupOnDevice
from on_gpu.accelerator import GIB, MIB, Accelerator, Report, Sizes, gb_s
from on_gpu.rank import LAYOUTS, DeviceRank

_STAGED: Final = 32 * MIB
"""Bytes of each staging buffer of gathers and DMA alone."""

_SEEN: Final = 4
"""Blocks of each copy that are compared byte by byte. Checksums are of all of them."""

_SPARED: Final = 4 * GIB
"""Bytes of the device that the KV cache leaves."""


_Step = Callable[[int, torch.Tensor, bool], None]


def measure(device: Accelerator, sizes: Sizes, report: Report) -> None:
    """Each number of layers in each layout."""
    for layers in sizes.layers:
        for layout in LAYOUTS:
            with ExitStack() as stack:
                cache = min(sizes.cache, device.free() - _SPARED)
                rank = DeviceRank(
                    *(device, stack),
                    layers=layers,
                    layout=layout,
                    page=sizes.page,
                    cache=cache,
                    moved=sizes.moved,
                )
                about = partial(report, layers=layers, layout=layout)
                size = round(rank.buffer.numel() / GIB, 2)
                about("cache", gib=size, pinned=rank.pinned)
                plain = Device(device.device, rank.moved)
                _copies(rank, plain, sizes.repeats, about)
                _alone(device, rank, plain, sizes.repeats, about)
            del rank, plain


def _copies(rank: DeviceRank, plain: Device, repeats: int, report: Report) -> None:
    """Jobs, and single calls of the copier."""
    jobs = rank.rank
    rank.buffer.random_(-128, 128)
    _compared(report, "job: save", plain, rank, jobs.save, True, repeats)
    _require(rank, rank.saved, jobs.own.slots, np.arange(rank.count))

    def load() -> float:
        return jobs.load(rank.count)

    _compared(report, "job: load, through a buffer", plain, rank, load, False, min(repeats, 3))
    report("pinning of the other engine's arena", pinned=rank.pin_other())
    _compared(report, "job: load", plain, rank, load, False, repeats)
    _require(rank, rank.loaded, jobs.theirs.slots, np.arange(rank.count))

    beside = []
    for _ in range(repeats + 1):
        alone = load()
        jobs.start_save(background=False)
        beside.append(alone / load())
        jobs.end_save()
    report("job: load beside a save", rate_of_it_alone=round(statistics.median(beside), 3))

    draw = np.random.default_rng(3)
    copier = jobs.copier
    for order in ("together", "apart"):
        slot_ids = np.arange(rank.count) if order == "together" else draw.permutation(rank.count)

        def copy(work: Callable[[BlockCopy], object], ids: NDArray[np.int64]) -> None:
            work(BlockCopy(0, ids, jobs.own.slots, slot_ids, True, copier.fence()))  # noqa: B023

        for name, work, ids in (
            ("save", copier.save, rank.saved),
            ("load", copier.load, rank.loaded),
        ):
            what = f"copier: {name}, slots {order}"
            _compared(report, what, plain, rank, partial(copy, work, ids), name == "save", repeats)
            _require(rank, ids, jobs.own.slots, slot_ids)


def _alone(
    device: Accelerator, rank: DeviceRank, plain: Device, repeats: int, report: Report
) -> None:
    """Gathers and scatters alone, DMA alone, and both, on one stream and on two."""
    if not rank.pinned:
        report("gather and DMA", skipped="the arena is not pinned")
        return
    group = GroupOnDevice.of(rank.rank.layer_ranges.canonical, 0)
    rows = max(1, min(_STAGED // rank.block_bytes, rank.count // 2))
    buffers = [
        torch.empty((rows, rank.block_bytes), dtype=torch.int8, device=device.device)
        for _ in range(2)
    ]
    slots = torch.from_numpy(rank.rank.own.slots[:, : rank.block_bytes].view(np.int8))
    batches = range(0, rank.count - rows + 1, rows)
    ids = torch.from_numpy(rank.saved).to(device.device)
    moved = len(batches) * rows * rank.block_bytes
    first, second = device.stream(), device.stream()

    def pack(at: int, staged: torch.Tensor, saving: bool) -> None:
        (group.gather if saving else group.scatter)(first, ids[at : at + rows], staged)

    def cross(at: int, staged: torch.Tensor, saving: bool) -> None:
        ends = (slots[at : at + rows], staged)
        target, source = ends if saving else ends[::-1]
        target.copy_(source, non_blocking=True)

    def one(steps: Sequence[_Step], saving: bool) -> None:
        """All steps on one stream."""
        with first.active():
            for number, at in enumerate(batches):
                for step in steps:
                    step(at, buffers[number % 2], saving)
        first.finish(None)

    def two(steps: Sequence[_Step], saving: bool) -> None:
        """Each step on a stream of its own, which waits for the other's, batch by batch."""
        used: list[object] = [None, None]
        for number, at in enumerate(batches):
            buffer = number % 2
            with first.active():
                if used[buffer] is not None:
                    first.wait(used[buffer])
                steps[0](at, buffers[buffer], saving)
                there = first.fence()
            with second.active():
                second.wait(there)
                steps[1](at, buffers[buffer], saving)
                used[buffer] = second.fence()
        first.finish(None)
        second.finish(None)

    try:
        for saving in (True, False):
            packed = "gather" if saving else "scatter"
            both = (pack, cross) if saving else (cross, pack)
            for name, work in (
                (f"{packed} alone", partial(one, (pack,), saving)),
                ("DMA alone", partial(one, (cross,), saving)),
                (f"{packed} and DMA, one stream", partial(one, both, saving)),
                (f"{packed} and DMA, two streams", partial(two, both, saving)),
            ):
                times = [plain.beside(work, saving=saving) for _ in range(repeats + 1)][1:]
                rate = gb_s(moved, statistics.median(took for _, took in times))
                copy = gb_s(rank.moved, statistics.median(copy for copy, _ in times))
                ratio = round(rate / copy, 3)
                report("rate", what=name, saving=saving, gb_s=rate, of_a_plain_copy=ratio)
    finally:
        first.close()
        second.close()


def _compared(
    report: Report,
    what: str,
    plain: Device,
    rank: DeviceRank,
    work: Callable[[], object],
    saving: bool,
    repeats: int,
) -> None:
    times = [plain.beside(work, saving=saving) for _ in range(repeats + 1)][1:]
    ratios = sorted(copy / took for copy, took in times)
    report(
        "rate",
        what=what,
        saving=saving,
        gb_s=gb_s(rank.moved, statistics.median(took for _, took in times)),
        of_a_plain_copy=round(statistics.median(ratios), 3),
        least=round(ratios[0], 3),
        most=round(ratios[-1], 3),
    )


def _require(
    rank: DeviceRank,
    ids: NDArray[np.int64],
    slots: NDArray[np.uint8],
    slot_ids: NDArray[np.int64],
) -> None:
    """Raise RuntimeError unless some of the blocks have the bytes of their slots."""
    some = np.linspace(0, rank.count - 1, min(_SEEN, rank.count)).astype(np.int64)
    found = rank.blocks(ids[some]).view(np.uint8)
    if not np.array_equal(found, slots[slot_ids[some], : rank.block_bytes]):
        raise RuntimeError("the bytes of slots are not those of blocks")
    if not found.any():
        raise RuntimeError("the blocks have no bytes but zeros")
