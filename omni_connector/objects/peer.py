# SPDX-License-Identifier: Apache-2.0
"""`Peer`: another connector that may have objects, asked over a line that its carrier makes."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from omni_connector.errors import PeerUnreachableError, ProtocolError, TransportError
from omni_connector.memory.buffers import Buffers
from omni_connector.objects.messages import Find, Found, Missing, Read
from omni_connector.objects.reading import Fetch, read_object
from omni_connector.transports.base import ArenaTransport, RemoteArena

# A peer that nobody has asked for so long is hung up on.
IDLE_S: Final = 60.0
# Attaching has this much longer than the deadline for the answer, then a read as long, and more for
# what is large.
_READ_S: Final = 10.0
_READ_BYTES_PER_S: Final = 20e6
# Notes kept for a peer that takes none at the moment; beyond it the oldest are lost.
_MAX_UNSENT: Final = 1024


class Line(Protocol):
    """A connection to a peer, by which it is asked. One thread at a time has it."""

    @property
    def alive(self) -> bool:
        """Whether the peer still has its end, as far as is known. Never waits."""

    def ask(self, question: Find, deadline: float) -> Found | Missing:
        """The peer's answer, by a deadline of `time.monotonic()`.

        Raises:
            OmniError: there is none, or it makes no sense. The line is then of no use any more.
        """

    def tell(self, read: Read) -> bool:
        """Say what has no answer; whether it was sent. Never waits."""

    def close(self) -> None:
        """Hang up. Idempotent."""


class Peer:
    """Another connector. Callers that share it take turns at asking.

    Args:
        address: where it is.
        connect: makes a line to it, until a deadline of `time.monotonic()`.
        transport: attaches the arenas that it names.
        buffers: where memory for copies of its objects comes from.
        timeout: seconds to wait for an answer; a peer that gives none is then left alone for ten
            times as long.

    Attributes:
        users: how many calls have it; the exchange counts them.
        used_at: when the last one ended.
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
        """What the peer has under a digest; None also while it is left alone for its silence.

        Raises:
            PeerUnreachableError: no answer.
            OmniError: as `Line.ask`.
        """
        now = time.monotonic()
        if now < self._silent_until:
            return None
        deadline = min(deadline, now + self._timeout)
        if not self._turn.acquire(timeout=max(0.0, deadline - now)):
            raise PeerUnreachableError(f"{self.address} is being asked by another thread")
        try:
            if self._closed:
                raise TransportError("the connector is closed")
            if self._line is None:
                self._line = self._connect(deadline)
            answer = self._line.ask(Find(digest), deadline)
            if answer.digest != digest:
                raise ProtocolError(f"{self.address} answers another question")
        except BaseException:
            self._hang_up()
            if time.monotonic() >= deadline:
                self._silent_until = time.monotonic() + 10 * self._timeout
            raise
        finally:
            self._turn.release()
            self._tell()
        return answer if isinstance(answer, Found) else None

    def open(self, found: Found, deadline: float) -> Callable[[], memoryview]:
        """Attach the arena that `find` has told of; what then reads the object, see `read_object`.

        Args:
            found: what `find` has told.
            deadline: what it was told by.

        Raises:
            OmniError: the arena cannot be attached.
        """
        with self._attaching:
            arena = self._arena
            if arena is None or arena.endpoint != found.endpoint or not arena.alive:
                if arena is not None:
                    arena.close()
                left = deadline + _READ_S - time.monotonic()
                arena = self._arena = self._transport.attach(found.endpoint, timeout=left)
        fetch: Fetch | None = None
        if not self._transport.supports_mapping:
            timeout = _READ_S + found.stored.length / _READ_BYTES_PER_S
            fetch = functools.partial(arena.take, timeout=timeout)
        return functools.partial(read_object, arena, found, self._buffers, fetch)

    def note(self, read: Read) -> None:
        """Tell the peer what was read; what it does not take now is kept. Never waits."""
        self._unsent.append(read)
        self._tell()

    def useless(self, now: float) -> bool:
        """Whether the peer has gone, or was not asked for a while; only of one without users."""
        lost = any(each is not None and not each.alive for each in (self._line, self._arena))
        return lost or now - self.used_at >= IDLE_S

    def close(self) -> None:
        """Hang up, once a question that is under way is over. Idempotent."""
        with self._turn:
            self._closed = True
            self._hang_up()
        with self._attaching:
            arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def abandon(self) -> None:
        """The same in a process that was forked, where whoever had the turn is not there."""
        self._hang_up()
        if self._arena is not None:
            self._arena.close()

    def _tell(self) -> None:
        # What another thread, which has the turn, leaves over, it tells when its turn is over.
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
