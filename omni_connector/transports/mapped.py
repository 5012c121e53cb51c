# SPDX-License-Identifier: Apache-2.0
"""The reading side of shared memory: peers' arenas, mapped, and the objects in them."""

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import IncompatiblePeerError, PeerUnreachableError, ProtocolError
from omni_connector.memory.arena import ArenaView
from omni_connector.memory.arena_format import SlotHeader
from omni_connector.memory.buffers import Buffers
from omni_connector.net.unix import Attach, Connection, Find, Found, Grant, Missing, Read
from omni_connector.objects.object_store import StoredObject, read_object
from omni_connector.transports.base import Endpoint, RemoteArena

# Notes kept for a peer that takes none at the moment; beyond it the oldest are lost.
_MAX_UNSENT: Final = 1024


def map_arena(
    connection: Connection, epoch: bytes, deadline: float, endpoint: Endpoint | None = None
) -> ArenaView:
    """Ask for an arena's memfd, check it and map it.

    Args:
        connection: to its owner.
        epoch: of the arena.
        deadline: `time.monotonic()` by which the answer must be there.
        endpoint: what the arena must agree with, if it was announced.

    Raises:
        PeerUnreachableError, PeerRefusedError, ProtocolError: as `Connection.ask`.
        PeerRefusedError, ProtocolError, IncompatiblePeerError: as `ArenaView.open`.
    """
    grant, descriptor = connection.ask(Attach(epoch), deadline, with_fd=True)
    if not isinstance(grant, Grant) or descriptor is None:
        raise ProtocolError(f"{connection.path} answers Attach with {type(grant).__name__}")
    try:
        granted = grant.epoch, grant.n_slots, grant.slot_bytes
        wanted = endpoint and (endpoint.epoch, endpoint.n_slots, endpoint.slot_bytes)
        if wanted is not None and granted != wanted:
            raise IncompatiblePeerError("arena", wanted, granted)
        return ArenaView.open(
            descriptor, epoch=epoch, n_slots=grant.n_slots, slot_bytes=grant.slot_bytes
        )
    finally:
        os.close(descriptor)


class ObjectPeer:
    """Another connector that has objects: a connection, and a mapping of its object arena."""

    def __init__(self, address: Path, timeout: float, buffers: Buffers) -> None:
        self.address = address
        self._buffers = buffers
        self._timeout = timeout
        self._aside_until = 0.0
        self._turn = threading.Lock()
        self._reading = 0
        self._reading_lock = threading.Lock()
        self._connection: Connection | None = None
        self._view: ArenaView | None = None
        self._unsent: deque[Read] = deque(maxlen=_MAX_UNSENT)

    def find(self, digest: bytes, deadline: float) -> StoredObject | None:
        """What the peer has under a digest; None also while it is set aside for its silence."""
        now = time.monotonic()
        if now < self._aside_until:
            return None
        deadline = min(deadline, now + self._timeout)
        if not self._turn.acquire(timeout=max(0.0, deadline - now)):
            raise PeerUnreachableError(f"{self.address} is being asked by another thread")
        try:
            return self._ask(digest, deadline)
        except BaseException:
            self._hang_up()
            if time.monotonic() >= deadline:
                self._aside_until = time.monotonic() + 10 * self._timeout
            raise
        finally:
            self._turn.release()
            self._tell()

    def read(self, digest: bytes, stored: StoredObject) -> memoryview:
        """A verified copy of what `find` found; the peer is told."""
        with self._reading_lock:
            self._reading += 1
        try:
            view = self._view
            if view is None:
                raise PeerUnreachableError(f"{self.address} has gone")
            content = read_object(view, digest, stored, self._buffers)
        finally:
            with self._reading_lock:
                self._reading -= 1
        self._unsent.append(Read(view.epoch, digest, stored.generation))
        self._tell()
        return content

    def let_go(self) -> bool:
        """Hang up where the peer has gone and nobody reads; whether anything of it is held. Never
        waits."""
        if not self._turn.acquire(blocking=False):
            return True
        try:
            with self._reading_lock:
                if self._connection is None or self._connection.alive or self._reading:
                    return self._connection is not None
                self._hang_up()
                return False
        finally:
            self._turn.release()

    def close(self) -> None:
        """Hang up. A read that is running ends well. Idempotent."""
        with self._turn:
            self._hang_up()

    def abandon(self) -> None:
        """The same in a process that was forked, where whoever had the turn is not there."""
        self._hang_up()

    def _ask(self, digest: bytes, deadline: float) -> StoredObject | None:
        if self._connection is None:
            self._connection = Connection(self.address, deadline)
        answer, _ = self._connection.ask(Find(digest), deadline)
        if isinstance(answer, Missing):
            return None
        if not isinstance(answer, Found):
            raise ProtocolError(f"{self.address} answers Find with {type(answer).__name__}")
        if self._view is None or self._view.epoch != answer.epoch:
            self._view = map_arena(self._connection, answer.epoch, deadline)
        return StoredObject(tuple(answer.runs), answer.generation, answer.length, answer.stamp)

    def _tell(self) -> None:
        # Never waits: who has the turn comes here after it, and what cannot be sent now is kept.
        while self._unsent and self._turn.acquire(blocking=False):
            try:
                while self._unsent:
                    read = self._unsent.popleft()
                    if self._connection is None or not self._connection.tell(read):
                        self._unsent.appendleft(read)
                        return
            finally:
                self._turn.release()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        view, self._view = self._view, None
        if connection is not None:
            connection.close()
        if view is not None:
            view.close()


class MappedArena(RemoteArena):
    """A peer's arena in our address space. It outlives its owner until it is closed."""

    def __init__(self, endpoint: Endpoint, view: ArenaView, connection: Connection) -> None:
        self.endpoint = endpoint
        self._view = view
        self._connection = connection

    @property
    def slots(self) -> NDArray[np.uint8]:
        return self._view.slots

    @property
    def alive(self) -> bool:
        return self._connection.alive

    def verify(self, slot: int, generation: int) -> SlotHeader:
        try:
            return self._view.verify(slot, generation)
        except IndexError as error:
            raise ProtocolError(f"{self.endpoint.address}: {error}") from error

    def read_into(self, slot_ids: Sequence[int], dst: NDArray[np.uint8]) -> None:
        slots = self.slots
        if dst.dtype != np.uint8 or dst.ndim != 2 or len(dst) != len(slot_ids):
            raise ValueError(
                f"dst is {dst.dtype}{dst.shape}, wanted uint8 ({len(slot_ids)}, width)"
            )
        width = dst.shape[1]
        if width > slots.shape[1]:
            raise ValueError(f"dst is {width} bytes wide, a slot {slots.shape[1]}")
        for slot in slot_ids:
            if not 0 <= slot < len(slots):
                raise ProtocolError(f"{self.endpoint.address} has no slot {slot}")
        for row, slot in zip(dst, slot_ids, strict=True):
            np.copyto(row, slots[slot, :width])

    def close(self) -> None:
        self._connection.close()
        self._view.close()
