# SPDX-License-Identifier: Apache-2.0
"""The TCP listener of a serving engine, to which anybody may connect.

For each connection that speaks CURVE libzmq asks us whether its key is admitted (ZAP, ZeroMQ
RFC 27); all others it refuses. A connection that is not admitted within `HANDSHAKE_MS` is closed,
and at most `MAX_CONNECTIONS` are kept at once, so that strangers can use up neither memory nor
file descriptors. An admitted peer that sends an endless message is cut off, too: libzmq would
buffer all of it.
"""

import contextlib
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from omni_connector.errors import ConfigError, PeerUnreachableError, TransportError
from omni_connector.net.descriptors import NO_MORE, reason, require_spare
from omni_connector.net.forks import close_bound_to, forget_in_child
from omni_connector.net.keys import ClusterKey
from omni_connector.net.peers import HostPort, is_loopback
from omni_connector.net.resolver import resolve
from omni_connector.net.warnings import Warnings
from omni_connector.net.zeromq import Context, Socket, prepare, prepare_tcp

logger = logging.getLogger("vllm.omni_connector.net")

MAX_CONNECTIONS: Final = 1024
MAX_REQUEST_BYTES: Final = 1 << 18  # handshakes are the longest: some 100 bytes a layer
MAX_REQUESTS: Final = 8
MAX_UNFINISHED_BYTES: Final = 4 * MAX_REQUEST_BYTES

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_ZAP_DOMAIN: Final = b"omni-control"
_AT_ONCE: Final = 256
_BIND_FILES: Final = 4
_LOOK_S: Final = 0.5
# Heartbeats are no messages: some 50 bytes every 3 seconds.
_IDLE_BYTES_PER_S: Final = 1024
# Of Linux' struct tcp_info.
_BYTES_RECEIVED: Final = struct.Struct("=128xQ")


class TcpListener:
    """A ROUTER at a TCP port, which admits only peers that hold the key.

    It may be made on any thread; afterwards one thread uses it.

    Args:
        context: makes the sockets; only one listener of a context can have a key.
        address: where to listen; with port 0 the system chooses a port.
        key: the key that peers must hold.
        clock: monotonic seconds.

    Attributes:
        address: where it listens, with the port that was chosen.
        bound: the IP address and port that the kernel knows.
        router: carries the messages.

    Raises:
        ConfigError: it cannot listen there.
        TransportError: there are no more descriptors, or sockets.
    """

    def __init__(
        self,
        context: Context,
        address: HostPort,
        key: ClusterKey,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._warnings = Warnings(logger, clock)
        self._next_look = clock()
        self._connections: dict[int, _Connection] = {}
        self._limit = _connection_limit()
        try:
            self._listen(context, address, key)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot listen at {address}: {reason(error)}") from error
        forget_in_child(self, lambda listener: close_bound_to(listener.bound))

    def _listen(self, context: Context, address: HostPort, key: ClusterKey) -> None:
        self._admission = _Admission(context, key, self._warn)
        self.router = context.socket(zmq.ROUTER)
        prepare(self.router)
        bound = local_address(address)
        prepare_tcp(self.router, bound, key)
        self.router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.router.setsockopt(zmq.RCVHWM, MAX_REQUESTS)
        self.router.setsockopt(zmq.CURVE_SERVER, True)
        self.router.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self.router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, True)  # no answer is a refusal
        self._monitor = self.router.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        # libzmq ends the process where it has no descriptor with which to look for the address.
        require_spare(_BIND_FILES, f"listening at {address}")
        try:
            self.router.bind(f"tcp://{bound}")
        except zmq.ZMQError as error:
            if error.errno in NO_MORE:
                raise
            raise ConfigError(
                f"listen: cannot listen at {address}: {error.strerror}; it must be an address of "
                "this host, and a port that nobody has, or 0"
            ) from error
        port = int(self.router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.bound = (bound.host, port)
        self.address = HostPort(address.host, port)

    @property
    def watched(self) -> list[Socket]:
        """Sockets, besides the router, that `attend` must be told of when they can be read."""
        return [self._monitor, self._admission.socket]

    def receive(self) -> list[bytes]:
        """The frames of the next message; the first is the name of its connection.

        Raises:
            zmq.Again: there is none.
        """
        frames = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
        connection = self._connections.get(frames[-1].get(zmq.SRCFD))
        if connection is not None:
            connection.finished = True
        return [frame.bytes for frame in frames]

    def attend(self, ready: dict[Any, int]) -> None:
        """Admit or refuse new connections; close those above the limit, and endless messages.

        To be called about twice a second, whether or not anything is ready.
        """
        if self._admission.socket in ready:
            self._admission.answer()
        if self._monitor in ready:
            with contextlib.suppress(zmq.Again):
                for _ in range(_AT_ONCE):
                    self._count(recv_monitor_message(self._monitor, zmq.NOBLOCK))
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + _LOOK_S
            for number, connection in self._connections.items():
                self._look_at(number, connection)

    def _count(self, event: Any) -> None:
        number = int(event["value"])
        if event["event"] == zmq.Event.DISCONNECTED:
            self._connections.pop(number, None)
            return
        self._connections[number] = _Connection(self._clock())
        if len(self._connections) > self._limit:
            self._shut(number)
            self._warn(f"there are {self._limit} connections already; a further one is refused")

    def _look_at(self, number: int, connection: "_Connection") -> None:
        now, received = self._clock(), 0
        with self._file(number) as file:
            if file is not None:
                info = file.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
                if len(info) == _BYTES_RECEIVED.size:  # kernels before 4.1 tell less
                    (received,) = _BYTES_RECEIVED.unpack(info)
        if connection.finished:
            connection.finished, connection.since, connection.received = False, now, received
        idle = _IDLE_BYTES_PER_S * (now - connection.since)
        if received - connection.received > MAX_UNFINISHED_BYTES + idle:
            connection.since, connection.received = now, received
            self._shut(number)
            self._warn("a peer sends a message that does not end, and is cut off")

    def _shut(self, number: int) -> None:
        # libzmq has no call that closes one connection.
        with self._file(number) as file:
            if file is not None:
                file.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _file(self, number: int) -> Iterator[socket.socket | None]:
        # The number may be another file's by now. So the file is duplicated, then looked at, and
        # used only if it is a connection to our port.
        try:
            duplicate = os.dup(number)
        except OSError:  # closed already
            yield None
            return
        try:
            file = socket.socket(fileno=duplicate)
        except OSError:  # no socket
            os.close(duplicate)
            yield None
            return
        with file, contextlib.suppress(OSError):  # its peer may have closed the connection
            yield file if file.getsockname()[:2] == self.bound else None

    def _warn(self, text: str) -> None:
        self._warnings.warn("Control channel at %s: %s", self.address, text)


@dataclass(slots=True)
class _Connection:
    """How much a connection has received when its last whole message, or itself, came.

    Attributes:
        since: when that was.
        received: bytes that had been received by then.
        finished: whether a whole message came since we last looked.
    """

    since: float
    received: int = 0
    finished: bool = False


class _Admission:
    """The ZAP handler of a context: it admits peers that hold our key."""

    def __init__(self, context: Context, key: ClusterKey, warn: Callable[[str], None]) -> None:
        self._key = z85.decode(key.public)
        self._warn = warn
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer all questions that libzmq has asked. Never waits."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_AT_ONCE):
                question = self.socket.recv_multipart(zmq.NOBLOCK)
                self.socket.send_multipart(self._decide(question), zmq.NOBLOCK)

    def _decide(self, question: list[bytes]) -> list[bytes]:
        _, request, _, host, _, _, *credentials = question
        # libzmq has checked that the peer holds the secret key to this public key.
        admitted = credentials == [self._key]
        if not admitted:
            where = host.decode("ascii", "replace")
            self._warn(f"{where} has another key than that of our key_file, and is refused")
        status = b"200" if admitted else b"400"
        return [_ZAP_VERSION, request, status, b"", b"", b""]


def local_address(address: HostPort) -> HostPort:
    """The address to bind for the one that peers are told.

    Raises:
        ConfigError: its name is unknown, or means loopback on this host.
    """
    try:
        bound = resolve(address)
    except PeerUnreachableError as error:
        raise ConfigError(f"listen: {error}") from error
    if bound != address and is_loopback(bound.host):
        raise ConfigError(
            f"listen: on this host {address.host!r} means {bound.host}, which no other host can "
            "reach; name the address that peers shall use"
        )
    return bound


def _connection_limit() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, files // 4)
