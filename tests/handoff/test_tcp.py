# SPDX-License-Identifier: Apache-2.0
"""The control channel over TCP: between engines that share a key, and against everybody else."""

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq

from omni_connector.errors import ConfigError, PeerUnreachableError, TransportError
from omni_connector.handoff import channel as channel_module
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.client import INTRODUCTION_S, PendingLease
from omni_connector.handoff.messages import (
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseRequest,
    decode_reply,
    encode,
)
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net import links as control_sockets
from omni_connector.net import listener as listener_module
from omni_connector.net import resolver as resolver_module
from omni_connector.net import zeromq as sockets_module
from omni_connector.net.keys import ClusterKey
from omni_connector.net.listener import (
    MAX_REQUEST_BYTES,
    MAX_UNFINISHED_BYTES,
    TcpListener,
)
from omni_connector.net.peers import HostPort, parse_host_port
from omni_connector.net.zeromq import Link, make_context
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock
from omni_connector.testing.ports import free_port
from tests import inspection
from tests.patience import wait_until

from ..descriptors import spare
from . import curve
from .engine import (
    LONG,
    PROMPT,
    Asker,
    ByHand,
    Engine,
    StartAsker,
    StartEngine,
    ask,
    failure,
)

LOOPBACK = HostPort("127.0.0.1", 0)
LEASE_REQUEST = LeaseRequest(1, b"t" * 16, PROMPT.num_tokens, PROMPT.digest("tokens"), "tokens")


def make_key() -> ClusterKey:
    return ClusterKey(*zmq.curve_keypair())


KEY, OTHER = make_key(), make_key()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not come to terms is given up within a second."""
    monkeypatch.setattr(sockets_module, "HANDSHAKE_MS", 1000)
    monkeypatch.setattr(sockets_module, "CONNECT_MS", 1000)


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut link is noticed within a few seconds, and a slow one is none."""
    monkeypatch.setattr(sockets_module, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets_module, "HEARTBEAT_TIMEOUT_MS", 4000)


@pytest.fixture
def engine(start_engine: StartEngine) -> Engine:
    """Serves those who have `KEY`."""
    return start_engine(listen_tcp=LOOPBACK, key=KEY)


@pytest.fixture
def friend(start_asker: StartAsker) -> Asker:
    """Has `KEY`."""
    return start_asker(KEY)


def port_of(engine: Engine) -> int:
    address = engine.channel.tcp_address
    assert address is not None
    return address.port


def knock(engine: Engine) -> socket.socket:
    """A TCP connection of somebody who is no engine, and waits for us."""
    return socket.create_connection(("127.0.0.1", port_of(engine)), timeout=LONG)


def wait_for_end(stranger: socket.socket) -> None:
    """Read until the server hangs up."""
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(1 << 16):
            pass


def open_ports() -> set[int]:
    """TCP ports that this process listens at."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):  # a kernel without IPv6
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            listens = fields[3] == "0A"
            if listens and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@contextlib.contextmanager
def dealer(key: ClusterKey | None, **options: Any) -> Iterator["zmq.Socket[bytes]"]:
    """A bare ZeroMQ client, which need not behave as ours does; its server has `KEY`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        if key is not None:
            client.setsockopt(zmq.CURVE_SERVERKEY, KEY.public)
            client.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            client.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        for name, value in options.items():
            client.setsockopt(getattr(zmq, name), value)
        yield client


def test_engines_that_share_a_key_talk_over_tcp_and_the_unix_socket_needs_none(
    engine: Engine, friend: Asker, asker: Asker
) -> None:
    assert parse_host_port(str(engine.channel.tcp_address)) == engine.channel.tcp_address
    assert asker.request_lease(engine, engine.handoff()).result(LONG)
    handoff = engine.handoff()
    lease = friend.lease_by_tcp(engine, handoff).result(LONG)
    assert lease.address == engine.tcp == f"tcp://127.0.0.1:{port_of(engine)}"
    assert lease.token == handoff.token
    friend.channel.release(lease)
    assert engine.directory.closed.get(timeout=LONG) == handoff.token


def test_without_a_key_no_port_is_opened_and_nobody_asked(
    engine: Engine, start_engine: StartEngine, start_asker: StartAsker
) -> None:
    with pytest.raises(ConfigError, match="listen needs a key"):
        start_engine("keyless.sock", listen_tcp=LOOPBACK)
    error = failure(start_asker().lease_by_tcp(engine, engine.handoff()))
    assert isinstance(error, PeerUnreachableError)
    assert "without a key" in str(error)


def test_ipv6_works_as_well(start_engine: StartEngine, friend: Asker) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    engine = start_engine(listen_tcp=HostPort("::1", 0), key=KEY)
    assert engine.tcp.startswith("tcp://[::1]:")
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)


def test_without_an_address_or_a_server_no_port_is_open(
    start_engine: StartEngine, start_asker: StartAsker, compatibility: CompatibilityKey
) -> None:
    before = open_ports()
    channel = ControlChannel(compatibility=compatibility, listen_tcp=LOOPBACK, key=KEY)
    with contextlib.closing(channel):
        assert channel.tcp_address is None
        assert open_ports() <= before
    engine = start_engine(key=KEY)
    assert start_asker(KEY).request_lease(engine, engine.handoff()).result(LONG)
    assert engine.channel.tcp_address is None
    assert open_ports() <= before
    second = start_engine("second.sock", listen_tcp=LOOPBACK, key=KEY)
    assert open_ports() - before == {port_of(second)}
    second.channel.close()
    assert open_ports() <= before


# Who may talk


@pytest.mark.parametrize(
    "shown",
    [OTHER, ClusterKey(KEY.public, OTHER.secret)],
    ids=["another key", "a public key only"],
)
def test_who_does_not_share_the_key_is_told_so_and_heard_by_nobody(
    shown: ClusterKey, engine: Engine, start_asker: StartAsker
) -> None:
    heard: list[bytes] = []
    receive = engine.server.receive
    engine.server.receive = lambda *args: heard.append(args[1]) or receive(*args)  # type: ignore
    error = failure(start_asker(shown).lease_by_tcp(engine, engine.handoff()))
    assert isinstance(error, PeerUnreachableError)
    assert "does not show that it has our key" in str(error)
    assert "key_file" in str(error)
    assert engine.tcp in str(error)
    assert not heard
    assert start_asker(KEY).lease_by_tcp(engine, engine.handoff()).result(LONG)


def test_to_know_the_servers_public_key_is_not_enough(
    engine: Engine, friend: Asker, compatibility: CompatibilityKey, caplog: pytest.LogCaptureFixture
) -> None:
    """The mark of ZAP: CURVE alone would let in who proves to have any key."""
    with dealer(OTHER) as intruder:
        with intruder.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_AUTH) as monitor:
            intruder.connect(engine.tcp)
            intruder.send(b"garbage")
            intruder.send(encode(Handshake.of(compatibility)))
            assert monitor.poll(LONG * 1000)
            intruder.disable_monitor()
        assert not intruder.poll(100)
    assert engine.counts == {}
    assert "127.0.0.1 has another key" in caplog.text
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)


def test_a_server_that_lets_in_everybody_is_told_nothing(friend: Asker) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as rogue:
        rogue.setsockopt(zmq.LINGER, 0)
        rogue.setsockopt(zmq.CURVE_SERVER, True)
        rogue.setsockopt(zmq.CURVE_PUBLICKEY, OTHER.public)
        rogue.setsockopt(zmq.CURVE_SECRETKEY, OTHER.secret)
        port = rogue.bind_to_random_port("tcp://127.0.0.1")
        error = failure(ask(friend.channel, f"tcp://127.0.0.1:{port}", b"t" * 16, b"e" * 16))
        assert "does not show that it has our key" in str(error)
        assert not rogue.poll(100)


def test_nothing_can_be_read_on_the_wire(engine: Engine, friend: Asker) -> None:
    with Proxy(port_of(engine)) as proxy:
        handoff = engine.handoff()
        address = f"tcp://127.0.0.1:{proxy.port}"
        future = ask(friend.channel, address, handoff.token, engine.handshake_reply.epoch)
        assert future.result(LONG)
    wire = bytes(proxy.seen)
    assert len(wire) > 500
    assert handoff.token not in wire
    assert engine.handshake_reply.epoch not in wire
    assert b"bfloat16" not in wire


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"\xff" + bytes(8),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        bytes(range(256)) * 400,
        b"\x01\x00" + b"\x08\x00garbage",
        b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x07garbage",
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(55, b"\0") + b"\x00\x07garbage",
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(55, b"\0") + b"\x06" + b"\xff" * 8,
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(55, b"\0") + b"\x04\xc8\x05HELLO" * 50,
    ],
    ids=[
        "nothing",
        "slow",
        "http",
        "tls",
        "noise",
        "zmtp 1",
        "zmtp 2",
        "zmtp 3",
        "long",
        "no hello",
    ],
)
def test_garbage_is_hung_up_on_and_heard_by_nobody(
    greeting: bytes, quick: None, engine: Engine, friend: Asker
) -> None:
    # On a busy machine it does not come to terms within a second either.
    wait_until(lambda: friend.lease_by_tcp(engine, engine.handoff()).exception(LONG) is None)
    friend.gone.clear()
    with knock(engine) as stranger:
        with contextlib.suppress(OSError):  # it need not read all that we have to say
            stranger.sendall(greeting)
        wait_for_end(stranger)
    assert engine.counts == {}
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)
    assert not friend.gone.is_set()


@pytest.mark.parametrize("listeners", ["one", "the other"])
def test_a_name_of_one_socket_means_nothing_at_the_other(
    listeners: str, start_engine: StartEngine, compatibility: CompatibilityKey
) -> None:
    engine = start_engine(listen_tcp=LOOPBACK, key=KEY)
    first, second = engine.address, engine.tcp
    keys = [None, KEY]
    if listeners == "the other":
        first, second = second, first
        keys.reverse()
    with (
        dealer(keys[0], ROUTING_ID=b"me") as real,
        dealer(keys[1], ROUTING_ID=b"me") as impostor,
    ):
        real.connect(first)
        impostor.connect(second)
        real.send(encode(Handshake.of(compatibility)))
        assert real.poll(LONG * 1000)
        assert isinstance(decode_reply(real.recv()), HandshakeReply)
        impostor.send(encode(LEASE_REQUEST))
        assert impostor.poll(LONG * 1000)
        assert decode_reply(impostor.recv()) == LeaseDenied(1, "not_introduced")
        real.send(encode(LEASE_REQUEST))
        assert real.poll(LONG * 1000)
        assert decode_reply(real.recv()) == LeaseDenied(1, "unknown_token")


def test_many_frames_are_ignored_and_a_request_longer_than_any_ends_the_connection(
    engine: Engine, friend: Asker, compatibility: CompatibilityKey
) -> None:
    ended = zmq.Event.DISCONNECTED
    with dealer(KEY) as client, client.get_monitor_socket(ended) as monitor:
        client.connect(engine.tcp)
        client.send_multipart([b"one", b"two"])
        client.send(encode(Handshake.of(compatibility)))
        assert client.poll(LONG * 1000)
        assert isinstance(decode_reply(client.recv()), HandshakeReply)
        client.send(bytes(MAX_REQUEST_BYTES + 1))
        assert monitor.poll(LONG * 1000)
        client.disable_monitor()
    assert engine.counts == {}
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)


@pytest.fixture
def listener() -> Iterator[TcpListener]:
    """A port that nobody attends."""
    context = make_context()
    try:
        listener = TcpListener(context, LOOPBACK, KEY)
        yield listener
        listener.close()
    finally:
        context.destroy(linger=0)


def test_where_nobody_says_who_may_enter_nobody_does(listener: TcpListener) -> None:
    listener.watched[-1].close(0)  # which asks us
    entered = zmq.Event.HANDSHAKE_SUCCEEDED
    with dealer(KEY) as client, client.get_monitor_socket(entered) as monitor:
        client.connect(f"tcp://{listener.address}")
        client.send(b"x")
        assert not monitor.poll(500)
        client.disable_monitor()
    assert not listener.router.poll(0)


# Many


def test_what_is_not_read_yet_is_bounded(listener: TcpListener) -> None:
    with dealer(KEY, SNDHWM=1) as client:
        client.connect(f"tcp://{listener.address}")
        assert listener.watched[-1].poll(LONG * 1000)
        listener.attend({listener.watched[-1]: zmq.POLLIN})
        sent = 0
        while client.poll(500, zmq.POLLOUT) and sent < 1000:
            client.send(bytes(MAX_REQUEST_BYTES), zmq.NOBLOCK)
            sent += 1
    assert sent < 200


@pytest.mark.skipif(not curve.AVAILABLE, reason="ZeroMQ has its own cryptography here")
def test_a_message_that_does_not_end_ends_the_connection(
    engine: Engine, friend: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq keeps the frames of a message until the last one is there, however many."""
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)
    peer, sent = curve.RawPeer(port_of(engine), KEY), 0
    with contextlib.closing(peer):
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while sent < 100 * MAX_UNFINISHED_BYTES:
                peer.send(bytes(MAX_REQUEST_BYTES // 2), more=True)
                sent += MAX_REQUEST_BYTES // 2
                time.sleep(0.01)
        assert MAX_UNFINISHED_BYTES <= sent < 100 * MAX_UNFINISHED_BYTES
    assert "a message that does not end" in caplog.text
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)
    assert not friend.gone.is_set()


def test_many_whole_messages_are_no_endless_one(
    engine: Engine, compatibility: CompatibilityKey
) -> None:
    handshake = encode(Handshake.of(compatibility))
    number = 2 * MAX_UNFINISHED_BYTES // len(handshake)
    with dealer(KEY, SNDHWM=1 << 20) as client:
        client.connect(engine.tcp)
        for _ in range(number):
            client.send(handshake)
            time.sleep(1.5 / number)
        for _ in range(number):
            assert client.poll(LONG * 1000)
            assert isinstance(decode_reply(client.recv()), HandshakeReply)


@pytest.mark.parametrize("bound", ["by number", "by files"])
def test_connections_are_bounded_and_those_there_are_stay(
    bound: str,
    monkeypatch: pytest.MonkeyPatch,
    start_engine: StartEngine,
    start_asker: StartAsker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if bound == "by number":
        monkeypatch.setattr(listener_module, "MAX_CONNECTIONS", 5)
    else:
        monkeypatch.setattr(listener_module.resource, "getrlimit", lambda _: (20, 1 << 20))
    monkeypatch.setattr(sockets_module, "HANDSHAKE_MS", 60_000)
    engine = start_engine(listen_tcp=LOOPBACK, key=KEY)
    early = start_asker(KEY)
    assert early.lease_by_tcp(engine, engine.handoff()).result(LONG)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(approach(engine)) for _ in range(50)]
        # Four are let be, until their time is over. Others are shut, or never accepted.
        wait_until(lambda: "5 connections already" in caplog.text)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 50 + 4)
        assert sum(not _is_shut(stranger) for stranger in crowd) >= 4
        assert early.lease_by_tcp(engine, engine.handoff()).result(LONG)
        assert not early.gone.is_set()
        late = start_asker(KEY)
        assert isinstance(
            failure(late.lease_by_tcp(engine, engine.handoff())), PeerUnreachableError
        )
        late.channel.close()
    assert caplog.text.count("5 connections already") == 1  # strangers do not fill the log
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert start_asker(KEY).lease_by_tcp(engine, engine.handoff()).result(LONG)


def approach(engine: Engine) -> socket.socket:
    """A TCP connection that begins, and waits for nothing."""
    stranger = socket.socket()
    stranger.setblocking(False)
    stranger.connect_ex(("127.0.0.1", port_of(engine)))
    return stranger


def _is_shut(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(1 << 16):  # what it has said before
            pass
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.ENOTCONN  # it was never accepted
    return True


_FLOODED = """
import os, resource, sys, threading, time
from omni_connector.net import zeromq
from omni_connector.net.keys import ClusterKey
from omni_connector.net.links import ZmqSockets
from omni_connector.net.peers import HostPort
from omni_connector.runtime.turns import TurnThread
zeromq.HANDSHAKE_MS = 60_000
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
KEY = ClusterKey(*(each.encode() for each in sys.argv[1:]))
sockets = ZmqSockets()
listener = sockets.serve_tcp(HostPort("127.0.0.1", 0), KEY, time.monotonic)
for each in (listener.router, *listener.watched):
    sockets.poller.register(each)
ending = threading.Event()
def turn():
    listener.attend(sockets.poller.ready())
    return None if ending.is_set() else 0.5
thread = TurnThread("omni-control", turn, sleep=sockets.poller)
print(listener.address.port, flush=True)
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(500)]
numbers = list(range(300_000, 0, -1)) * 2
def compute():  # as an engine does, with one call after the other that holds the interpreter's lock
    while not ending.is_set():
        sorted(numbers)
threading.Thread(target=compute).start()
longest, without_since, most = 0.0, None, 0
begun = time.monotonic()
while (took := time.monotonic() - begun) < 5 or (without_since and took < 60):
    time.sleep(0.001)
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
        without_since = None
    except OSError:
        without_since = without_since or time.monotonic()
        longest = max(longest, time.monotonic() - without_since)
if without_since:
    longest = max(longest, time.monotonic() - without_since)
ending.set()
for each in files:
    os.close(each)
print(longest, len(os.listdir("/proc/self/fd")), flush=True)
sockets.poller.wake()
thread.join(10)
sockets.close()
"""


def test_a_flood_leaves_the_process_its_descriptors() -> None:
    keys = [each.decode() for each in (KEY.public, KEY.secret)]
    command = [sys.executable, "-c", _FLOODED, *keys]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("this process may not open enough files to flood another")
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flooded,
        contextlib.ExitStack() as stack,
    ):
        assert flooded.stdout is not None
        address = "127.0.0.1", int(flooded.stdout.readline())
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(2500):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(address)
        longest, files = flooded.stdout.readline().split()
    assert flooded.returncode == 0
    assert float(longest) < 30  # of the minute that a stranger has here to show the key
    assert int(files) < 400


def test_connections_are_shut_without_a_descriptor_to_spare(
    monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine
) -> None:
    monkeypatch.setattr(sockets_module, "HANDSHAKE_MS", 600_000)
    engine = start_engine(listen_tcp=LOOPBACK, key=KEY)
    listener = engine.channel._listener
    assert listener is not None
    with knock(engine) as stranger:
        wait_until(lambda: inspection.connections(engine.channel) == 1)
        (number,) = listener._connections
        with spare(0):
            listener._shut(number)
        wait_for_end(stranger)
    wait_until(lambda: inspection.connections(engine.channel) == 0)


def test_only_connections_to_its_own_port_are_ever_shut(engine: Engine, tmp_path: Path) -> None:
    """A file's number may be another file's by the time that it is to be shut."""
    listener = engine.channel._listener
    assert listener is not None
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted = stack.enter_context(server.accept()[0])
        ours, theirs = map(stack.enter_context, socket.socketpair())
        own = stack.enter_context(knock(engine))
        file = stack.enter_context((tmp_path / "file").open("wb"))
        for bystander in (server, client, accepted, ours, own, file):
            listener._shut(bystander.fileno())
        listener._shut(1 << 20)  # no file at all
        for one, two in ((client, accepted), (ours, theirs)):
            one.sendall(b"still here")
            assert two.recv(100) == b"still here"
        own.sendall(b"\xff")
        assert file.write(b"x") == 1


def test_a_crowd_at_the_port_does_not_hold_up_the_end(
    quick: None, start_engine: StartEngine
) -> None:
    stop = threading.Event()
    engine = start_engine(listen_tcp=LOOPBACK, key=KEY)
    port = port_of(engine)

    def crowd() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()

    threads = [threading.Thread(target=crowd) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        engine.channel.close()
        assert not inspection.channel_runs(engine.channel)
    finally:
        stop.set()
        for thread in threads:
            thread.join(LONG)


# Who is gone


class Proxy:
    """Passes a TCP connection on, and on demand swallows what is sent, as a cut link does."""

    def __init__(self, port: int) -> None:
        self.target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.connections = 0
        self.cut = threading.Event()
        self.seen = bytearray()
        self._sockets: list[socket.socket] = [self._server]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self.connections += 1
                far = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    self._threads.append(
                        threading.Thread(target=self._pass, args=(*pair, self.cut))
                    )
                    self._threads[-1].start()

    def take_place(self, port: int) -> None:
        """Swallow what old connections send, and lead new ones to another port."""
        self.cut.set()
        self.cut = threading.Event()
        self.target = port

    def _pass(self, source: socket.socket, target: socket.socket, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not cut.is_set():
                    self.seen += data
                    target.sendall(data)
            if not cut.is_set():
                target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG)
        for each in self._sockets:
            each.close()


def test_a_cut_link_fails_the_lease_requests_on_it_and_the_server_forgets_it(
    lively: None, engine: Engine, friend: Asker
) -> None:
    with Proxy(port_of(engine)) as proxy:
        address = f"tcp://127.0.0.1:{proxy.port}"
        slow = engine.handoff(filled=False)
        waiting = ask(
            friend.channel, address, slow.token, engine.handshake_reply.epoch, timeout=600.0
        )
        wait_until(lambda: engine.server.has_pending)
        assert inspection.connections(engine.channel) == 1
        proxy.cut.set()
        assert "is gone" in str(failure(waiting))
        assert friend.gone.wait(LONG)
        wait_until(lambda: not inspection.connections(engine.channel))
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)


def test_whatever_connects_hosts_notices_within_ten_seconds_that_the_other_is_silent() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:
        sockets_module.prepare_tcp(socket_, HostPort("127.0.0.1", 1), KEY)
        interval, timeout = socket_.get(zmq.HEARTBEAT_IVL), socket_.get(zmq.HEARTBEAT_TIMEOUT)
    assert interval > 0
    assert timeout > 0
    assert interval + timeout + 1000 * channel_module.TICK_S < 10_000


def test_an_idle_connection_stays(lively: None, engine: Engine, start_asker: StartAsker) -> None:
    asker = start_asker(KEY)
    with Proxy(port_of(engine)) as proxy:
        address = f"tcp://127.0.0.1:{proxy.port}"
        for idle_s in (6.0, 0.0):  # longer than a dead one would last
            token = engine.handoff().token
            assert ask(asker.channel, address, token, engine.handshake_reply.epoch).result(LONG)
            time.sleep(idle_s)
        assert proxy.connections == 1
    # Only now is it gone.
    assert asker.gone.wait(LONG)


def test_a_peer_that_is_not_there_is_not_looked_for_with_every_request(
    monkeypatch: pytest.MonkeyPatch, quick: None, start_engine: StartEngine, friend: Asker
) -> None:
    links = []
    link = control_sockets.Link
    monkeypatch.setattr(control_sockets, "Link", lambda *args: links.append(args) or link(*args))
    monkeypatch.setattr(channel_module, "FORGET_REFUSAL_S", 1e9)
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    for _ in range(3):
        error = failure(ask(friend.channel, address, b"t" * 16, b"e" * 16))
        assert address in str(error)
    assert len(links) == 1
    monkeypatch.setattr(sockets_module, "HANDSHAKE_MS", 60_000)
    engine = start_engine(listen_tcp=HostPort("127.0.0.1", port), key=KEY)
    monkeypatch.setattr(channel_module, "FORGET_REFUSAL_S", 0.0)
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)
    assert len(links) == 2


def test_failed_peers_are_forgotten(monkeypatch: pytest.MonkeyPatch, friend: Asker) -> None:
    monkeypatch.setattr(channel_module, "FORGET_REFUSAL_S", 0.1)
    failure(ask(friend.channel, f"tcp://127.0.0.1:{free_port()}", b"t" * 16, b"e" * 16))
    wait_until(lambda: not inspection.engines_asked(friend.channel))


def test_a_host_that_does_not_answer_fails_the_lease_request(quick: None, friend: Asker) -> None:
    # A full backlog: the kernel lets what more arrives go unanswered.
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        address = f"tcp://127.0.0.1:{full.getsockname()[1]}"
        failure(ask(friend.channel, address, b"t" * 16, b"e" * 16, timeout=600.0))


def test_an_engine_that_restarts_at_its_port_is_found_again_at_once(
    monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine, friend: Asker
) -> None:
    monkeypatch.setattr(channel_module, "FORGET_REFUSAL_S", 1e9)
    first = start_engine(listen_tcp=LOOPBACK, key=KEY)
    assert friend.lease_by_tcp(first, first.handoff()).result(LONG)
    first.channel.close()
    assert friend.gone.wait(LONG)
    again = HostPort("127.0.0.1", port_of(first))
    second = start_engine(listen_tcp=again, key=KEY, epoch=b"2" * 16)
    assert (
        friend.lease_by_tcp(second, second.handoff()).result(LONG).handshake_reply.epoch
        == b"2" * 16
    )


def test_a_new_engine_is_found_before_the_end_of_the_old_one_is_known(
    start_engine: StartEngine, friend: Asker
) -> None:
    first = start_engine(listen_tcp=LOOPBACK, key=KEY)
    with Proxy(port_of(first)) as proxy:
        address = f"tcp://127.0.0.1:{proxy.port}"
        lease = ask(friend.channel, address, first.handoff().token, first.handshake_reply.epoch)
        friend.channel.release(lease.result(LONG))
        # As when a host died: nothing ends the connection.
        second = start_engine("second.sock", listen_tcp=LOOPBACK, key=KEY, epoch=b"2" * 16)
        proxy.take_place(port_of(second))
        again = ask(friend.channel, address, second.handoff().token, b"2" * 16)
        assert again.result(LONG).handshake_reply.epoch == b"2" * 16
        assert not friend.gone.is_set()


def test_close_leaves_nothing(
    folder: Path, compatibility: CompatibilityKey, start_engine: StartEngine, friend: Asker
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    engine = start_engine(listen_tcp=LOOPBACK, key=KEY)
    asker = Asker(compatibility, KEY)
    assert asker.lease_by_tcp(engine, engine.handoff()).result(LONG)
    for each in (asker, engine) * 2:
        each.channel.close()
        assert not inspection.channel_runs(each.channel)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert list(folder.iterdir()) == []


# Addresses and names


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5", "tcp://*:5", "tcp://127.1:5", "tcp://a;b:5", "tcp://[::1]", "tcp://h:x"],
)
def test_addresses_that_name_no_host_are_not_connected_to(
    address: str, friend: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_sockets, "Link", None)
    assert "cannot connect" in str(failure(ask(friend.channel, address, b"t" * 16, b"e" * 16)))


@pytest.mark.parametrize("address", [HostPort("192.0.2.1", 0), HostPort("no-such.invalid", 0)])
def test_an_address_of_another_host_is_an_error_at_start(
    address: HostPort, folder: Path, start_engine: StartEngine
) -> None:
    with pytest.raises(ConfigError, match="listen: "):
        start_engine(listen_tcp=address, key=KEY)
    assert list(folder.iterdir()) == []


def test_a_port_that_is_taken_is_an_error_at_start(folder: Path, start_engine: StartEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = HostPort("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"{address}.*in use"):
            start_engine(listen_tcp=address, key=KEY)
    assert list(folder.iterdir()) == []


def test_a_unix_socket_that_is_taken_leaves_no_port_open(start_engine: StartEngine) -> None:
    start_engine()
    before = open_ports()
    with pytest.raises(TransportError, match="engine_id"):
        start_engine(listen_tcp=LOOPBACK, key=KEY)
    assert open_ports() <= before


def names(**known: str) -> Callable[..., list[Any]]:
    """In place of `socket.getaddrinfo`."""

    def look_up(host: str, port: int, **_: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror(f"unknown {host}")
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, None, None, "", (ip, port))
            for ip in known[host].split()
        ]

    return look_up


def test_a_name_that_means_loopback_here_is_no_address_for_peers(
    monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine
) -> None:
    """As Debian has the host's own name in /etc/hosts."""
    monkeypatch.setattr(resolver_module.socket, "getaddrinfo", names(node="127.0.1.1"))
    with pytest.raises(ConfigError, match=r"127\.0\.1\.1, which no other host can reach"):
        start_engine(listen_tcp=HostPort("node", 0), key=KEY)


def test_a_peer_may_be_named(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, friend: Asker
) -> None:
    monkeypatch.setattr(resolver_module.socket, "getaddrinfo", names(node="fd00::1 127.0.0.1"))
    address = f"tcp://node:{port_of(engine)}"
    for _ in range(2):
        token = engine.handoff().token
        lease = ask(friend.channel, address, token, engine.handshake_reply.epoch).result(LONG)
        assert lease.address == address
    unknown = failure(ask(friend.channel, "tcp://nobody:5", b"t" * 16, b"e" * 16))
    assert isinstance(unknown, PeerUnreachableError)
    assert "nobody" in str(unknown)


@pytest.mark.parametrize("how", ["dropped", "cancelled"])
def test_a_handoff_that_is_let_go_of_while_a_name_is_looked_up_ends(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, friend: Asker, how: str
) -> None:
    found: Future[HostPort] = Future()
    monkeypatch.setattr(resolver_module.Resolver, "look_up", lambda *_: found)
    address, handoff = f"tcp://node:{port_of(engine)}", engine.handoff()
    if how == "dropped":
        friend.channel.drop(address, handoff.token)
    else:
        epoch = engine.handshake_reply.epoch
        pending = PendingLease(handoff.token, PROMPT, epoch, "", time.monotonic() + LONG)
        pending.future.cancel()
        friend.channel.request_lease(address, pending)
    other = ask(friend.channel, address, engine.handoff().token, engine.handshake_reply.epoch)
    found.set_result(HostPort("127.0.0.1", port_of(engine)))
    assert other.result(LONG)
    assert handoff.closed


def test_a_name_that_is_looked_up_for_ever_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, compatibility: CompatibilityKey
) -> None:
    monkeypatch.setattr(resolver_module, "MAX_LOOKUPS", 2)
    asked, release = threading.Semaphore(0), threading.Event()

    def look_up(*_: object, **__: object) -> list[Any]:
        asked.release()
        release.wait(LONG)
        return [(socket.AF_INET, None, None, "", ("127.0.0.1", 1))]

    monkeypatch.setattr(resolver_module.socket, "getaddrinfo", look_up)
    asker = Asker(compatibility, KEY)
    try:
        slow = [
            ask(asker.channel, f"tcp://slow:{n}", b"t" * 16, b"e" * 16, timeout=0.3) for n in (1, 2)
        ]
        assert asked.acquire(timeout=LONG)
        assert asked.acquire(timeout=LONG)
        more = failure(ask(asker.channel, "tcp://slow:3", b"t" * 16, b"e" * 16))
        assert "2 calls are under way on omni-resolve" in str(more)
        assert asker.lease_by_tcp(engine, engine.handoff()).result(LONG)
        assert all("in time" in str(failure(each)) for each in slow)
        asker.channel.close()
        assert not inspection.channel_runs(asker.channel)
    finally:
        release.set()
        asker.channel.close()


class Links(control_sockets.ZmqSockets):
    """Notes whom it connects to."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str | HostPort] = []

    def link(self, target: str | HostPort, key: ClusterKey | None) -> Link:
        self.made.append(target)
        return super().link(target, key)


@pytest.mark.parametrize("meanwhile", ["nothing", "given up", "closing"])
def test_whose_name_is_found_too_late_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch,
    compatibility: CompatibilityKey,
    clock: FakeClock,
    meanwhile: str,
) -> None:
    found: Future[HostPort] = Future()
    monkeypatch.setattr(resolver_module.Resolver, "look_up", lambda *_: found)
    threads: list[ByHand] = []

    def start(*arguments: Any, **options: Any) -> ByHand:
        threads.append(ByHand(*arguments, **options))
        return threads[0]

    links = Links()
    channel = ControlChannel(
        compatibility=compatibility, key=KEY, context=EngineContext(clock, start), sockets=links
    )
    (thread,) = threads
    pending = PendingLease(b"t" * 16, PROMPT, b"e" * 16, "", clock() + LONG)
    channel.request_lease("tcp://slow:1", pending)
    thread.turn()
    if meanwhile == "given up":
        clock.advance(INTRODUCTION_S)
        thread.turn()
        assert "no answer to the handshake" in str(failure(pending.future))
    found.set_result(HostPort("127.0.0.1", 1))
    if meanwhile != "closing":
        thread.turn()
    channel.close()
    assert isinstance(failure(pending.future), PeerUnreachableError)
    assert links.made == ([HostPort("127.0.0.1", 1)] if meanwhile == "nothing" else [])


def test_a_system_without_threads_to_spare_fails_the_lease_request(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, start_asker: StartAsker
) -> None:
    monkeypatch.setattr(resolver_module, "MAX_LOOKUPS", 1)
    friend = start_asker(KEY)

    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        for host in ("one", "two"):
            error = failure(ask(friend.channel, f"tcp://{host}:5", b"t" * 16, b"e" * 16))
            assert "can't start new thread" in str(error)
    assert friend.lease_by_tcp(engine, engine.handoff()).result(LONG)
