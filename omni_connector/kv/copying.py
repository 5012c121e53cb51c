# SPDX-License-Identifier: Apache-2.0
"""Copying blocks of a KV cache into slots and back: on the host, and the choice of copier."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import LayoutError
from omni_connector.kv.canonical import CanonicalKVCaches
from omni_connector.kv.native import ALIGNMENT, native_copy
from omni_connector.kv.segments import Segment, padding_of, reserved_of, segments_of, split
from omni_connector.kv.slots import SlotLayout

_HASHED_BYTES = 512 * 1024
"""Bytes copied before they are hashed: few enough to be still in the core's own cache."""

_COPIED_BYTES = 4 * 1024 * 1024
"""Bytes copied between two looks at whether the copy is still wanted."""


_SHARED_BYTES = 1024 * 1024
"""Bytes of a copy from which a helper takes a part: it wakes in the time of as many."""

_Item = TypeVar("_Item")


class Sharing(Protocol):
    """Threads that share work; see `omni_connector.memory.buffers.Helpers`."""

    threads: int

    def share(self, work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
        """Call `work` with each item; returns once no thread works on any of them."""


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
        ids = self._checked(group, block_ids, slots, slot_ids, saving=True)
        return self._copy(group, *ids, slots, checksum, fence, cancelled, True)

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
        ids = self._checked(group, block_ids, slots, slot_ids, saving=False)
        sums = self._copy(group, *ids, slots, checksum, fence, None, False)
        assert sums is not None  # only a cancelled copy has none
        return sums

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
        self._zero(group, self._checked_blocks(group, block_ids, unique=False), fence)

    @abstractmethod
    def pin(self, slots: NDArray[np.uint8]) -> None:
        """Prepare slots for faster copies, where the device knows any; optional.

        Args:
            slots: `(n_slots, slot_bytes)`, writable; they must stay mapped until `close`.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the KV cache; calling it again does nothing."""

    @abstractmethod
    def _copy(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slot_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        checksum: bool,
        fence: object,
        cancelled: Callable[[], bool] | None,
        saving: bool,
    ) -> NDArray[np.uint64] | None:
        """What `save` and `load` do, with ids that exist."""

    @abstractmethod
    def _zero(self, group: int, block_ids: NDArray[np.int64], fence: object) -> None:
        """What `zero` does, with ids that exist."""

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


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of all blocks `(num_blocks, *counts, row_bytes)`, and its bytes of a slot."""

    blocks: NDArray[np.uint8]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one group's content, as addresses; each `(rows,)`.

    Attributes:
        starts, strides: address of each in block 0, and bytes from one block to the next.
        offsets, lengths: its first byte in a slot, and its bytes.
    """

    starts: NDArray[np.int64]
    strides: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "_Rows":
        rows: list[tuple[int, int, int, int]] = []
        for segment in segments:
            start, offset = segment.storage + segment.start, segment.slot_offset
            for i, index in enumerate(np.ndindex(segment.counts)):
                at = sum(n * step for n, (_, step) in zip(index, segment.dims, strict=True))
                length = segment.row_bytes
                rows.append((start + at, segment.block_stride, offset + i * length, length))
        return cls(*np.array(rows, np.int64).reshape(-1, 4).T.copy())

    def blocks(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their addresses in blocks `(blocks, rows)`."""
        return self.starts + block_ids[:, None] * self.strides

    def slots(self, slots: NDArray[np.uint8], slot_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their addresses in slots `(slots, rows)`."""
        return self.offsets + (slots.ctypes.data + slot_ids[:, None] * slots.strides[0])


class CpuCopier(BlockCopier):
    """Copies a KV cache in the host's memory, without holding the GIL.

    Args:
        canonical, layout: the cache, and the slots.
        helpers: share in each copy; None leaves all of it to the calling thread.
    """

    def __init__(
        self, canonical: CanonicalKVCaches, layout: SlotLayout, helpers: Sharing | None = None
    ) -> None:
        super().__init__(canonical, layout)
        self._helpers = helpers
        buffers = {}
        for tensor in canonical.tensors:
            storage = tensor.tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            buffers[storage.data_ptr()] = whole.numpy()
        groups = range(len(layout.group_bytes))
        segments = [segments_of(canonical, layout, group) for group in groups]
        self._rows = [_Rows.of(group) for group in segments]
        self._padding = [
            [self._part(segment, buffers).blocks for segment in padding_of(canonical, group)]
            for group in groups
        ]
        self._reserved = [
            [self._part(segment, buffers).blocks for segment in reserved_of(canonical, group)]
            for group in groups
        ]
        self._whole = [[self._part(segment, buffers) for segment in group] for group in segments]
        self._hashed = [
            [
                self._part(part, buffers)
                for segment in group
                for part in split(segment, _HASHED_BYTES)
            ]
            for group in segments
        ]

    def _part(self, segment: Segment, buffers: dict[int, NDArray[np.uint8]]) -> _Part:
        blocks: NDArray[np.uint8] = np.ndarray(
            (self._num_blocks, *segment.counts, segment.row_bytes),
            np.uint8,
            buffers[segment.storage],
            segment.start,
            (segment.block_stride, *(distance for _, distance in segment.dims), 1),
        )
        return _Part(blocks, segment.slot_offset, segment.slot_offset + segment.nbytes)

    def fence(self) -> None:
        return None

    def pin(self, slots: NDArray[np.uint8]) -> None:
        """Do nothing: the host reads all of its memory equally well."""

    def _zero(self, group: int, block_ids: NDArray[np.int64], fence: object) -> None:
        for block, _, count in consecutive(block_ids, block_ids, len(block_ids)):
            for reserved in self._reserved[group]:
                reserved[block : block + count] = 0

    def close(self) -> None:
        self._rows = []
        self._whole = []
        self._hashed = []
        self._padding = []
        self._reserved = []

    def _copy(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slot_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        checksum: bool,
        fence: object,
        cancelled: Callable[[], bool] | None,
        saving: bool,
    ) -> NDArray[np.uint64] | None:
        count = len(block_ids)
        sums = np.zeros(count, np.uint64)
        given_up: list[slice] = []

        def copy(part: slice) -> None:
            ids = block_ids[part], slot_ids[part]
            found = self._copy_part(group, *ids, slots, checksum, cancelled, saving)
            if found is None:
                given_up.append(part)
            else:
                sums[part] = found

        parts = 1
        if self._helpers is not None:
            size = self._layout.group_bytes[group]
            parts = max(1, min(self._helpers.threads, count, count * size // _SHARED_BYTES))
        ends = [count * part // parts for part in range(parts + 1)]
        slices = [slice(first, end) for first, end in itertools.pairwise(ends)]
        if self._helpers is None or parts == 1:
            copy(slices[0])
        else:
            self._helpers.share(copy, slices)
        return None if given_up else sums

    def _copy_part(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slot_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        checksum: bool,
        cancelled: Callable[[], bool] | None,
        saving: bool,
    ) -> NDArray[np.uint64] | None:
        rows, native = self._rows[group], native_copy()
        targets, sources = rows.blocks(block_ids), rows.slots(slots, slot_ids)
        if saving:
            targets, sources = sources, targets
        if native is None or not targets.size or (targets % ALIGNMENT).any():
            return self._copy_rows(group, block_ids, slot_ids, slots, checksum, cancelled, saving)
        sums = np.zeros(len(block_ids), np.uint64)
        step = len(block_ids)
        if cancelled is not None:
            step = max(1, _COPIED_BYTES // self._layout.group_bytes[group])
        for at in range(0, len(block_ids), step):
            if cancelled is not None and cancelled():
                return None
            some = slice(at, at + step)
            sums[some] = native(targets[some], sources[some], rows.lengths, checksum)
        if not saving and self._padding[group]:
            for block, _, count in consecutive(block_ids, slot_ids, len(block_ids)):
                for padding in self._padding[group]:
                    padding[block : block + count] = 0
        return sums

    def _copy_rows(
        self,
        group: int,
        block_ids: NDArray[np.int64],
        slot_ids: NDArray[np.int64],
        slots: NDArray[np.uint8],
        checksum: bool,
        cancelled: Callable[[], bool] | None,
        saving: bool,
    ) -> NDArray[np.uint64] | None:
        """The same by numpy, row by row."""
        size = self._layout.group_bytes[group]
        limit = max(1, (_HASHED_BYTES if checksum else _COPIED_BYTES) // max(1, size))
        pairs = [
            (part.blocks, _rows(slots, part), slots[:, part.first : part.end])
            for part in (self._hashed if checksum else self._whole)[group]
        ]
        stored = slots[:, :size]
        sums = np.zeros(len(block_ids), np.uint64)
        at = 0
        for block, slot, count in consecutive(block_ids, slot_ids, limit):
            if cancelled is not None and cancelled():
                return None
            # A slot is hashed after it was copied, never before: a slot that is rewritten
            # during a load then fails its checksum instead of passing with other bytes.
            digest = xxhash.xxh3_64() if checksum and len(pairs) > 1 and count == 1 else None
            for blocks, rows, flat in pairs:
                if saving:
                    rows[slot : slot + count] = blocks[block : block + count]
                else:
                    blocks[block : block + count] = rows[slot : slot + count]
                if digest is not None:
                    digest.update(flat[slot].data)
            if digest is not None:
                sums[at] = digest.intdigest()
            elif checksum:
                for i in range(count):
                    sums[at + i] = xxhash.xxh3_64_intdigest(stored[slot + i].data)
            if not saving:
                for padding in self._padding[group]:
                    padding[block : block + count] = 0
            at += count
        return sums


def _rows(slots: NDArray[np.uint8], part: _Part) -> NDArray[np.uint8]:
    """View a part of all slots in the shape of its blocks; splitting an axis never copies."""
    return slots[:, part.first : part.end].reshape(slots.shape[0], *part.blocks.shape[1:])


def make_copier(
    canonical: CanonicalKVCaches, layout: SlotLayout, helpers: Sharing | None = None
) -> BlockCopier:
    """The copier for the device that the KV cache lies on; `helpers` share in copies on a CPU.

    Raises:
        LayoutError: a device that is neither a CPU nor a CUDA device.
    """
    device = canonical.tensors[0].tensor.device
    if device.type == "cpu":
        return CpuCopier(canonical, layout, helpers)
    if device.type == "cuda":
        # Imported here, because they import this module.
        from omni_connector.kv.cuda import CudaStream
        from omni_connector.kv.staging import StagedCopier

        return StagedCopier(canonical, layout, CudaStream(device))
    raise LayoutError(f"a KV cache on {device} cannot be copied: expected cpu or cuda")
