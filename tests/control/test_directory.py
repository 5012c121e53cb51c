# SPDX-License-Identifier: Apache-2.0
"""The slot directory: directed cases, then a state machine against a simple model."""

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

from omni_connector.control.directory import ClaimState, Handoff, SlotDirectory, SlotKey
from omni_connector.control.messages import DIGEST_BYTES, TOKEN_BYTES
from omni_connector.control.prompt import Prompt
from omni_connector.errors import ArenaFullError

TTL = 120.0
Keys = Sequence[SlotKey | None]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(n: int, group: int = 0) -> SlotKey:
    return group, n.to_bytes(32, "big")


def prompt(*tokens: int) -> Prompt:
    return Prompt(token_ids=tokens or (1,), num_tokens=len(tokens) or 1)


def claim(directory: SlotDirectory, handoff: Handoff) -> ClaimState:
    asked = handoff.prompt
    state, granted = directory.claim(
        handoff.token, asked.num_tokens, asked.digest("tokens"), "tokens"
    )
    assert (granted is handoff) == (state is ClaimState.GRANTED)
    return state


def opened(directory: SlotDirectory, *groups: Keys) -> Handoff:
    handoff = directory.open(prompt(), groups)
    assert handoff is not None
    return handoff


def fill(directory: SlotDirectory, handoff: Handoff) -> None:
    blocks = sorted(handoff.missing)
    assert directory.copying(handoff, blocks)
    directory.filled(handoff, blocks)


def cached(directory: SlotDirectory, *keys: SlotKey) -> list[int]:
    """Have these blocks cached and unheld; their slots."""
    handoff = opened(directory, keys)
    fill(directory, handoff)
    assert directory.close(handoff.token)
    return handoff.slots[0]


@pytest.fixture
def directory(clock: Clock) -> SlotDirectory:
    return SlotDirectory(8, clock, TTL)


def test_a_handoff_takes_a_slot_for_each_block_of_each_group(directory: SlotDirectory) -> None:
    handoff = opened(directory, [key(1), key(2), None], [key(1, 1)])
    assert [len(group) for group in handoff.slots] == [3, 1]
    assert len({n for group in handoff.slots for n in group}) == 4
    assert handoff.missing == {(0, 0), (0, 1), (0, 2), (1, 0)}
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
    assert second.missing == {(0, 2)}
    assert second.slots[0][:2] == first.slots[0][:2]
    assert second.generations[0][:2] == first.generations[0][:2]
    directory.close(first.token)
    fill(directory, second)
    directory.seal(second)
    assert claim(directory, second) is ClaimState.GRANTED


def test_a_prefix_of_cached_blocks_alone_needs_no_copy_at_all(directory: SlotDirectory) -> None:
    slots = cached(directory, key(1), key(2))
    handoff = opened(directory, [key(1), key(2)])
    assert (handoff.slots, handoff.missing) == ([slots], set())
    directory.seal(handoff)
    assert claim(directory, handoff) is ClaimState.GRANTED


def test_groups_do_not_share_blocks_of_the_same_hash(directory: SlotDirectory) -> None:
    cached(directory, key(1, 0))
    assert opened(directory, [key(1, 1)]).missing == {(0, 0)}


def test_blocks_that_are_still_filling_are_not_shared(directory: SlotDirectory) -> None:
    first = opened(directory, [key(1)])
    directory.copying(first, [(0, 0)])
    second = opened(directory, [key(1)])
    assert second.missing == {(0, 0)}
    assert second.slots != first.slots


def test_a_block_filled_twice_is_cached_once(directory: SlotDirectory) -> None:
    first, second = opened(directory, [key(1)]), opened(directory, [key(1)])
    for handoff in (first, second):
        fill(directory, handoff)
        directory.close(handoff.token)
    assert directory.usage() == (0, 1, 0)
    assert opened(directory, [key(1)]).slots == first.slots


def test_blocks_without_a_key_go_back_at_once(directory: SlotDirectory) -> None:
    handoff = opened(directory, [key(1), None])
    fill(directory, handoff)
    directory.close(handoff.token)
    assert directory.usage() == (0, 1, 0)


def test_cached_blocks_make_room_oldest_first(clock: Clock) -> None:
    directory = SlotDirectory(3, clock, TTL)
    one, two, three = (cached(directory, key(n))[0] for n in (1, 2, 3))
    cached(directory, key(1))  # used again: now 2 is the oldest
    assert [opened(directory, [None]).slots[0][0] for _ in range(3)] == [two, three, one]


def test_free_slots_go_before_cached_ones_and_low_ones_first(clock: Clock) -> None:
    directory = SlotDirectory(4, clock, TTL)
    assert cached(directory, key(1)) == [0]
    assert opened(directory, [None] * 4).slots == [[1, 2, 3, 0]]
    assert directory.usage() == (4, 0, 0)


def test_an_evicted_block_is_copied_anew_into_a_new_generation(clock: Clock) -> None:
    directory = SlotDirectory(1, clock, TTL)
    cached(directory, key(1))
    first = opened(directory, [key(2)])
    fill(directory, first)
    directory.close(first.token)
    second = opened(directory, [key(1)])
    assert second.missing == {(0, 0)}
    assert second.generations[0][0] == first.generations[0][0] + 1


def test_an_open_does_not_evict_the_blocks_that_it_shares(clock: Clock) -> None:
    directory = SlotDirectory(3, clock, TTL)
    (one,) = cached(directory, key(1))
    cached(directory, key(2), key(3))
    handoff = opened(directory, [key(1), key(4), key(5)])
    assert handoff.slots[0][0] == one
    assert sorted(handoff.slots[0]) == [0, 1, 2]
    assert handoff.missing == {(0, 1), (0, 2)}
    assert directory.usage() == (3, 0, 0)


def test_a_claim_is_granted_once_sealed_and_each_block_is_at_least_being_copied(
    directory: SlotDirectory,
) -> None:
    handoff = opened(directory, [key(1), None])
    assert claim(directory, handoff) is ClaimState.PENDING
    assert directory.pending(handoff.token)
    directory.seal(handoff)
    assert claim(directory, handoff) is ClaimState.PENDING
    fill_first = [(0, 1)]
    directory.copying(handoff, fill_first)
    directory.filled(handoff, fill_first)
    assert claim(directory, handoff) is ClaimState.PENDING
    assert directory.pending(handoff.token)
    directory.copying(handoff, [(0, 0)])
    assert not directory.pending(handoff.token)
    assert claim(directory, handoff) is ClaimState.GRANTED
    directory.filled(handoff, [(0, 0)])
    assert claim(directory, handoff) is ClaimState.GRANTED
    assert directory.usage() == (2, 0, 1)


def test_a_failed_copy_takes_the_granted_generation_back(directory: SlotDirectory) -> None:
    handoff = opened(directory, [None])
    directory.copying(handoff, [(0, 0)])
    directory.seal(handoff)
    assert claim(directory, handoff) is ClaimState.GRANTED
    granted = handoff.generations[0][0]
    directory.unfilled(handoff, [(0, 0)])
    assert claim(directory, handoff) is ClaimState.PENDING
    fill(directory, handoff)
    assert claim(directory, handoff) is ClaimState.GRANTED
    assert handoff.generations[0][0] > granted


def test_a_complete_handoff_that_is_not_sealed_waits(directory: SlotDirectory) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    assert claim(directory, handoff) is ClaimState.PENDING
    assert directory.pending(handoff.token)


def test_a_second_claim_is_answered_like_the_first(directory: SlotDirectory) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    directory.seal(handoff)
    assert claim(directory, handoff) is claim(directory, handoff) is ClaimState.GRANTED
    assert directory.usage() == (1, 0, 1)


def test_a_claim_for_another_prompt_gets_nothing(directory: SlotDirectory) -> None:
    handoff = directory.open(prompt(1, 2, 3), [[None]])
    assert handoff is not None
    fill(directory, handoff)
    directory.seal(handoff)
    right = handoff.prompt.digest("tokens")
    for num_tokens, digest, kind in (
        (3, prompt(1, 2, 4).digest("tokens"), "tokens"),
        (3, bytes(DIGEST_BYTES), "tokens"),
        (3, right, "blocks"),
        (2, right, "tokens"),
        (4, right, "tokens"),
    ):
        answer = directory.claim(handoff.token, num_tokens, digest, kind)  # type: ignore[arg-type]
        assert answer == (ClaimState.OTHER_PROMPT, None)
    assert directory.usage()[2] == 0
    assert claim(directory, handoff) is ClaimState.GRANTED


def test_a_token_that_is_unknown_or_closed_gets_nothing(directory: SlotDirectory) -> None:
    handoff = opened(directory, [None])
    directory.close(handoff.token)
    assert claim(directory, handoff) is ClaimState.UNKNOWN
    assert not directory.pending(handoff.token)
    assert not directory.close(handoff.token)
    assert not directory.close(bytes(TOKEN_BYTES))


def test_a_handoff_lives_from_its_seal_and_again_from_its_claim(
    directory: SlotDirectory, clock: Clock
) -> None:
    handoff = opened(directory, [None])
    fill(directory, handoff)
    clock.now += 10 * TTL
    assert directory.expire() == 0
    directory.seal(handoff)
    clock.now += TTL - 1
    assert directory.expire() == 0
    assert claim(directory, handoff) is ClaimState.GRANTED
    clock.now += TTL - 1
    assert directory.expire() == 0
    clock.now += 1
    assert directory.expire() == 1
    assert directory.expire() == 0
    assert claim(directory, handoff) is ClaimState.UNKNOWN
    assert directory.usage() == (0, 0, 0)


def test_a_slot_with_a_copy_in_flight_is_not_handed_out(clock: Clock) -> None:
    directory = SlotDirectory(2, clock, TTL)
    handoff = opened(directory, [key(1), None])
    directory.copying(handoff, [(0, 0), (0, 1)])
    directory.close(handoff.token)
    assert directory.usage() == (2, 0, 0)
    assert directory.open(prompt(), [[None]]) is None
    directory.unfilled(handoff, [(0, 1)])
    directory.filled(handoff, [(0, 0)])
    assert directory.usage() == (0, 1, 0)
    assert opened(directory, [key(1)]).missing == set()


def test_cancelled_copies_leave_nothing_to_share(directory: SlotDirectory) -> None:
    handoff = opened(directory, [key(1)])
    directory.copying(handoff, [(0, 0)])
    directory.unfilled(handoff, [(0, 0)])
    directory.seal(handoff)
    assert claim(directory, handoff) is ClaimState.PENDING
    assert opened(directory, [key(1)]).missing == {(0, 0)}
    fill(directory, handoff)  # a preempted prefill is computed, and copied, again
    assert claim(directory, handoff) is ClaimState.GRANTED


def test_no_copy_may_start_into_the_slots_of_a_closed_handoff(clock: Clock) -> None:
    directory = SlotDirectory(1, clock, TTL)
    closed = opened(directory, [key(1)])
    directory.seal(closed)
    directory.close(closed.token)
    heir = opened(directory, [key(2)])
    assert heir.slots == closed.slots
    assert not directory.copying(closed, [(0, 0)])
    directory.close(heir.token)
    assert directory.usage() == (0, 0, 0)


def test_forget_drops_what_is_cached(directory: SlotDirectory) -> None:
    cached(directory, key(1), key(2))
    directory.forget()
    assert directory.usage() == (0, 0, 0)
    assert opened(directory, [key(1), key(2)]).missing == {(0, 0), (0, 1)}


def test_forget_keeps_what_is_handed_off_but_not_for_others(directory: SlotDirectory) -> None:
    handoff = opened(directory, [key(1)])
    fill(directory, handoff)
    directory.seal(handoff)
    directory.forget()
    assert claim(directory, handoff) is ClaimState.GRANTED
    assert opened(directory, [key(1)]).missing == {(0, 0)}
    directory.close(handoff.token)
    assert directory.usage()[1] == 0


def test_forget_reaches_the_blocks_that_are_filling(directory: SlotDirectory) -> None:
    handoff = opened(directory, [key(1), key(2)])
    directory.copying(handoff, [(0, 0)])
    directory.forget()
    directory.filled(handoff, [(0, 0)])
    fill(directory, handoff)
    assert opened(directory, [key(1), key(2)]).missing == {(0, 0), (0, 1)}


# One model block: what a slot holds, told apart by when and for whom it was taken.
class _Taken:
    def __init__(self, key: SlotKey | None, epoch: int) -> None:
        self.key = key
        self.epoch = epoch  # forget() calls before it was taken
        self.ready = False
        self.copies = 0


class DirectoryMachine(RuleBasedStateMachine):
    """The model knows, for each slot number, who took it last and what is in it."""

    handoffs: Bundle[Handoff] = Bundle("handoffs")
    copies: Bundle[tuple[Handoff, list[tuple[int, int]]]] = Bundle("copies")

    @initialize(num_slots=st.integers(1, 8))
    def start(self, num_slots: int) -> None:
        self.clock = Clock()
        self.directory = SlotDirectory(num_slots, self.clock, TTL)
        self.content: dict[int, _Taken] = {}
        self.generation = dict.fromkeys(range(num_slots), 0)
        self.live: dict[bytes, Handoff] = {}
        self.deadlines: dict[bytes, float] = {}
        self.leased: set[bytes] = set()
        self.sealed: set[bytes] = set()
        self.epoch = 0
        self.opened = 0

    def held(self) -> set[int]:
        return {n for h in self.live.values() for group in h.slots for n in group}

    def busy(self) -> set[int]:
        return {n for n, taken in self.content.items() if taken.copies}

    def block(self, handoff: Handoff, place: tuple[int, int]) -> _Taken:
        return self.content[handoff.slots[place[0]][place[1]]]

    def claimable(self, handoff: Handoff) -> bool:
        contents = [self.content[n] for group in handoff.slots for n in group]
        return handoff.token in self.sealed and all(c.ready or c.copies for c in contents)

    @rule(
        target=handoffs,
        groups=st.lists(
            st.lists(st.sampled_from([None, 0, 1, 2, 3]), max_size=4), min_size=1, max_size=2
        ),
    )
    def open(self, groups: list[list[int | None]]) -> object:
        keys = [
            [None if n is None else key(n, g) for n in dict.fromkeys(group)]
            for g, group in enumerate(groups)
        ]
        total = sum(len(group) for group in keys)
        self.opened += 1
        asked = prompt(self.opened, 7)
        if total > self.directory.num_slots:
            with pytest.raises(ArenaFullError):
                self.directory.open(asked, keys)
            return multiple()
        taken_before = self.held() | self.busy()
        before = self.directory.usage()
        ready = {
            taken.key: n
            for n, taken in self.content.items()
            if taken.ready and taken.key is not None and taken.epoch == self.epoch
        }
        handoff = self.directory.open(asked, keys)
        if handoff is None:
            assert self.directory.usage() == before
            shared = sum(1 for group in keys for k in group if k in ready)
            unheld_shared = {ready[k] for group in keys for k in group if k in ready} - taken_before
            room = self.directory.num_slots - len(taken_before) - len(unheld_shared)
            assert total - shared > room
            return multiple()
        assert [len(group) for group in handoff.slots] == [len(group) for group in keys]
        used: set[int] = set()
        for g, group in enumerate(keys):
            for i, block_key in enumerate(group):
                number, generation = handoff.slots[g][i], handoff.generations[g][i]
                assert number not in used
                used.add(number)
                if (g, i) in handoff.missing:
                    assert number not in taken_before
                    assert generation > self.generation[number]
                    self.content[number] = _Taken(block_key, self.epoch)
                    self.generation[number] = generation
                else:
                    taken = self.content[number]
                    assert taken.ready
                    assert taken.key is not None
                    assert taken.key == block_key
                    assert taken.epoch == self.epoch, "shared although forgotten"
                    assert generation == self.generation[number]
        self.live[handoff.token] = handoff
        return handoff

    @rule(target=copies, handoff=handoffs, data=st.data())
    def copying(self, handoff: Handoff, data: st.DataObject) -> object:
        idle = [
            place
            for place in sorted(handoff.missing)
            if handoff.token not in self.live or not self.block(handoff, place).copies
        ]
        if not idle:
            return multiple()
        blocks = data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True))
        if handoff.token not in self.live:
            assert not self.directory.copying(handoff, blocks)
            return multiple()
        assert self.directory.copying(handoff, blocks)
        for place in blocks:
            self.block(handoff, place).copies += 1
        return handoff, blocks

    @rule(copy=consumes(copies))
    def filled(self, copy: tuple[Handoff, list[tuple[int, int]]]) -> None:
        handoff, blocks = copy
        self.directory.filled(handoff, blocks)
        for place in blocks:
            taken = self.block(handoff, place)
            taken.copies -= 1
            taken.ready = True

    @rule(copy=consumes(copies))
    def unfilled(self, copy: tuple[Handoff, list[tuple[int, int]]]) -> None:
        handoff, blocks = copy
        self.directory.unfilled(handoff, blocks)
        for g, i in blocks:
            self.block(handoff, (g, i)).copies -= 1
            number, generation = handoff.slots[g][i], handoff.generations[g][i]
            assert generation > self.generation[number], "a reader may have the old one"
            self.generation[number] = generation

    @rule(handoff=handoffs, then_close=st.booleans())
    def finish(self, handoff: Handoff, then_close: bool) -> None:
        """What most hand-offs do: be copied to the end, sealed, and maybe released."""
        if handoff.token not in self.live:
            return
        blocks = [p for p in sorted(handoff.missing) if not self.block(handoff, p).copies]
        assert self.directory.copying(handoff, blocks)
        self.directory.filled(handoff, blocks)
        for place in blocks:
            self.block(handoff, place).ready = True
        self.seal(handoff)
        if then_close:
            self.close(handoff)

    @rule(handoff=handoffs)
    def seal(self, handoff: Handoff) -> None:
        if handoff.token in self.live and handoff.token not in self.sealed:
            self.directory.seal(handoff)
            self.sealed.add(handoff.token)
            self.deadlines[handoff.token] = self.clock.now + TTL

    @rule(handoff=handoffs, right=st.booleans(), kind=st.sampled_from(["tokens", "blocks"]))
    def claim(self, handoff: Handoff, right: bool, kind: str) -> None:
        asked = handoff.prompt if right else prompt(0, 7)
        digest = asked.digest(kind)  # type: ignore[arg-type]
        state, granted = self.directory.claim(handoff.token, 2, digest, kind)  # type: ignore[arg-type]
        if handoff.token not in self.live:
            expected = ClaimState.UNKNOWN
        elif not right:
            expected = ClaimState.OTHER_PROMPT
        elif self.claimable(handoff):
            expected = ClaimState.GRANTED
            self.leased.add(handoff.token)
            self.deadlines[handoff.token] = self.clock.now + TTL
        else:
            expected = ClaimState.PENDING
        assert state is expected
        waits = handoff.token in self.live and not self.claimable(handoff)
        assert self.directory.pending(handoff.token) == waits
        assert granted is (handoff if expected is ClaimState.GRANTED else None)

    @rule(handoff=handoffs)
    def close(self, handoff: Handoff) -> None:
        assert self.directory.close(handoff.token) == (handoff.token in self.live)
        self.live.pop(handoff.token, None)

    @rule(seconds=st.sampled_from([1.0, TTL / 2, TTL]))
    def wait_and_expire(self, seconds: float) -> None:
        self.clock.now += seconds
        late = [t for t in self.live if self.deadlines.get(t, float("inf")) <= self.clock.now]
        assert self.directory.expire() == len(late)
        for token in late:
            del self.live[token]

    @rule()
    def forget(self) -> None:
        self.directory.forget()
        self.epoch += 1

    @precondition(lambda self: not self.busy())
    @rule()
    def close_everything(self) -> None:
        for token in list(self.live):
            assert self.directory.close(token)
        self.live.clear()
        assert self.directory.usage()[0] == 0
        assert self.directory.usage()[2] == 0
        # Nothing is lost: the whole arena can be had at once, each slot once.
        handoff = self.directory.open(prompt(), [[None] * self.directory.num_slots])
        assert handoff is not None
        assert sorted(handoff.slots[0]) == list(range(self.directory.num_slots))
        for number, generation in zip(handoff.slots[0], handoff.generations[0], strict=True):
            assert generation > self.generation[number]
            self.generation[number] = generation
        self.content.clear()
        self.directory.close(handoff.token)

    @invariant()
    def handoffs_keep_their_slots(self) -> None:
        for handoff in self.live.values():
            for numbers, generations in zip(handoff.slots, handoff.generations, strict=True):
                for number, generation in zip(numbers, generations, strict=True):
                    assert self.generation[number] == generation

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        held, in_cache, leases = self.directory.usage()
        assert held == len(self.held() | self.busy())
        assert 0 <= in_cache <= self.directory.num_slots - held
        assert leases == len(self.leased & self.live.keys())


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
