# SPDX-License-Identifier: Apache-2.0
"""`SharedMemoryConnector`: objects between processes of one user on one host.

A receiver maps the arena of each sender, once, and finds objects in it without a message.
"""

import functools
import logging
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.format import PAGE_BYTES
from omni_connector.errors import OmniError, PeerUnreachableError
from omni_connector.net import runtime
from omni_connector.net.unix import Connection
from omni_connector.objects.base import check_times
from omni_connector.objects.exchange import PROTOCOL, Exchange, Held, Read
from omni_connector.objects.object_store import (
    DEFAULT_TTL_S,
    StoredObject,
    find_object,
    object_geometry,
    read_object,
)
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.transports.base import Endpoint
from omni_connector.transports.shm import ANSWERS, Attach, SharedMemoryTransport, mapped

logger = logging.getLogger(__name__)

# Names of the sockets begin with this. The number is the version, so that no other is asked.
_OBJECT_SOCKET: Final = f"o{PROTOCOL}-"
_OTHER_VERSIONS: Final = re.compile(r"o[0-9]*-")

# Longest wait of a `put` that finds no room for what peers have read so far, in seconds.
_CATCH_UP_S: Final = 0.2

# Most notes that are kept for a peer that takes none at the moment. Of more, the oldest are lost.
_MAX_UNSENT: Final = 1024

# Notes of small objects are sent together, once they are of this part of a peer's arena or of its
# slots, or once there is nothing to get: a message costs the receiver more than a small object.
_TOGETHER: Final = 1 / 64

# Most objects of a peer that are known to be gone before it has heard of it.
_MAX_GONE: Final = 1 << 16

# Most peers of which the log has warned.
_MAX_WARNED: Final = 256


class MappedPeer:
    """Another connector, whose arena is mapped as soon as it answers.

    Args:
        address: of its socket.
        deadline: `time.monotonic()` by which the socket must take the question.

    Attributes:
        address: as given.
        view: the arena; None until it has answered.

    Raises:
        PeerUnreachableError, PeerRefusedError: as `Connection`.
    """

    def __init__(self, address: str, deadline: float) -> None:
        self.address = address
        self.view: ArenaView | None = None
        self._connection = Connection(Path(address), deadline)
        self._lock = threading.Lock()
        self._unsent: deque[Read] = deque(maxlen=_MAX_UNSENT)
        self._unsent_pages = 0
        # By digest, the generation of an object that was read, and that nobody is to get again.
        self._gone: BoundedMap[bytes, int] = BoundedMap(_MAX_GONE)
        if not self._connection.tell(Attach(b"")):
            self._connection.close()
            raise PeerUnreachableError(f"{address} takes no question")

    @property
    def alive(self) -> bool:
        """Whether it is still there. Never waits."""
        return self._connection.alive

    def fileno(self) -> int:
        """Its socket, which can be read once there is an answer."""
        return self._connection.fileno()

    def map(self, deadline: float) -> None:
        """Map the arena; called once the answer is there.

        Raises:
            OmniError: it is refused, or makes no sense.
        """
        reply, descriptor = self._connection.answer(ANSWERS, deadline, with_fd=True)
        assert descriptor is not None
        self.view = mapped(descriptor, reply.epoch, reply.n_slots, reply.slot_bytes)

    def find(self, digest: bytes) -> StoredObject | None:
        """The object that it has under a digest, unless that was gone before.

        Raises:
            OmniError: its arena makes no sense, or is closed.
        """
        stored = None if self.view is None else find_object(self.view, digest)
        if stored is None or self._gone.get(digest) == stored.generation:
            return None
        return stored

    def note(self, digest: bytes, stored: StoredObject, gone: bool) -> None:
        """Tell it what was read, sooner or later. Never waits."""
        view = self.view
        assert view is not None
        if gone:
            self._gone[digest] = stored.generation
        with self._lock:
            self._unsent.append(Read(view.epoch, digest, stored.generation, gone))
            self._unsent_pages += stored.pages
            few = len(self._unsent) <= view.n_slots * _TOGETHER
            small = self._unsent_pages * PAGE_BYTES <= view.n_slots * view.slot_bytes * _TOGETHER
        if not (few and small):
            self.send_notes()

    def send_notes(self) -> None:
        """Tell it what it was not told yet, as far as it takes messages. Never waits."""
        if not self._unsent:
            return
        with self._lock:
            while self._unsent and self._connection.tell(self._unsent[0]):
                self._unsent.popleft()
            if not self._unsent:
                self._unsent_pages = 0

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._connection.close()
        if self.view is not None:
            self.view.close()

    def abandon(self) -> None:
        """As `close`, in a process that was forked: the threads that held locks are not there."""
        self._connection.close()
        if self.view is not None:
            self.view.abandon()


class SharedMemoryConnector(Exchange[str]):
    """Objects in shared memory. Its peers are all connectors with a socket in the runtime folder.

    Args:
        namespace: connectors of one namespace find each other's objects.
        folder: the runtime folder, by default the one of the namespace.
        object_gib: size of the arena, which bounds the objects that were put and neither got nor
            cleaned up; by default a tenth of the machine's memory, 4 GiB at most. It holds at most
            4096 objects, and an object takes whole pages.
        geometry: instead of a size, the number of slots and the bytes of each (whole pages).
        object_timeout: seconds that a `get` waits for all peers.
        peer_timeout: seconds that it waits for peers that it meets for the first time.
        buffer_ttl_seconds: seconds after which an object that nobody has got may be evicted; zero
            or less is never.
        clock: seconds, monotonic, for `buffer_ttl_seconds`.

    Raises:
        ConfigError: the runtime folder cannot be had, or is not private.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        namespace: str = "default",
        folder: Path | None = None,
        object_gib: float | None = None,
        geometry: tuple[int, int] | None = None,
        object_timeout: float = 5.0,
        peer_timeout: float = 1.0,
        buffer_ttl_seconds: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_times(buffer_ttl_seconds, peer_timeout)
        self._sockets = SharedMemoryTransport(
            namespace=namespace,
            folder=folder,
            kind=_OBJECT_SOCKET,
            answers={Read: self._note},
        )
        self._peer_timeout = peer_timeout
        self._peers: dict[str, MappedPeer] = {}
        super().__init__(
            self._sockets,
            geometry=geometry or object_geometry(object_gib),
            object_timeout=object_timeout,
            ttl_s=buffer_ttl_seconds,
            clock=clock,
            stamp=time.monotonic_ns,
        )

    def close(self) -> None:
        super().close()
        for peer in self._forget(lambda peer: True):
            peer.close()

    def _begin(self) -> None:
        super()._begin()
        self._peers = {}
        # Held by the thread that waits for answers of new peers.
        self._meeting = threading.Lock()
        # Peers that are not asked (again), and of which the log has warned.
        self._refused: BoundedMap[str, None] = BoundedMap(_MAX_WARNED)

    def _abandon(self) -> None:
        for peer in self._peers.values():
            peer.abandon()
        super()._abandon()

    def _announce(self, arena: Arena, undo: ExitStack) -> tuple[Endpoint, str]:
        endpoint = self._sockets.export(arena, arena.epoch.hex())
        undo.callback(self._sockets.withdraw, endpoint)
        return endpoint, endpoint.address

    def _search(
        self, digest: bytes, metadata: Mapping[str, Any] | None, deadline: float
    ) -> Held | None:
        newest: tuple[StoredObject, MappedPeer] | None = None
        for peer in self._met(deadline):
            try:
                stored = peer.find(digest)
            except OmniError as error:
                # One peer that fails must not hide what the others have.
                logger.debug("the objects of %s: %s", peer.address, error)
                continue
            if stored is not None and (newest is None or stored.generation > newest[0].generation):
                newest = stored, peer
        if newest is None:
            self._send_notes()
            return None
        stored, peer = newest
        view = peer.view
        assert view is not None
        size = view.n_slots * view.slot_bytes
        return Held(
            stored,
            lambda: read_object(view, size, digest, stored, self._taken),
            functools.partial(peer.note, digest, stored),
        )

    def _met(self, deadline: float) -> list[MappedPeer]:
        """The peers whose arenas are mapped, after a wait for those that are new.

        A peer that does not answer in time is waited for only once. When it answers, the next call
        maps its arena.
        """
        own = self._own
        addresses = self._sockets.sockets(_OTHER_VERSIONS)
        with self._lock:
            known = list(self._peers.values())
            fresh = [
                each
                for each in addresses
                if each not in self._peers
                and each not in self._refused
                and (own is None or each != own.address)
            ]
        if fresh or any(peer.view is None for peer in known):
            self._meet(fresh, min(deadline, time.monotonic() + self._peer_timeout))
        gone = self._forget(lambda peer: not peer.alive)
        for peer in gone:
            peer.close()
        if gone:
            self._sockets.sweep()
        with self._lock:
            return [peer for peer in self._peers.values() if peer.view is not None]

    def _meet(self, fresh: list[str], deadline: float) -> None:
        if not self._meeting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return  # another thread waits for a peer
        try:
            new = [self._asked(address, deadline) for address in fresh]
            waited = [peer for peer in new if peer is not None]
            if len(waited) < len(fresh):
                self._sockets.sweep()
            while waited and (left := deadline - time.monotonic()) > 0:
                answered = _readable(waited, left)
                self._map(answered)
                waited = [peer for peer in waited if peer not in answered]
            with self._lock:
                late = [peer for peer in self._peers.values() if peer.view is None]
            self._map(_readable(late, 0.0))
        finally:
            self._meeting.release()

    def _asked(self, address: str, deadline: float) -> MappedPeer | None:
        """A new peer that was asked for its arena; None where there is none."""
        if not Path(address).name.startswith(_OBJECT_SOCKET):
            if not runtime.is_dead(Path(address)):
                self._warn_of(address, "it has another version")
            return None
        with self._lock:
            if address in self._peers:
                return None
        try:
            peer = MappedPeer(address, deadline)
        except PeerUnreachableError as error:
            logger.debug("%s has no objects: %s", address, error)
            return None
        except OmniError as error:
            self._warn_of(address, str(error))
            return None
        with self._lock:
            self._check_open()
            self._peers[address] = peer
        self._watch.start()
        return peer

    def _map(self, answered: list[MappedPeer]) -> None:
        for peer in answered:
            try:
                peer.map(time.monotonic() + self._peer_timeout)
            except PeerUnreachableError as error:  # it has gone
                logger.debug("%s has no objects: %s", peer.address, error)
            except OmniError as error:
                self._warn_of(peer.address, str(error))
            if peer.view is None:
                with self._lock:
                    self._peers.pop(peer.address, None)
                peer.close()

    def _warn_of(self, address: str, why: str) -> None:
        """Say once of a peer that we do not understand each other, though it may have objects."""
        with self._lock:
            if address in self._refused:
                return
            self._refused[address] = None
        logger.warning(
            "No object is found at %s: %s. Senders and receivers must run the same minor version "
            "of omni-connector (protocol %d of objects here)",
            *(address, why, PROTOCOL),
        )

    def _forget(self, useless: Callable[[MappedPeer], bool]) -> list[MappedPeer]:
        """Peers that are no longer known; the caller closes them."""
        with self._lock:
            gone = [peer for peer in self._peers.values() if useless(peer)]
            for peer in gone:
                del self._peers[peer.address]
        return gone

    def _let_go(self) -> bool:
        for peer in self._forget(lambda peer: not peer.alive):
            peer.close()
        self._send_notes()
        return bool(self._peers)

    def _send_notes(self) -> None:
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.send_notes()

    def _catch_up(self) -> None:
        self._sockets.catch_up(_CATCH_UP_S)


def _readable(peers: list[MappedPeer], timeout: float) -> list[MappedPeer]:
    """Those that have answered, or gone; waits until there is one."""
    if not peers:
        return []
    poll = select.poll()
    by_descriptor = {peer.fileno(): peer for peer in peers}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(timeout * 1000)]
