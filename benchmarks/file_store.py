# SPDX-License-Identifier: Apache-2.0
"""How fast blocks go into a folder of files and out again, beside memcpy and plain files.

In each round the store, plain `write` and `pread` of the same bytes in as many files, and one
memcpy of them run one right after the other. The page cache is warm, unless a column says cold:
then it was emptied of the files first. Direct I/O (`O_DIRECT`) is shown beside it, of whole pages.

    python benchmarks/file_store.py [--quick] [--folder FOLDER]

writes results/file_store.md and results/file_store.png beside this file.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from machine import machine

from omni_connector.config import FileStoreSettings
from omni_connector.stores.file_store import FileBlockStore

mpl.use("Agg")
import matplotlib.pyplot as plt

KIB, MIB = 1 << 10, 1 << 20
RESULTS = Path(__file__).parent / "results"
WAIT_S = 120.0
BLOCKS = ((512, 64 * KIB), (64, 1 * MIB), (16, 4 * MIB))
COLUMNS = (
    "memcpy",
    "put",
    "plain write",
    "direct write",
    "get",
    "plain pread",
    "get, cold",
    "plain pread, cold",
    "direct pread",
)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def write(folder: Path, rows: Any, flags: int = 0) -> None:
    """Rows to files, by rename."""
    for i, row in enumerate(rows):
        fd = os.open(folder / f"{i}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
        if os.write(fd, row.data) != row.nbytes:
            raise SystemExit("a write was short")
        os.close(fd)
        os.rename(folder / f"{i}.new", folder / str(i))


def read(folder: Path, rows: Any, flags: int = 0) -> None:
    """Rows from files."""
    for i, row in enumerate(rows):
        fd = os.open(folder / str(i), os.O_RDONLY | flags)
        if os.preadv(fd, [row.data], 0) != row.nbytes:
            raise SystemExit("a read was short")
        os.close(fd)


def forget(folder: Path) -> None:
    """Empty the page cache of the files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(place: Path, count: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each column, one for each round."""
    took: dict[str, list[float]] = {}
    store = FileBlockStore(FileStoreSettings(path=str(place / "kv")))
    rows, back = store.buffer(count, size), store.buffer(count, size)
    rows[:] = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    back[:] = 0
    lengths = [size] * count
    for number in range(rounds + 1):
        keys = [f"{number}/{i}" for i in range(count)]
        plain, direct = place / f"plain{number}", place / f"direct{number}"
        plain.mkdir()
        direct.mkdir()

        def put(keys: list[str] = keys) -> None:
            if not all(store.put(keys, rows, lengths, timeout=WAIT_S)):
                raise SystemExit(f"the store took not all: {store.failures}")

        def get(keys: list[str] = keys) -> None:
            if not all(store.get(keys, back, lengths, timeout=WAIT_S)):
                raise SystemExit(f"the store found not all: {store.failures}")

        ours = {"put": put, "get": get}
        theirs = {
            "plain write": lambda at=plain: write(at, rows),
            "plain pread": lambda at=plain: read(at, back),
        }
        found: dict[str, float] = {"memcpy": seconds(lambda: np.copyto(back, rows))}
        for one, other in (("put", "plain write"), ("get", "plain pread")):
            for name in (one, other) if number % 2 else (other, one):
                found[name] = seconds({**ours, **theirs}[name])
        forget(place)
        for name in ("get", "plain pread"):
            found[f"{name}, cold"] = seconds({**ours, **theirs}[name])
        with contextlib.suppress(OSError):  # this file system has none
            found["direct write"] = seconds(partial(write, direct, rows, os.O_DIRECT))
            found["direct pread"] = seconds(partial(read, direct, back, os.O_DIRECT))
        if not np.array_equal(rows, back):
            raise SystemExit("what came back is not what was put")
        store.discard(keys, timeout=WAIT_S)
        shutil.rmtree(plain)
        shutil.rmtree(direct)
        if number:  # the first round finds the memory
            for name, each in found.items():
                took.setdefault(name, []).append(each)
    store.close()
    return took


def named(nbytes: int) -> str:
    """A size in words."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def ratio(took: dict[str, list[float]], name: str, other: str) -> float:
    """How many times as long one takes as another: the median of the rounds."""
    return statistics.median(a / b for a, b in zip(took[name], took[other], strict=True))


def markdown(results: dict[str, dict[str, list[float]]], nbytes: dict[str, int], head: str) -> str:
    """The tables."""
    lines = [
        "# A store of files, beside memcpy and plain files",
        "",
        head,
        "",
        "GB/s, medians of the rounds.",
        "",
        f"| blocks | {' | '.join(COLUMNS)} |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name, took in results.items():
        cells = [
            f"{nbytes[name] / statistics.median(took[each]) / 1e9:.2f}" if each in took else "none"
            for each in COLUMNS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    pairs = (
        ("get", "memcpy"),
        ("put", "memcpy"),
        ("get", "plain pread"),
        ("put", "plain write"),
        ("get, cold", "plain pread, cold"),
        ("direct pread", "plain pread, cold"),
        ("direct pread", "plain pread"),
        ("direct write", "plain write"),
    )
    lines += [
        "",
        "How many times as long one takes as the other, medians of the pairs:",
        "",
        f"| blocks | {' | '.join(f'{a} / {b}' for a, b in pairs)} |",
        "|---|" + "---:|" * len(pairs),
    ]
    for name, took in results.items():
        cells = [f"{ratio(took, a, b):.2f}" if a in took else "none" for a, b in pairs]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "The store uses no direct I/O. A direct read of a file that is not cached takes less",
        "time, once; but it leaves nothing in the page cache, so that each later load of the",
        "block, by this engine or another, takes what a direct read takes over a cached one. A",
        "direct write takes longer.",
    ]
    lines += ["", "![GB/s of the store and of plain files](file_store.png)"]
    return "\n".join([*lines, ""])


def plot(results: dict[str, dict[str, list[float]]], nbytes: dict[str, int], path: Path) -> None:
    """The rates."""
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(COLUMNS)
    for at, column in enumerate(COLUMNS):
        rates = [
            nbytes[name] / statistics.median(took[column]) / 1e9 if column in took else 0.0
            for name, took in results.items()
        ]
        axes.bar(
            np.arange(len(results)) + (at - len(COLUMNS) / 2) * width, rates, width, label=column
        )
    axes.set_xticks(range(len(results)), list(results))
    axes.set(title="A store of files", ylabel="GB/s (medians)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, and write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default temporary")
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else 25
    results: dict[str, dict[str, list[float]]] = {}
    nbytes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="omni-files-", dir=arguments.folder) as place:
        for count, size in BLOCKS:
            name = f"{count} x {named(size)}"
            nbytes[name] = count * size
            results[name] = measure(Path(place), count, size, rounds)
    command = "python benchmarks/file_store.py" + (" --quick" if arguments.quick else "")
    head = f"`{command}`: {machine()}; {rounds} rounds."
    text = markdown(results, nbytes, head)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "file_store.md").write_text(text)
    plot(results, nbytes, arguments.output / "file_store.png")


if __name__ == "__main__":
    main()
