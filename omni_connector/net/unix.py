# SPDX-License-Identifier: Apache-2.0
"""Questions and answers between processes of one user, over SOCK_SEQPACKET Unix sockets.

A message is one packet of bounded size: a struct in msgpack, which the caller defines, with at
most one file descriptor beside it. Before they read a byte both sides check the user id that the
kernel reports for the other. A connection stays open, so that each side notices the other's end.
"""

import array
import contextlib
import errno
import logging
import os
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
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    TransportError,
)
from omni_connector.net import runtime
from omni_connector.net.descriptors import reason
from omni_connector.net.forks import forget_in_child
from omni_connector.net.packets import PACKAGE, Refusal, close_all, read_answer, receive
from omni_connector.net.users import other_user
from omni_connector.net.warnings import Warnings
from omni_connector.runtime.turns import WOKEN, StartTurns, TurnThread

logger = logging.getLogger("vllm.omni_connector.net")

MAX_CONNECTIONS: Final = 512
"""Most connections of a server at a time. Further ones are closed at once."""

# Seconds between two tries to connect to a socket whose queue of connections is full.
_RETRY_S: Final = 0.01

# Pause in seconds after a listening socket has failed, as it is ready again at once. Mostly, this
# process has no descriptor for a new connection.
_PAUSE_S: Final = 0.05

# Longest wait of `close` for the thread, in seconds.
_CLOSE_S: Final = 5.0

# Seconds between two looks of `catch_up` at whether the thread still runs.
_CATCH_UP_CHECK_S: Final = 0.05

# Most notes that are taken from one peer before the other peers are served.
_NOTES_A_ROUND: Final = 64
_UCRED: Final = struct.Struct("3I")
_ONE_USER: Final = "engines talk to engines of their own user only"


_encoder = Encoder()


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])


class Connection:
    """The asking side. It asks one question at a time: threads that share it must take turns.

    Args:
        path: the peer's socket.
        deadline: `time.monotonic()` by which the connection must be made.

    Raises:
        PeerUnreachableError: nobody listens there, or nobody accepts before the deadline.
        PeerRefusedError: the socket is another user's, or no engine's.
        TransportError: there are no more descriptors.
    """

    def __init__(self, path: Path, deadline: float) -> None:
        self.path = path
        runtime.check_address(path)
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise TransportError(f"cannot connect to {path}: {reason(error)}") from error
        try:
            self._connect(deadline)
            other = other_user(peer_uid(self._socket), _ONE_USER)
            if other is not None:
                raise PeerRefusedError(f"{path} belongs to {other}")
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
        """The peer's answer, and the descriptor beside it, which the caller must close.

        Any error closes the connection, so that a late answer is not taken for the answer to the
        next question.

        Args:
            answers: decodes the possible answers, which include `Refusal`.
            with_fd: whether a descriptor must come with the answer; if not, none may come.

        Raises:
            PeerUnreachableError: the peer is gone, or silent until the deadline.
            PeerRefusedError: the peer refuses to answer.
            IncompatiblePeerError: the peer has another version of this protocol.
            ProtocolError: the answer is malformed.
        """
        try:
            self._socket.settimeout(_left(deadline, self.path))
            self._socket.send(_encoder.encode(question), socket.MSG_NOSIGNAL)
        except OSError as error:
            self.close()
            raise PeerUnreachableError(f"no answer from {self.path}: {error}") from error
        except BaseException:
            self.close()
            raise
        return self.answer(answers, deadline, with_fd)

    def answer(
        self, answers: Decoder[Any], deadline: float, with_fd: bool = False
    ) -> tuple[Any, int | None]:
        """The answer to a question that was sent with `tell`; see `ask`."""
        try:
            self._socket.settimeout(_left(deadline, self.path))
            packet, descriptors = receive(self._socket, with_fd=with_fd)
            return read_answer(packet, descriptors, answers, with_fd)
        except OSError as error:
            self.close()
            raise PeerUnreachableError(f"no answer from {self.path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The descriptor, which can be read once there is an answer."""
        return self._socket.fileno()

    def tell(self, note: Struct) -> bool:
        """Send a message that has no answer; return whether it was sent. Never waits."""
        try:
            self._socket.settimeout(0)
            self._socket.send(_encoder.encode(note), socket.MSG_NOSIGNAL)
        except OSError:  # the socket is full, or the peer gone; then the next question fails
            return False
        return True

    @property
    def alive(self) -> bool:
        """Whether the peer has not closed the connection. Never waits."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLRDHUP)
        gone = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL
        return not any(events & gone for _, events in poll.poll(0))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _connect(self, deadline: float) -> None:
        while True:
            self._socket.settimeout(_left(deadline, self.path))
            code = self._socket.connect_ex(os.fspath(self.path))
            if code == 0:
                return
            # EAGAIN: the backlog is full. Connecting to a Unix socket does not wait for room there.
            if code not in (errno.EAGAIN, errno.EINTR):
                break
            time.sleep(_RETRY_S)
        message = f"cannot connect to {self.path}: {os.strerror(code)}"
        if code in (errno.EACCES, errno.EPERM, errno.EPROTOTYPE):
            raise PeerRefusedError(message)
        raise PeerUnreachableError(message)


def _left(deadline: float, path: Path) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise PeerUnreachableError(f"no answer from {path} before the deadline")
    return left


class Listener:
    """The answering side: one thread for all sockets of a connector, which never waits for a peer.

    Args:
        questions: decodes what peers may send; everything else is refused.
        answer: returns the answer, or None if there is none, and a descriptor to send with it,
            which is closed here. Called on the thread; must not block. It raises `ProtocolError`
            for what it refuses. What else it raises is logged, and the question refused.
        start: starts the thread. No message ends it: the connection of a peer that cannot be served
            is closed.

    Raises:
        TransportError: there are no more descriptors, or threads.
    """

    def __init__(
        self,
        questions: Decoder[Any],
        answer: Callable[[Any], tuple[Struct | None, int | None]],
        start: StartTurns = TurnThread,
    ) -> None:
        self._questions = questions
        self._answer = answer
        self._warnings = Warnings(logger)
        self._todo: deque[Callable[[], None]] = deque()
        self._sockets: dict[Path, tuple[socket.socket, tuple[int, int]]] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._process = os.getpid()
        with contextlib.ExitStack() as undo:
            try:
                self._selector = undo.enter_context(selectors.DefaultSelector())
                pair = socket.socketpair()
                self._wake_reader, self._wake_writer = map(undo.enter_context, pair)
                for each in pair:
                    each.setblocking(False)
                self._watch(self._wake_reader, lambda reader: reader.recv(4096))
                self._thread = start("omni-connector-shm", self._turn, sleep=self, end=self._end)
            except (OSError, RuntimeError) as error:
                raise TransportError(f"cannot answer peers: {reason(error)}") from error
            undo.pop_all()
        forget_in_child(self, Listener._abandon)

    @property
    def alive(self) -> bool:
        """Whether the thread answers questions."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def add(self, path: Path) -> None:
        """Listen at a path.

        Raises:
            TransportError: somebody listens there already, or this listener is closed.
        """
        listening = runtime.listen(path)
        try:
            identity = runtime.identity(path)
        except OSError as error:
            listening.close()
            raise TransportError(f"somebody removed the socket {path}: {error}") from error
        with self._lock:
            if not self._stopped.is_set():
                self._sockets[path] = listening, identity
                self._do(lambda: self._watch(listening, self._accept))
                return
        runtime.remove_own(path, identity)
        listening.close()
        raise TransportError(f"cannot listen at {path}: the connector is closed")

    def remove(self, path: Path) -> None:
        """Stop listening at a path; connections made there stay. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if path in self._sockets:
                listening = self._unlink(path)
                self._do(lambda: self._forget(listening))

    def catch_up(self, timeout: float) -> None:
        """Wait until the thread has read what peers sent before this call, or `timeout` seconds.

        Not to be called on the thread.
        """
        noted = threading.Event()
        # The current round may have begun before this call; the round after it has not.
        self._do(lambda: self._do(noted.set))
        limit = time.monotonic() + timeout
        while self.alive and time.monotonic() < limit:
            if noted.wait(min(_CATCH_UP_CHECK_S, timeout)):
                return

    def close(self) -> None:
        """Remove all sockets, hang up, stop the thread. Idempotent; waits 5 s at most."""
        if os.getpid() != self._process:  # the sockets are the parent's
            return
        with self._lock:
            self._stopped.set()
            listening = [self._unlink(path) for path in list(self._sockets)]
            self.wake()
        self._thread.join(_CLOSE_S)
        for each in (*listening, self._wake_writer):
            each.close()

    def wait(self, seconds: float) -> None:
        """The thread waits between its turns; see `Sleep`."""
        self._selector.select(None if seconds == WOKEN else seconds)

    def wake(self) -> None:
        """Make the thread take a turn; see `Sleep`."""
        # If the pipe is full, the thread wakes anyway; if it is closed, there is no thread.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _abandon(self) -> None:
        # In a process that was forked: the parent goes on with the files and its selector.
        listening = [each for each, _ in self._sockets.values()]
        for each in (*listening, *self._connections, self._wake_reader, self._wake_writer):
            each.close()
        self._selector.close()

    def _unlink(self, path: Path) -> socket.socket:
        # The path is removed while the socket still accepts, so that nobody is refused. If the
        # path is another socket's by now, it is left alone.
        listening, identity = self._sockets.pop(path)
        runtime.remove_own(path, identity)
        return listening

    def _do(self, task: Callable[[], None]) -> None:
        self._todo.append(task)
        self.wake()

    def _turn(self) -> float | None:
        for key, _ in self._selector.select(0):
            watched: socket.socket = key.fileobj  # type: ignore[assignment]
            if watched.fileno() >= 0:  # it may have been closed earlier in this round
                self._guarded(key.data, watched)
        for _ in range(len(self._todo)):  # those added meanwhile are for the next round
            self._guarded(self._todo.popleft())
        return None if self._stopped.is_set() else WOKEN

    def _guarded(self, call: Callable[..., object], *watched: socket.socket) -> None:
        """Make a call that must not end the thread. If it raises, its connection is closed."""
        try:
            call(*watched)
        except Exception:
            logger.exception("A peer could not be served, and is hung up on; please report it")
            for each in watched:
                if each in self._connections:
                    self._forget(each)
                else:  # a socket that listens is ready again at once
                    self._stopped.wait(_PAUSE_S)

    def _end(self) -> None:
        with self._lock:
            self._stopped.set()
            listening = [self._unlink(path) for path in list(self._sockets)]
        self._selector.close()
        for each in (*listening, *self._connections, self._wake_reader):
            each.close()

    def _watch(self, watched: socket.socket, handle: Callable[[socket.socket], object]) -> None:
        self._selector.register(watched, selectors.EVENT_READ, handle)

    def _forget(self, watched: socket.socket) -> None:
        """Watch a socket no more, and close it. Idempotent."""
        self._connections.discard(watched)
        if watched.fileno() >= 0:  # the selector knows no socket that was closed
            with contextlib.suppress(KeyError):
                self._selector.unregister(watched)
            watched.close()

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # There are no more descriptors, or no memory. The client stays in the backlog, so
            # without a pause this thread would spin.
            self._warnings.warn("Cannot accept a peer: %s", reason(error))
            self._stopped.wait(_PAUSE_S)
            return
        try:
            connection.setblocking(False)
            uid = peer_uid(connection)
        except BaseException as error:
            connection.close()  # whoever keeps the error keeps the socket
            if isinstance(error, OSError):  # the peer is gone already
                return
            raise
        peers = len(self._connections)
        other = other_user(uid, _ONE_USER)
        if other is not None:
            self._warnings.warn("Refused a peer of %s", other)
            connection.close()
            return
        if peers >= MAX_CONNECTIONS:
            self._warnings.warn("Refused a peer: %d peers are connected, the limit", peers)
            connection.close()
            return
        self._connections.add(connection)
        self._watch(connection, self._converse)

    def _converse(self, connection: socket.socket) -> None:
        answer = None
        try:
            for _ in range(_NOTES_A_ROUND):
                packet, _ = receive(connection, with_fd=False)
                if not packet:
                    self._forget(connection)
                    return
                answer, descriptor = self._answered(self._questions.decode(packet))
                if answer is not None:
                    break
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("lost a peer: %s", error)
            self._forget(connection)
            return
        except (MsgspecError, ProtocolError, UnicodeDecodeError, RecursionError) as error:
            self._warnings.warn("A peer sent a malformed question: %s", error)
            self._send(connection, Refusal(str(error)[:200], package=PACKAGE), None)
            self._forget(connection)
            return
        if answer is not None:
            self._send(connection, answer, descriptor)

    def _answered(self, question: Any) -> tuple[Struct | None, int | None]:
        try:
            return self._answer(question)
        except (OSError, ProtocolError):
            raise
        except Exception:  # the other questions are answered all the same
            logger.exception("A question of a peer could not be answered; please report it")
            return Refusal("the answer failed; the log there says why", package=PACKAGE), None

    def _send(self, connection: socket.socket, answer: Struct, fd: int | None) -> None:
        rights = array.array("i", [] if fd is None else [fd])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        try:
            flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
            connection.sendmsg([_encoder.encode(answer)], ancillary, flags)
        except OSError as error:
            # The peer is gone, or asks without reading the answers; we do not wait for it.
            logger.debug("lost a peer: %s", error)
            self._forget(connection)
        finally:
            close_all(list(rights))
