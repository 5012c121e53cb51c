# SPDX-License-Identifier: Apache-2.0
"""Questions and answers between processes of one user, over SOCK_SEQPACKET Unix sockets.

A message is one packet: a msgpack-encoded struct of whoever uses the sockets, bounded in size, with
at most one file descriptor beside it. Both sides check the user id that the kernel vouches for
before they believe a byte. A connection stays open, so that each side sees the other's end.
"""

import array
import contextlib
import errno
import logging
import os
import re
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from omni_connector.errors import (
    ConfigError,
    IncompatiblePeerError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    TransportError,
)
from omni_connector.net import runtime
from omni_connector.net.forks import forget_in_child

logger = logging.getLogger(__name__)

PROTOCOL: Final = 1
MAX_MESSAGE_BYTES: Final = 65536
MAX_CONNECTIONS: Final = 512

_RETRY_S: Final = 0.01
_NO_RESOURCES_S: Final = 0.05
_CLOSE_S: Final = 5.0
_CATCH_UP_CHECK_S: Final = 0.05
# Notes taken from one peer before the others have their turn.
_NOTES_A_ROUND: Final = 64
_UCRED: Final = struct.Struct("3i")
_ADDRESS: Final = re.compile(r"[a-z]-[0-9a-f]{24}\.sock")


def require_protocol(found: int, wanted: int = PROTOCOL) -> None:
    """Raise ValueError unless a message is of our version; decoding makes that a refusal."""
    if found != wanted:
        raise ValueError(f"protocol {found}, wanted {wanted}")


class Refusal(Struct, frozen=True, tag="refusal"):
    """The question was not understood, or will not be answered."""

    reason: str
    protocol: int = PROTOCOL


_encoder = Encoder()


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])


class Connection:
    """The asking side. One question at a time: callers that share it take turns.

    Args:
        path: the peer's socket.
        deadline: `time.monotonic()` by which the connection must stand.

    Raises:
        PeerUnreachableError: nobody listens there, or does not accept before the deadline.
        PeerRefusedError: it is another user's, or not a place where our peers are.
    """

    def __init__(self, path: Path, deadline: float) -> None:
        self.path = path
        _check_address(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connect(deadline)
            uid = peer_uid(self._socket)
            if uid != os.geteuid():
                raise PeerRefusedError(f"{path} belongs to user {uid}, not {os.geteuid()}")
        except BaseException:
            self._socket.close()
            raise

    def ask(
        self,
        question: Struct,
        answers: Decoder[Any],
        deadline: float,
        with_fd: bool = False,
    ) -> tuple[Any, int | None]:
        """The peer's answer, and the descriptor beside it, which is the caller's to close.

        After any error the connection is closed: a late answer must not be taken for that to
        the next question.

        Args:
            answers: what it may be answered with, `Refusal` among it.
            with_fd: whether a descriptor must come with it; else none may.

        Raises:
            PeerUnreachableError: the peer is gone, or silent until the deadline.
            PeerRefusedError: it refuses.
            IncompatiblePeerError: it speaks another version of this protocol.
            ProtocolError: the answer is malformed.
        """
        try:
            self._socket.settimeout(_left(deadline, self.path))
            self._socket.send(_encoder.encode(question), socket.MSG_NOSIGNAL)
            self._socket.settimeout(_left(deadline, self.path))
            packet, descriptors = _receive(self._socket, with_fd=with_fd)
            return read_answer(packet, descriptors, answers, with_fd)
        except OSError as error:
            self.close()
            raise PeerUnreachableError(f"no answer from {self.path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def tell(self, note: Struct) -> bool:
        """Say something that has no answer, between questions; whether it was sent. Never waits."""
        try:
            self._socket.settimeout(0)
            self._socket.send(_encoder.encode(note), socket.MSG_NOSIGNAL)
        except OSError:  # full, or gone, which the next question will find
            return False
        return True

    @property
    def alive(self) -> bool:
        """Whether the peer still has its end. Never waits."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLRDHUP)
        gone = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL
        return not any(events & gone for _, events in poll.poll(0))

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._socket.close()

    def _connect(self, deadline: float) -> None:
        while True:
            self._socket.settimeout(_left(deadline, self.path))
            code = self._socket.connect_ex(os.fspath(self.path))
            if code == 0:
                return
            # A full backlog: a connect with a timeout does not wait for it on Unix sockets.
            if code not in (errno.EAGAIN, errno.EINTR):
                break
            time.sleep(_RETRY_S)
        message = f"cannot connect to {self.path}: {os.strerror(code)}"
        if code in (errno.EACCES, errno.EPERM, errno.EPROTOTYPE):
            raise PeerRefusedError(message)
        raise PeerUnreachableError(message)


def _check_address(path: Path) -> None:
    # An address comes from a peer: it must not make us talk to any other socket of this host.
    if not (path.is_absolute() and _ADDRESS.fullmatch(path.name) and str(path).isprintable()):
        raise PeerRefusedError(f"{str(path)!r} is not the address of an engine's socket")
    if not os.path.lexists(path.parent):
        raise PeerUnreachableError(f"there is no folder {path.parent} on this host")
    try:
        runtime.check_private(path.parent)
    except ConfigError as error:
        raise PeerRefusedError(str(error)) from error


def _left(deadline: float, path: Path) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise PeerUnreachableError(f"no answer from {path} before the deadline")
    return left


def _receive(connection: socket.socket, *, with_fd: bool) -> tuple[bytes, list[int]]:
    # Without room for them, the kernel drops descriptors that nobody asked for.
    room = socket.CMSG_SPACE(array.array("i").itemsize) if with_fd else 0
    packet, ancillary, flags, _ = connection.recvmsg(
        MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if flags & socket.MSG_TRUNC:
        _close_all(list(descriptors))
        raise ProtocolError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
    return packet, list(descriptors)


def read_answer(
    packet: bytes, descriptors: list[int], answers: Decoder[Any], with_fd: bool = False
) -> tuple[Any, int | None]:
    """What `Connection.ask` makes of a packet, and of the descriptors that came with it."""
    try:
        if not packet:
            raise PeerUnreachableError("the peer closed the connection")
        try:
            answer = answers.decode(packet)
        except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the peer's answer is malformed: {error}") from error
        if isinstance(answer, Refusal):
            if answer.protocol != PROTOCOL:
                raise IncompatiblePeerError("transport protocol", PROTOCOL, answer.protocol)
            raise PeerRefusedError(f"the peer refuses: {answer.reason[:200]}")
        if len(descriptors) != int(with_fd):
            raise ProtocolError(f"{type(answer).__name__} came with {len(descriptors)} descriptors")
    except BaseException:
        _close_all(descriptors)
        raise
    return answer, descriptors[0] if descriptors else None


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Listener:
    """The answering side: one thread for all sockets of a connector; it never blocks on a peer.

    Args:
        questions: reads what peers may say; what it does not know is refused.
        answer: gives the answer, or None to what has none, and a descriptor to send with it, which
            is closed here. Called on the thread; must not block.
    """

    def __init__(
        self, questions: Decoder[Any], answer: Callable[[Any], tuple[Struct | None, int | None]]
    ) -> None:
        self._questions = questions
        self._answer = answer
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._todo: deque[Callable[[], None]] = deque()
        self._sockets: dict[Path, tuple[socket.socket, tuple[int, int]]] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="omni-connector-shm", daemon=True)
        self._thread.start()
        forget_in_child(self, Listener._abandon)

    @property
    def alive(self) -> bool:
        """Whether questions are being answered."""
        return (
            self._thread.is_alive() and not self._stopped.is_set() and os.getpid() == self._process
        )

    def add(self, path: Path) -> None:
        """Listen at a path as well.

        Raises:
            TransportError: it is taken, or the listener is closed.
        """
        listening = runtime.listen(path)
        try:
            status = os.lstat(path)
        except OSError as error:
            listening.close()
            raise TransportError(f"the socket {path} was removed by somebody: {error}") from error
        with self._lock:
            if not self._stopped.is_set():
                self._sockets[path] = listening, (status.st_dev, status.st_ino)
                self._do(lambda: self._watch(listening, self._accept))
                return
        listening.close()
        path.unlink(missing_ok=True)
        raise TransportError(f"cannot listen at {path}: the connector is closed")

    def remove(self, path: Path) -> None:
        """Listen there no more; connections made through it stay. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if path in self._sockets:
                listening = self._unlink(path)
                self._do(lambda: self._forget(listening))

    def catch_up(self, timeout: float) -> None:
        """Wait until what peers said before this call has been noted, `timeout` seconds at most.

        Not to be called on the thread.
        """
        noted = threading.Event()
        # The round that is under way may have begun before; the one after it has not.
        self._do(lambda: self._do(noted.set))
        limit = time.monotonic() + timeout
        while self.alive and time.monotonic() < limit:
            if noted.wait(min(_CATCH_UP_CHECK_S, timeout)):
                return

    def close(self) -> None:
        """Remove all sockets, hang up, stop the thread. Idempotent; bounded."""
        if os.getpid() != self._process:  # they are the parent's
            return
        with self._lock:
            self._stopped.set()
            listening = [self._unlink(path) for path in list(self._sockets)]
            self._wake()
        self._thread.join(_CLOSE_S)
        for each in (*listening, self._wake_writer):
            each.close()

    def _abandon(self) -> None:
        # In a process that was forked. The files stay, and the parent's selector has its sockets.
        listening = [each for each, _ in self._sockets.values()]
        for each in (*listening, *self._connections, self._wake_reader, self._wake_writer):
            each.close()
        self._selector.close()

    def _unlink(self, path: Path) -> socket.socket:
        # The socket goes out of sight before it stops to accept. It is left alone if it is not
        # ours any more.
        listening, identity = self._sockets.pop(path)
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if (status.st_dev, status.st_ino) == identity:
                path.unlink()
        return listening

    def _do(self, task: Callable[[], None]) -> None:
        self._todo.append(task)
        self._wake()

    def _wake(self) -> None:
        # Full: it wakes up anyway. Closed: there is nothing left to wake.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain)
        try:
            while not self._stopped.is_set():
                for key, _ in self._selector.select():
                    watched: socket.socket = key.fileobj  # type: ignore[assignment]
                    if watched.fileno() >= 0:  # else forgotten earlier in this round
                        key.data(watched)
                # What is added meanwhile is for the next round, for which it wakes us.
                for _ in range(len(self._todo)):
                    self._todo.popleft()()
        finally:
            with self._lock:
                self._stopped.set()
                listening = [self._unlink(path) for path in list(self._sockets)]
            for each in (*listening, *self._connections):
                each.close()
            self._selector.close()
            self._wake_reader.close()

    def _drain(self, reader: socket.socket) -> None:
        reader.recv(4096)

    def _watch(self, watched: socket.socket, handle: Callable[[socket.socket], None]) -> None:
        self._selector.register(watched, selectors.EVENT_READ, handle)

    def _forget(self, watched: socket.socket) -> None:
        self._connections.discard(watched)
        with contextlib.suppress(KeyError):
            self._selector.unregister(watched)
        watched.close()

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors or memory. The client still waits in the backlog, so that
            # without a pause this would spin.
            logger.warning("cannot accept a peer: %s", error)
            self._stopped.wait(_NO_RESOURCES_S)
            return
        try:
            connection.setblocking(False)
            uid = peer_uid(connection)
        except OSError:  # the peer is gone already
            connection.close()
            return
        if uid != os.geteuid() or len(self._connections) >= MAX_CONNECTIONS:
            logger.warning("refused user %d; %d are connected", uid, len(self._connections))
            connection.close()
            return
        self._connections.add(connection)
        self._watch(connection, self._converse)

    def _converse(self, connection: socket.socket) -> None:
        answer = None
        try:
            for _ in range(_NOTES_A_ROUND):
                packet, _ = _receive(connection, with_fd=False)
                if not packet:
                    self._forget(connection)
                    return
                answer, descriptor = self._answer(self._questions.decode(packet))
                if answer is not None:
                    break
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("lost a peer: %s", error)
            self._forget(connection)
            return
        except (MsgspecError, ProtocolError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("a peer sent a bad question: %s", error)
            self._send(connection, Refusal(str(error)[:200]), None)
            self._forget(connection)
            return
        if answer is not None:
            self._send(connection, answer, descriptor)

    def _send(self, connection: socket.socket, answer: Struct, fd: int | None) -> None:
        rights = array.array("i", [] if fd is None else [fd])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        try:
            flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
            connection.sendmsg([_encoder.encode(answer)], ancillary, flags)
        except OSError as error:
            # Gone, or it asks without reading the answers: not our problem to wait for.
            logger.debug("lost a peer: %s", error)
            self._forget(connection)
        finally:
            _close_all(list(rights))
