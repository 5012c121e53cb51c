# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks move between a GPU's memory and an arena, beside plain copies of the bytes.

One process. Scattered blocks of a KV cache on the device are saved to slots of an arena, which is
registered with the device, and loaded from there, as the two engines of a hand-off do it. Right
before and after each of those, as many bytes are copied in one piece between memory of the device
and pinned memory of the host, the way that this copy goes. What was loaded is compared with what
was saved.

    python benchmarks/device.py [--quick] [--device cuda|cpu]

writes results/device.md and results/device.png beside this file. On a CPU it measures the copier of
CPUs, and shows that it runs; the results are not written.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from data_plane import RESULTS, machine

from omni_connector.arena.arena import Arena
from omni_connector.copy.choice import make_copier
from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize

mpl.use("Agg")
import matplotlib.pyplot as plt

KIB = 1024
LAYERS, HEADS, TOKENS = 16, 2, 16
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
MOVED, QUICK_MOVED = 256 << 20, 32 << 20
TARGET = 0.8


@dataclass(frozen=True, slots=True)
class Row:
    """Rates at one page size, in GB/s of payload; ratios to the plain copies, paired."""

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


def caches(name: str, page: int, num_blocks: int) -> tuple[torch.Tensor, SlotLayout, BlockCopier]:
    """A KV cache as vLLM allocates it (one buffer, layers outermost), and its copier."""
    draw = torch.Generator().manual_seed(1)
    content = torch.randint(-128, 128, (LAYERS * num_blocks * page,), generator=draw)
    buffer = content.to(torch.int8).to(name)
    pages = buffer.view(LAYERS, num_blocks, HEADS, TOKENS, page // (HEADS * TOKENS))
    layers = [LayerSpec(f"layer.{i}", page, page) for i in range(LAYERS)]
    views = dict(zip((layer.name for layer in layers), pages, strict=True))
    group = GroupSpec("full_attention", TOKENS, tuple(layers))
    canonical = canonicalize([group], views, num_blocks)
    layout = SlotLayout.of(canonical)
    return buffer, layout, make_copier(canonical, layout)


def measure(device: Device, page: int, moved: int, repeats: int) -> list[Row]:
    """The rates at one page size, without checksums and with them.

    Raises:
        SystemExit: the bytes that were loaded are not those that were saved.
    """
    count = moved // (page * LAYERS)
    num_blocks = 2 * count
    buffer, layout, copier = caches(device.name, page, num_blocks)
    order = np.random.default_rng(7).permutation(num_blocks).astype(np.int64)
    saved, loaded = order[:count], order[count:]
    slots = np.arange(count, dtype=np.int64)
    rows = []
    with Arena.create(count, layout.slot_bytes) as arena:
        arena.slots[:] = 1
        copier.pin(arena.slots)
        sums: list[list[int]] = []
        try:
            for checksum in (False, True):

                def save(checksum: bool = checksum) -> None:
                    copy = BlockCopy(0, saved, arena.slots, slots, checksum, copier.fence())
                    sums.append(copier.save(copy).tolist())

                def load(checksum: bool = checksum) -> None:
                    copy = BlockCopy(0, loaded, arena.slots, slots, checksum, copier.fence())
                    sums.append(copier.load(copy).tolist())

                times = []
                for _ in range(repeats + 1):
                    sums.clear()
                    there = device.beside(save, saving=True)
                    times.append((*there, *device.beside(load, saving=False)))
                    pages = buffer.view(LAYERS, num_blocks, page)
                    if sums[0] != sums[1] or not pages[:, saved].equal(pages[:, loaded]):
                        raise SystemExit("the bytes that were loaded are not those that were saved")
                rows.append(row(page, checksum, moved, times[1:]))
        finally:
            copier.close()
    return rows


def row(page: int, checksum: bool, moved: int, times: list[tuple[float, ...]]) -> Row:
    """The medians of what was timed: plain copy and save, plain copy and load."""

    def rate(column: int) -> float:
        return moved / statistics.median(each[column] for each in times) / 1e9

    def ratio(plain: int, copy: int) -> float:
        return statistics.median(each[plain] / each[copy] for each in times)

    return Row(page, checksum, rate(1), ratio(0, 1), rate(3), ratio(2, 3))


def cells(row: Row) -> str:
    """One line of the table."""
    return (
        f"| {row.page // KIB} | {'xxh3' if row.checksum else 'none'} | {row.save:.1f} "
        f"({row.save_ratio:.2f}) | {row.load:.1f} ({row.load_ratio:.2f}) |"
    )


def markdown(rows: list[Row], name: str, command: str, repeats: int) -> str:
    """The table."""
    lines = [
        "# Blocks from a device to an arena and back",
        "",
        f"`{command}`: {name}; {machine()}; Linux {platform.release()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}.",
        "",
        f"Scattered blocks of {LAYERS} layers. Rates in GB/s of payload, medians of {repeats} runs;"
        " in brackets the median ratio to one plain copy of as many bytes, the same way, between "
        f"the device and pinned memory, to be {TARGET} or more.",
        "",
        "| page KiB | checksum | save | load |",
        "|---:|---|---:|---:|",
        *map(cells, rows),
    ]
    return "\n".join([*lines, ""])


def plot(rows: list[Row], path: Path) -> None:
    """The ratios by page size."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for checksum in (False, True):
        those = [each for each in rows if each.checksum == checksum]
        what = "with checksums" if checksum else "without"
        pages = [each.page // KIB for each in those]
        axes.plot(pages, [each.save_ratio for each in those], "o-", label=f"save, {what}")
        axes.plot(pages, [each.load_ratio for each in those], "s-", label=f"load, {what}")
    axes.axhline(TARGET, color="tab:red", linestyle=":", label="target")
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
    rows = []
    for page in PAGES[1:3] if arguments.quick else PAGES:
        rows += measure(device, page, moved, repeats)
        print("\n".join(map(cells, rows[-2:])), flush=True)
    if device.cuda:
        arguments.output.mkdir(parents=True, exist_ok=True)
        command = f"python benchmarks/device.py --device {arguments.device}"
        command += " --quick" if arguments.quick else ""
        text = markdown(rows, name, command, repeats)
        (arguments.output / "device.md").write_text(text)
        plot(rows, arguments.output / "device.png")


if __name__ == "__main__":
    main()
