# SPDX-License-Identifier: Apache-2.0
"""The engines of this host that share prefixes. They read each other's indexes.

Each engine has a socket in the runtime folder, and sends its index to every peer that asks there.
There is no registry: each engine lists the folder about once a second. An engine that dies is
removed when its connection ends.

What an engine has kept outlives it for a while as an *orphan*: the others still map its arena and
its index. They go on reading them, and hand them on to engines that start meanwhile.

An engine that does not answer (one that was stopped, say) delays no other: all new ones are asked
at once. A neighbour is used only when every rank of this engine has attached its arenas.
"""

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from omni_connector.arena.available import available_bytes, spared_bytes
from omni_connector.arena.block_index import MAX_SLOTS, BlockIndex, BlockIndexView
from omni_connector.arena.format import EPOCH_BYTES
from omni_connector.arena.slot_index import Ints
from omni_connector.errors import OmniError, PeerRefusedError, PeerUnreachableError
from omni_connector.net import runtime
from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.net.status import plain
from omni_connector.net.unix import Connection, Listener
from omni_connector.prefix.attaching import MAX_ORPHAN_S, Arenas, Ranks, SlotCopy
from omni_connector.runtime.context import EngineContext
from omni_connector.stores.shared_blocks import reader_difference
from omni_connector.transports import Endpoint

logger = logging.getLogger("vllm.omni_connector.sharing")

LOOK_S: Final = 1.0
"""Seconds between two listings of the runtime folder."""

INDEX_KIND: Final = "i-"
"""Names of index sockets in the runtime folder begin with this."""

ORPHAN_S: Final = 60.0
"""Seconds for which an orphan is kept: an engine restarts in less, unless its model is large.
`omni-connector keep` keeps what it had for longer."""

# Longest wait for the answers of all new engines, in seconds.
_ANSWER_S: Final = 1.0
# Longest wait to connect to one engine, in seconds, and to read an answer that has begun. It waits
# only where that engine's queue of connections is full.
_CONNECT_S: Final = 0.05
# In the first `_FRESH_S` seconds after a neighbour was met, ranks are asked every `_SOON_S` seconds
# whether they have attached its arenas. After that they are asked once in `LOOK_S`.
_FRESH_S: Final = 1.0
_SOON_S: Final = 0.01
# Longest wait for answers, in seconds, before the thread checks whether it has to close.
_WAIT_S: Final = 0.1
# Longest wait for the thread to end, in seconds.
_CLOSE_S: Final = 2.0
# Seconds until an engine that could not be met is asked again.
_AGAIN_S: Final = 5.0
# Seconds for which look-ups leave out an engine from which a load did not get its bytes.
_AVOID_S: Final = 30.0
# Slots in one `Hits` message, which then has 16 KiB.
_MAX_HITS: Final = 1024
# `Hits` messages to one neighbour at a time. Of more hits, the oldest are left out.
_MAX_MESSAGES: Final = 16
# Neighbours that an engine has at most. It bounds descriptors and the cost of a look-up.
_MAX_NEIGHBOURS: Final = 256
# Orphans that an engine keeps at most. It bounds descriptors, memory and the cost of a look-up.
_MAX_ORPHANS: Final = 16
# Copies between arenas that are under way at a time. Ranks remember more.
_MOST_COPIES: Final = 8
# Seconds in which the ranks must have an orphan; else it is given up.
_ADOPT_S: Final = 5.0
# Orphans go while less memory is available than this many times what populating an arena in the
# background leaves to others: so they go before an engine stops populating its arena.
_SHORT: Final = 2

_Trait = Annotated[str, Meta(max_length=1024)]
_Epoch = Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]


def index_socket(folder: Path, engine_id: str) -> Path:
    """The socket at which an engine gives its index.

    Raises:
        ConfigError: the folder's path is too long for a socket in it.
    """
    return runtime.socket_path(folder, f"index:{engine_id}", kind=INDEX_KIND)


class AskIndex(msgspec.Struct, frozen=True, tag="ask-index"):
    """Asks for the index of an engine; answered with `GiveIndex` and its memfd."""

    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class AskOrphan(msgspec.Struct, frozen=True, tag="ask-orphan"):
    """Asks for the index of an engine that has ended; answered like `AskIndex`.

    Attributes:
        epoch: of its index.
    """

    epoch: _Epoch
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class GiveIndex(msgspec.Struct, frozen=True, tag="give-index"):
    """The memfd beside this message is the index of an engine.

    Attributes:
        readers: digest of the traits that must be equal before engines read each other's slots.
        epoch: of the index.
        num_slots: of the engine; each arena has as many, or its stripe of them.
        arenas: see `Arenas`.
        orphans: epochs of the indexes of orphans that can be had from this engine.
        seconds: of an orphan, for how long it is kept yet.
        ended: whether `omni-connector keep` answers for an engine that has ended.
        engine_id: of the engine, for logs.
        traits: what `readers` is a digest of, by name and value, for logs; see `reader_traits` in
            `stores/shared_blocks.py`.
    """

    readers: Annotated[bytes, Meta(min_length=16, max_length=16)]
    epoch: _Epoch
    num_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    arenas: Annotated[
        tuple[Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=16)], ...],
        Meta(min_length=1, max_length=1024),
    ]
    orphans: Annotated[tuple[_Epoch, ...], Meta(max_length=_MAX_ORPHANS)] = ()
    seconds: Annotated[float, Meta(ge=0, le=MAX_ORPHAN_S)] = 0.0
    ended: bool = False
    engine_id: Annotated[str, Meta(max_length=1024)] = ""
    traits: Annotated[tuple[tuple[_Trait, _Trait], ...], Meta(max_length=64)] = ()

    def named(self, socket: str) -> str:
        """The engine in the words of a log, where an older one is known by its socket alone."""
        return f"engine {plain(self.engine_id)}" if self.engine_id else f"the engine at {socket}"


class Hits(msgspec.Struct, frozen=True, tag="hits"):
    """Tells an engine which of its slots were read. It has no answer.

    Attributes:
        slots, generations: int64 as bytes, equally many of both.
    """

    slots: Annotated[bytes, Meta(max_length=8 * _MAX_HITS)]
    generations: Annotated[bytes, Meta(max_length=8 * _MAX_HITS)]

    def __post_init__(self) -> None:
        if len(self.slots) % 8 or len(self.slots) != len(self.generations):
            raise ValueError("as many generations as slots, of 8 bytes each")


QUESTIONS: Final = msgspec.msgpack.Decoder(AskIndex | AskOrphan | Hits)
ANSWERS: Final = msgspec.msgpack.Decoder(GiveIndex | Refusal)


@dataclass(frozen=True, slots=True, eq=False)
class Neighbour:
    """An engine whose slots can be read.

    Attributes:
        index: finds the slots of its blocks.
        arenas: one a rank, with these slots.
        own: whether it is this engine itself.
        name: of its socket in the runtime folder.
        orphan: whether the engine has ended, so that its blocks will go, also where
            `omni-connector keep` still gives them.
    """

    index: BlockIndex | BlockIndexView
    arenas: Arenas
    own: bool = False
    name: str = ""
    orphan: bool = False


class Neighbours(Protocol):
    """The other engines of the host that share. The engine's thread calls this, and never waits."""

    def present(self) -> Sequence[Neighbour]:
        """The neighbours now. Every rank of this engine has attached their arenas."""

    def hit(self, neighbour: Neighbour, slots: Ints, generations: Ints) -> None:
        """This engine reads slots of a neighbour, in these generations. A message tells it soon."""

    def avoid(self, arenas: Arenas) -> None:
        """Leave out the engine with these arenas for a while, as it does not answer. If it is
        restarted, it is used at once."""

    def copy(self, copy: SlotCopy, ended: Callable[[bool], object]) -> None:
        """Have the ranks of this engine copy slots of a neighbour to their own arenas.

        Args:
            ended: called once, on another thread, with whether every rank has made it.
        """

    def close(self) -> None:
        """Stop sharing. Idempotent."""


@dataclass(frozen=True)
class LocalEngine:
    """This engine, as `HostNeighbours` introduces it to the others.

    Attributes:
        folder: the runtime folder.
        engine_id: names its socket, unique on this host; it need not be secret.
        readers: digest of the traits that must be equal before engines read each other's slots, 16
            bytes.
        index: the own index; closed by its owner, after the neighbours.
        arenas: the own arenas.
        ranks: attach the arenas of neighbours; closed with the neighbours.
        on_hits: called with slots and generations that a neighbour has read, on another thread;
            must not block.
        traits: by name; see `GiveIndex`.
        stripes: for each of the arenas, over how many of them slots are spread, here and at the
            neighbours; none where every rank has all slots.
    """

    folder: Path
    engine_id: str
    readers: bytes
    index: BlockIndex
    arenas: Arenas
    ranks: Ranks
    on_hits: Callable[[Ints, Ints], None]
    stripes: tuple[int, ...] = ()
    traits: Mapping[str, str] = field(default_factory=dict)

    @property
    def siblings(self) -> Sequence[Arenas]:
        """The own arenas, if ranks read those of each other."""
        return [self.arenas] if max(self.stripes, default=1) > 1 else []

    @property
    def gives(self) -> GiveIndex:
        """What it answers to those that ask for its index."""
        return GiveIndex(
            self.readers,
            self.index.epoch,
            self.index.num_slots,
            self.arenas,
            engine_id=self.engine_id[:1024],
            traits=tuple(self.traits.items()),
        )


@dataclass(slots=True, eq=False)
class _Met:
    connection: Connection
    neighbour: Neighbour
    descriptor: int  # of its index
    since: float
    engine: str  # for logs
    attached: bool = False

    def close(self) -> None:
        """Disconnect. The index stays mapped, as the engine's thread may be reading it. Its last
        reference unmaps it."""
        self.connection.close()
        os.close(self.descriptor)


@dataclass(slots=True, eq=False)
class _Orphan:
    neighbour: Neighbour
    descriptor: int  # of its index
    until: float
    give_up_at: float
    handed_on: Arenas | None = None  # known while every rank has its arena


class Orphans:
    """What engines that have ended have kept, as long as the ranks of this engine have it mapped.

    Args:
        local_engine: this engine.
        clock: seconds, monotonic.
        memory_is_short: whether orphans have to make room.
    """

    def __init__(
        self,
        local_engine: LocalEngine,
        clock: Callable[[], float],
        memory_is_short: Callable[[], bool],
    ) -> None:
        self._ranks = local_engine.ranks
        self._readers = local_engine.readers
        self._clock = clock
        self._memory_is_short = memory_is_short
        self._lock = threading.Lock()  # against the thread that gives indexes
        self._orphans: dict[bytes, _Orphan] = {}  # by the epochs of their indexes, the oldest first

    def __bool__(self) -> bool:
        return bool(self._orphans)

    def adopt(self, neighbour: Neighbour, descriptor: int, seconds: float = math.inf) -> None:
        """Keep what an engine had, unless it is kept already.

        Args:
            neighbour: the engine.
            descriptor: of its index; closed with the orphan.
            seconds: for how long others keep it yet.
        """
        now = self._clock()
        seconds = min(seconds, ORPHAN_S)
        epoch = neighbour.index.epoch
        with self._lock:
            if seconds > 0 and epoch not in self._orphans and len(self._orphans) < _MAX_ORPHANS:
                orphan = replace(neighbour, orphan=True)
                until = now + seconds
                self._orphans[epoch] = _Orphan(orphan, descriptor, until, now + _ADOPT_S)
                descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def follow(self) -> None:
        """Have the ranks keep the arenas; let go of the orphans that are over, or that they do not
        have. May wait for a rank."""
        now = self._clock()
        for epoch, orphan in list(self._orphans.items()):
            if now >= orphan.until or (orphan.handed_on is None and now >= orphan.give_up_at):
                self.let_go(epoch)
        if self._orphans and self._memory_is_short():
            self.let_go(next(iter(self._orphans)))
        orphans = list(self._orphans.values())
        if not orphans:
            return
        asked = [(each.neighbour.arenas, each.until - now) for each in orphans]
        kept = self._ranks.kept(asked)
        with self._lock:
            for orphan, handed_on in zip(orphans, kept, strict=True):
                orphan.handed_on = handed_on

    @property
    def unkept(self) -> list[Arenas]:
        """The arenas that a rank does not have (yet)."""
        orphans = self._orphans.values()
        return [each.neighbour.arenas for each in orphans if each.handed_on is None]

    def attaches(self, now: float) -> bool:
        """Whether a rank does not have an orphan yet that was adopted lately."""
        orphans = self._orphans.values()
        return any(
            each.handed_on is None and now < each.give_up_at - _ADOPT_S + _FRESH_S
            for each in orphans
        )

    def present(self) -> list[Neighbour]:
        """The orphans that can be read, the oldest first."""
        orphans = self._orphans.values()
        return [each.neighbour for each in orphans if each.handed_on is not None]

    def has(self, epoch: bytes) -> bool:
        """Whether the engine with this index is an orphan here."""
        return epoch in self._orphans

    def offered(self) -> tuple[bytes, ...]:
        """The epochs of the orphans that other engines can attach here. Any thread."""
        with self._lock:
            return tuple(
                epoch
                for epoch, orphan in self._orphans.items()
                if orphan.handed_on is not None and all(orphan.handed_on)
            )

    def give(self, epoch: bytes) -> tuple[GiveIndex | Refusal, int | None]:
        """The index of an orphan, for another engine. Any thread."""
        with self._lock:
            orphan = self._orphans.get(epoch)
            seconds = 0.0 if orphan is None else orphan.until - self._clock()
            if orphan is None or not orphan.handed_on or not all(orphan.handed_on) or seconds <= 0:
                return Refusal("there is no such orphan here (any more)"), None
            index = orphan.neighbour.index
            gives = GiveIndex(
                self._readers, epoch, index.num_slots, orphan.handed_on, seconds=seconds
            )
            return gives, os.dup(orphan.descriptor)

    def let_go(self, epoch: bytes) -> None:
        """Keep an orphan no longer. Its ranks let go of the arenas within `IDLE_S` seconds."""
        with self._lock:
            orphan = self._orphans.pop(epoch, None)
        if orphan is not None:
            os.close(orphan.descriptor)

    def close(self) -> None:
        """Let go of all. Idempotent."""
        for epoch in list(self._orphans):
            self.let_go(epoch)


def memory_is_short() -> bool:
    """Whether so little memory is available that orphans have to go."""
    return available_bytes() < _SHORT * spared_bytes()


class HostNeighbours:
    """Finds the neighbours of an engine, on a thread of its own.

    Args:
        local_engine: this engine.
        context: clock and threads.
        memory_is_short: whether orphans have to make room.

    Raises:
        TransportError: another process has this engine's socket.
    """

    def __init__(
        self,
        local_engine: LocalEngine,
        context: EngineContext,
        memory_is_short: Callable[[], bool] = memory_is_short,
    ) -> None:
        self._local_engine = local_engine
        self._clock = context.clock
        self._orphans = Orphans(local_engine, context.clock, memory_is_short)
        self._own = index_socket(local_engine.folder, local_engine.engine_id)
        self._gives = local_engine.gives
        self._fd = os.dup(local_engine.index.fd)
        self._lock = threading.Lock()
        self._looks = threading.Lock()  # one look at a time
        self._met: dict[str, _Met] = {}
        self._present: tuple[Neighbour, ...] = ()
        self._avoided: dict[Neighbour, float] = {}
        self._not_before: dict[str, float] = {}
        self._why_not: dict[str, str] = {}
        self._hits: defaultdict[Neighbour, list[tuple[Ints, Ints]]] = defaultdict(list)
        self._copies: deque[tuple[SlotCopy, Callable[[bool], object]]] = deque()
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

    def copy(self, copy: SlotCopy, ended: Callable[[bool], object]) -> None:
        self._copies.append((copy, ended))
        self._thread.wake()

    def _follow_copies(self) -> None:
        """Begin copies, and ask the ranks which have ended."""
        for copy, ended in list(self._copies)[:_MOST_COPIES]:
            if (copied := self._local_engine.ranks.copied(copy)) is not None:
                self._copies.remove((copy, ended))
                ended(copied)

    def look(self) -> None:
        """Meet new engines, make orphans of ended ones, and send the hits. May wait for a peer."""
        with self._looks:
            here = set(self._sockets())
            for name, met in list(self._met.items()):
                if not met.connection.alive:
                    self._ended(name)
            self._follow()
            self._meet(sorted(here - self._met.keys())[: _MAX_NEIGHBOURS - len(self._met)])
            self._not_before = {n: at for n, at in self._not_before.items() if n in here}
            self._why_not = {n: why for n, why in self._why_not.items() if n in here}
            self._tell()

    def _follow(self) -> None:
        """Ask the ranks which arenas they have attached, and update the neighbours that are
        used."""
        mets = list(self._met.values())
        self._orphans.follow()
        attached = self._local_engine.ranks.attached(
            [
                *(met.neighbour.arenas for met in mets),
                *self._orphans.unkept,
                *self._local_engine.siblings,
            ]
        )
        now = self._clock()
        with self._lock:
            orphans = self._orphans.present()
            there = [*(met.neighbour for met in mets), *orphans]
            avoided = {each: self._avoided.get(each, now) for each in there}
            self._avoided = {each: until for each, until in avoided.items() if now < until}
            for met, is_attached in zip(mets, attached, strict=False):
                met.attached = is_attached
            readable = [*(met.neighbour for met in mets if met.attached), *orphans]
            # Living engines first: what only an ended one has is kept here when it is read.
            readable.sort(key=lambda each: each.orphan)
            self._present = tuple(each for each in readable if each not in self._avoided)

    def _attaches(self) -> bool:
        """Whether arenas of an engine that was met lately are not attached yet."""
        now = self._clock()
        return self._orphans.attaches(now) or any(
            not met.attached and now < met.since + _FRESH_S for met in list(self._met.values())
        )

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._listener.close()
        self._thread.wake()
        self._thread.join(_CLOSE_S)
        with self._lock:  # each neighbour keeps its index mapped
            self._present = ()
            self._hits.clear()
            self._avoided.clear()
        while self._met:
            self._met.popitem()[1].close()
        self._orphans.close()
        self._local_engine.ranks.close()
        os.close(self._fd)

    def _turn(self) -> float | None:
        if self._closing:
            return None
        try:
            self._follow_copies()
            if (self._copies or self._attaches()) and self._clock() < self._next_look:
                with self._looks:
                    self._follow()
            else:
                self._next_look = self._clock() + LOOK_S
                self.look()
        except Exception:  # the next look may do better
            logger.exception("Looking for engines to share with failed; please report it")
        if self._copies or self._attaches():
            return _SOON_S
        return max(_SOON_S, self._next_look - self._clock())

    def _sockets(self) -> list[str]:
        try:
            names = os.listdir(self._local_engine.folder)
        except OSError as error:
            logger.debug("cannot read the runtime folder: %s", error)
            return []
        return [name for name in names if name.startswith(INDEX_KIND) and name != self._own.name]

    def _meet(self, names: Sequence[str]) -> None:
        """Ask new engines for their indexes, all at once, and take the answers as they come."""
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
        """Ask a new engine for its index; returns the connection. None if it does not accept one
        now, or was asked less than `_AGAIN_S` seconds ago."""
        now = self._clock()
        if now < self._not_before.get(name, now):
            return None
        self._not_before[name] = now + _AGAIN_S
        try:
            connection = Connection(self._local_engine.folder / name, time.monotonic() + _CONNECT_S)
        except (OmniError, OSError) as error:  # OSError: this process has no descriptor left
            logger.debug("%s is not met: %s", name, error)
            return None
        if connection.tell(AskIndex()):
            return connection
        connection.close()
        return None

    def _answered(self, name: str, connection: Connection) -> None:
        engine = f"the engine at {name}"
        try:
            reply, descriptor = connection.answer(ANSWERS, time.monotonic() + _CONNECT_S, True)
            assert descriptor is not None
            engine = reply.named(name)
            neighbour, descriptor = opened(reply, descriptor, self._local_engine, name)
        except (OmniError, OSError) as error:
            connection.close()
            # An engine of another model is no fault. It is asked every few seconds, so each reason
            # is logged once.
            if self._why_not.get(name) != str(error):
                self._why_not[name] = str(error)
                level = logging.DEBUG if isinstance(error, PeerUnreachableError) else logging.INFO
                logger.log(level, "No prefixes are shared with %s: %s", engine, error)
            return
        except BaseException:
            connection.close()
            raise
        self._orphans.let_go(reply.epoch)  # it has not ended after all
        self._met[name] = _Met(connection, neighbour, descriptor, self._clock(), reply.named(name))
        del self._not_before[name]
        if reply.ended:
            logger.info("Reading what %s had kept, which has ended", reply.named(name))
        else:
            logger.info("Sharing prefixes with %s", reply.named(name))
        self._take_orphans(name, reply.orphans)

    def _take_orphans(self, name: str, epochs: Sequence[bytes]) -> None:
        """Take what a neighbour has of engines that ended before this one met them."""
        deadline = time.monotonic() + _ANSWER_S
        alive = {met.neighbour.index.epoch for met in self._met.values()}
        for epoch in dict.fromkeys(epochs):
            if epoch in alive or self._orphans.has(epoch):
                continue
            try:
                # A refusal ends a connection, and the neighbour's own must last.
                connection = Connection(self._local_engine.folder / name, deadline)
                with contextlib.closing(connection):
                    reply, descriptor = connection.ask(AskOrphan(epoch), ANSWERS, deadline, True)
                assert descriptor is not None
                orphan, descriptor = opened(reply, descriptor, self._local_engine, name)
            except (OmniError, OSError) as error:  # its prompts are computed
                logger.debug("an orphan of %s is not taken: %s", name, error)
                continue
            if reply.epoch == epoch:
                logger.info(
                    "Found blocks of an engine that has ended, for %.0f s more, through %s",
                    reply.seconds,
                    name,
                )
                self._orphans.adopt(orphan, descriptor, reply.seconds)
            else:
                os.close(descriptor)

    def _ended(self, name: str) -> None:
        """An engine that was met has ended."""
        met = self._met.pop(name)
        met.connection.close()
        if not met.attached:
            os.close(met.descriptor)
            return
        logger.info(
            "The blocks of %s, which has ended, can be read for %g s more",
            met.engine,
            ORPHAN_S,
        )
        self._orphans.adopt(met.neighbour, met.descriptor)

    def _tell(self) -> None:
        with self._lock:
            hits = self._hits
            self._hits = defaultdict(list)
        for met in self._met.values():
            if pairs := hits.get(met.neighbour):
                slots, generations = zip(*pairs, strict=True)
                self._tell_one(met, np.concatenate(slots), np.concatenate(generations))

    def _tell_one(self, met: _Met, slots: Ints, generations: Ints) -> None:
        # Each slot once, at its latest use, and the latest of all last: the neighbour evicts in
        # this order. Slots 5, 7, 5, 9 become 7, 5, 9.
        _, last = np.unique(slots[::-1], return_index=True)
        order = np.sort(len(slots) - 1 - last)[-_MAX_MESSAGES * _MAX_HITS :]
        for at in range(0, len(order), _MAX_HITS):
            part = order[at : at + _MAX_HITS]
            note = Hits(slots[part].tobytes(), generations[part].tobytes())
            if not met.connection.tell(note):  # its socket is full: the next look sends the rest
                rest = order[at:]
                with self._lock:
                    self._hits[met.neighbour].insert(0, (slots[rest], generations[rest]))
                return

    def _answer(
        self, question: AskIndex | AskOrphan | Hits
    ) -> tuple[msgspec.Struct | None, int | None]:
        if isinstance(question, Hits):
            slots, generations = question.slots, question.generations
            self._local_engine.on_hits(
                np.frombuffer(slots, np.int64), np.frombuffer(generations, np.int64)
            )
            return None, None
        if isinstance(question, AskOrphan):
            return self._orphans.give(question.epoch)
        gives = msgspec.structs.replace(self._gives, orphans=self._orphans.offered())
        return gives, os.dup(self._fd)


def opened(
    reply: GiveIndex, descriptor: int, ours: LocalEngine, name: str = ""
) -> tuple[Neighbour, int]:
    """The engine that `reply` tells of, with its index mapped, and `descriptor`.

    Raises, and closes `descriptor`:
        PeerRefusedError: this engine cannot read its slots.
        OmniError: as `BlockIndexView.open`.
    """
    try:
        if reply.readers != ours.readers or len(reply.arenas) != len(ours.arenas):
            difference = (
                reader_difference(dict(reply.traits), ours.traits) or "another division by ranks"
            )
            raise PeerRefusedError(f"it has {plain(difference)}")
        stripes = ours.stripes or (1,) * len(reply.arenas)
        slots = (
            each.n_slots * number
            for rank, number in zip(reply.arenas, stripes, strict=True)
            for each in rank
        )
        if min(slots) < reply.num_slots:
            raise PeerRefusedError("its arenas have fewer slots than its index")
        view = BlockIndexView.open(descriptor, epoch=reply.epoch, num_slots=reply.num_slots)
    except BaseException:
        os.close(descriptor)
        raise
    return Neighbour(view, reply.arenas, name=name, orphan=reply.ended), descriptor
