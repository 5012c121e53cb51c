# SPDX-License-Identifier: Apache-2.0
"""`MooncakeTransferEngineConnector`: objects between hosts, read by Mooncake's Transfer Engine.

A sender listens at a TCP port. A receiver knows that port from the metadata of a `put` or from its
settings, and asks there where an object is.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import zmq

from omni_connector.arena.arena import Arena
from omni_connector.config import MooncakeSettings
from omni_connector.errors import (
    ConfigError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    TransportError,
)
from omni_connector.net.keys import ClusterKey, load_key
from omni_connector.net.links import ZmqPoller
from omni_connector.net.listener import TcpListener
from omni_connector.net.packets import PACKAGE, Refusal
from omni_connector.net.peers import HostPort, Peers, is_loopback, parse_host
from omni_connector.net.resolver import Resolver
from omni_connector.net.runtime import loopback_key
from omni_connector.net.warnings import Warnings
from omni_connector.net.zeromq import Link, make_context
from omni_connector.objects.exchange import PROTOCOL, Exchange, Held, Read
from omni_connector.objects.factory import ENGINE_PORT
from omni_connector.objects.object_store import DEFAULT_TTL_S, object_geometry
from omni_connector.objects.peer import (
    ENCODER,
    QUESTIONS,
    Answer,
    Find,
    Found,
    Missing,
    Peer,
)
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.runtime.turns import TurnThread
from omni_connector.transports.base import Endpoint
from omni_connector.transports.mooncake.engine import address_towards
from omni_connector.transports.mooncake.transport import MooncakeTransport

logger = logging.getLogger(__name__)

# Longest wait of the server's thread for messages, in seconds, before it looks at its connections.
_PASS_S: Final = 0.1

# Most messages that are answered in one pass.
_AT_ONCE: Final = 64

# Most peers that are remembered, as metadata may name any number. Above this, peers that are not
# being asked are forgotten.
_MAX_PEERS: Final = 256

# Most hosts named by requests that are remembered; more than a pipeline has.
_MAX_NAMED: Final = 1024

# Longest wait for the greeting of a peer that has ended the handshake, in seconds.
_GREETING_S: Final = 1.0

# Longest wait of `close` for the server's thread, in seconds.
_CLOSE_S: Final = 5.0

# Longest wait of a `put` that finds no room for what peers have read so far, in seconds.
_CATCH_UP_S: Final = 0.3

# Names that vLLM-Omni's configurations use for "the address that others reach".
_ANY_HOST: Final = frozenset({"auto", "", "*", "0.0.0.0", "::"})
# These are in no network, so the way there is the default route.
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
_DISCARD_PORT: Final = 9  # nothing is sent there

_Message = TypeVar("_Message")


class MooncakeTransferEngineConnector(Exchange[HostPort]):
    """Objects read over the network. The arguments have vLLM-Omni's names.

    Args:
        host: address of this machine that others reach; `auto` looks it up.
        zmq_port: port at which peers ask for objects; 0 lets the system choose.
        protocol: what carries the bytes.
        device_name: RDMA devices, comma separated; "" lets Mooncake choose.
        memory_pool_size: bytes of the arena, which bounds the objects that were put and neither
            got nor cleaned up; None: see `object_geometry`.
        memory_pool_device: where the arena lies.
        role: a `receiver` listens only after its first `put`.
        sender_host, sender_zmq_port: see `update_sender_info`.
        key_file: a key made by `omni-connector keygen`, which both sides must have. Objects pass
            beyond loopback only with one.
        peers: further hosts that may be asked.
        object_timeout: seconds that a `get` waits for peers to answer.
        transfer_timeout: seconds after which Mooncake gives up a transfer.
        buffer_ttl_seconds, clock: as of `SharedMemoryConnector`.

    Attributes:
        host: the address, looked up.

    Raises:
        ConfigError: the key file has no key or is missing, or the port cannot be listened at.
        MissingDependencyError, TransportError: Mooncake is not installed, or does not start.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        zmq_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = ENGINE_PORT,
        protocol: Literal["tcp", "rdma"] = "tcp",
        device_name: str = "",
        memory_pool_size: Annotated[int, msgspec.Meta(gt=0)] | None = None,
        memory_pool_device: Literal["cpu"] = "cpu",
        role: str = "sender",
        sender_host: str | None = None,
        sender_zmq_port: int | None = None,
        key_file: str | None = None,
        peers: tuple[str, ...] = (),
        object_timeout: float = 5.0,
        transfer_timeout: float = 10.0,
        buffer_ttl_seconds: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if host in _ANY_HOST:
            host = _own_address(sender_host)
        self._process = os.getpid()
        self.host: Final = _parse_host(host)
        self._port = zmq_port
        self._allowed = Peers(peers)
        # By rank. The sender of rank None is asked where metadata names nobody.
        self._senders: dict[int | None, HostPort] = {}
        # Hosts of senders that requests named, the latest one last.
        self._named: BoundedMap[str, None] = BoundedMap(_MAX_NAMED)
        self._key = None if key_file is None else load_key(key_file)
        self._context = make_context()
        self._resolver = Resolver()
        self._server: ObjectServer | None = None
        self._peers: dict[HostPort, Peer] = {}
        super().__init__(
            MooncakeTransport(
                settings=MooncakeSettings(
                    protocol=protocol, device=device_name, timeout_s=transfer_timeout
                ),
                host=self.host,
                allows=self._may_ask,
            ),
            geometry=object_geometry(memory_pool_size and memory_pool_size / (1 << 30)),
            object_timeout=object_timeout,
            ttl_s=buffer_ttl_seconds,
            clock=clock,
            stamp=time.time_ns,
        )
        try:
            if sender_host is not None and sender_zmq_port is not None:
                self.update_sender_info(sender_host, sender_zmq_port)
            if role.lower() != "receiver":
                self.listen()
        except BaseException:
            self.close()
            raise

    def update_sender_info(
        self, sender_host: str, sender_zmq_port: int, sender_rank: int | None = None
    ) -> None:
        """Set where `get` asks for objects from now on, unless its metadata names a sender.

        Args:
            sender_host, sender_zmq_port: what to connect to; this also allows the host.
            sender_rank: the sender's rank, if it has several. Ranks are asked only where metadata
                names them.

        Raises:
            ValueError: this is no host, or no port.
        """
        port = int(sender_zmq_port)
        if not 0 < port < 1 << 16:
            raise ValueError(f"{sender_zmq_port!r} is no port")
        self._senders[sender_rank] = HostPort(_parse_host(sender_host), port)

    def allow_sender(self, sender_host: str) -> None:
        """Allow `get` to ask this host where its metadata names it, as a host of `peers`.

        Who calls this trusts the host: a request's orchestrator has named it as the sender.

        Raises:
            ValueError: this is no host.
        """
        host = _parse_host(sender_host)
        with self._lock:
            self._named[host] = None

    def listen(self, zmq_port: int | None = None) -> HostPort:
        """Start to listen, which else the first `put` does; returns where.

        Args:
            zmq_port: port to listen at instead of the one of the settings, if it does not listen
                yet.

        Raises:
            ConfigError, TransportError, MissingDependencyError: it cannot listen.
        """
        if zmq_port is not None and self._server is None:
            self._port = zmq_port
        address: HostPort = self._started().address
        return address

    def close(self) -> None:
        if os.getpid() != self._process:
            return
        if self._server is not None:
            self._server.close()
        super().close()
        for peer in self._forget(lambda peer: True):
            peer.close()
        self._resolver.close()
        self._context.destroy(0)

    def details(self) -> dict[str, Any]:
        found = super().details()
        server = self._server
        if server is not None:
            found["listen"] = str(server.address)
            if not server.alive:
                found.setdefault("status", "unhealthy: the thread that answers peers has ended")
        return found

    def _announce(self, arena: Arena, undo: ExitStack) -> tuple[Endpoint, HostPort]:
        self._require_key(self.host)
        endpoint = self._transport.export(arena, "objects")
        undo.callback(self._transport.withdraw, endpoint)
        server = ObjectServer(
            HostPort(self.host, self._port), self._key or loopback_key(), self._answer, self._note
        )
        undo.callback(server.close)
        self._server = server
        return endpoint, server.address

    def _begin(self) -> None:
        super()._begin()
        self._peers = {}
        # Senders that the log has warned of, the latest one last.
        self._warned: BoundedMap[HostPort, None] = BoundedMap(_MAX_PEERS)

    def _abandon(self) -> None:
        for peer in self._peers.values():
            peer.abandon()
        super()._abandon()

    def _search(
        self, digest: bytes, metadata: Mapping[str, Any] | None, deadline: float
    ) -> Held | None:
        address = read_hint(metadata) or self._senders.get(None)
        own = self._own
        if address is None or (own is not None and own.address == address):
            return None
        peer = self._peer(address)
        try:
            return peer.find(digest, deadline)
        except PeerUnreachableError as error:
            # Where the object is here, too, it is found all the same.
            logger.debug("asked %s for an object: %s", address, error)
            return None
        except (PeerRefusedError, ProtocolError) as error:
            self._warn_of(address, error)
            raise
        finally:
            with self._lock:
                peer.users -= 1
                peer.used_at = time.monotonic()

    def _peer(self, address: HostPort) -> Peer:
        """A peer, which has one user more."""
        forgotten: list[Peer] = []
        with self._lock:
            self._check_open()
            peer = self._peers.get(address)
            if peer is None:
                way = self._way(address)
                peer = self._peers[address] = Peer(address, connect=way, transport=self._transport)
            peer.users += 1
            many = len(self._peers) > _MAX_PEERS
        if many:
            forgotten = self._forget(lambda each: True)
        self._watch.start()
        for each in forgotten:
            each.close()
        return peer

    def _forget(self, useless: Callable[[Peer], bool]) -> list[Peer]:
        """Peers without users that are no longer known; the caller closes them."""
        with self._lock:
            gone = [a for a, peer in self._peers.items() if not peer.users and useless(peer)]
            return [self._peers.pop(address) for address in gone]

    def _let_go(self) -> bool:
        now = time.monotonic()
        for peer in self._forget(lambda peer: peer.useless(now)):
            peer.close()
        return bool(self._peers)

    def _warn_of(self, address: HostPort, error: Exception) -> None:
        with self._lock:
            if address in self._warned:
                return
            self._warned[address] = None
        logger.warning(
            "No object is found at %s: %s. Senders and receivers must have the same key, and run "
            "the same minor version of omni-connector (protocol %d of objects here)",
            *(address, error, PROTOCOL),
        )

    def _answer(self, question: Find) -> Found | Missing:
        # Called on the server's thread.
        own = self._own
        stored = None if own is None else own.objects.find(question.digest)
        if own is None or stored is None:
            return Missing(question.digest)
        return Found(question.digest, own.endpoint, stored)

    def _metadata(self, address: HostPort) -> dict[str, Any]:
        return {"source_host": address.host, "source_port": address.port}

    def _way(self, address: HostPort) -> "Callable[[float], _TcpLine]":
        if not self._may_ask(address.host):
            raise ConfigError(f"{address.host} is none of the hosts in `peers`, nor `sender_host`")
        self._require_key(address.host)
        return lambda deadline: self._connect(address, deadline)

    def _catch_up(self) -> None:
        if self._server is not None:
            self._server.catch_up()

    def _check_open(self) -> None:
        super()._check_open()
        if os.getpid() != self._process:
            raise TransportError("the connector is the parent's: a forked process makes its own")

    def _connect(self, address: HostPort, deadline: float) -> "_TcpLine":
        try:
            found = self._resolver.look_up(address).result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise PeerUnreachableError(f"{address.host!r} is still being looked up") from None
        try:
            link = Link(self._context, found, self._key or loopback_key())
        except zmq.ZMQError as error:
            raise PeerUnreachableError(f"{address}: {error}") from error
        return _TcpLine(address, found, link)

    def _may_ask(self, host: str) -> bool:
        # A host that the caller named as its sender is allowed as one of `peers` is.
        named = any(sender.host == host for sender in list(self._senders.values()))
        return named or host in self._named or is_loopback(host) or self._allowed.allows(host)

    def _require_key(self, host: str) -> None:
        if self._key is None and not is_loopback(host):
            raise ConfigError(
                f"{host!r} is no loopback address, so that key_file is needed; `omni-connector "
                "keygen PATH` makes one, for all stages to share"
            )


class _TcpLine:
    """A `Line` to an `ObjectServer`.

    Args:
        address: as it was named.
        found: the same, looked up.
        link: to it.
    """

    def __init__(self, address: HostPort, found: HostPort, link: Link) -> None:
        self._address = address
        self._found = found
        self._link = link

    @property
    def alive(self) -> bool:
        return self._link.why_lost() is None

    def ask(
        self, question: Find, answers: msgspec.msgpack.Decoder[Answer], deadline: float
    ) -> Answer:
        link = self._link
        if not self.tell(question):
            raise PeerUnreachableError(f"{self._address} takes no question")
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN)
        poller.register(link.monitor, zmq.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if link.socket in ready:
                answer = _decode(link.socket.recv_multipart(zmq.NOBLOCK), answers)
                # The answer may still be that to a question that was given up.
                if isinstance(answer, Refusal) or answer.digest == question.digest:
                    return answer
            elif link.monitor in ready and (why := link.why_lost()) is not None:
                if link.refused and _greets(self._found, min(left, _GREETING_S)):
                    raise PeerRefusedError(f"it {why}")
                raise PeerUnreachableError(f"{self._address} {why}")
        raise PeerUnreachableError(f"no answer from {self._address} before the deadline")

    def close(self) -> None:
        self._link.close()

    def tell(self, message: Find | Read) -> bool:
        try:
            self._link.socket.send(ENCODER.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("%s takes no message: %s", self._address, error)
            return False
        return True


def _greets(address: HostPort, timeout: float) -> bool:
    """Whether ZeroMQ listens there: its greeting begins with a byte of ones, before any key.

    A sender that has just ended does not, nor does a proxy before one that has not begun. They take
    a connection and end it, too.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout) as connection:
            return connection.recv(1) == b"\xff"
    except OSError:
        return False


class ObjectServer:
    """Says at a TCP port where objects are, on a thread of its own.

    Args:
        address: where to listen; with port 0 the system chooses one.
        key: what askers must show.
        answer: says where an object is; must not block.
        note: takes note of what was read; must not block.

    Attributes:
        address: where it listens, with the port that was chosen.

    Raises:
        ConfigError: it cannot listen there.
        TransportError: there are no more descriptors, or sockets.
    """

    def __init__(
        self,
        address: HostPort,
        key: ClusterKey,
        answer: Callable[[Find], Found | Missing],
        note: Callable[[Read], None],
    ) -> None:
        self._answer = answer
        self._note = note
        self._warnings = Warnings(logger)
        with ExitStack() as undo:
            self._poller = ZmqPoller()
            undo.callback(self._poller.close)
            self._context = make_context()
            undo.callback(self._context.destroy, 0)
            self._listener = TcpListener(self._context, address, key)
            undo.pop_all()
        self.address = self._listener.address
        for each in (self._listener.router, *self._listener.watched):
            self._poller.register(each)
        self._closing = False
        self._passes = 0
        self._thread = TurnThread("omni-objects", self._turn, sleep=self._poller, end=self._end)

    @property
    def alive(self) -> bool:
        """Whether its thread is there to answer."""
        return self._thread.is_alive()

    def catch_up(self) -> None:
        """Wait a moment until the messages that have arrived so far are handled."""
        wanted = self._passes + 2
        deadline = time.monotonic() + _CATCH_UP_S
        while self._passes < wanted and time.monotonic() < deadline and self.alive:
            self._thread.wake()
            time.sleep(_PASS_S / 100)

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._closing = True
        self._thread.wake()
        self._thread.join(_CLOSE_S)

    def _turn(self) -> float | None:
        if self._closing:
            return None
        ready = self._poller.ready()
        self._guarded(self._listener.attend, ready)
        if self._listener.router in ready:
            self._answer_some()
        self._passes += 1
        return _PASS_S

    def _end(self) -> None:
        self._context.destroy(0)
        self._listener.close()
        self._poller.close()

    def _answer_some(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sender, *frames = self._listener.receive()
            except zmq.Again:
                return
            self._guarded(self._answer_one, sender, frames)

    def _answer_one(self, sender: bytes, frames: list[bytes]) -> None:
        answer: Found | Missing | Refusal
        # Without an answer an asker would wait for its deadline.
        try:
            question = _decode(frames, QUESTIONS)
            if isinstance(question, Read):
                self._note(question)
                return
            answer = self._answer(question)
        except ProtocolError as error:
            self._warnings.warn("%s", error)
            answer = Refusal(str(error)[:200], package=PACKAGE)
        except Exception:
            logger.exception("A question about an object could not be answered; please report it")
            answer = Refusal("the answer failed; the log there says why", package=PACKAGE)
        try:
            self._listener.router.send_multipart([sender, ENCODER.encode(answer)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the asker has gone, or takes no message
            logger.debug("An answer about an object was not sent: %s", error)

    def _guarded(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call that must not end the thread."""
        try:
            call(*args)
        except Exception:  # the other askers are answered all the same
            logger.exception("An asker of objects could not be served; please report it")


def _decode(frames: list[bytes], decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    """The message in these frames.

    Raises:
        ProtocolError: it is malformed.
    """
    try:
        if len(frames) != 1:
            raise ValueError(f"it has {len(frames)} frames")
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message about an object is malformed: {error}") from error


def read_hint(metadata: object) -> HostPort | None:
    """The sender that an object's metadata names; None if it names none.

    Raises:
        ProtocolError: the metadata, which is not trusted, is malformed.
    """
    if not isinstance(metadata, Mapping):
        return None
    try:
        hint = msgspec.convert(dict(metadata), _Hint)
        if hint.source_host is None or hint.source_port is None:
            return None
        return HostPort(str(parse_host(hint.source_host)), hint.source_port)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ProtocolError(f"the metadata of an object is malformed: {error}") from error


def _own_address(sender_host: str | None) -> str:
    """The address of this machine towards a sender; without one, its IPv4 or else IPv6 address.

    Raises:
        PeerUnreachableError: there is no way there.
    """
    if sender_host is not None:
        return address_towards(HostPort(sender_host, _DISCARD_PORT))
    ipv4, ipv6 = _ELSEWHERE
    try:
        return address_towards(HostPort(ipv4, _DISCARD_PORT))
    except PeerUnreachableError:
        return address_towards(HostPort(ipv6, _DISCARD_PORT))


def _parse_host(host: str) -> str:
    return str(parse_host("127.0.0.1" if host == "localhost" else host))


class _Hint(msgspec.Struct, frozen=True):
    """The fields of an object's metadata that are read; others are ignored."""

    source_host: str | None = None
    source_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
