# SPDX-License-Identifier: Apache-2.0
"""A pool whose books machine code keeps has the same slots, lists and counts as with numpy."""

from copy import deepcopy
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_connector.arena import native_slots as module
from omni_connector.arena import slot_pool
from omni_connector.arena.block_index import BlockIndex, seed_of, tags_of
from omni_connector.arena.eviction import DEPTHS, TAILS
from omni_connector.arena.native_slots import NUM_PROMPTS, NewBlocks, native_slots
from omni_connector.arena.row_table import rows_of
from omni_connector.arena.slot_index import SlotChanges
from omni_connector.arena.slot_pool import SlotListing, SlotPool
from omni_connector.config import Admission
from omni_connector.prefix.filled import FilledRuns
from omni_connector.prefix.hints import NO_HINTS, HintPolicy, Hints
from omni_connector.runtime.context import EngineContext
from omni_connector.testing.clock import FakeClock

PINNED = Hints(pin_s=0.9)

SLOTS = 6
BLOCKS = 12
ARRAYS = (
    *("generation", "_users", "_busy", "_ready", "_keyed", "_tenant", "_privileged", "_free"),
    *("_pinned_until",),
)
ORDER = (
    *("_stamp", "_again", "_favoured", "pinned", "_hash", "_past", "_past_depth", "_depth"),
    *("_new", "_used_again"),
)


def key(number: int, length: int = 16) -> bytes:
    return number.to_bytes(2, "big") * (length // 2)


def pool_of(*, listed: bool, changes: bool = False) -> SlotPool:
    pool = SlotPool(SLOTS)
    pool.quota = 4
    if listed:
        index = BlockIndex.create(SLOTS, b"epoch of an aren")
        pool.listing = SlotListing(index, b"model", SlotChanges(SLOTS) if changes else None)
    return pool


class Pools(RuleBasedStateMachine):
    """Both pools do the same: blocks come again, quotas are used up, copies fail."""

    def __init__(self) -> None:
        super().__init__()
        with patch.object(slot_pool, "native_slots", lambda: None):
            self.pools = [pool_of(listed=True)]
        self.pools.append(pool_of(listed=True))
        assert [each._native is None for each in self.pools] == [True, False]
        self.clock = FakeClock()
        # At most 4 slots are privileged, 2 of each tenant; and each has 4 slots.
        self.policies = [HintPolicy(x, EngineContext(self.clock), 0.7, 0.7) for x in self.pools]
        self.copies: list[np.ndarray] = []
        self.held: list[np.ndarray] = []

    def both(self, method: str, *arguments: object, **named: object) -> object:
        one, other = (getattr(each, method)(*arguments, **named) for each in self.pools)
        np.testing.assert_equal(one, other)
        return one

    @rule(
        numbers=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True),
        most=st.sampled_from([0, 2, 6, 6]),
        tenants=st.sampled_from([0, 0, 1, None]),
        prompt=st.sampled_from([None, 0, 3, TAILS, 5 * DEPTHS + 2, NUM_PROMPTS]),
        length=st.sampled_from([8, 16, 16, 32, 6, 40]),
        tagged=st.booleans(),
    )
    def keep(
        self,
        numbers: list[int],
        most: int,
        tenants: int | None,
        prompt: int | None,
        length: int,
        tagged: bool,
    ) -> None:
        keys = [key(number, length) for number in numbers]
        owners = np.array(numbers) % 3 if tenants is None else tenants
        if tenants is None and not self.both("fits", owners):
            return
        prompts = None if prompt is None else prompt + np.array(numbers) // 8 * DEPTHS
        tags = tags_of(b"model", 1, keys) if tagged else None
        kept = self.both("keep", 1, keys, most, owners, prompts, tags)
        if len(kept.slots):  # type: ignore[attr-defined]
            self.copies.append(kept.slots)  # type: ignore[attr-defined]

    @rule(
        lots=st.lists(
            st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, 6), st.integers(0, 2)),
            min_size=1,
            max_size=6,
        ),
        length=st.sampled_from([8, 16]),
    )
    def keep_for_a_while(self, lots: list[tuple[int, int, int]], length: int) -> None:
        """As most blocks are: until others need their slots."""
        for first, count, tenant in lots:
            numbers = np.arange(first, first + count) % BLOCKS
            keys = [key(number, length) for number in numbers.tolist()]
            prompts = first * DEPTHS + np.arange(count) % 2
            tags = tags_of(b"model", 1, keys)
            kept = self.both("keep", 1, keys, 6, tenant, prompts, tags)
            self.both("filled", kept.slots)  # type: ignore[attr-defined]
            self.both("let_go", kept.slots[::-1])  # type: ignore[attr-defined]
            self.agree()

    @rule(
        lots=st.lists(
            st.tuples(
                st.integers(0, 1),
                st.integers(0, BLOCKS - 1),
                st.integers(1, 4),
                st.sampled_from([0, 0, 1, 2]),
                st.sampled_from([NO_HINTS, NO_HINTS, Hints("high"), PINNED, Hints("high", 1.5)]),
            ),
            min_size=1,
            max_size=3,
        ),
        lengths=st.sampled_from([(16, 16)] * 4 + [(16, 32), (6, 6)]),
        admission=st.sampled_from(["auto", "auto", "all", "second_hit"]),
    )
    def keep_new(
        self,
        lots: list[tuple[int, int, int, int, Hints]],
        lengths: tuple[int, int],
        admission: Admission,
    ) -> None:
        """Exactly where nothing has to be decided slots are given, and the same as otherwise. So
        are pins and favours."""
        groups: list[tuple[int, FilledRuns]] = []
        for group in sorted({each[0] for each in lots}):
            runs = FilledRuns()
            of_group = [each for each in lots if each[0] == group]
            for number, (_, first, count, tenant, hints) in enumerate(of_group):
                keys = [key((first + i) % BLOCKS, lengths[number % 2]) for i in range(count)]
                prompt = number * DEPTHS + first % 3
                runs.add(keys, keys, [0] * count, prompt=prompt, tenant=tenant, hints=hints)
            groups.append((group, runs))
        new = [
            NewBlocks(
                group,
                runs.keys,
                rows_of(group, runs.keys),
                runs.packed,
                seed_of(b"model", group),
            )
            for group, runs in groups
        ]
        expected = self.nothing_to_decide(groups, admission)
        given = []
        for pool, policy in zip(self.pools, self.policies, strict=True):
            assert pool.listing is not None
            given.append(pool.keep_new(new, [pool.listing._index], admission))
            for (group, runs), slots in zip(groups, given[-1] or [], strict=False):
                if not policy.grant_new(slots, runs.grants()):
                    policy.grant(group, runs.blocks())
        np.testing.assert_equal(given[0], given[1])
        assert (given[0] is not None) == expected
        self.copies += given[0] or []

    def nothing_to_decide(
        self,
        groups: list[tuple[int, FilledRuns]],
        admission: Admission,
    ) -> bool:
        """By the methods of the plain pool, which decide each question by itself."""
        pool = self.pools[0]
        assert pool.listing is not None
        owners: list[int] = []
        for group, runs in groups:
            keys = runs.keys
            counts, prompts, tenants = np.array(runs.runs, np.int64).T
            owners += tenants.repeat(counts).tolist()
            alike = len(set(map(len, keys))) == 1 and len(keys[0]) >= 8
            if not alike or len(set(keys)) < len(keys) or len(pool.find(group, keys)):
                return False
            if (pool.listing._index.find(tags_of(b"model", group, keys))[0] >= 0).any():
                return False
            if admission == "auto" and sum(len(each.keys) for _, each in groups) > pool._num_free:
                order = deepcopy(pool._order)  # as it remembers what it passes over
                unknown = np.full(len(keys), 1 << 40)
                if not order.admits(unknown, admission, prompts.repeat(counts)).all():
                    return False
        if admission == "second_hit":
            return False
        return len(owners) <= pool._num_available and pool.fits(np.array(owners))

    @rule(depth=st.integers(0, 2), new=st.sampled_from([31, 32, 32]), again=st.integers(3, 5))
    def many_new(self, depth: int, new: int, again: int) -> None:
        for pool in self.pools:
            pool._order._new[depth] = new
            pool._order._used_again[depth] = again

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), fails=st.sampled_from([False] * 5 + [True]), held=st.booleans())
    def ends(self, data: st.DataObject, fails: bool, held: bool) -> None:
        slots = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        self.both("unfilled" if fails else "filled", slots)
        if held:
            self.held.append(slots)
        else:
            self.both("let_go", slots[::-1])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), again=st.sampled_from([False] * 3 + [True]))
    def let_go(self, data: st.DataObject, again: bool) -> None:
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if again:
            self.both("hold", slots)
            self.held.append(slots)
        self.both("let_go", slots)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def let_go_before_the_end(self, data: st.DataObject) -> None:
        slots = data.draw(st.sampled_from(self.copies))
        self.both("let_go", slots)
        self.both("filled", slots)
        self.copies = [each for each in self.copies if each is not slots]

    @rule(numbers=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True))
    def hand_off(self, numbers: list[int]) -> None:
        keys = [key(number) for number in numbers]
        pairs = [pool.take([[], keys], [0, 0]) for pool in self.pools]
        np.testing.assert_equal(*pairs)
        if pairs[0] is None:
            return
        slots = pairs[0][0][1]
        lacks = self.both("lacks", slots)
        new = [each for each, is_lacking in zip(keys, lacks, strict=True) if is_lacking]  # type: ignore[call-overload]
        self.both("fill", 1, new, slots[lacks])
        self.both("filled", slots[lacks])
        self.held.append(slots)

    @rule(slot=st.integers(0, SLOTS - 1), until=st.sampled_from([None, 1001.0]))
    def privilege(self, slot: int, until: float | None) -> None:
        if self.pools[0]._ready[slot]:
            slots = np.array([slot])
            self.both("privilege", slots, 1, favour=until is None, pin_until=until)

    @rule(slots=st.lists(st.integers(-1, SLOTS), max_size=4))
    def touch(self, slots: list[int]) -> None:
        numbers = np.array(slots, np.int64)
        self.both("touch", numbers, self.pools[0].generation[numbers % SLOTS])

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def end_pins(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.both("end_pins", self.clock())

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def forget(self, really: bool) -> None:
        if really:
            self.both("forget")

    @invariant()
    def agree(self) -> None:
        one, other = self.pools
        for name in ARRAYS:
            np.testing.assert_equal(getattr(one, name), getattr(other, name), name)
        for name in ORDER:
            np.testing.assert_equal(getattr(one._order, name), getattr(other._order, name), name)
        assert one.counts() == other.counts()
        assert one._kept_of == other._kept_of
        assert one._privileged_of == other._privileged_of
        for name in ("releases", "num_cached", "num_pinned", "num_privileged", "_next_end"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.listing is not None
        assert other.listing is not None
        asked = tags_of(b"model", 1, [key(number) for number in range(BLOCKS)])
        found = [each._index.find(asked) for each in (one.listing, other.listing)]
        np.testing.assert_equal(*found)

    def teardown(self) -> None:
        for pool in self.pools:
            assert pool.listing is not None
            pool.listing._index.close()


class TestPools(Pools.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

    def setUp(self) -> None:
        pytest.importorskip("llvmlite")


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_it_is_used_for_what_is_kept_unless_somebody_wants_to_know_the_changes(
    listed: bool, changes: bool
) -> None:
    pytest.importorskip("llvmlite")
    pool = pool_of(listed=listed, changes=changes)
    keys = [key(number) for number in range(3)]
    with patch.object(pool, "_renew") as by_numpy:
        pool.keep(0, keys, 3, 1, None, tags_of(b"model", 0, keys))
    assert by_numpy.called == (listed and changes)


@pytest.mark.usefixtures("without_llvmlite")
def test_without_a_compiler_numpy_keeps_the_books(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "vllm"):
        assert native_slots.__wrapped__() is None
    assert "machine code cannot be used (llvmlite" in caplog.text
    assert module.NUM_PROMPTS > 256 * DEPTHS
