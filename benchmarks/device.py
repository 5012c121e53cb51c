# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks move between a GPU's memory and an arena, beside plain copies of the bytes.

One process. Scattered blocks of a KV cache on the device are saved to slots of an arena, which is
registered with the device, and loaded from there, as the two engines of a hand-off do it. Right
before and after each of those, as many bytes are copied in one piece between memory of the device
and pinned memory of the host, the way that this copy goes. What was loaded is compared with what
was saved.

Also to and from slots that lie apart; and half of the layers of each slot, as an engine with more
pipeline stages reads them. `on_gpu` has the connector's jobs, and saves that follow a forward pass.

    python benchmarks/device.py [--quick] [--device cuda|cpu]

writes results/device.md and results/device.png beside this file. On a CPU it measures the copier of
CPUs, and shows that it runs; the results are not written.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from machine import RESULTS, machine

from omni_connector.arena.arena import Arena
from omni_connector.copy.choice import make_copier
from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize
from omni_connector.kv.convert import PageRun
from omni_connector.runtime.shared_work import Helpers

KIB = 1024
LAYERS, HEADS, TOKENS = 16, 2, 16
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
MOVED, QUICK_MOVED = 256 << 20, 32 << 20
TARGET = 0.8


@dataclass(frozen=True, slots=True)
class Row:
    """Rates at one page size, in GB/s of payload; ratios to the plain copies, paired.

    Attributes:
        checksum: whether the slots have checksums.
    """

    page: int
    checksum: bool
    save: float
    save_ratio: float
    load: float
    load_ratio: float


class Device:
    """A device, and the plain copies of so many bytes from and to it."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.cuda = torch.device(name).type == "cuda"
        self._there = torch.full((size,), 1, dtype=torch.uint8, device=name)
        self._here = torch.full((size,), 2, dtype=torch.uint8, pin_memory=self.cuda)

    def seconds(self, work: Callable[[], object]) -> float:
        """Of the work, until all of the device's is done."""
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def beside(self, work: Callable[[], object], *, saving: bool) -> tuple[float, float]:
        """Seconds of a plain copy (the mean of one before and one after) and of the work."""
        target, source = (self._here, self._there) if saving else (self._there, self._here)
        before = self.seconds(lambda: target.copy_(source, non_blocking=True))
        took = self.seconds(work)
        after = self.seconds(lambda: target.copy_(source, non_blocking=True))
        return (before + after) / 2, took

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.name)


def caches(
    name: str, page: int, num_blocks: int, helpers: Helpers, layers: int = LAYERS
) -> tuple[torch.Tensor, SlotLayout, BlockCopier]:
    """A KV cache as vLLM allocates it (one buffer, layers outermost), and its copier."""
    draw = torch.Generator(name).manual_seed(1)
    size = (layers * num_blocks * page,)
    buffer = torch.randint(-128, 128, size, generator=draw, device=name, dtype=torch.int8)
    pages = buffer.view(layers, num_blocks, HEADS, TOKENS, page // (HEADS * TOKENS))
    specs = [LayerSpec(f"layer.{i}", page, page) for i in range(layers)]
    views = dict(zip((spec.name for spec in specs), pages, strict=True))
    group = GroupSpec("full_attention", TOKENS, tuple(specs))
    canonical = canonicalize([group], views, num_blocks)
    layout = SlotLayout.of(canonical)
    return buffer, layout, make_copier(canonical, layout, helpers)


def copies(
    device: Device, page: int, checksum: bool, moved: int, repeats: int, *, apart: bool = False
) -> Row:
    """The rates of single copies; `apart` has their slots in no order.

    Raises:
        SystemExit: the bytes that were loaded are not those that were saved.
    """
    count = moved // (page * LAYERS)
    num_blocks = 2 * count
    helpers = Helpers()
    buffer, layout, copier = caches(device.name, page, num_blocks, helpers)
    order = np.random.default_rng(7).permutation(num_blocks).astype(np.int64)
    saved, loaded = order[:count], order[count:]
    slots = np.arange(count, dtype=np.int64)
    if apart:
        slots = np.random.default_rng(8).permutation(slots)
    with Arena.create(count, layout.slot_bytes) as arena:
        arena.slots[:] = 1
        copier.pin(arena.slots)
        sums: list[list[int]] = []

        def save() -> None:
            copy = BlockCopy(0, saved, arena.slots, slots, checksum, copier.fence())
            sums.append(np.asarray(copier.save(copy)).tolist())

        def load() -> None:
            copy = BlockCopy(0, loaded, arena.slots, slots, checksum, copier.fence())
            sums.append(np.asarray(copier.load(copy)).tolist())

        times = []
        try:
            for _ in range(repeats + 1):
                sums.clear()
                there = device.beside(save, saving=True)
                times.append((*there, *device.beside(load, saving=False)))
                pages = buffer.view(LAYERS, num_blocks, page)
                if sums[0] != sums[1] or not pages[:, saved].equal(pages[:, loaded]):
                    raise SystemExit("the bytes that were loaded are not those that were saved")
        finally:
            copier.close()
            helpers.close(5.0)
    return row(page, checksum, moved, times[1:])


def pages_alone(
    device: Device, page: int, checksum: bool, moved: int, repeats: int
) -> tuple[float, float]:
    """A load of the second half of the layers of each slot, which lie apart: its rate, and the
    ratio, of the bytes that are loaded.

    Raises:
        SystemExit: the bytes that were loaded are not those of the slots.
    """
    half = LAYERS // 2 * page
    count = moved // half
    num_blocks = 2 * count
    helpers = Helpers()
    buffer, _, copier = caches(device.name, page, num_blocks, helpers, LAYERS // 2)
    draw = np.random.default_rng(7)
    blocks = draw.permutation(num_blocks)[:count].astype(np.int64)
    slots = draw.permutation(count).astype(np.int64)
    runs = (PageRun(half, 0, half),)
    with Arena.create(count, 2 * half) as arena:
        arena.slots[:] = draw.integers(0, 256, arena.slots.shape, np.uint8)
        copier.pin(arena.slots)

        def load() -> None:
            copy = BlockCopy(0, blocks, arena.slots, slots, checksum, copier.fence())
            if copier.load_pages(copy, runs, 2 * half) is None:
                raise SystemExit("pages are not loaded alone")

        try:
            times = [device.beside(load, saving=False) for _ in range(repeats + 1)][1:]
            found = buffer.view(LAYERS // 2, num_blocks, page)[:, blocks].transpose(0, 1)
            expected = torch.from_numpy(arena.slots[slots, half:].view(np.int8))
            if not found.reshape(count, half).cpu().equal(expected):
                raise SystemExit("the bytes that were loaded are not those of the slots")
        finally:
            copier.close()
            helpers.close(5.0)
    rate = moved / statistics.median(took for _, took in times) / 1e9
    return rate, statistics.median(plain / took for plain, took in times)


def row(page: int, checksum: bool, moved: int, times: Sequence[tuple[float, ...]]) -> Row:
    """The medians of what was timed: plain copy and save, plain copy and load."""

    def rate(column: int) -> float:
        return moved / statistics.median(each[column] for each in times) / 1e9

    def ratio(plain: int, copy: int) -> float:
        return statistics.median(each[plain] / each[copy] for each in times)

    return Row(page, checksum, rate(1), ratio(0, 1), rate(3), ratio(2, 3))


def of_copies(row: Row) -> str:
    """A line of the table of copies."""
    return (
        f"| {row.page // KIB} | {'xxh3' if row.checksum else 'none'} | "
        f"{row.save:.1f} ({row.save_ratio:.2f}) | {row.load:.1f} ({row.load_ratio:.2f}) |"
    )


def of_pages(page: int, checksum: bool, rate: float, ratio: float) -> str:
    """A line of the table of pages."""
    return f"| {page // KIB} | {'xxh3' if checksum else 'none'} | {rate:.1f} ({ratio:.2f}) |"


def markdown(
    copied: list[Row],
    apart: list[Row],
    alone: list[str],
    about: str,
    repeats: int,
) -> str:
    """The tables."""
    lines = [
        "# Blocks from a device to an arena and back",
        "",
        f"{about}; {machine()}, torch {torch.__version__}.",
        "",
        f"Scattered blocks of {LAYERS} layers. Rates in GB/s of payload, medians of {repeats} runs;"
        " in brackets the median ratio to one plain copy of as many bytes, the same way, between "
        f"the device and pinned memory, to be {TARGET} or more. The device makes the checksums.",
        "",
        "| page KiB | checksum | save | load |",
        "|---:|---|---:|---:|",
        *map(of_copies, copied),
        "",
        "## Slots that lie apart",
        "",
        "The same, with slots in no order. A kernel of the device reads and writes those of less "
        "than 4 MiB.",
        "",
        "| page KiB | checksum | save | load |",
        "|---:|---|---:|---:|",
        *map(of_copies, apart),
        "",
        "## Pages of slots with other layers",
        "",
        f"Loads of {LAYERS // 2} of the {LAYERS} layers of each slot, with slots in no order. "
        "Rates and ratios are of the bytes of these layers. Without checksums, no other bytes "
        "cross. With them whole slots do, for the device to check.",
        "",
        "| page KiB | checksum | load |",
        "|---:|---|---:|",
        *alone,
        "",
        "![Ratios by page size](device.png)",
    ]
    return "\n".join([*lines, ""])


def plot(rows: list[Row], path: Path) -> None:
    """The ratios by page size."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for color, checksum in enumerate((False, True)):
        those = [each for each in rows if each.checksum == checksum]
        what = "with checksums" if checksum else "without"
        pages = [each.page // KIB for each in those]
        saves = [each.save_ratio for each in those]
        loads = [each.load_ratio for each in those]
        axes.plot(pages, saves, "o-", color=f"C{color}", label=f"save, {what}")
        axes.plot(pages, loads, "s--", color=f"C{color}", label=f"load, {what}")
    axes.axhline(TARGET, color="black", linestyle=":", label="target")
    axes.set(xlabel="page, KiB", ylabel="rate, plain copies being 1", title="Copies of a device")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two page sizes, less memory")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu shows that this runs")
    moved, repeats = (QUICK_MOVED, 5) if arguments.quick else (MOVED, 15)
    device = Device(arguments.device, moved)
    name = torch.cuda.get_device_name(arguments.device) if device.cuda else "a CPU"
    copied: list[Row] = []
    for page in PAGES[1:3] if arguments.quick else PAGES:
        for checksum in (False, True):
            copied.append(copies(device, page, checksum, moved, repeats))
            print(of_copies(copied[-1]), flush=True)
    pages = PAGES[1:3] if arguments.quick else PAGES[:3]
    apart = [copies(device, page, True, moved, repeats, apart=True) for page in pages]
    print("\n".join(map(of_copies, apart)), flush=True)
    alone = [
        of_pages(page, checksum, *pages_alone(device, page, checksum, moved, repeats))
        for page in pages
        for checksum in (False, True)
    ]
    print("\n".join(alone), flush=True)
    if device.cuda:
        arguments.output.mkdir(parents=True, exist_ok=True)
        command = f"python benchmarks/device.py --device {arguments.device}"
        command += " --quick" if arguments.quick else ""
        about = f"`{command}`: {name}"
        text = markdown(copied, apart, alone, about, repeats)
        (arguments.output / "device.md").write_text(text)
        plot(copied, arguments.output / "device.png")


if __name__ == "__main__":
    main()
