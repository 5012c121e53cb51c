# SPDX-License-Identifier: Apache-2.0
"""What peers find of an engine's slots: which are in its index, and the keys in their headers."""

from collections.abc import Sequence

import numpy as np
import xxhash

from omni_connector.memory.arena_format import MAX_KEY_BYTES
from omni_connector.memory.block_index import BlockIndex, Tags, tags_of
from omni_connector.memory.slot_index import Ints, SlotKey


def header_keys(key_prefix: bytes, group: int, keys: Sequence[SlotKey | None]) -> list[bytes]:
    """The keys that slot headers have: `MAX_KEY_BYTES` bytes at most; b"" for None.

    Args:
        key_prefix: what the keys of all blocks of an engine have in common.
        group: the cache group of the blocks.
        keys: of the blocks.
    """
    whose = xxhash.xxh3_64_digest(b"%d/%b" % (group, key_prefix))
    rest = MAX_KEY_BYTES - len(whose)
    return [b"" if key is None else whose + key[:rest] for key in keys]


class SlotListing:
    """Keeps the index of an arena. The caller holds the lock of the pool.

    Args:
        index: of the arena; closed by its owner.
        key_prefix: as for `header_keys`.
    """

    def __init__(self, index: BlockIndex, key_prefix: bytes) -> None:
        self._index = index
        self._key_prefix = key_prefix
        self._tags: Tags = np.zeros(index.num_slots, np.uint64)

    def rename(self, key_prefix: bytes) -> None:
        """From now on blocks have keys of this prefix."""
        self._key_prefix = key_prefix

    def keys(self, group: int, keys: Sequence[SlotKey | None]) -> list[bytes]:
        """What the headers of slots with these keys say."""
        return header_keys(self._key_prefix, group, keys)

    def name(self, group: int, keys: Sequence[SlotKey | None], slots: Ints) -> None:
        """These slots will hold these blocks; those without a key are never listed."""
        if len(slots):
            named = [key or b"" for key in keys]
            self._tags[slots] = tags_of(self._key_prefix, group, named)

    def show(self, slots: Ints, generations: Ints) -> None:
        """Peers find these slots from now on."""
        if len(slots):
            self._index.add(self._tags[slots], slots, generations)

    def hide(self, slots: Ints) -> None:
        """Peers find these slots no more."""
        self._index.remove(slots)

    def clear(self) -> None:
        """Peers find nothing any more."""
        self._index.clear()
