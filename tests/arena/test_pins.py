# SPDX-License-Identifier: Apache-2.0
"""Pinned slots stay until their time, and are at most a part of all slots."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_connector.arena.slot_index import Ints
from omni_connector.arena.slot_pool import PIN_PART, Bools, SlotPool
from omni_connector.testing.clock import FakeClock


class PoolMachine(RuleBasedStateMachine):
    """Keeping, hand-offs, hits, pins, time, resets, in any order: bounds hold, a slot has what a
    dictionary says, and nothing is lost."""

    SLOTS = 12

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.pool = SlotPool(self.SLOTS)
        self.saves: list[np.ndarray] = []
        self.handoffs: list[np.ndarray] = []
        # When the pin of each pinned slot ends, that of a request by itself and that of a session.
        self.until: dict[int, dict[bool, float]] = {}
        self.content: dict[int, bytes] = {}  # of each slot that was copied last

    prompts = st.sampled_from([1, 2, 3])

    def pinned(self) -> Bools:
        return self.pool.pinned(np.arange(self.SLOTS))

    @staticmethod
    def keys(prompt: int, first: int, count: int) -> list[bytes]:
        return [b"%d/%d" % (prompt, i) for i in range(first, first + count)]

    @rule(prompt=prompts, first=st.integers(0, 9), count=st.integers(1, 9), most=st.integers(0, 9))
    def keep(self, prompt: int, first: int, count: int, most: int) -> None:
        keys = self.keys(prompt, first, count)
        lacking = count - len(self.pool.find(0, keys))
        chosen, slots, dropped, beyond = self.pool.keep(0, keys, most)
        assert len(chosen) == len(slots) <= most
        assert len(chosen) == lacking - dropped
        assert len(beyond) <= min(max(0, lacking - most), dropped, self.pool._num_available)
        assert not self.pool.find(0, [keys[i] for i in beyond]).size
        if len(slots):
            self.saves.append(slots)
            self.holds(slots, [keys[i] for i in chosen])

    def holds(self, slots: Ints, keys: list[bytes]) -> None:
        """These slots are taken for these blocks: they are nobody else's."""
        others = [s for each in (*self.saves[:-1], *self.handoffs) for s in each.tolist()]
        assert not set(others) & set(slots.tolist())
        self.content.update(zip(slots.tolist(), keys, strict=True))

    @rule(prompt=prompts, first=st.integers(0, 9), count=st.integers(1, 9))
    def take(self, prompt: int, first: int, count: int) -> None:
        keys = self.keys(prompt, first, count)
        pinned = self.pinned()
        taken = self.pool.take([keys], [0])
        if taken is None:
            return
        slots = taken[0][0]
        lacks = self.pool.lacks(slots)
        assert not pinned[slots[lacks]].any(), "a pinned slot was given to another block"
        assert [self.content[s] for s in slots[~lacks].tolist()] == [
            keys[i] for i in np.flatnonzero(~lacks)
        ]
        self.holds(slots[lacks], [keys[i] for i in np.flatnonzero(lacks)])
        self.pool.fill(0, [keys[i] for i in np.flatnonzero(lacks)], slots[lacks])
        self.pool.filled(slots[lacks])
        self.handoffs.append(slots)

    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        if self.saves:
            slots = self.saves.pop(data.draw(st.integers(0, len(self.saves) - 1)))
            (self.pool.filled if well else self.pool.unfilled)(slots)
            self.pool.let_go(slots[::-1])
        if self.handoffs:
            slots = self.handoffs.pop(data.draw(st.integers(0, len(self.handoffs) - 1)))
            self.pool.let_go(slots[::-1])

    @rule(
        prompt=prompts,
        first=st.integers(0, 9),
        count=st.integers(1, 9),
        seconds=st.lists(st.sampled_from([5.0, 50.0]), min_size=9, max_size=9),
        sessions=st.lists(st.booleans(), min_size=9, max_size=9),
    )
    def pin(
        self, prompt: int, first: int, count: int, seconds: list[float], sessions: list[bool]
    ) -> None:
        before = self.pinned()
        slots = self.pool.find(0, self.keys(prompt, first, count))
        ends = self.clock() + np.array(seconds[: len(slots)])
        room = self.SLOTS // PIN_PART - np.count_nonzero(before)
        new = slots[~before[slots]][:room].tolist()
        pinned = [slot for slot in slots.tolist() if before[slot] or slot in new]
        of_session = sessions[: len(slots)]
        assert self.pool.pin(slots, ends, np.array(of_session, bool)) == len(pinned)
        assert np.flatnonzero(self.pinned() & ~before).tolist() == sorted(new)
        for slot, end, whose in zip(slots.tolist(), ends.tolist(), of_session, strict=True):
            if slot in pinned:
                until = self.until[slot] if before[slot] else {True: 0.0, False: 0.0}
                self.until[slot] = until | {whose: max(end, until[whose])}

    @rule(seconds=st.sampled_from([1, 10, 100]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        pinned = np.flatnonzero(self.pinned()).tolist()
        self.pool.end_pins(self.clock())
        stay = [slot for slot in pinned if max(self.until[slot].values()) > self.clock()]
        assert np.flatnonzero(self.pinned()).tolist() == stay

    @rule(prompt=prompts, first=st.integers(0, 9), count=st.integers(1, 9), fix=st.booleans())
    def session_ends(self, prompt: int, first: int, count: int, fix: bool) -> None:
        slots = self.pool.find(0, self.keys(prompt, first, count))
        before = self.pinned()
        over = []
        for slot in slots[before[slots]].tolist():
            until = self.until[slot]
            if fix:
                until[False] = max(until.values())
            elif until[True] and until[False] <= self.clock():
                over.append(slot)
            until[True] = 0.0
        if fix:
            self.pool.fix_session_pins(slots)
        else:
            assert self.pool.end_session_pins(slots, self.clock()) == len(over)
        assert np.flatnonzero(before & ~self.pinned()).tolist() == sorted(over)

    @rule(prompt=prompts, first=st.integers(0, 9), count=st.integers(1, 9))
    def drop(self, prompt: int, first: int, count: int) -> None:
        slots = self.pool.find(0, self.keys(prompt, first, count))
        held = [slot for slot in slots.tolist() if self.pool.any_held(np.array([slot]))]
        assert self.pool.drop(slots) == len(slots) - len(held)
        assert sorted(self.pool.find(0, self.keys(prompt, first, count))) == sorted(held)

    @rule(told=st.lists(st.tuples(st.integers(-1, SLOTS), st.integers(0, 3)), max_size=8))
    def touch(self, told: list[tuple[int, int]]) -> None:
        numbers, ago = np.array(told, np.int64).reshape(-1, 2).T
        self.pool.touch(numbers, self.pool.generation[numbers % self.SLOTS] - ago // 3)

    @rule(numbers=st.permutations(range(SLOTS)), ago=st.integers(0, 1))
    def requeue(self, numbers: list[int], ago: int) -> None:
        asked = np.array(numbers)
        again = self.pool._order._again.copy()
        self.pool.requeue(asked, self.pool.generation[asked] - ago)
        assert (self.pool._order._again == again).all()

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert not self.pinned().any()

    @invariant()
    def counts_agree(self) -> None:
        pool = self.pool
        order = pool._order
        cached = pool.cached()
        assert pool.num_cached == len(cached)
        assert pool.num_pinned == np.count_nonzero(self.pinned()[cached])
        assert order.num_pins == np.count_nonzero(order.pinned) <= self.SLOTS // PIN_PART
        assert self.SLOTS - sum(pool.counts()[:2]) == np.count_nonzero(pool._users)
        free = pool._free[: pool.counts()[0]]
        assert not order.pinned[free].any()
        held = {s for each in (*self.saves, *self.handoffs) for s in each.tolist()}
        assert not held & {*cached.tolist(), *free.tolist()}
        assert len(held) + len(cached) + len(free) == self.SLOTS
        # Each cached slot has its turn once.
        batches = [pair for queue in order._batches for pair in queue.items()]
        living = [n for pair in batches for n in order._living(*pair).tolist()]
        assert sorted(living) == sorted(set(living))
        assert len(living) == pool.num_cached
        assert all(each.alive for _, each in batches)

    def teardown(self) -> None:
        for slots in self.saves:
            self.pool.unfilled(slots)
        for slots in (*self.saves, *self.handoffs):
            self.pool.let_go(slots[::-1])
        self.pool.end_pins(float("inf"))
        free, cached, pinned = self.pool.counts()
        assert (free + cached, pinned) == (self.SLOTS, 0)
        self.pool.forget()
        assert self.pool.counts()[0] == self.SLOTS


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def full(pool: SlotPool, *prompts: list[bytes]) -> None:
    """Keep these prompts, one after the other."""
    for keys in prompts:
        slots = pool.keep(0, keys, len(keys)).slots
        pool.filled(slots)
        pool.let_go(slots[::-1])


@pytest.mark.parametrize("pinned", [True, False])
def test_the_end_of_a_prompt_goes_first_pinned_before_or_not(pinned: bool) -> None:
    clock, pool = FakeClock(), SlotPool(24)
    keys = [b"%d" % number for number in range(6)]
    full(pool, keys)
    if pinned:
        assert pool.pin(pool.find(0, keys), clock() + 5) == 6
        clock.advance(10)
        pool.end_pins(clock())
    others = iter(range(100))
    while len(there := pool.find(0, keys)) == 6:
        full(pool, [b"other %d" % next(others)])
    assert there.tolist() == pool.find(0, keys[: len(there)]).tolist()


def test_pins_take_no_more_than_their_part_and_give_it_back() -> None:
    """Clients choose their pins: those of one must leave the others' blocks alone."""
    clock, pool = FakeClock(), SlotPool(64)
    honest = [[b"honest %d" % n] for n in range(16)]
    full(pool, *honest)
    granted = []
    for number in range(8):
        keys = [b"%d/%d" % (number, block) for block in range(8)]
        full(pool, keys)
        granted.append(pool.pin(pool.find(0, keys), clock() + 5))
        for prompt in honest:  # they are used again all the while
            slots = pool.find(0, prompt)
            pool.touch(slots, pool.generation[slots])
    assert sum(len(pool.find(0, keys)) for keys in honest) == 16
    assert granted == [8, 8, 0, 0, 0, 0, 0, 0]
    clock.advance(10)
    pool.end_pins(clock())
    assert pool.pin(pool.find(0, keys), clock() + 5) == 8


def test_pins_of_many_times_are_looked_at_a_few_times_a_second() -> None:
    """Whatever times clients choose, pins end at few moments."""
    clock = FakeClock()
    pool = SlotPool(1024)
    keys = [b"%d" % number for number in range(256)]
    full(pool, keys)
    pool.pin(pool.find(0, keys), clock() + 1 + np.arange(256) / 256)
    ends = []
    for _ in range(2048):
        before = pool.num_pinned
        pool.end_pins(clock())
        if pool.num_pinned < before:
            ends.append(clock())
        clock.advance(1 / 512)
    assert pool.num_pinned == 0
    assert len(ends) <= 6
    assert all(later - earlier >= 0.24 for earlier, later in pairwise(ends))


@pytest.mark.parametrize(
    ("pins", "stays"), [([50, 5], True), ([5, 50], True), ([5, 5], False), ([10], False)]
)
def test_of_two_pins_the_one_that_ends_later_counts(pins: list[float], stays: bool) -> None:
    clock, pool = FakeClock(), SlotPool(4)
    full(pool, [b"a"])
    slots = pool.find(0, [b"a"])
    for seconds in pins:
        assert pool.pin(slots, clock() + seconds) == 1
    clock.advance(10)
    pool.end_pins(clock())
    assert pool.pinned(slots).all() == stays
