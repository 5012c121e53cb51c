# SPDX-License-Identifier: Apache-2.0
"""`Exchange`: objects lie in an arena of their sender, and receivers read them out of it.

A receiver asks the peers that it knows, reads the newest object that one of them has, and tells
the owner that it has read it. A carrier (shared memory, or Mooncake's Transfer Engine) says which
peers there are and how they are asked.
"""

import functools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from omni_connector.arena.arena import Arena
from omni_connector.arena.buffers import Buffers
from omni_connector.errors import (
    OmniError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    StaleSlotError,
    TransportError,
)
from omni_connector.net.forks import forget_in_child
from omni_connector.objects.base import ObjectKey, OmniConnector, check_times
from omni_connector.objects.object_store import ObjectStore, fitting
from omni_connector.objects.peer import (
    PROTOCOL,
    Find,
    Found,
    Line,
    Missing,
    Peer,
    Read,
    read_object,
)
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.runtime.turns import Watch
from omni_connector.transports.base import ArenaTransport, Endpoint

logger = logging.getLogger(__name__)

# Most tries of a `get` to read an object that is replaced again and again meanwhile.
_READ_ATTEMPTS: Final = 8

# Most peers that are remembered, as metadata may name any number. Above this, peers that are not
# being asked are forgotten.
_MAX_PEERS: Final = 256

Address = TypeVar("Address", bound=Hashable)


class _Own(NamedTuple):
    """The objects of this process. They are found and read like the objects of a `Peer`.

    Attributes:
        endpoint: of the arena that the objects lie in.
        address: where peers ask for them.
        buffers: where memory for copies comes from.
    """

    objects: ObjectStore
    endpoint: Endpoint
    address: Any
    buffers: Buffers

    def find(self, digest: bytes, deadline: float) -> Found | None:
        """As `Peer.find`."""
        stored = self.objects.find(digest)
        return None if stored is None else Found(digest, self.endpoint, stored)

    def open(self, found: Found, deadline: float) -> Callable[[], memoryview]:
        """As `Peer.open`."""
        return functools.partial(read_object, self.objects.arena, found, self.buffers)

    def note(self, read: Read) -> None:
        """As `Peer.note`."""
        if read.epoch == self.endpoint.epoch:
            self.objects.mark_read(read.digest, read.generation)


class Exchange(OmniConnector, Generic[Address]):
    """The part that all carriers share.

    The first `put` makes the arena. Its memory is allocated as it is used, and kept until `close`.
    A `put` that finds no room evicts objects that were read, or that nobody has read in time.

    Args:
        transport: attaches the arenas of peers, and exports ours; closed with this.
        geometry: slots of our arena, and bytes of each.
        object_timeout: seconds that a `get` waits for all peers.
        peer_timeout: seconds that it waits for one of them.
        ttl_s, clock: see `ObjectStore`.
        stamp: a clock in ns that all senders share; it tells which object is the newest.

    Raises:
        ValueError: a time is out of range.
    """

    def __init__(
        self,
        transport: ArenaTransport,
        *,
        geometry: tuple[int, int],
        object_timeout: float,
        peer_timeout: float,
        ttl_s: float,
        clock: Callable[[], float],
        stamp: Callable[[], int],
    ) -> None:
        check_times(ttl_s, object_timeout, peer_timeout)
        self.transport = transport.transport
        self._transport = transport
        self._geometry = geometry
        self.object_timeout = object_timeout
        self._peer_timeout = peer_timeout
        self._store = functools.partial(
            ObjectStore, clock_ns=stamp, catch_up=self._catch_up, ttl_s=ttl_s, clock=clock
        )
        self._buffers = Buffers()
        self._closed = False
        self._begin()
        forget_in_child(self, type(self)._abandon)

    def _begin(self) -> None:
        # Guards what follows; never held while waiting for anybody.
        self._lock = threading.Lock()
        self._own: _Own | None = None
        self._peers: dict[Address, Peer] = {}
        # Peers that the log has warned of, the latest one last.
        self._warned: BoundedMap[Hashable, None] = BoundedMap(_MAX_PEERS)
        self._watch = Watch(self._let_go)
        # Held while the arena is made, so that it is made once.
        self._making = threading.Lock()

    def _abandon(self) -> None:
        # In a process that was forked: all objects and connections are the parent's.
        if self._own is not None:
            self._own.objects.arena.close()
        for peer in self._peers.values():
            peer.abandon()
        self._begin()

    @abstractmethod
    def _announce(self, arena: Arena, undo: ExitStack) -> tuple[Endpoint, Address]:
        """Let peers attach this arena and ask for objects; return where they do each.

        What takes this back is pushed onto `undo`.
        """

    @abstractmethod
    def _known(self) -> Sequence[Address]:
        """The peers to ask where metadata names none; we may be among them."""

    @classmethod
    @abstractmethod
    def _hint(cls, metadata: Mapping[str, Any]) -> Address | None:
        """The peer that metadata names; raises ValueError or TypeError if it is malformed."""

    @abstractmethod
    def _metadata(self, address: Address) -> dict[str, Any]:
        """The part of an object's metadata that `_hint` reads."""

    @abstractmethod
    def _way(self, address: Address) -> Callable[[float], Line]:
        """What connects to a peer, by a deadline; raises OmniError where that is not allowed."""

    @abstractmethod
    def _catch_up(self) -> None:
        """Wait a moment until what peers have told us so far is noted."""

    @abstractmethod
    def _tidy(self) -> None:
        """Start to remove what dead peers have left behind; does not wait for it."""

    def store_object(self, key: ObjectKey, parts: Sequence[memoryview]) -> dict[str, Any]:
        own = self._started()
        length = own.objects.store(key, parts).length
        return {"transport": self.transport, **self._metadata(own.address), "length": length}

    def load_object(
        self, key: ObjectKey, metadata: Mapping[str, Any] | None, *, timeout: float
    ) -> memoryview | None:
        deadline = time.monotonic() + timeout
        digest = key.digest
        stale = StaleSlotError()
        with self._holders(self.read_hint(metadata)) as holders:
            for _ in range(_READ_ATTEMPTS):
                found = self._find(digest, holders, deadline)
                if not found:
                    return None
                try:
                    return _read(found, deadline)
                except StaleSlotError as error:
                    # It was replaced while we read it, and the caller wants the newer one.
                    stale = error
        raise stale

    def drop_objects(self, request_id: str) -> int:
        own = self._own
        return 0 if own is None else own.objects.drop(request_id)

    def reap_consumed(self) -> None:
        """Free the objects that receivers have got and verified, as far as they have said so."""
        own = self._own
        if own is not None:
            own.objects.reap()

    def details(self) -> dict[str, Any]:
        own = self._own
        return {
            "objects": 0 if own is None else len(own.objects),
            "free_object_slots": self._geometry[0] if own is None else own.objects.free_slots,
            "evictable_object_slots": 0 if own is None else own.objects.evictable_slots,
            **self._transport.details(),
        }

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
            own = self._own
        self._watch.close()
        for peer in peers:
            peer.close()
        self._transport.close()
        if own is not None:
            own.objects.close()
        self._buffers.close()

    def _started(self) -> _Own:
        with self._making:
            with self._lock:
                self._check_open()
                own = self._own
            if own is not None:
                return own
            with ExitStack() as undo:
                objects = self._store(Arena.create(*fitting(*self._geometry)))
                undo.callback(objects.close)
                own = _Own(objects, *self._announce(objects.arena, undo), self._buffers)
                with self._lock:
                    self._check_open()
                    self._own = own
                undo.pop_all()
            return own

    def _answer(self, question: Find) -> Found | Missing:
        # Called on the thread that answers peers, as `_note` is.
        own = self._own
        found = None if own is None else own.find(question.digest, 0.0)
        return Missing(question.digest) if found is None else found

    def _note(self, read: Read) -> None:
        own = self._own
        if own is not None:
            own.note(read)

    @classmethod
    def read_hint(cls, metadata: object) -> Address | None:
        """The peer that an object's metadata names; None if it names none.

        Raises:
            ProtocolError: the metadata, which is not trusted, is malformed.
        """
        if not isinstance(metadata, Mapping):
            return None
        try:
            return cls._hint(dict(metadata))
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise ProtocolError(f"the metadata of an object is malformed: {error}") from error

    @contextmanager
    def _holders(self, hint: Address | None) -> Iterator[list[_Own | Peer]]:
        """All who may have an object: this process and peers, which are kept until the end."""
        wanted = self._known() if hint is None else [hint]
        forgotten: list[Peer] = []
        with self._lock:
            self._check_open()
            own = self._own
            if len(self._peers) > _MAX_PEERS:
                forgotten = self._forget(lambda address, peer: address not in wanted)
            peers = [self._peer(each) for each in wanted if own is None or each != own.address]
            for peer in peers:
                peer.users += 1
        try:
            if peers:
                self._watch.start()
            for peer in forgotten:
                peer.close()
            ours = [own] if own is not None and hint in (None, own.address) else []
            yield [*ours, *peers]
        finally:
            with self._lock:
                for peer in peers:
                    peer.users -= 1
                    peer.used_at = time.monotonic()

    def _peer(self, address: Address) -> Peer:
        # Holds the lock.
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(
                address,
                connect=self._way(address),
                transport=self._transport,
                buffers=self._buffers,
                timeout=self._peer_timeout,
            )
        return peer

    def _forget(self, useless: Callable[[Address, Peer], bool]) -> list[Peer]:
        # Holds the lock. The caller closes the peers that this returns; nobody else has them.
        found = [a for a, peer in self._peers.items() if not peer.users and useless(a, peer)]
        return [self._peers.pop(address) for address in found]

    def _let_go(self) -> bool:
        # On the watch's thread: drops peers that have gone, or that nobody has asked for a while.
        now = time.monotonic()
        with self._lock:
            gone = self._forget(lambda address, peer: peer.useless(now))
            more = bool(self._peers)
        for peer in gone:
            peer.close()
        return more

    def _find(
        self, digest: bytes, holders: Sequence["_Own | Peer"], deadline: float
    ) -> list[tuple[Found, "_Own | Peer"]]:
        """What each holder says of the object, the newest one first."""
        found: list[tuple[Found, _Own | Peer]] = []
        unreachable = False
        alone = sum(isinstance(each, Peer) for each in holders) == 1
        for holder in holders:
            try:
                held = holder.find(digest, deadline if alone else _half_of(deadline))
            except (OmniError, OSError) as error:
                # One peer that fails must not hide what the others have.
                logger.debug("asked %s for an object: %s", holder.address, error)
                if isinstance(error, PeerRefusedError | ProtocolError):
                    self._warn_of(holder.address, error)
                unreachable |= isinstance(error, PeerUnreachableError)
                continue
            if held is not None:
                found.append((held, holder))
        if unreachable:
            self._tidy()
        return sorted(found, key=lambda each: -each[0].stored.stamp)

    def _warn_of(self, address: Hashable, error: Exception) -> None:
        """Say once of a peer that we do not understand each other, though it may have objects."""
        with self._lock:
            if address in self._warned:
                return
            self._warned[address] = None
        logger.warning(
            "No object is found at %s: %s. Senders and receivers must run the same minor version "
            "of omni-connector (protocol %d of objects here)",
            *(address, error, PROTOCOL),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the connector is closed")


def _half_of(deadline: float) -> float:
    # So a peer that does not answer leaves time for the others.
    return (time.monotonic() + deadline) / 2


def _read(found: Sequence[tuple[Found, "_Own | Peer"]], deadline: float) -> memoryview:
    """Read the first of these whose arena can be attached, and tell its owner."""
    problem: Exception | None = None
    for at, (held, holder) in enumerate(found, 1):
        try:
            read = holder.open(held, deadline if at == len(found) else _half_of(deadline))
        except (OmniError, OSError) as error:
            logger.debug("the objects of %s: %s", holder.address, error)
            problem = problem or error
            continue
        content = read()
        holder.note(Read(held.endpoint.epoch, held.digest, held.stored.generation))
        return content
    assert problem is not None
    raise problem
