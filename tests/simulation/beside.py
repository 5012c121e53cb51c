# SPDX-License-Identifier: Apache-2.0
"""Long runs of the simulation, in processes of their own that go on beside the other tests.

Their time is virtual, so that a seed is the same schedule however slowly it runs. They are started
before the first test, and take what the other tests leave idle of the cores.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import omni_connector
from tests.simulation import HASHES_VARIABLE

ROOT = Path(__file__).parents[2]
SEEDS = 100
STORIES = 12
_COMMAND = "from tests.simulation.command import main; raise SystemExit(main())"
_LOWEST_PRIORITY = 19
_LONGEST_S = 3600.0  # of a run that stands still


@dataclass(frozen=True)
class Run:
    """A run that has been started.

    Attributes:
        seeds: from:to.
        output: takes what it prints.
    """

    seeds: str
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def errors(self) -> Path:
        """Takes what it logs."""
        return self.output.with_suffix(".err")

    def finish(self) -> str:
        """Wait for its end; what it has printed. AssertionError unless all held."""
        status = self.process.wait(_LONGEST_S)
        printed = self.output.read_text()
        logged = self.errors.read_text()
        assert status == 0, f"seeds {self.seeds}\n{printed[-30000:]}\n{logged[-4000:]}"
        return printed


@contextmanager
def campaigns(folder: Path) -> Iterator[Mapping[str, Run]]:
    """Half of these schedules are the same each time, and half are new with each commit.

    They are not run in pytest's process: what it keeps of logged exceptions keeps arenas alive,
    which a schedule would call left behind.
    """
    runs: dict[str, Run] = {}
    with _ended(runs):
        for name, first in (("known", 0), ("new", first_new_seed())):
            runs[name] = _start(folder / name, f"{first}:{first + SEEDS}", hashes="0")
        yield runs


@contextmanager
def stories(folder: Path) -> Iterator[Sequence[Run]]:
    """The same schedules, told twice, where strings are hashed differently."""
    runs: dict[str, Run] = {}
    with _ended(runs):
        for hashes in ("random", "1"):
            runs[hashes] = _start(folder / hashes, f"0:{STORIES}", "--story", hashes=hashes)
        yield tuple(runs.values())


def first_new_seed() -> int:
    """Where the seeds of this commit begin; of this version, where there is no commit."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    name = found.stdout.strip() or omni_connector.__version__
    return 1_000_000 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _start(output: Path, seeds: str, *arguments: str, hashes: str) -> Run:
    with output.open("wb") as printed, output.with_suffix(".err").open("wb") as logged:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "--seeds", seeds, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), HASHES_VARIABLE: hashes},
            stdout=printed,
            stderr=logged,
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
    return Run(seeds, process, output)


@contextmanager
def _ended(runs: Mapping[str, Run]) -> Iterator[None]:
    try:
        yield
    finally:
        for run in runs.values():
            run.process.kill()
            run.process.wait()
