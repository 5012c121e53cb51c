# SPDX-License-Identifier: Apache-2.0
"""Arenas of peers: superblocks, slot headers, and what is said about the objects in them."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.block_index import (
    BlockIndex,
    BlockIndexView,
    find_prefix,
    tags_of,
)
from omni_connector.arena.buffers import Buffers
from omni_connector.arena.format import (
    HEADER_BYTES,
    PAGE_BYTES,
    SUPERBLOCK_BYTES,
    ArenaGeometry,
)
from omni_connector.arena.pool import Pool
from omni_connector.arena.slot_pool import SlotPool
from omni_connector.errors import OmniError, PeerUnreachableError
from omni_connector.net.packets import (
    MAX_MESSAGE_BYTES,
    Refusal,
    close_all,
    read_answer,
    receive,
)
from omni_connector.objects import mooncake as object_server
from omni_connector.objects import shm as object_sockets
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.exchange import Read
from omni_connector.objects.object_store import ObjectStore, find_object, read_object
from omni_connector.objects.peer import ANSWERS, Found, Missing
from omni_connector.prefix.attaching import RankSockets
from omni_connector.prefix.host_blocks import touch
from omni_connector.prefix.neighbours import ANSWERS as GIVEN
from omni_connector.prefix.neighbours import QUESTIONS, GiveIndex, Hits, LocalEngine, opened
from omni_connector.testing.conformance.slots import read
from omni_connector.transports.base import Endpoint
from omni_connector.transports.mooncake.engine import MemoryRange
from omni_connector.transports.mooncake.transport import MooncakeArena
from omni_connector.transports.shm import Attach, MappedArena
from tests import inspection
from tests.hostile.mutation import damage, distort_msgpack
from tests.hostile.trial import Parser

N_SLOTS: Final = 8
SLOT_BYTES: Final = 2 * PAGE_BYTES
_CONTENT: Final = bytes(range(256)) * 20
_DIGEST: Final = ObjectKey("0", "1", "k").digest
_ODD_SIZES: Final = (0, -1, 1, 7, 8, 9, 4095, 4096, 8192, 8193, 1 << 20, 1 << 31, 1 << 40, 1 << 62)


class _Owner:
    """An arena with slots in every state, whose bytes can be changed as a hostile owner may."""

    def __init__(self) -> None:
        self.arena = Arena.create(N_SLOTS, SLOT_BYTES, randbytes=lambda count: b"E" * count)
        geometry = ArenaGeometry(N_SLOTS, SLOT_BYTES)
        self.bytes: NDArray[np.uint8] = np.frombuffer(inspection.mapped(self.arena), np.uint8)
        checksum = xxhash.xxh3_64_intdigest(_CONTENT)
        for slot in range(N_SLOTS):
            self.arena.begin_write(slot, slot + 1)
            self.arena.slots[slot, : len(_CONTENT)] = np.frombuffer(_CONTENT, np.uint8)
            if slot < 6:
                self.arena.publish(slot, slot + 1, b"key", len(_CONTENT), checksum)
        self.arena.retire(5)
        self.superblock = self.bytes[:SUPERBLOCK_BYTES].tobytes()
        self.headers = self.bytes[
            geometry.headers_at : geometry.headers_at + N_SLOTS * HEADER_BYTES
        ]
        self.good = self.headers.tobytes()

    def close(self) -> None:
        del self.bytes, self.headers
        self.arena.close()


@contextmanager
def _owner() -> Iterator[_Owner]:
    owner = _Owner()
    try:
        yield owner
    finally:
        owner.close()


@contextmanager
def superblocks() -> Iterator[Parser]:
    """The start of a peer's arena, and what the peer says of its size, before it is mapped."""
    with _owner() as owner:
        arena = owner.arena
        said = arena.epoch, N_SLOTS, SLOT_BYTES

        def make(rng: random.Random) -> tuple[bytes, bytes, int, int]:
            raw, (epoch, n_slots, slot_bytes) = owner.superblock, said
            if rng.random() < 0.7:
                raw = damage(raw, rng)
            if rng.random() < 0.2:
                epoch = damage(epoch, rng)
            if rng.random() < 0.2:
                n_slots = rng.choice(_ODD_SIZES)
            if rng.random() < 0.2:
                slot_bytes = rng.choice(_ODD_SIZES)
            if rng.random() < 0.1:  # one that agrees with itself, and not with what was said
                fields = bytearray(owner.superblock)
                struct.pack_into("=Q", fields, rng.randrange(16, 80, 8), rng.getrandbits(64))
                digest = xxhash.xxh3_64_intdigest(bytes(fields[:-8]))
                raw = bytes(fields[:-8]) + struct.pack("=Q", digest)
            return raw, epoch, n_slots, slot_bytes

        def parse(hostile: tuple[bytes, bytes, int, int]) -> bool:
            raw, epoch, n_slots, slot_bytes = hostile
            raw = raw[:SUPERBLOCK_BYTES].ljust(SUPERBLOCK_BYTES, b"\xff")
            owner.bytes[:SUPERBLOCK_BYTES] = np.frombuffer(raw, np.uint8)
            try:
                opened = ArenaView.open(
                    arena.fd, epoch=epoch, n_slots=n_slots, slot_bytes=slot_bytes
                )
            finally:
                owner.bytes[:SUPERBLOCK_BYTES] = np.frombuffer(owner.superblock, np.uint8)
            with opened:
                assert (epoch, n_slots, slot_bytes) == said, "another arena was opened"
                assert raw == owner.superblock, "a damaged superblock was believed"
            return True

        yield Parser("superblocks", make, parse, (OmniError,))


@contextmanager
def indexes() -> Iterator[Parser]:
    """A peer's index, and what the peer says of it; then look-ups in whatever it holds."""
    epoch, tags = b"E" * 16, tags_of(b"", 0, [bytes([i]) * 32 for i in range(2 * N_SLOTS)])
    with BlockIndex.create(N_SLOTS, epoch) as index:
        slots = np.arange(N_SLOTS)
        index.add(tags[:N_SLOTS], slots, slots + 1)
        memory: NDArray[np.uint8] = np.frombuffer(inspection.mapped(index), np.uint8)
        good = memory.copy()

        def make(rng: random.Random) -> tuple[int, bytes, bytes, int]:
            start = rng.choice((0, *range(PAGE_BYTES, good.size, PAGE_BYTES)))
            raw = damage(good[start : start + 8 * N_SLOTS].tobytes(), rng)[:PAGE_BYTES]
            odd = rng.random() < 0.1
            return (
                start,
                raw,
                damage(epoch, rng) if odd else epoch,
                rng.choice(_ODD_SIZES) if odd else N_SLOTS,
            )

        def parse(hostile: tuple[int, bytes, bytes, int]) -> bool | str:
            start, raw, said, num_slots = hostile
            memory[start : start + len(raw)] = np.frombuffer(raw, np.uint8)
            try:
                with BlockIndexView.open(index.fd, epoch=said, num_slots=num_slots) as view:
                    found, generations = view.find(tags)
                    prefix = find_prefix([index, view], tags)
            finally:
                memory[:] = good
            assert ((found >= -1) & (found < N_SLOTS)).all(), "a slot that does not exist"
            assert ((generations >= 0) == (found >= 0)).all(), "a slot in no generation"
            count = len(prefix[0])
            assert np.array_equal(prefix[1], found[:count]), "two look-ups differ"
            return bool((found >= 0).any()) or "misses"

        yield Parser("indexes of blocks", make, parse, (OmniError,))


class _Reach:
    """In the place of Mooncake's engine: a peer's memory, which lies in this process."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.pool = Pool(lambda buffer: None, lambda buffer: None, 0)

    def fetch(self, peer: str, ranges: Sequence[MemoryRange], deadline: float) -> NDArray[np.uint8]:
        """As `TransferEngine.fetch`."""
        parts = []
        for each in ranges:
            if each.address < 0 or each.address + each.size > self._memory.size:
                raise PeerUnreachableError("no such memory")
            parts.append(self._memory[each.address : each.address + each.size])
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _hostile_header(owner: _Owner, rng: random.Random) -> tuple[int, bytes, int, int]:
    slot = rng.choice((0, 1, 2, 3, 4, 5, 6, 7))
    header = owner.good[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]
    if rng.random() < 0.9:
        header = damage(header, rng)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    if rng.random() < 0.2:  # a length that the checksum does not cover
        words = list(struct.unpack("=8Q", header))
        words[6] = rng.choice((0, 1, SLOT_BYTES, SLOT_BYTES + 1, 1 << 63, len(_CONTENT) + 1))
        header = struct.pack("=8Q", *words)
    asked = slot if rng.random() < 0.9 else rng.choice((-1, N_SLOTS, 1 << 40, -(1 << 62), 1 << 63))
    return slot, header, asked, rng.choice((slot + 1, slot + 1, 0, 1 << 63, (1 << 64) - 1))


def _with_header(owner: _Owner, slot: int, header: bytes) -> contextlib.ExitStack:
    place = owner.headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]
    good = place.copy()
    place[:] = np.frombuffer(header, np.uint8)
    undo = contextlib.ExitStack()
    undo.callback(np.copyto, place, good)
    return undo


@contextmanager
def neighbours() -> Iterator[Parser]:
    """What an engine of this host says that shares prefixes, and what it tells of hits."""
    epoch, readers = b"E" * 16, b"R" * 16
    pool = SlotPool(N_SLOTS)
    with _owner() as owner, BlockIndex.create(N_SLOTS, epoch) as index:
        arenas = ((Endpoint.of(owner.arena, "shm", "/x"),),)
        ranks = RankSockets(Path("/"), "", ())
        ours = LocalEngine(Path("/"), "", readers, index, arenas, ranks, partial(touch, pool))
        given = msgspec.msgpack.encode(GiveIndex(readers, epoch, N_SLOTS, arenas))
        numbers = np.arange(N_SLOTS).tobytes()
        told = msgspec.msgpack.encode(Hits(numbers, numbers))

        def make(rng: random.Random) -> tuple[bool, bytes]:
            asks = rng.random() < 0.5
            honest = told if asks else given
            return asks, (distort_msgpack if rng.random() < 0.5 else damage)(honest, rng)

        def parse(hostile: tuple[bool, bytes]) -> bool:
            asks, packet = hostile
            if asks:
                question = QUESTIONS.decode(packet)
                if isinstance(question, Hits):
                    slots, generations = question.slots, question.generations
                    ours.on_hits(
                        np.frombuffer(slots, np.int64), np.frombuffer(generations, np.int64)
                    )
                return True
            reply, descriptor = read_answer(packet, [os.dup(index.fd)], GIVEN, with_fd=True)
            assert descriptor is not None
            found, descriptor = opened(reply, descriptor, ours)
            os.close(descriptor)
            assert all(found.arenas), "a rank without an arena was believed"
            found.index.close()
            return True

        errors = (OmniError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
        yield Parser("neighbours", make, parse, errors)


@contextmanager
def mapped_headers() -> Iterator[Parser]:
    """Headers of slots that are mapped, and the reads that they allow."""
    with _owner() as owner:
        arena = owner.arena
        view = ArenaView.open(arena.fd, epoch=arena.epoch, n_slots=N_SLOTS, slot_bytes=SLOT_BYTES)
        connection: Any = contextlib.nullcontext()
        remote = MappedArena(Endpoint.of(arena, "shm", "/nowhere"), view, connection)

        def parse(hostile: tuple[int, bytes, int, int]) -> bool:
            slot, header, asked, generation = hostile
            with _with_header(owner, slot, header):
                assert read(remote, asked, generation).size <= SLOT_BYTES
                return True

        yield Parser(
            "slot headers, mapped", lambda rng: _hostile_header(owner, rng), parse, (OmniError,)
        )
        view.close()


@contextmanager
def fetched_headers() -> Iterator[Parser]:
    """The same of slots that are fetched."""
    with _owner() as owner:
        engine: Any = _Reach(owner.bytes)
        remote = MooncakeArena(engine, Endpoint.of(owner.arena, "mooncake", "x"), "peer", 0)

        def parse(hostile: tuple[int, bytes, int, int]) -> bool:
            slot, header, asked, generation = hostile
            with _with_header(owner, slot, header):
                fetched = remote.fetch([asked], [generation], len(_CONTENT), timeout=1.0)
                assert fetched.rows.shape == (1, len(_CONTENT))
                fetched.release()
                assert read(remote, asked, generation).size <= SLOT_BYTES
                return True

        yield Parser(
            "slot headers, fetched", lambda rng: _hostile_header(owner, rng), parse, (OmniError,)
        )


@contextmanager
def object_places() -> Iterator[Parser]:
    """Where an object is, by what its owner says over TCP or by the header of an arena that is
    mapped; and the reads of it."""
    arena = Arena.create(N_SLOTS, SLOT_BYTES, randbytes=lambda count: b"E" * count)
    store = ObjectStore(arena)
    for key in ("other", "k"):
        stored = store.store(ObjectKey("0", "1", key), [memoryview(_CONTENT * 4)])
    memory: NDArray[np.uint8] = np.frombuffer(inspection.mapped(arena), np.uint8)
    engine: Any = _Reach(memory)
    endpoint = Endpoint.of(arena, "mooncake", "x")
    buffers = Buffers()
    encode = msgspec.msgpack.encode
    corpus = [
        encode(each) for each in (Found(_DIGEST, endpoint, stored), Missing(_DIGEST), Refusal("no"))
    ]
    at = PAGE_BYTES + stored.slot * HEADER_BYTES
    header = memory[at : at + HEADER_BYTES]
    true = header.tobytes()

    def make(rng: random.Random) -> tuple[bool, bytes]:
        if rng.random() < 0.5:
            return True, damage(true, rng).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
        return False, distort_msgpack(corpus[rng.choice((0,) * 6 + (1, 2))], rng)

    def parse(hostile: tuple[bool, bytes]) -> bool | str:
        mapped, raw = hostile
        if not mapped:
            said = object_server._decode([raw], ANSWERS)
            if not isinstance(said, Found):
                return "nowhere"
            if said.digest != _DIGEST:
                return "not asked for"  # as `Peer` sees to
            remote = MooncakeArena(engine, said.endpoint, "peer", 0)
            size = said.endpoint.n_slots * said.endpoint.slot_bytes
            content = read_object(
                *(remote, size, _DIGEST, said.stored),
                lambda pieces, nbytes: remote.take(pieces, timeout=1.0),
            )
            assert content == _CONTENT * 4, "other bytes than those of the object"
            return True
        header[:] = np.frombuffer(raw, np.uint8)
        try:
            found = find_object(arena, _DIGEST)
            if found is None:
                return "nowhere"
            size = N_SLOTS * SLOT_BYTES
            content = read_object(
                arena, size, _DIGEST, found, lambda pieces, nbytes: buffers.take(nbytes)
            )
            assert content == _CONTENT * 4, "other bytes than those of the object"
        finally:
            header[:] = np.frombuffer(true, np.uint8)
        return True

    yield Parser("places of objects", make, parse, (OmniError,))
    buffers.close()
    store.close()


@contextmanager
def socket_questions() -> Iterator[Parser]:
    """What processes of this user ask over the Unix sockets of shared memory."""
    with TemporaryDirectory(prefix="omni-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        owner = stack.enter_context(
            object_sockets.SharedMemoryConnector(folder=Path(name), geometry=(N_SLOTS, SLOT_BYTES))
        )
        owner.put("0", "1", "k", _CONTENT)
        assert owner._own is not None
        epoch, address = owner._own.endpoint.epoch, owner._own.address
        questions = Attach(b""), Attach(epoch), Read(epoch, _DIGEST, 1)
        corpus = [msgspec.msgpack.encode(question) for question in questions]

        def make(rng: random.Random) -> bytes:
            return distort_msgpack(rng.choice(corpus), rng)[: MAX_MESSAGE_BYTES + 9]

        def parse(raw: bytes) -> bool | str:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(10)
                connection.connect(address)
                connection.send(raw or b"\0")
                # Who is refused is hung up on, whatever else it says.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send(corpus[0])
                    connection.shutdown(socket.SHUT_WR)
                said = list(_said(connection))
            return True if said[-1:] == ["attach-reply"] else "refused"

        def alive() -> None:
            assert owner.health()["status"] == "healthy"
            assert owner.get("0", "1", "k") == (_CONTENT, len(_CONTENT))

        yield Parser("questions over Unix sockets", make, parse, (), alive)


def _said(connection: socket.socket) -> Iterator[str]:
    while True:
        try:
            packet, descriptors = receive(connection, with_fd=True)
        except ConnectionResetError:
            return
        close_all(descriptors)
        if not packet:
            return
        yield msgspec.msgpack.decode(packet)["type"]
