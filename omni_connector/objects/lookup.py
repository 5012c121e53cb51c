# SPDX-License-Identifier: Apache-2.0
"""Where objects are: a sender says it at a TCP port, to receivers that ask by a key's digest."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol

import msgspec
import zmq

from omni_connector.errors import (
    OmniError,
    PeerUnreachableError,
    ProtocolError,
    TransportError,
)
from omni_connector.net.keys import ClusterKey
from omni_connector.net.listener import TcpListener
from omni_connector.net.peers import HostPort
from omni_connector.net.resolver import Found, Resolver
from omni_connector.net.zeromq import Context, Link, make_context
from omni_connector.objects.object_store import StoredObject
from omni_connector.transports.base import Endpoint

logger = logging.getLogger(__name__)

PROTOCOL: Final = 1

_POLL_MS: Final = 100
_AT_ONCE: Final = 64
_CLOSE_S: Final = 5.0
_CATCH_UP_S: Final = 0.3
_IDLE_S: Final = 60.0


class Find(msgspec.Struct, frozen=True, tag="find"):
    """Asks for the object whose key has this digest; answered with `Held` or `Missing`."""

    digest: bytes
    protocol: int = PROTOCOL


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Says that its sender has a verified copy of this object; no answer."""

    digest: bytes
    generation: int
    protocol: int = PROTOCOL


class Held(msgspec.Struct, frozen=True, tag="held"):
    """An object: `length` bytes over runs (first slot, number of slots) of an arena.

    `stamp` is the host's clock in ns when it was stored.
    """

    digest: bytes
    endpoint: Endpoint
    generation: int
    length: int
    stamp: int
    runs: list[tuple[int, int]]


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """There is no such object."""

    digest: bytes


_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Find | Read] = msgspec.msgpack.Decoder(Find | Read)
_answers: msgspec.msgpack.Decoder[Held | Missing] = msgspec.msgpack.Decoder(Held | Missing)


class ObjectArena(Protocol):
    """A peer's arena, as far as objects are read from it."""

    @property
    def alive(self) -> bool:
        """As `RemoteArena.alive`."""

    def read_object(self, digest: bytes, stored: StoredObject, deadline: float) -> memoryview:
        """As `objects.read_object`, of a peer's arena; `deadline` is of `time.monotonic()`."""

    def close(self) -> None:
        """As `RemoteArena.close`."""


class ObjectServer:
    """Says at a TCP port where objects are, on a thread of its own.

    Args:
        address: where to listen; with port 0 the system chooses one.
        key: what askers must show.
        find: tells where an object is; must not block.
        note: is told what was read; must not block.

    Attributes:
        address: where it listens, with the port that it has.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        address: HostPort,
        key: ClusterKey,
        find: Callable[[bytes], Held | Missing],
        note: Callable[[Read], None],
    ) -> None:
        self._find = find
        self._note = note
        self._context = make_context()
        try:
            self._listener = TcpListener(self._context, address, key)
        except BaseException:
            self._context.destroy(0)
            raise
        self.address = self._listener.address
        self._stopped = threading.Event()
        self._passes = 0
        self._thread = threading.Thread(target=self._run, name="omni-objects", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive()

    def catch_up(self) -> None:
        """Wait, a moment at most, until what had arrived by now is dealt with."""
        wanted, deadline = self._passes + 2, time.monotonic() + _CATCH_UP_S
        while self._passes < wanted and time.monotonic() < deadline and self.alive:
            time.sleep(_POLL_MS / 10000)

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._stopped.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for each in (self._listener.router, *self._listener.watched):
                poller.register(each, zmq.POLLIN)
            while not self._stopped.is_set():
                ready = dict(poller.poll(_POLL_MS))
                self._listener.attend(ready)
                if self._listener.router in ready:
                    self._answer_some()
                self._passes += 1
        except Exception:  # `health` tells that the thread has ended
            logger.exception("the thread that answers who asks for objects has ended")
        finally:
            self._context.destroy(0)

    def _answer_some(self) -> None:
        router = self._listener.router
        for _ in range(_AT_ONCE):
            try:
                sender, *frames = self._listener.receive()
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames")
                question = _questions.decode(frames[0])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ProtocolError) as e:
                logger.debug("a question for an object is malformed: %s", e)
                continue
            if isinstance(question, Read):
                self._note(question)
                continue
            try:
                router.send_multipart(
                    [sender, _encoder.encode(self._find(question.digest))], zmq.NOBLOCK
                )
            except zmq.ZMQError as error:  # it has gone, or takes nothing
                logger.debug("an answer about an object was not sent: %s", error)


class ObjectSource:
    """A peer that may have objects. Callers that share it take turns at asking.

    Args:
        address: of its `ObjectServer`.
        context: whose socket it is asked with.
        resolver: looks its name up.
        key: what the peer must hold, and we show.
        attach: gets at an arena that it names, until a deadline.
        timeout: seconds to wait for an answer; a peer that gives none is then left alone for ten
            times as long.
    """

    def __init__(
        self,
        address: HostPort,
        *,
        context: Context,
        resolver: Resolver,
        key: ClusterKey,
        attach: Callable[[Endpoint, float], ObjectArena],
        timeout: float,
    ) -> None:
        self.address = address
        self._context = context
        self._resolver = resolver
        self._key = key
        self._attach = attach
        self._timeout = timeout
        self._aside_until = 0.0
        self._turn = threading.Lock()
        self._closed = False
        self._used_at = time.monotonic()
        self._reading = 0
        self._link: Link | None = None
        self._arena: tuple[bytes, ObjectArena] | None = None

    def find(self, digest: bytes, deadline: float) -> Held | None:
        """Where the peer has the object of this digest; None if nowhere, or while it is left alone.

        Raises:
            PeerUnreachableError: no answer.
            ProtocolError: one that makes no sense.
        """
        now = time.monotonic()
        if now < self._aside_until:
            return None
        deadline = min(deadline, now + self._timeout)
        if not self._turn.acquire(timeout=max(0.0, deadline - now)):
            raise PeerUnreachableError(f"{self.address} is being asked by another thread")
        try:
            if self._closed:
                raise TransportError("the connector is closed")
            self._used_at = now
            answer = self._ask(digest, deadline)
        except OmniError:
            self._hang_up()
            if time.monotonic() >= deadline:
                self._aside_until = time.monotonic() + 10 * self._timeout
            raise
        finally:
            self._turn.release()
        return answer if isinstance(answer, Held) else None

    def read(self, digest: bytes, held: Held, deadline: float) -> memoryview:
        """A verified copy of what `find` found; the peer is told.

        Raises:
            StaleSlotError: it was replaced or dropped meanwhile.
            OmniError: it cannot be had.
        """
        stored = StoredObject(tuple(held.runs), held.generation, held.length, held.stamp)
        with self._turn:
            self._reading += 1
        try:
            arena = self._arena_of(held.endpoint, deadline)
            content = arena.read_object(digest, stored, deadline)
        finally:
            with self._turn:
                self._reading -= 1
                self._used_at = time.monotonic()
        with self._turn:
            if self._link is not None:
                read = _encoder.encode(Read(digest, held.generation))
                try:
                    self._link.socket.send(read, zmq.NOBLOCK)
                except zmq.ZMQError as error:  # then it stays there a little longer
                    logger.debug("did not tell %s what was read: %s", self.address, error)
        return content

    def let_go(self, now: float) -> bool:
        """Hang up where the peer has gone, or was not asked for a while; False if it was not.
        Never waits."""
        if not self._turn.acquire(blocking=False):
            return True
        try:
            idle = now - self._used_at >= _IDLE_S
            lost = self._link is not None and self._link.why_lost() is not None
            arena = None
            if (lost or idle) and not self._reading:
                self._hang_up()
                arena, self._arena = self._arena, None
        finally:
            self._turn.release()
        if arena is not None:
            arena[1].close()
        return not idle or self._reading > 0

    def close(self) -> None:
        """Hang up. Idempotent."""
        with self._turn:
            self._closed = True
            self._hang_up()
            arena, self._arena = self._arena, None
        if arena is not None:
            arena[1].close()

    def _ask(self, digest: bytes, deadline: float) -> Held | Missing:
        if self._link is None:
            try:
                self._link = Link(self._context, self._resolved(deadline), self._key)
            except zmq.ZMQError as error:
                raise PeerUnreachableError(f"{self.address}: {error}") from error
        link = self._link
        try:
            link.socket.send(_encoder.encode(Find(digest)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerUnreachableError(f"{self.address} takes no question: {error}") from error
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN)
        poller.register(link.monitor, zmq.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if link.socket in ready:
                answer = _read_answer(link.socket.recv_multipart(zmq.NOBLOCK))
                if answer.digest == digest:  # not that to a question that was given up
                    return answer
            elif link.monitor in ready and (why := link.why_lost()) is not None:
                raise PeerUnreachableError(f"{self.address} {why}")
        raise PeerUnreachableError(f"no answer from {self.address} before the deadline")

    def _resolved(self, deadline: float) -> HostPort:
        looked_up: Future[Found] = Future()
        self._resolver.look_up(self.address, looked_up.set_result)
        try:
            found = looked_up.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise PeerUnreachableError(f"{self.address.host!r} is still being looked up") from None
        if isinstance(found, PeerUnreachableError):
            raise found
        return found

    def _arena_of(self, endpoint: Endpoint, deadline: float) -> ObjectArena:
        with self._turn:
            known = self._arena
            if known is not None and known[0] == endpoint.epoch and known[1].alive:
                return known[1]
            self._arena = None
        if known is not None:
            known[1].close()
        arena = self._attach(endpoint, deadline)
        with self._turn:
            self._arena = endpoint.epoch, arena
        return arena

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


def _read_answer(frames: list[bytes]) -> Held | Missing:
    try:
        if len(frames) != 1:
            raise ProtocolError(f"an answer of {len(frames)} frames")
        return _answers.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the answer about an object is malformed: {error}") from error
