# SPDX-License-Identifier: Apache-2.0
"""An engine's ranks attach the arenas of its neighbours before the first hit there.

The scheduler half meets the neighbours and finds hits. The workers attach and read the arenas; with
tensor parallelism they are other processes. So the scheduler half asks each worker to attach an
arena, at the socket of its rank. The worker answers at once whether the arena is attached already.
None of it needs a step, so it works in an idle engine, too.

In the same way it asks them to keep an orphan: the arena of an engine that has ended.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from omni_connector.arena.slot_index import Ints
from omni_connector.copy.arena_copies import AskCopy, Copied
from omni_connector.errors import OmniError
from omni_connector.net import rank_socket
from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.net.rank_socket import RankAnswers
from omni_connector.net.unix import Connection
from omni_connector.transports import Endpoint

logger = logging.getLogger("vllm.omni_connector.sharing")

Arenas = tuple[tuple[Endpoint, ...], ...]
"""The arenas of an engine: for each rank an endpoint for each transport that can read its arena."""

AttachAhead = Callable[[tuple[Endpoint, ...]], bool]
"""Starts to attach an arena; returns at once whether it is attached. Any thread may call it."""

Keep = Callable[[tuple[Endpoint, ...], float], tuple[Endpoint, ...] | None]
"""Keeps an orphan; see `PeerArenas.keep`. Any thread may call it."""

MAX_ORPHAN_S: Final = 86400.0
"""Longest time, in seconds, for which a message may ask to keep an orphan: a day."""

# Longest wait for the answers of one rank, in seconds. A rank that computes answers slowly, as its
# threads share the interpreter.
_ANSWER_S: Final = 1.0
# Seconds without an answer after which a warning is logged.
_SILENT_S: Final = 30.0


Endpoints = Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=16)]
"""Of one arena, as peers send them."""


class AskAttached(Struct, frozen=True, tag="ask-attached"):
    """Asks a rank to attach an arena, or to keep one that it has; answered with `Attached`.

    Attributes:
        arena: its endpoints.
        keep: seconds for which it is to be kept although its owner has ended; None while the owner
            lives.
    """

    arena: Endpoints
    keep: Annotated[float, Meta(ge=0, le=MAX_ORPHAN_S)] | None = None
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class Attached(Struct, frozen=True, tag="attached"):
    """Whether the arena is attached.

    Attributes:
        handed_on: where other processes attach an arena that is kept.
    """

    attached: bool
    handed_on: Annotated[tuple[Endpoint, ...], Meta(max_length=16)] = ()


ANSWERS: Final = Decoder(Attached | Copied | Refusal)


@dataclass(frozen=True, slots=True, eq=False)
class SlotCopy:
    """A copy of slots that another engine's arenas have, to the own arenas: all ranks make it.

    Attributes:
        ticket: names it.
        arenas: of the other engine.
        slots, generations: there. Both int64 `(n,)`, at most `MOST_SLOTS`.
        own_slots, own_generations: of the own arenas; likewise.
        keys: in the headers of both.
    """

    ticket: int
    arenas: Arenas
    slots: Ints
    generations: Ints
    own_slots: Ints
    own_generations: Ints
    keys: Sequence[bytes]

    def of_rank(self, rank: int) -> AskCopy:
        """What is asked of one rank."""
        return AskCopy(
            self.ticket,
            self.arenas[rank],
            self.slots.tobytes(),
            self.generations.tobytes(),
            self.own_slots.tobytes(),
            self.own_generations.tobytes(),
            tuple(self.keys),
        )


def attached_ahead(attach: AttachAhead, keep: Keep) -> RankAnswers:
    """A worker's answers to `RankSockets`: it attaches arenas to this rank, and keeps orphans."""

    def answer(question: AskAttached) -> Attached:
        try:
            if question.keep is None:
                return Attached(attach(question.arena))
            handed_on = keep(question.arena, question.keep)
            return Attached(False) if handed_on is None else Attached(True, handed_on)
        except Exception:  # other arenas may do better
            logger.exception("Attaching an arena ahead failed; please report it")
            return Attached(False)

    return {AskAttached: answer}


class Ranks(Protocol):
    """The ranks of an engine, which its scheduler half asks to attach arenas of neighbours."""

    def attached(self, engines: Sequence[Arenas]) -> list[bool]:
        """Have each rank attach the arenas that it reads of each of these engines: that of the same
        rank, or those of all ranks of a pipeline stage where slots are spread. May wait for a rank.

        Returns:
            For each engine whether every rank has attached its arena. For a rank that does not
            answer now, its last answer counts.
        """

    def kept(self, orphans: Sequence[tuple[Arenas, float]]) -> list[Arenas | None]:
        """Have each rank keep the arenas that it reads of engines that have ended. May wait for a
        rank.

        Args:
            orphans: for each engine its arenas, and the seconds for which they are kept.

        Returns:
            For each engine where other processes attach its arenas, each at the same rank of this
            engine; the endpoints of a rank are empty where they cannot. None if a rank lacks one.
        """

    def copied(self, copy: SlotCopy) -> bool | None:
        """Have each rank make a copy, once. May wait for a rank.

        Returns:
            Whether every rank has made it; None until each has made it or failed. So no rank writes
            to these slots after another answer.
        """

    def close(self) -> None:
        """Disconnect from the ranks. Idempotent."""


class RankSockets:
    """The ranks of a real engine. Any thread may call this.

    Args:
        folder: the runtime folder.
        engine_id: of the engine.
        reads: for each of its ranks the arenas that it reads of another engine, by their ranks; see
            `CompatibilityKey.read_by_ranks`.
    """

    def __init__(self, folder: Path, engine_id: str, reads: Sequence[Sequence[int]]) -> None:
        self._connect = partial(rank_socket.connect, folder, engine_id)
        self._connections: dict[int, Connection] = {}
        self._reads = reads
        self._said: list[dict[tuple[Endpoint, ...], bool]] = [{} for _ in reads]
        self._silent_since: dict[int, float] = {}
        self._warned = False
        self._lock = threading.Lock()
        self._closed = False

    def attached(self, engines: Sequence[Arenas]) -> list[bool]:
        with self._lock:
            for rank, (said, read) in enumerate(zip(self._said, self._reads, strict=True)):
                wanted = list(dict.fromkeys(arenas[each] for arenas in engines for each in read))
                for gone in said.keys() - set(wanted):
                    del said[gone]
                self._ask(rank, wanted)
            return [
                all(
                    said.get(arenas[each], False)
                    for said, read in zip(self._said, self._reads, strict=True)
                    for each in read
                )
                for arenas in engines
            ]

    def kept(self, orphans: Sequence[tuple[Arenas, float]]) -> list[Arenas | None]:
        with self._lock:
            answers = [
                list(
                    self._answers(
                        rank, [AskAttached(of[each], keep) for of, keep in orphans for each in read]
                    )
                )
                for rank, read in enumerate(self._reads)
            ]
        return [self._kept_by_all(answers, number) for number in range(len(orphans))]

    def copied(self, copy: SlotCopy) -> bool | None:
        with self._lock:
            answers: list[bool | None] = []
            for rank in range(len(self._reads)):
                said = list(self._answers(rank, [copy.of_rank(rank)]))
                answers.append(said[0].copied if said else None)
        return None if None in answers else all(answers)

    def _kept_by_all(self, answers: Sequence[list[Attached]], number: int) -> Arenas | None:
        """What all ranks say of one orphan, if each has all that it reads of it.

        Args:
            answers: of each rank, about what it reads of one orphan after the other.
            number: of the orphan.
        """
        handed_on = []
        for rank, (said, read) in enumerate(zip(answers, self._reads, strict=True)):
            of_this = said[number * len(read) : (number + 1) * len(read)]
            if len(of_this) < len(read) or not all(each.attached for each in of_this):
                return None
            handed_on.append(of_this[read.index(rank)].handed_on)
        return tuple(handed_on)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            while self._connections:
                self._connections.popitem()[1].close()

    def _ask(self, rank: int, wanted: Sequence[tuple[Endpoint, ...]]) -> None:
        questions = [AskAttached(arena) for arena in wanted]
        for arena, answer in zip(wanted, self._answers(rank, questions), strict=False):
            self._said[rank][arena] = answer.attached

    def _answers(
        self, rank: int, questions: Sequence[AskAttached] | Sequence[AskCopy]
    ) -> Iterator[Any]:
        """Yield a rank's answers, up to the first question that it does not answer in time."""
        deadline = time.monotonic() + _ANSWER_S
        for question in questions:
            if self._closed:
                return
            try:
                connection = self._connections.get(rank)
                if connection is None:
                    connection = self._connect(rank, deadline)
                    self._connections[rank] = connection
                answer, _ = connection.ask(question, ANSWERS, deadline)
            except OmniError as error:  # it is asked again with the next look
                logger.debug("rank %d does not say what it has attached: %s", rank, error)
                if (failed := self._connections.pop(rank, None)) is not None:
                    failed.close()
                self._note_silent(rank, error)
                return
            self._silent_since.pop(rank, None)
            yield answer

    def _note_silent(self, rank: int, error: OmniError) -> None:
        now = time.monotonic()
        since = self._silent_since.setdefault(rank, now)
        if now - since >= _SILENT_S and not self._warned:
            self._warned = True
            logger.warning(
                "Rank %d of this engine does not answer (any more), so that prefixes of other "
                "engines may not be found: %s",
                rank,
                error,
            )
