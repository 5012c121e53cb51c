# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks move from one process to another through a shared arena, beside memcpy.

Two processes, as in a hand-off. The owner copies blocks of its KV cache to slots and publishes
them; the reader, which has attached the owner's arena, verifies the slots, copies them to
blocks of its own KV cache, and verifies them again. Both also copy the same number of bytes
from one plain array to another with numpy (memcpy), before and after each of those, so that
every rate is compared with that of the same moment. One process works at a time, in one thread.

All of it for a model of full attention, and in turns with it for a hybrid one with pages of the
same size: full attention, a sliding window on the same bytes, and padded states on them too.

    python benchmarks/data_plane.py [--quick]

writes results/data_plane.md and results/data_plane.png beside this file.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from machine import machine

from omni_connector.copy.choice import make_copier
from omni_connector.copy.copier import BlockCopy
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize
from omni_connector.transports import Arena, Endpoint
from omni_connector.transports.shm import SharedMemoryTransport

KIB = 1024
LAYERS = 16
HEADS, TOKENS = 2, 16
ATTACH_S = 30.0
RESULTS = Path(__file__).parent / "results"
ORDERS = ("scattered", "consecutive")
FULL, HYBRID = KINDS = ("full attention", "hybrid")
GROUPS = {FULL: ("full_attention",), HYBRID: ("full_attention", "sliding_window", "mamba")}
TARGET = 0.8


class Cache:
    """A KV cache as vLLM allocates it (one buffer, layers outermost), and its copier.

    The groups of a hybrid model lie on the same bytes; its states fill 15/16 of their pages.

    Args:
        kind: one of `KINDS`.
        page_bytes: bytes that one block of one layer takes.
        num_blocks: blocks in the cache.
        seed: of its content; None for nothing in particular.
    """

    def __init__(self, kind: str, page_bytes: int, num_blocks: int, seed: int | None) -> None:
        total = LAYERS * num_blocks * page_bytes
        # Allocated by torch, as vLLM does: numpy's arrays are only aligned to 16 bytes, which
        # alone halves the rate of a copy to them from a slot.
        buffer = torch.zeros(total, dtype=torch.int8)
        if seed is None:
            buffer.fill_(1)  # touched before anything is timed
        else:
            buffer.numpy()[:] = np.random.default_rng(seed).integers(-128, 128, total, np.int8)
        pages = buffer.view(LAYERS, num_blocks, HEADS, TOKENS, page_bytes // (HEADS * TOKENS))
        state_bytes = page_bytes * 15 // 16
        states = buffer.view(LAYERS, num_blocks, 1, 1, page_bytes)[..., :state_bytes]
        views: dict[str, torch.Tensor] = {}
        specs = []
        for group in GROUPS[kind]:
            content = state_bytes if group == "mamba" else page_bytes
            names = [f"{group}.{i}" for i in range(LAYERS)]
            views.update(zip(names, states if group == "mamba" else pages, strict=True))
            layers = tuple(LayerSpec(name, content, page_bytes) for name in names)
            specs.append(GroupSpec(group, TOKENS, layers))
        canonical = canonicalize(specs, views, num_blocks)
        self.layout = SlotLayout.of(canonical)
        self.copier = make_copier(canonical, self.layout)

    def parts(self, blocks: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """The blocks shared out over the groups: (group, blocks, slots)."""
        groups = len(self.layout.group_bytes)
        ends = [len(blocks) * group // groups for group in range(groups + 1)]
        slots = np.arange(len(blocks), dtype=np.int64)
        return [
            (group, blocks[first:end], slots[first:end])
            for group, (first, end) in enumerate(pairwise(ends))
        ]

    def payload(self, moved: int) -> int:
        """Bytes of so many blocks."""
        parts = self.parts(np.arange(moved))
        return sum(self.layout.group_bytes[group] * len(blocks) for group, blocks, _ in parts)


def block_ids(order: str, moved: int, num_blocks: int) -> np.ndarray:
    """The blocks of a request: as a busy engine's free list gives them, or in a row."""
    if order == "consecutive":
        return np.arange(moved, dtype=np.int64)
    return np.random.default_rng(7).permutation(num_blocks)[:moved].astype(np.int64)


class Memcpy:
    """The yardstick: one copy between two plain arrays, of up to `size` bytes."""

    def __init__(self, size: int) -> None:
        self.source = torch.full((size,), 3, dtype=torch.uint8).numpy()
        self.target = torch.full((size,), 1, dtype=torch.uint8).numpy()

    def beside(self, size: int, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds of a memcpy (the mean of one before and one after) and of the work."""
        before = timed(lambda: np.copyto(self.target[:size], self.source[:size]))
        took = timed(work)
        after = timed(lambda: np.copyto(self.target[:size], self.source[:size]))
        return (before + after) / 2, took


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_peer() -> None:
    """The reader: takes settings and generations on stdin, gives seconds on stdout."""
    settings = json.loads(sys.stdin.readline())
    endpoint = msgspec.json.decode(settings["endpoint"], type=Endpoint)
    moved = settings["moved"]
    caches = {
        kind: Cache(kind, settings["page_bytes"], settings["num_blocks"], seed=None)
        for kind in KINDS
    }
    memcpy = Memcpy(caches[FULL].payload(moved))
    with (
        SharedMemoryTransport(folder=Path(settings["folder"])) as connector,
        connector.attach(endpoint, timeout=ATTACH_S) as remote,
    ):

        def load(kind: str, generation: int, blocks: np.ndarray, checksum: bool) -> None:
            wanted = [remote.verify(slot, generation).checksum for slot in range(moved)]
            found = []
            for group, ids, slots in caches[kind].parts(blocks):
                copy = BlockCopy(group, ids, remote.slots, slots, checksum)
                sums = caches[kind].copier.load(copy)
                found += sums.tolist()
            for slot in range(moved):
                remote.verify(slot, generation)
            if checksum and found != wanted:
                raise SystemExit("the bytes that arrived are not those that were sent")

        for line in sys.stdin:
            job = json.loads(line)
            blocks = block_ids(job["order"], moved, settings["num_blocks"])
            seconds = memcpy.beside(
                caches[job["kind"]].payload(moved),
                partial(load, job["kind"], job["generation"], blocks, job["checksum"]),
            )
            print(json.dumps(seconds), flush=True)


def measure(page_bytes: int, moved_bytes: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Rates at one page size: a row for each order of blocks, kind of cache, with and without
    checksums."""
    moved = max(6, moved_bytes // (page_bytes * LAYERS))
    num_blocks = moved + moved // 2
    caches = {kind: Cache(kind, page_bytes, num_blocks, seed=1) for kind in KINDS}
    memcpy = Memcpy(caches[FULL].payload(moved))
    rows = []
    with (
        Arena.create(moved, caches[FULL].layout.slot_bytes) as arena,
        SharedMemoryTransport(folder=folder) as connector,
    ):
        arena.slots[:] = 1

        def save(kind: str, generation: int, blocks: np.ndarray, checksum: bool) -> None:
            for slot in range(moved):
                arena.begin_write(slot, generation)
            for group, ids, slots in caches[kind].parts(blocks):
                copy = BlockCopy(group, ids, arena.slots, slots, checksum)
                sums = caches[kind].copier.save(copy)
                assert sums is not None  # as they were asked for
                length = caches[kind].layout.group_bytes[group]
                for slot, each in zip(slots.tolist(), sums.tolist(), strict=True):
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
        assert reader.stdin is not None
        assert reader.stdout is not None
        print(json.dumps(settings), file=reader.stdin, flush=True)
        generation = 0
        for order in ORDERS:
            blocks = block_ids(order, moved, num_blocks)
            for checksum in (False, True):
                samples: dict[str, list[Any]] = {kind: [] for kind in KINDS}
                for turn in range((repeats + 1) * len(KINDS)):
                    kind = KINDS[turn % len(KINDS)]
                    generation += 1
                    seconds = memcpy.beside(
                        caches[kind].payload(moved),
                        partial(save, kind, generation, blocks, checksum),
                    )
                    job = {
                        "kind": kind,
                        "generation": generation,
                        "order": order,
                        "checksum": checksum,
                    }
                    print(json.dumps(job), file=reader.stdin, flush=True)
                    answer = reader.stdout.readline()
                    if not answer:
                        raise SystemExit("the reader ended early")
                    samples[kind].append((*seconds, *json.loads(answer)))
                for kind in KINDS:
                    # The first touches what no later one has to.
                    rows.append(
                        summary(samples[kind][1:], caches[kind].payload(moved))
                        | {
                            "page": page_bytes,
                            "kind": kind,
                            "order": order,
                            "checksum": checksum,
                            "beside_full": beside(
                                samples[kind][1:],
                                caches[kind].payload(moved),
                                samples[FULL][1:],
                                caches[FULL].payload(moved),
                            ),
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


def beside(
    samples: list[tuple[float, ...]], size: int, others: list[tuple[float, ...]], other_size: int
) -> float:
    """Median ratio of the rates of save and load together to those of others, turn by turn."""
    return statistics.median(
        size / (sample[1] + sample[3]) / other_size * (other[1] + other[3])
        for sample, other in zip(samples, others, strict=True)
    )


def markdown(rows: list[dict[str, Any]], command: str, repeats: int) -> str:
    """The table."""
    lines = [
        "# Data plane: blocks from one process to another",
        "",
        f"`{command}`: {machine()}, numpy {np.__version__}.",
        "",
        f"{LAYERS} layers; one thread works at a time. Rates in GB/s of payload, medians of "
        f"{repeats} runs; in brackets the median ratio to a numpy memcpy of as many bytes just "
        "before and after, in the same process. *save*: blocks to slots and publish, in the owner. "
        "*load*: verify, slots to blocks, verify, in the reader. *both*: one after the other.",
    ]
    for kind in KINDS:
        lines += ["", f"## {kind.capitalize()}", ""]
        if kind == HYBRID:
            lines += [
                f"Full attention, a sliding window and states, {LAYERS} layers each, on the same "
                "bytes, a third of the blocks each; the states fill 15/16 of their pages, and the "
                "rest is zeroed by a load. *beside full*: the median ratio of *both* to that of "
                f"full attention in the turn before, to be {TARGET} or more.",
                "",
            ]
        lines += [
            "| page KiB | slot KiB | blocks | checksum | memcpy | save | load | both |"
            + (" beside full |" if kind == HYBRID else ""),
            "|---:|---:|---|---|---:|---:|---:|---:|" + ("---:|" if kind == HYBRID else ""),
        ]
        lines += [
            f"| {row['page'] // KIB} | {row['page'] * LAYERS // KIB} | {row['order']} "
            f"| {'xxh3' if row['checksum'] else 'none'} | {row['memcpy']:.1f} "
            f"| {row['save']:.1f} ({row['save_ratio']:.2f}) "
            f"| {row['load']:.1f} ({row['load_ratio']:.2f}) | {row['both']:.1f} |"
            + (f" {row['beside_full']:.2f} |" if kind == HYBRID else "")
            for row in rows
            if row["kind"] == kind
        ]
    lines += ["", "![Ratios by page size](data_plane.png)"]
    return "\n".join([*lines, ""])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Rates and ratios over page size, for scattered blocks."""
    # Here, as benchmarks on GPUs use the rest of this module and have no matplotlib.
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    pages = sorted({row["page"] for row in rows})
    figure, (rates, ratios, hybrid) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")

    def series(
        field: str, checksum: bool, kind: str = FULL, order: str = "scattered"
    ) -> list[float]:
        chosen = {
            row["page"]: row[field]
            for row in rows
            if (row["kind"], row["order"], row["checksum"]) == (kind, order, checksum)
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
    for order, marker in zip(ORDERS, "os", strict=True):
        for checksum, style in ((False, "-"), (True, ":")):
            label = f"{order}, {'xxh3 checksum' if checksum else 'no checksum'}"
            values = series("beside_full", checksum, HYBRID, order)
            hybrid.plot(kib, values, marker + style, label=label)
    hybrid.axhline(TARGET, color="black", linestyle="--", linewidth=1, label="target")
    for axes, title, unit in (
        (rates, "Rate: scattered blocks", "GB/s of payload (median)"),
        (ratios, "Beside memcpy in the same run: scattered blocks", "ratio (median of pairs)"),
        (hybrid, "Hybrid model beside full attention", "save and load, ratio (median of pairs)"),
    ):
        axes.set(title=title, xlabel="bytes of a block in one layer (KiB)", ylabel=unit)
        axes.set_xscale("log", base=2)
        axes.set_xticks(kib, [str(each) for each in kib])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"KV blocks through a shared arena: {LAYERS} layers to a group")
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
            for row in rows[-4 * len(KINDS) :]:
                print(
                    f"{page:5} KiB {row['kind']:14} {row['order']:11} "
                    f"checksum={row['checksum']!s:5} "
                    f"memcpy {row['memcpy']:5.1f}  save {row['save']:5.1f} "
                    f"({row['save_ratio']:.2f})  load {row['load']:5.1f} "
                    f"({row['load_ratio']:.2f})  beside full {row['beside_full']:.2f}",
                    flush=True,
                )
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/data_plane.py" + (" --quick" if arguments.quick else "")
    (arguments.output / "data_plane.md").write_text(markdown(rows, command, repeats))
    plot(rows, arguments.output / "data_plane.png")


if __name__ == "__main__":
    main()
