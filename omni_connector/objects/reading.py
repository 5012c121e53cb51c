# SPDX-License-Identifier: Apache-2.0
"""Reading an object out of the slots of an arena, and not before it is checked."""

import functools
from collections.abc import Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.config import memory_limit_bytes
from omni_connector.errors import ChecksumError, ProtocolError, StaleSlotError
from omni_connector.memory.arena import Arena
from omni_connector.memory.buffers import Buffers, share_out
from omni_connector.objects import codec
from omni_connector.objects.messages import Found
from omni_connector.objects.object_store import (
    MAX_OBJECT_SLOTS,
    StoredObject,
    count_of,
    ids_of,
)
from omni_connector.transports.base import RemoteArena

Fetch = Callable[[list[int], int], NDArray[np.uint8]]
"""Gets so many bytes of slots, in memory of their own; see `RemoteArena.take`."""


def read_object(
    arena: Arena | RemoteArena, found: Found, buffers: Buffers, fetch: Fetch | None = None
) -> memoryview:
    """A verified copy of an object.

    Args:
        arena: the one that it is in, of the geometry that its owner has named.
        found: what its owner says of it; checked.
        buffers: where the memory for the copy comes from.
        fetch: gets the bytes of an arena that is not mapped.

    Raises:
        StaleSlotError: it was replaced or dropped meanwhile.
        ChecksumError: the bytes are not those that were stored.
        ProtocolError: the description makes no sense.
        TransportError: the arena is closed or cannot be read, or there is no memory for the copy.
    """
    stored, slot_bytes = found.stored, found.endpoint.slot_bytes
    ids = slot_ids(stored, found.endpoint.n_slots, slot_bytes)
    slots = arena.slots if fetch is None else None
    arena.verify(ids[0], stored.generation)
    content = buffers.take(stored.length) if fetch is None else fetch(ids, stored.length)
    checksums = np.empty(len(ids), np.uint64)

    def take_up(job: tuple[int, int]) -> None:
        index, slot = job
        piece = content[index * slot_bytes : (index + 1) * slot_bytes]
        if slots is not None:
            np.copyto(piece, slots[slot, : piece.size])
        checksums[index] = xxhash.xxh3_64_intdigest(piece.data)

    share_out(take_up, enumerate(ids), stored.length)
    header = arena.verify(ids[0], stored.generation)
    if header.key != found.digest or header.length != min(stored.length, slot_bytes):
        raise StaleSlotError(f"the slot holds {header.length} bytes of another object")
    if header.checksum != codec.checksum_of(stored.length, checksums):
        raise ChecksumError(f"generation {header.generation} of an object: wrong checksum")
    return content.data


def slot_ids(stored: StoredObject, n_slots: int, slot_bytes: int) -> list[int]:
    """The slots of an object, in the order of its bytes, in an arena of this geometry.

    Raises:
        ProtocolError: the description makes no sense.
    """
    count = count_of(stored.runs)
    capacity = count * slot_bytes
    impossible = stored.length < 0 or any(
        start < 0 or count < 1 or start + count > n_slots for start, count in stored.runs
    )
    # No slot counts twice. What is allocated is bounded by the arena, and by what this host has
    # where the arena is only announced.
    impossible = impossible or count > min(n_slots, MAX_OBJECT_SLOTS)
    impossible = impossible or stored.length > host_bytes()
    if impossible or not capacity - slot_bytes < max(stored.length, 1) <= capacity:
        raise ProtocolError(
            f"{stored.length} bytes in slots {stored.runs[:8]} do not describe an object in "
            f"{n_slots} slots of {slot_bytes} bytes"
        )
    return ids_of(stored.runs)


@functools.cache
def host_bytes() -> int:
    """`memory_limit_bytes`, which reads files, read once."""
    return memory_limit_bytes()
