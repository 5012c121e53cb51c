# SPDX-License-Identifier: Apache-2.0
"""ZeroMQ sockets between engines: options, connections, and how their end is noticed.

On one host they are Unix sockets, between hosts TCP. A TCP connection that is cut gives no sign,
so both ends send heartbeats: each notices within 9 seconds, even if the connection was idle.
"""

import os
from contextlib import ExitStack
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from omni_connector.errors import TransportError
from omni_connector.net.descriptors import reason, require_spare
from omni_connector.net.keys import ClusterKey
from omni_connector.net.peers import HostPort

MAX_MESSAGE_BYTES: Final = 8 << 20
"""Longest message that is taken, in bytes. The longest one leases the slots of a long prompt."""

MAX_QUEUED: Final = 1 << 14
"""Most messages that wait for one peer that does not read them. Further ones are lost."""

HEARTBEAT_MS: Final = 3000
"""Time between two heartbeats over TCP, in ms."""

HEARTBEAT_TIMEOUT_MS: Final = 6000
"""Time without an answer to a heartbeat after which a connection counts as lost, in ms."""

HANDSHAKE_MS: Final = 5000
"""Longest time for a stranger on TCP to prove that it has the key, in ms."""

CONNECT_MS: Final = 5000
"""Longest time to connect over TCP, in ms."""

IO_THREADS: Final = 2
"""Threads of a context: one for Unix sockets, one for TCP."""

# Descriptors of a context and a socket: two for each I/O thread, two for the thread that ends
# sockets, two for the one that waits for that, and two for the socket.
_CONTEXT_FILES: Final = 2 * (IO_THREADS + 2) + 2
# Bits of ZMQ_AFFINITY: strangers on TCP take no time from peers on this host.
_UNIX_IO: Final = 1
_TCP_IO: Final = 2

_GONE: Final = zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED
_REFUSED: Final = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def make_context() -> Context:
    """A context with an I/O thread for Unix sockets and one for TCP, which run already.

    Raises:
        TransportError: there are too few file descriptors for it.
    """
    # libzmq ends the process where one of its threads gets no descriptor. They start with the
    # first socket, so one is made now, before descriptors may have become few.
    require_spare(_CONTEXT_FILES, "a context of ZeroMQ")
    context: Context = zmq.Context(IO_THREADS)
    try:
        context.socket(zmq.PAIR).close(0)
    except zmq.ZMQError as error:
        context.destroy(0)
        raise TransportError(f"cannot make a context of ZeroMQ: {reason(error)}") from error
    return context


def prepare(socket: Socket) -> None:
    """Set the options that all sockets have in common."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)  # a ROUTER drops messages above this silently
    socket.setsockopt(zmq.AFFINITY, _UNIX_IO)


def prepare_tcp(socket: Socket, address: HostPort, key: ClusterKey) -> None:
    """Set, after `prepare`, what a TCP socket needs: heartbeats, and our side of CURVE."""
    socket.setsockopt(zmq.AFFINITY, _TCP_IO)
    socket.setsockopt(zmq.IPV6, ":" in address.host)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)


class Link:
    """A connection to a serving peer: a DEALER, and a monitor that reports its end.

    Args:
        context: makes the socket.
        target: path of a Unix socket, or an IP address and port.
        key: the key that both sides must hold; not used for Unix sockets.

    Attributes:
        refused: whether the peer ended the connection, as `why_lost` has said, before both had
            shown that they have the key. That is how a peer with another key answers, as one does
            that ends just then.

    Raises:
        ValueError: there is no key for TCP.
        zmq.ZMQError: the target is no address, or there are no more sockets.
    """

    def __init__(self, context: Context, target: str | HostPort, key: ClusterKey | None) -> None:
        self._process = os.getpid()
        self.refused = False
        with ExitStack() as undo:
            self.socket = context.socket(zmq.DEALER)
            undo.callback(self.socket.close, 0)
            prepare(self.socket)
            if isinstance(target, HostPort):
                if key is None:
                    raise ValueError("over TCP nobody is asked without a key")
                prepare_tcp(self.socket, target, key)
                self.socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
                self.socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
                address, events = f"tcp://{target}", _GONE | _REFUSED
            else:
                address, events = f"ipc://{target}", _GONE
            self.monitor = self.socket.get_monitor_socket(events)
            undo.callback(self.monitor.close, 0)
            undo.callback(self.socket.disable_monitor)
            self.socket.connect(address)
            self._open = undo.pop_all()

    def why_lost(self) -> str | None:
        """Why the connection ended, or was not made; None while neither has happened."""
        try:
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return None
        if not event & _REFUSED:
            return "is gone"
        self.refused = True
        return "does not show that it has our key (of key_file, else of the runtime folder)"

    def close(self) -> None:
        """Close the connection; what was not sent yet is lost. Idempotent.

        Does nothing in another process, which has none of ZeroMQ's threads.
        """
        if os.getpid() == self._process:
            self._open.close()
