# SPDX-License-Identifier: Apache-2.0
"""What is told of arena and store is true after each step, however much happens in one."""

import contextlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector.arena.block_index import BlockIndex, tags_of
from omni_connector.arena.slot_index import SlotChanges
from omni_connector.arena.slot_pool import SlotListing, SlotPool
from omni_connector.prefix import block_changes
from omni_connector.prefix.block_changes import BlockChanges

SLOTS = 6
KEYS = [bytes([n]) * 32 for n in range(12)]


class Described(NamedTuple):
    request: Any
    index: int
    parent: bytes | None


def describe(request, group, indices):
    return [Described(request, i, None) for i in indices]


class Told:
    """Follows the changes: the blocks that are there, by place."""

    def __init__(self, slots=SLOTS):
        self.pool = SlotPool(slots)
        self.index = BlockIndex.create(slots, bytes(16))
        self.pool.listing = SlotListing(self.index, b"", SlotChanges(slots))
        self.changes = BlockChanges(self.pool, [16], describe)
        self.there = {False: set(), True: set()}
        self.copied = []

    def keep(self, keys):
        """Blocks fill; if they get a slot they are copied there."""
        self.begin(keys)
        self.end()

    def begin(self, keys):
        """Blocks fill; if they get a slot their copies begin."""
        self.changes.filled("a", 0, [(i, key, key) for i, key in enumerate(keys)])
        self.copied.append(self.pool.keep(0, keys, len(keys)).slots)

    def end(self, *, failed=False):
        """The copies that have begun first end."""
        if self.copied:
            slots = self.copied.pop(0)
            (self.pool.unfilled if failed else self.pool.filled)(slots)
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
        found = self.index.find(tags_of(b"", 0, KEYS))[0] >= 0
        return {key for key, here in zip(KEYS, found.tolist(), strict=True) if here}


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["keep", "begin"]),
            st.lists(st.sampled_from(KEYS[:3]), min_size=1, max_size=2, unique=True),
        ),
        st.just("hear"),
        st.just("end"),
        st.sampled_from(["fail", "reset", "idle reset", "forgotten", "tell again"]),
    ),
    min_size=5,
    max_size=30,
)


@pytest.fixture
def told():
    told = Told()
    yield told
    told.index.close()


@given(steps=STEPS, slots=st.integers(1, 3))
@settings(max_examples=400, deadline=None)
def test_after_any_steps_what_was_told_is_what_is_there(steps, slots):
    told = Told(slots)
    forgotten = False
    for step in steps:
        if step == "hear":
            heard = told.hear()
            assert heard <= told.kept() if forgotten else heard == told.kept()
        elif step == "forgotten":
            told.changes.forgotten()
            forgotten = True
        elif step == "tell again":
            told.changes.tell_again()
            forgotten = False
        elif step in ("end", "fail"):
            told.end(failed=step == "fail")
        elif isinstance(step, tuple):
            getattr(told, step[0])(step[1])
        else:
            told.pool.forget()
            if step == "reset":
                told.changes.void()
            else:
                told.hear()
    told.changes.tell_again()
    assert told.hear() == told.kept()
    told.index.close()


PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(
    prompts=st.lists(st.tuples(PROMPT, st.sets(st.integers(0, 3), min_size=1)), max_size=5),
    in_store=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_what_readers_have_forgotten_is_told_again_each_block_after_its_parent(prompts, in_store):
    """A router drops what it hears of a block whose parent it does not know."""
    told = Told(20)

    def prefixes(request, group, indices):
        return [Described(request, i, bytes(request[:i]) if i else None) for i in indices]

    told.changes = BlockChanges(told.pool, [16], prefixes)
    for prompt, some in prompts:  # a block may be kept before its parent
        blocks = [(i, bytes(prompt[: i + 1])) for i in some if i < len(prompt)]
        keys = [key for _, key in blocks]
        if in_store:
            every = [bytes(prompt[: i + 1]) for i in range(len(prompt))]
            told.changes.looked_up(prompt, 0, named(every), [True] * len(every))
            continue
        told.changes.filled(prompt, 0, [(i, key, key) for i, key in blocks])
        slots = told.pool.keep(0, keys, len(keys)).slots
        told.pool.filled(slots)
        told.pool.let_go(slots[::-1])
        told.hear()
    told.hear()
    before = set(told.there[in_store])
    told.changes.forgotten()
    told.hear()
    assert not told.there[in_store]
    told.changes.tell_again()
    again = told.changes.take()
    hashes = [change.block_hash for change in again]
    assert sorted(hashes) == sorted(before)
    for at, change in enumerate(again):
        assert change.content.parent not in hashes[at:]
    told.index.close()


def test_blocks_of_a_prompt_come_in_its_order(told):
    told.keep(KEYS[:5])
    assert [change.content.index for change in told.changes.take()] == list(range(5))


def test_a_block_that_nobody_described_is_not_told_of(told):
    told.pool.keep(0, KEYS[:1], 1)
    told.pool.filled(np.arange(SLOTS)[:1])
    assert told.changes.take() == []
    told.pool.forget()
    assert told.changes.take() == []


def named(keys):
    """Blocks as a look-up names them, with vLLM's hash of each, which is the name here."""
    return [(key, key) for key in keys]


def test_of_the_store_so_many_blocks_are_believed(told, monkeypatch):
    monkeypatch.setattr(block_changes, "_MAX_STORED", 4)
    told.changes.looked_up("a", 0, named(KEYS[:3]), [True] * 3)
    told.changes.looked_up("b", 0, named(KEYS[3:6]), [True, True, False])
    told.hear()
    assert told.there[True] == set(KEYS[1:5])
    told.changes.looked_up("a", 0, named(KEYS[:3]), [True, False])
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


def test_whether_the_arena_has_lost_a_block_is_asked_by_the_key_in_the_arena() -> None:
    """With an adapter it is another than vLLM's hash."""
    asked: list[Any] = []
    arena = SimpleNamespace(lost=lambda group, key: asked.append((group, key)))
    listing = SimpleNamespace(changes=arena)
    pool: Any = SimpleNamespace(lock=contextlib.nullcontext(), listing=listing)
    changes: BlockChanges[Any] = BlockChanges(pool, [16], lambda *_: [])
    changes._kept[0, b"key"] = block_changes._Reported(b"hash", None)
    changes.filled(None, 0, [(0, b"key", b"hash")])
    assert asked == [(0, b"key")]
