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


class SlotChanges:
    """In which slots peers find other blocks than when one asked last. The caller holds the lock of
    the pool.

    Only the latest state of a slot is kept, so whoever asks seldom learns less, but nothing wrong.

    Args:
        num_slots: of the arena.
    """

    def __init__(self, num_slots: int) -> None:
        self._names: list[tuple[int, SlotKey] | None] = [None] * num_slots
        self._shown = np.zeros(num_slots, bool)
        self._changed: set[int] = set()
        self._cleared = False

    def name(self, group: int, keys: Sequence[SlotKey | None], slots: Ints) -> None:
        """These slots will hold these blocks."""
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self._names[slot] = None if key is None else (group, key)

    def show(self, slots: Ints, shown: bool) -> None:
        """Peers find these slots from now on, or find them no more."""
        self._shown[slots] = shown
        self._changed.update(slots.tolist())

    def clear(self) -> None:
        """Peers find nothing any more."""
        self._shown[:] = False
        self._changed.clear()
        self._cleared = True

    def take(self) -> tuple[bool, dict[int, tuple[int, SlotKey] | None]]:
        """Whether nothing was found any more at some time since the last call; and, since that time
        or the last call, the slots that have changed, with group and key of the block that peers
        find in each now, or None."""
        cleared, self._cleared = self._cleared, False
        changed, self._changed = self._changed, set()
        return cleared, {s: self._names[s] if self._shown[s] else None for s in changed}


class SlotListing:
    """Keeps the index of an arena. The caller holds the lock of the pool.

    Args:
        index: of the arena; closed by its owner.
        key_prefix: as for `header_keys`.

    Attributes:
        changes: is told of all changes; None where nobody asks for them.
    """

    def __init__(
        self, index: BlockIndex, key_prefix: bytes, changes: SlotChanges | None = None
    ) -> None:
        self._index = index
        self._key_prefix = key_prefix
        self.changes = changes
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
            if self.changes is not None:
                self.changes.name(group, keys, slots)

    def show(self, slots: Ints, generations: Ints) -> None:
        """Peers find these slots from now on."""
        if len(slots):
            self._index.add(self._tags[slots], slots, generations)
            if self.changes is not None:
                self.changes.show(slots, True)

    def hide(self, slots: Ints) -> None:
        """Peers find these slots no more."""
        self._index.remove(slots)
        if self.changes is not None:
            self.changes.show(slots, False)

    def clear(self) -> None:
        """Peers find nothing any more."""
        self._index.clear()
        if self.changes is not None:
            self.changes.clear()
