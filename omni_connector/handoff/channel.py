# SPDX-License-Identifier: Apache-2.0
"""The control channel: one thread that owns every control socket of an engine.

The engine's thread only appends to a deque and wakes this thread; it gets answers as futures.
ZeroMQ carries the frames, over Unix sockets (`ipc://`) or TCP (`tcp://`). When a peer's process
ends, its socket disconnects at once; when its host or the link to it does, heartbeats are missing.
"""

import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq
from msgspec import UNSET
from msgspec.structs import replace

from omni_connector.errors import ConfigError, OmniError, PeerUnreachableError, ProtocolError
from omni_connector.handoff.client import Lease, PeerSession, PendingLease
from omni_connector.handoff.messages import Release, Reply, Request, encode
from omni_connector.handoff.server import ControlServer, PeerConnection
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net.keys import ClusterKey
from omni_connector.net.links import Sockets, ZmqSockets
from omni_connector.net.listener import TcpListener
from omni_connector.net.peers import HostPort, parse_host, parse_host_port
from omni_connector.net.resolver import Resolver
from omni_connector.runtime.context import PROCESS_CONTEXT, EngineContext

logger = logging.getLogger("vllm.omni_connector.handoff")

TICK_S: Final = 0.5
"""Seconds between two calls of `on_tick`, and so about the most by which a lease ends late."""

REST_S: Final = 5.0
"""The same while the engine rests, so that an idle engine wakes less often: as often as it writes
its status then. Each time costs about 0.3 ms of a core whose caches hold something else
(`benchmarks/nothing_found.py`)."""

CLOSE_S: Final = 5.0
"""Longest wait of `close` for the thread to end, in seconds."""

FORGET_REFUSAL_S: Final = 5.0
"""Seconds for which a peer that has refused or failed is not asked again: a router may send it many
requests meanwhile."""

MAX_PEERS: Final = 256
"""Most peers that are asked at a time, and failed ones that are remembered. It bounds sockets."""

_IPC: Final = "ipc://"
_TCP: Final = "tcp://"


@dataclass(slots=True, eq=False)
class _Peer:
    session: PeerSession
    link: Any = None  # None while its name is looked up, and after its end
    asked_at: float = 0.0
    epoch: bytes = b""  # of the engine that was asked last
    unsent: list[Request] = field(default_factory=list)  # until its name is looked up


class ControlChannel:
    """Serves and asks on the control channel, in a thread of its own.

    Args:
        compatibility: our compatibility key, for the peers that we ask.
        server: answers peers that ask us; None where this engine hands nothing off.
        listen: path of the Unix socket to serve on; None where `server` is.
        listen_tcp: where to serve on TCP too; None opens no port.
        key: proves both sides to each other on TCP; needed there.
        on_tick: called about twice a second, on the channel's thread.
        rests: whether the next call of `on_tick` may come after `REST_S`; asked after each call.
        on_peer_gone: called on the channel's thread when a connection to a peer is lost.
        context: clock, threads and locks.
        sockets: opens the sockets; the channel closes it. None: ZeroMQ's.

    Raises:
        zmq.ZMQError: the Unix socket cannot be bound.
        TransportError: another engine listens there, or the folder cannot be locked.
        ConfigError: the TCP address cannot be listened at.
    """

    def __init__(
        self,
        *,
        compatibility: CompatibilityKey,
        server: ControlServer | None = None,
        listen: Path | None = None,
        listen_tcp: HostPort | None = None,
        key: ClusterKey | None = None,
        on_tick: Callable[[], object] = lambda: None,
        rests: Callable[[], bool] = lambda: False,
        on_peer_gone: Callable[[], object] = lambda: None,
        context: EngineContext = PROCESS_CONTEXT,
        sockets: Sockets | None = None,
    ) -> None:
        self._compatibility = compatibility
        self._learned = compatibility
        self._by_files = True
        self._server = server
        self._key = key
        self._on_tick = on_tick
        self._rests = rests
        self._on_peer_gone = on_peer_gone
        self._clock = context.clock
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._ended = False
        self._post_lock = context.lock()
        self._peers: dict[str, _Peer] = {}
        self._linked: dict[Any, _Peer] = {}  # by the sockets of their links
        # When to look at all peers: no deadline of any of them is earlier, some may be later.
        self._look_at = math.inf
        self._told: set[tuple[str, str]] = set()
        self._resolver = Resolver()
        self._sockets = sockets or ZmqSockets()
        self._poller = self._sockets.poller
        self._routers: list[Any] = []
        self._listener: TcpListener | None = None
        try:
            if server is not None and listen_tcp is not None:
                if key is None:
                    raise ConfigError("listen needs a key: set key_file")
                self._listener = self._sockets.serve_tcp(listen_tcp, key, context.clock)
                self._routers.append(self._listener.router)
                for socket in self._listener.watched:
                    self._poller.register(socket)
            if server is not None and listen is not None:
                self._routers.append(self._sockets.serve(listen))
        except BaseException:
            self._sockets.close()
            self._poller.close()
            raise
        for socket in self._routers:
            self._poller.register(socket)
        self._process = os.getpid()
        self._next_tick = context.clock()
        self._thread = context.start("omni-control", self._turn, sleep=self._poller, end=self._end)

    @property
    def tcp_address(self) -> HostPort | None:
        """Where it serves on TCP, with the actual port; None where no port is open."""
        return None if self._listener is None else self._listener.address

    @property
    def alive(self) -> bool:
        """Whether peers are answered and asked; once False, it stays so."""
        return not self._closing  # nor is it closing when it has ended: see `_end`

    def request_lease(self, address: str, pending: PendingLease) -> None:
        """Ask the peer at `address` for a hand-off; returns at once.

        Its future gets a `Lease`, or an `OmniError` before its deadline. Cancel it to give
        up: a lease that comes later is ended.
        """
        self._post(lambda: self._request(address, pending))

    def _request(self, address: str, pending: PendingLease) -> None:
        try:
            peer = self._peer(address, pending.epoch)
            if isinstance(peer, OmniError):
                pending.fail(peer)
            elif pending.future.cancelled():  # the peer keeps the slots until it is told
                self._send(peer, [Release(pending.token)])
            else:
                self._send(peer, peer.session.request_lease(pending))
                self._note_deadline(peer)
        except Exception:
            pending.fail(ProtocolError("the lease could not be asked for"))
            raise

    def release(self, lease: Lease) -> None:
        """Tell the peer to end a lease; returns at once. Lost if the peer is gone."""

        def run() -> None:
            peer = None if self._closing else self._peers.get(lease.address)
            if peer is not None and peer.session.failure is None:
                self._send(peer, [peer.session.release(lease)])

        self._post(run)

    def drop(self, address: str, token: bytes) -> None:
        """Tell the peer that nobody wants a hand-off; returns at once. Lost if it is gone."""

        def run() -> None:
            peer = self._peer(address)
            if isinstance(peer, _Peer) and peer.session.failure is None:
                self._send(peer, [Release(token)])

        self._post(run)

    def learn(self, **fields: str) -> None:
        """This engine has learned more of its weights: compare peers with that from now on. Returns
        at once; any thread may call it.

        Args:
            fields: of the compatibility key, by name.
        """

        def run() -> None:
            self._learned = replace(self._learned, **fields)
            self._judge_anew()

        self._post(run)

    def judge_by_files(self, judged: bool) -> None:
        """Whether this engine has the weights of the files that it was started from: else peers are
        not judged by these. Returns at once; any thread may call it."""

        def run() -> None:
            self._by_files = judged
            self._judge_anew()

        self._post(run)

    def _judge_anew(self) -> None:
        compatibility = self._learned
        if not self._by_files:
            compatibility = replace(compatibility, weights=UNSET, weight_files=UNSET)
        if compatibility == self._compatibility:
            return
        self._compatibility = compatibility
        for peer in self._peers.values():
            peer.session.learn(compatibility)
        for answer in self._server.learn(compatibility) if self._server is not None else ():
            self._guarded(self._reply, *answer)

    def recheck(self) -> None:
        """Have the server look at its pending lease requests again; returns at once."""
        if self._server is not None and self._server.has_pending:
            self._post(lambda: None)

    def stir(self) -> None:
        """Have the next call of `on_tick` come within `TICK_S`, as the engine rests no more.

        Returns at once.
        """

        def sooner() -> None:
            self._next_tick = min(self._next_tick, self._clock() + TICK_S)

        self._post(sooner)

    def close(self) -> None:
        """Stop the thread and remove the socket, within `CLOSE_S` seconds. Idempotent."""
        if os.getpid() != self._process:  # they belong to the parent process
            return
        self._closing = True
        self._post(lambda: None)
        self._thread.join(CLOSE_S)

    def _post(self, command: Callable[[], None]) -> None:
        with self._post_lock:
            if not self._ended:
                self._commands.append(command)
                self._poller.wake()
                return
        self._guarded(command)  # it fails its future, as the channel is closed

    def _turn(self) -> float | None:
        if self._closing:
            return None
        ready = self._poller.ready()
        self._run_commands()
        if self._listener is not None:
            self._guarded(self._listener.attend, ready)
        for listener, router in enumerate(self._routers):
            if router in ready:
                self._serve(listener, router)
        for peer in self._due(ready):
            if self._guarded(self._attend, peer, ready):
                self._note_deadline(peer)
            else:
                peer.session.fail(ProtocolError("an answer of the peer could not be handled"))
                self._disconnect(peer)
        if self._clock() >= self._next_tick:
            self._forget_failed()
            self._guarded(self._on_tick)
            # With a port open, `TcpListener.attend` has to be called as well.
            rests = self._listener is None and self._rests()
            self._next_tick = self._clock() + (REST_S if rests else TICK_S)
        if self._server is not None and self._server.has_pending:
            for answer in self._server.recheck():
                self._guarded(self._reply, *answer)
        return max(0.0, min(self._next_tick, self._look_at) - self._clock())

    def _due(self, ready: dict[Any, int]) -> list[_Peer]:
        """The peers that have to be looked at: those with news, and all when a deadline is over."""
        if self._clock() < self._look_at:
            return list(dict.fromkeys(self._linked[each] for each in ready if each in self._linked))
        self._look_at = math.inf
        return list(self._peers.values())

    def _note_deadline(self, peer: _Peer) -> None:
        """Look at all peers when the next deadline of this one is over, or before."""
        self._look_at = min(self._look_at, peer.session.deadline())

    def _end(self) -> None:
        if not self._closing:
            logger.error("The control channel stopped: no hand-offs until this engine restarts")
        self._closing = True
        with self._post_lock:
            self._ended = True
        self._run_commands()
        for peer in self._peers.values():
            peer.session.fail(PeerUnreachableError("the control channel is closed"))
        self._resolver.close()
        self._sockets.close()
        self._poller.close()

    def _run_commands(self) -> None:
        while self._commands:
            self._guarded(self._commands.popleft())

    def _guarded(self, call: Callable[..., object], *args: object) -> bool:
        """Make a call that must not end the channel; returns whether it succeeded."""
        try:
            call(*args)
        except Exception as error:
            known = type(error).__name__, getattr(call, "__qualname__", "")
            if known not in self._told:  # a peer may cause it as often as it likes
                self._told.add(known)
                logger.exception(
                    "The control channel had an error, and goes on (logged once); please report it"
                )
            return False
        return True

    def _serve(self, listener: int, router: Any) -> None:
        for _ in range(256):  # then it is the other sockets' turn
            try:
                if self._listener is not None and router is self._listener.router:
                    frames = self._listener.receive()
                else:
                    frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                self._guarded(self._answer, PeerConnection(listener, frames[0]), frames[1])

    def _answer(self, connection: PeerConnection, frame: bytes) -> None:
        assert self._server is not None
        reply = self._server.receive(connection, frame)
        if reply is not None:
            self._reply(connection, reply)

    def _reply(self, connection: PeerConnection, reply: Reply) -> None:
        # A peer that does not read its answers loses them, and its lease requests time out.
        with contextlib.suppress(zmq.Again):
            router = self._routers[connection.listener]
            self._poller.used(router)
            router.send_multipart([connection.name, encode(reply)], zmq.NOBLOCK)

    def _peer(self, address: str, epoch: bytes | None = None) -> _Peer | OmniError:
        """The peer at `address`, or why there is none; `epoch` is that of the engine meant."""
        if self._closing:
            return PeerUnreachableError("the control channel is closed")
        peer = self._known(address, epoch) or self._connected(address)
        if isinstance(peer, _Peer):
            peer.asked_at = self._clock()
            peer.epoch = epoch or peer.epoch
        return peer

    def _known(self, address: str, epoch: bytes | None) -> _Peer | OmniError | None:
        peer = self._peers.get(address)
        if peer is None:
            return None
        # Another engine may have taken the place of the one that we know. The failure of the
        # former says nothing of it, and we may not have noticed yet that the former has ended.
        restarted = epoch is not None and peer.epoch not in (b"", epoch)
        failure = peer.session.failure
        if failure is None and not (restarted and peer.session.idle):
            return peer
        if failure and not restarted and self._failed_lately(peer):
            return failure
        self._forget(peer)
        return None

    def _failed_lately(self, peer: _Peer) -> bool:
        return self._clock() - peer.session.failed_at < FORGET_REFUSAL_S

    def _connected(self, address: str) -> _Peer | OmniError:
        if address.startswith(_IPC) and not self._sockets.exists(address.removeprefix(_IPC)):
            return PeerUnreachableError(f"no engine listens at {address}")
        if len(self._peers) >= MAX_PEERS:
            # Failed peers are kept, so that not every request asks them again. They make room if
            # no other does, as anybody can name many engines that do not exist.
            peers = self._peers.values()
            idle = [p for p in peers if p.session.idle and not (p.session.failure or p.unsent)]
            idle = idle or [p for p in peers if p.session.failure]
            if not idle:
                return PeerUnreachableError(f"{MAX_PEERS} engines are being talked to already")
            self._forget(min(idle, key=lambda each: each.asked_at))
        peer = _Peer(PeerSession(address, self._compatibility, self._clock))
        try:
            self._reach(peer)
        except (ValueError, zmq.ZMQError) as error:
            return PeerUnreachableError(f"cannot connect to {address}: {error}")
        self._peers[address] = peer
        self._note_deadline(peer)
        return peer

    def _reach(self, peer: _Peer) -> None:
        address = peer.session.address
        if address.startswith(_IPC):
            self._connect(peer, address.removeprefix(_IPC))
            return
        if not address.startswith(_TCP):
            raise ValueError("it is neither an ipc:// nor a tcp:// address")
        target = parse_host_port(address.removeprefix(_TCP))
        if not isinstance(parse_host(target.host), str):
            self._connect(peer, target)
            return
        post = self._post
        self._resolver.look_up(target).add_done_callback(
            lambda found: post(lambda: self._resolved(peer, found))
        )

    def _resolved(self, peer: _Peer, found: "Future[HostPort]") -> None:
        session = peer.session
        if self._closing or session.failure or self._peers.get(session.address) is not peer:
            return  # nobody waits for this peer
        try:
            self._connect(peer, found.result())
        except PeerUnreachableError as error:
            session.fail(error)
        except (ValueError, zmq.ZMQError) as error:
            session.fail(PeerUnreachableError(f"cannot connect to {found.result()}: {error}"))

    def _connect(self, peer: _Peer, target: str | HostPort) -> None:
        peer.link = link = self._sockets.link(target, self._key)
        try:
            for socket in (link.socket, link.monitor):
                self._poller.register(socket)
                self._linked[socket] = peer
        except BaseException:
            self._disconnect(peer)
            raise
        unsent, peer.unsent = peer.unsent, []
        self._send(peer, [peer.session.handshake(), *unsent])

    def _disconnect(self, peer: _Peer) -> None:
        if peer.link is not None:
            for socket in (peer.link.socket, peer.link.monitor):
                if self._linked.pop(socket, None) is not None:
                    self._poller.unregister(socket)
            peer.link.close()
            peer.link = None

    def _forget(self, peer: _Peer) -> None:
        del self._peers[peer.session.address]
        self._disconnect(peer)

    def _forget_failed(self) -> None:
        for peer in list(self._peers.values()):
            if peer.session.failure is not None and not self._failed_lately(peer):
                self._forget(peer)

    def _attend(self, peer: _Peer, ready: dict[Any, int]) -> None:
        session, link = peer.session, peer.link
        if link is None:
            session.tick()
        else:
            lost = link.why_lost() if link.monitor in ready else None
            if lost is not None or link.socket in ready:
                with contextlib.suppress(zmq.Again):
                    for _ in range(256):
                        self._send(peer, session.receive(link.socket.recv(zmq.NOBLOCK)))
            if session.failure is None:
                self._send(peer, session.tick())
            if lost is not None:
                self._lost(peer, lost)

    def _lost(self, peer: _Peer, why: str) -> None:
        address = peer.session.address
        peer.session.fail(PeerUnreachableError(f"the engine at {address} {why}"))
        if address.startswith(_TCP):
            # To notice it again would take seconds, so it is kept as failed for a while.
            self._disconnect(peer)
        else:
            self._forget(peer)
        self._guarded(self._on_peer_gone)

    def _send(self, peer: _Peer, messages: "list[Request]") -> None:
        for message in messages:
            if peer.link is None:
                if peer.session.failure is None:  # its name is being looked up
                    peer.unsent.append(message)
                continue
            self._poller.used(peer.link.socket)
            try:
                peer.link.socket.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:
                peer.session.fail(PeerUnreachableError(f"{peer.session.address} does not read"))
                return
