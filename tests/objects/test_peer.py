# SPDX-License-Identifier: Apache-2.0
"""Peers that are silent, hostile or of another version, met over shared memory."""

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.net.packets import MAX_MESSAGE_BYTES, Refusal
from omni_connector.net.runtime import listen, socket_path
from omni_connector.net.unix import Connection, Listener
from omni_connector.objects import shm
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.codec import encode
from omni_connector.objects.exchange import PROTOCOL, Read
from omni_connector.objects.object_store import ObjectStore
from omni_connector.objects.peer import ANSWERS as ANSWERS_OF_PEERS
from omni_connector.objects.peer import QUESTIONS, Find, Missing
from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.transports.shm import ANSWERS, Attach, AttachReply
from tests import inspection

SOON_S = 60.0
KIND = f"o{PROTOCOL}-"
KEY = ObjectKey("0", "1", "key")
ASKED = msgspec.msgpack.Decoder(Read | Attach)
EPOCH = b"e" * 16


@pytest.fixture
def connector(place: Path) -> Iterator[SharedMemoryConnector]:
    with SharedMemoryConnector(folder=place) as connector:
        yield connector


def object_peer(
    place: Path, answer: Callable[[], tuple[Any, int | None]], name: str = "hostile"
) -> Listener:
    """A peer that answers who asks for its arena in its own way."""
    listener = Listener(ASKED, lambda said: (None, None) if isinstance(said, Read) else answer())
    listener.add(socket_path(place, name, kind=KIND))
    return listener


def questions(listening: socket.socket) -> list[Read | Attach]:
    """What was asked of a socket that never answered; connections that asked nothing are not."""
    packets = []
    while select.select([listening], [], [], 0)[0]:
        with listening.accept()[0] as connection:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                packets.append(connection.recv(MAX_MESSAGE_BYTES))
    return [ASKED.decode(packet) for packet in packets if packet]


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (QUESTIONS, Find(KEY.digest)),
        (QUESTIONS, Read(EPOCH, KEY.digest, 7, gone=True)),
        (ANSWERS_OF_PEERS, Missing(KEY.digest)),
        (ANSWERS_OF_PEERS, Refusal("no")),
        (ANSWERS, AttachReply(EPOCH, 2, 4096)),
    ],
)
def test_fields_of_a_newer_version_are_left_out_and_messages_of_other_kinds_refused(
    decoder: msgspec.msgpack.Decoder[Any], message: msgspec.Struct
) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    newer = fields | {"of a newer version": [1, {"a": None}]}
    assert decoder.decode(msgspec.msgpack.encode(newer)) == message
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(newer | {"type": "of a newer version"}))


def header(digest: bytes, first: int = 0, runs: int = 1, length: int = 10) -> bytes:
    return struct.pack("<16sIIQ", digest[:16], first, runs, length)


@pytest.mark.parametrize(
    "key",
    [
        header(KEY.digest),
        header(KEY.digest, length=0),
        header(KEY.digest, length=4097),
        header(KEY.digest, length=2**62),
        header(KEY.digest, first=2),
        header(KEY.digest, first=2**32 - 1),
        header(KEY.digest, runs=0),
        header(KEY.digest, runs=2),
        header(KEY.digest, runs=2**32 - 1),
        header(b"another" * 5),
        header(KEY.digest[:8] + bytes(24)),
        KEY.digest[:16],
        b"",
    ],
)
def test_hostile_descriptions_of_objects_do_no_harm(
    place: Path, connector: SharedMemoryConnector, key: bytes
) -> None:
    with Arena.create(2, 4096, randbytes=lambda n: b"e" * n) as arena:
        # Newer than all that anybody puts.
        arena.begin_write(1, 2**64 - 1)
        arena.publish(1, 2**64 - 1, key, 0, 0)
        peer = object_peer(place, lambda: (AttachReply(EPOCH, 2, 4096), os.dup(arena.fd)))
        assert connector.get("0", "1", "key") is None
        with SharedMemoryConnector(folder=place) as honest:
            honest.put("0", "1", "other", b"object")
            assert connector.get("0", "1", "other") == (b"object", 6)
        assert connector.health()["status"] == "healthy"
        peer.close()


@pytest.mark.parametrize(
    "said",
    [
        AttachReply(EPOCH, 1, 4096),
        AttachReply(EPOCH, 2, 8192),
        AttachReply(b"f" * 16, 2, 4096),
        AttachReply(b"", 2, 4096),
        AttachReply(EPOCH, 2**40, 4096),
        AttachReply(EPOCH, -1, 0),
    ],
)
def test_an_arena_that_is_not_what_its_owner_says_hides_nothing(
    place: Path, connector: SharedMemoryConnector, caplog: pytest.LogCaptureFixture, said: Any
) -> None:
    with Arena.create(2, 4096, randbytes=lambda n: b"e" * n) as arena:
        peer = object_peer(place, lambda: (said, os.dup(arena.fd)))
        with SharedMemoryConnector(folder=place) as honest:
            honest.put("0", "1", "key", b"object")
            for _ in range(3):
                assert connector.get("0", "1", "key") == (b"object", 6)
        assert caplog.text.count("No object is found") == 1
        peer.close()


def test_a_peer_that_refuses_is_named_once_and_asked_once(
    place: Path, connector: SharedMemoryConnector, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def answer() -> tuple[Any, int | None]:
        asked.append(1)
        return Refusal("no"), None

    peer = object_peer(place, answer)
    with SharedMemoryConnector(folder=place) as honest:
        honest.put("0", "1", "key", b"object")
        for _ in range(3):
            assert connector.get("0", "1", "key") == (b"object", 6)
    assert len(asked) == 1
    assert caplog.text.count("No object is found") == 1
    peer.close()


def test_senders_of_another_version_are_named_once_and_not_asked(
    place: Path, connector: SharedMemoryConnector, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [socket_path(place, "x", kind=kind) for kind in ("o-", f"o{PROTOCOL + 1}-")]
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(listen(path)) for path in paths]
        own = stack.enter_context(SharedMemoryConnector(folder=place))
        own.put("0", "1", "key", b"object")
        for _ in range(3):
            # What senders of our version have is found all the same.
            assert connector.get("0", "1", "key") == (b"object", 6)
            assert connector.get("0", "1", "other") is None
        assert [asked for each in others for asked in questions(each)] == []
    said = [each.getMessage() for each in caplog.records if "No object is found" in each.msg]
    assert len(said) == 2
    for path in paths:
        assert sum(f"No object is found at {path}: it has another version" in t for t in said) == 1
    assert all("same minor version" in text for text in said)


def test_notes_about_other_arenas_and_objects_are_ignored(place: Path) -> None:
    with SharedMemoryConnector(folder=place) as owner:
        owner.put("0", "1", "key", b"object")
        objects = inspection.own_objects(owner)
        epoch, stored = objects.arena.epoch, objects.find(KEY.digest)
        assert stored is not None
        (path,) = place.glob(f"{KIND}*")
        connection = Connection(path, time.monotonic() + SOON_S)

        def told(*reads: Read) -> int:
            for read in reads:
                assert connection.tell(read)
            # An answer to what was asked after them: they have been taken note of.
            asked = connection.ask(Attach(b""), ANSWERS, time.monotonic() + SOON_S, with_fd=True)
            os.close(asked[1] or -1)
            evictable: int = owner.health()["evictable_object_bytes"]
            return evictable

        assert told(
            Read(b"e" * 16, KEY.digest, stored.generation),
            Read(epoch, b"d" * 32, stored.generation),
            Read(epoch, b"", 0),
            Read(epoch, KEY.digest, stored.generation - 1),
            Read(epoch, KEY.digest, stored.generation + 1, gone=True),
            Read(epoch, KEY.digest, -1),
        ) == 0  # fmt: skip
        assert told(Read(epoch, KEY.digest, stored.generation)) == 4096
        assert told(Read(epoch, KEY.digest, stored.generation, gone=True)) == 0
        assert owner.get("0", "1", "key") is None
        connection.close()


@pytest.mark.parametrize("silent", [1, 7])
def test_silent_peers_are_waited_for_once_and_all_together(
    place: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    readable = shm._readable

    def noted(peers: list[Any], timeout: float) -> list[Any]:
        if timeout:
            waits.append(len(peers))
        return readable(peers, timeout)

    monkeypatch.setattr(shm, "_readable", noted)
    with contextlib.ExitStack() as stack:
        paths = [socket_path(place, f"s{number}", kind=KIND) for number in range(silent)]
        listening = [stack.enter_context(listen(path)) for path in paths]
        honest = stack.enter_context(SharedMemoryConnector(folder=place))
        honest.put("0", "1", "key", b"object")
        receiver = stack.enter_context(SharedMemoryConnector(folder=place, peer_timeout=0.5))
        assert receiver.get("0", "1", "key") == (b"object", 6)
        assert waits[0] == silent + 1
        assert set(waits[1:]) == {silent}
        waits.clear()
        for _ in range(5):
            assert receiver.get("0", "1", "key") == (b"object", 6)
            assert receiver.get("0", "1", "nothing") is None
        assert waits == []
        assert [questions(each) for each in listening] == [[Attach(b"")]] * silent


def test_a_peer_that_answers_late_is_found_by_who_waits(place: Path) -> None:
    """Also where the wait is shorter than any back-off: nothing is asked again."""
    store = ObjectStore(Arena.create(2, 4096))
    store.store(KEY, encode(b"late"))
    reply = AttachReply(store.arena.epoch, 2, 4096)
    with (
        listen(socket_path(place, "late", kind=KIND)) as late,
        SharedMemoryConnector(folder=place, peer_timeout=0.01) as receiver,
    ):
        assert receiver.get("0", "1", "key") is None
        connection, _ = late.accept()
        connection.recv(MAX_MESSAGE_BYTES)
        socket.send_fds(connection, [msgspec.msgpack.encode(reply)], [store.arena.fd])
        found = receiver.get_with_deadline("0", "1", "key", deadline=time.monotonic() + SOON_S)
        assert found == (b"late", 4)
        # Its objects are found without it.
        store.store(KEY, encode(b"more"))
        assert receiver.get("0", "1", "key") == (b"more", 4)
        connection.close()
        assert receiver.get("0", "1", "key") is None
    store.close()
