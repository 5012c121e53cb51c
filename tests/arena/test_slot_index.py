# SPDX-License-Identifier: Apache-2.0
"""Blocks that are kept are found by their keys, and few keys have to be looked up for it."""

import hashlib
from collections import Counter
from hashlib import blake2b
from itertools import pairwise
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena import slot_index
from omni_connector.arena.slot_index import SlotIndex, SlotKey
from omni_connector.handoff.leases import Handoff, SlotDirectory
from omni_connector.handoff.prompt import Prompt
from omni_connector.runtime.context import EngineContext

BLOCKS = 4096


class Looked(bytes):
    """A key that counts look-ups of keys in a dict."""

    number = 0

    def __hash__(self) -> int:
        Looked.number += 1
        return bytes.__hash__(self)


def chain(*words: str) -> list[SlotKey | None]:
    """A key for each word, which names those before it too; none for the last word ""."""
    keys: list[SlotKey | None] = []
    before = b""
    for word in words:
        before = hashlib.blake2b(before + word.encode(), digest_size=32).digest()
        keys.append(Looked(before) if word else None)
    return keys


def many(common: int, name: str) -> list[SlotKey | None]:
    return chain(*(["same"] * common + [name] * (BLOCKS - common)))


def copied(directory: SlotDirectory, keys: list[SlotKey | None]) -> tuple[Handoff, int]:
    """Open a hand-off and have it copied; also how many keys the opening looked up."""
    asked = Prompt(token_ids=(len(keys), *(keys[-1] or b"?")), num_tokens=len(keys))
    before = Looked.number
    handoff = directory.open(asked, [keys])
    looked_up = Looked.number - before
    assert handoff is not None
    blocks = directory.copying(handoff, [(0, i) for i in range(len(keys))])
    assert blocks is not None
    directory.filled(handoff, blocks)
    directory.close(handoff.token)
    return handoff, looked_up


@pytest.mark.parametrize("common", [0, 1, BLOCKS // 2, BLOCKS - 1, BLOCKS])
def test_of_a_long_prompt_few_keys_are_looked_up(common: int) -> None:
    directory = SlotDirectory(4 * BLOCKS, EngineContext(lambda: 0.0), 60.0)
    first, looked_up = copied(directory, many(common, "first"))
    assert looked_up <= BLOCKS // 8
    second, looked_up = copied(directory, many(common, "second"))
    assert looked_up <= BLOCKS // 8
    shared = second.slots[0] == first.slots[0]
    assert shared.tolist() == [True] * common + [False] * (BLOCKS - common)


def test_a_long_prompt_that_many_others_followed_is_found_all_the_same() -> None:
    directory = SlotDirectory(5 * BLOCKS, EngineContext(lambda: 0.0), 60.0)
    first, _ = copied(directory, many(BLOCKS, ""))
    for number in range(2 * slot_index._RUNS):
        copied(directory, chain(*[str(number)] * 2 * slot_index._BATCH))
        copied(directory, chain(str(number), "short"))
    again, _ = copied(directory, many(BLOCKS, ""))
    left = int((again.slots[0] == first.slots[0]).argmin())
    assert 0 < left < BLOCKS  # its end was evicted
    assert (again.slots[0][:left] == first.slots[0][:left]).all()


def test_runs_do_not_grow_with_prompts_that_continue_each_other() -> None:
    directory = SlotDirectory(4 * BLOCKS, EngineContext(lambda: 0.0), 60.0)
    words = ["same"] * 2 * slot_index._BATCH
    for number in range(5):
        words += [str(number)] * 7
        copied(directory, chain(*words, ""))
        copied(directory, chain(*words, ""))
    assert len(directory.pool._index._runs) == 1
    for number in range(4 * slot_index._RUNS):
        copied(directory, chain(*[str(number)] * 2 * slot_index._BATCH))
    assert len(directory.pool._index._runs) == slot_index._RUNS


words = st.lists(st.sampled_from("ab"), min_size=1, max_size=9)


@given(
    prompts=st.lists(st.tuples(words, st.booleans(), st.integers(0, 3)), max_size=30),
    slots=st.integers(10, 24),
    batch=st.integers(1, 4),
)
def test_what_is_found_is_what_every_single_key_finds(
    prompts: list[tuple[list[str], bool, int]], slots: int, batch: int
) -> None:
    """Whatever was copied, kept, evicted and copied again, with small batches and few slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_index, "_BATCH", batch)
        directory = SlotDirectory(slots, EngineContext(lambda: 0.0), 60.0)
        index = directory.pool._index
        held: list[Handoff] = []
        holds: dict[int, SlotKey | None] = {}
        for number, (text, tail, ends) in enumerate(prompts):
            keys = chain(*text, *([""] if tail else []))
            asked = Prompt(token_ids=(number,), num_tokens=1)
            one_by_one = [int(index.find(0, [key], 1)[0]) for key in keys]
            assert index.find(0, keys, 0).tolist() == one_by_one
            kept = [slot >= 0 for slot in one_by_one]
            assert all(before or not after for before, after in pairwise(kept))
            handoff = directory.open(asked, [keys])
            if handoff is not None:
                taken = handoff.slots[0].tolist()
                assert max(Counter(taken).values()) == 1
                chosen = directory.copying(handoff, [(0, i) for i in range(len(keys))])
                assert chosen is not None
                for _, i in chosen:
                    holds[taken[i]] = keys[i]
                assert [holds[slot] for slot in taken] == keys
                directory.filled(handoff, chosen)
                held.append(handoff)
            for _ in range(ends):
                if held:
                    directory.close(held.pop(0).token)
        assert (directory.pool._users >= 0).all()
        free = directory.pool._free[: directory.pool._num_free]
        assert len(set(free.tolist())) == len(free)
        assert not directory.pool.any_held(free)


named = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from([None, b"a", b"a\0", b"\0", b"c" * 32, b"c" * 31 + b"\0", b"d" * 33]),
        st.integers(0, 6),
    ),
    max_size=8,
    unique_by=itemgetter(2),
)


@given(steps=st.lists(st.tuples(named, st.sets(st.integers(0, 6)), st.booleans()), max_size=20))
def test_slots_are_found_as_in_a_dict(
    steps: list[tuple[list[tuple[int, SlotKey | None, int]], set[int], bool]],
) -> None:
    """Keys of any length, in two groups; slots are used anew, and all of it is forgotten."""
    index = SlotIndex(np.zeros(7, np.int64))
    model: dict[tuple[int, SlotKey], int] = {}
    for blocks, used_anew, clears in steps:
        for group in (0, 1):
            theirs = [(key, slot) for of, key, slot in blocks if of == group]
            slots = np.array([slot for _, slot in theirs], np.int64)
            index._generation[slots] += 1
            index.keyed[slots] = False
            model = {name: at for name, at in model.items() if at not in slots}
            index.name(group, [key for key, _ in theirs], slots)
            for key, slot in theirs:
                if key is not None:
                    model.setdefault((group, key), slot)
        again = np.array(sorted(used_anew), np.int64)
        index._generation[again] += 1
        index.keyed[again] = False
        model = {name: at for name, at in model.items() if at not in used_anew}
        if clears:
            index.clear()
            model.clear()
        keys = [b"a", b"a\0", b"\0", b"c" * 32, b"c" * 31 + b"\0", b"d" * 33]
        keys += [b"e", blake2b(b"d" * 33, digest_size=32).digest(), b""]
        for group in (0, 1, 1 << 20):
            expected = [model.get((group, key), -1) for key in keys]
            assert index.find(group, keys, 1).tolist() == expected
            assert index.find(group, keys[:1], 0).tolist() == expected[:1]
        assert sorted(model.values()) == np.flatnonzero(index.keyed).tolist()


@pytest.mark.parametrize("length", [16, 32, 64])
def test_every_slot_of_a_full_arena_is_found(length: int) -> None:
    count = 1000
    index = SlotIndex(np.zeros(count, np.int64))
    for turn in range(3):
        keys: list[SlotKey | None] = [
            b"%d/%d" % (turn, i) + bytes(length - 8) for i in range(count)
        ]
        slots = np.random.default_rng(turn).permutation(count)
        index.keyed[:] = False
        index.name(0, keys, slots)
        assert index.find(0, keys, 0).tolist() == slots.tolist()
        assert index.find(1, keys, 0).tolist() == [-1] * count


def test_slots_that_do_not_exist_are_refused() -> None:
    index = SlotIndex(np.zeros(4, np.int64))
    for slot in (-1, 4, 1 << 40):
        with pytest.raises(IndexError):
            index.name(0, [b"key"], np.array([slot]))
