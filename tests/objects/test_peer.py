# SPDX-License-Identifier: Apache-2.0
"""Peers that are silent or hostile, or in use, asked for objects over shared memory."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.errors import PeerUnreachableError
from omni_connector.net.packets import MAX_MESSAGE_BYTES, Refusal, require_protocol
from omni_connector.net.runtime import listen, socket_path
from omni_connector.net.unix import Connection, Listener
from omni_connector.objects import exchange
from omni_connector.objects import peer as objects_peer
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.codec import encode
from omni_connector.objects.object_store import ObjectStore, StoredObject
from omni_connector.objects.peer import ANSWERS, PROTOCOL, Find, Found, Missing, Peer, Read
from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.testing import FakeClock
from omni_connector.transports.base import Endpoint, RemoteArena
from omni_connector.transports.shm import Attach, AttachReply, SharedMemoryTransport
from tests import inspection

SOON_S = 60.0
KEY = ObjectKey("0", "1", "key")
ASKED = msgspec.msgpack.Decoder(Find | Read | Attach)


def deadline(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def connector(place: Path) -> Iterator[SharedMemoryConnector]:
    with SharedMemoryConnector(folder=place) as connector:
        yield connector


def object_peer(
    place: Path, answer: Callable[[object], tuple[Any, int | None]], name: str = "hostile"
) -> tuple[Listener, str]:
    """A peer that answers questions in its own way, and where."""
    listener = Listener(
        ASKED, lambda said: (None, None) if isinstance(said, Read) else answer(said)
    )
    address = socket_path(place, name, kind="o-")
    listener.add(address)
    return listener, str(address)


def questions(listening: socket.socket) -> list[Find | Read]:
    """What was asked of a socket that never answered; connections that asked nothing are not."""
    packets = []
    while select.select([listening], [], [], 0)[0]:
        with listening.accept()[0] as connection:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                packets.append(connection.recv(MAX_MESSAGE_BYTES))
    return [msgspec.msgpack.decode(packet, type=Find | Read) for packet in packets if packet]


EPOCH = b"e" * 16


def found(runs: Any, length: int = 10, generation: int = 1, **endpoint: Any) -> Found:
    """What a peer says of the object of `KEY`, in its arena of two slots of 4096 bytes."""
    place = {"transport": "shm", "address": "", "epoch": EPOCH, "n_slots": 2, "slot_bytes": 4096}
    stored = StoredObject(runs, generation, length, generation)
    return Found(KEY.digest, Endpoint(**{**place, **endpoint}), stored)


@pytest.mark.parametrize(
    "said",
    [
        found(()),
        found(((0, 2),)),
        found(((-1, 1),)),
        found(((0, 0),)),
        found(((99, 1),)),
        found(((0, 1),), length=4097),
        found(((0, 1),), length=-1),
        found(((0, 2**61),), length=2**62),
        found(((0, 1),)),
        found(((1, 1),), generation=2**63 - 1),
        found(((0, 1),), epoch=b"f" * 16),
        found(((0, 2**20),), length=2**32, n_slots=2**20),
        found(((0, 1),), slot_bytes=8192),
        found(((0, 1),), transport="mooncake"),
        Found(b"another", found(((0, 1),)).endpoint, found(((0, 1),)).stored),
        Missing(KEY.digest),
        Missing(b"another"),
        Refusal("no"),
        AttachReply(EPOCH, 1, 4096),
    ],
)
def test_hostile_descriptions_of_objects_do_no_harm(
    place: Path, connector: SharedMemoryConnector, said: Any
) -> None:
    with Arena.create(2, 4096, randbytes=lambda n: b"e" * n) as arena:

        def answer(question: object) -> tuple[Any, int | None]:
            if isinstance(question, Attach):
                return AttachReply(EPOCH, 2, 4096), os.dup(arena.fd)
            if isinstance(said, Found):
                here = msgspec.structs.replace(said.endpoint, address=address)
                return msgspec.structs.replace(said, endpoint=here), None
            return said, None

        peer, address = object_peer(place, answer)
        assert connector.get("0", "1", "key") is None
        with SharedMemoryConnector(folder=place) as honest:
            honest.put("0", "1", "other", b"object")
            # Whatever the hostile peer claims to have that is newer is refused, not served.
            assert connector.get("0", "1", "other") in (None, (b"object", 6))
        assert connector.health()["status"] == "healthy"
        peer.close()


def test_a_peer_whose_arena_cannot_be_attached_hides_nothing(
    place: Path, connector: SharedMemoryConnector
) -> None:
    newest = found(((0, 1),), generation=2**63 - 1)

    def answer(question: object) -> tuple[Any, int | None]:
        if isinstance(question, Attach):
            return Refusal("no"), None
        return msgspec.structs.replace(newest, endpoint=endpoint), None

    peer, address = object_peer(place, answer)
    endpoint = msgspec.structs.replace(newest.endpoint, address=address)
    with SharedMemoryConnector(folder=place) as honest:
        honest.put("0", "1", "key", b"object")
        assert connector.get("0", "1", "key") == (b"object", 6)
    peer.close()


def test_peer_that_changes_its_arena_is_read_from_the_new_one(
    place: Path, connector: SharedMemoryConnector
) -> None:
    stores = [ObjectStore(Arena.create(2, 4096)) for _ in range(2)]
    current = [stores[0]]

    def answer(question: object) -> tuple[Any, int | None]:
        arena = current[0].arena
        if isinstance(question, Attach):
            return AttachReply(arena.epoch, 2, 4096), os.dup(arena.fd)
        stored = current[0].find(KEY.digest)
        assert stored is not None
        return Found(KEY.digest, Endpoint.of(arena, "shm", address), stored), None

    peer, address = object_peer(place, answer)
    for store, content in zip(stores, (b"first", b"second"), strict=True):
        store.store(KEY, encode(content))
        current[0] = store
        assert connector.get("0", "1", "key") == (content, len(content))
    peer.close()
    for store in stores:
        store.close()


def test_a_connector_of_another_version_is_refused_in_words(place: Path) -> None:
    with SharedMemoryConnector(folder=place) as owner:
        _, _, metadata = owner.put("0", "1", "key", b"object")
        assert metadata is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as older:
            older.settimeout(SOON_S)
            older.connect(metadata["address"])
            older.send(msgspec.msgpack.encode({"type": "find", "digest": KEY.digest}))
            older.send(msgspec.msgpack.encode({"type": "find", "digest": b"", "protocol": 1}))
            said = [older.recv(MAX_MESSAGE_BYTES) for _ in range(2)]
        assert msgspec.msgpack.decode(said[0], type=Found).digest == KEY.digest
        assert "protocol 1, wanted 2" in msgspec.msgpack.decode(said[1], type=Refusal).reason


class NewerFind(msgspec.Struct, frozen=True, tag="find"):
    """The question as the next version of this package asks and understands it."""

    digest: bytes
    protocol: int = PROTOCOL + 1

    def __post_init__(self) -> None:
        require_protocol(self.protocol, PROTOCOL + 1)


def test_senders_of_another_version_are_named_once(
    place: Path, connector: SharedMemoryConnector, caplog: pytest.LogCaptureFixture
) -> None:
    newer = [
        Listener(msgspec.msgpack.Decoder(NewerFind), lambda question: (None, None))
        for _ in range(2)
    ]
    addresses = [socket_path(place, f"newer{number}", kind="o-") for number in range(2)]
    for listener, address in zip(newer, addresses, strict=True):
        listener.add(address)
    with SharedMemoryConnector(folder=place) as own:
        own.put("0", "1", "key", b"object")
        for _ in range(3):
            # What senders of our version have is found all the same.
            assert connector.get("0", "1", "key") == (b"object", 6)
            assert connector.get("0", "1", "other") is None
    said = [each.getMessage() for each in caplog.records if "No object is found" in each.msg]
    assert len(said) == 2
    for text, address in zip(sorted(said), sorted(map(str, addresses)), strict=True):
        assert f"No object is found at {address}: the peer refuses" in text
        assert "protocol 2, wanted 3" in text
        assert "same minor version" in text
    for listener in newer:
        listener.close()


def test_notes_about_other_arenas_and_objects_are_ignored(place: Path) -> None:
    with SharedMemoryConnector(folder=place) as owner:
        _, _, metadata = owner.put("0", "1", "key", b"object")
        assert metadata is not None
        objects = inspection.own_objects(owner)
        epoch, stored = objects.arena.epoch, objects.find(KEY.digest)
        assert stored is not None
        connection = Connection(Path(metadata["address"]), deadline())
        for read in (
            Read(b"e" * 16, KEY.digest, stored.generation),
            Read(epoch, b"d" * 32, stored.generation),
            Read(epoch, b"", 0),
            Read(epoch, KEY.digest, stored.generation - 1),
            Read(epoch, KEY.digest, stored.generation + 1),
            Read(epoch, KEY.digest, -1),
        ):
            assert connection.tell(read)
            assert isinstance(connection.ask(Find(KEY.digest), ANSWERS, deadline())[0], Found)
            assert owner.health()["evictable_object_slots"] == 0
        assert connection.tell(Read(epoch, KEY.digest, stored.generation))
        connection.ask(Find(KEY.digest), ANSWERS, deadline())
        assert owner.health()["evictable_object_slots"] == 1
        connection.close()


def test_silent_peer_delays_once_and_hides_nothing(place: Path) -> None:
    with (
        listen(socket_path(place, "stopped", kind="o-")) as stopped,
        SharedMemoryConnector(folder=place) as honest,
        SharedMemoryConnector(folder=place, peer_timeout=4.0) as connector,
    ):
        honest.put("0", "1", "key", b"object")
        for _ in range(5):
            assert connector.get("0", "1", "key") == (b"object", 6)
        assert questions(stopped) == [Find(KEY.digest)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of who asks peers. It moves on while one is silent, and at no other time."""
    clock = FakeClock(time.monotonic())
    for module in (exchange, objects_peer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


def all_of_its_time(clock: FakeClock, deadline: float) -> NoReturn:
    clock.advance(max(0.0, deadline - clock()))
    raise PeerUnreachableError("no answer before the deadline")


@pytest.mark.parametrize("silent", [1, 3])
def test_silent_peers_leave_time_for_others(place: Path, silent: int, clock: FakeClock) -> None:
    # They have the least of addresses, so that they are asked first.
    paths = [place / f"o-{number:024}.sock" for number in range(silent)]
    asked: list[Path] = []
    ask = Connection.ask

    def ask_or_wait(
        self: Connection, question: Any, answers: Any, deadline: float, **options: Any
    ) -> Any:
        if self.path not in paths:
            return ask(self, question, answers, deadline, **options)
        asked.append(self.path)
        return all_of_its_time(clock, deadline)

    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(listen(path))
        honest = stack.enter_context(SharedMemoryConnector(folder=place))
        honest.put("0", "1", "key", b"object")
        receiver = stack.enter_context(
            SharedMemoryConnector(folder=place, object_timeout=1000.0, peer_timeout=2000.0)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "ask", ask_or_wait)
            assert receiver.get("0", "1", "key") == (b"object", 6)
        assert asked == paths


def test_an_arena_that_is_not_handed_out_leaves_time_for_others(
    place: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = found(((0, 1),), generation=2**63 - 1)
    peer, address = object_peer(
        place, lambda question: (msgspec.structs.replace(newest, endpoint=endpoint), None)
    )
    endpoint = msgspec.structs.replace(newest.endpoint, address=address)
    attach = SharedMemoryTransport.attach

    def attach_or_wait(
        self: SharedMemoryTransport, endpoint: Endpoint, *, timeout: float
    ) -> RemoteArena:
        if endpoint.address == address:
            all_of_its_time(clock, clock() + timeout)
        return attach(self, endpoint, timeout=timeout)

    monkeypatch.setattr(SharedMemoryTransport, "attach", attach_or_wait)
    with (
        SharedMemoryConnector(folder=place) as honest,
        SharedMemoryConnector(folder=place, object_timeout=1000.0, peer_timeout=2000.0) as receiver,
    ):
        honest.put("0", "1", "key", b"object")
        assert receiver.get("0", "1", "key") == (b"object", 6)
        assert any(each._silent_until for each in inspection.senders_asked(receiver))
    peer.close()


def test_hint_to_a_socket_elsewhere_is_not_followed(
    place: Path, connector: SharedMemoryConnector
) -> None:
    foreign = place / "docker.sock"
    with listen(foreign) as listening:
        metadata = {"transport": "shm", "address": str(foreign)}
        assert connector.get("0", "1", "key", metadata) is None
        assert questions(listening) == []


def test_a_peer_in_use_is_not_let_go_of(
    place: Path, connector: SharedMemoryConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = exchange._read

    def meanwhile(*arguments: Any) -> memoryview:
        connector._let_go()
        [peer] = inspection.senders_asked(connector)
        assert peer.users == 1
        return read(*arguments)

    monkeypatch.setattr(Peer, "useless", lambda self, now: True)
    monkeypatch.setattr(exchange, "_read", meanwhile)
    with SharedMemoryConnector(folder=place) as owner:
        owner.put("0", "1", "key", b"object")
        for _ in range(2):
            assert connector.get("0", "1", "key") == (b"object", 6)
            connector._let_go()
            assert not inspection.senders_asked(connector)
