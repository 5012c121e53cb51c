# SPDX-License-Identifier: Apache-2.0
"""What a transport has to do with arenas: hand them out, read them, notice every change."""

import os
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.errors import (
    ChecksumError,
    OmniError,
    ProtocolError,
    StaleSlotError,
    TransportError,
)
from omni_connector.testing.conformance.base import (
    ATTACH_S,
    N_SLOTS,
    SLOT_BYTES,
    ArenaFixtures,
    OpenTransport,
)
from omni_connector.testing.conformance.slots import publish, read
from omni_connector.transports.base import Endpoint, RemoteArena


class ArenaConformance(ArenaFixtures):
    """Reading an arena that a peer exports."""

    def test_what_is_published_is_read(self, arena: Arena, remote: RemoteArena) -> None:
        content = os.urandom(5000)
        publish(arena, 2, 7, content, key=b"\0name\0")
        header = remote.verify(2, 7)
        assert (header.generation, header.length, header.key) == (7, 5000, b"\0name\0")
        assert read(remote, 2, 7).tobytes() == content

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
        assert read(remote, N_SLOTS - 1, 2**64 - 1).tobytes() == content

    def test_ranges_of_slots_are_taken_as_one(self, arena: Arena, remote: RemoteArena) -> None:
        for slot in range(3):
            publish(arena, slot, 1, bytes([slot + 1]) * SLOT_BYTES)
        ranges = [(2 * SLOT_BYTES, SLOT_BYTES), (0, 0), (SLOT_BYTES - 3, 5)]
        taken = remote.take(ranges, timeout=ATTACH_S)
        assert taken.tobytes() == bytes([3]) * SLOT_BYTES + bytes([1]) * 3 + bytes([2]) * 2
        for beyond in ((-1, 2), (N_SLOTS * SLOT_BYTES - 1, 2), (5, -1)):
            with pytest.raises(ProtocolError):
                remote.take([beyond], timeout=ATTACH_S)

    def test_an_empty_slot_is_read(self, arena: Arena, remote: RemoteArena) -> None:
        publish(arena, 0, 1, b"", key=b"")
        assert read(remote, 0, 1).size == 0

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
            read(remote, 1, 5)

    def test_other_generation_is_refused(self, arena: Arena, remote: RemoteArena) -> None:
        publish(arena, 1, 5, b"new")
        for generation in (4, 6, 0, 2**64 - 1):
            with pytest.raises(StaleSlotError):
                read(remote, 1, generation)

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
            read(remote, 3, 9)

    def test_wrong_published_checksum_is_detected(self, arena: Arena, remote: RemoteArena) -> None:
        arena.begin_write(3, 9)
        arena.publish(3, 9, b"", 100, 12345)
        with pytest.raises(ChecksumError):
            read(remote, 3, 9)

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
        assert read(remote, 0, newest[0]).size == SLOT_BYTES

    def test_mapping_cannot_be_written(
        self, open_connector: OpenTransport, arena: Arena, remote: RemoteArena
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

    def test_arrays_outlive_both_sides(
        self, open_connector: OpenTransport, endpoint: Endpoint
    ) -> None:
        reader = open_connector()
        remote = reader.attach(endpoint, timeout=ATTACH_S)
        held = remote.slots if reader.supports_mapping else np.zeros(1, np.uint8)
        remote.close()
        reader.close()
        assert int(held.sum()) == 0
        with pytest.raises(OmniError):
            remote.verify(0, 1)
