# SPDX-License-Identifier: Apache-2.0
"""500 schedules: half of them are the same each time, and half are new with each commit."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import omni_connector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
SEEDS = 250


def first_new_seed() -> int:
    """Where the seeds of this commit begin; of this version, where there is no commit."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    name = found.stdout.strip() or omni_connector.__version__
    return 1_000_000 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory):
    """Both halves, each in a process of its own: what pytest keeps of logged exceptions keeps
    arenas alive, which a schedule would call left behind."""
    folder = tmp_path_factory.mktemp("simulation")
    running: dict[str, tuple[subprocess.Popen[bytes], Path, str]] = {}
    for name, first in (("known", 0), ("new", first_new_seed())):
        seeds = f"{first}:{first + SEEDS}"
        output = folder / name
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "omni_connector.testing.simulation", "--seeds", seeds],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        running[name] = process, output, seeds
        if len(os.sched_getaffinity(0)) < 2:
            process.wait()
    yield running
    for process, _, _ in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("half", ["known", "new"])
def test_all_holds(campaigns, half):
    process, output, seeds = campaigns[half]
    status = process.wait()
    story = output.read_text()
    assert status == 0, f"seeds {seeds}\n{story[-30000:]}"
    assert f"{SEEDS} schedules, seeds {seeds}: 0 failed" in story
    print(story.splitlines()[-1])
