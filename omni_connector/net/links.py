# SPDX-License-Identifier: Apache-2.0
"""The sockets of a control channel: it listens, connects to peers and waits with them."""

import os
import select
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import zmq

from omni_connector.errors import TransportError
from omni_connector.net.descriptors import reason
from omni_connector.net.forks import close_bound_to, forget_in_child
from omni_connector.net.keys import ClusterKey
from omni_connector.net.listener import TcpListener
from omni_connector.net.peers import HostPort
from omni_connector.net.runtime import appearing, identity, remove_own
from omni_connector.net.zeromq import Link, Socket, make_context, prepare
from omni_connector.runtime.turns import WOKEN, Sleep


class Poller(Sleep, Protocol):
    """Waits for sockets: a wait also ends when one of them can be read."""

    def register(self, socket: Any) -> None:
        """Wait for this socket, too."""

    def unregister(self, socket: Any) -> None:
        """Wait for this socket no more."""

    def ready(self) -> dict[Any, int]:
        """The sockets that can be read now."""

    def used(self, socket: Any) -> None:
        """Something was sent on this socket. To be called after each send."""

    def close(self) -> None:
        """Wait no more. Idempotent."""


class Sockets(Protocol):
    """Opens the sockets of one channel.

    Once the channel's thread runs, only that thread may use this, except for `poller.wake`.
    """

    poller: Poller

    def serve(self, path: Path) -> Any:
        """A ROUTER at a Unix socket, which appears at `path` once it accepts.

        Raises:
            zmq.ZMQError: the socket cannot be bound.
            TransportError: another engine listens there, or the folder cannot be locked.
        """

    def serve_tcp(
        self, address: HostPort, key: ClusterKey, clock: Callable[[], float]
    ) -> TcpListener:
        """A listener at a TCP address.

        Raises:
            ConfigError: it cannot listen at the address.
        """

    def exists(self, path: str) -> bool:
        """Whether there is a socket at a path."""

    def link(self, target: str | HostPort, key: ClusterKey | None) -> Any:
        """A connection to a serving peer; see `Link`.

        Raises:
            zmq.ZMQError: the target is no address, or there are no more sockets.
        """

    def close(self) -> None:
        """Close all sockets, and remove the path unless it is another's by now. Idempotent."""


class ZmqSockets:
    """Sockets of ZeroMQ; see `Sockets`.

    Raises:
        TransportError: there are too few descriptors.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._identity = (0, 0)
        self._listener: TcpListener | None = None
        self.poller: Poller = ZmqPoller()
        try:
            self._context = make_context()
        except BaseException:
            self.poller.close()
            raise

    def serve(self, path: Path) -> Socket:
        router = self._context.socket(zmq.ROUTER)
        prepare(router)
        hidden = _hidden(path)
        taken = f"another engine listens at {path}; give each engine its own engine_id"
        with appearing(path, hidden, taken):
            router.bind(f"ipc://{hidden}")
            self._identity = identity(hidden)
        self._path = path
        forget_in_child(self, ZmqSockets._abandon)
        return router

    def _abandon(self) -> None:
        # In a process that was forked, in which ZeroMQ has no threads.
        if self._path is not None:
            close_bound_to(str(_hidden(self._path)))

    def serve_tcp(
        self, address: HostPort, key: ClusterKey, clock: Callable[[], float]
    ) -> TcpListener:
        self._listener = TcpListener(self._context, address, key, clock)
        return self._listener

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def link(self, target: str | HostPort, key: ClusterKey | None) -> Link:
        return Link(self._context, target, key)

    def close(self) -> None:
        path, self._path = self._path, None
        try:
            if path is not None:  # while the socket is open, no other file has its inode's number
                remove_own(path, self._identity)
        finally:
            self._context.destroy(linger=0)
            if self._listener is not None:
                self._listener.close()


class ZmqPoller:
    """Waits for sockets of ZeroMQ; see `Poller`. What a turn costs grows with the sockets that were
    used, and not with all that there are.

    The descriptor of such a socket can be read when libzmq has news for the socket. To look at the
    socket's events takes these news, and so does a send, which tells nobody of them. So a socket
    whose events are not known since its last use is looked at before each wait.

    Raises:
        TransportError: there are no more descriptors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        with ExitStack() as undo:
            try:
                self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                undo.callback(os.close, self._fd)
                self._epoll = undo.enter_context(select.epoll())
                self._epoll.register(self._fd, select.EPOLLIN)
            except OSError as error:
                raise TransportError(f"cannot wait for sockets: {reason(error)}") from error
            self._files = undo.pop_all()
        self._sockets: dict[int, Socket] = {}  # by the descriptor
        self._unsettled: dict[Socket, None] = {}

    def register(self, socket: Socket) -> None:
        descriptor = _descriptor(socket)
        try:
            self._epoll.register(descriptor, select.EPOLLIN)
        except OSError as error:
            raise zmq.ZMQError(error.errno) from error
        self._sockets[descriptor] = socket
        self._unsettled[socket] = None

    def unregister(self, socket: Socket) -> None:
        descriptor = _descriptor(socket)
        self._unsettled.pop(socket, None)
        if self._sockets.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def ready(self) -> dict[Any, int]:
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._fd:
                os.eventfd_read(descriptor)
            else:
                self._unsettled[self._sockets[descriptor]] = None
        return self._readable()

    def _readable(self) -> dict[Any, int]:
        """The unsettled sockets that can be read. The others are settled."""
        readable: dict[Any, int] = {
            socket: zmq.POLLIN
            for socket in self._unsettled
            if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        }
        self._unsettled = dict.fromkeys(readable)
        return readable

    def used(self, socket: Socket) -> None:
        self._unsettled[socket] = None

    def wait(self, seconds: float) -> None:
        if not self._readable():
            self._epoll.poll(None if seconds == WOKEN else seconds)

    def wake(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        with self._lock:  # another file may have this number from now on
            self._fd = -1
        self._files.close()


def _descriptor(socket: Socket) -> int:
    """The descriptor that can be read when there is news for the socket."""
    return int(socket.getsockopt(zmq.FD))


def _hidden(path: Path) -> Path:
    """Where a socket is bound before it appears at `path`: its address to the kernel."""
    return path.with_name(f".{path.name}")
