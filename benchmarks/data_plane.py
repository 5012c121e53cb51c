# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks move from one process to another through a shared arena, beside memcpy.

Two processes, as in a hand-off. The owner copies blocks of its KV cache to slots and publishes
them; the reader, which has attached the owner's arena, verifies the slots, copies them to
blocks of its own KV cache, and verifies them again. Both also copy the same number of bytes
from one plain array to another with numpy (memcpy), before and after each of those, so that
every rate is compared with that of the same moment. One process works at a time, in one thread.

    python benchmarks/data_plane.py [--quick]

writes results/data_plane.md and results/data_plane.png beside this file.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import numpy as np
import torch

from omni_connector.kv.canonical import GroupSpec, LayerSpec, canonicalize
from omni_connector.kv.copying import make_copier
from omni_connector.kv.slots import SlotLayout
from omni_connector.transports import Arena, Endpoint
from omni_connector.transports.shm import SharedMemoryConnector

mpl.use("Agg")
import matplotlib.pyplot as plt

KIB = 1024
LAYERS = 16
HEADS, TOKENS = 2, 16
ATTACH_S = 30.0
RESULTS = Path(__file__).parent / "results"
ORDERS = ("scattered", "consecutive")


class Cache:
    """A KV cache as vLLM allocates it (one buffer, layers outermost), and its copier.

    Args:
        page_bytes: bytes of one block of one layer.
        num_blocks: blocks in the cache.
        seed: of its content; None for nothing in particular.
    """

    def __init__(self, page_bytes: int, num_blocks: int, seed: int | None) -> None:
        total = LAYERS * num_blocks * page_bytes
        # Allocated by torch, as vLLM does: numpy's arrays are only aligned to 16 bytes, which
        # alone halves the rate of a copy to them from a slot.
        buffer = torch.zeros(total, dtype=torch.int8)
        if seed is None:
            buffer.fill_(1)  # touched before anything is timed
        else:
            buffer.numpy()[:] = np.random.default_rng(seed).integers(-128, 128, total, np.int8)
        shape = (LAYERS, num_blocks, HEADS, TOKENS, page_bytes // (HEADS * TOKENS))
        layers = buffer.view(shape)
        names = [f"layers.{i}" for i in range(LAYERS)]
        spec = tuple(LayerSpec(name, page_bytes, page_bytes) for name in names)
        views = dict(zip(names, layers, strict=True))
        canonical = canonicalize([GroupSpec("full_attention", TOKENS, spec)], views, num_blocks)
        self.layout = SlotLayout.of(canonical)
        self.copier = make_copier(canonical, self.layout)


def block_ids(order: str, moved: int, num_blocks: int) -> np.ndarray:
    """The blocks of a request: as a busy engine's free list gives them, or in a row."""
    if order == "consecutive":
        return np.arange(moved, dtype=np.int64)
    return np.random.default_rng(7).permutation(num_blocks)[:moved].astype(np.int64)


class Memcpy:
    """The yardstick: one copy between two plain arrays of as many bytes."""

    def __init__(self, size: int) -> None:
        self.source = torch.full((size,), 3, dtype=torch.uint8).numpy()
        self.target = torch.full((size,), 1, dtype=torch.uint8).numpy()

    def beside(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds of a memcpy (the mean of one before and one after) and of the work."""
        before = timed(lambda: np.copyto(self.target, self.source))
        took = timed(work)
        after = timed(lambda: np.copyto(self.target, self.source))
        return (before + after) / 2, took


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_peer() -> None:
    """The reader: takes settings and generations on stdin, gives seconds on stdout."""
    settings = json.loads(sys.stdin.readline())
    endpoint = msgspec.json.decode(settings["endpoint"], type=Endpoint)
    cache = Cache(settings["page_bytes"], settings["num_blocks"], seed=None)
    moved = settings["moved"]
    memcpy = Memcpy(moved * cache.layout.group_bytes[0])
    slot_ids = np.arange(moved, dtype=np.int64)
    with (
        SharedMemoryConnector(folder=Path(settings["folder"])) as connector,
        connector.attach(endpoint, timeout=ATTACH_S) as remote,
    ):

        def load(generation: int, blocks: np.ndarray, checksum: bool) -> None:
            wanted = [remote.verify(slot, generation).checksum for slot in range(moved)]
            found = cache.copier.load(0, blocks, remote.slots, slot_ids, checksum=checksum)
            for slot in range(moved):
                remote.verify(slot, generation)
            if checksum and found.tolist() != wanted:
                raise SystemExit("the bytes that arrived are not those that were sent")

        for line in sys.stdin:
            job = json.loads(line)
            blocks = block_ids(job["order"], moved, settings["num_blocks"])
            seconds = memcpy.beside(
                lambda job=job, blocks=blocks: load(job["generation"], blocks, job["checksum"])
            )
            print(json.dumps(seconds), flush=True)


def measure(page_bytes: int, moved_bytes: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Rates at one page size: a row for each order of blocks, with and without checksums."""
    moved = max(4, moved_bytes // (page_bytes * LAYERS))
    num_blocks = moved + moved // 2
    cache = Cache(page_bytes, num_blocks, seed=1)
    size = moved * cache.layout.group_bytes[0]
    memcpy = Memcpy(size)
    slot_ids = np.arange(moved, dtype=np.int64)
    rows = []
    with (
        Arena.create(moved, cache.layout.slot_bytes) as arena,
        SharedMemoryConnector(folder=folder) as connector,
    ):
        arena.slots[:] = 1

        def save(generation: int, blocks: np.ndarray, checksum: bool) -> None:
            for slot in range(moved):
                arena.begin_write(slot, generation)
            sums = cache.copier.save(0, blocks, arena.slots, slot_ids, checksum=checksum)
            length = cache.layout.group_bytes[0]
            for slot, each in enumerate(sums.tolist()):
                arena.publish(slot, generation, b"", length, each)

        endpoint = connector.export(arena, f"owner-{page_bytes}")
        reader = subprocess.Popen(
            [sys.executable, __file__, "--reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        settings = {
            "endpoint": msgspec.json.encode(endpoint).decode(),
            "folder": str(folder),
            "page_bytes": page_bytes,
            "num_blocks": num_blocks,
            "moved": moved,
        }
        print(json.dumps(settings), file=reader.stdin, flush=True)
        generation = 0
        for order in ORDERS:
            blocks = block_ids(order, moved, num_blocks)
            for checksum in (False, True):
                samples = []
                for _ in range(repeats + 1):
                    generation += 1
                    seconds = memcpy.beside(
                        lambda g=generation, b=blocks, c=checksum: save(g, b, c)
                    )
                    job = {"generation": generation, "order": order, "checksum": checksum}
                    print(json.dumps(job), file=reader.stdin, flush=True)
                    answer = reader.stdout.readline()
                    if not answer:
                        raise SystemExit("the reader ended early")
                    samples.append((*seconds, *json.loads(answer)))
                # The first touches what no later one has to.
                rows.append(
                    summary(samples[1:], size)
                    | {
                        "page": page_bytes,
                        "order": order,
                        "checksum": checksum,
                        "bytes": size,
                    }
                )
        reader.stdin.close()
        if reader.wait(ATTACH_S):
            raise SystemExit("the reader failed")
        reader.stdout.close()
    return rows


def summary(samples: list[tuple[float, ...]], size: int) -> dict[str, float]:
    """Medians in GB/s of payload, and medians of the ratios to the memcpy just before."""

    def rate(seconds: list[float]) -> float:
        return size / statistics.median(seconds) / 1e9

    owner, saved, reader, loaded = ([*column] for column in zip(*samples, strict=True))
    return {
        "memcpy": rate(owner + reader),
        "save": rate(saved),
        "load": rate(loaded),
        "both": rate([sum(pair) for pair in zip(saved, loaded, strict=True)]),
        "save_ratio": statistics.median(m / s for m, s in zip(owner, saved, strict=True)),
        "load_ratio": statistics.median(m / s for m, s in zip(reader, loaded, strict=True)),
    }


def machine() -> str:
    """One line on where this ran."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = Path("/proc/loadavg").read_text().split()[0]
    return f"{model}, {os.cpu_count()} cores, load average {load}"


def markdown(rows: list[dict[str, Any]], command: str, repeats: int) -> str:
    """The table."""
    lines = [
        "# Data plane: blocks from one process to another",
        "",
        f"`{command}`: {machine()}; Linux {platform.release()}, Python "
        f"{platform.python_version()}, numpy {np.__version__}.",
        "",
        f"{LAYERS} layers; one thread works at a time. Rates in GB/s of payload, medians of "
        f"{repeats} runs; in brackets the median ratio to a numpy memcpy of as many bytes just "
        "before and after, in the same process. *save*: blocks to slots and publish, in the owner. "
        "*load*: verify, slots to blocks, verify, in the reader. *both*: one after the other.",
        "",
        "| page KiB | slot KiB | blocks | checksum | memcpy | save | load | both |",
        "|---:|---:|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['page'] // KIB} | {row['page'] * LAYERS // KIB} | {row['order']} "
        f"| {'xxh3' if row['checksum'] else 'none'} | {row['memcpy']:.1f} "
        f"| {row['save']:.1f} ({row['save_ratio']:.2f}) "
        f"| {row['load']:.1f} ({row['load_ratio']:.2f}) | {row['both']:.1f} |"
        for row in rows
    ]
    return "\n".join([*lines, ""])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Rates and ratios over page size, for scattered blocks."""
    pages = sorted({row["page"] for row in rows})
    figure, (rates, ratios) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")

    def series(field: str, checksum: bool) -> list[float]:
        chosen = {
            row["page"]: row[field]
            for row in rows
            if row["order"] == "scattered" and row["checksum"] is checksum
        }
        return [chosen[page] for page in pages]

    kib = [page // KIB for page in pages]
    rates.plot(kib, series("memcpy", False), "k--", label="numpy memcpy")
    for field, colour in (("save", "tab:blue"), ("load", "tab:orange")):
        for checksum, style in ((False, "o-"), (True, "s:")):
            label = f"{field}, {'xxh3 checksum' if checksum else 'no checksum'}"
            rates.plot(kib, series(field, checksum), style, color=colour, label=label)
            ratios.plot(kib, series(f"{field}_ratio", checksum), style, color=colour, label=label)
    ratios.axhline(1.0, color="black", linestyle="--", linewidth=1)
    for axes, title, unit in (
        (rates, "Rate", "GB/s of payload (median)"),
        (ratios, "Beside memcpy in the same run", "ratio (median of pairs)"),
    ):
        axes.set(title=title, xlabel="bytes of a block in one layer (KiB)", ylabel=unit)
        axes.set_xscale("log", base=2)
        axes.set_xticks(kib, [str(each) for each in kib])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"KV blocks through a shared arena: scattered blocks, {LAYERS} layers")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less data, fewer runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        read_peer()
        return
    moved_bytes, repeats = (32 << 20, 5) if arguments.quick else (128 << 20, 15)
    rows = []
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        for page in (4, 16, 64, 256, 1024):
            rows += measure(page * KIB, moved_bytes, repeats, Path(folder))
            for row in rows[-4:]:
                print(
                    f"{page:5} KiB {row['order']:11} checksum={row['checksum']!s:5} "
                    f"memcpy {row['memcpy']:5.1f}  save {row['save']:5.1f} "
                    f"({row['save_ratio']:.2f})  load {row['load']:5.1f} "
                    f"({row['load_ratio']:.2f})",
                    flush=True,
                )
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/data_plane.py" + (" --quick" if arguments.quick else "")
    (arguments.output / "data_plane.md").write_text(markdown(rows, command, repeats))
    plot(rows, arguments.output / "data_plane.png")


if __name__ == "__main__":
    main()
