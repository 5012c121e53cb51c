# SPDX-License-Identifier: Apache-2.0
"""`SharedMemoryConnector`: peers of one user on one host map each other's arenas.

The memfd of an arena travels over a Unix socket in the runtime folder. Nothing has a name but
that socket, so that of a process that is killed nothing but a dead socket is left, and the
next one removes it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omni_connector.errors import (
    OmniError,
    PeerRefusedError,
    PeerUnreachableError,
    StaleSlotError,
    TransportError,
)
from omni_connector.memory.arena import Arena
from omni_connector.memory.buffers import Buffers
from omni_connector.net import runtime
from omni_connector.net.forks import forget_in_child
from omni_connector.net.unix import (
    Answer,
    Attach,
    Connection,
    Found,
    Grant,
    Listener,
    Missing,
    Question,
    Read,
    Refusal,
)
from omni_connector.net.watch import Watch
from omni_connector.objects.base import ObjectKey, OmniConnector, check_times
from omni_connector.objects.object_store import (
    DEFAULT_TTL_S,
    ObjectStore,
    StoredObject,
    object_geometry,
    read_object,
)
from omni_connector.transports.base import ArenaTransport, Endpoint, RemoteArena
from omni_connector.transports.hints import read_socket
from omni_connector.transports.mapped import MappedArena, ObjectPeer, map_arena

logger = logging.getLogger(__name__)

_ARENA_SOCKET: Final = "a-"
_OBJECT_SOCKET: Final = "o-"
_READ_ATTEMPTS: Final = 3
_CATCH_UP_S: Final = 0.2
# Peers of which metadata told; above this, those that are not in the folder are forgotten.
_MAX_UNLISTED_PEERS: Final = 256


class SharedMemoryConnector(ArenaTransport, OmniConnector):
    """Arenas as memfds, passed between processes of one user on one host.

    Objects live in an arena of the connector's own, made at the first `put`; its memory is
    taken as it is used, used again, and kept until `close`. Who has got an object tells its
    owner, whose next `put` may then take its room if there is no other; so it may that of one
    that nobody has got for `buffer_ttl_seconds`.

    Args:
        namespace: connectors find the objects of those that share it.
        folder: the runtime folder, by default the one of the namespace.
        object_gib: size of that arena, which limits what has been put and neither been got nor
            cleaned up; by default a tenth of the machine's memory, 4 GiB at most. It is divided
            into at most 4096 slots of 1 MiB or more, and an object takes a whole number of slots.
        object_slot_bytes: bytes of a slot of objects instead, a multiple of the page size.
        object_slots: with it, their number.
        object_timeout: seconds that a `get` waits for peers to answer.
        peer_timeout: seconds that it waits for one of them, which is then left alone for
            ten times as long.
        buffer_ttl_seconds: how long an object that nobody gets keeps others from its room; zero,
            or less, is for ever.
        clock: seconds, monotonic, by which that is told.

    Raises:
        ConfigError: the runtime folder cannot be had, or is not private.
        ValueError: an argument is out of range.
    """

    transport = "shm"

    def __init__(
        self,
        *,
        namespace: str = "default",
        folder: Path | None = None,
        object_gib: float | None = None,
        object_slot_bytes: int | None = None,
        object_slots: int | None = None,
        object_timeout: float = 5.0,
        peer_timeout: float = 1.0,
        buffer_ttl_seconds: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_times(buffer_ttl_seconds, object_timeout, peer_timeout)
        self.folder: Final = runtime.runtime_dir(namespace) if folder is None else folder
        runtime.check_private(self.folder)
        if object_slot_bytes is not None and object_slots is not None:
            self._object_geometry = object_slots, object_slot_bytes
        else:
            self._object_geometry = object_geometry(object_gib)
        self._object_timeout = object_timeout
        self._peer_timeout = peer_timeout
        self._ttl_s = buffer_ttl_seconds
        self._clock = clock
        self._closed = False
        self._buffers = Buffers()
        self._begin()
        forget_in_child(self, SharedMemoryConnector._abandon)

    def _begin(self) -> None:
        # Guards what follows; never held while waiting for anybody.
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._exports: dict[bytes, _Export] = {}
        self._objects: ObjectStore | None = None
        # Addresses of objects are plain strings: each `get` compares them all.
        self._object_address: str | None = None
        self._peers: dict[str, ObjectPeer] = {}
        self._watch = Watch(self._let_go)
        # Held while the object arena is made, so that it is made once.
        self._making_objects = threading.Lock()

    def _abandon(self) -> None:
        # In a process that was forked: what there is so far is the parent's, which writes it.
        if self._objects is not None:
            self._objects.arena.close()
        for export in self._exports.values():
            export.close()
        for peer in self._peers.values():
            peer.abandon()
        self._begin()

    @property
    def supports_mapping(self) -> bool:
        return True

    @property
    def object_timeout(self) -> float:
        return self._object_timeout

    def export(self, arena: Arena, name: str) -> Endpoint:
        return self._export(arena, runtime.socket_path(self.folder, name, kind=_ARENA_SOCKET))

    def withdraw(self, endpoint: Endpoint) -> None:
        address = self._take_back(endpoint.epoch)
        listener = self._listener
        if address is not None and listener is not None:
            listener.remove(address)

    def attach(self, endpoint: Endpoint, *, timeout: float) -> RemoteArena:
        if endpoint.transport != self.transport:
            raise PeerRefusedError(f"{endpoint.transport!r} is not the transport {self.transport}")
        deadline = time.monotonic() + timeout
        address = Path(endpoint.address)
        try:
            connection = Connection(address, deadline)
        except PeerUnreachableError:
            if address.parent == self.folder:  # another one is not ours to tidy up
                self._sweep()
            raise
        try:
            view = map_arena(connection, endpoint.epoch, deadline, endpoint)
        except BaseException:
            connection.close()
            raise
        return MappedArena(endpoint, view, connection)

    def obstacle(self, endpoint: Endpoint) -> str | None:
        path = Path(endpoint.address)
        if path.parent != self.folder or not path.exists():
            return "another host, user or runtime folder"
        # A folder that hosts share shows the sockets of all of them, and connects to its own.
        return "nobody listens there on this host" if runtime.is_dead(path) else None

    def store_object(self, key: ObjectKey, parts: Sequence[memoryview]) -> dict[str, Any]:
        objects, address = self._own_objects()
        stored = objects.store(key, parts)
        return {"transport": self.transport, "address": address, "length": stored.length}

    def load_object(
        self, key: ObjectKey, metadata: Mapping[str, Any] | None, *, timeout: float
    ) -> memoryview | None:
        with self._lock:
            self._check_open()
        deadline = time.monotonic() + timeout
        hint = read_socket(metadata, self.transport)
        digest = key.digest
        stale: StaleSlotError | None = None
        for _ in range(_READ_ATTEMPTS):
            newest = self._newest(digest, hint, deadline)
            if newest is None:
                return None
            stored, peer = newest
            try:
                if peer is not None:
                    return peer.read(digest, stored)
                if self._objects is not None:
                    content = read_object(self._objects.arena, digest, stored, self._buffers)
                    self._objects.mark_read(digest, stored.generation)
                    return content
            except StaleSlotError as error:
                # It was replaced while we read: the next one is what the caller wants.
                stale = error
        if stale is not None:
            raise stale
        return None

    def drop_objects(self, request_id: str) -> int:
        objects = self._objects
        return 0 if objects is None else objects.drop(request_id)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
            exports, self._exports = list(self._exports.values()), {}
            peers, self._peers = list(self._peers.values()), {}
            objects = self._objects
        self._watch.close()
        if listener is not None:
            listener.close()
        for export in exports:
            export.close()
        for peer in peers:
            peer.close()
        if objects is not None:
            objects.close()
        self._buffers.close()

    def details(self) -> dict[str, Any]:
        with self._lock:
            objects, listener = self._objects, self._listener
            found: dict[str, Any] = {
                "folder": str(self.folder),
                "exports": len(self._exports),
                "objects": 0 if objects is None else len(objects),
                "free_object_slots": (
                    self._object_geometry[0] if objects is None else objects.free_slots
                ),
                "evictable_object_slots": 0 if objects is None else objects.evictable_slots,
            }
            if self._closed:
                found["status"] = "closed"
            elif listener is not None and not listener.alive:
                found["status"] = "unhealthy: the thread that answers peers has ended"
        return found

    def _export(self, arena: Arena, address: Path) -> Endpoint:
        listener = self._own_listener()
        with self._lock:
            self._check_open()
            if arena.epoch in self._exports:
                raise TransportError(f"the arena is exported already, not again at {address}")
            # A descriptor of our own: the arena may be closed before it is withdrawn, and the
            # number of its descriptor then be that of any other file.
            export = _Export(
                arena.epoch, arena.n_slots, arena.slot_bytes, os.dup(arena.fd), address
            )
            self._exports[arena.epoch] = export
        endpoint = Endpoint(
            transport=self.transport,
            address=str(address),
            epoch=arena.epoch,
            n_slots=arena.n_slots,
            slot_bytes=arena.slot_bytes,
        )
        try:
            listener.add(address)
        except OmniError:
            self._take_back(arena.epoch)
            raise
        return endpoint

    def _take_back(self, epoch: bytes) -> Path | None:
        # Who takes an export out of the table closes it: its descriptor is closed once.
        with self._lock:
            export = self._exports.pop(epoch, None)
        if export is None:
            return None
        export.close()
        return export.address

    def _own_listener(self) -> Listener:
        with self._lock:
            self._check_open()
            if self._listener is not None:
                return self._listener
            self._listener = listener = Listener(self._answer, self._note)
        self._sweep()
        return listener

    def _own_objects(self) -> tuple[ObjectStore, str]:
        with self._making_objects:
            with self._lock:
                self._check_open()
                if self._objects is not None and self._object_address is not None:
                    return self._objects, self._object_address
            arena = Arena.create(*self._object_geometry)
            objects = ObjectStore(
                arena, catch_up=self._catch_up, ttl_s=self._ttl_s, clock=self._clock
            )
            try:
                name = arena.epoch.hex()
                address = runtime.socket_path(self.folder, name, kind=_OBJECT_SOCKET)
                self._export(arena, address)
            except OmniError:
                objects.close()
                raise
            with self._lock:
                if not self._closed:
                    self._objects, self._object_address = objects, str(address)
                    return objects, str(address)
            objects.close()
            raise TransportError("the connector is closed")

    def _answer(self, question: Question) -> tuple[Answer, int | None]:
        # Runs on the listener's thread. Descriptors are duplicated under the lock, so that the
        # one that is sent cannot be closed, and its number reused, before it is.
        with self._lock:
            if isinstance(question, Attach):
                export = self._exports.get(question.epoch)
                if export is None:
                    return Refusal("there is no arena of this epoch here (any more)"), None
                grant = Grant(export.epoch, export.n_slots, export.slot_bytes)
                return grant, os.dup(export.fd)
            objects = self._objects
        stored = None if objects is None else objects.find(question.digest)
        if objects is None or stored is None:
            return Missing(), None
        return Found(
            objects.arena.epoch,
            stored.generation,
            stored.length,
            stored.stamp,
            list(stored.runs),
        ), None

    def _note(self, read: Read) -> None:
        # Runs on the listener's thread.
        objects = self._objects
        if objects is not None and objects.arena.epoch == read.epoch:
            objects.mark_read(read.digest, read.generation)

    def _catch_up(self) -> None:
        listener = self._listener
        if listener is not None:
            listener.catch_up(_CATCH_UP_S)

    def _newest(
        self, digest: bytes, hint: str | None, deadline: float
    ) -> tuple[StoredObject, ObjectPeer | None] | None:
        newest: tuple[StoredObject, ObjectPeer | None] | None = None
        own = self._object_address
        if self._objects is not None and hint in (None, own):
            stored = self._objects.find(digest)
            newest = None if stored is None else (stored, None)
        unreachable = False
        for peer in self._candidates(hint, own):
            try:
                stored = peer.find(digest, deadline)
            except OmniError as error:
                # One peer that is gone, or not well, must not hide what the others have.
                logger.debug("asked %s for an object: %s", peer.address, error)
                unreachable |= isinstance(error, PeerUnreachableError)
                continue
            if stored is not None and (newest is None or stored.stamp > newest[0].stamp):
                newest = stored, peer
        if unreachable:
            self._sweep()
        return newest

    def _candidates(self, hint: str | None, own: str | None) -> list[ObjectPeer]:
        if hint is None or len(self._peers) > _MAX_UNLISTED_PEERS:
            there = self._object_sockets()
            with self._lock:
                gone = [self._peers.pop(each) for each in set(self._peers).difference(there)]
            for peer in gone:
                peer.close()
        wanted = there if hint is None else [hint]
        with self._lock:
            self._check_open()
            for address in wanted:
                if address != own and address not in self._peers:
                    self._peers[address] = ObjectPeer(
                        Path(address), self._peer_timeout, self._buffers
                    )
            found = [self._peers[address] for address in wanted if address != own]
        if found:
            self._watch.start()
        return found

    def _let_go(self) -> bool:
        # On the watch's thread: connections to peers that have gone, and mappings of their arenas.
        with self._lock:
            peers = list(self._peers.items())
        for address, peer in peers:
            if not peer.let_go() and not os.path.exists(address):
                with self._lock:
                    if self._peers.get(address) is peer:
                        del self._peers[address]
        with self._lock:
            return bool(self._peers)

    def _object_sockets(self) -> list[str]:
        try:
            names = sorted(os.listdir(self.folder))
        except OSError as error:
            raise TransportError(f"cannot read the runtime folder: {error}") from error
        return [f"{self.folder}/{name}" for name in names if name.startswith(_OBJECT_SOCKET)]

    def _sweep(self) -> None:
        try:
            runtime.sweep(self.folder, timeout=0.0)
        except TransportError as error:  # it only tidies up, and another engine will
            logger.debug("did not sweep %s: %s", self.folder, error)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the connector is closed")


@dataclass(frozen=True, slots=True)
class _Export:
    epoch: bytes
    n_slots: int
    slot_bytes: int
    fd: int
    address: Path

    def close(self) -> None:
        os.close(self.fd)
