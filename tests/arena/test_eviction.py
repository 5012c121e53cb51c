# SPDX-License-Identifier: Apache-2.0
"""Slots that were used again stay longer, the end of a prefix goes first, and nothing grows."""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena import slot_pool
from omni_connector.arena.eviction import DEPTHS, LEAST, TAILS, EvictionOrder, depth_of
from omni_connector.arena.slot_index import Ints
from omni_connector.arena.slot_pool import SlotPool

GROUPS = 2


@pytest.fixture(autouse=True)
def hashed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python hashes bytes differently in each process; what is remembered of them may collide."""

    def hashed(key: bytes | None) -> int:
        return int.from_bytes(blake2b(key or b"", digest_size=8).digest(), "little", signed=True)

    monkeypatch.setattr(slot_pool, "hash", hashed, raising=False)


def keys(*words: str) -> list[bytes | None]:
    """A key for each word, which names those before it too."""
    return ["/".join(words[: i + 1]).encode() for i in range(len(words))]


def use(pool: SlotPool, *words: str) -> list[int]:
    """Use the blocks of a prompt, and copy those that are missing; returns their slots."""
    asked = keys(*words)
    taken = pool.take([asked], [0])
    assert taken is not None
    numbers = taken[0][0]
    lacks = np.flatnonzero(pool.lacks(numbers))
    pool.fill(0, [asked[i] for i in lacks], numbers[lacks])
    pool.filled(numbers[lacks])
    pool.let_go(numbers[::-1])
    result: list[int] = numbers.tolist()
    return result


def kept(pool: SlotPool, *words: str) -> int:
    """How many blocks at the beginning of a prompt are cached."""
    found = pool._index.find(0, keys(*words), 0)
    return int((found < 0).argmax()) if (found < 0).any() else len(found)


def test_what_was_used_again_outlives_what_was_used_once_and_later() -> None:
    pool = SlotPool(4)
    use(pool, "twice")
    use(pool, "twice")
    for word in "abcd":
        use(pool, word)
    assert [kept(pool, word) for word in ("twice", "a", "b")] == [1, 0, 1]


def test_what_nobody_uses_any_more_goes_in_the_end() -> None:
    pool = SlotPool(4)
    use(pool, "twice")
    use(pool, "twice")
    for number in range(16):
        use(pool, str(number))
    assert kept(pool, "twice") == 0


def test_what_was_evicted_lately_counts_however_much_was_evicted_before() -> None:
    pool = SlotPool(4)
    for number in range(20):
        use(pool, f"before {number}")
    for word in ("back", *"abcd", "back", *"efgh"):
        use(pool, word)
    assert kept(pool, "back") == 1


def test_what_was_evicted_long_ago_does_not() -> None:
    pool = SlotPool(4)
    for word in ("back", *"abcdijkl", "back", *"efgh"):
        use(pool, word)
    assert kept(pool, "back") == 0


def test_readers_hits_count_in_the_order_in_which_they_are_told() -> None:
    pool = SlotPool(4)
    first, second = use(pool, "a", "b")
    use(pool, "c")
    numbers = np.array([second, first, second, first])
    pool.touch(numbers, pool.generation[numbers])
    use(pool, "d", "e", "f")
    assert (kept(pool, "a", "b"), kept(pool, "c")) == (1, 0)


def keep_tail(pool: SlotPool, name: bytes) -> Ints:
    slots = pool.keep(0, [name], 1, prompts=np.array([TAILS])).slots
    pool.filled(slots)
    pool.let_go(slots)
    return slots


def test_a_tail_that_was_used_is_evicted_like_one_that_was_not() -> None:
    pool = SlotPool(4)
    used = keep_tail(pool, b"used")
    keep_tail(pool, b"other")
    (block,) = use(pool, "a")
    pool.touch(used, pool.generation[used])
    pool.touch(np.array([block]), pool.generation[[block]])
    use(pool, "b", "c")
    there = pool.places(0, [b"used", b"other"]) >= 0
    assert there.tolist() == [False, True]
    use(pool, "d")
    assert kept(pool, "a") == 1


@pytest.mark.parametrize("tails_are_used", [True, False])
def test_of_tails_and_blocks_it_is_learnt_apart_whether_they_are_used(tails_are_used: bool) -> None:
    pool = SlotPool(64)
    admitted = {"tail": 0, "block": 0}
    for number in range(500):
        for kind, depth in (("tail", TAILS), ("block", 0)):
            key = blake2b(f"{kind} {number}".encode()).digest()[:32]
            prompts = np.array([depth])
            if not pool.admits(0, [key], prompts).all():
                continue
            admitted[kind] += 1
            slots = pool.keep(0, [key], 1, prompts=prompts).slots
            pool.filled(slots)
            pool.let_go(slots)
            if tails_are_used == (kind == "tail"):
                pool.touch(slots, pool.generation[slots])
    used, other = ("tail", "block") if tails_are_used else ("block", "tail")
    assert admitted[used] == 500
    assert admitted[other] < 150


def test_hits_on_other_generations_and_on_no_slots_are_ignored() -> None:
    pool = SlotPool(2)
    (old,) = use(pool, "a")
    use(pool, "b")
    told = np.array([old, 2, -1, 1 << 40]), np.array([0, 0, 0, 0])
    pool.touch(*told)
    use(pool, "c")
    assert (kept(pool, "a"), kept(pool, "b"), pool.num_cached) == (0, 1, 2)


def test_a_hit_on_a_held_slot_counts_once_it_is_let_go() -> None:
    pool = SlotPool(2)
    use(pool, "a")
    taken = pool.take([keys("b")], [0])
    assert taken is not None
    numbers, generations = taken[0][0], taken[1][0]
    pool.fill(0, keys("b"), numbers)
    pool.filled(numbers)
    pool.touch(numbers, generations)
    pool.let_go(numbers)
    use(pool, "c")
    use(pool, "d")
    assert (kept(pool, "a"), kept(pool, "b")) == (0, 1)


def test_prompts_copied_in_steps_lose_their_ends_first_once_they_are_requeued() -> None:
    size, a_step, prompts = 32, 8, 8
    pool = SlotPool(prompts * size)
    asked = [[f"{p}/{i}".encode() for i in range(size)] for p in range(prompts)]
    for at in range(0, size, a_step):
        for each in asked:
            slots = pool.keep(0, each[at : at + a_step], size).slots
            pool.filled(slots)
            pool.let_go(slots[::-1])
    for each in asked:
        last_first = pool.find(0, each)[::-1]
        pool.requeue(last_first, pool.generation[last_first])
    new = [b"new %d" % i for i in range(prompts * size // 4)]
    pool.filled(pool.keep(0, new, len(new)).slots)
    left = [len(pool.find(0, each)) for each in asked]
    leading = [len(pool.find(0, each[:count])) for each, count in zip(asked, left, strict=True)]
    assert leading == left
    assert sum(left) == prompts * size * 3 // 4


def test_only_cached_slots_that_are_not_pinned_are_requeued() -> None:
    pool = SlotPool(6)
    cached, pinned, held, reused = (use(pool, word)[0] for word in "abcd")
    pool.pin(np.array([pinned]), 10.0)
    assert pool.take([keys("c")], [0]) is not None
    filling = pool.keep(0, [b"e"], 1).slots[0]
    stamps = pool._order._stamp.copy()
    asked = np.array([cached, pinned, held, reused, filling])
    pool.requeue(asked, pool.generation[asked] - np.array([0, 0, 0, 1, 0]))
    assert np.flatnonzero(pool._order._stamp != stamps).tolist() in ([cached], [])
    assert not {held, filling} & set(pool.cached().tolist())
    use(pool, "f")
    use(pool, "g")
    assert [kept(pool, word) for word in "abd"] == [1, 1, 0]


def test_batches_do_not_pile_up_while_nothing_is_evicted() -> None:
    order = EvictionOrder(1000)
    numbers = np.arange(900)
    order.add(numbers)
    for turn in range(300):
        part = (numbers + 7 * turn)[:-1] % 900
        order.remove(part)
        order.add(part)
    batches = [batch for queue in order._batches for batch in queue.values()]
    assert sum(len(batch.slot_ids) for batch in batches) <= 2 * 900
    assert sum(batch.alive for batch in batches) == 900
    assert sorted(order.evict(900).tolist()) == numbers.tolist()


def test_a_million_slots_take_less_than_a_hundred_bytes_each() -> None:
    order = EvictionOrder(1 << 20)
    order.add(np.arange(1 << 20))
    arrays = [each for each in vars(order).values() if isinstance(each, np.ndarray)]
    arrays += [batch.slot_ids for queue in order._batches for batch in queue.values()]
    assert sum(array.nbytes for array in arrays) <= 100 << 20


def admitted(pool: SlotPool, word: str) -> bool:
    """Keep a block, if it is admitted."""
    asked = [word.encode()]
    if not pool.admits(0, asked).all():
        return False
    kept = pool.keep(0, asked, 1)
    pool.filled(kept.slots)
    pool.let_go(kept.slots)
    return True


def test_where_nothing_comes_again_new_blocks_are_passed_over() -> None:
    pool = SlotPool(64)
    assert all(admitted(pool, f"first {i}") for i in range(64))
    assert not any(admitted(pool, f"full {i}") for i in range(200))
    assert not any(admitted(pool, f"late {i}") for i in range(8))
    assert all(admitted(pool, f"late {i}") for i in range(8))


@pytest.mark.parametrize("every", [6, 500])
def test_new_blocks_are_kept_as_long_as_enough_of_them_come_again(every: int) -> None:
    pool = SlotPool(64)
    for number in range(1, 2000):
        new = admitted(pool, str(number))
        if number % every == 0:
            pool.touch(*(np.array([each]) for each in _found(pool, str(number))))
    assert new == (every == 6)


def _found(pool: SlotPool, word: str) -> tuple[int, int]:
    """Slot and generation of a block; -1 where there is none."""
    slots = pool.find(0, [word.encode()])
    return (int(slots[0]), int(pool.generation[slots[0]])) if len(slots) else (-1, -1)


@given(seen=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
def test_what_was_there_of_one_prompt_says_nothing_of_others(seen: list[list[bool]]) -> None:
    order = EvictionOrder(1 << 14)
    draw = np.random.default_rng(0)
    order.fill(np.arange(LEAST), draw.integers(1 << 62, size=LEAST))  # none of them comes again
    asked = [draw.integers(1 << 62, size=len(blocks)) for blocks in seen]
    for prompt, blocks in zip(asked, seen, strict=True):
        assert not order.admits(prompt[np.array(blocks)]).any()
    prompts = np.repeat(np.arange(len(seen)), [len(blocks) for blocks in seen]) * DEPTHS
    together = order.admits(np.concatenate(asked), prompts)
    assert together.tolist() == [any(of[i:]) for of in seen for i in range(len(of))]


@pytest.mark.parametrize("learns", [True, False])
def test_prompts_that_find_much_are_told_from_those_that_find_nothing(learns: bool) -> None:
    """Of each two blocks one is of a prompt that found 20 blocks, and comes again."""
    pool = SlotPool(64)
    depth = depth_of(20) if learns else 0
    kept = {"once": 0, "again": 0}
    for number in range(1000):
        for kind, prompt in (("once", 1), ("again", 2)):
            key = f"{kind} {number}".encode()
            prompts = np.array([prompt * DEPTHS + (depth if kind == "again" else 0)])
            if pool.admits(0, [key], prompts).all():
                slots = pool.keep(0, [key], 1, prompts=prompts).slots
                pool.filled(slots)
                pool.let_go(slots)
                kept[kind] += 1
                if kind == "again":
                    pool.touch(slots, pool.generation[slots])
    assert kept["again"] == 1000
    assert (kept["once"] < 100) == learns


@pytest.mark.parametrize(
    ("blocks", "depth"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (1 << 14, 15), (1 << 30, 15)]
)
def test_depths_are_powers_of_two(blocks: int, depth: int) -> None:
    assert depth_of(blocks) == depth


def test_prompts_that_begin_to_come_again_are_noticed() -> None:
    pool = SlotPool(64)
    for number in range(500):
        admitted(pool, f"once {number}")
    for number in range(100):
        if admitted(pool, f"twice {number}"):
            pool.touch(*(np.array([each]) for each in _found(pool, f"twice {number}")))
        else:
            assert admitted(pool, f"twice {number}")
    assert admitted(pool, "new")


def test_the_pins_of_a_copy_end_when_nobody_can_find_it_any_more() -> None:
    pool = SlotPool(8)
    asked = keys("a", "b")
    slots = pool.take([asked], [0])[0][0]  # type: ignore[index]
    pool.fill(0, asked, slots)
    assert pool.pin(slots, 10.0) == 2
    pool.let_go(slots)
    assert not pool.pinned(slots).any()
    pool.filled(slots)
    assert pool.counts() == (8, 0, 0)


class _Fate(NamedTuple):
    """What happens to a slot while it is held: how its copy ends, and how often others use it."""

    copied: bool | None  # None: it is still being copied
    keyed: bool
    again: bool
    pinned: bool


@given(
    st.lists(
        st.builds(
            _Fate,
            copied=st.sampled_from([True, True, True, False, None]),
            keyed=st.sampled_from([True, True, True, False]),
            again=st.booleans(),
            pinned=st.sampled_from([False, False, True]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_many_slots_are_let_go_of_as_one_after_the_other_would_be(fates: list[_Fate]) -> None:
    def pool_with(one_by_one: bool) -> tuple[SlotPool, list[int]]:
        pool = SlotPool(12)
        asked = [str(i).encode() if each.keyed else None for i, each in enumerate(fates)]
        # Without an index of its beginning, each block stands for itself.
        slots = np.concatenate([pool.take([[key]], [1])[0][0] for key in asked])  # type: ignore[index]
        pool.fill(0, asked, slots)
        for slot, fate in zip(slots, fates, strict=True):
            this = np.array([slot])
            if fate.copied is not None:
                (pool.filled if fate.copied else pool.unfilled)(this)
            if fate.again:
                pool.touch(this, pool.generation[this])
            if fate.keyed and fate.copied and fate.pinned:
                pool.pin(this, 1.0)
        for part in slots[:, None] if one_by_one else [slots]:
            pool.let_go(part)
        number = pool.num_cached - pool.num_pinned
        return pool, pool._order.evict(number).tolist() if number else []

    (one, evicted), (other, expected) = pool_with(False), pool_with(True)
    assert evicted == expected
    assert one.counts() == other.counts()
    assert (one._ready == other._ready).all()
    assert (one._keyed == other._keyed).all()
    assert one._order.num_pins == other._order.num_pins
