# SPDX-License-Identifier: Apache-2.0
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from omni_connector.errors import (
    ConfigError,
    OmniError,
    PeerRefusedError,
    PeerUnreachableError,
    StaleSlotError,
    TransportError,
)
from omni_connector.memory.arena import Arena
from omni_connector.net import runtime
from omni_connector.objects.base import ObjectKey, OmniConnector
from omni_connector.objects.object_store import StoredObject
from omni_connector.testing import FakeClock
from omni_connector.testing.conformance import TransportConformance, publish
from omni_connector.transports.base import Endpoint
from omni_connector.transports.mapped import ObjectPeer
from omni_connector.transports.shm import SharedMemoryConnector


class TestSharedMemoryConformance(TransportConformance):
    object_slot_bytes = 16384
    object_slots = 16

    def connect(self, place: Path) -> OmniConnector:
        return SharedMemoryConnector(
            folder=place, object_slot_bytes=self.object_slot_bytes, object_slots=self.object_slots
        )


# Peers in processes of their own


SETUP = """
import os, signal, sys, time
from pathlib import Path
import numpy as np, xxhash, msgspec
from omni_connector.memory.arena import Arena
from omni_connector.net import runtime
from omni_connector.transports.shm import SharedMemoryConnector

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()

def say(text):
    print(text, flush=True)

def publish(slot, generation, content):
    arena.begin_write(slot, generation)
    arena.slots[slot, : len(content)] = np.frombuffer(content, np.uint8)
    arena.publish(slot, generation, b"key", len(content), xxhash.xxh3_64_intdigest(content))

connector = SharedMemoryConnector(folder=Path(sys.argv[1]))
arena = Arena.create(4, 8192, populate=True)
"""

EXPORT = """
endpoint = connector.export(arena, "peer")
publish(1, 7, b"seven" * 1000)
arena.begin_write(2, 8)
arena.slots[2, :100] = 8
connector.put("0", "1", "key", b"object")
say(msgspec.json.encode(endpoint).decode())
sys.stdin.read()
"""

WAIT_S = 60.0


class Peer:
    """A process that runs a script and answers lines."""

    def __init__(self, place: Path, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SETUP + script, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def endpoint(self) -> Endpoint:
        endpoint = msgspec.json.decode(self.line(), type=Endpoint)
        process = Path("/proc") / str(self.process.pid)
        assert "omni-connector-arena" in (process / "maps").read_text()
        assert "/dev/shm" not in (process / "maps").read_text()
        return endpoint

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)


def leaked(before: set[str]) -> list[str]:
    """New files of /dev/shm that no living process has: what peers that have ended left there.

    Other programs of this user make files there as well, and hold them. Those of Python's
    multiprocessing may be left by any; that a peer uses none of them, `Peer.endpoint` has seen.
    """
    new = set(os.listdir("/dev/shm")) - before
    new = {name for name in new if not name.startswith(("psm_", "sem.mp-"))}
    for process in Path("/proc").glob("[0-9]*") if new else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            held = (process / "maps").read_text(errors="replace")
            held += "\n".join(os.readlink(fd) for fd in (process / "fd").iterdir())
            new = {name for name in new if f"/dev/shm/{name}" not in held}
    with contextlib.suppress(FileNotFoundError):
        return sorted(n for n in new if Path("/dev/shm", n).stat().st_uid == os.geteuid())
    return leaked(before)  # one has gone meanwhile


@pytest.fixture
def start(place: Path) -> Iterator[Callable[[str], Peer]]:
    """Starts peers; whatever became of them, they leave nothing once the folder is swept."""
    peers: list[Peer] = []
    before = set(os.listdir("/dev/shm"))

    def begin(script: str) -> Peer:
        peers.append(Peer(place, script))
        return peers[-1]

    yield begin
    for peer in peers:
        peer.kill()
        for stream in (peer.process.stdin, peer.process.stdout):
            assert stream is not None
            stream.close()
    runtime.sweep(place)
    assert os.listdir(place) == []
    assert leaked(before) == []


@pytest.fixture
def reader(place: Path) -> Iterator[SharedMemoryConnector]:
    with SharedMemoryConnector(folder=place) as reader:
        yield reader


def test_peer_process_is_read(start: Callable[[str], Peer], reader: SharedMemoryConnector) -> None:
    peer = start(EXPORT)
    with reader.attach(peer.endpoint(), timeout=WAIT_S) as remote:
        assert remote.alive
        assert remote.read(1, 7).tobytes() == b"seven" * 1000
        with pytest.raises(StaleSlotError):
            remote.read(2, 8)
    assert reader.get("0", "1", "key") == (b"object", 6)
    assert peer.process.stdin is not None
    peer.process.stdin.close()
    assert peer.wait() == 0


def test_killed_peer_is_seen_dead_and_what_was_mapped_stays(
    start: Callable[[str], Peer], reader: SharedMemoryConnector, place: Path
) -> None:
    peer = start(EXPORT)
    endpoint = peer.endpoint()
    remote = reader.attach(endpoint, timeout=WAIT_S)
    metadata = {"transport": "shm", "address": str(objects_of(place))}
    assert reader.get("0", "1", "key", metadata) == (b"object", 6)
    assert len(os.listdir(place)) == 2
    peer.kill()
    assert not remote.alive
    assert remote.read(1, 7).tobytes() == b"seven" * 1000
    with pytest.raises(StaleSlotError):
        remote.read(2, 8)
    with pytest.raises(PeerUnreachableError):
        reader.attach(endpoint, timeout=WAIT_S)
    # Finding it dead has removed what it left.
    assert os.listdir(place) == []
    assert reader.get("0", "1", "key") is None
    assert reader.get("0", "1", "key", metadata) is None
    remote.close()


def test_looking_for_objects_removes_what_a_killed_peer_left(
    start: Callable[[str], Peer], reader: SharedMemoryConnector, place: Path
) -> None:
    peer = start(EXPORT)
    peer.endpoint()
    assert reader.get("0", "1", "key") == (b"object", 6)
    peer.kill()
    assert reader.get("0", "1", "key") is None
    assert os.listdir(place) == []


def test_object_replaced_while_it_is_read_is_read_again(
    place: Path, reader: SharedMemoryConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ObjectPeer.read
    replacements = [b"third", b"second"]

    def replaced_first(peer: ObjectPeer, digest: bytes, stored: StoredObject) -> memoryview:
        if replacements:
            sender.put("0", "1", "key", replacements.pop())
        return read(peer, digest, stored)

    monkeypatch.setattr(ObjectPeer, "read", replaced_first)
    with SharedMemoryConnector(folder=place) as sender:
        sender.put("0", "1", "key", b"first")
        assert reader.get("0", "1", "key") == (b"third", 5)


# A sender, and a receiver, that die in the middle of an object. Their own deadlines are the test.

PUT_AND_DIE = """
import omni_connector.objects.object_store as objects
connector.put("0", "1", "before", [np.arange(5)])
say(connector.put("0", "1", "key", b"first")[0])
objects.np.copyto = die
connector.put("0", "1", "key", [np.ones(5 << 20)])
"""

GET_AND_DIE = """
import omni_connector.objects.object_store as objects
objects.np.copyto = die
connector.get("0", "1", "key")
"""


def test_sender_killed_in_the_middle_of_a_put_has_put_nothing(
    start: Callable[[str], Peer], reader: SharedMemoryConnector
) -> None:
    peer = start(PUT_AND_DIE)
    assert peer.line() == "True"
    assert peer.wait() == -9
    started = time.monotonic()
    for key in ("before", "key"):
        assert reader.get("0", "1", key) is None
    assert time.monotonic() - started < reader.object_timeout


def test_sender_that_answers_no_more_is_given_up_in_time(
    start: Callable[[str], Peer], place: Path
) -> None:
    peer = start(EXPORT)
    peer.endpoint()
    timeout = 0.3
    with (
        SharedMemoryConnector(folder=place, peer_timeout=timeout) as reader,
        SharedMemoryConnector(folder=place) as other,
    ):
        other.put("0", "1", "other", [1, 2])
        assert reader.get("0", "1", "key") == (b"object", 6)
        os.kill(peer.process.pid, signal.SIGSTOP)
        os.waitpid(peer.process.pid, os.WUNTRACED)
        started = time.monotonic()
        assert reader.get("0", "1", "key") is None
        assert timeout * 0.9 < time.monotonic() - started < WAIT_S
        # It is left alone for a while: others' objects do not wait for it. The quickest of several
        # tells, as a busy machine may hold up any of them.
        took = []
        for _ in range(5):
            started = time.monotonic()
            assert reader.get("0", "1", "other") is not None
            took.append(time.monotonic() - started)
        assert min(took) < timeout
        os.kill(peer.process.pid, signal.SIGCONT)


def test_receiver_killed_in_the_middle_of_a_get_harms_nobody(
    start: Callable[[str], Peer], place: Path
) -> None:
    with SharedMemoryConnector(folder=place, object_gib=0.05) as sender:
        assert sender.put("0", "1", "key", [np.ones(1 << 20)])[0]
        for _ in range(2):
            assert start(GET_AND_DIE).wait() == -9
        with SharedMemoryConnector(folder=place) as second:
            found = second.get("0", "1", "key")
            assert found is not None
            assert found[0][0].sum() == 1 << 20
        sender.cleanup("key")
        health = sender.health()
        assert (health["status"], health["objects"]) == ("healthy", 0)
        assert health["free_object_slots"] == 51
        assert sender.put("0", "1", "key", [np.ones(6 << 20)])[0]


def test_two_receivers_in_other_processes_both_get_it(
    start: Callable[[str], Peer], place: Path
) -> None:
    script = (
        "found = connector.get('0', '1', 'key')\n"
        "say(int(found[0]['a'].sum()) + found[0]['b'][0] if found else found)\n"
    )
    with SharedMemoryConnector(folder=place) as sender:
        sender.put("0", "1", "key", {"a": np.arange(3 << 20), "b": [7]})
        wanted = str(sum(range(3 << 20)) + 7)
        assert [start(script).line() for _ in range(2)] == [wanted] * 2
        sender.put("0", "1", "key", {"a": np.ones(3), "b": [1]})
        assert start(script).line() == "4"
        sender.cleanup("key")
        assert start(script).line() == "None"


GET_IN_TURN = """
for line in sys.stdin:
    found = connector.get("0", "1", line.strip())
    say(found[0][:9].decode() if found else None)
"""


def test_more_than_the_arena_holds_arrives_in_another_process_without_cleanup(
    start: Callable[[str], Peer], place: Path
) -> None:
    receiver = start(GET_IN_TURN)
    assert receiver.process.stdin is not None
    with SharedMemoryConnector(folder=place, object_slot_bytes=16384, object_slots=4) as sender:
        assert sender.put("0", "1", "unread", b"unread")[0]
        for i in range(60):
            # Three slots, all that there are: each takes the room of the one before.
            assert sender.put("0", "1", f"key{i}", b"object %02d" % i + bytes(40000))[0]
            receiver.process.stdin.write(f"key{i}\n")
            receiver.process.stdin.flush()
            assert receiver.line() == f"object {i:02}"
        assert sender.get("0", "1", "unread") == (b"unread", 6)
        receiver.process.stdin.close()
        assert receiver.wait() == 0


def test_reading_tells_an_owner_that_takes_no_notes_without_waiting(
    start: Callable[[str], Peer], place: Path
) -> None:
    peer = start(EXPORT)
    peer.endpoint()
    with SharedMemoryConnector(folder=place) as reader:
        assert reader.get("0", "1", "key") == (b"object", 6)
        (found,) = reader._peers.values()
        digest = ObjectKey("0", "1", "key").digest
        stored = found.find(digest, time.monotonic() + WAIT_S)
        assert stored is not None
        os.kill(peer.process.pid, signal.SIGSTOP)
        os.waitpid(peer.process.pid, os.WUNTRACED)
        started = time.monotonic()
        for _ in range(3000):
            assert bytes(found.read(digest, stored)) == bytes(found.read(digest, stored))
        assert 0 < len(found._unsent) <= 1024
        assert time.monotonic() - started < WAIT_S
        # What could not be said is said when it takes notes again.
        os.kill(peer.process.pid, signal.SIGCONT)
        assert reader.get("0", "1", "key") == (b"object", 6)
        peer.kill()
        assert bytes(found.read(digest, stored)) != b""


def test_objects_of_receivers_that_never_come_make_room(place: Path) -> None:
    clock = FakeClock()
    with SharedMemoryConnector(
        folder=place,
        object_slot_bytes=4096,
        object_slots=2,
        buffer_ttl_seconds=5.0,
        clock=clock,
    ) as sender:
        assert sender.put("0", "1", "a", b"a")[0]
        assert sender.put("0", "1", "b", b"b")[0]
        clock.advance(4.9)
        assert not sender.put("0", "1", "c", b"c")[0]
        assert sender.health()["evictable_object_slots"] == 0
        clock.advance(0.2)
        assert sender.health()["evictable_object_slots"] == 2
        assert sender.get("0", "1", "a") == (b"a", 1)
        assert sender.put("0", "1", "c", b"c")[0]
        assert [sender.get("0", "1", key) for key in "abc"] == [(b"a", 1), None, (b"c", 1)]


@pytest.mark.parametrize("metadata", ["shm", b"x", 7, [1], [("address", "/x")], np.ones(2), {}])
def test_metadata_that_names_nobody_is_no_hint(place: Path, metadata: object) -> None:
    with SharedMemoryConnector(folder=place, object_slot_bytes=4096, object_slots=2) as connector:
        connector.put("0", "1", "k", b"x")
        assert connector.get("0", "1", "k", metadata) == (b"x", 1)  # type: ignore[arg-type]


def test_object_larger_than_the_arena_is_refused_with_the_setting(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("WARNING", "omni_connector.transports.base"),
        SharedMemoryConnector(folder=place, object_gib=1 / 256) as sender,
    ):
        assert sender.put("0", "1", "key", [np.zeros(4 << 20, np.uint8)]) == (False, 0, None)
        assert sender.health()["status"] == "healthy"
        assert sender.put("0", "1", "key", [np.zeros(3 << 20, np.uint8)])[0]
    assert "(4194" in caplog.text
    assert "raise object_gib" in caplog.text


def test_tensors_stay_when_the_connectors_are_closed(place: Path) -> None:
    torch = pytest.importorskip("torch")
    with SharedMemoryConnector(folder=place) as sender:
        sender.put("0", "1", "key", {"k": torch.arange(1 << 20)})
        with SharedMemoryConnector(folder=place) as receiver:
            found = receiver.get("0", "1", "key")
    assert found is not None
    assert torch.equal(found[0]["k"], torch.arange(1 << 20))
    assert found[0]["k"].data_ptr() % 4096 == 0


def test_object_that_was_altered_in_memory_is_not_served(
    place: Path, reader: SharedMemoryConnector, caplog: pytest.LogCaptureFixture
) -> None:
    with SharedMemoryConnector(folder=place) as sender:
        sender.put("0", "1", "key", [np.zeros(3 << 20, np.uint8)])
        assert sender._objects is not None
        sender._objects.arena.slots[2, 5] ^= 4
        with caplog.at_level("WARNING", "omni_connector.transports.base"):
            assert reader.get("0", "1", "key") is None
    assert "wrong checksum" in caplog.text


def test_bytes_that_are_no_object_are_not_served(
    place: Path, reader: SharedMemoryConnector, caplog: pytest.LogCaptureFixture
) -> None:
    key = ObjectKey("0", "1", "key")
    with SharedMemoryConnector(folder=place) as sender:
        for content in (b"", b"short", bytes(100), b"\xff" * 100):
            sender.store_object(key, [memoryview(content)])
            caplog.clear()
            with caplog.at_level("WARNING", "omni_connector.transports.base"):
                found = reader.get("0", "1", "key")
            assert found is None or found[0] == content[:-17]
            assert (found is None) == ("get of 'key'" in caplog.text)


def objects_of(place: Path) -> Path:
    return next(place.glob("o-*.sock"))


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
    start: Callable[[str], Peer], reader: SharedMemoryConnector, place: Path, point: str
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
        "unix._receive = die",
        "os.close = die",
        "import omni_connector.transports.mapped as m; m.ArenaView.open = die",
    ],
)
def test_owner_outlives_readers_killed_while_they_attach(
    start: Callable[[str], Peer], place: Path, point: str
) -> None:
    with SharedMemoryConnector(folder=place) as owner, Arena.create(2, 4096) as arena:
        endpoint = owner.export(arena, "owner")
        fds = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            peer = start(
                "from omni_connector.transports import unix\n"
                "from omni_connector.transports.base import Endpoint\n"
                f"wire = {msgspec.json.encode(endpoint)!r}\n"
                "endpoint = msgspec.json.decode(wire, type=Endpoint)\n"
                f"{point}\n"
                "connector.attach(endpoint, timeout=60)\n"
            )
            assert peer.wait() == -9
        publish(arena, 0, 1, b"content")
        with SharedMemoryConnector(folder=place) as reader:
            with reader.attach(endpoint, timeout=WAIT_S) as remote:
                assert remote.read(0, 1).tobytes() == b"content"
            assert reader.attach(endpoint, timeout=WAIT_S).alive
        assert owner.health()["status"] == "healthy"
        owner.withdraw(endpoint)
        # All that is left of the readers, pipes apart, is gone.
        limit = time.monotonic() + WAIT_S
        while sockets_of(owner) and time.monotonic() < limit:
            time.sleep(0.01)
        assert sockets_of(owner) == 0
        assert len(os.listdir("/proc/self/fd")) <= fds + 2 * 2


def sockets_of(owner: SharedMemoryConnector) -> int:
    assert owner._listener is not None
    return len(owner._listener._connections)


def test_owner_killed_between_question_and_answer(
    start: Callable[[str], Peer], reader: SharedMemoryConnector
) -> None:
    peer = start("connector._answer = die\n" + EXPORT)
    endpoint = peer.endpoint()
    with pytest.raises(PeerUnreachableError):
        reader.attach(endpoint, timeout=WAIT_S)
    assert peer.wait() == -9


def test_owner_killed_in_the_middle_of_a_write(
    start: Callable[[str], Peer], reader: SharedMemoryConnector
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
                remote.read(1, generation)
        assert not remote.alive


def test_stopped_peer_is_given_up_in_time(start: Callable[[str], Peer], place: Path) -> None:
    peer = start(EXPORT)
    endpoint = peer.endpoint()
    os.kill(peer.process.pid, signal.SIGSTOP)
    os.waitpid(peer.process.pid, os.WUNTRACED)
    with SharedMemoryConnector(folder=place, peer_timeout=0.1) as reader:
        with pytest.raises(PeerUnreachableError):
            reader.attach(endpoint, timeout=0.1)
        assert reader.get("0", "1", "key") is None
        # It is not dead: its sockets are left alone.
        runtime.sweep(place)
        assert len(os.listdir(place)) == 2
        os.kill(peer.process.pid, signal.SIGCONT)
        reader.attach(endpoint, timeout=WAIT_S).close()


def test_restarted_peer_is_another_arena(
    start: Callable[[str], Peer], reader: SharedMemoryConnector
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
    with SharedMemoryConnector(folder=place) as connector, Arena.create(1, 4096) as arena:
        endpoint = connector.export(arena, "next")
        assert os.listdir(place) == [Path(endpoint.address).name]


def test_connector_in_an_open_folder_is_refused(place: Path) -> None:
    place.chmod(0o755)
    with pytest.raises(ConfigError):
        SharedMemoryConnector(folder=place)


def test_closed_arena_does_not_hand_out_another_file(place: Path) -> None:
    """The number of a closed descriptor may be that of any other file by now."""
    with SharedMemoryConnector(folder=place) as connector:
        arena = Arena.create(1, 4096)
        publish(arena, 0, 1, b"content")
        endpoint = connector.export(arena, "name")
        arena.close()
        with Arena.create(1, 4096), connector.attach(endpoint, timeout=WAIT_S) as remote:
            assert remote.read(0, 1).tobytes() == b"content"


def test_listener_that_ended_shows_in_health(place: Path) -> None:
    with SharedMemoryConnector(folder=place) as connector:
        connector.put("0", "1", "key", 1)
        assert connector._listener is not None
        connector._listener.close()
        assert connector.health()["status"].startswith("unhealthy")


def test_no_descriptor_is_left(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with (
        SharedMemoryConnector(folder=place) as one,
        SharedMemoryConnector(folder=place) as other,
        Arena.create(2, 4096, populate=True) as arena,
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
            one.put("0", "1", "key", b"object")
            assert other.get("0", "1", "key") == (b"object", 6)
    assert os.listdir(place) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as name:
        yield Path(name)


def test_a_folder_that_a_peer_names_is_not_swept(
    reader: SharedMemoryConnector, place: Path, elsewhere: Path
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
def test_an_address_is_one_line(reader: SharedMemoryConnector, character: str) -> None:
    address = f"/tmp/x{character}y/a-{'0' * 24}.sock"
    with pytest.raises(ValueError, match="is no address"):
        Endpoint(transport="shm", address=address, epoch=b"e" * 16, n_slots=1, slot_bytes=4096)
    hint = {"transport": "shm", "address": address}
    assert reader.get("0", "1", "key", hint) is None


def test_the_objects_of_a_sender_that_has_gone_are_let_go_of(
    reader: SharedMemoryConnector, place: Path
) -> None:
    """Their arena, and the connection; nobody asks again."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("omni-connector-arena")

    before = mapped()
    for _ in range(3):
        with SharedMemoryConnector(folder=place, object_gib=0.01) as sender:
            assert sender.put("0", "1", "key", b"object")[0]
            assert reader.get("0", "1", "key") == (b"object", 6)
            assert mapped() > before
    end = time.monotonic() + WAIT_S
    while reader._peers or mapped() > before:
        assert time.monotonic() < end
        time.sleep(0.05)
