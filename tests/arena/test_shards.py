# SPDX-License-Identifier: Apache-2.0
"""Slots that must lie in one stripe: taken there or not at all, and never by two."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_connector.arena.slot_pool import SlotPool
from omni_connector.kv.stripes import slot_group_ranges, slot_groups_of

ANY = 0
"""The cache group whose blocks may lie in any stripe; the other one has shards."""

User = list[tuple[int, list[bytes | None], np.ndarray]]
"""What a user holds: slots by slot group, with the names of their blocks."""


class ShardMachine(RuleBasedStateMachine):
    """The pool against sets of slots that are counted anew with each rule."""

    STRIPES = 3
    ROWS = 4

    def __init__(self) -> None:
        super().__init__()
        groups = slot_groups_of([self.STRIPES, 1], self.STRIPES)
        self.slot_groups = slot_group_ranges(groups)
        self.slots = self.STRIPES * self.ROWS
        self.pool = SlotPool(self.slots, groups=groups)
        self.users: list[User] = []
        self.now = 0.0

    def home(self, slot_group: int) -> int | None:
        shards = self.slot_groups[1]
        return slot_group - shards.start if slot_group in shards else None

    def available(self) -> Counter[int]:
        """For each stripe the slots that nobody holds, fills or has pinned."""
        held = {s for user in self.users for _, _, slots in user for s in slots.tolist()}
        pinned = set(np.flatnonzero(self.pool.pinned(np.arange(self.slots))).tolist())
        return Counter(s % self.STRIPES for s in range(self.slots) if s not in held | pinned)

    def begin(self, user: User) -> None:
        """A user has got these slots: none is another's, and each lies in its stripe."""
        held = {
            s: (g, key)
            for each in self.users
            for g, names, slots in each
            for s, key in zip(slots.tolist(), names, strict=True)
        }
        for group, names, slots in user:
            for slot, key in zip(slots.tolist(), names, strict=True):
                assert self.home(group) in (None, slot % self.STRIPES)
                # A slot of two users has one block, which has a name.
                assert slot not in held or (key is not None and held[slot] == (group, key))
                held[slot] = group, key
        self.users.append(user)

    @rule(
        blocks=st.lists(st.sampled_from("abcdef"), max_size=5, unique=True),
        states=st.lists(st.sampled_from(["", "x", "y", "z"]), max_size=3, unique=True),
    )
    def take(self, blocks: list[str], states: list[str]) -> None:
        names: list[list[bytes | None]] = [[each.encode() for each in blocks]]
        ordered = sorted(states, key=lambda each: not each)  # the one without a name is the last
        names += [[each.encode() or None for each in ordered] for _ in self.slot_groups[1]]
        firsts = [1] * len(names)  # each block is looked up by itself
        there = self.available()
        found = [
            self.pool.places(g, [key or b"none" for key in of_group])
            for g, of_group in enumerate(names)
        ]
        needs = [int((slots < 0).sum()) for slots in found]
        held = {s for user in self.users for _, _, slots in user for s in slots.tolist()}
        pinned = self.pool.pinned(np.arange(self.slots))
        shared = [s for of in found for s in of.tolist() if s >= 0]
        left = there - Counter(s % self.STRIPES for s in shared if s not in held and not pinned[s])
        fits = sum(needs) <= left.total() and all(
            needs[g] <= left[self.home(g) or 0] for g in self.slot_groups[1]
        )
        before = self.pool.counts(), self.pool.generation.tolist()
        taken = self.pool.take(names, firsts)
        assert (taken is not None) == fits
        if taken is None:
            assert before == (self.pool.counts(), self.pool.generation.tolist()), "all or nothing"
            return
        slots = taken[0]
        for of, had in zip(slots, found, strict=True):
            assert (of[had >= 0] == had[had >= 0]).all()
        self.begin([(g, of, slots[g]) for g, of in enumerate(names)])
        for g, of_group in enumerate(names):
            lacks = np.flatnonzero(self.pool.lacks(slots[g]))
            self.pool.fill(g, [of_group[i] for i in lacks.tolist()], slots[g][lacks])
            self.pool.filled(slots[g][lacks])

    @rule(
        names=st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=5, unique=True),
        most=st.integers(0, 5),
    )
    def keep_shards(self, names: list[str], most: int) -> None:
        keys = [each.encode() for each in names]
        shards = self.slot_groups[1]
        lacks = np.array([self.pool.places(g, keys) < 0 for g in shards])
        there = self.available()
        wanted = [i for i in range(len(keys)) if lacks[:, i].any()][:most]
        chosen = 0
        for i in wanted:
            needs = Counter(k for k in range(self.STRIPES) if lacks[k, i])
            if any(there[k] < number for k, number in needs.items()):
                break
            there -= needs
            chosen += 1
        given = self.pool.keep_shards(shards, keys, most)
        assert given.num_blocks == chosen
        user = []
        for k, (at, slots) in enumerate(given.shards):
            assert at.tolist() == [i for i in wanted[:chosen] if lacks[k, i]]
            user.append((shards[k], [keys[i] for i in at.tolist()], slots))
        self.begin(user)
        for _, _, slots in user:
            self.pool.filled(slots)
        assert (self.pool.find(shards.start, keys) >= 0).all()

    @rule(names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True))
    def keep(self, names: list[str]) -> None:
        keys: list[bytes] = [each.encode() for each in names]
        lacking = int((self.pool.places(ANY, keys) < 0).sum())
        there = self.available().total()
        given = self.pool.keep(ANY, keys, len(keys))
        assert len(given.slots) == min(lacking, there)
        self.begin([(ANY, [keys[i] for i in given.chosen.tolist()], given.slots)])
        self.pool.filled(given.slots)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), fails=st.booleans())
    def let_go(self, data: st.DataObject, fails: bool) -> None:
        user = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        for _, _, slots in user:
            if fails and not any(
                np.isin(slots, others).any() for each in self.users for _, _, others in each
            ):
                self.pool.unfilled(slots)
            self.pool.let_go(slots[::-1])

    @rule(data=st.data())
    def touch_pin_and_end_pins(self, data: st.DataObject) -> None:
        slots = np.array(sorted(data.draw(st.sets(st.integers(0, self.slots - 1)))), np.int64)
        self.pool.touch(slots, self.pool.generation[slots])
        here = slots[np.isin(slots, self.pool.cached())]
        if len(here) and data.draw(st.booleans()):
            self.pool.pin(here, self.now + 1.0)
        else:
            self.now += data.draw(st.sampled_from((0.5, 2.0)))
            self.pool.end_pins(self.now)

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    @invariant()
    def counts_by_stripe_agree(self) -> None:
        pool = self.pool
        free = Counter((pool._free[: pool._num_free] % self.STRIPES).tolist())
        assert [free[k] for k in range(self.STRIPES)] == pool._free_by_stripe.tolist()
        there = self.available()
        counted = pool._free_by_stripe + pool._order.by_stripe
        assert [there[k] for k in range(self.STRIPES)] == counted.tolist()
        assert pool._num_available == there.total()


class ManyStripes(ShardMachine):
    STRIPES = 8
    ROWS = 2


TestShards = ShardMachine.TestCase
TestShards.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestManyStripes = ManyStripes.TestCase
TestManyStripes.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@given(
    stripes=st.integers(2, 8),
    blocks=st.integers(0, 100),
    states=st.integers(0, 20),
    rows=st.integers(1, 20),
)
def test_an_empty_arena_takes_what_it_says(stripes: int, blocks: int, states: int, rows: int):
    pool = SlotPool(stripes * rows, groups=slot_groups_of([stripes, 1], stripes))
    sizes = [blocks] + [states] * stripes
    fits = states <= rows and blocks + stripes * states <= stripes * rows
    assert (pool.least_slots(sizes) <= stripes * rows) == fits
    taken = pool.take([[None] * size for size in sizes], [0] * len(sizes))
    assert (taken is not None) == fits
    if taken is not None:
        slots, _ = taken
        assert len({s for of in slots for s in of.tolist()}) == sum(sizes)
        assert all((of % stripes == k).all() for k, of in enumerate(slots[1:]))


def test_a_stripe_is_evicted_by_its_own_order() -> None:
    """The least recently used slots of the stripe go, and those of others stay."""
    pool = SlotPool(8, groups=slot_groups_of([2, 1], 2))
    names = [b"%d" % i for i in range(8)]
    given = pool.keep(0, names, 8)
    pool.filled(given.slots)
    pool.let_go(given.slots)
    taken = pool.take([[], [], [None, None]], [0, 0, 0])
    assert taken is not None
    assert sorted(taken[0][2].tolist()) == [1, 3]
    left = [name for name in names if pool.find(0, [name]).size]
    assert left == [b"0", b"2", b"4", b"5", b"6", b"7"]
