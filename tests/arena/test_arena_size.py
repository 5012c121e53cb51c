# SPDX-License-Identifier: Apache-2.0
"""An arena is as large as is useful, and leaves memory to all others."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena import available as memory
from omni_connector.arena import size as arena_size_module
from omni_connector.arena.available import available_bytes, memory_limit_bytes
from omni_connector.arena.size import (
    GIB,
    LARGEST_PART,
    ORDINARY_PART,
    USEFUL_CACHES,
    ArenaSizing,
    arena_size,
)
from omni_connector.errors import ConfigError

from ..kv.shapes import group_shape

TIB = 1 << 40


@given(
    available=st.integers(-GIB, 4 * TIB),
    slot_bytes=st.integers(1, 1 << 14).map(lambda pages: pages * 4096),
    cache_blocks=st.integers(1, 1 << 22),
    prompt_blocks=st.integers(1, 1 << 17),
    sharers=st.integers(1, 64),
)
def test_an_arena_is_within_its_bounds(
    available: int, slot_bytes: int, cache_blocks: int, prompt_blocks: int, sharers: int
) -> None:
    size = arena_size(
        available=available,
        slot_bytes=slot_bytes,
        cache_blocks=cache_blocks,
        prompt_blocks=prompt_blocks,
        sharers=sharers,
    )
    every = sharers * size.slots
    useful = USEFUL_CACHES * cache_blocks
    assert 0 <= size.slots <= useful
    assert every * slot_bytes * LARGEST_PART <= max(0, available)
    if size.slots > prompt_blocks:
        assert every * slot_bytes * ORDINARY_PART <= available
    # One more would be too many.
    more = sharers * (size.slots + 1) * slot_bytes
    if size.slots < useful:
        assert more * ORDINARY_PART > available
        assert size.slots >= prompt_blocks or more * LARGEST_PART > available
    assert size.why


def sized(available_gib: float, cache_gib: float, sharers: int = 1) -> tuple[float, str]:
    """Of a 70B model with one rank: 320 KiB a token, the longest prompt 26k tokens."""
    slot_bytes = 16 * 320 * 1024
    size = arena_size(
        available=int(available_gib * GIB),
        slot_bytes=slot_bytes,
        cache_blocks=int(cache_gib * GIB) // slot_bytes,
        prompt_blocks=26_000 // 16,
        sharers=sharers,
    )
    return round(size.slots * slot_bytes / GIB, 1), size.why


def test_a_prompt_of_26k_tokens_of_a_70b_model_fits() -> None:
    assert sized(1000, 40) == (80.0, "2 times the KV cache")
    assert sized(200, 40) == (20.0, "1/10 of the 200.0 GiB of memory available")
    slots, why = sized(60, 40)
    assert slots == 7.9
    assert why.startswith("one prompt of the longest")
    assert sized(20, 40) == (5.0, "1/4 of the 20.0 GiB of memory available")
    assert sized(800, 40, 8)[0] == 10.0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stripes_hold_together_what_the_arena_of_one_rank_holds(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """8 GiB of which all arenas take a tenth; then so much that 2 KV caches are the limit; then so
    little that the longest prompt needs more than a tenth."""
    groups = (group_shape(block_size=16),)
    slot_bytes = 1 << 20
    for free in (8 * GIB, TIB, 2 * GIB):
        monkeypatch.setattr(arena_size_module, "unclaimed_bytes", lambda _, free=free: free)
        one, striped = (
            ArenaSizing(None, cache_blocks=800, max_tokens=16 * 400, sharers=each).size(
                slot_bytes, groups, each
            )
            for each in (1, ranks)
        )
        assert one.slots - ranks < striped.slots * ranks < one.slots + ranks
        apart = ArenaSizing(None, cache_blocks=800, max_tokens=16 * 400, sharers=ranks)
        assert apart.size(slot_bytes, groups).slots >= striped.slots


def machine(root: Path, available_kib: int, own: str, files: dict[str, str]) -> Path:
    """A root folder with the files that tell of memory."""
    texts = {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n",
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {
    "pod/memory.max": "6000000",
    "pod/memory.current": "2500000",
    "pod/memory.stat": "anon 5\ninactive_file 500000\n",
    "pod/engine/memory.max": "max",
    "pod/engine/memory.current": "1",
}
V1 = {
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/memory.usage_in_bytes": "1000000",
    "memory/job/memory.limit_in_bytes": "3000000",
    "memory/job/memory.usage_in_bytes": "2000000",
    "memory/job/memory.stat": "total_inactive_file 1500000\n",
}
IN_A_CONTAINER = {"memory.max": "5000000", "memory.current": "1000000"}


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("", {}, 8192_000),
        ("0::/\n", {}, 8192_000),
        ("0::/pod/engine\n", V2, 4_000_000),
        ("5:cpu:/x\n4:cpuset,memory:/job\n0::/\n", V1, 2_500_000),
        ("0::/a/path/of/the/host\n", IN_A_CONTAINER, 4_000_000),
        ("0::/\n", {"memory.max": "1000", "memory.current": "5000"}, 0),
        ("0::/\n", {"memory.max": "1000"}, 1000),  # how much is used is not said
        ("0::/../elsewhere\n", IN_A_CONTAINER, 4_000_000),
    ],
)
def test_memory_is_what_the_machine_and_each_cgroup_leave(
    own: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert available_bytes(machine(tmp_path, 8000, own, files)) == expected


MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MOUNTS = """\
22 1 0:20 / /proc rw - proc proc rw
30 23 0:26 {v2} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
31 23 0:27 / /cgroups/cpu rw - cgroup cgroup rw,cpu,cpuacct
32 23 0:28 {v1} /cgroups/memory rw - cgroup cgroup rw,memory
"""


@pytest.mark.parametrize(
    ("own", "mounts", "files", "expected"),
    [
        ("", "", {}, MACHINE),
        ("0::/\n", "", {"memory.max": "max"}, MACHINE),
        ("0::/\n", "", {"memory.max": "12345"}, 12345),
        ("4:memory:/\n", "", {"memory/memory.limit_in_bytes": "54321"}, 54321),
        ("4:memory:/\n", "", {"memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
        ("0::/pod/engine\n", "", V2, 6_000_000),  # of a group around it, with no use of its own
        ("4:memory:/job/step\n", "", V1, 3_000_000),
        # Both versions, and a mount in another place than usual.
        (
            "4:memory:/job\n0::/pod\n",
            MOUNTS.format(v2="/", v1="/"),
            {**V2, "../../../cgroups/memory/job/memory.limit_in_bytes": "5000000"},
            5_000_000,
        ),
        # A container without a namespace of cgroups, and a group that it has made within its own.
        (
            "0::/system.slice/c1/nested\n",
            MOUNTS.format(v2="/system.slice/c1", v1="/"),
            {"memory.max": "7000000", "nested/memory.max": "6500000"},
            6_500_000,
        ),
        # The group of another container, whose name begins like its own.
        (
            "0::/c12\n",
            MOUNTS.format(v2="/c1", v1="/"),
            {"memory.max": "7000000", "2/memory.max": "1"},
            7_000_000,
        ),
    ],
)
def test_the_limit_is_that_of_the_own_cgroup_and_of_all_around_it(
    own: str, mounts: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    root = machine(tmp_path, 8000, own, files)
    (root / "proc/self/mountinfo").write_text(mounts)
    assert memory_limit_bytes(root) == expected


def test_a_limit_counts_where_the_kernel_says_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda root: 123)
    assert available_bytes(tmp_path) == 123


SLOT = 1 << 20


@pytest.mark.parametrize(
    ("given_gib", "free_gib", "options", "slots"),
    [
        (4, 10, {}, 4096),
        (8, 10, {}, 8192),
        (16, 10, {}, 9 * 1024),  # less what is spared
        (4, 10, {"sharers": 2}, 4096),
        (8, 10, {"sharers": 2}, 4608),
        # Of ranks on a CPU, those that may not have touched their KV caches yet.
        (8, 10, {"reserved": 6 * GIB}, 8192),
        (8, 10, {"reserved": 6 * GIB, "sharers": 2}, 3 * 1024),
        (8, 10, {"reserved": 60 * GIB, "sharers": 2}, 2 * 1024),
    ],
)
def test_a_configured_size_is_cut_to_the_memory_that_is_left(
    given_gib: int,
    free_gib: int,
    options: dict[str, Any],
    slots: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(arena_size_module, "unclaimed_bytes", lambda _: free_gib * GIB)
    monkeypatch.setattr(arena_size_module, "spared_bytes", lambda: GIB)
    sizing = ArenaSizing(given_gib * GIB, cache_blocks=9, max_tokens=16, **options)
    size = sizing.size(SLOT, ())
    assert size.slots == slots
    caplog.set_level(logging.INFO)
    sizing.tell(0, 1, size, SLOT, ())
    (record,) = caplog.records
    cut = slots < given_gib * 1024
    assert (record.levelno == logging.WARNING) == cut
    assert ("lower arena_gib, or raise the memory limit" in record.getMessage()) == cut


def test_without_memory_for_a_slot_the_error_names_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_size_module, "unclaimed_bytes", lambda _: SLOT)
    with pytest.raises(ConfigError, match="lower arena_gib, or raise the memory limit"):
        ArenaSizing(GIB, cache_blocks=9, max_tokens=16).size(SLOT, ())


# Fills an arena, within a cgroup that leaves less than is configured.
_FILLS = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from omni_connector.arena import size
from omni_connector.arena.arena import Arena
slots = size.ArenaSizing(1 << 30, cache_blocks=9, max_tokens=16).size(1 << 20, ()).slots
if sys.argv[2] == "as configured":
    slots = 1024
with Arena.create(slots, 1 << 20) as arena:
    for slot in range(slots):
        arena.slots[slot] = 1
print(slots)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup that allows 400 MiB of memory, within another one that allows more."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    tops = [Path(each.split()[4]) for each in mounts if each.split()[-1] == "rw,memory"]
    tops += [Path(each.split()[4]) for each in mounts if " - cgroup2 " in each]
    outer = tops[0] / f"omni-test-{os.getpid()}" if tops else Path("/nowhere/at/all")
    inner = outer / "engine"
    try:
        for each in (outer, inner):
            each.mkdir()
            limits = [each / "memory.max", each / "memory.limit_in_bytes"]
            limit = next((one for one in limits if one.exists()), None)
            if limit is None:
                pytest.skip("no controller of memory to be had")
            limit.write_text(str((2000 if each == outer else 400) << 20))
            if limit == limits[0] and each == outer:
                (outer / "cgroup.subtree_control").write_text("+memory")
        yield inner
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    finally:
        for each in (inner, outer):
            with contextlib.suppress(OSError):
                each.rmdir()


@pytest.mark.parametrize("size", ["as there is room", "as configured"])
def test_an_arena_is_filled_within_a_cgroup(cgroup: Path, size: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FILLS, str(cgroup), size], capture_output=True, text=True
    )
    if size == "as configured":
        assert ran.returncode == -signal.SIGKILL, ran
    else:
        assert ran.returncode == 0, ran
        assert 100 < int(ran.stdout) < 400
