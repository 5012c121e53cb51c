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


def test_a_prompt_larger_than_the_arena_is_refused_for_good(directory: SlotDirectory) -> None:
    with pytest.raises(ArenaFullError, match=r"needs 9 slots, the arena has 8; raise arena_gib"):
        directory.open(prompt(), [[None] * 5, [None] * 4])
    assert directory.usage() == (0, 0, 0)


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


def test_a_block_filled_twice_is_cached_once_and_one_without_a_key_is_not(
    directory: SlotDirectory,
) -> None:
    first, second = opened(directory, [key(1)]), opened(directory, [key(1), None])
    for handoff in (first, second):
        fill(directory, handoff)
        directory.close(handoff.token)
    assert directory.usage() == (0, 1, 0)
    assert slots(opened(directory, [key(1)])) == slots(first)


def test_free_slots_go_before_cached_ones_and_low_ones_first(clock: FakeClock) -> None:
    directory = SlotDirectory(4, EngineContext(clock), TTL)
    assert cached(directory, key(1)) == [0]
    assert slots(opened(directory, [None] * 4)) == [[1, 2, 3, 0]]
    assert directory.usage() == (4, 0, 0)


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


def test_handoffs_and_leases_end_in_the_order_of_their_times(
    directory: SlotDirectory, clock: FakeClock
) -> None:
    """And not in that of their beginnings."""
    first, second = opened(directory, [None]), opened(directory, [None])
    for handoff, leases in ((first, (1, 2)), (second, (1,))):
        fill(directory, handoff)
        directory.commit(handoff)
        for lease in leases:
            request_lease(directory, handoff, lease)
    clock.advance(TTL / 2)
    request_lease(directory, first, 1)
    clock.advance(TTL / 2)
    assert directory.expire() == 1
    assert second.closed
    assert list(first.leases) == [1]
    clock.advance(TTL / 2)
    assert directory.expire() == 1
    assert directory.usage() == (0, 0, 0)


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

    copies: Bundle[tuple[Handoff, list[Block]]] = Bundle("copies")
    # Those that are open, and the last one that has ended.
    handoffs = st.runner().flatmap(lambda machine: st.sampled_from(machine.known()))
    granted = st.runner().flatmap(lambda machine: st.sampled_from(machine.granted_leases()))

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
        self.ended: list[Handoff] = []

    def known(self) -> list[Handoff]:
        return [*self.live.values(), *self.ended[-1:]]

    def granted_leases(self) -> list[tuple[Handoff, int]]:
        return [(self.live[token], each) for token in self.leases for each in self.leases[token]]

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
        if (ended := self.live.pop(token, None)) is not None:
            self.ended.append(ended)
            self.leases.pop(token, None)
            for number, taken in list(self.content.items()):
                if number not in self.held() and not taken.busy and taken.key is None:
                    taken.ready = False

    @rule(
        asked=st.integers(1, 6),
        groups=st.lists(
            st.lists(st.sampled_from([None, 0, 1, 2, 3]), max_size=4), min_size=1, max_size=2
        ),
    )
    def open(self, asked: int, groups: list[list[int | None]]) -> None:
        keys = [[None if n is None else key(n) for n in dict.fromkeys(group)] for group in groups]
        # A prompt has its blocks, and no other prompt has all of them.
        wanted = prompt(asked, *(0 if k is None else 1 + k[-1] for group in keys for k in group))
        total = sum(len(group) for group in keys)
        if total > self.directory.num_slots:
            with pytest.raises(ArenaFullError):
                self.directory.open(wanted, keys)
            return
        taken_before, before = self.held() | self.busy(), self.directory.usage()
        twins = [
            each
            for each in self.live.values()
            if each.identity == wanted.identity() and list(map(len, each.keys)) == [*map(len, keys)]
        ]
        if not twins and any(h.identity == wanted.identity() for h in self.live.values()):
            return  # no such prompt
        handoff = self.directory.open(wanted, keys)
        if handoff is None:
            assert self.directory.usage() == before
            assert not twins
            assert total > self.directory.num_slots - len(taken_before) - before[1]
            return
        if twins:
            assert slots(handoff) == slots(twins[0])
        assert len(handoff.token) == TOKEN_BYTES
        assert handoff.token not in self.live
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

    @precondition(known)
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

    @precondition(known)
    @rule(handoff=handoffs, then=st.sampled_from([1, 2, "wait", "close"]))
    def finish(self, handoff: Handoff, then: str | int) -> None:
        """What most hand-offs do: be copied to the end, committed, and maybe leased or closed."""
        if handoff.token not in self.live:
            return
        blocks = self.directory.copying(handoff, self.places(handoff))
        assert blocks is not None
        self.directory.filled(handoff, blocks)
        for place in blocks:
            self.block(handoff, place).ready = True
        self.commit(handoff)
        if then == "close":
            self.close(handoff)
        elif isinstance(then, int):
            self.request_lease(handoff, True, "tokens", then)

    @precondition(known)
    @rule(handoff=handoffs)
    def commit(self, handoff: Handoff) -> None:
        if handoff.token in self.live and handoff.token not in self.committed:
            self.directory.commit(handoff)
            self.committed.add(handoff.token)
            self.deadlines[handoff.token] = self.clock() + TTL

    @precondition(known)
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

    @precondition(granted_leases)
    @rule(of=granted)
    def release(self, of: tuple[Handoff, int]) -> None:
        handoff, lease = of
        self.directory.release(handoff.token, lease)
        leases = self.leases.get(handoff.token, {})
        if leases.pop(lease, None) is not None and not leases:
            assert handoff.closed
            self.end(handoff.token)

    @precondition(granted_leases)
    @rule(of=granted)
    def renew(self, of: tuple[Handoff, int]) -> None:
        handoff, lease = of
        self.request_lease(handoff, True, "tokens", lease)

    @precondition(known)
    @rule(handoff=handoffs)
    def drop(self, handoff: Handoff) -> None:
        self.directory.drop(handoff.token)
        if handoff.token in self.committed and not self.leases.get(handoff.token):
            self.end(handoff.token)

    @precondition(known)
    @rule(handoff=handoffs)
    def close(self, handoff: Handoff) -> None:
        assert self.directory.close(handoff.token) == (handoff.token in self.live)
        self.end(handoff.token)

    @rule(seconds=st.sampled_from([1.0, TTL / 4, TTL / 2, TTL]))
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

    @rule(seldom=st.integers(0, 9))
    def void(self, seldom: int) -> None:
        if seldom != 9:
            return
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

    def teardown(self) -> None:
        if not hasattr(self, "directory") or self.busy():
            return
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
