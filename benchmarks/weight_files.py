# SPDX-License-Identifier: Apache-2.0
"""What the digest of all bytes of a model's files costs, beside one read of the files.

In each round, in turns: the files are read once, with nothing done to the bytes; the digest of a
first engine is made, which reads and hashes them; and that of a second engine, which finds what is
kept. The files are in the page cache, as after a start of vLLM. A process of its own hashes, at
ordinary priority here: at idle priority it would also show what else runs on the machine.

    python benchmarks/weight_files.py [--gib 1] [--files 4] [--rounds 5] [--quick]

writes results/weight_files.md beside this file.
"""

import argparse
import os
import queue
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import RESULTS, machine

from omni_connector.identity import full_digest
from omni_connector.identity.full_digest import WeightFilesDigest
from omni_connector.identity.weight_files import files_of
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from omni_connector.runtime.context import PROCESS_CONTEXT

PIECE = 4 << 20


def read(folder: Path) -> float:
    """Seconds of one read of all files."""
    piece = bytearray(PIECE)
    began = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.perf_counter() - began


def digest(folder: Path) -> tuple[float, str]:
    """Seconds until an engine knows the digest, and the digest."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    began = time.perf_counter()
    made = WeightFilesDigest(
        lambda: files_of(folder), lambda: float("inf"), told.put, PROCESS_CONTEXT
    )
    found = told.get(timeout=600)
    seconds = time.perf_counter() - began
    made.close()
    return seconds, found


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="less of all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.quick:
        options.gib, options.rounds = 0.1, 2
    full_digest._IDLE = False
    size = int(options.gib * (1 << 30)) // options.files
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = root / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        for number in range(options.files):
            with (model / f"model-{number}.safetensors").open("wb") as file:
                for _ in range(size // PIECE):
                    file.write(os.urandom(PIECE))
        os.environ[RUNTIME_DIR_VARIABLE] = str(root / "run")
        rounds = []
        for _ in range(options.rounds):
            shutil.rmtree(root / "run", ignore_errors=True)
            once = read(model)
            first, one = digest(model)
            second, other = digest(model)
            assert one == other
            rounds.append((once, first, second))
    gb = size * options.files / 1e9
    ratios = statistics.median(first / once for once, first, _ in rounds)
    seconds = [statistics.median(each) for each in zip(*rounds, strict=True)]
    command = " ".join(["python benchmarks/weight_files.py", *sys.argv[1:]])
    lines = [
        "# The digest of all bytes of a model's files",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"{options.files} files of {size / 2**30:.2f} GiB in the page cache; medians of "
        f"{options.rounds} rounds, in turns.",
        "",
        "| | seconds | GB/s | times one read |",
        "|---|---|---|---|",
        f"| one read of the files | {seconds[0]:.3f} | {gb / seconds[0]:.2f} | 1 |",
        f"| first engine: read and hashed (SHA-256) | {seconds[1]:.3f} | {gb / seconds[1]:.2f} | "
        f"{ratios:.2f} |",
        f"| second engine: what is kept | {seconds[2]:.3f} | | {seconds[2] / seconds[0]:.3f} |",
        "",
        "No start waits for the first engine's. It needs SHA-256, because that is the name of a "
        "large file in Hugging Face's cache, of which nothing is read.",
        "",
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "weight_files.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
