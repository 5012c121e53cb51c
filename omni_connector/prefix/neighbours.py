# SPDX-License-Identifier: Apache-2.0
"""The engines of this host that share prefixes: whose indexes this engine reads, and who reads its.

Each engine has a socket in the runtime folder, where it gives its index to whoever asks, and says
whose it is. Nobody is told who comes: a thread looks into the folder about once a second. So no
process is special, and an engine that dies is gone when its connection ends.

An engine that does not answer, as one that was stopped, delays nobody: all newcomers are asked at
once, and a neighbour counts only once every rank of this engine has its arenas attached.
"""

import logging
import os
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from omni_connector.arena.block_index import MAX_SLOTS, BlockIndex, BlockIndexView
from omni_connector.arena.format import EPOCH_BYTES
from omni_connector.arena.slot_index import Ints
from omni_connector.errors import OmniError, PeerRefusedError, PeerUnreachableError
from omni_connector.net import runtime
from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.net.unix import Connection, Listener
from omni_connector.prefix.attaching import Arenas, Ranks
from omni_connector.runtime.context import EngineContext
from omni_connector.transports import Endpoint

logger = logging.getLogger("vllm.omni_connector.sharing")

LOOK_S: Final = 1.0
"""Seconds between two looks into the runtime folder."""

_KIND: Final = "i-"
# Longest wait for the answers of newcomers, in seconds; and for room in the queue of one of them.
_ANSWER_S: Final = 1.0
_CONNECT_S: Final = 0.05
# For so many seconds after an engine was met, ranks are asked so often for its arenas.
_FRESH_S: Final = 1.0
_SOON_S: Final = 0.01
# Longest time in which nobody looks whether this engine ends.
_WAIT_S: Final = 0.1
_CLOSE_S: Final = 2.0
# An engine that could not be met is tried again after so many seconds.
_AGAIN_S: Final = 5.0
# One from which a load does not get its bytes is left out of look-ups for so many seconds.
_AVOID_S: Final = 30.0
_MAX_HITS: Final = 1024
_MAX_MESSAGES: Final = 16
_MAX_NEIGHBOURS: Final = 256


class AskIndex(msgspec.Struct, frozen=True, tag="ask-index"):
    """Asks for the index of an engine; answered with `GiveIndex` and its memfd."""

    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class GiveIndex(msgspec.Struct, frozen=True, tag="give-index"):
    """The memfd beside this message is the index of an engine.

    Attributes:
        readers: digest of what engines must agree in to read each other's slots.
        epoch: of the index.
        num_slots: of each arena.
        arenas: see `Arenas`.
    """

    readers: Annotated[bytes, Meta(min_length=16, max_length=16)]
    epoch: Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
    num_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    arenas: Annotated[
        tuple[Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=16)], ...],
        Meta(min_length=1, max_length=1024),
    ]


class Hits(msgspec.Struct, frozen=True, tag="hits"):
    """Tells an engine which of its slots were read. It has no answer.

    Attributes:
        slots, generations: bytes of as many int64.
    """

    slots: Annotated[bytes, Meta(max_length=8 * _MAX_HITS)]
    generations: Annotated[bytes, Meta(max_length=8 * _MAX_HITS)]

    def __post_init__(self) -> None:
        if len(self.slots) % 8 or len(self.slots) != len(self.generations):
            raise ValueError("as many generations as slots, of 8 bytes each")


QUESTIONS: Final = msgspec.msgpack.Decoder(AskIndex | Hits)
ANSWERS: Final = msgspec.msgpack.Decoder(GiveIndex | Refusal)


@dataclass(frozen=True, slots=True, eq=False)
class Neighbour:
    """An engine whose slots can be read.

    Attributes:
        index: finds its blocks.
        arenas: hold them.
        own: whether it is this engine itself.
        name: of its socket in the runtime folder.
    """

    index: BlockIndex | BlockIndexView
    arenas: Arenas
    own: bool = False
    name: str = ""


class Neighbours(Protocol):
    """The other engines of the host that share. The engine's thread calls this, and never waits."""

    def present(self) -> Sequence[Neighbour]:
        """Those that are there now, and whose arenas every rank of this engine has attached."""

    def hit(self, neighbour: Neighbour, slots: Ints, generations: Ints) -> None:
        """Its slots are read, in these generations; it is told soon."""

    def avoid(self, arenas: Arenas) -> None:
        """The engine with these arenas does not answer: it is not present for a while, or until it
        has come anew."""

    def close(self) -> None:
        """Be no neighbour any more. Idempotent."""


@dataclass(frozen=True)
class LocalEngine:
    """What one engine tells its neighbours of itself, and hears from them.

    Attributes:
        folder: the runtime folder.
        name: of its socket, unique on this host; it need not be secret.
        readers: digest of what engines must agree in to read each other's slots, 16 bytes.
        index: its own; closed by its owner, after the neighbours.
        arenas: its own.
        ranks: its own, which attach the arenas of neighbours; closed with the neighbours.
        on_hits: called with slots and generations that a neighbour has read, on another thread;
            must not block.
    """

    folder: Path
    name: str
    readers: bytes
    index: BlockIndex
    arenas: Arenas
    ranks: Ranks
    on_hits: Callable[[Ints, Ints], None]


@dataclass(slots=True, eq=False)
class _Met:
    connection: Connection
    neighbour: Neighbour
    since: float
    attached: bool = False


class HostNeighbours:
    """The neighbours of a real engine.

    Args:
        local_engine: this engine.
        context: clock, and how the thread starts that looks for them.

    Raises:
        TransportError: another process has this engine's socket.
    """

    def __init__(
        self,
        local_engine: LocalEngine,
        context: EngineContext,
    ) -> None:
        self._local_engine = local_engine
        self._clock = context.clock
        self._own = runtime.socket_path(local_engine.folder, local_engine.name, kind=_KIND)
        index = local_engine.index
        self._gives = GiveIndex(
            local_engine.readers, index.epoch, index.num_slots, local_engine.arenas
        )
        self._fd = os.dup(index.fd)
        self._lock = threading.Lock()
        self._looks = threading.Lock()  # one look at a time
        self._met: dict[str, _Met] = {}
        self._present: tuple[Neighbour, ...] = ()
        self._avoided: dict[Neighbour, float] = {}
        self._not_before: dict[str, float] = {}
        self._why_not: dict[str, str] = {}
        self._hits: defaultdict[Neighbour, list[tuple[Ints, Ints]]] = defaultdict(list)
        self._closing = False
        self._next_look = context.clock()
        self._listener = Listener(QUESTIONS, self._answer)
        try:
            self._listener.add(self._own)
        except BaseException:
            self._listener.close()
            os.close(self._fd)
            raise
        self._thread = context.start("omni-neighbours", self._turn)

    def present(self) -> Sequence[Neighbour]:
        return self._present

    def hit(self, neighbour: Neighbour, slots: Ints, generations: Ints) -> None:
        with self._lock:
            self._hits[neighbour].append((slots, generations))

    def avoid(self, arenas: Arenas) -> None:
        until = self._clock() + _AVOID_S
        with self._lock:
            self._avoided |= {each: until for each in self._present if each.arenas == arenas}
            self._present = tuple(each for each in self._present if each not in self._avoided)

    def look(self) -> None:
        """Find who has come and who has gone, and tell the others of hits. May wait for a peer."""
        with self._looks:
            here = set(self._sockets())
            for name, met in list(self._met.items()):
                if not met.connection.alive:
                    self._leave(name)
            self._follow()
            self._meet(sorted(here - self._met.keys())[: _MAX_NEIGHBOURS - len(self._met)])
            self._not_before = {n: at for n, at in self._not_before.items() if n in here}
            self._why_not = {n: why for n, why in self._why_not.items() if n in here}
            self._tell()

    def _follow(self) -> None:
        """See what the ranks have attached, and who is present by that."""
        mets = list(self._met.values())
        attached = self._local_engine.ranks.attached([met.neighbour.arenas for met in mets])
        now = self._clock()
        with self._lock:
            there = [met.neighbour for met in mets]
            avoided = {each: self._avoided.get(each, now) for each in there}
            self._avoided = {each: until for each, until in avoided.items() if now < until}
            for met, is_attached in zip(mets, attached, strict=True):
                met.attached = is_attached
            self._present = tuple(
                met.neighbour for met in mets if met.attached and met.neighbour not in self._avoided
            )

    def _attaches(self) -> bool:
        """Whether engines that were met lately are about to be attached."""
        now = self._clock()
        return any(
            not met.attached and now < met.since + _FRESH_S for met in list(self._met.values())
        )

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._listener.close()
        self._thread.wake()
        self._thread.join(_CLOSE_S)
        self._present = ()
        for name in list(self._met):
            self._leave(name)
        self._local_engine.ranks.close()
        os.close(self._fd)

    def _turn(self) -> float | None:
        if self._closing:
            return None
        try:
            if self._attaches() and self._clock() < self._next_look:
                with self._looks:
                    self._follow()
            else:
                self._next_look = self._clock() + LOOK_S
                self.look()
        except Exception:  # the next look may do better
            logger.exception("Looking for engines to share with failed; please report it")
        if self._attaches():
            return _SOON_S
        return max(_SOON_S, self._next_look - self._clock())

    def _sockets(self) -> list[str]:
        try:
            names = os.listdir(self._local_engine.folder)
        except OSError as error:
            logger.debug("cannot read the runtime folder: %s", error)
            return []
        return [name for name in names if name.startswith(_KIND) and name != self._own.name]

    def _meet(self, names: Sequence[str]) -> None:
        """Ask newcomers for their indexes, all at once, and take the answers as they come."""
        deadline = time.monotonic() + _ANSWER_S
        asked: dict[int, tuple[str, Connection]] = {}
        poll = select.poll()
        try:
            for name in names:
                if (connection := self._asked(name)) is not None:
                    asked[connection.fileno()] = name, connection
                    poll.register(connection.fileno(), select.POLLIN)
            while asked and not self._closing and (left := deadline - time.monotonic()) > 0:
                soon = _SOON_S if self._attaches() else _WAIT_S
                for descriptor, _ in poll.poll(1000 * min(left, soon)):
                    poll.unregister(descriptor)
                    self._answered(*asked.pop(descriptor))
                self._follow()
        finally:
            for name, connection in asked.values():
                connection.close()
                logger.debug("%s is not met: it does not answer", name)

    def _asked(self, name: str) -> Connection | None:
        """A connection to a newcomer whose index was asked for; None where nobody takes the
        question now, or it was asked lately."""
        now = self._clock()
        if now < self._not_before.get(name, now):
            return None
        self._not_before[name] = now + _AGAIN_S
        try:
            connection = Connection(self._local_engine.folder / name, time.monotonic() + _CONNECT_S)
        except (OmniError, OSError) as error:  # of descriptors there may be no more
            logger.debug("%s is not met: %s", name, error)
            return None
        if connection.tell(AskIndex()):
            return connection
        connection.close()
        return None

    def _answered(self, name: str, connection: Connection) -> None:
        try:
            reply, descriptor = connection.answer(ANSWERS, time.monotonic() + _CONNECT_S, True)
            assert descriptor is not None
            neighbour = opened(reply, descriptor, self._local_engine, name)
        except (OmniError, OSError) as error:
            connection.close()
            # Engines of other models are no fault, and are met again and again.
            if self._why_not.get(name) != str(error):
                self._why_not[name] = str(error)
                level = logging.DEBUG if isinstance(error, PeerUnreachableError) else logging.INFO
                logger.log(level, "No prefixes are shared with %s: %s", name, error)
            return
        except BaseException:
            connection.close()
            raise
        self._met[name] = _Met(connection, neighbour, self._clock())
        del self._not_before[name]
        logger.info("Sharing prefixes with the engine at %s", name)

    def _leave(self, name: str) -> None:
        # The engine's thread may be looking something up: the mapping goes with its last user.
        self._met.pop(name).connection.close()

    def _tell(self) -> None:
        with self._lock:
            hits, self._hits = self._hits, defaultdict(list)
        for met in self._met.values():
            if told := hits.get(met.neighbour):
                self._tell_one(met, *(np.concatenate(each) for each in zip(*told, strict=True)))

    def _tell_one(self, met: _Met, slots: Ints, generations: Ints) -> None:
        # Of each slot its latest use; the latest of all come last, as they are to stay longest.
        _, last = np.unique(slots[::-1], return_index=True)
        order = np.sort(len(slots) - 1 - last)[-_MAX_MESSAGES * _MAX_HITS :]
        for at in range(0, len(order), _MAX_HITS):
            part = order[at : at + _MAX_HITS]
            note = Hits(slots[part].tobytes(), generations[part].tobytes())
            if not met.connection.tell(note):  # its socket is full: the next look tells the rest
                rest = order[at:]
                with self._lock:
                    self._hits[met.neighbour].insert(0, (slots[rest], generations[rest]))
                return

    def _answer(self, question: AskIndex | Hits) -> tuple[msgspec.Struct | None, int | None]:
        if isinstance(question, Hits):
            slots, generations = question.slots, question.generations
            self._local_engine.on_hits(
                np.frombuffer(slots, np.int64), np.frombuffer(generations, np.int64)
            )
            return None, None
        return self._gives, os.dup(self._fd)


def opened(reply: GiveIndex, descriptor: int, ours: LocalEngine, name: str = "") -> Neighbour:
    """The engine that has sent this, and its index, whose descriptor is closed here.

    Raises:
        PeerRefusedError: its slots cannot be read here.
        OmniError: as `BlockIndexView.open`.
    """
    try:
        if reply.readers != ours.readers or len(reply.arenas) != len(ours.arenas):
            raise PeerRefusedError("it runs another model, or runs it in another way")
        if any(each.n_slots < reply.num_slots for rank in reply.arenas for each in rank):
            raise PeerRefusedError("its arenas have fewer slots than its index")
        view = BlockIndexView.open(descriptor, epoch=reply.epoch, num_slots=reply.num_slots)
        return Neighbour(view, reply.arenas, name=name)
    finally:
        os.close(descriptor)
