# SPDX-License-Identifier: Apache-2.0
"""Slots that are copied from a peer's arena are published only as what they were there."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from omni_connector.arena.arena import Arena
from omni_connector.arena.format import SlotState
from omni_connector.copy.arena_copies import ArenaCopies, AskCopy
from omni_connector.errors import PeerUnreachableError
from omni_connector.transports import Endpoint
from omni_connector.transports.peer_arenas import OwnArena

SLOTS, SLOT_BYTES, LENGTH = 8, 4096, 3000
KEYS = (b"first", b"second")


@dataclass
class Pair:
    """An own arena and a peer's, with two blocks in slots 3 and 5 of the latter.

    Attributes:
        calls: that threads shall make.
    """

    own: Arena
    peer: Arena
    mapped: bool = True
    attached: bool = True
    calls: list[Callable[[], None]] = field(default_factory=list)

    def copies(self, *, checksum: bool = True) -> ArenaCopies:
        arenas: Any = SimpleNamespace(take_attached=self._take, leave=lambda *_, **__: None)
        threads: Any = SimpleNamespace(submit=lambda _, call: self.calls.append(call))
        return ArenaCopies(self.own, arenas, threads, checksum=checksum)

    def _take(self, endpoints: tuple[Endpoint, ...]) -> Any:
        if not self.attached:
            raise PeerUnreachableError("it is not attached")
        arena: Future[OwnArena] = Future()
        arena.set_result(OwnArena(endpoints[0], self.peer))
        return SimpleNamespace(arena=arena, mapped=self.mapped)

    def ask(self, **changes: Any) -> AskCopy:
        said = {
            "ticket": 1,
            "arena": (Endpoint.of(self.peer, "shm", "peer"),),
            "slots": np.array([3, 5]).tobytes(),
            "generations": np.array([7, 8]).tobytes(),
            "own_slots": np.array([2, 1]).tobytes(),
            "own_generations": np.array([4, 6]).tobytes(),
            "keys": KEYS,
        }
        return AskCopy(**{**said, **changes})

    def result(self, copies: ArenaCopies, question: AskCopy) -> bool | None:
        """What the rank says when its threads have made what they shall."""
        answer = copies.answers[AskCopy]
        assert answer(question).copied is None  # type: ignore[attr-defined]
        while self.calls:
            self.calls.pop()()
        said: bool | None = answer(question).copied  # type: ignore[attr-defined]
        return said

    @property
    def published(self) -> list[int]:
        return [slot for slot in range(SLOTS) if self.own.header(slot).state is SlotState.PUBLISHED]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.ExitStack() as ends:
        own, peer = (ends.enter_context(Arena.create(SLOTS, SLOT_BYTES)) for _ in range(2))
        for slot, generation, key in ((3, 7, KEYS[0]), (5, 8, KEYS[1])):
            peer.begin_write(slot, generation)
            peer.slots[slot, :LENGTH] = slot
            checksum = xxhash.xxh3_64_intdigest(peer.slots[slot, :LENGTH].data)
            peer.publish(slot, generation, key, LENGTH, checksum)
        yield Pair(own, peer)


def test_slots_are_copied_with_their_headers(pair: Pair) -> None:
    assert pair.result(pair.copies(), pair.ask())
    assert pair.published == [1, 2]
    for slot, generation, like, key in ((2, 4, 3, KEYS[0]), (1, 6, 5, KEYS[1])):
        header = pair.own.verify(slot, generation)
        assert (header.key, header.length) == (key, LENGTH)
        assert header.checksum == pair.peer.header(like).checksum
        assert (pair.own.slots[slot, :LENGTH] == like).all()


def test_it_is_made_once_however_often_it_is_asked(pair: Pair) -> None:
    copies = pair.copies()
    for _ in range(3):
        assert copies.answers[AskCopy](pair.ask()).copied is None  # type: ignore[attr-defined]
    assert len(pair.calls) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pair: pair.peer.slots[5, :1].fill(77),
        lambda pair: pair.peer.begin_write(5, 9),
        lambda pair: setattr(pair, "mapped", False),
        lambda pair: setattr(pair, "attached", False),
    ],
    ids=["other bytes", "another block", "not mapped", "not attached"],
)
@pytest.mark.parametrize("checksum", [True, False])
def test_what_is_not_right_is_not_published(
    pair: Pair, spoil: Callable[[Pair], None], checksum: bool
) -> None:
    spoil(pair)
    assert pair.result(pair.copies(checksum=checksum), pair.ask()) is False
    assert pair.published == []


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": KEYS[::-1]},
        {"generations": np.array([7, 9]).tobytes()},
        {"slots": np.array([3, 500]).tobytes()},
        {"slots": np.array([3, -1]).tobytes()},
        {"own_slots": np.array([2, 500]).tobytes()},
    ],
    ids=["keys", "generation", "no slot", "no slot before", "no own slot"],
)
def test_a_question_that_does_not_fit_copies_nothing(pair: Pair, changes: dict[str, Any]) -> None:
    with contextlib.suppress(IndexError):  # the thread logs it
        assert pair.result(pair.copies(), pair.ask(**changes)) is False
    assert pair.published == []
    assert pair.copies().answers[AskCopy](pair.ask()).copied is None  # type: ignore[attr-defined]


def test_without_checksums_there_is_nothing_to_compare(pair: Pair) -> None:
    """The control of other bytes."""
    pair.peer.begin_write(5, 9)
    pair.peer.publish(5, 9, KEYS[1], LENGTH, 0)
    pair.peer.begin_write(3, 8)
    pair.peer.publish(3, 8, KEYS[0], LENGTH, 0)
    pair.peer.slots[5, :1] = 77
    question = pair.ask(generations=np.array([8, 9]).tobytes())
    assert pair.result(pair.copies(checksum=False), question)
    assert pair.published == [1, 2]


def test_as_many_of_each_must_be_named(pair: Pair) -> None:
    with pytest.raises(ValueError, match="as many slots"):
        pair.ask(keys=KEYS[:1])
