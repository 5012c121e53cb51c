# SPDX-License-Identifier: Apache-2.0
"""An arena is as large as is useful, and leaves memory to all others."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena import available as memory
from omni_connector.arena import size as arena_size_module
from omni_connector.arena.available import available_bytes
from omni_connector.arena.size import (
    GIB,
    LARGEST_PART,
    ORDINARY_PART,
    USEFUL_CACHES,
    ArenaSizing,
    arena_size,
)

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
        ("0::/\n", {"memory.max": "1000"}, 8192_000),
    ],
)
def test_memory_is_what_the_machine_and_each_cgroup_leave(
    own: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda: TIB)
    assert available_bytes(machine(tmp_path, 8000, own, files)) == expected


def test_a_limit_counts_where_the_kernel_says_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda: 123)
    assert available_bytes(tmp_path) == 123


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
