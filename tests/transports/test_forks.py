# SPDX-License-Identifier: Apache-2.0
"""Processes that an engine forks: they neither end what it serves, nor outlive it in its place."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.config import MooncakeSettings
from omni_connector.errors import TransportError
from omni_connector.net import runtime
from omni_connector.net.keys import own_key
from omni_connector.net.listener import TcpListener
from omni_connector.net.peers import HostPort
from omni_connector.net.zeromq import make_context
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.mooncake_store import MooncakeStoreConnector
from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.transports.base import Endpoint
from omni_connector.transports.mooncake import client as mooncake_client
from omni_connector.transports.mooncake import engine as mooncake_engine
from omni_connector.transports.mooncake import library as mooncake_lib
from omni_connector.transports.mooncake.client import StoreClient
from omni_connector.transports.mooncake.engine import TransferEngine
from omni_connector.transports.shm import SharedMemoryTransport
from tests import inspection
from tests.patience import wait_until

WAIT_S = 30.0
KEY = ObjectKey("0", "1", "k")

# Exports an arena, listens for peers as a prefill engine does, and forks a process that lives on.
OWNER = """
import os, sys, time
from pathlib import Path
import msgspec
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.messages import CompatibilityKey, HandshakeReply
from omni_connector.handoff.server import ControlServer
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.keys import own_key
from omni_connector.net.peers import HostPort
from omni_connector.arena.arena import Arena
from omni_connector.transports.shm import SharedMemoryTransport

folder = Path(sys.argv[1])
connector = SharedMemoryTransport(folder=folder)
endpoint = connector.export(Arena.create(1, 4096), "arena")
shape = GroupShape(kind="f", block_size=16, attention_type="all", layers="l", pages=("H2.N16.C64",))
print_ = CompatibilityKey(
    model="m", dtype="d", kv_dtype="k", integrity="full", kv_heads=2, ranks=1, groups=(shape,)
)
server = ControlServer(
    compatibility=print_,
    handshake_reply=HandshakeReply(b"e" * 16, "", print_, ((endpoint,),)),
    directory=SlotDirectory(1, PROCESS_CONTEXT, 60.0),
    clock=time.monotonic,
    pending_timeout=60.0,
    count=lambda name: None,
)
channel = ControlChannel(
    compatibility=print_,
    server=server,
    listen=folder / "control.sock",
    listen_tcp=HostPort("127.0.0.1", 0),
    key=own_key(folder / ".key"),
)
print(msgspec.json.encode(endpoint).decode(), channel.tcp_address.port, flush=True)
sys.stdin.readline()  # whoever is to be connected is
child = os.fork()
if not child:
    connector.close()
    channel.close()
    os.write(1, b"closed\\n")  # at once, as the other process writes there too
    time.sleep(600)
os.write(1, f"{child}\\n".encode())
time.sleep(600)
"""


@pytest.fixture
def owner(place: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)  # with what it forked
    process.communicate()


def test_a_child_neither_ends_nor_outlives_what_its_parent_serves(
    owner: "subprocess.Popen[str]", place: Path
) -> None:
    assert owner.stdin is not None
    assert owner.stdout is not None
    told, port = owner.stdout.readline().rsplit(" ", 1)
    endpoint = msgspec.json.decode(told, type=Endpoint)
    control = place / "control.sock"
    tcp = ("127.0.0.1", int(port))
    with SharedMemoryTransport(folder=place) as reader:
        remote = reader.attach(endpoint, timeout=WAIT_S)
        with socket.create_connection(tcp, timeout=WAIT_S) as peer:
            assert peer.recv(1)  # accepted
            owner.stdin.write("\n")
            owner.stdin.flush()
            lines = {owner.stdout.readline().strip() for _ in range(2)}
            assert "closed" in lines
            child = int(lines.difference({"closed"}).pop())

            assert remote.alive
            reader.attach(endpoint, timeout=WAIT_S).close()
            assert not runtime.is_dead(control)
            socket.create_connection(tcp, timeout=WAIT_S).close()

            os.kill(owner.pid, signal.SIGKILL)
            owner.wait()
            wait_until(lambda: not remote.alive and runtime.is_dead(control))
            while peer.recv(4096):  # it is hung up on
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(tcp, timeout=WAIT_S)
            os.kill(child, 0)  # while the child lives
        remote.close()
    runtime.sweep(place)
    assert [path.name for path in place.iterdir()] == [".key"]


def test_an_arena_is_withdrawn_by_its_process_only(place: Path) -> None:
    with SharedMemoryTransport(folder=place) as connector, Arena.create(1, 4096) as arena:
        endpoint = connector.export(arena, "arena")
        child = os.fork()
        if not child:
            try:
                connector.withdraw(endpoint)
                connector.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with SharedMemoryTransport(folder=place) as reader:
            reader.attach(endpoint, timeout=WAIT_S).close()


def test_a_child_leaves_the_objects_of_its_parent_and_has_its_own(place: Path) -> None:
    told, tell = os.pipe()
    asked, ask = os.pipe()
    with SharedMemoryConnector(
        folder=place, geometry=(8, 4096), object_timeout=WAIT_S
    ) as connector:
        assert connector.put("0", "1", "req-1", b"before")[0]
        child = os.fork()
        if not child:
            try:
                connector.cleanup("req-1")
                found = connector.get("0", "1", "req-1")
                assert found is not None
                assert found[0] == b"before"
                for number in range(4):
                    assert connector.put("0", "1", f"child-{number}", bytes([number]) * 5000)[0]
                os.write(tell, b"put")
                os.read(asked, 1)  # the parent has looked
                connector.close()
            except BaseException:  # noqa: BLE001 - the parent tells it
                os.write(tell, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(tell)
        mine = [connector.put("0", "1", f"parent-{n}", bytes([n + 9]) * 100)[0] for n in range(4)]
        assert os.read(told, 1 << 16).decode() == "put"
        assert all(mine)
        with SharedMemoryConnector(folder=place, object_timeout=WAIT_S) as reader:
            assert reader.get("0", "1", "req-1") == (b"before", 6)
            for n in range(4):
                assert reader.get("0", "1", f"parent-{n}") == (bytes([n + 9]) * 100, 100)
                assert reader.get("0", "1", f"child-{n}") == (bytes([n]) * 5000, 5000)
        os.write(ask, b".")
        os.waitpid(child, 0)
        assert connector.get("0", "1", "req-1") == (b"before", 6)
    for each in (told, asked, ask):
        os.close(each)
    assert not list(place.iterdir())


def test_a_child_whose_parent_holds_every_lock_does_not_hang(place: Path) -> None:
    with SharedMemoryConnector(folder=place) as connector:
        assert connector.put("0", "1", "k", b"x")[0]
        with connector._lock:
            child = os.fork()
            if not child:
                connector.put("0", "1", "k", b"y")
                connector.close()
                os._exit(0)
        assert ended(child) == 0


def test_a_child_keeps_the_files_that_have_the_numbers_of_a_closed_listener(place: Path) -> None:
    context = make_context()
    listener = TcpListener(context, HostPort("127.0.0.1", 0), own_key(place / ".key"))
    context.destroy(linger=0)
    listener.close()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]  # the lowest numbers are reused
    try:
        assert in_child(lambda: [os.fstat(number) for number in files]) == 0
    finally:
        for number in files:
            os.close(number)
    assert listener.address.host == "127.0.0.1"  # until here the listener exists


def test_a_child_does_not_hang_where_an_arena_is_being_mapped(place: Path) -> None:
    with (
        SharedMemoryConnector(folder=place, geometry=(64, 1 << 20)) as sender,
        SharedMemoryConnector(folder=place) as receiver,
    ):
        sender.put("0", "1", "k", b"x")
        assert receiver.get("0", "1", "k") == (b"x", 1)
        [peer] = inspection.senders_asked(receiver)
        with peer.view._prefaulter._stopped._cond:  # as its thread may have it
            child = os.fork()
            if not child:
                os._exit(0)
        assert ended(child) == 0


class Native:
    """As an object of Mooncake, which must not be destroyed in a process that was forked."""

    def initialize(self, *arguments: object) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def setup(self, *arguments: object) -> int:
        return 0

    def batch_upsert_from(self, names: list[str], *arguments: object) -> list[int]:
        return [0 for _ in names]

    def batch_get_into(self, names: list[str], *arguments: object) -> list[int]:
        return [mooncake_client.MISSING for _ in names]

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        return [0 for _ in names]

    def register_buffer(self, *arguments: object) -> int:
        return 0

    unregister_buffer = register_memory = unregister_memory = register_buffer

    def close(self) -> int:
        assert os.getpid() == self.process
        return 0

    process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(9)


def ended(child: int) -> int:
    """The exit status of a child, which is killed if it hangs."""
    killing = threading.Timer(WAIT_S, os.kill, (child, signal.SIGKILL))
    killing.start()
    try:
        return os.waitpid(child, 0)[1]
    finally:
        killing.cancel()


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a process that is forked and does this."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            gc.collect()
            code = 0
        except BaseException:  # noqa: BLE001 - the child ends here
            traceback.print_exc()
        finally:
            os._exit(code)
    return ended(child)


def test_a_child_ends_no_engine_of_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mooncake_engine, "engine_module", lambda family: SimpleNamespace(TransferEngine=Native)
    )
    engines = [TransferEngine(MooncakeSettings(), "127.0.0.1") for _ in range(2)]
    for engine in engines:
        assert engine.address == "127.0.0.1:1"
    engines[0].register(1 << 12, 1 << 12)

    def work() -> None:
        with engines[0]._lock:  # it is another one than the parent's
            pass
        engines[0].close()
        with pytest.raises(TransportError):
            _ = engines[0].address
        engines.clear()

    with engines[0]._lock:
        assert in_child(work) == 0
    assert engines[0].address == "127.0.0.1:1"
    for engine in engines:
        engine.close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a master of a store that takes everything."""
    config = SimpleNamespace(with_soft_pin=False)
    module = SimpleNamespace(MooncakeDistributedStore=Native, ReplicateConfig=lambda: config)
    monkeypatch.setattr(StoreClient, "_started", False)
    for each in (mooncake_client, mooncake_lib):
        monkeypatch.setattr(each, "store_module", lambda family=None: module)
    with socket.create_server(("127.0.0.1", 0)) as master:
        yield f"127.0.0.1:{master.getsockname()[1]}"


def test_a_child_uses_no_mooncake_store_of_its_parent(store: str) -> None:
    def work() -> None:
        with pytest.raises(TransportError, match="start processes with 'spawn'"):
            MooncakeStoreConnector(master=store)
        parts = [memoryview(b"x")]
        with pytest.raises(TransportError, match="a forked process makes its own"):
            connectors[0].store_object(KEY, parts)
        assert connectors[0].get("0", "1", "k") is None
        assert connectors[0].drop_objects("k") == 0
        assert connectors[0].health()["status"] == "closed"
        # Longer than a child may take: it waits for no threads, which are not there.
        mooncake_client._CLOSE_S = 2 * WAIT_S
        connectors[0].close()
        connectors.clear()

    connectors = [MooncakeStoreConnector(master=store)]
    with connectors[0] as connector:
        assert connector.put("0", "1", "k", b"x")[0]
        with connector._lock, StoreClient._shared_lock:
            assert in_child(work) == 0
        assert connector.health()["objects"] == 1
        assert connector.drop_objects("k") == 1


def test_a_child_of_a_process_without_a_store_has_one_of_its_own(store: str) -> None:
    def work() -> None:
        Native.process = os.getpid()
        with MooncakeStoreConnector(master=store) as connector:
            assert connector.put("0", "1", "k", b"x")[0]

    assert in_child(work) == 0
