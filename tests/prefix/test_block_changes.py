# SPDX-License-Identifier: Apache-2.0
"""What is told of arena and store is true after each step, however much happens in one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector.memory.block_index import BlockIndex, tags_of
from omni_connector.memory.slot_index import SlotChanges
from omni_connector.memory.slot_pool import SlotListing, SlotPool
from omni_connector.prefix import block_changes
from omni_connector.prefix.block_changes import BlockChanges

SLOTS = 6


class Told:
    """Follows the changes: the blocks that are there, by place."""

    def __init__(self):
        self.pool = SlotPool(SLOTS)
        self.index = BlockIndex.create(SLOTS, bytes(16))
        self.pool.listing = SlotListing(self.index, b"", SlotChanges(SLOTS))
        self.changes = BlockChanges(self.pool, [16], lambda request, group, i: (request, i))
        self.there = {False: set(), True: set()}

    def keep(self, keys):
        """Blocks fill, and those that get a slot are copied there."""
        for i, key in enumerate(keys):
            self.changes.filled("a", 0, i, key, key)
        slots = self.pool.keep(0, keys, len(keys)).slots
        self.pool.filled(slots)
        self.pool.let_go(slots[::-1])

    def hear(self):
        for change in self.changes.take():
            there = self.there[change.in_store]
            if change.content is None:
                there.remove(change.block_hash)
            else:
                assert change.block_hash not in there
                there.add(change.block_hash)
        return self.there[False]

    def kept(self):
        found = self.pool._index.find(0, KEYS, 1) >= 0
        return {key for key, here in zip(KEYS, found.tolist(), strict=True) if here}


KEYS = [bytes([n]) * 32 for n in range(12)]
STEPS = st.lists(
    st.one_of(
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
        st.sampled_from(["hear", "reset", "idle reset"]),
    ),
    max_size=30,
)


@pytest.fixture
def told():
    told = Told()
    yield told
    told.index.close()


@given(steps=STEPS)
@settings(max_examples=200, deadline=None)
def test_after_any_steps_what_was_told_is_what_is_there(steps):
    told = Told()
    for step in steps:
        if step == "hear":
            assert told.hear() == told.kept()
        elif isinstance(step, str):
            told.pool.forget()
            if step == "reset":
                told.changes.void()
            else:
                told.hear()
        else:
            told.keep(step)
    assert told.hear() == told.kept()
    told.index.close()


def test_blocks_of_a_prompt_come_in_its_order(told):
    told.keep(KEYS[:5])
    assert [change.content for change in told.changes.take()] == [("a", i) for i in range(5)]


def test_a_block_that_nobody_described_is_not_told_of(told):
    told.pool.keep(0, KEYS[:1], 1)
    told.pool.filled(np.arange(SLOTS)[:1])
    assert told.changes.take() == []
    told.pool.forget()
    assert told.changes.take() == []


def test_of_the_store_so_many_blocks_are_believed(told, monkeypatch):
    monkeypatch.setattr(block_changes, "_MAX_STORED", 4)
    told.changes.looked_up("a", 0, KEYS[:3], [True] * 3)
    told.changes.looked_up("b", 0, KEYS[3:6], [True, True, False])
    told.hear()
    assert told.there[True] == set(KEYS[1:5])
    told.changes.looked_up("a", 0, KEYS[:3], [True, False])
    told.hear()
    assert told.there[True] == {KEYS[0], KEYS[2], KEYS[3], KEYS[4]}


def test_a_block_is_found_whether_one_without_a_key_is_filled_with_it_or_not():
    """The last block of a hand-off has none, and is copied with those before it."""
    told = Told()
    key = bytes(range(32))
    taken = told.pool.take([[key, None]], [0])
    assert taken is not None
    slots = taken[0][0]
    told.pool.fill(0, [key, None], slots)
    told.pool.filled(slots)
    assert told.index.find(tags_of(b"", 0, [key]))[0].tolist() == [slots[0]]
