# SPDX-License-Identifier: Apache-2.0
"""Copies of slots from a peer's arena to the own one, for `omni-connector cache move`.

No KV block of vLLM takes part, and no step is waited for. A copy is asked for, and asked about, at
the socket of the rank. As with a load, generations are compared before and after the copy, then
checksums and keys; the own slots are published only after that.
"""

import logging
import threading
from functools import partial
from typing import Annotated, Final

import numpy as np
import xxhash
from msgspec import Meta, Struct
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.arena.format import MAX_KEY_BYTES
from omni_connector.errors import ChecksumError, OmniError, PeerUnreachableError, StaleSlotError
from omni_connector.net.packets import PROTOCOL, require_protocol
from omni_connector.net.rank_socket import RankAnswers
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.transports import Endpoint
from omni_connector.transports.peer_arenas import PeerArenas
from omni_connector.transports.reading import PeerThreads

logger = logging.getLogger("vllm.omni_connector.worker")

MOST_SLOTS: Final = 256
"""Slots in one copy, whose message has some 20 KiB then."""

# Ended copies whose results are remembered. The asker has fewer under way.
_REMEMBERED: Final = 64

_Words = Annotated[bytes, Meta(max_length=8 * MOST_SLOTS)]


class AskCopy(Struct, frozen=True, tag="ask-copy"):
    """Has a rank copy slots, or says how far that is; answered with `Copied`.

    Attributes:
        ticket: names the copy; asked again, it is not begun again.
        arena: endpoints of the arena that it copies from.
        slots, generations: there; int64 as bytes.
        own_slots, own_generations: of the own arena; likewise.
        keys: that both have in their headers.
    """

    ticket: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    arena: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=16)]
    slots: _Words
    generations: _Words
    own_slots: _Words
    own_generations: _Words
    keys: Annotated[
        tuple[Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)], ...], Meta(max_length=MOST_SLOTS)
    ]
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)
        words = (self.slots, self.generations, self.own_slots, self.own_generations)
        if {len(each) for each in words} != {8 * len(self.keys)}:
            raise ValueError("as many slots and generations as keys, of 8 bytes each")


class Copied(Struct, frozen=True, tag="copied"):
    """Whether the copy has succeeded; None while it is under way."""

    copied: bool | None


class ArenaCopies:
    """The copies of one rank. Any thread may call this.

    Args:
        arena: the own one.
        arenas: of peers, attached ahead.
        threads: copy.
        checksum: whether slots carry checksums.
    """

    def __init__(
        self, arena: Arena, arenas: PeerArenas, threads: PeerThreads, *, checksum: bool
    ) -> None:
        self._arena = arena
        self._arenas = arenas
        self._threads = threads
        self._checksum = checksum
        self._lock = threading.Lock()
        self._results: BoundedMap[int, bool | None] = BoundedMap(_REMEMBERED)

    @property
    def answers(self) -> RankAnswers:
        """What answers `AskCopy`; it does not block."""
        return {AskCopy: self._answer}

    def _answer(self, question: AskCopy) -> Copied:
        with self._lock:
            if question.ticket in self._results:
                return Copied(self._results[question.ticket])
            self._results[question.ticket] = None
        # As of a peer of its own: loads that wait for the arena's owner go on beside it.
        self._threads.submit("omni-connector cache move", partial(self._run, question))
        return Copied(None)

    def _run(self, question: AskCopy) -> None:
        copied = False
        try:
            self._copy(question)
            copied = True
        except OmniError as error:
            logger.info("Slots are not copied from another arena: %s", error)
        finally:
            with self._lock:
                self._results[question.ticket] = copied

    def _copy(self, question: AskCopy) -> None:
        attached = self._arenas.take_attached(question.arena)
        try:
            remote = attached.arena.result()
            if not attached.mapped:
                raise PeerUnreachableError("the arena cannot be mapped")
            slots, generations = _ints(question.slots), _ints(question.generations)
            own, own_generations = _ints(question.own_slots), _ints(question.own_generations)
            headers = remote.verify_all(slots, generations)
            if headers.keys != list(question.keys):
                raise StaleSlotError("a slot holds another block than the index says")
            self._arena.begin_write(own, own_generations)
            lengths = headers.lengths.astype(np.int64).tolist()
            sums = np.zeros(len(own), np.uint64)
            checked = self._checksum or bool(headers.checksums.any())
            rows, own_rows = remote.slots, self._arena.slots
            for at, (length, slot, to) in enumerate(
                zip(lengths, slots.tolist(), own.tolist(), strict=True)
            ):
                own_rows[to, :length] = rows[slot, :length]
                if checked:
                    sums[at] = xxhash.xxh3_64_intdigest(own_rows[to, :length].data)
            remote.verify_all(slots, generations)  # they have not changed meanwhile
            if checked and (sums != headers.checksums).any():
                raise ChecksumError("a slot holds other bytes than were published")
            for length in set(lengths):
                some = headers.lengths == length
                keys = [key for key, is_one in zip(question.keys, some, strict=True) if is_one]
                self._arena.publish(own[some], own_generations[some], keys, length, sums[some])
        finally:
            self._arenas.leave(attached, failed=False)


def _ints(words: bytes) -> NDArray[np.int64]:
    return np.frombuffer(words, np.int64)
