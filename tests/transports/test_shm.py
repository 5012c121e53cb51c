# SPDX-License-Identifier: Apache-2.0
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.errors import (
    ConfigError,
    IncompatiblePeerError,
    OmniError,
    PeerRefusedError,
    PeerUnreachableError,
    StaleSlotError,
    TransportError,
)
from omni_connector.net import runtime
from omni_connector.net.unix import Listener
from omni_connector.testing.conformance import TransportConformance, publish, read
from omni_connector.transports.base import Endpoint
from omni_connector.transports.shm import Attach, AttachReply, SharedMemoryTransport
from tests.patience import wait_until

from ..peer_processes import EXPORT, WAIT_S, Peer, starting
from ..stopping import stop

REQUESTS = msgspec.msgpack.Decoder(Attach)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_for_closed(before: int) -> None:
    """Wait until no more descriptors are open than before: threads close theirs."""
    wait_until(lambda: open_fds() <= before)


class TestSharedMemoryConformance(TransportConformance):
    def connect(self, place: Path) -> SharedMemoryTransport:
        return SharedMemoryTransport(folder=place)


@pytest.fixture
def reader(place: Path) -> Iterator[SharedMemoryTransport]:
    with SharedMemoryTransport(folder=place) as reader:
        yield reader


@pytest.mark.parametrize(
    "script",
    [
        "open('/dev/shm/omni', 'w')",
        "os.mkdir('/dev/shm/omni')",
        "from multiprocessing.shared_memory import SharedMemory",
    ],
)
def test_a_peer_that_makes_files_in_dev_shm_is_caught(place: Path, script: str) -> None:
    def run() -> None:
        with starting(place) as start:
            start(script).wait()

    with pytest.raises(AssertionError, match="/dev/shm"):
        run()


def test_killed_peer_is_seen_dead_and_what_was_mapped_stays(
    start: Callable[[str], Peer], reader: SharedMemoryTransport, place: Path
) -> None:
    peer = start(EXPORT)
    endpoint = peer.endpoint()
    remote = reader.attach(endpoint, timeout=WAIT_S)
    assert len(os.listdir(place)) == 2
    peer.kill()
    assert not remote.alive
    assert read(remote, 1, 7).tobytes() == b"seven" * 1000
    with pytest.raises(StaleSlotError):
        read(remote, 2, 8)
    with pytest.raises(PeerUnreachableError):
        reader.attach(endpoint, timeout=WAIT_S)
    # Finding it dead has removed what it left.
    assert os.listdir(place) == []
    remote.close()


def test_the_arena_of_a_killed_peer_is_handed_on(
    start: Callable[[str], Peer], reader: SharedMemoryTransport, place: Path
) -> None:
    peer = start(EXPORT)
    before = open_fds()
    with Arena.create(1, 4096) as own, SharedMemoryTransport(folder=place) as last:
        remote = reader.attach(peer.endpoint(), timeout=WAIT_S)
        assert reader.hand_on(remote) is None  # it has no socket of its own
        ours = reader.export(own, "reader")
        peer.kill()
        handed_on = reader.hand_on(remote)
        assert handed_on is not None
        with last.attach(handed_on, timeout=WAIT_S) as again:
            assert read(again, 1, 7).tobytes() == b"seven" * 1000
            remote.close()  # what is handed on needs no mapping of this process
            assert again.alive
            reader.withdraw(handed_on)
            with last.attach(ours, timeout=WAIT_S) as other:  # the socket serves this arena, too
                assert other.alive
            with pytest.raises(PeerRefusedError):
                last.attach(handed_on, timeout=WAIT_S)
            assert read(again, 1, 7).tobytes() == b"seven" * 1000
        reader.withdraw(ours)
        assert not Path(ours.address).exists()
    reader.close()
    wait_for_closed(before)


@pytest.mark.parametrize(
    "point",
    [
        "socket.socket.listen = die",
        "os.rename = die",
        "os.chmod = die",
        "rename = os.rename; os.rename = lambda *a: (rename(*a), die())",
        "fcntl.fcntl = die",
        "mmap.mmap = die",
        "os.dup = die",
    ],
)
def test_peer_killed_while_it_sets_up_leaves_nothing_and_blocks_nobody(
    start: Callable[[str], Peer], reader: SharedMemoryTransport, place: Path, point: str
) -> None:
    peer = start(
        "import fcntl, mmap, socket\n"
        "class Socket(socket.socket): pass\n"
        "socket.socket = Socket\n"
        f"{point}\n"
        "arena = Arena.create(4, 8192)\n" + EXPORT
    )
    assert peer.wait() == -9
    assert peer.line() == ""
    # The lock on the folder has gone with it: the next engine starts under the same name.
    with Arena.create(1, 4096) as arena:
        endpoint = reader.export(arena, "peer")
        reader.attach(endpoint, timeout=WAIT_S).close()
        assert os.listdir(place) == [Path(endpoint.address).name]
        reader.withdraw(endpoint)


@pytest.mark.parametrize(
    "point",
    [
        "unix.Connection.ask = die",
        "unix.receive = die",
        "os.close = die",
        "import omni_connector.transports.shm as m; m.ArenaView.open = die",
    ],
)
def test_owner_outlives_readers_killed_while_they_attach(
    start: Callable[[str], Peer], place: Path, point: str
) -> None:
    with SharedMemoryTransport(folder=place) as owner, Arena.create(2, 4096) as arena:
        endpoint = owner.export(arena, "owner")
        fds = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            peer = start(
                "from omni_connector.net import unix\n"
                "from omni_connector.transports.base import Endpoint\n"
                f"wire = {msgspec.json.encode(endpoint)!r}\n"
                "endpoint = msgspec.json.decode(wire, type=Endpoint)\n"
                f"{point}\n"
                "transport.attach(endpoint, timeout=60)\n"
            )
            assert peer.wait() == -9
        publish(arena, 0, 1, b"content")
        with SharedMemoryTransport(folder=place) as reader:
            with reader.attach(endpoint, timeout=WAIT_S) as remote:
                assert read(remote, 0, 1).tobytes() == b"content"
            with reader.attach(endpoint, timeout=WAIT_S) as again:
                assert again.alive
        assert owner.health()["status"] == "healthy"
        owner.withdraw(endpoint)
        # All that is left of the readers, pipes apart, is gone.
        wait_until(lambda: sockets_of(owner) == 0)
        assert len(os.listdir("/proc/self/fd")) <= fds + 2 * 2


def sockets_of(owner: SharedMemoryTransport) -> int:
    assert owner._listener is not None
    return len(owner._listener._connections)


def test_owner_killed_between_question_and_answer(
    start: Callable[[str], Peer], reader: SharedMemoryTransport
) -> None:
    peer = start("transport._answer = die\n" + EXPORT)
    endpoint = peer.endpoint()
    with pytest.raises(PeerUnreachableError):
        reader.attach(endpoint, timeout=WAIT_S)
    assert peer.wait() == -9


def test_owner_killed_in_the_middle_of_a_write(
    start: Callable[[str], Peer], reader: SharedMemoryTransport
) -> None:
    peer = start(
        EXPORT.replace("sys.stdin.read()", "")
        + "sys.stdin.readline()\n"
        + "arena.begin_write(1, 8)\narena.slots[1, :100] = 0\ndie()\n"
    )
    with reader.attach(peer.endpoint(), timeout=WAIT_S) as remote:
        assert remote.verify(1, 7).length == 5000
        assert peer.process.stdin is not None
        peer.process.stdin.write("\n")
        peer.process.stdin.flush()
        assert peer.wait() == -9
        for generation in (7, 8):
            with pytest.raises(StaleSlotError):
                read(remote, 1, generation)
        assert not remote.alive


def test_stopped_peer_is_given_up_in_time(start: Callable[[str], Peer], place: Path) -> None:
    peer = start(EXPORT)
    endpoint = peer.endpoint()
    stop(peer.process.pid)
    with SharedMemoryTransport(folder=place) as reader:
        with pytest.raises(PeerUnreachableError):
            reader.attach(endpoint, timeout=0.1)
        # It is not dead: its sockets are left alone.
        runtime.sweep(place)
        assert len(os.listdir(place)) == 2
        os.kill(peer.process.pid, signal.SIGCONT)
        reader.attach(endpoint, timeout=WAIT_S).close()


def test_restarted_peer_is_another_arena(
    start: Callable[[str], Peer], reader: SharedMemoryTransport
) -> None:
    first = start(EXPORT)
    old = first.endpoint()
    first.kill()
    second = start(EXPORT)
    new = second.endpoint()
    assert new.address == old.address
    with pytest.raises(PeerRefusedError):
        reader.attach(old, timeout=WAIT_S)
    reader.attach(new, timeout=WAIT_S).close()


def test_dead_sockets_are_swept_when_a_connector_starts_to_serve(
    start: Callable[[str], Peer], place: Path
) -> None:
    peer = start(EXPORT)
    peer.endpoint()
    peer.kill()
    assert len(os.listdir(place)) == 2
    with SharedMemoryTransport(folder=place) as connector, Arena.create(1, 4096) as arena:
        endpoint = connector.export(arena, "next")
        assert os.listdir(place) == [Path(endpoint.address).name]


def test_connector_in_an_open_folder_is_refused(place: Path) -> None:
    place.chmod(0o755)
    with pytest.raises(ConfigError):
        SharedMemoryTransport(folder=place)


def test_closed_arena_does_not_hand_out_another_file(place: Path) -> None:
    """The number of a closed descriptor may be that of any other file by now."""
    with SharedMemoryTransport(folder=place) as connector:
        arena = Arena.create(1, 4096)
        publish(arena, 0, 1, b"content")
        endpoint = connector.export(arena, "name")
        arena.close()
        with Arena.create(1, 4096), connector.attach(endpoint, timeout=WAIT_S) as remote:
            assert read(remote, 0, 1).tobytes() == b"content"


def test_listener_that_ended_shows_in_health(place: Path) -> None:
    with SharedMemoryTransport(folder=place) as connector, Arena.create(1, 4096) as arena:
        connector.export(arena, "a")
        assert connector._listener is not None
        connector._listener.close()
        assert connector.health()["status"].startswith("unhealthy")


def test_no_descriptor_is_left(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with (
        SharedMemoryTransport(folder=place) as one,
        SharedMemoryTransport(folder=place) as other,
        Arena.create(2, 4096, prefault=True) as arena,
    ):
        publish(arena, 0, 1, b"content")
        for _ in range(3):
            endpoint = one.export(arena, "name")
            other.attach(endpoint, timeout=WAIT_S).close()
            with pytest.raises(OmniError):
                other.attach(msgspec.structs.replace(endpoint, n_slots=3), timeout=WAIT_S)
            with pytest.raises(TransportError):
                one.export(arena, "again")
            with Arena.create(1, 4096) as third, pytest.raises(TransportError):
                other.export(third, "name")
            one.withdraw(endpoint)
    assert os.listdir(place) == []
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() <= threads


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as name:
        yield Path(name)


def test_a_folder_that_a_peer_names_is_not_swept(
    reader: SharedMemoryTransport, place: Path, elsewhere: Path
) -> None:
    plain = Endpoint(transport="shm", address="x", epoch=b"e" * 16, n_slots=1, slot_bytes=4096)
    for folder in (place, elsewhere):
        dead = folder / f"a-{'0' * 24}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(dead))
        with pytest.raises(PeerUnreachableError):
            reader.attach(msgspec.structs.replace(plain, address=str(dead)), timeout=WAIT_S)
        assert dead.exists() is (folder == elsewhere)


@pytest.mark.parametrize("character", ["\0", "\n", "\x1b", "\u2028"])
def test_an_address_is_one_line(character: str) -> None:
    address = f"/tmp/x{character}y/a-{'0' * 24}.sock"
    with pytest.raises(ValueError, match="is no address"):
        Endpoint(transport="shm", address=address, epoch=b"e" * 16, n_slots=1, slot_bytes=4096)


def test_attached_arena_must_be_the_announced_one(place: Path) -> None:
    path = runtime.socket_path(place, "peer", kind="a-")
    with (
        SharedMemoryTransport(folder=place) as reader,
        Arena.create(2, 4096) as arena,
        Arena.create(2, 4096) as other,
        SharedMemoryTransport(folder=place) as owner,
    ):
        endpoint = owner.export(arena, "honest")
        for reply, fd in (
            (AttachReply(other.epoch, 2, 4096), other.fd),
            (AttachReply(arena.epoch, 3, 4096), arena.fd),
            (AttachReply(arena.epoch, 2, 8192), arena.fd),
            (AttachReply(arena.epoch, 2, 4096), other.fd),
            (AttachReply(arena.epoch, 2, 4096), 0),
        ):
            before = open_fds()
            liar = Listener(REQUESTS, lambda question, reply=reply, fd=fd: (reply, os.dup(fd)))
            liar.add(path)
            with pytest.raises((IncompatiblePeerError, PeerRefusedError)):
                reader.attach(msgspec.structs.replace(endpoint, address=str(path)), timeout=WAIT_S)
            liar.close()
            wait_for_closed(before)
