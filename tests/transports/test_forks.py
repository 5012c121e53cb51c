# SPDX-License-Identifier: Apache-2.0
"""Processes that an engine forks: they neither end what it serves, nor outlive it in its place."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from omni_connector.memory.arena import Arena
from omni_connector.net import runtime
from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.transports.base import Endpoint
from omni_connector.transports.shm import SharedMemoryTransport

WAIT_S = 30.0

# Exports an arena, listens for peers as a prefill engine does, and forks a process that lives on.
OWNER = """
import os, sys, time
from pathlib import Path
import msgspec
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.directory import SlotDirectory
from omni_connector.handoff.messages import CompatibilityKey, HandshakeReply
from omni_connector.handoff.server import ControlServer
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.keys import own_key
from omni_connector.net.peers import HostPort
from omni_connector.memory.arena import Arena
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
    directory=SlotDirectory(1, time.monotonic, 60.0),
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
            end = time.monotonic() + WAIT_S
            while remote.alive or not runtime.is_dead(control):
                assert time.monotonic() < end
                time.sleep(0.01)
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
        end = time.monotonic() + WAIT_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert ended[1] == 0
