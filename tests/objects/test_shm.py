# SPDX-License-Identifier: Apache-2.0
"""Objects over shared memory: peers that die half way, and what all of them leave."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_connector.net.unix import Connection
from omni_connector.objects import exchange
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.peer import Find, Read
from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.testing import FakeClock
from omni_connector.testing.conformance import ObjectConformance
from omni_connector.transports.shm import Attach
from tests import inspection
from tests.patience import wait_until

from ..peer_processes import EXPORT, WAIT_S, Peer
from ..stopping import stop

SOON_S = 20.0
HOUR_S = 3600.0  # whoever waits for it hangs
KEY = ObjectKey("0", "1", "key")
ASKED = msgspec.msgpack.Decoder(Find | Read | Attach)


def deadline(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


class TestSharedMemoryConformance(ObjectConformance):
    object_slot_bytes = 16384
    object_slots = 16

    def connect(self, place: Path) -> SharedMemoryConnector:
        geometry = self.object_slots, self.object_slot_bytes
        return SharedMemoryConnector(folder=place, geometry=geometry)


@pytest.fixture
def reader(place: Path) -> Iterator[SharedMemoryConnector]:
    with SharedMemoryConnector(folder=place) as reader:
        yield reader


def objects_of(place: Path) -> Path:
    return next(place.glob("o-*.sock"))


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


GET_IN_TURN = """
for line in sys.stdin:
    found = connector.get("0", "1", line.strip())
    say(found[0][:9].decode() if found else None)
"""


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
    read = exchange._read
    replacements = [b"third", b"second"]

    def replaced_first(*arguments: Any) -> memoryview:
        if replacements:
            sender.put("0", "1", "key", replacements.pop())
        return read(*arguments)

    monkeypatch.setattr(exchange, "_read", replaced_first)
    with SharedMemoryConnector(folder=place) as sender:
        sender.put("0", "1", "key", b"first")
        assert reader.get("0", "1", "key") == (b"third", 5)


def test_sender_killed_in_the_middle_of_a_put_has_put_nothing(
    start: Callable[[str], Peer], reader: SharedMemoryConnector
) -> None:
    peer = start(PUT_AND_DIE)
    assert peer.line() == "True"
    assert peer.wait() == -9
    reader.object_timeout = HOUR_S
    for key in ("before", "key"):
        assert reader.get("0", "1", key) is None


def test_sender_that_answers_no_more_is_given_up_in_time(
    start: Callable[[str], Peer], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    ask = Connection.ask

    def noted(self: Connection, *arguments: Any, **options: Any) -> Any:
        asked.append(self.path)
        return ask(self, *arguments, **options)

    monkeypatch.setattr(Connection, "ask", noted)
    peer = start(EXPORT)
    peer.endpoint()
    timeout = 4.0  # and longer than others take to answer
    with (
        SharedMemoryConnector(folder=place, peer_timeout=timeout) as reader,
        SharedMemoryConnector(folder=place) as other,
    ):
        other.put("0", "1", "other", [1, 2])
        assert reader.get("0", "1", "key") == (b"object", 6)
        stop(peer.process.pid)
        asked.clear()
        assert reader.get("0", "1", "key") is None
        assert len(asked) == 2
        # It is left alone for a while: others' objects do not wait for it.
        asked.clear()
        for _ in range(5):
            assert reader.get("0", "1", "other") is not None
        assert len(asked) >= 5
        assert len(set(asked)) == 1
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


def test_more_than_the_arena_holds_arrives_in_another_process_without_cleanup(
    start: Callable[[str], Peer], place: Path
) -> None:
    receiver = start(GET_IN_TURN)
    assert receiver.process.stdin is not None
    with SharedMemoryConnector(folder=place, geometry=(4, 16384)) as sender:
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
        (found,) = inspection.senders_asked(reader)
        digest = ObjectKey("0", "1", "key").digest
        stored = found.find(digest, time.monotonic() + WAIT_S)
        assert stored is not None
        stop(peer.process.pid)
        read = Read(stored.endpoint.epoch, digest, stored.stored.generation)
        for _ in range(6000):
            found.note(read)
        assert 0 < len(found._unsent) <= 1024
        # What could not be said is said when it takes notes again.
        os.kill(peer.process.pid, signal.SIGCONT)
        assert reader.get("0", "1", "key") == (b"object", 6)

        def told() -> bool:
            assert reader.get("0", "1", "key") == (b"object", 6)
            return not found._unsent

        wait_until(told)


def test_objects_of_receivers_that_never_come_make_room(place: Path) -> None:
    clock = FakeClock()
    with SharedMemoryConnector(
        folder=place,
        geometry=(2, 4096),
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
    with SharedMemoryConnector(folder=place, geometry=(2, 4096)) as connector:
        connector.put("0", "1", "k", b"x")
        assert connector.get("0", "1", "k", metadata) == (b"x", 1)  # type: ignore[arg-type]


def test_object_larger_than_the_arena_is_refused_with_the_setting(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("WARNING", "omni_connector.objects.base"),
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
        inspection.own_objects(sender).arena.slots[2, 5] ^= 4
        with caplog.at_level("WARNING", "omni_connector.objects.base"):
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
            with caplog.at_level("WARNING", "omni_connector.objects.base"):
                found = reader.get("0", "1", "key")
            assert found is None or found[0] == content[:-17]
            assert (found is None) == ("get of 'key'" in caplog.text)


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
    wait_until(lambda: not inspection.senders_asked(reader) and mapped() <= before)


@pytest.mark.parametrize("character", ["\0", "\n", "\x1b", "\u2028"])
def test_an_address_that_is_not_one_line_is_nobodys(
    reader: SharedMemoryConnector, character: str
) -> None:
    hint = {"transport": "shm", "address": f"/tmp/x{character}y/a-{'0' * 24}.sock"}
    assert reader.get("0", "1", "key", hint) is None


def test_no_descriptor_is_left(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with (
        SharedMemoryConnector(folder=place) as one,
        SharedMemoryConnector(folder=place) as other,
    ):
        for _ in range(3):
            assert one.put("0", "1", "key", b"object")[0]
            assert other.get("0", "1", "key") == (b"object", 6)
    assert os.listdir(place) == []
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() <= threads
