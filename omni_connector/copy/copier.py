# SPDX-License-Identifier: Apache-2.0
"""Copies blocks of a KV cache into slots and back, with checksums, wherever the cache lies."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.kv.canonical import SlotLayout
from omni_connector.kv.convert import PageRun

_OF_NOTHING: Final = xxhash.xxh3_64_intdigest(b"")

Landed = Callable[[slice, NDArray[np.uint64]], object]
"""Takes the places of some blocks of a copy, and the checksums of their slots."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Blocks of one group, and the slots that they are copied to or from.

    Copiers check no ids. The maker of a copy has checked that all of them exist, and that none is
    written twice; see `TransferSpec.check`.

    Args:
        group: the blocks' group.
        block_ids: int64 `(n,)`.
        slots: `(n_slots, slot_bytes)`, at least as long as the group's blocks; a load only reads
            them.
        slot_ids: int64 `(n,)`; the slot of each of the blocks.
        checksum: whether to compute the checksums.
        states: of `BlockCopier.begin` `(n, ...)`, if these are not all bytes of the slots: the copy
            goes on with their checksums, and returns the checksums of slots that it completes.
        fence: what `BlockCopier.fence` returned; the copy waits for it.
    """

    group: int
    block_ids: NDArray[np.int64]
    slots: NDArray[np.uint8]
    slot_ids: NDArray[np.int64]
    checksum: bool
    fence: object = None
    states: NDArray[np.uint64] | None = None


class BlockCopier(ABC):
    """Copies blocks of one KV cache to and from slots.

    `fence` is called on the engine's thread; `save`, `load` and `zero` on any, of different
    blocks at a time. They return when the bytes are where they belong.
    The checksum of a slot is xxh3-64 of the bytes its group stores in it. Of a group whose layers
    are all in other pipeline stages, slots store no bytes.

    Attributes:
        speed: how many times as many bytes jobs copy at once as where a core of the host copies.
            What they cost beside the copies stays small then.
        layer_bytes: bytes of a layer that a save copies at once while it follows a forward pass.
            The host has few enough in the core's own cache still when it hashes them.
        pinned_at_once: bytes of slots that `pin` is given at once; 0 where it has no use for that.
    """

    speed: int = 1
    layer_bytes: int = 1 << 20
    pinned_at_once: int = 0

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout

    @abstractmethod
    def fence(self) -> object:
        """Mark now as the moment from which the blocks just computed may be read.

        Cheap, and never waits; the mark is for `save` or `load`.
        """

    @abstractmethod
    def reached(self, fence: object) -> bool:
        """Whether a copy with this fence would not wait for it. Never waits itself."""

    def save(
        self,
        copy: BlockCopy,
        *,
        cancelled: Callable[[], bool] | None = None,
        landed: Landed | None = None,
    ) -> NDArray[np.uint64] | None:
        """Copy blocks to slots.

        Args:
            copy: what is copied.
            cancelled: asked now and then between blocks; once true, the copy is given up.
            landed: called for blocks whose slots are complete, until it has been called for all. A
                device copies the next ones meanwhile.

        Returns:
            The checksum of each slot `(n,)`, zeros if none were asked for; None if cancelled,
            when any of the slots may have been written.

        Raises:
            ValueError: arrays of other shapes; nothing was copied.
        """
        self._check(copy)
        if not copy.slots.flags.writeable:
            raise ValueError("slots to be written are read-only")
        if self._layout.group_bytes[copy.group]:
            return self._copy(copy, True, cancelled, landed)
        sums = _sums_of_nothing(copy)
        if landed is not None:
            landed(slice(0, len(sums)), sums)
        return sums

    def load(self, copy: BlockCopy) -> NDArray[np.uint64]:
        """Copy slots to blocks.

        The padding of the blocks is zeroed: nobody else does so for blocks that are loaded into.

        Returns:
            The checksum of each slot `(n,)` as it was read, zeros if none were asked for. A
            slot that changed while it was read never has the checksum of its old bytes.

        Raises:
            ValueError: as `save`; nothing was copied.
        """
        self._check(copy)
        if not self._layout.group_bytes[copy.group]:
            return _sums_of_nothing(copy)
        sums = self._copy(copy, False, None, None)
        assert sums is not None  # only a cancelled copy has none
        return sums

    def load_pages(
        self, copy: BlockCopy, runs: Sequence[PageRun], length: int
    ) -> NDArray[np.uint64] | None:
        """Copy some pages of a peer's slots, which hold other layers than ours, to blocks.

        The padding of the blocks is zeroed. Pages of no run stay as they are. Checksums are of all
        bytes of a slot, those of other pages too.

        Args:
            copy: as for `load`, with slots of the peer's layout; it has no states.
            runs: the pages, in the order of the peer's slots.
            length: bytes of each slot.

        Returns:
            As `load`; None if this copier does not copy these pages. Then nothing was copied.

        Raises:
            ValueError: slots or blocks that have no such pages; nothing was copied.
        """
        self._check_pages(copy, runs, length)
        return self._copy_pages(copy, tuple(runs), length)

    def begin(
        self, groups: Sequence[int], slots: NDArray[np.uint8], count: int
    ) -> NDArray[np.uint64] | None:
        """States of the checksums of slots that are filled by a copy of each of some groups.

        Args:
            groups: in the order of their bytes in a slot, from the first to the last.
            slots: `(n_slots, slot_bytes)`, which the copies write.
            count: of the slots that they write.

        Returns:
            For `BlockCopy.states` `(count, ...)`; None if this copier hashes whole slots only.
        """
        return None

    @abstractmethod
    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        """Zero blocks of `group`: all bytes that its layers reserve, padding included.

        Args:
            group: the blocks' group.
            block_ids: int64 `(n,)`; all of them exist.
            fence: what `fence` returned; the zeroing waits for it.
        """

    def pin(self, slots: NDArray[np.uint8]) -> int:
        """Let the device copy to and from slots by itself, which is faster.

        May be called on any thread, for some slots after others, and during copies.

        Args:
            slots: `(n_slots, slot_bytes)`; they must stay mapped until `unpin` or `close`. Their
                memory is allocated if it is not there yet.

        Returns:
            0 where the device has taken them, else its error code; see `pinning`.
        """
        return 0  # the host reads all of its memory equally well

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        """Let go of slots that one call of `pin` has taken; no copy of them may be under way. May
        be called on any thread; after `close` it does nothing.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Let go of the KV cache; calling it again does nothing."""

    @abstractmethod
    def _copy(
        self,
        copy: BlockCopy,
        saving: bool,
        cancelled: Callable[[], bool] | None,
        landed: Landed | None,
    ) -> NDArray[np.uint64] | None:
        """What `save` and `load` do, with arrays that fit."""

    def _copy_pages(
        self, copy: BlockCopy, runs: tuple[PageRun, ...], length: int
    ) -> NDArray[np.uint64] | None:
        """What `load_pages` does, with pages that slots and blocks have."""
        return None

    def _check(self, copy: BlockCopy) -> None:
        _check_slots(copy, self._layout.group_bytes[copy.group])

    def _check_pages(self, copy: BlockCopy, runs: Sequence[PageRun], length: int) -> None:
        if length < 0:
            raise ValueError(f"slots of {length} bytes")
        _check_slots(copy, length)
        done = 0
        size = self._layout.group_bytes[copy.group]
        for run in runs:
            if not (done <= run.at <= length - run.nbytes and 0 <= run.first < run.end <= size):
                raise ValueError(f"{run}, in a slot of {length} bytes and a block of {size}")
            done = run.at + run.nbytes


def _check_slots(copy: BlockCopy, size: int) -> None:
    """Raise ValueError unless a copy has slots of `size` bytes or more, one for each block."""
    slots = copy.slots
    if slots.ndim != 2 or slots.shape[1] < size:  # a peer's may be larger than ours
        raise ValueError(f"expected slots (n, {size} bytes or more), found {slots.shape}")
    if slots.dtype != np.uint8 or slots.strides[1] != 1:
        raise ValueError(f"slots are {slots.dtype} with strides {slots.strides}, not bytes")
    if copy.block_ids.shape != copy.slot_ids.shape:
        raise ValueError(f"{len(copy.block_ids)} blocks, but {len(copy.slot_ids)} slots")


def _sums_of_nothing(copy: BlockCopy) -> NDArray[np.uint64]:
    return np.full(len(copy.block_ids), _OF_NOTHING if copy.checksum else 0, np.uint64)


def consecutive(
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
