# SPDX-License-Identifier: Apache-2.0
"""`Exchange`: objects lie in an arena of their sender, and receivers read them out of it.

A receiver looks for the newest object that it or a peer has, reads it, and tells the owner. A
carrier (shared memory, or Mooncake's Transfer Engine) says who the peers are, and how they are
asked.
"""

import functools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from omni_connector.arena.arena import Arena
from omni_connector.arena.buffers import Buffers
from omni_connector.errors import StaleSlotError
from omni_connector.net.forks import forget_in_child
from omni_connector.net.packets import require_protocol
from omni_connector.objects.base import ConnectorClosedError, ObjectKey, OmniConnector, check_times
from omni_connector.objects.object_store import ObjectStore, StoredObject, fitting, read_object
from omni_connector.runtime.turns import Watch
from omni_connector.transports.base import ArenaTransport, Endpoint

logger = logging.getLogger(__name__)

PROTOCOL: Final = 3
"""Version of the messages about objects, and of how they lie in an arena."""

# Most tries of a `get` to read an object that is replaced again and again meanwhile.
_READ_ATTEMPTS: Final = 8

Address = TypeVar("Address")


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Says that its sender has read this object of the arena `epoch`, whole; has no answer.

    Attributes:
        epoch: of the arena.
        digest: of the object's key.
        generation: of the object.
        gone: whether nobody else will read it.
        protocol: version of the message.
    """

    epoch: bytes
    digest: bytes
    generation: int
    gone: bool = False
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol, PROTOCOL)


@dataclass(frozen=True, slots=True)
class Held:
    """An object that somebody has.

    Attributes:
        stored: where it is; not trusted.
        read: copies and verifies it.
        note: tells its owner that it was read; of the object in the owner's arena.
    """

    stored: StoredObject
    read: Callable[[], memoryview]
    note: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Own(Generic[Address]):
    """The objects of this process.

    Attributes:
        objects: them.
        endpoint: of the arena that they lie in.
        address: where peers find them.
    """

    objects: ObjectStore
    endpoint: Endpoint
    address: Address


class Exchange(OmniConnector, Generic[Address]):
    """The part that all carriers share.

    The first `put` makes the arena. Its memory is allocated as it is used, and kept until `close`.
    A `put` that finds no room evicts objects that were read, or that nobody has read in time.

    Args:
        transport: attaches the arenas of peers, and exports ours; closed with this.
        geometry: slots of our arena, and bytes of each.
        object_timeout: seconds that a `get` waits for peers.
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
        ttl_s: float,
        clock: Callable[[], float],
        stamp: Callable[[], int],
    ) -> None:
        check_times(ttl_s, object_timeout)
        self.transport = transport.transport
        self._transport = transport
        self._geometry = geometry
        self.object_timeout = object_timeout
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
        self._own: Own[Address] | None = None
        self._watch = Watch(self._let_go)
        # Held while the arena is made, so that it is made once.
        self._making = threading.Lock()

    def _abandon(self) -> None:
        # In a process that was forked: all objects and connections are the parent's.
        if self._own is not None:
            self._own.objects.arena.close()
        self._begin()

    @abstractmethod
    def _announce(self, arena: Arena, undo: ExitStack) -> tuple[Endpoint, Address]:
        """Let peers find the objects in this arena; return where.

        What takes this back is pushed onto `undo`.
        """

    @abstractmethod
    def _search(
        self, digest: bytes, metadata: Mapping[str, Any] | None, deadline: float
    ) -> Held | None:
        """The newest object of a digest that peers have; asks them at most until a deadline.

        Raises:
            OmniError: a peer that must be asked cannot be.
        """

    @abstractmethod
    def _let_go(self) -> bool:
        """Let go of peers that have gone; called now and then. Whether there are others."""

    @abstractmethod
    def _catch_up(self) -> None:
        """Wait a moment until what peers have told us so far is noted."""

    def _metadata(self, address: Address) -> dict[str, Any]:
        """The part of an object's metadata by which receivers find its sender."""
        return {}

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
        for _ in range(_READ_ATTEMPTS):
            self._check_open()
            found = [self._held(digest), self._search(digest, metadata, deadline)]
            held = max(
                (each for each in found if each is not None),
                key=lambda each: each.stored.generation,
                default=None,
            )
            if held is None:
                return None
            try:
                content = held.read()
            except StaleSlotError as error:
                # It was replaced while we read it, and the caller wants the newer one.
                stale = error
                continue
            held.note(self.consumes)
            return content
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
        total = self._geometry[0] * self._geometry[1]
        return {
            "objects": 0 if own is None else len(own.objects),
            "free_object_bytes": total if own is None else own.objects.free_bytes,
            "evictable_object_bytes": 0 if own is None else own.objects.evictable_bytes,
            **self._transport.details(),
        }

    def close(self) -> None:
        with self._lock:
            self._closed = True
            own = self._own
        self._watch.close()
        self._transport.close()
        if own is not None:
            own.objects.close()
        self._buffers.close()

    def _started(self) -> Own[Address]:
        with self._making:
            with self._lock:
                self._check_open()
                own = self._own
            if own is not None:
                return own
            with ExitStack() as undo:
                objects = self._store(Arena.create(*fitting(*self._geometry)))
                undo.callback(objects.close)
                own = Own(objects, *self._announce(objects.arena, undo))
                with self._lock:
                    self._check_open()
                    self._own = own
                undo.pop_all()
            return own

    def _held(self, digest: bytes) -> Held | None:
        """The object of this digest that this process has itself."""
        own = self._own
        stored = None if own is None else own.objects.find(digest)
        if own is None or stored is None:
            return None
        arena = own.objects.arena
        size = arena.n_slots * arena.slot_bytes
        return Held(
            stored,
            lambda: read_object(arena, size, digest, stored, self._taken),
            lambda gone: own.objects.mark_read(digest, stored.generation, gone=gone),
        )

    def _taken(self, pieces: list[tuple[int, int]], nbytes: int) -> Any:
        return self._buffers.take(nbytes)

    def _note(self, read: Read) -> None:
        # Called on the thread that answers peers.
        own = self._own
        if own is not None and read.epoch == own.endpoint.epoch:
            own.objects.mark_read(read.digest, read.generation, gone=read.gone)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosedError("the connector is closed")
