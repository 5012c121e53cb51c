# SPDX-License-Identifier: Apache-2.0
"""Engines that start together do not take the same memory twice."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_connector.arena import memory_claims
from omni_connector.arena.available import available_bytes, memory_cgroup
from omni_connector.arena.memory_claims import Claim, Reservation, deployment_id, sizing_lock
from omni_connector.arena.size import ArenaSizing

GIB = 1 << 30
TIB = 1 << 40
SLOT = 1 << 20


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of this test's own, as other engines of this host have theirs."""
    own = f"omni-connector-test/{os.urandom(4).hex()}/"
    pattern = memory_claims._NAME.pattern.replace("omni\\-connector\\-arena/1/", own)
    monkeypatch.setattr(memory_claims, "_PREFIX", own)
    monkeypatch.setattr(memory_claims, "_LOCK", f"{own}lock")
    monkeypatch.setattr(memory_claims, "_NAME", memory_claims.re.compile(pattern))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 1 TiB of free memory, of which nothing is populated yet."""

    def available(*, claimed: int = 0, in_cgroup: int = 0) -> int:
        return max(0, TIB - claimed)

    monkeypatch.setattr(memory_claims, "available_bytes", available)
    monkeypatch.setattr(memory_claims, "memory_cgroup", lambda: 0)


@pytest.fixture
def reserve() -> Iterator[Callable[..., tuple[int, Reservation]]]:
    """Sizes and reserves an arena of a deployment; gives its bytes."""
    made: list[Reservation] = []

    def reserve(deployment: str, sharers: int = 1) -> tuple[int, Reservation]:
        sized = ArenaSizing(
            given=None, cache_blocks=1 << 30, max_tokens=1, sharers=sharers, deployment=deployment
        )
        size, reservation = sized.reserve(SLOT, ())
        made.append(reservation)
        return size.slots * SLOT, reservation

    yield reserve
    for each in made:
        each.close()


@pytest.mark.usefixtures("machine")
def test_sixteen_engines_that_start_together_leave_memory_to_others(
    reserve: Callable[..., tuple[int, Reservation]],
) -> None:
    sizes = [reserve(deployment_id(f"engine {n}"))[0] for n in range(16)]
    assert sizes[0] == TIB // 10 // SLOT * SLOT
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) < 0.85 * TIB
    more = [reserve(deployment_id(f"engine {n}"))[0] for n in range(16, 32)]
    assert min(more) > 0
    assert sum(sizes) + sum(more) < TIB


@pytest.mark.usefixtures("machine")
def test_ranks_and_data_parallel_engines_of_a_deployment_have_equal_parts(
    reserve: Callable[..., tuple[int, Reservation]],
) -> None:
    ranks = [reserve(deployment_id(f"an engine_dp{n}"), sharers=4) for n in range(4)]
    assert len({size for size, _ in ranks}) == 1
    assert sum(size for size, _ in ranks) <= TIB // 10


@pytest.mark.usefixtures("machine")
def test_what_is_populated_counts_once_and_what_is_closed_not_at_all(
    reserve: Callable[..., tuple[int, Reservation]],
) -> None:
    first, reservation = reserve(deployment_id("one"))
    (claim,) = memory_claims.claims()
    assert (claim.size, claim.populated, claim.left) == (first, 0, first)
    for _ in range(3):
        reservation.populated(first // 4)
    (claim,) = memory_claims.claims()
    assert claim.size == first
    assert abs(claim.left - first // 4) <= SLOT
    reservation.close()
    reservation.close()
    reservation.populated(SLOT)
    assert memory_claims.claims() == []
    assert reserve(deployment_id("another"))[0] == first


def test_memory_that_is_limited_for_others_only_is_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "proc/meminfo": f"MemAvailable: {100 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": str(20 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(2 * GIB),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("omni_connector.arena.available.memory_limit_bytes", lambda root: TIB)
    assert memory_cgroup(tmp_path) == (tmp_path / "sys/fs/cgroup/pod").stat().st_ino
    assert memory_cgroup(tmp_path / "nowhere") == 0
    assert available_bytes(tmp_path) == 18 * GIB
    assert available_bytes(tmp_path, claimed=30 * GIB) == 18 * GIB
    assert available_bytes(tmp_path, claimed=30 * GIB, in_cgroup=5 * GIB) == 13 * GIB
    assert available_bytes(tmp_path, claimed=95 * GIB, in_cgroup=5 * GIB) == 5 * GIB
    assert available_bytes(tmp_path, claimed=TIB) == 0


ENGINE = """
import sys
from omni_connector.arena import memory_claims
from omni_connector.arena.size import ArenaSizing
memory_claims._PREFIX, memory_claims._LOCK, pattern = sys.argv[2:]
memory_claims._NAME = memory_claims.re.compile(pattern)
memory_claims.available_bytes = lambda claimed=0, in_cgroup=0: max(0, (1 << 40) - claimed)
name = memory_claims.deployment_id(sys.argv[1])
sized = ArenaSizing(given=None, cache_blocks=1 << 30, max_tokens=1, deployment=name)
print("ready", flush=True)
sys.stdin.readline()
size, reservation = sized.reserve(1 << 20, ())
print(size.slots << 20, flush=True)
sys.stdin.readline()
"""


def test_processes_look_one_after_the_other_and_leave_nothing_when_they_are_killed() -> None:
    names = memory_claims._PREFIX, memory_claims._LOCK, memory_claims._NAME.pattern
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(number), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    try:
        for engine in engines:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "ready\n"
        for engine in engines:  # all at once
            assert engine.stdin is not None
            engine.stdin.write("\n")
            engine.stdin.flush()
        sizes = sorted(int(engine.stdout.readline()) for engine in engines if engine.stdout)
        assert len(set(sizes)) == 3
        assert len(memory_claims.claims()) == 3
    finally:
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
            engine.communicate(timeout=60)
    assert memory_claims.claims() == []


def test_who_is_stopped_under_the_lock_holds_up_nobody_for_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("vllm.omni_connector.worker")
    monkeypatch.setattr(logger, "propagate", True)
    with sizing_lock() as first, sizing_lock(0.05) as second:
        assert (first, second) == (True, False)
    assert "without the host's lock" in caplog.text
    with sizing_lock() as again:
        assert again


def test_one_waits_for_the_other() -> None:
    order = []
    with sizing_lock():

        def next_one() -> None:
            with sizing_lock(60.0) as held:
                order.append(held)

        other = threading.Thread(target=next_one)
        other.start()
        other.join(0.05)
        order.append(False)
    other.join(60.0)
    assert order == [False, True]


def test_names_that_say_nothing_sensible_are_left_out() -> None:
    said = [
        f"\0{memory_claims._PREFIX}{'0' * 16}/{'0' * 16}/0/{'f' * 12}/0",
        f"\0{memory_claims._PREFIX}{'1' * 16}/{'0' * 16}/0/{'f' * 13}/0",
        f"\0{memory_claims._PREFIX}{'2' * 16}/{'0' * 16}/0/-5/0",
        f"\0{memory_claims._PREFIX}",
    ]
    bound = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in said]
    try:
        for each, name in zip(bound, said, strict=True):
            each.bind(name)
        (claim,) = memory_claims.claims()
        assert claim.arena == "0" * 16
    finally:
        for each in bound:
            each.close()


def test_every_claim_fits_a_name() -> None:
    claim = Claim("f" * 16, "f" * 16, (1 << 64) - 1, 1 << 60, 1 << 60)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(claim.address)
    assert Claim("", "", 0, 5, 9).left == 0
