# SPDX-License-Identifier: Apache-2.0
"""What every copier of blocks does, whatever memory the KV cache lies in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from omni_connector.kv.canonical import CanonicalKVCaches
from omni_connector.kv.slots import SlotLayout


class BlockCopier(ABC):
    """Copies blocks of one KV cache to and from slots.

    `fence` is called on the engine's thread; `save`, `load` and `zero` on any, of different
    blocks at a time. They return when the bytes are where they belong.
    The checksum of a slot is xxh3-64 of the bytes its group stores in it.
    """

    def __init__(self, canonical: CanonicalKVCaches, layout: SlotLayout) -> None:
        self._num_blocks = canonical.num_blocks
        self._layout = layout

    @abstractmethod
    def fence(self) -> object:
        """Mark now as the moment from which the blocks just computed may be read.

        Cheap, and never waits; the mark is for `save` or `load`.
        """

    @abstractmethod
    def save(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        slot_ids: NDArray[np.int64],
        *,
        checksum: bool,
        fence: object = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> NDArray[np.uint64] | None:
        """Copy blocks to slots: block `block_ids[i]` of `group` to slot `slot_ids[i]`.

        Args:
            group: the blocks' group.
            block_ids: `(n,)`.
            slots: `(n_slots, slot_bytes)`, writable.
            slot_ids: `(n,)`, no slot twice.
            checksum: whether to compute the checksums.
            fence: what `fence` returned; the copy waits for it.
            cancelled: asked now and then between blocks; once true, the copy is given up.

        Returns:
            The checksum of each slot `(n,)`, zeros if none were asked for; None if cancelled,
            when any of the slots may have been written.

        Raises:
            IndexError: a group, block or slot that does not exist; nothing was copied.
            ValueError: arrays of other shapes, or a slot twice; nothing was copied.
        """

    @abstractmethod
    def load(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        slot_ids: NDArray[np.int64],
        *,
        checksum: bool,
        fence: object = None,
    ) -> NDArray[np.uint64]:
        """Copy slots to blocks: slot `slot_ids[i]` to block `block_ids[i]` of `group`.

        The padding of the blocks is zeroed: nobody else does so for blocks that are loaded into.

        Args:
            group: the blocks' group.
            block_ids: `(n,)`, no block twice.
            slots: `(n_slots, slot_bytes)`; read-only will do.
            slot_ids: `(n,)`.
            checksum: whether to compute the checksums.
            fence: what `fence` returned; the copy waits for it.

        Returns:
            The checksum of each slot `(n,)` as it was read, zeros if none were asked for. A
            slot that changed while it was read never has the checksum of its old bytes.

        Raises:
            IndexError: a group, block or slot that does not exist; nothing was copied.
            ValueError: arrays of other shapes, or a block twice; nothing was copied.
        """

    @abstractmethod
    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        """Zero blocks of `group`: all bytes that its layers reserve, padding included.

        Args:
            group: the blocks' group.
            block_ids: `(n,)`.
            fence: what `fence` returned; the zeroing waits for it.

        Raises:
            IndexError: a group or block that does not exist; nothing was zeroed.
            ValueError: block ids that are not integers in a row; nothing was zeroed.
        """

    @abstractmethod
    def pin(self, slots: NDArray[np.uint8]) -> None:
        """Prepare slots for faster copies, where the device knows any; optional.

        Args:
            slots: `(n_slots, slot_bytes)`, writable; they must stay mapped until `close`.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the KV cache; calling it again does nothing."""

    def _checked(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        slot_ids: NDArray[np.int64],
        *,
        saving: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Refuse what cannot be copied, before anything is."""
        blocks = self._checked_blocks(group, block_ids, unique=not saving)
        size = self._layout.group_bytes[group]
        if slots.ndim != 2 or slots.shape[1] < size:  # a peer's may be larger than ours
            raise ValueError(f"expected slots (n, {size} bytes or more), found {slots.shape}")
        if slots.dtype != np.uint8 or slots.strides[1] != 1:
            raise ValueError(f"slots are {slots.dtype} with strides {slots.strides}, not bytes")
        if saving and not slots.flags.writeable:
            raise ValueError("slots to be written are read-only")
        targets = _ids(slot_ids, slots.shape[0], "slot", unique=saving)
        if len(blocks) != len(targets):
            raise ValueError(f"{len(blocks)} blocks, but {len(targets)} slots")
        return blocks, targets

    def _checked_blocks(
        self, group: int, block_ids: NDArray[np.int64], *, unique: bool
    ) -> NDArray[np.int64]:
        if not 0 <= group < len(self._layout.group_bytes):
            raise IndexError(f"group {group} of {len(self._layout.group_bytes)}")
        return _ids(block_ids, self._num_blocks, "block", unique=unique)


def _ids(ids: NDArray[np.int64], limit: int, what: str, *, unique: bool) -> NDArray[np.int64]:
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{what} ids are {ids.dtype} of shape {ids.shape}, not integers in a row")
    outside = ids[(ids < 0) | (ids >= limit)]
    if outside.size:
        raise IndexError(f"{what} {outside[0]} of {limit}")
    if unique and ids.size > 1:
        ordered = np.sort(ids)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        if again.size:
            raise ValueError(f"{what} {again[0]} is written twice")
    return ids.astype(np.int64, copy=False)


def stretches(
    block_ids: NDArray[np.int64], slot_ids: NDArray[np.int64], limit: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (block, slot, count) where both ids go up by one, `limit` blocks at most."""
    blocks = block_ids.tolist()
    slots = slot_ids.tolist()
    first = 0
    while first < len(blocks):
        block, slot = blocks[first], slots[first]
        bound = min(len(blocks) - first, limit)
        count = 1
        while (
            count < bound
            and blocks[first + count] == block + count
            and slots[first + count] == slot + count
        ):
            count += 1
        yield block, slot, count
        first += count
