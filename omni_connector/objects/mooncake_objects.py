# SPDX-License-Identifier: Apache-2.0
"""Whole objects between hosts, which Mooncake's Transfer Engine reads.

A sender keeps them in an arena, as shared memory does, and listens at a TCP port. A receiver that
knows the port, from the metadata of a `put` or from its settings, asks where an object is, and
reads the slots of the arena that it is told.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from omni_connector.errors import ConfigError, OmniError, StaleSlotError, TransportError
from omni_connector.memory.arena import Arena
from omni_connector.memory.buffers import Buffers
from omni_connector.net.keys import ClusterKey
from omni_connector.net.peers import HostPort, is_loopback
from omni_connector.net.resolver import Resolver
from omni_connector.net.runtime import loopback_key
from omni_connector.net.watch import Watch
from omni_connector.net.zeromq import make_context
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.lookup import (
    Held,
    Missing,
    ObjectArena,
    ObjectServer,
    ObjectSource,
    Read,
)
from omni_connector.objects.object_store import ObjectStore, StoredObject, read_object
from omni_connector.transports.base import Endpoint

logger = logging.getLogger(__name__)

_READ_ATTEMPTS: Final = 8
# A read has this much longer than the deadline for the answer, and more for what is large.
_READ_S: Final = 10.0
_READ_BYTES_PER_S: Final = 20e6


class MooncakeObjects:
    """What one connector puts, and gets from others.

    Args:
        export, withdraw: let peers read an arena, and no longer.
        attach: gets at a peer's, until a deadline.
        listen: where peers ask for what was put; with port 0 the system chooses one.
        key: what they must show, and show us; None leaves it to loopback, and `loopback_key`.
        geometry: slots, and bytes of each, of the arena for what is put.
        ttl_s, clock: of what is put; see `ObjectStore`.
        timeout: seconds to wait for one peer's answer.
        sources: peers to ask where metadata names none; asked each time.
        allowed: whether a host may be connected to.
    """

    def __init__(
        self,
        *,
        export: Callable[[Arena], Endpoint],
        withdraw: Callable[[Endpoint], None],
        attach: Callable[[Endpoint, float], ObjectArena],
        listen: Callable[[], HostPort],
        key: ClusterKey | None,
        geometry: tuple[int, int],
        ttl_s: float,
        clock: Callable[[], float],
        timeout: float,
        sources: Callable[[], Sequence[HostPort]],
        allowed: Callable[[str], bool],
    ) -> None:
        self._export = export
        self._withdraw = withdraw
        self._attach = attach
        self._listen = listen
        self._key = key
        self._geometry = geometry
        self._ttl_s = ttl_s
        self._clock = clock
        self._timeout = timeout
        self._sources = sources
        self._allowed = allowed
        self._buffers = Buffers()
        self._context = make_context()
        # Guards what follows; `_making` is held while the arena and the server are made, once.
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._objects: ObjectStore | None = None
        self._endpoint: Endpoint | None = None
        self._server: ObjectServer | None = None
        self._peers: dict[HostPort, ObjectSource] = {}
        self._resolver = Resolver()
        self._watch = Watch(self._let_go)

    def start(self) -> HostPort:
        """Listen, if that is not so yet; where.

        Raises:
            ConfigError, TransportError, MissingDependencyError: it cannot, or needs a key.
        """
        self._check_open()
        with self._making:
            with self._lock:
                self._check_open()
                server = self._server
            if server is not None:
                return server.address
            address = self._listen()
            key = self._key_for(address.host)
            n_slots, slot_bytes = self._geometry
            with ExitStack() as undo:
                objects = ObjectStore(
                    Arena.create(n_slots, slot_bytes),
                    time.time_ns,
                    self._catch_up,
                    ttl_s=self._ttl_s,
                    clock=self._clock,
                )
                undo.callback(objects.close)
                endpoint = self._export(objects.arena)
                undo.callback(self._withdraw, endpoint)
                server = ObjectServer(address, key, self._find, self._note)
                undo.callback(server.close)
                with self._lock:
                    self._check_open()
                    self._objects, self._endpoint, self._server = objects, endpoint, server
                undo.pop_all()
            return server.address

    def store(self, key: ObjectKey, parts: Sequence[memoryview]) -> tuple[StoredObject, HostPort]:
        """Keep the concatenated parts under a key; where to ask for them.

        Raises:
            ArenaFullError: there is no room.
            ConfigError, TransportError, MissingDependencyError: as `start`.
        """
        address = self.start()
        objects = self._objects
        assert objects is not None
        return objects.store(key, parts), address

    def load(self, key: ObjectKey, hint: HostPort | None, deadline: float) -> memoryview | None:
        """The newest object of this key, verified; None where nobody has it.

        Args:
            key: its key.
            hint: whom to ask; None asks all that are known, this connector included.
            deadline: `time.monotonic()` by which they must have answered.

        Raises:
            OmniError: somebody has it, but it cannot be had.
        """
        self._check_open()
        digest = key.digest
        stale: StaleSlotError | None = None
        for _ in range(_READ_ATTEMPTS):
            found = self._newest(digest, hint, deadline)
            if found is None:
                return None
            held, peer = found
            try:
                if peer is not None:
                    until = deadline + _READ_S + held.length / _READ_BYTES_PER_S
                    return peer.read(digest, held, until)
                objects = self._objects
                if objects is not None:
                    stored = StoredObject(
                        tuple(held.runs), held.generation, held.length, held.stamp
                    )
                    content = read_object(objects.arena, digest, stored, self._buffers)
                    objects.mark_read(digest, held.generation)
                    return content
            except StaleSlotError as error:
                stale = error  # it was replaced while we read
        if stale is not None:
            raise stale
        return None

    def drop(self, request_id: str) -> int:
        """Free the objects that were put for a request; how many there were."""
        objects = self._objects
        if objects is None or os.getpid() != self._process:  # in a child they are the parent's
            return 0
        return objects.drop(request_id)

    def details(self) -> dict[str, int | str]:
        """For `health`."""
        objects, server = self._objects, self._server
        found: dict[str, int | str] = {
            "objects": 0 if objects is None else len(objects),
            "free_object_slots": self._geometry[0] if objects is None else objects.free_slots,
            "evictable_object_slots": 0 if objects is None else objects.evictable_slots,
        }
        if server is not None:
            found["listen"] = str(server.address)
            if not server.alive and not self._closed:
                found["status"] = "unhealthy: the thread that answers peers has ended"
        return found

    def close(self) -> None:
        """Free everything; after it the arena may be withdrawn. Idempotent."""
        with self._lock:
            self._closed = True
            server = self._server
            peers, self._peers = list(self._peers.values()), {}
            objects = self._objects
        self._watch.close()
        if server is not None:
            server.close()
        for peer in peers:
            peer.close()
        self._context.destroy(0)
        if objects is not None:
            objects.close()
        self._buffers.close()

    def _newest(
        self, digest: bytes, hint: HostPort | None, deadline: float
    ) -> tuple[Held, ObjectSource | None] | None:
        own = None if self._server is None else self._server.address
        newest: tuple[Held, ObjectSource | None] | None = None
        if hint in (None, own):
            held = self._find(digest)
            newest = (held, None) if isinstance(held, Held) else None
        for peer in self._candidates(hint, own):
            try:
                found = peer.find(digest, deadline)
            except OmniError as error:
                # One peer that is gone, or not well, must not hide what the others have.
                logger.debug("asked %s for an object: %s", peer.address, error)
                continue
            if found is not None and (newest is None or found.stamp > newest[0].stamp):
                newest = found, peer
        return newest

    def _candidates(self, hint: HostPort | None, own: HostPort | None) -> list[ObjectSource]:
        wanted = self._sources() if hint is None else [hint]
        with self._lock:
            self._check_open()
            for address in wanted:
                if address != own and address not in self._peers:
                    if not self._allowed(address.host):
                        raise TransportError(
                            f"{address.host} is none of the hosts in `peers`, nor `sender_host`"
                        )
                    self._peers[address] = ObjectSource(
                        address,
                        context=self._context,
                        resolver=self._resolver,
                        key=self._key_for(address.host),
                        attach=self._attach,
                        timeout=self._timeout,
                    )
            found = [self._peers[address] for address in wanted if address != own]
        if found:
            self._watch.start()
        return found

    def _let_go(self) -> bool:
        # On the watch's thread: links to senders that have gone, or that nobody asks any more.
        with self._lock:
            peers = list(self._peers.items())
        for address, peer in peers:
            if not peer.let_go(time.monotonic()):
                with self._lock:
                    if self._peers.get(address) is peer:
                        del self._peers[address]
        with self._lock:
            return bool(self._peers)

    def _key_for(self, host: str) -> ClusterKey:
        if self._key is not None:
            return self._key
        if not is_loopback(host):
            raise ConfigError(_needs_key(host))
        return loopback_key()

    def _find(self, digest: bytes) -> Held | Missing:
        with self._lock:
            objects, endpoint = self._objects, self._endpoint
        stored = None if objects is None else objects.find(digest)
        if stored is None or endpoint is None:
            return Missing(digest)
        return Held(
            digest, endpoint, stored.generation, stored.length, stored.stamp, list(stored.runs)
        )

    def _note(self, read: Read) -> None:
        objects = self._objects
        if objects is not None:
            objects.mark_read(read.digest, read.generation)

    def _catch_up(self) -> None:
        server = self._server
        if server is not None:
            server.catch_up()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the connector is closed")
        if os.getpid() != self._process:
            raise TransportError("the connector is the parent's: a forked process makes its own")


def _needs_key(host: str) -> str:
    return (
        f"{host!r} is no loopback address, so that key_file is needed; `omni-connector keygen "
        "PATH` makes one, for all stages to share"
    )
