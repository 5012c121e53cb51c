# SPDX-License-Identifier: Apache-2.0
"""500 schedules: most are the same each time, and the others new with each commit."""

import hashlib
import subprocess
from pathlib import Path

import pytest

import omni_connector
from omni_connector.testing.simulation.campaign import campaign

pytestmark = pytest.mark.vllm

KNOWN = range(350)
NEW = 150
PART = 50


def first_new_seed() -> int:
    """Where the seeds of this commit begin; of these sources, where there is no commit."""
    package = Path(omni_connector.__file__).parent
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=package, capture_output=True, text=True, check=False
    )
    name = found.stdout.strip().encode()
    if not name:
        name = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    return 1_000_000 + int.from_bytes(hashlib.sha256(name).digest()[:4], "big")


def parts() -> list[range]:
    start = first_new_seed()
    found = [range(at, at + PART) for at in range(KNOWN.start, KNOWN.stop, PART)]
    return found + [range(at, at + PART) for at in range(start, start + NEW, PART)]


@pytest.mark.parametrize("seeds", parts(), ids=lambda seeds: f"{seeds.start}:{seeds.stop}")
def test_all_holds(seeds):
    failures = ["\n".join(verdict.lines(story=True)) for verdict in campaign(seeds)]
    assert not failures, "\n\n".join(failures)
