# SPDX-License-Identifier: Apache-2.0
"""The control channel: one thread that owns every control socket of an engine.

The engine's thread only appends to a deque and wakes the thread; answers come back as futures
that it looks at when it likes. ZeroMQ carries the frames, so that an address may be `ipc://`
or `tcp://`; a peer that is gone shows at once as a disconnect event of its socket.
"""

import contextlib
import logging
import math
import os
import socket as unix_socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from omni_connector.control.client import Grant, PeerSession
from omni_connector.control.messages import (
    MAX_MESSAGE_BYTES,
    Fingerprint,
    Release,
    encode,
)
from omni_connector.control.messages import (
    Request as ControlRequest,
)
from omni_connector.control.prompt import Prompt
from omni_connector.control.server import ControlServer
from omni_connector.errors import OmniError, PeerUnreachableError, TransportError
from omni_connector.transports.runtime import locked

logger = logging.getLogger(__name__)

TICK_S: Final = 0.5
CLOSE_S: Final = 5.0
FORGET_REFUSAL_S: Final = 5.0
MAX_QUEUED: Final = 1 << 14
_GONE = zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED


@dataclass(slots=True)
class _Peer:
    session: PeerSession
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    failed_at: float = 0.0


class ControlChannel:
    """Serves and asks on the control channel, in a thread of its own.

    Args:
        fingerprint: what we tell peers that we ask.
        server: answers peers that ask us; None where this engine hands nothing off.
        listen: path of the Unix socket to serve on; None where `server` is.
        on_tick: called about twice a second on the channel's thread.
        on_peer_gone: called on the channel's thread when a peer turns out dead.
        clock: seconds, monotonic.

    Raises:
        zmq.ZMQError: the socket cannot be bound.
        TransportError: another engine listens there, or the folder cannot be locked.
    """

    def __init__(
        self,
        *,
        fingerprint: Fingerprint,
        server: ControlServer | None = None,
        listen: Path | None = None,
        on_tick: Callable[[], object] = lambda: None,
        on_peer_gone: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fingerprint = fingerprint
        self._server = server
        self._listen = listen
        self._on_tick = on_tick
        self._on_peer_gone = on_peer_gone
        self._clock = clock
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._ended = False
        self._post_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        try:
            if server is not None and listen is not None:
                self._router = self._bind(listen)
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            raise
        self._thread = threading.Thread(target=self._run, name="omni-control", daemon=True)
        self._thread.start()

    def _bind(self, path: Path) -> "zmq.Socket[bytes]":
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.SNDHWM, MAX_QUEUED)  # what exceeds it is lost without a word
        # A socket is visible only once it accepts, so that a peer may take "refused" for dead;
        # under the lock nobody sweeps it before.
        hidden = path.with_name(f".{path.name}")
        with locked(path.parent):
            if _accepts(path):
                raise TransportError(
                    f"another engine listens at {path}; give each engine its own engine_id"
                )
            router.bind(f"ipc://{hidden}")
            os.rename(hidden, path)
        return router

    def claim(
        self,
        address: str,
        token: bytes,
        prompt: Prompt,
        *,
        epoch: bytes,
        hash_id: str,
        timeout: float,
    ) -> "Future[Grant]":
        """Ask the peer at `address` for a hand-off; returns at once.

        The future gets a `Grant`, or an `OmniError` before `timeout` seconds are over. Cancel
        it to give up: a grant that comes all the same is given back.
        """
        future: Future[Grant] = Future()
        deadline = self._clock() + timeout

        def run() -> None:
            closed = PeerUnreachableError("the control channel is closed")
            peer = closed if self._closing else self._peer(address)
            if isinstance(peer, OmniError):
                if future.set_running_or_notify_cancel():
                    future.set_exception(peer)
                return
            if future.cancelled():  # nobody else will come for these slots
                self._send(peer, [Release(token)])
                return
            self._send(
                peer,
                peer.session.claim(
                    token, prompt, epoch=epoch, hash_id=hash_id, deadline=deadline, future=future
                ),
            )

        self._post(run)
        return future

    def release(self, address: str, token: bytes) -> None:
        """Tell the peer that the hand-off is done with; returns at once, lost if it is gone."""

        def run() -> None:
            peer = None if self._closing else self._peers.get(address)
            if peer is not None and peer.session.failure is None:
                self._send(peer, [Release(token)])

        self._post(run)

    def recheck(self) -> None:
        """Have the server look at its parked claims again; returns at once."""
        if self._server is not None and self._server.has_parked:
            self._post(lambda: None)

    def close(self) -> None:
        """Stop the thread and take the socket away. Idempotent, within `CLOSE_S` seconds."""
        with self._close_lock:
            self._closing = True
            self._post(lambda: None)
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive() and self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _post(self, command: Callable[[], None]) -> None:
        with self._post_lock:
            if not self._ended:
                self._commands.append(command)
                os.eventfd_write(self._wake_fd, 1)
                return
        command()  # without the thread all that a command does is fail its future

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            logger.exception("The control channel stopped: no hand-offs until this engine restarts")
        finally:
            self._closing = True
            with self._post_lock:
                self._ended = True
            self._end()

    def _end(self) -> None:
        while self._commands:
            self._commands.popleft()()
        for peer in self._peers.values():
            peer.session.fail(PeerUnreachableError("the control channel is closed"))
        try:
            if self._listen is not None and self._router is not None:
                self._listen.unlink(missing_ok=True)
        finally:
            self._context.destroy(linger=0)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        self._poller = poller
        next_tick = self._clock()
        while not self._closing:
            wait = min([next_tick, *(p.session.deadline() for p in self._peers.values())])
            ready = dict(poller.poll(math.ceil(max(0.0, wait - self._clock()) * 1000)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while self._commands:
                self._commands.popleft()()
            if self._router is not None and self._router in ready:
                self._serve(self._router)
            for peer in list(self._peers.values()):
                self._attend(peer, ready)
            if self._clock() >= next_tick:
                next_tick = self._clock() + TICK_S
                _call(self._on_tick)
            self._recheck()

    def _serve(self, router: "zmq.Socket[bytes]") -> None:
        assert self._server is not None
        for _ in range(256):  # then give the other sockets a turn
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                continue
            for connection, reply in self._server.receive(frames[0], frames[1]):
                self._reply(router, connection, encode(reply))

    def _recheck(self) -> None:
        if self._server is not None and self._router is not None and self._server.has_parked:
            for connection, reply in self._server.recheck():
                self._reply(self._router, connection, encode(reply))

    @staticmethod
    def _reply(router: "zmq.Socket[bytes]", connection: bytes, frame: bytes) -> None:
        # A peer that does not read its answers loses them; it has a deadline of its own.
        with contextlib.suppress(zmq.Again):
            router.send_multipart([connection, frame], zmq.NOBLOCK)

    def _peer(self, address: str) -> "_Peer | OmniError":
        peer = self._peers.get(address)
        if peer is not None:
            failure = peer.session.failure
            if failure is None:
                return peer
            if self._clock() - peer.failed_at < FORGET_REFUSAL_S:
                return failure
            self._drop(peer)
        if address.startswith("ipc://") and not os.path.exists(address[len("ipc://") :]):
            return PeerUnreachableError(f"no engine listens at {address}")
        try:
            socket, monitor = self._connect(address)
        except zmq.ZMQError as error:
            return PeerUnreachableError(f"cannot connect to {address}: {error}")
        peer = _Peer(PeerSession(address, self._fingerprint, self._clock), socket, monitor)
        self._peers[address] = peer
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self._send(peer, [peer.session.hello()])
        return peer

    def _connect(self, address: str) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
            monitor = socket.get_monitor_socket(_GONE)
            try:
                socket.connect(address)
            except BaseException:
                socket.disable_monitor()
                monitor.close(0)
                raise
        except BaseException:
            socket.close(0)
            raise
        return socket, monitor

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.session.address]
        self._poller.unregister(peer.socket)
        self._poller.unregister(peer.monitor)
        peer.socket.disable_monitor()
        peer.monitor.close(0)
        peer.socket.close(0)

    def _attend(self, peer: _Peer, ready: dict[Any, int]) -> None:
        session = peer.session
        gone = peer.monitor in ready and _has_event(peer.monitor)
        if gone or peer.socket in ready:
            with contextlib.suppress(zmq.Again):
                for _ in range(256):
                    self._send(peer, session.receive(peer.socket.recv(zmq.NOBLOCK)))
        if session.failure is None:
            self._send(peer, session.tick())
        if gone:
            session.fail(PeerUnreachableError(f"the engine at {session.address} is gone"))
            self._drop(peer)
            _call(self._on_peer_gone)
        elif session.failure is not None and not peer.failed_at:
            peer.failed_at = self._clock()

    def _send(self, peer: _Peer, messages: "list[ControlRequest]") -> None:
        for message in messages:
            try:
                peer.socket.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:
                peer.session.fail(PeerUnreachableError(f"{peer.session.address} does not read"))
                return


def _accepts(path: Path) -> bool:
    with unix_socket.socket(unix_socket.AF_UNIX, unix_socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) == 0


def _has_event(monitor: "zmq.Socket[bytes]") -> bool:
    try:
        recv_monitor_message(monitor, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:  # what the owner does with the news must not end the channel
        logger.exception("A callback of the control channel failed")
