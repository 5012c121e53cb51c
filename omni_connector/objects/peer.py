# SPDX-License-Identifier: Apache-2.0
"""`Peer`: another connector that may have objects, over a line that its carrier makes.

It is asked where an object is (the messages are the same over every carrier), its arena is
attached, and the object is read out of the slots, with every byte checked.
"""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.arena.buffers import Buffers
from omni_connector.errors import (
    ChecksumError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    StaleSlotError,
    TransportError,
)
from omni_connector.net.packets import Refusal, require_protocol
from omni_connector.net.status import plain
from omni_connector.objects import codec
from omni_connector.objects.object_store import StoredObject
from omni_connector.objects.progress import progress_of
from omni_connector.runtime.shared_work import share_out
from omni_connector.transports.base import ArenaTransport, Endpoint, RemoteArena

logger = logging.getLogger(__name__)

PROTOCOL: Final = 2
"""Version of the messages about objects."""

IDLE_S: Final = 60.0
"""Seconds without use after which the line to a peer is closed."""

# Over the network, longest time to attach an arena beyond the answer, and to read a small object
# from it, in seconds. A large object has a second more for each `_READ_BYTES_PER_S`, a slow link.
_READ_S: Final = 10.0
_READ_BYTES_PER_S: Final = 20e6

# Most notes that are kept for a peer that takes none at the moment. Of more, the oldest are lost.
_MAX_UNSENT: Final = 1024

Fetch = Callable[[list[int], int], NDArray[np.uint8]]
"""Copies bytes of slots into memory of their own; see `RemoteArena.take`."""


class Find(msgspec.Struct, frozen=True, tag="find"):
    """Asks for the object whose key has this digest; answered with `Found` or `Missing`."""

    digest: bytes
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol, PROTOCOL)


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Says that its sender has read this object of the arena `epoch`, whole; has no answer."""

    epoch: bytes
    digest: bytes
    generation: int
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
    ) -> tuple[Answer, object]:
        """The peer's answer, by a deadline of `time.monotonic()`; what comes with it is ignored.

        Raises:
            OmniError: there is none, or it makes no sense. The line is of no use after that.
        """

    def tell(self, read: Read) -> bool:
        """Send a message that has no answer; returns whether it was sent. Never waits."""

    def close(self) -> None:
        """Close the line. Idempotent."""


class Peer:
    """Another connector. One caller at a time asks it.

    Args:
        address: where it is.
        connect: makes a line to it, by a deadline of `time.monotonic()`.
        transport: attaches the arenas that it names.
        buffers: where memory for copies of its objects comes from.
        timeout: seconds to wait for an answer, at most. A peer that gives none is not asked for ten
            times as long as it was waited for.

    Attributes:
        users: how many calls use it now; the exchange counts them.
        used_at: when the last of them ended.
    """

    def __init__(
        self,
        address: object,
        *,
        connect: Callable[[float], Line],
        transport: ArenaTransport,
        buffers: Buffers,
        timeout: float,
    ) -> None:
        self.address = address
        self.users = 0
        self.used_at = time.monotonic()
        self._connect = connect
        self._transport = transport
        self._buffers = buffers
        self._timeout = timeout
        self._silent_until = 0.0
        self._turn = threading.Lock()
        self._closed = False
        self._line: Line | None = None
        self._unsent: deque[Read] = deque(maxlen=_MAX_UNSENT)
        self._attaching = threading.Lock()
        self._arena: RemoteArena | None = None

    def find(self, digest: bytes, deadline: float) -> Found | None:
        """What the peer has under a digest. None also while it is not asked, as it was silent.

        Raises:
            PeerUnreachableError: it gives no answer.
            PeerRefusedError: it refuses to answer, as it has another version of the protocol.
            OmniError: as `Line.ask`.
        """
        now = time.monotonic()
        if now < self._silent_until:
            return None
        if deadline <= now:
            raise PeerUnreachableError(f"no time is left to ask {self.address}")
        deadline = min(deadline, now + self._timeout)
        if not self._turn.acquire(timeout=max(0.0, deadline - now)):
            raise PeerUnreachableError(f"{self.address} is being asked by another thread")
        try:
            if self._closed:
                raise TransportError("the connector is closed")
            if self._line is None:
                self._line = self._connect(deadline)
            answer, _ = self._line.ask(Find(digest), ANSWERS, deadline)
            if isinstance(answer, Refusal):
                raise PeerRefusedError(f"the peer refuses: {plain(answer.reason[:200])}")
            if answer.digest != digest:
                raise ProtocolError(f"{self.address} answers another question")
        except BaseException:
            self._hang_up()
            self._back_off(now, deadline)
            raise
        finally:
            self._turn.release()
            self._tell()
        return answer if isinstance(answer, Found) else None

    def open(self, found: Found, deadline: float) -> Callable[[], memoryview]:
        """Attach the arena that the object is in; returns what reads the object (`read_object`).

        Args:
            found: what `find` has returned.
            deadline: of the whole `get`; what does not map has `_READ_S` longer.

        Raises:
            OmniError: the arena cannot be attached.
        """
        # A mapping takes one more message, and reading anything over the network some more time.
        mapped = self._transport.supports_mapping
        now = time.monotonic()
        deadline = min(deadline, now + self._timeout) if mapped else deadline + _READ_S
        if not self._attaching.acquire(timeout=max(0.0, deadline - now)):
            raise PeerUnreachableError(f"another thread attaches the arena of {self.address}")
        try:
            arena = self._arena
            if arena is None or arena.endpoint != found.endpoint or not arena.alive:
                if arena is not None:
                    arena.close()
                left = deadline - time.monotonic()
                arena = self._arena = self._transport.attach(found.endpoint, timeout=left)
        except PeerUnreachableError:
            if mapped:
                self._back_off(now, deadline)
            raise
        finally:
            self._attaching.release()
        fetch: Fetch | None = None
        if not mapped:
            timeout = _READ_S + found.stored.length / _READ_BYTES_PER_S
            fetch = functools.partial(arena.take, timeout=timeout)
        return functools.partial(read_object, arena, found, self._buffers, fetch)

    def note(self, read: Read) -> None:
        """Tell the peer what was read, later if it takes no message now. Never waits."""
        self._unsent.append(read)
        self._tell()

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

    def _back_off(self, since: float, deadline: float) -> None:
        if (now := time.monotonic()) >= deadline:  # it had all of its time
            self._silent_until = now + 10 * (deadline - since)

    def _tell(self) -> None:
        # Where another thread has the lock, that thread sends what is left when it releases it.
        while self._unsent and self._turn.acquire(blocking=False):
            try:
                while self._unsent:
                    read = self._unsent.popleft()
                    if self._line is None or not self._line.tell(read):
                        self._unsent.appendleft(read)
                        return
            finally:
                self._turn.release()

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def read_object(
    arena: Arena | RemoteArena, found: Found, buffers: Buffers, fetch: Fetch | None = None
) -> memoryview:
    """Copy an object out of the slots of an arena, and verify the copy.

    Args:
        arena: the arena of the object, with the geometry that its owner has named.
        found: what the owner says of the object; not trusted.
        buffers: where memory for the copy comes from.
        fetch: copies the bytes where the arena is not mapped.

    Raises:
        StaleSlotError: the object was replaced or dropped meanwhile.
        ChecksumError: the bytes differ from what was stored.
        ProtocolError: the owner describes no object in such an arena.
        TransportError: the arena is closed or cannot be read, or there is no memory for the copy.
    """
    stored = found.stored
    slot_bytes = found.endpoint.slot_bytes
    ids = stored.slots_in(found.endpoint.n_slots, slot_bytes)
    slots = arena.slots if fetch is None else None
    arena.verify(ids[0], stored.generation)
    content = buffers.take(stored.length) if fetch is None else fetch(ids, stored.length)
    checksums = np.empty(len(ids), np.uint64)
    copied = progress_of(logger, "reading object", found.digest[:8].hex(), stored.length)

    def take_up(job: tuple[int, int]) -> None:
        index, slot = job
        segment = content[index * slot_bytes : (index + 1) * slot_bytes]
        if slots is not None:
            np.copyto(segment, slots[slot, : segment.size])
        checksums[index] = xxhash.xxh3_64_intdigest(segment.data)
        copied(segment.size)

    share_out(take_up, enumerate(ids), stored.length)
    header = arena.verify(ids[0], stored.generation)
    if header.key != found.digest or header.length != min(stored.length, slot_bytes):
        raise StaleSlotError(f"the slot holds {header.length} bytes of another object")
    if header.checksum != codec.checksum_of(stored.length, checksums):
        raise ChecksumError(f"generation {header.generation} of an object: wrong checksum")
    return content.data
