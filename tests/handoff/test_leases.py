# SPDX-License-Identifier: Apache-2.0
"""The slot directory: directed cases, then a state machine against a simple model."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from omni_connector.arena.slot_index import SlotKey
from omni_connector.copy.held_blocks import Block
from omni_connector.errors import ArenaFullError
from omni_connector.handoff.leases import Handoff, LeaseAnswer, LeaseState, SlotDirectory
from omni_connector.handoff.messages import DIGEST_BYTES, TOKEN_BYTES
from omni_connector.handoff.prompt import Prompt
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock

TTL = 120.0
Keys = Sequence[SlotKey | None]


def slot_of(handoff: Handoff, block: Block) -> int:
    group, index = block
    return int(handoff.slots[group][index - handoff.first_blocks[group]])


def generation_of(handoff: Handoff, block: Block) -> int:
    group, index = block
    return int(handoff.generations[group][index - handoff.first_blocks[group]])


def key(n: int) -> SlotKey:
    return n.to_bytes(32, "big")


_numbers = itertools.count(100)


def prompt(*tokens: int) -> Prompt:
    """Without tokens, one that is like no other."""
    tokens = tokens or (next(_numbers),)
    return Prompt(token_ids=tokens, num_tokens=len(tokens))


def request_lease(directory: SlotDirectory, handoff: Handoff, lease: int = 1) -> LeaseState:
    asked = handoff.prompt
    state, granted, _ = directory.lease(
        handoff.token, asked.num_tokens, asked.digest("tokens"), "tokens", lease
    )
    assert (granted is handoff) == (state is LeaseState.GRANTED)
    return state


def opened(directory: SlotDirectory, *groups: Keys, asked: Prompt | None = None) -> Handoff:
    handoff = directory.open(asked or prompt(), groups)
    assert handoff is not None
    return handoff


def slots(handoff: Handoff) -> list[list[int]]:
    return [group.tolist() for group in handoff.slots]


def missing(directory: SlotDirectory, handoff: Handoff) -> set[Block]:
    """Blocks of a hand-off that nobody has copied."""
    return {
        (g, i)
        for g, group in enumerate(slots(handoff))
        for i, number in enumerate(group)
        if not directory.pool._ready[number]
    }


def fill(directory: SlotDirectory, handoff: Handoff) -> None:
    blocks = directory.copying(handoff, sorted(missing(directory, handoff)))
    assert blocks is not None
    directory.filled(handoff, blocks)


def cached(directory: SlotDirectory, *keys: SlotKey) -> list[int]:
    """Have these blocks cached and unheld; their slots."""
    handoff = opened(directory, keys)
    fill(directory, handoff)
    assert directory.close(handoff.token)
    return slots(handoff)[0]


@pytest.fixture
def directory(clock: FakeClock) -> SlotDirectory:
    return SlotDirectory(8, EngineContext(clock), TTL)


def test_a_handoff_takes_a_slot_for_each_block_of_each_group(directory: SlotDirectory) -> None:
    handoff = opened(directory, [key(1), key(2), None], [key(1)])
    assert [len(group) for group in handoff.slots] == [3, 1]
    assert len({n for group in handoff.slots for n in group}) == 4
    assert missing(directory, handoff) == {(0, 0), (0, 1), (0, 2), (1, 0)}
    assert len(handoff.token) == TOKEN_BYTES
    assert directory.usage() == (4, 0, 0)


def test_tokens_do_not_repeat(directory: SlotDirectory) -> None:
    assert opened(directory, [None]).token != opened(directory, [None]).token


def test_a_prompt_larger_than_the_arena_is_refused_for_good(directory: SlotDirectory) -> None:
    with pytest.raises(ArenaFullError, match=r"needs 9 slots, the arena has 8; raise arena_gib"):
        directory.open(prompt(), [[None] * 5, [None] * 4])
    assert directory.usage() == (0, 0, 0)


def test_without_room_nothing_is_taken_until_there_is(directory: SlotDirectory) -> None:
    first = opened(directory, [None] * 6)
    assert directory.open(prompt(), [[None] * 3]) is None
    assert directory.usage() == (6, 0, 0)
    assert directory.open(prompt(), [[None] * 2]) is not None
    directory.close(first.token)
    assert directory.open(prompt(), [[None] * 3]) is not None


def test_a_failed_open_leaves_the_shared_blocks_evictable(directory: SlotDirectory) -> None:
    cached(directory, key(1), key(2))
    opened(directory, [None] * 6)
    assert directory.open(prompt(), [[key(1), key(3), key(4)]]) is None
    assert directory.usage() == (6, 2, 0)
    assert directory.open(prompt(), [[None, None]]) is not None


def test_a_shared_prefix_needs_no_copy(directory: SlotDirectory) -> None:
    first = opened(directory, [key(1), key(2), None])
    fill(directory, first)
    second = opened(directory, [key(1), key(2), key(3)])
    assert missing(directory, second) == {(0, 2)}
    assert second.slots[0][:2].tolist() == first.slots[0][:2].tolist()
    assert second.generations[0][:2].tolist() == first.generations[0][:2].tolist()
    directory.close(first.token)
    fill(directory, second)
    directory.commit(second)
    assert request_lease(directory, second) is LeaseState.GRANTED


def test_a_prefix_of_cached_blocks_alone_needs_no_copy_at_all(directory: SlotDirectory) -> None:
    there = cached(directory, key(1), key(2))
    handoff = opened(directory, [key(1), key(2)])
    assert (slots(handoff), missing(directory, handoff)) == ([there], set())
    directory.commit(handoff)
    assert request_lease(directory, handoff) is LeaseState.GRANTED


def test_groups_do_not_share_blocks_of_the_same_hash(directory: SlotDirectory) -> None:
    cached(directory, key(1))
    assert missing(directory, opened(directory, [], [key(1)])) == {(1, 0)}


def test_blocks_that_are_being_copied_are_shared(directory: SlotDirectory) -> None:
    first = opened(directory, [key(1), key(2)])
    assert directory.copying(first, [(0, 0)]) == [(0, 0)]
    second = opened(directory, [key(1), key(2)])
    assert second.slots[0][0] == first.slots[0][0]
    assert second.slots[0][1] != first.slots[0][1]  # nobody knows yet that it will be copied
    assert directory.copying(second, [(0, 0), (0, 1)]) == [(0, 1)]
    directory.commit(second)
    assert request_lease(directory, second) is LeaseState.GRANTED
    directory.filled(first, [(0, 0)])
    assert directory.copying(second, [(0, 0)]) == []


def test_hand_offs_of_one_prompt_share_all_their_slots(directory: SlotDirectory) -> None:
    asked = prompt(1, 2, 3)
    first = opened(directory, [key(1), None], [None], asked=asked)
    second = opened(directory, [key(1), None], [None], asked=prompt(1, 2, 3))
    assert slots(first) == slots(second)
    assert first.token != second.token
    assert directory.usage() == (3, 0, 0)
    blocks = [(0, 0), (0, 1), (1, 0)]
    assert directory.copying(first, blocks[:2]) == blocks[:2]
    assert directory.copying(second, blocks) == blocks[2:]
    directory.filled(first, blocks[:2])
    directory.close(first.token)  # its prefill was aborted
    directory.filled(second, blocks[2:])
    directory.commit(second)
    assert request_lease(directory, second) is LeaseState.GRANTED
    directory.release(second.token, 1)
    assert directory.usage() == (0, 1, 0)


def test_a_copy_that_fails_closes_all_that_wait_for_it(directory: SlotDirectory) -> None:
    asked = prompt(1, 2, 3)
    first, second = (opened(directory, [key(1), None], asked=asked) for _ in range(2))
    other = opened(directory, [key(5)])
    directory.copying(first, [(0, 0), (0, 1)])
    directory.commit(second)
    assert request_lease(directory, second) is LeaseState.GRANTED
    granted = second.generations[0].tolist()
    directory.unfilled(first, [(0, 0), (0, 1)])
    assert first.closed
    assert second.closed
    assert not other.closed
    assert request_lease(directory, second) is LeaseState.UNKNOWN
    assert directory.usage() == (1, 0, 0)
    again = opened(directory, [key(1), None], asked=asked)
    assert all(new > old for new, old in zip(again.generations[0], granted, strict=True))


def test_a_copy_of_others_that_fails_closes_all_that_wait_for_it(directory: SlotDirectory) -> None:
    """As that of a prefix that is shared, whose slots a hand-off has taken meanwhile."""
    pool = directory.pool
    with pool.lock:
        slots = pool.keep(0, [key(1)], 1).slots
    waiting, other = opened(directory, [key(1), None]), opened(directory, [key(5)])
    assert waiting.slots[0][0] == slots[0]
    with pool.lock:
        pool.unfilled(slots)
        pool.let_go(slots)
    assert waiting.closed
    assert not other.closed


def test_copies_are_wanted_while_somebody_holds_their_slots(directory: SlotDirectory) -> None:
    asked = prompt(1, 2, 3)
    first, second = (opened(directory, [None], asked=asked) for _ in range(2))
    directory.copying(first, [(0, 0)])
    directory.close(first.token)
    assert directory.wanted(first, [(0, 0)])
    directory.close(second.token)
    assert not directory.wanted(first, [(0, 0)])
    # And nobody joins a copy that may be cancelled.
    assert opened(directory, [None], asked=asked).slots[0][0] != first.slots[0][0]


def test_a_block_filled_twice_is_cached_once(directory: SlotDirectory) -> None:
    first, second = opened(directory, [key(1)]), opened(directory, [key(1)])
    for handoff in (first, second):
        fill(directory, handoff)
        directory.close(handoff.token)
    assert directory.usage() == (0, 1, 0)
    assert slots(opened(directory, [key(1)])) == slots(first)


def test_blocks_without_a_key_go_back_at_once(directory: SlotDirectory) -> None:
    handoff = opened(directory, [key(1), None])
    fill(directory, handoff)
    directory.close(handoff.token)
    assert directory.usage() == (0, 1, 0)


def test_cached_blocks_make_room_oldest_first(clock: FakeClock) -> None:
    directory = SlotDirectory(3, EngineContext(clock), TTL)
    one, two, three = (cached(directory, key(n))[0] for n in (1, 2, 3))
    cached(directory, key(1))  # used again: now 2 is the oldest
    assert [slots(opened(directory, [None]))[0][0] for _ in range(3)] == [two, three, one]


def test_free_slots_go_before_cached_ones_and_low_ones_first(clock: FakeClock) -> None:
    directory = SlotDirectory(4, EngineContext(clock), TTL)
    assert cached(directory, key(1)) == [0]
    assert slots(opened(directory, [None] * 4)) == [[1, 2, 3, 0]]
    assert directory.usage() == (4, 0, 0)


def test_an_evicted_block_is_copied_anew_into_a_new_generation(clock: FakeClock) -> None:
    directory = SlotDirectory(1, EngineContext(clock), TTL)
    cached(directory, key(1))
    first = opened(directory, [key(2)])
    fill(directory, first)
    directory.close(first.token)
    second = opened(directory, [key(1)])
    assert missing(directory, second) == {(0, 0)}
    assert second.generations[0][0] == first.generations[0][0] + 1


def test_an_open_does_not_evict_the_blocks_that_it_shares(clock: FakeClock) -> None:
    directory = SlotDirectory(3, EngineContext(clock), TTL)
    (one,) = cached(directory, key(1))
    cached(directory, key(2), key(3))
    handoff = opened(directory, [key(1), key(4), key(5)])
    assert handoff.slots[0][0] == one
    assert sorted(handoff.slots[0]) == [0, 1, 2]
    assert missing(directory, handoff) == {(0, 1), (0, 2)}
    assert directory.usage() == (3, 0, 0)


def test_a_lease_request_is_granted_once_committed_and_each_block_is_at_least_being_copied(
    directory: SlotDirectory,
) -> None:
    handoff = opened(directory, [key(1), None])
    assert request_lease(directory, handoff) is LeaseState.PENDING
    assert directory.pending(handoff.token)
    directory.commit(handoff)
    assert request_lease(directory, handoff) is LeaseState.PENDING
    fill_first = [(0, 1)]
    directory.copying(handoff, fill_first)
    directory.filled(handoff, fill_first)
    assert request_lease(directory, handoff) is LeaseState.PENDING
    assert directory.pending(handoff.token)
    directory.copying(handoff, [(0, 0)])
    assert not directory.pending(handoff.token)
    assert request_lease(directory, handoff) is LeaseState.GRANTED
    directory.filled(handoff, [(0, 0)])
    assert request_lease(directory, handoff) is LeaseState.GRANTED
    assert directory.usage() == (2, 0, 1)


def test_a_complete_handoff_that_is_not_committed_waits(directory: SlotDirectory) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    assert request_lease(directory, handoff) is LeaseState.PENDING
    assert directory.pending(handoff.token)


def test_each_request_is_a_lease_and_the_slots_go_with_the_last(
    directory: SlotDirectory,
) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    directory.commit(handoff)
    for lease in (1, 2, 1):  # the same request told twice is one
        assert request_lease(directory, handoff, lease) is LeaseState.GRANTED
    assert directory.usage() == (1, 0, 2)
    directory.release(handoff.token, 1)
    directory.release(handoff.token, 1)
    directory.release(handoff.token, 3)
    directory.drop(handoff.token)
    assert directory.usage() == (1, 0, 1)
    directory.release(handoff.token, 2)
    assert directory.usage() == (0, 0, 0)
    assert request_lease(directory, handoff) is LeaseState.UNKNOWN


def test_a_lease_ends_by_itself_and_the_others_go_on(
    directory: SlotDirectory, clock: FakeClock
) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    directory.commit(handoff)
    request_lease(directory, handoff, 1)
    clock.advance(TTL / 2)
    request_lease(directory, handoff, 2)
    clock.advance(TTL / 2)
    assert directory.expire() == 0
    assert directory.usage() == (1, 0, 1)
    directory.release(handoff.token, 2)
    assert directory.usage() == (0, 0, 0)


def test_what_nobody_will_lease_is_dropped(directory: SlotDirectory) -> None:
    handoff = opened(directory, [None])
    directory.drop(handoff.token)
    assert not handoff.closed  # nobody but its own prefill knows of it yet
    directory.commit(handoff)
    directory.drop(handoff.token)
    directory.drop(handoff.token)
    assert handoff.closed
    assert directory.usage() == (0, 0, 0)


def test_a_lease_request_for_another_prompt_gets_nothing(directory: SlotDirectory) -> None:
    handoff = directory.open(prompt(1, 2, 3), [[None]])
    assert handoff is not None
    fill(directory, handoff)
    directory.commit(handoff)
    right = handoff.prompt.digest("tokens")
    for num_tokens, digest, kind in (
        (3, prompt(1, 2, 4).digest("tokens"), "tokens"),
        (3, bytes(DIGEST_BYTES), "tokens"),
        (3, right, "blocks"),
        (2, right, "tokens"),
        (4, right, "tokens"),
    ):
        answer = directory.lease(handoff.token, num_tokens, digest, kind, 1)  # type: ignore[arg-type]
        assert answer == LeaseAnswer(LeaseState.OTHER_PROMPT)
    assert directory.usage()[2] == 0
    assert request_lease(directory, handoff) is LeaseState.GRANTED


def test_a_token_that_is_unknown_or_closed_gets_nothing(directory: SlotDirectory) -> None:
    handoff = opened(directory, [None])
    directory.close(handoff.token)
    assert request_lease(directory, handoff) is LeaseState.UNKNOWN
    assert not directory.pending(handoff.token)
    assert not directory.close(handoff.token)
    assert not directory.close(bytes(TOKEN_BYTES))


def test_a_handoff_lives_from_its_commit_and_again_from_its_lease_request(
    directory: SlotDirectory, clock: FakeClock
) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    clock.advance(10 * TTL)
    assert directory.expire() == 0
    directory.commit(handoff)
    clock.advance(TTL - 1)
    assert directory.expire() == 0
    assert request_lease(directory, handoff) is LeaseState.GRANTED
    clock.advance(TTL - 1)
    assert directory.expire() == 0
    clock.advance(1)
    assert directory.expire() == 1
    assert directory.expire() == 0
    assert request_lease(directory, handoff) is LeaseState.UNKNOWN
    assert directory.usage() == (0, 0, 0)


def test_a_slot_with_a_copy_in_flight_is_not_handed_out(clock: FakeClock) -> None:
    directory = SlotDirectory(2, EngineContext(clock), TTL)
    handoff = opened(directory, [key(1), None])
    directory.copying(handoff, [(0, 0), (0, 1)])
    directory.close(handoff.token)
    assert directory.usage() == (2, 0, 0)
    assert directory.open(prompt(), [[None]]) is None
    directory.unfilled(handoff, [(0, 1)])
    directory.filled(handoff, [(0, 0)])
    assert directory.usage() == (0, 0, 0)


def test_no_copy_may_start_into_the_slots_of_a_closed_handoff(clock: FakeClock) -> None:
    directory = SlotDirectory(1, EngineContext(clock), TTL)
    closed = opened(directory, [key(1)])
    directory.commit(closed)
    directory.close(closed.token)
    heir = opened(directory, [key(2)])
    assert slots(heir) == slots(closed)
    assert directory.copying(closed, [(0, 0)]) is None
    directory.close(heir.token)
    assert directory.usage() == (0, 0, 0)


def test_a_hand_off_that_is_leased_late_does_not_keep_later_ones(
    directory: SlotDirectory, clock: FakeClock
) -> None:
    first, second = opened(directory, [None]), opened(directory, [None])
    for handoff in (first, second):
        fill(directory, handoff)
        directory.commit(handoff)
        clock.advance(10)
    request_lease(directory, first)
    clock.advance(TTL - 10)
    assert directory.expire() == 1
    assert (first.closed, second.closed) == (False, True)
    assert directory.usage() == (1, 0, 1)


def test_a_lease_that_is_renewed_does_not_keep_later_ones(
    directory: SlotDirectory, clock: FakeClock
) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    directory.commit(handoff)
    for lease in (1, 2, 1):
        request_lease(directory, handoff, lease)
        clock.advance(10)
    clock.advance(TTL - 20)
    assert directory.expire() == 0
    assert list(handoff.leases) == [1]
    assert directory.usage() == (1, 0, 1)


def test_void_drops_what_is_cached(directory: SlotDirectory) -> None:
    cached(directory, key(1), key(2))
    assert directory.void() == ([], [])
    assert directory.usage() == (0, 0, 0)
    assert missing(directory, opened(directory, [key(1), key(2)])) == {(0, 0), (0, 1)}


def test_void_ends_hand_offs_and_sends_readers_away(directory: SlotDirectory) -> None:
    leased, unleased = opened(directory, [key(1), None]), opened(directory, [key(2)])
    for handoff in (leased, unleased):
        fill(directory, handoff)
        directory.commit(handoff)
    request_lease(directory, leased)
    numbers, generations = directory.void()
    assert numbers == sorted(slots(leased)[0])
    for number, generation in zip(numbers, generations, strict=True):
        assert generation > leased.generations[0][slots(leased)[0].index(number)]
    assert directory.usage() == (0, 0, 0)
    for handoff in (leased, unleased):
        assert request_lease(directory, handoff) is LeaseState.UNKNOWN
    again = opened(directory, [key(1), *[None] * (directory.num_slots - 1)])
    assert len(missing(directory, again)) == directory.num_slots
    for number, generation in zip(numbers, generations, strict=True):
        assert again.generations[0][slots(again)[0].index(number)] > generation


def test_void_reaches_the_blocks_that_are_filling(directory: SlotDirectory) -> None:
    handoff = opened(directory, [key(1), key(2)])
    directory.copying(handoff, [(0, 0)])
    directory.void()
    assert directory.usage() == (1, 0, 0)
    directory.filled(handoff, [(0, 0)])
    assert directory.usage() == (0, 0, 0)
    assert missing(directory, opened(directory, [key(1), key(2)])) == {(0, 0), (0, 1)}


# One model block: what a slot holds, told apart by when and for whom it was taken.
class _Taken:
    def __init__(self, generation: int, key: SlotKey | None, owner: Prompt, epoch: int) -> None:
        self.generation = generation
        self.key = key
        self.owner = owner
        self.epoch = epoch
        self.ready = False
        self.busy = False


class DirectoryMachine(RuleBasedStateMachine):
    """The model knows, for each slot number, who took it last and what is in it."""

    handoffs: Bundle[Handoff] = Bundle("handoffs")
    copies: Bundle[tuple[Handoff, list[Block]]] = Bundle("copies")

    @initialize(num_slots=st.integers(1, 8))
    def start(self, num_slots: int) -> None:
        self.clock = FakeClock()
        self.directory = SlotDirectory(num_slots, EngineContext(self.clock), TTL)
        self.content: dict[int, _Taken] = {}
        self.generation = dict.fromkeys(range(num_slots), 0)
        self.live: dict[bytes, Handoff] = {}
        self.epochs: dict[bytes, int] = {}
        self.deadlines: dict[bytes, float] = {}
        self.leases: dict[bytes, dict[int, float]] = {}
        self.committed: set[bytes] = set()
        self.epoch = 0

    def held(self) -> set[int]:
        return {n for h in self.live.values() for group in slots(h) for n in group}

    def busy(self) -> set[int]:
        return {n for n, taken in self.content.items() if taken.busy}

    def block(self, handoff: Handoff, place: Block) -> _Taken:
        return self.content[slot_of(handoff, place)]

    def places(self, handoff: Handoff) -> list[Block]:
        return [(g, i) for g, group in enumerate(slots(handoff)) for i in range(len(group))]

    def leasable(self, handoff: Handoff) -> bool:
        contents = [self.block(handoff, place) for place in self.places(handoff)]
        return handoff.token in self.committed and all(c.ready or c.busy for c in contents)

    def end(self, token: bytes) -> None:
        if self.live.pop(token, None) is not None:
            self.leases.pop(token, None)
            for number, taken in list(self.content.items()):
                if number not in self.held() and not taken.busy and taken.key is None:
                    taken.ready = False

    @rule(
        target=handoffs,
        asked=st.integers(1, 6),
        groups=st.lists(
            st.lists(st.sampled_from([None, 0, 1, 2, 3]), max_size=4), min_size=1, max_size=2
        ),
    )
    def open(self, asked: int, groups: list[list[int | None]]) -> object:
        keys = [[None if n is None else key(n) for n in dict.fromkeys(group)] for group in groups]
        # A prompt has its blocks, and no other prompt has all of them.
        wanted = prompt(asked, *(0 if k is None else 1 + k[-1] for group in keys for k in group))
        total = sum(len(group) for group in keys)
        if total > self.directory.num_slots:
            with pytest.raises(ArenaFullError):
                self.directory.open(wanted, keys)
            return multiple()
        taken_before, before = self.held() | self.busy(), self.directory.usage()
        twins = [
            each
            for each in self.live.values()
            if each.identity == wanted.identity() and list(map(len, each.keys)) == [*map(len, keys)]
        ]
        if not twins and any(h.identity == wanted.identity() for h in self.live.values()):
            return multiple()  # no such prompt
        handoff = self.directory.open(wanted, keys)
        if handoff is None:
            assert self.directory.usage() == before
            assert not twins
            assert total > self.directory.num_slots - len(taken_before) - before[1]
            return multiple()
        if twins:
            assert slots(handoff) == slots(twins[0])
        used: set[int] = set()
        for g, group in enumerate(keys):
            for i, block_key in enumerate(group):
                number, generation = slot_of(handoff, (g, i)), generation_of(handoff, (g, i))
                assert number not in used
                used.add(number)
                if generation > self.generation[number]:
                    assert number not in taken_before
                    self.content[number] = _Taken(generation, block_key, wanted, self.epoch)
                    self.generation[number] = generation
                    continue
                taken = self.content[number]
                assert taken.epoch == self.epoch, "shared although void"
                assert generation == taken.generation == self.generation[number]
                if not twins:
                    assert taken.ready or taken.busy
                    assert taken.key is not None
                    assert taken.key == block_key
        self.live[handoff.token] = handoff
        return handoff

    @rule(target=copies, handoff=handoffs, data=st.data())
    def copying(self, handoff: Handoff, data: st.DataObject) -> object:
        places = self.places(handoff)
        if not places:
            return multiple()
        blocks = data.draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
        chosen = self.directory.copying(handoff, blocks)
        if handoff.token not in self.live:
            assert chosen is None
            return multiple()
        idle = [
            p for p in blocks if not (self.block(handoff, p).ready or self.block(handoff, p).busy)
        ]
        assert chosen == idle
        for place in idle:
            self.block(handoff, place).busy = True
        return (handoff, idle) if idle else multiple()

    @rule(copy=consumes(copies))
    def filled(self, copy: tuple[Handoff, list[Block]]) -> None:
        handoff, blocks = copy
        self.directory.filled(handoff, blocks)
        for place in blocks:
            taken = self.block(handoff, place)
            taken.busy = False
            taken.ready = slot_of(handoff, place) in self.held()

    @rule(copy=consumes(copies))
    def unfilled(self, copy: tuple[Handoff, list[Block]]) -> None:
        handoff, blocks = copy
        numbers = {slot_of(handoff, place) for place in blocks}
        self.directory.unfilled(handoff, blocks)
        for place in blocks:
            self.block(handoff, place).busy = False
            self.generation[slot_of(handoff, place)] += 1  # a reader may have the old one
        for token, each in list(self.live.items()):
            if numbers & {n for group in slots(each) for n in group}:
                assert each.closed
                self.end(token)

    @rule(handoff=handoffs, then_close=st.booleans())
    def finish(self, handoff: Handoff, then_close: bool) -> None:
        """What most hand-offs do: be copied to the end, committed, and maybe released."""
        if handoff.token not in self.live:
            return
        blocks = self.directory.copying(handoff, self.places(handoff))
        assert blocks is not None
        self.directory.filled(handoff, blocks)
        for place in blocks:
            self.block(handoff, place).ready = True
        self.commit(handoff)
        if then_close:
            self.close(handoff)

    @rule(handoff=handoffs)
    def commit(self, handoff: Handoff) -> None:
        if handoff.token in self.live and handoff.token not in self.committed:
            self.directory.commit(handoff)
            self.committed.add(handoff.token)
            self.deadlines[handoff.token] = self.clock() + TTL

    @rule(
        handoff=handoffs,
        right=st.booleans(),
        kind=st.sampled_from(["tokens", "blocks"]),
        lease=st.integers(1, 3),
    )
    def request_lease(self, handoff: Handoff, right: bool, kind: str, lease: int) -> None:
        asked = handoff.prompt if right else prompt(*[7] * handoff.prompt.num_tokens)
        digest = asked.digest(kind)  # type: ignore[arg-type]
        state, granted, until = self.directory.lease(
            handoff.token,
            asked.num_tokens,
            digest,
            kind,  # type: ignore[arg-type]
            lease,
        )
        if handoff.token not in self.live:
            expected = LeaseState.UNKNOWN
        elif not right:
            expected = LeaseState.OTHER_PROMPT
        elif self.leasable(handoff):
            expected = LeaseState.GRANTED
            self.deadlines[handoff.token] = self.clock() + TTL
            self.leases.setdefault(handoff.token, {})[lease] = self.clock() + TTL
        else:
            expected = LeaseState.PENDING
        assert state is expected
        waits = handoff.token in self.live and not self.leasable(handoff)
        assert self.directory.pending(handoff.token) == waits
        assert granted is (handoff if expected is LeaseState.GRANTED else None)
        assert until == (self.clock() + TTL if granted is not None else 0.0)

    @rule(handoff=handoffs, lease=st.integers(1, 3))
    def release(self, handoff: Handoff, lease: int) -> None:
        self.directory.release(handoff.token, lease)
        leases = self.leases.get(handoff.token, {})
        if leases.pop(lease, None) is not None and not leases:
            assert handoff.closed
            self.end(handoff.token)

    @rule(handoff=handoffs)
    def drop(self, handoff: Handoff) -> None:
        self.directory.drop(handoff.token)
        if handoff.token in self.committed and not self.leases.get(handoff.token):
            self.end(handoff.token)

    @rule(handoff=handoffs)
    def close(self, handoff: Handoff) -> None:
        assert self.directory.close(handoff.token) == (handoff.token in self.live)
        self.end(handoff.token)

    @rule(seconds=st.sampled_from([1.0, TTL / 2, TTL]))
    def wait_and_expire(self, seconds: float) -> None:
        self.clock.advance(seconds)
        late = [t for t in self.live if self.deadlines.get(t, float("inf")) <= self.clock()]
        assert self.directory.expire() == len(late)
        for token in late:
            self.end(token)
        for leases in self.leases.values():
            for lease, until in list(leases.items()):
                if until <= self.clock():
                    del leases[lease]

    @rule()
    def void(self) -> None:
        leased = {
            number: generation
            for token, handoff in self.live.items()
            if self.leases.get(token)
            for numbers, generations in zip(handoff.slots, handoff.generations, strict=True)
            for number, generation in zip(numbers.tolist(), generations.tolist(), strict=True)
        }
        numbers, generations = self.directory.void()
        assert numbers == sorted(leased)
        for number, generation in zip(numbers, generations, strict=True):
            assert generation == leased[number] + 1
            self.generation[number] = generation
        for token in list(self.live):
            self.end(token)
        self.epoch += 1

    @precondition(lambda self: not self.busy())
    @rule()
    def close_everything(self) -> None:
        for token in list(self.live):
            assert self.directory.close(token)
            self.end(token)
        assert self.directory.usage()[0] == 0
        assert self.directory.usage()[2] == 0
        # Nothing is lost: the whole arena can be had at once, each slot once.
        handoff = self.directory.open(prompt(), [[None] * self.directory.num_slots])
        assert handoff is not None
        assert sorted(slots(handoff)[0]) == list(range(self.directory.num_slots))
        for number, generation in zip(handoff.slots[0], handoff.generations[0], strict=True):
            assert generation > self.generation[number]
            self.generation[number] = generation
        self.content.clear()
        self.directory.close(handoff.token)

    @invariant()
    def handoffs_keep_their_slots(self) -> None:
        for handoff in self.live.values():
            assert not handoff.closed
            for numbers, generations in zip(handoff.slots, handoff.generations, strict=True):
                for number, generation in zip(numbers, generations, strict=True):
                    assert self.generation[number] == generation

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        held, in_cache, leases = self.directory.usage()
        assert held == len(self.held() | self.busy())
        assert 0 <= in_cache <= self.directory.num_slots - held
        assert leases == sum(len(each) for each in self.leases.values())


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_what_is_leased_again_goes_after_what_was_leased_since(
    directory: SlotDirectory, clock: FakeClock
) -> None:
    """Hand-offs and leases end in the order of their times, not in that of their beginnings."""
    first, second = opened(directory, [None]), opened(directory, [None])
    for each in (first, second):
        fill(directory, each)
        directory.commit(each)
    request_lease(directory, first, 1)
    request_lease(directory, second, 2)
    clock.advance(TTL / 2)
    request_lease(directory, first, 1)
    clock.advance(TTL / 2)
    assert directory.expire() == 1
    assert second.closed
    assert not first.closed
    assert list(first.leases) == [1]
    clock.advance(TTL / 2)
    assert directory.expire() == 1
    assert directory.usage() == (0, 0, 0)


def test_of_two_leases_the_one_that_is_renewed_outlives_the_other(
    directory: SlotDirectory, clock: FakeClock
) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    directory.commit(handoff)
    for lease in (1, 2):
        request_lease(directory, handoff, lease)
    clock.advance(TTL / 2)
    request_lease(directory, handoff, 1)
    clock.advance(TTL / 2)
    assert directory.expire() == 0
    assert list(handoff.leases) == [1]
