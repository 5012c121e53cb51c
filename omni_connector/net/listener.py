# SPDX-License-Identifier: Apache-2.0
"""The TCP listener of a serving engine, to which anybody may connect.

For each connection that speaks CURVE libzmq asks us whether its key is admitted (ZAP, ZeroMQ
RFC 27); all others it refuses. A connection that is not admitted within `HANDSHAKE_MS` is closed,
and at most `MAX_CONNECTIONS` are kept at once, so that strangers can use up neither memory nor
file descriptors. An admitted peer that sends an endless message is cut off, too: libzmq would
buffer all of it.

libzmq accepts whoever comes, and unbinding its listener would end all connections of it. So we hold
the listening socket, too: at the limit a filter on it has the kernel drop who else wants to
connect, until there is room.
"""

import contextlib
import ctypes
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
"""Most connections over TCP at a time. Of descriptors they take a quarter at most."""

MAX_REQUEST_BYTES: Final = 1 << 18
"""Longest message of a peer, in bytes. Handshakes are the longest: some 100 bytes a layer."""

MAX_REQUESTS: Final = 8
"""Most messages of one peer that wait to be handled."""

MAX_UNFINISHED_BYTES: Final = 4 * MAX_REQUEST_BYTES
"""Most bytes from a connection without a whole message. It is closed beyond that."""

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_ZAP_DOMAIN: Final = b"omni-control"

# Most events that are handled at a time, before the other sockets have their turn.
_AT_ONCE: Final = 256

# Descriptors that listening takes.
_BIND_FILES: Final = 6

# Connections that wait to be accepted. Those of a burst are accepted before we can close the door.
_BACKLOG: Final = 32

# Seconds between two looks at how much each connection has sent.
_LOOK_S: Final = 0.5

# Heartbeats are no messages: some 50 bytes every 3 seconds.
_IDLE_BYTES_PER_S: Final = 1024
# Of Linux' struct tcp_info.
_BYTES_RECEIVED: Final = struct.Struct("=128xQ")
# Of Linux' asm-generic/socket.h, which Python does not name.
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
# A program of classic BPF of one instruction (BPF_RET | BPF_K): keep 0 bytes of each packet.
_DROP: Final = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
_DROP_ALL: Final = struct.pack("@HP", 1, ctypes.addressof(_DROP))


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
        self._open = True
        with contextlib.ExitStack() as undo:
            try:
                self._listen(context, address, key, undo)
            except (zmq.ZMQError, OSError) as error:
                raise TransportError(f"cannot listen at {address}: {reason(error)}") from error
            self._files = undo.pop_all()
        forget_in_child(self, TcpListener._abandon)

    def _listen(
        self, context: Context, address: HostPort, key: ClusterKey, undo: contextlib.ExitStack
    ) -> None:
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
        # libzmq ends the process where one of its threads gets no descriptor.
        require_spare(_BIND_FILES, f"listening at {address}")
        # Two that are always there, so that connections can be shut when there are no others.
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, self._null)
        self._spare = os.dup(self._null)
        undo.callback(os.close, self._spare)
        self._listening = undo.enter_context(_bound_socket(address, bound))
        self.bound = self._listening.getsockname()[:2]
        self.address = HostPort(address.host, self.bound[1])
        handed_over = os.dup(self._listening.fileno())
        try:
            self.router.setsockopt(zmq.USE_FD, handed_over)  # libzmq closes it
            self.router.bind(f"tcp://{HostPort(*self.bound)}")
        except zmq.ZMQError:
            os.close(handed_over)
            raise

    def close(self) -> None:
        """Let go of the port, once the context has closed the router. Idempotent."""
        self._files.close()

    def _abandon(self) -> None:
        # In a process that was forked. Nothing may close these numbers once more.
        if self._listening.fileno() < 0:  # it is closed: the numbers are other files' by now
            return
        self._files.pop_all()
        self._listening.detach()
        close_bound_to(self.bound)
        os.close(self._spare)
        os.close(self._null)

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
        """Admit or refuse new connections, keep out the ones above the limit, end endless messages.

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
            if not self._open and len(self._connections) < self._limit:
                self._let_in(True)

    def _count(self, event: Any) -> None:
        number = int(event["value"])
        if event["event"] == zmq.Event.DISCONNECTED:
            self._connections.pop(number, None)
            return
        self._connections[number] = _Connection(self._clock())
        if self._open and len(self._connections) >= self._limit:
            self._let_in(False)
        if len(self._connections) > self._limit:  # it was accepted before the door was closed
            self._shut(number)

    def _let_in(self, open_: bool) -> None:
        self._open = open_
        with contextlib.suppress(OSError):  # a sandbox may have no filters; then all are shut
            if open_:
                self._listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            else:
                self._listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _DROP_ALL)
        if not open_:
            self._warn(f"there are {self._limit} connections already; further ones have to wait")

    def _look_at(self, number: int, connection: "_Connection") -> None:
        now = self._clock()
        received = 0
        with self._file(number) as file:
            if file is not None:
                info = file.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
                if len(info) == _BYTES_RECEIVED.size:  # kernels before 4.1 tell less
                    (received,) = _BYTES_RECEIVED.unpack(info)
        if connection.finished:
            connection.finished = False
            connection.since = now
            connection.received = received
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
        # used only if it is a connection to our port. The duplicate takes the place of `_spare`, as
        # there may be no other descriptor.
        try:
            os.dup2(number, self._spare, inheritable=False)
        except OSError:  # closed already
            yield None
            return
        try:
            file = self._connection_of(self._spare)
            try:
                with contextlib.suppress(OSError):  # its peer may have closed the connection
                    yield file
            finally:
                if file is not None:
                    file.detach()
        finally:
            os.dup2(self._null, self._spare, inheritable=False)

    def _connection_of(self, descriptor: int) -> socket.socket | None:
        try:
            file = socket.socket(fileno=descriptor)
        except OSError:  # no socket
            return None
        if file.getsockname()[:2] == self.bound:
            return file
        file.detach()
        return None

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


def check_listen(address: HostPort) -> None:
    """Listen at an address for a moment.

    Raises:
        ConfigError: as `TcpListener`.
        OSError: there are no more descriptors.
    """
    _bound_socket(address, local_address(address)).close()


def _bound_socket(address: HostPort, bound: HostPort) -> socket.socket:
    """A socket that listens at `bound`, for peers that are told `address`.

    Raises:
        ConfigError: it cannot listen there.
        OSError: there are no more descriptors.
    """
    family = socket.AF_INET6 if ":" in bound.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind(bound)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno in NO_MORE:
            raise
        raise ConfigError(
            f"listen: cannot listen at {address}: {error.strerror}; it must be an address of "
            "this host, and a port that nobody has, or 0"
        ) from error
    return listening


def _connection_limit() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, files // 4)
