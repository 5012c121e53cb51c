# SPDX-License-Identifier: Apache-2.0
"""Single slots, written and read as owners and readers of arenas do."""

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.errors import ChecksumError
from omni_connector.transports.base import RemoteArena


def publish(arena: Arena, slot: int, generation: int, content: bytes, key: bytes = b"key") -> None:
    """Write and publish a slot as an owner does."""
    arena.begin_write(slot, generation)
    arena.slots[slot, : len(content)] = np.frombuffer(content, np.uint8)
    arena.publish(slot, generation, key, len(content), xxhash.xxh3_64_intdigest(content))


def read(remote: RemoteArena, slot: int, generation: int) -> NDArray[np.uint8]:
    """A verified copy of the content of one slot, as a loader makes it: (length,) uint8.

    Raises:
        ChecksumError: the bytes are not those that were published.
        StaleSlotError, ProtocolError, IntegrityError, TransportError: as `RemoteArena.verify`.
    """
    length = remote.verify(slot, generation).length
    content: NDArray[np.uint8] = np.empty(length, np.uint8)
    remote.read_into([slot], content.reshape(1, length))
    # What the second header says counts: the first may have been read half way through.
    header = remote.verify(slot, generation)
    if header.length != length or header.checksum != xxhash.xxh3_64_intdigest(content.data):
        raise ChecksumError(f"slot {slot} generation {generation} at {remote.endpoint.address}")
    return content
