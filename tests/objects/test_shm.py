# SPDX-License-Identifier: Apache-2.0
"""Objects over shared memory: peers that die half way, and what all of them leave."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_connector.arena.arena import ArenaView
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.testing import FakeClock
from omni_connector.testing.conformance import ObjectConformance
from tests import inspection
from tests.patience import wait_until

from ..peer_processes import EXPORT, Peer
from ..stopping import stop

SOON_S = 20.0
HOUR_S = 3600.0  # whoever waits for it hangs
KEY = ObjectKey("0", "1", "key")


class TestSharedMemoryConformance(ObjectConformance):
    object_slot_bytes = 4096
    object_slots = 64
    scattered_bytes = 4096

    def connect(self, place: Path) -> SharedMemoryConnector:
        geometry = self.object_slots, self.object_slot_bytes
        return SharedMemoryConnector(folder=place, geometry=geometry)


@pytest.fixture
def reader(place: Path) -> Iterator[SharedMemoryConnector]:
    with SharedMemoryConnector(folder=place) as reader:
        yield reader


# A sender, and a receiver, that die in the middle of an object. Their own deadlines are the test.

PUT_AND_DIE = """
import types
import omni_connector.objects.object_store as objects
connector.put("0", "1", "before", [np.arange(5)])
say(connector.put("0", "1", "key", b"first")[0])
objects.xxhash = types.SimpleNamespace(xxh3_64_intdigest=die)
connector.put("0", "1", "key", [np.ones(5 << 20)])
"""

GET_AND_DIE = """
import types
import omni_connector.objects.object_store as objects
objects.xxhash = types.SimpleNamespace(xxh3_64_intdigest=die)
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
    verify = ArenaView.verify
    replacements = [b"third", b"second"]

    def replaced_first(self: ArenaView, slot: int, generation: int) -> Any:
        if replacements:
            sender.put("0", "1", "key", replacements.pop())
        return verify(self, slot, generation)

    monkeypatch.setattr(ArenaView, "verify", replaced_first)
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


def test_the_objects_of_a_sender_that_stands_still_are_found_at_once(
    start: Callable[[str], Peer], place: Path
) -> None:
    peer = start(EXPORT)
    peer.endpoint()
    with SharedMemoryConnector(folder=place, peer_timeout=HOUR_S, object_timeout=HOUR_S) as reader:
        assert reader.get("0", "1", "key") == (b"object", 6)
        stop(peer.process.pid)
        for _ in range(5):
            assert reader.get("0", "1", "key") == (b"object", 6)
            assert reader.get("0", "1", "nothing") is None
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
        assert health["free_object_bytes"] == 13104 * 4096
        assert sender.put("0", "1", "key", [np.ones(6 << 20)])[0]


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
        stored = found.find(KEY.digest)
        assert stored is not None
        stop(peer.process.pid)
        for _ in range(6000):
            found.note(KEY.digest, stored, gone=False)
            found.send_notes()
        assert 0 < len(found._unsent) <= 1024
        # What could not be said is said when it takes notes again.
        os.kill(peer.process.pid, signal.SIGCONT)
        assert reader.get("0", "1", "key") == (b"object", 6)

        def told() -> bool:
            assert reader.get("0", "1", "nothing") is None
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
        assert sender.health()["evictable_object_bytes"] == 0
        clock.advance(0.2)
        assert sender.health()["evictable_object_bytes"] == 2 * 4096
        assert sender.get("0", "1", "a") == (b"a", 1)
        assert sender.put("0", "1", "c", b"c")[0]
        assert [sender.get("0", "1", key) for key in "abc"] == [(b"a", 1), None, (b"c", 1)]


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
        inspection.own_objects(sender).arena.slots.reshape(-1)[2 << 20] ^= 4
        with caplog.at_level("WARNING", "omni_connector.objects.base"):
            assert reader.get("0", "1", "key") is None
    assert "wrong checksum" in caplog.text


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
