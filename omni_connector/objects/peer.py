# SPDX-License-Identifier: Apache-2.0
"""`Peer`: a sender that is asked for objects over the network.

It is asked where an object is, its arena is attached, and the object is read out of it, with every
byte checked.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import (
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
)
from omni_connector.net.packets import Refusal, require_protocol
from omni_connector.net.status import plain
from omni_connector.objects.base import ConnectorClosedError
from omni_connector.objects.exchange import PROTOCOL, Held, Read
from omni_connector.objects.object_store import StoredObject, read_object
from omni_connector.transports.base import ArenaTransport, Endpoint, RemoteArena

IDLE_S: Final = 60.0
"""Seconds without use after which the line to a peer is closed."""

# Longest time to attach an arena beyond the answer, and to read a small object from it, in seconds.
# A large object has a second more for each `_READ_BYTES_PER_S`, a slow link.
_READ_S: Final = 10.0
_READ_BYTES_PER_S: Final = 20e6

# Most notes that are kept for a peer that takes none at the moment. Of more, the oldest are lost.
_MAX_UNSENT: Final = 1024


class Find(msgspec.Struct, frozen=True, tag="find"):
    """Asks for the object whose key has this digest; answered with `Found` or `Missing`."""

    digest: bytes
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol, PROTOCOL)


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The object of this digest is in the arena at this endpoint."""

    digest: bytes
    endpoint: Endpoint
    stored: StoredObject


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """There is no object of this digest."""

    digest: bytes


ENCODER: Final = msgspec.msgpack.Encoder()
QUESTIONS: Final[msgspec.msgpack.Decoder[Find | Read]] = msgspec.msgpack.Decoder(Find | Read)
Answer = Found | Missing | Refusal
ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


class Line(Protocol):
    """A connection to a peer. One thread at a time uses it."""

    @property
    def alive(self) -> bool:
        """Whether the peer still has its end, as far as is known. Never waits."""

    def ask(
        self, question: Find, answers: msgspec.msgpack.Decoder[Answer], deadline: float
    ) -> Answer:
        """The peer's answer, by a deadline of `time.monotonic()`.

        Raises:
            OmniError: there is none, or it makes no sense. The line is of no use after that.
        """

    def tell(self, read: Read) -> bool:
        """Send a message that has no answer; returns whether it was sent. Never waits."""

    def close(self) -> None:
        """Close the line. Idempotent."""


class Peer:
    """A sender. One caller at a time asks it.

    Args:
        address: where it is.
        connect: makes a line to it, by a deadline of `time.monotonic()`.
        transport: attaches the arenas that it names.

    Attributes:
        users: how many calls use it now; the connector counts them.
        used_at: when the last of them ended.
    """

    def __init__(
        self, address: object, *, connect: Callable[[float], Line], transport: ArenaTransport
    ) -> None:
        self.address = address
        self.users = 0
        self.used_at = time.monotonic()
        self._connect = connect
        self._transport = transport
        self._turn = threading.Lock()
        self._closed = False
        self._line: Line | None = None
        self._unsent: deque[Read] = deque(maxlen=_MAX_UNSENT)
        self._attaching = threading.Lock()
        self._arena: RemoteArena | None = None

    def find(self, digest: bytes, deadline: float) -> Held | None:
        """What the peer has under a digest.

        Raises:
            PeerUnreachableError: it gives no answer.
            PeerRefusedError: it refuses to answer, or has another key.
            IncompatiblePeerError: it has another version of the protocol.
            OmniError: as `Line.ask`.
        """
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerUnreachableError(f"{self.address} is being asked by another thread")
        try:
            if self._closed:
                raise ConnectorClosedError("the connector is closed")
            if self._line is None:
                self._line = self._connect(deadline)
            # What was read comes first, so that no object is found that is gone.
            if not self._send_notes():
                raise PeerUnreachableError(f"{self.address} takes no message")
            answer = self._line.ask(Find(digest), ANSWERS, deadline)
            if isinstance(answer, Refusal):
                raise PeerRefusedError(f"the peer refuses: {plain(answer.reason[:200])}")
            if answer.digest != digest:
                raise ProtocolError(f"{self.address} answers another question")
        except BaseException:
            self._hang_up()
            raise
        finally:
            self._turn.release()
        if isinstance(answer, Missing):
            return None
        found = answer
        return Held(
            found.stored,
            lambda: self._read(found, deadline + _READ_S),
            lambda gone: self._note(
                Read(found.endpoint.epoch, digest, found.stored.generation, gone)
            ),
        )

    def useless(self, now: float) -> bool:
        """Whether a peer without users has gone, or was not asked for a while."""
        lost = any(each is not None and not each.alive for each in (self._line, self._arena))
        return lost or now - self.used_at >= IDLE_S

    def close(self) -> None:
        """Let go of line and arena, once a question that is under way is over. Idempotent."""
        with self._turn:
            self._closed = True
            self._hang_up()
        with self._attaching:
            arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def abandon(self) -> None:
        """As `close`, in a process that was forked: the threads that held locks are not there."""
        self._hang_up()
        if self._arena is not None:
            self._arena.abandon()

    def _read(self, found: Found, deadline: float) -> memoryview:
        arena = self._attached(found.endpoint, deadline)
        timeout = _READ_S + found.stored.length / _READ_BYTES_PER_S

        def take(pieces: list[tuple[int, int]], nbytes: int) -> NDArray[np.uint8]:
            return arena.take(pieces, timeout=timeout)

        size = found.endpoint.n_slots * found.endpoint.slot_bytes
        return read_object(arena, size, found.digest, found.stored, take)

    def _attached(self, endpoint: Endpoint, deadline: float) -> RemoteArena:
        if not self._attaching.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerUnreachableError(f"another thread attaches the arena of {self.address}")
        try:
            arena = self._arena
            if arena is None or arena.endpoint != endpoint or not arena.alive:
                if arena is not None:
                    arena.close()
                left = deadline - time.monotonic()
                arena = self._arena = self._transport.attach(endpoint, timeout=left)
            return arena
        finally:
            self._attaching.release()

    def _note(self, read: Read) -> None:
        # Told now if nobody asks, else before the next question. Never waits.
        self._unsent.append(read)
        if self._turn.acquire(blocking=False):
            try:
                self._send_notes()
            finally:
                self._turn.release()

    def _send_notes(self) -> bool:
        while self._unsent:
            read = self._unsent.popleft()
            if self._line is None or not self._line.tell(read):
                self._unsent.appendleft(read)
                return False
        return True

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
