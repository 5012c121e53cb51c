# SPDX-License-Identifier: Apache-2.0
"""Runs the parts one after the other, and makes tables of what they report."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_BENCHMARKS: Final = Path(__file__).parents[1]
_SAID: Final = 1500
"""Last bytes of the log of a part that failed, in its line of the results."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: as in the results.
        limit_s: seconds after which it is killed, with all its processes.
        module: has `measure`; None for the one of that name in this folder.
    """

    name: str
    limit_s: float
    module: str | None = None


PARTS: Final = (
    Part("capture", 60),
    Part("copies", 95),
    Part("forward", 50),
    Part("pages", 50),
    Part("peers", 40),
)


def run(parts: Sequence[Part], folder: Path, device: str, *, quick: bool = False) -> bool:
    """Run parts; whether all of them ended well.

    Args:
        folder: of the results; what is there is added to.
        device: `module:class` of an `Accelerator`.
        quick: small sizes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    good = True
    for part in parts:
        print(f"== {part.name}, at most {part.limit_s:g} s", flush=True)
        end = _run_one(part, folder, results, device, quick)
        put(results, part=part.name, step="end", **end)
        (folder / "results.md").write_text(tables(results))
        good = good and end["ok"]
    print((folder / "results.md").read_text())
    return good


def put(results: Path, **fields: Any) -> None:
    """Add a line to the results, at once."""
    line = json.dumps(fields)
    with results.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def _run_one(part: Part, folder: Path, results: Path, device: str, quick: bool) -> dict[str, Any]:
    """Run one part in a process group of its own; how it ended."""
    command = [sys.executable, "-m", "on_gpu.part", part.module or f"on_gpu.{part.name}"]
    command += [part.name, str(results.resolve()), device, *(["--quick"] if quick else [])]
    paths = [str(_BENCHMARKS), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    log = folder / f"{part.name}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
            except ProcessLookupError:
                pass
            process.wait()
    took = round(time.monotonic() - began, 1)
    if code == 0:
        return {"ok": True, "s": took}
    failure = f"exit status {code}" if code is not None else f"not done in {part.limit_s:g} s"
    said = log.read_bytes()[-_SAID:].decode(errors="replace")
    return {"ok": False, "s": took, "failure": failure, "said": said}


def tables(results: Path) -> str:
    """The results as markdown: a table for each kind of line of each part."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    lines = ["# The copies on a GPU", ""]
    lines += [row["about"] for row in rows if "about" in row][:1]
    for part in dict.fromkeys(row["part"] for row in rows):
        lines += ["", f"## {part}"]
        of_part = [row for row in rows if row["part"] == part and "about" not in row]
        for step in dict.fromkeys(row["step"] for row in of_part):
            lines += ["", *_table(step, [row for row in of_part if row["step"] == step])]
    return "\n".join([*lines, ""])


def _table(step: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    columns = dict.fromkeys(name for row in rows for name in row if name not in ("part", "step"))
    yield f"| {' | '.join([step, *columns])} |"
    yield f"|---|{'---:|' * len(columns)}"
    for row in rows:
        yield f"| | {' | '.join(_cell(row.get(name, '')) for name in columns)} |"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{name}: {each}" for name, each in value.items())
    return " ".join(str(value).replace("|", "\\|").split())


def main(about: str) -> int:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu", description=about)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    names = ",".join(part.name for part in PARTS)
    parser.add_argument("--only", default=names, help="parts, by commas; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--device", default="on_gpu.cuda_device:Cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(names.split(",")):
        parser.error(f"no parts: {', '.join(sorted(unknown))}; there are {names}")
    parts = [part for part in PARTS if part.name in only]
    return int(not run(parts, arguments.out, arguments.device, quick=arguments.quick))
