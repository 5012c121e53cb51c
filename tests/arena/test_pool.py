# SPDX-License-Identifier: Apache-2.0
"""Memory for transfers: who has it, how much of it is kept, and when the quarantine ends."""

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_connector.arena.pool import MAX_BYTES, MAX_PEER_BYTES, QUARANTINE_S, Pool, pages
from omni_connector.errors import TransportError
from omni_connector.testing import FakeClock

SIZE = 8192


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def registered() -> list[int]:
    """Where the memory is that the pool has registered."""
    return []


@pytest.fixture
def pool(registered: list[int], clock: FakeClock) -> Pool:
    return Pool(
        lambda memory: registered.append(memory.ctypes.data),
        lambda memory: registered.remove(memory.ctypes.data),
        3 * SIZE,
        clock,
    )


def place(memory: NDArray[np.uint8]) -> int:
    return int(memory.ctypes.data)


def test_memory_is_used_again_by_what_needs_as_much(pool: Pool, registered: list[int]) -> None:
    small, large = pool.take(SIZE), pool.take(2 * SIZE)
    pool.give_back(small)
    pool.give_back(large)
    assert place(pool.take(2 * SIZE)) == place(large)
    assert place(pool.take(SIZE)) == place(small)
    assert place(pool.take(SIZE)) not in (place(small), place(large))
    assert len(registered) == 3


def test_no_more_is_kept_than_was_asked_for(pool: Pool, registered: list[int]) -> None:
    for memory in [pool.take(SIZE) for _ in range(5)]:
        pool.give_back(memory)
    assert len(registered) == 3
    pool.keep_spare(0)
    assert registered == []


def test_after_the_end_nothing_is_kept(pool: Pool, registered: list[int]) -> None:
    first, second = pool.take(SIZE), pool.take(SIZE)
    pool.keep_spare(0)
    pool.give_back(first)
    assert registered == [place(second)]
    pool.give_back_later(second)
    pool.tidy()
    assert not pool._spare
    assert not pool._returned


def test_what_is_given_back_later_is_there_after_tidying(pool: Pool) -> None:
    memory = pool.take(SIZE)
    pool.give_back_later(memory)
    assert place(pool.take(SIZE)) != place(memory)
    pool.tidy()
    assert place(pool.take(SIZE)) == place(memory)


def test_quarantined_memory_is_nobodys_until_it_is_over(
    pool: Pool, registered: list[int], clock: FakeClock
) -> None:
    memory = pool.take(SIZE)
    pool.quarantine("peer", memory, 100)
    clock.advance(QUARANTINE_S - 1)
    pool.tidy()
    assert place(pool.take(SIZE)) != place(memory)
    assert (pool.quarantined_bytes, place(memory) in registered) == (100, True)
    clock.advance(1)
    pool.tidy()
    assert (pool.quarantined_bytes, place(memory) in registered) == (0, False)


def test_peers_are_set_aside_for_what_they_have_in_quarantine(pool: Pool, clock: FakeClock) -> None:
    pool.quarantine("bad", pool.take(SIZE), MAX_PEER_BYTES - 1)
    pool.quarantine("good", pool.take(SIZE), 1)
    assert pool.backed_off() == []
    clock.advance(1)
    pool.quarantine("bad", pool.take(SIZE), 1)
    assert pool.backed_off() == ["bad"]
    clock.advance(QUARANTINE_S - 1)
    pool.tidy()
    assert pool.backed_off() == []
    assert pool.quarantined_bytes == 1


def test_where_too_much_is_in_quarantine_all_who_failed_are_set_aside(pool: Pool) -> None:
    for number in range(5):
        pool.quarantine(f"peer {number}", pool.take(SIZE), MAX_BYTES // 5 + 1)
    pool.quarantine("with little", pool.take(SIZE), 1)
    assert len(pool.backed_off()) == 6


def test_memory_that_there_is_not_is_a_transport_error() -> None:
    with pytest.raises(TransportError, match="no memory"):
        pages(1 << 62)
