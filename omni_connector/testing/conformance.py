# SPDX-License-Identifier: Apache-2.0
"""`TransportConformance`: the tests that every transport has to pass.

class TestMyTransport(TransportConformance):
    object_slot_bytes = 16384
    object_slots = 16

    def connect(self, place: Path) -> OmniConnector:
        return MyTransport(folder=place, ...)
"""

import math
import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from numpy.typing import NDArray

from omni_connector.errors import (
    ArenaFullError,
    ChecksumError,
    IncompatiblePeerError,
    OmniError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    StaleSlotError,
    TransportError,
)
from omni_connector.transports.arena import Arena
from omni_connector.transports.base import Endpoint, ObjectKey, OmniConnector, RemoteArena

N_SLOTS = 6
SLOT_BYTES = 8192
ATTACH_S = 20.0

ODD_KEYS = (
    "",
    "/",
    "../../etc/passwd",
    "with space\nand newline\0and nul",
    "ключ-鍵-🔑",
    "\udc80",
    "%s{}*?[a]",
    "k" * 100_000,
)

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=50)
)
MSGPACK_VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)

REQUESTS = ("req-1", "req-10", "req-1-0", "a", "é", "a.b")
KEY_SHAPES = ("{}", "omni_0_to_1_kv_cache_{}", "{}_0_0_0_1", "{}_chunk")

Open = Callable[[], OmniConnector]


def publish(arena: Arena, slot: int, generation: int, content: bytes, key: bytes = b"key") -> None:
    """Write and publish a slot as an owner does."""
    arena.begin_write(slot, generation)
    arena.slots[slot, : len(content)] = np.frombuffer(content, np.uint8)
    arena.publish(slot, generation, key, len(content), xxhash.xxh3_64_intdigest(content))


class TransportConformance(ABC):
    """Subclass it in a test module, under a name that pytest collects.

    Attributes:
        object_slot_bytes: granularity in which objects take room.
        object_slots: how many of those a connector made by `connect` has; None where a store
            behind it sets no limit that a test could reach.
    """

    object_slot_bytes: int
    object_slots: int | None

    @abstractmethod
    def connect(self, place: Path) -> OmniConnector:
        """A new connector; those made for the same place, a private folder, find each other."""

    @pytest.fixture
    def place(self) -> Iterator[Path]:
        """A private folder whose path is short enough for sockets."""
        folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
        yield folder
        shutil.rmtree(folder)

    @pytest.fixture
    def open_connector(self, place: Path) -> Iterator[Open]:
        """Makes connectors, and closes them at the end."""
        with ExitStack() as stack:
            yield lambda: stack.enter_context(self.connect(place))

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """An arena of this process."""
        with Arena.create(N_SLOTS, SLOT_BYTES) as arena:
            yield arena

    @pytest.fixture
    def endpoint(self, open_connector: Open, arena: Arena) -> Endpoint:
        """Where that arena is exported."""
        return open_connector().export(arena, "engine-0/rank-0")

    @pytest.fixture
    def remote(self, open_connector: Open, endpoint: Endpoint) -> Iterator[RemoteArena]:
        """That arena as a peer has it."""
        with open_connector().attach(endpoint, timeout=ATTACH_S) as remote:
            yield remote

    # Arenas

    def test_what_is_published_is_read(self, arena: Arena, remote: RemoteArena) -> None:
        content = os.urandom(5000)
        publish(arena, 2, 7, content, key=b"\0name\0")
        header = remote.verify(2, 7)
        assert (header.generation, header.length, header.key) == (7, 5000, b"\0name\0")
        assert remote.read(2, 7).tobytes() == content

    def test_reads_several_slots_in_the_order_asked(
        self, arena: Arena, remote: RemoteArena
    ) -> None:
        for slot in range(N_SLOTS):
            publish(arena, slot, 1, bytes([slot + 1]) * SLOT_BYTES)
        wanted = [4, 0, 1, 2, 5]
        found = np.zeros((len(wanted), 100), np.uint8)
        remote.read_into(wanted, found)
        assert [set(row.tolist()) for row in found] == [{slot + 1} for slot in wanted]

    def test_every_byte_of_a_full_slot_is_read(self, arena: Arena, remote: RemoteArena) -> None:
        content = os.urandom(SLOT_BYTES)
        publish(arena, N_SLOTS - 1, 2**64 - 1, content)
        assert remote.read(N_SLOTS - 1, 2**64 - 1).tobytes() == content

    def test_an_empty_slot_is_read(self, arena: Arena, remote: RemoteArena) -> None:
        publish(arena, 0, 1, b"", key=b"")
        assert remote.read(0, 1).size == 0

    def test_endpoint_survives_the_wire(self, endpoint: Endpoint) -> None:
        packet = msgspec.msgpack.encode(endpoint)
        assert msgspec.msgpack.decode(packet, type=Endpoint) == endpoint

    def test_slot_never_written_is_refused(self, remote: RemoteArena) -> None:
        for generation in (0, 1):
            with pytest.raises(StaleSlotError):
                remote.verify(0, generation)

    def test_slot_being_written_is_refused(self, arena: Arena, remote: RemoteArena) -> None:
        arena.begin_write(1, 5)
        with pytest.raises(StaleSlotError):
            remote.verify(1, 5)
        with pytest.raises(StaleSlotError):
            remote.read(1, 5)

    def test_other_generation_is_refused(self, arena: Arena, remote: RemoteArena) -> None:
        publish(arena, 1, 5, b"new")
        for generation in (4, 6, 0, 2**64 - 1):
            with pytest.raises(StaleSlotError):
                remote.read(1, generation)

    def test_slot_reused_after_verification_is_refused(
        self, arena: Arena, remote: RemoteArena
    ) -> None:
        publish(arena, 1, 5, b"old")
        remote.verify(1, 5)
        arena.begin_write(1, 6)
        with pytest.raises(StaleSlotError):
            remote.verify(1, 5)

    def test_retired_slot_is_refused(self, arena: Arena, remote: RemoteArena) -> None:
        publish(arena, 1, 5, b"old")
        arena.retire(1)
        with pytest.raises(StaleSlotError):
            remote.verify(1, 5)

    def test_slot_outside_the_arena_is_refused(self, remote: RemoteArena) -> None:
        for slot in (-1, N_SLOTS, 2**40):
            with pytest.raises(ProtocolError):
                remote.verify(slot, 1)
            with pytest.raises(ProtocolError):
                remote.read_into([slot], np.zeros((1, 8), np.uint8))

    def test_destination_of_the_wrong_shape_is_refused(self, remote: RemoteArena) -> None:
        shapes: list[NDArray[Any]] = [
            np.zeros((2, 8), np.uint8),
            np.zeros((1, SLOT_BYTES + 1), np.uint8),
            np.zeros((1, 8), np.int64),
            np.zeros(8, np.uint8),
        ]
        for wrong in shapes:
            with pytest.raises(ValueError, match="dst is"):
                remote.read_into([0], wrong)

    @pytest.mark.parametrize("offset", [0, 4999])
    def test_one_wrong_bit_is_detected(
        self, arena: Arena, remote: RemoteArena, offset: int
    ) -> None:
        publish(arena, 3, 9, os.urandom(5000))
        arena.slots[3, offset] ^= 1
        with pytest.raises(ChecksumError):
            remote.read(3, 9)

    def test_wrong_published_checksum_is_detected(self, arena: Arena, remote: RemoteArena) -> None:
        arena.begin_write(3, 9)
        arena.publish(3, 9, b"", 100, 12345)
        with pytest.raises(ChecksumError):
            remote.read(3, 9)

    def test_a_reader_never_gets_a_mixture(self, arena: Arena, remote: RemoteArena) -> None:
        stop = threading.Event()
        newest = [1]
        publish(arena, 0, 1, bytes([1]) * SLOT_BYTES)

        def rewrite() -> None:
            while not stop.is_set():
                generation = newest[0] + 1
                publish(arena, 0, generation, bytes([generation % 256]) * SLOT_BYTES)
                newest[0] = generation

        writer = threading.Thread(target=rewrite)
        writer.start()
        mixed = []
        content = np.empty((1, SLOT_BYTES), np.uint8)
        try:
            for _ in range(2000):
                generation = newest[0]
                try:
                    remote.verify(0, generation)
                    remote.read_into([0], content)
                    remote.verify(0, generation)
                except StaleSlotError:
                    continue
                if set(content[0].tolist()) != {generation % 256}:
                    mixed.append(generation)
        finally:
            stop.set()
            writer.join()
        assert mixed == []
        assert remote.read(0, newest[0]).size == SLOT_BYTES

    def test_mapping_cannot_be_written(
        self, open_connector: Open, arena: Arena, remote: RemoteArena
    ) -> None:
        if not open_connector().supports_mapping:
            with pytest.raises(TransportError):
                _ = remote.slots
            return
        publish(arena, 0, 1, b"content")
        assert remote.slots.shape == (N_SLOTS, SLOT_BYTES)
        assert remote.slots[0, :7].tobytes() == b"content"
        with pytest.raises(ValueError, match="read-only"):
            remote.slots[0, 0] = 1
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            remote.slots.flags.writeable = True

    def test_arrays_outlive_both_sides(self, open_connector: Open, endpoint: Endpoint) -> None:
        reader = open_connector()
        remote = reader.attach(endpoint, timeout=ATTACH_S)
        held = remote.slots if reader.supports_mapping else np.zeros(1, np.uint8)
        remote.close()
        reader.close()
        assert int(held.sum()) == 0
        with pytest.raises(OmniError):
            remote.verify(0, 1)

    # Peers

    def test_attach_to_a_closed_peer_fails(self, open_connector: Open, arena: Arena) -> None:
        owner, reader = open_connector(), open_connector()
        endpoint = owner.export(arena, "gone")
        owner.close()
        with pytest.raises(PeerUnreachableError):
            reader.attach(endpoint, timeout=ATTACH_S)

    def test_withdrawn_arena_cannot_be_attached(self, open_connector: Open, arena: Arena) -> None:
        owner, reader = open_connector(), open_connector()
        endpoint = owner.export(arena, "withdrawn")
        kept = reader.attach(endpoint, timeout=ATTACH_S)
        publish(arena, 0, 1, b"content")
        owner.withdraw(endpoint)
        owner.withdraw(endpoint)
        with pytest.raises((PeerUnreachableError, PeerRefusedError)):
            reader.attach(endpoint, timeout=ATTACH_S)
        assert kept.read(0, 1).tobytes() == b"content"
        kept.close()

    def test_withdrawn_name_can_be_used_again(self, open_connector: Open, arena: Arena) -> None:
        owner, reader = open_connector(), open_connector()
        owner.withdraw(owner.export(arena, "name"))
        with Arena.create(1, 4096) as other:
            publish(other, 0, 1, b"other")
            with reader.attach(owner.export(other, "name"), timeout=ATTACH_S) as remote:
                assert remote.read(0, 1).tobytes() == b"other"

    def test_name_in_use_is_refused(self, open_connector: Open, arena: Arena) -> None:
        open_connector().export(arena, "name")
        with Arena.create(1, 4096) as other, pytest.raises(TransportError):
            open_connector().export(other, "name")

    def test_other_epoch_is_refused(self, open_connector: Open, endpoint: Endpoint) -> None:
        other = msgspec.structs.replace(endpoint, epoch=bytes(16))
        with pytest.raises((PeerRefusedError, IncompatiblePeerError)):
            open_connector().attach(other, timeout=ATTACH_S)

    def test_other_geometry_is_refused(self, open_connector: Open, endpoint: Endpoint) -> None:
        reader = open_connector()
        for other in (
            msgspec.structs.replace(endpoint, n_slots=N_SLOTS + 1),
            msgspec.structs.replace(endpoint, slot_bytes=SLOT_BYTES * 2),
            msgspec.structs.replace(endpoint, n_slots=N_SLOTS * 2, slot_bytes=SLOT_BYTES // 2),
        ):
            with pytest.raises((PeerRefusedError, IncompatiblePeerError)):
                reader.attach(other, timeout=ATTACH_S)

    def test_endpoint_of_another_transport_is_refused(
        self, open_connector: Open, endpoint: Endpoint
    ) -> None:
        with pytest.raises(PeerRefusedError):
            open_connector().attach(
                msgspec.structs.replace(endpoint, transport="pigeon"), timeout=ATTACH_S
            )

    @pytest.mark.parametrize("address", ["", "relative", "/nonexistent/a", "\0", "x" * 1000])
    def test_nonsense_address_is_refused(
        self, open_connector: Open, endpoint: Endpoint, address: str
    ) -> None:
        with pytest.raises((PeerRefusedError, PeerUnreachableError, ProtocolError)):
            open_connector().attach(
                msgspec.structs.replace(endpoint, address=address), timeout=ATTACH_S
            )

    def test_death_of_the_owner_is_seen(self, open_connector: Open, arena: Arena) -> None:
        owner = open_connector()
        with open_connector().attach(owner.export(arena, "mortal"), timeout=ATTACH_S) as remote:
            assert remote.alive
            owner.close()
            assert not remote.alive

    def test_many_readers_attach_at_once(
        self, open_connector: Open, arena: Arena, endpoint: Endpoint
    ) -> None:
        publish(arena, 0, 1, b"content")
        reader = open_connector()
        found: list[bytes] = []

        def read() -> None:
            with reader.attach(endpoint, timeout=ATTACH_S) as remote:
                found.append(remote.read(0, 1).tobytes())

        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [b"content"] * 16

    # Ends

    def test_close_twice(self, open_connector: Open, arena: Arena) -> None:
        connector = open_connector()
        endpoint = connector.export(arena, "name")
        connector.put("0", "1", "key", b"object")
        remote = connector.attach(endpoint, timeout=ATTACH_S)
        for _ in range(2):
            remote.close()
            connector.close()
        assert connector.health()["status"] == "closed"

    def test_closed_connector_does_nothing(self, open_connector: Open, arena: Arena) -> None:
        connector = open_connector()
        connector.put("0", "1", "key", b"object")
        connector.close()
        with pytest.raises(TransportError):
            connector.export(arena, "name")
        assert connector.put("0", "1", "key", b"object") == (False, 0, None)
        assert connector.get("0", "1", "key") is None
        connector.cleanup("key")

    def test_health(self, open_connector: Open) -> None:
        connector = open_connector()
        health = connector.health()
        assert health["status"] == "healthy"
        assert health["transport"] == connector.transport

    # Objects

    @pytest.mark.parametrize("with_metadata", [False, True])
    def test_object_travels(self, open_connector: Open, with_metadata: bool) -> None:
        sender, receiver = open_connector(), open_connector()
        value = {"ids": [1, 2, 3], "raw": b"\0\xff", "nested": {"x": [None, True, 1.5, "é"]}}
        ok, size, metadata = sender.put(
            from_stage="0", to_stage="1", put_key="omni_0_to_1_kv_cache_r", data=value
        )
        assert ok
        assert size > 0
        hint = msgspec.msgpack.decode(msgspec.msgpack.encode(metadata)) if with_metadata else None
        found = receiver.get(
            from_stage="0", to_stage="1", get_key="omni_0_to_1_kv_cache_r", metadata=hint
        )
        assert found == (value, size)

    def test_bytes_like_arrive_as_bytes(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        content = bytes(range(256)) * 3
        strided = memoryview(content)[::2]
        for i, data in enumerate((content, bytearray(content), memoryview(content), strided, b"")):
            assert sender.put("0", "1", f"key{i}", data)[:2] == (True, len(data))
            assert receiver.get("0", "1", f"key{i}") == (bytes(data), len(data))

    def test_object_may_be_got_by_many_and_by_its_sender(self, open_connector: Open) -> None:
        sender = open_connector()
        sender.put("0", "1", "key", "value")
        for receiver in (sender, open_connector(), open_connector(), sender):
            found = receiver.get("0", "1", "key")
            assert found is not None
            assert found[0] == "value"

    def test_object_never_put_is_none(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        assert receiver.get("0", "1", "key") is None
        sender.put("0", "1", "key", 1)
        for edge in (("1", "0", "key"), ("0", "2", "key"), ("0", "1", "ke"), ("0", "1", "key2")):
            assert receiver.get(*edge) is None

    def test_newest_object_wins(self, open_connector: Open) -> None:
        first, second, receiver = open_connector(), open_connector(), open_connector()
        for i, sender in enumerate((first, first, second, first)):
            sender.put("0", "1", "key", i)
            found = receiver.get("0", "1", "key")
            assert found is not None
            assert found[0] == i

    def test_object_of_a_sender_that_is_gone_is_none(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        if sender.is_store:
            return
        _, _, metadata = sender.put("0", "1", "key", b"object")
        assert receiver.get("0", "1", "key") is not None
        sender.close()
        assert receiver.get("0", "1", "key") is None
        assert receiver.get("0", "1", "key", metadata) is None

    def test_one_sender_that_is_gone_hides_no_other(self, open_connector: Open) -> None:
        gone, sender, receiver = open_connector(), open_connector(), open_connector()
        for each in (gone, sender):
            each.put("0", "1", f"key-{id(each)}", b"object")
        gone.close()
        assert receiver.get("0", "1", f"key-{id(sender)}") == (b"object", 6)

    @pytest.mark.parametrize("key", ODD_KEYS, ids=range(len(ODD_KEYS)))
    def test_odd_keys(self, open_connector: Open, key: str) -> None:
        sender, receiver = open_connector(), open_connector()
        assert sender.put("0", "1", key, b"object")[0]
        assert sender.put("0", "1", key + "x", b"another")[0]
        assert sender.put("0", "1", "unrelated", b"third")[0]
        assert receiver.get("0", "1", key) == (b"object", 6)
        assert receiver.get("0", "1", key + "x") == (b"another", 7)
        sender.cleanup(key)
        # No request has an empty id: cleaning it up must not free everything.
        assert (receiver.get("0", "1", key) is None) == (key != "")
        assert receiver.get("0", "1", "unrelated") == (b"third", 5)

    def test_parts_of_a_key_do_not_run_together(self, open_connector: Open) -> None:
        sender = open_connector()
        for edge in (("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd")):
            sender.put(*edge, "".join(edge))
            assert sender.get("a", "b", "c") is None
        assert sender.get("ab", "c", "d") == sender.get("ab", "c", "d", {})

    @pytest.mark.parametrize("slots", [1.0, 1.5, 2.0, 3.25])
    def test_objects_longer_than_a_slot(self, open_connector: Open, slots: float) -> None:
        sender, receiver = open_connector(), open_connector()
        for extra in (-1, 0, 1):
            content = os.urandom(int(self.object_slot_bytes * slots) + extra)
            assert sender.put("0", "1", "key", content)[:2] == (True, len(content))
            assert receiver.get("0", "1", "key") == (content, len(content))

    def test_object_that_never_fits_is_refused(self, open_connector: Open) -> None:
        if self.object_slots is None:
            return
        sender, receiver = open_connector(), open_connector()
        content = bytes(self.object_slots * self.object_slot_bytes + 1)
        assert sender.put("0", "1", "key", b"before")[0]
        assert sender.put("0", "1", "key", content) == (False, 0, None)
        with pytest.raises(ArenaFullError):
            sender.store_object(ObjectKey("0", "1", "key"), [memoryview(content)])
        assert receiver.get("0", "1", "key") == (b"before", 6)

    def test_full_arena_takes_objects_again_after_cleanup(self, open_connector: Open) -> None:
        if self.object_slots is None:
            return
        sender, receiver = open_connector(), open_connector()
        for i in range(self.object_slots):
            assert sender.put("0", "1", f"r{i}_key", i)[0]
        assert sender.put("0", "1", "one-more", b"x") == (False, 0, None)
        assert sender.put("0", "1", "r0_key", "replaced")[0]
        for i in range(1, self.object_slots, 2):
            sender.cleanup(f"r{i}")
        content = os.urandom(self.object_slots // 2 * self.object_slot_bytes - 1)
        assert sender.put("0", "1", "scattered", content)[0]
        assert receiver.get("0", "1", "scattered") == (content, len(content))
        assert receiver.get("0", "1", "r0_key") == ("replaced", len("replaced") + 1)

    def test_cleanup_takes_all_of_a_request_and_nothing_else(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        own = ["req-1", "omni_0_to_1_kv_cache_req-1", "req-1_0_0_3_2", "req-1_chunk_4", "x/req-1"]
        others = ["req-10", "req-1-0", "req-2", "xreq-1", "omni_0_to_1_kv_cache_req-11", "req-1.5"]
        for key in own + others:
            assert sender.put("0", "1", key, key)[0]
        receiver.cleanup("req-1")
        assert all(receiver.get("0", "1", key) is not None for key in own + others)
        for nothing in ("", "0", "1", "omni", "kv_cache", "req", "re"):
            sender.cleanup(nothing)
        assert [key for key in own + others if receiver.get("0", "1", key) is None] == []
        sender.cleanup("req-1")
        assert [key for key in own if receiver.get("0", "1", key) is not None] == []
        assert [key for key in others if receiver.get("0", "1", key) is None] == []

    @pytest.mark.parametrize("data", [object(), {1, 2}.__iter__(), 2**64, [lambda: 0]])
    def test_what_cannot_be_sent_is_the_callers_error(
        self, open_connector: Open, data: object
    ) -> None:
        with pytest.raises(TypeError):
            open_connector().put("0", "1", "key", data)

    @pytest.mark.parametrize(
        "metadata",
        [{"address": 5}, {"transport": [], "address": {}}, {5: 5}, {"unknown": "field"}],
    )
    def test_nonsense_metadata_does_no_harm(
        self, open_connector: Open, metadata: dict[Any, Any]
    ) -> None:
        connector = open_connector()
        assert connector.get("0", "1", "key", metadata) is None
        assert connector.health()["status"] == "healthy"

    def test_objects_put_and_got_by_many_threads(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        wrong: list[object] = []

        def work(name: int) -> None:
            for i in range(20):
                value = [name, i, b"x" * (100 * i)]
                if sender.put("0", "1", f"thread{name}", value)[0]:
                    found = receiver.get("0", "1", f"thread{name}")
                    if found is None or found[0] != value:
                        wrong.append((name, i, found))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_objects_agree_with_a_model(self, open_connector: Open) -> None:
        suite = self
        senders = [open_connector(), open_connector()]
        receiver = open_connector()

        class ObjectMachine(RuleBasedStateMachine):
            def __init__(self) -> None:
                super().__init__()
                for sender, rid in ((s, r) for s in senders for r in REQUESTS):
                    sender.cleanup(rid)
                # Per sender: key -> (when, value, slots), and what request a key is of.
                self.model: list[dict[str, tuple[int, Any, int]]] = [{}, {}]
                self.now = 0

            @rule(
                who=st.integers(0, 1),
                request=st.sampled_from(REQUESTS),
                shape=st.sampled_from(KEY_SHAPES),
                value=MSGPACK_VALUES,
            )
            def put(self, who: int, request: str, shape: str, value: Any) -> None:
                self.record(who, shape.format(request), value, 1)

            @rule(
                who=st.integers(0, 1),
                request=st.sampled_from(REQUESTS),
                shape=st.sampled_from(KEY_SHAPES),
                slots=st.floats(0.0, 6.0),
                fill=st.integers(0, 255),
            )
            def put_long(self, who: int, request: str, shape: str, slots: float, fill: int) -> None:
                content = bytes([fill]) * int(slots * suite.object_slot_bytes)
                needed = max(1, math.ceil((len(content) + 1) / suite.object_slot_bytes))
                self.record(who, shape.format(request), content, needed)

            def record(self, who: int, key: str, value: Any, needed: int) -> None:
                ok, _, metadata = senders[who].put("0", "1", key, value)
                own = self.model[who]
                taken = sum(slots for other, (_, _, slots) in own.items() if other != key)
                if suite.object_slots is not None:
                    assert ok == (taken + needed <= suite.object_slots)
                assert ok == (metadata is not None)
                if ok:
                    self.now += 1
                    own[key] = self.now, value, needed

            @rule(request=st.sampled_from(REQUESTS), shape=st.sampled_from(KEY_SHAPES))
            def get(self, request: str, shape: str) -> None:
                key = shape.format(request)
                held = [own[key] for own in self.model if key in own]
                found = receiver.get("0", "1", key)
                if not held:
                    assert found is None
                else:
                    assert found is not None
                    assert found[0] == max(held, key=lambda entry: entry[0])[1]

            @rule(who=st.integers(0, 1), request=st.sampled_from(REQUESTS))
            def cleanup(self, who: int, request: str) -> None:
                senders[who].cleanup(request)
                for shape in KEY_SHAPES:
                    self.model[who].pop(shape.format(request), None)

        run_state_machine_as_test(
            ObjectMachine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None)
        )
