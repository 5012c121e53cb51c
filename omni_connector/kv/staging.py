# SPDX-License-Identifier: Apache-2.0
"""Copying a KV cache in a device's memory, through bounded staging buffers."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from omni_connector.kv.canonical import SLOT_ALIGNMENT, CanonicalKVCaches, SlotLayout
from omni_connector.kv.copying import BlockCopier, BlockCopy, consecutive
from omni_connector.kv.segments import Segment, content_of, padding_of, reserved_of

logger = logging.getLogger("vllm.omni_connector.staging")

# A closer waits so many seconds for a copy under way.
_CLOSE_S: Final = 5.0

_STAGING_BYTES = 32 * 1024 * 1024
"""Enough to keep a PCIe link busy; two of them, so that a device and its host work at once."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Stream(ABC):
    """An order of work on a device, beside the engine's own."""

    @abstractmethod
    def active(self) -> AbstractContextManager[object]:
        """While entered, work is put on this stream."""

    @abstractmethod
    def fence(self) -> object:
        """Mark the engine's work so far."""

    @abstractmethod
    def wait(self, fence: object) -> None:
        """Put no later work of this stream before what `fence` marked."""

    @abstractmethod
    def mark(self) -> object:
        """Mark this stream's work so far."""

    @abstractmethod
    def finish(self, mark: object | None) -> None:
        """Block until what `mark` marked is done, or all of this stream's work if None."""

    @abstractmethod
    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """An int8 tensor in host memory that this stream copies to and from fastest."""

    @abstractmethod
    def pin(self, slots: NDArray[np.uint8]) -> bool:
        """Let this stream copy to and from `slots` itself; returns whether it can."""

    @abstractmethod
    def close(self) -> None:
        """Undo every `pin`; calling it again does nothing."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment of all blocks `(num_blocks, *counts, words)`, and its words of a staged row."""

    blocks: torch.Tensor
    first: int
    end: int

    def of(self, staged: torch.Tensor) -> torch.Tensor:
        """This part of staged rows `(n, words)`, in the blocks' shape."""
        return staged[:, self.first : self.end].view(len(staged), *self.blocks.shape[1:])


@dataclass(frozen=True, slots=True)
class GroupOnDevice:
    """The blocks of one group, as a device gathers and scatters them.

    Args:
        parts: the segments of a block, in slot order.
        word: the widest integer that divides every size and address of them.
        row_bytes: bytes of one block.
        padding: what the group reserves beside its content, `(num_blocks, ...)` each.
        reserved: content and padding, `(num_blocks, ...)` each.
    """

    parts: tuple[_Part, ...]
    word: torch.dtype
    row_bytes: int
    padding: tuple[torch.Tensor, ...]
    reserved: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, canonical: CanonicalKVCaches, group: int) -> "GroupOnDevice":
        """The blocks of group `group`."""
        pages = canonical.pages[group]
        segments = content_of(pages)
        width, views = _words(canonical, segments)
        parts = []
        for segment, blocks in zip(segments, views, strict=True):
            first = segment.slot_offset // width
            parts.append(_Part(blocks, first, first + segment.nbytes // width))
        return cls(
            tuple(parts),
            _WORDS[width],
            sum(page.nbytes for page in pages),
            _words(canonical, padding_of(pages))[1],
            _words(canonical, reserved_of(pages))[1],
        )

    def gather(self, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy blocks to the rows of `staged`, int8 `(n, row_bytes)`, contiguous."""
        rows = staged.view(self.word)
        for part in self.parts:
            torch.index_select(part.blocks, 0, block_ids, out=part.of(rows))

    def scatter(self, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy the rows of `staged`, int8 `(n, row_bytes)`, contiguous, to blocks."""
        rows = staged.view(self.word)
        for part in self.parts:
            part.blocks.index_copy_(0, block_ids, part.of(rows))
        for padding in self.padding:
            padding.index_fill_(0, block_ids, 0)

    def zero(self, block_ids: torch.Tensor) -> None:
        """Zero blocks, padding included."""
        for reserved in self.reserved:
            reserved.index_fill_(0, block_ids, 0)


def _words(
    canonical: CanonicalKVCaches, segments: Sequence[Segment]
) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Bytes of the widest word that divides all of these segments, and views of them, in all
    blocks, as such words."""
    # Devices gather element by element: bytes one at a time would be the slowest choice.
    width = 8 if segments else 1
    for segment in segments:
        distances = (distance for _, distance in segment.dims)
        width = gcd(
            width,
            segment.storage + segment.start,
            segment.start,
            segment.row_bytes,
            segment.block_stride,
            *distances,
        )
    return width, tuple(canonical.view(segment, _WORDS[width]) for segment in segments)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks that fit a staging buffer: which buffer, and their places in the call."""

    buffer: int
    first: int
    block_ids: NDArray[np.int64]
    slot_ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Call:
    """One save or load: what its batches have in common."""

    copy: BlockCopy
    on_device: GroupOnDevice
    direct: torch.Tensor | None
    sums: NDArray[np.uint64]


class StagedCopier(BlockCopier):
    """Copies a KV cache in a device's memory, one contiguous transfer for many blocks.

    Blocks are gathered into a staging buffer on the device and cross to the host in one
    piece, straight into slots that were pinned, else into a pinned buffer; loads are the same
    backwards. The host copies and hashes one batch while the device works on the next.

    Args:
        canonical: the KV cache.
        layout: its slots.
        stream: where the device's work goes; owned, and closed with the copier.
        staging_bytes: bytes of each of the two staging buffers; at least one slot is staged.
    """

    def __init__(
        self,
        canonical: CanonicalKVCaches,
        layout: SlotLayout,
        stream: Stream,
        *,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        super().__init__(layout)
        self._stream = stream
        self._device = canonical.device
        self._groups = [
            GroupOnDevice.of(canonical, group) for group in range(len(layout.group_bytes))
        ]
        self._rows = max(1, staging_bytes // layout.slot_bytes)
        self._staged: list[torch.Tensor] = []
        self._bounced: list[torch.Tensor] = []
        self._pinned: list[tuple[int, int]] = []
        # The staging buffers serve one call at a time.
        self._lock = threading.Lock()

    def fence(self) -> object:
        return self._stream.fence()

    def pin(self, slots: NDArray[np.uint8]) -> None:
        if self._stream.pin(slots):
            address = slots.ctypes.data
            self._pinned.append((address, address + slots.nbytes))

    def _copy(
        self, copy: BlockCopy, saving: bool, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.uint64] | None:
        call = self._call(copy)
        start, end = (self._out, self._land) if saving else (self._in, self._landed)
        return call.sums if self._pump(call, cancelled, start, end) else None

    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        with self._lock, self._stream.active():
            if fence is not None:
                self._stream.wait(fence)
            try:
                self._groups[group].zero(self._to_device(block_ids))
            finally:
                self._stream.finish(None)

    def close(self) -> None:
        if not self._lock.acquire(timeout=_CLOSE_S):
            logger.error("A copy does not end: the device may hang. Its memory is left to it")
            return
        try:
            self._stream.finish(None)
            self._stream.close()
            self._groups = []
            self._staged = []
            self._bounced = []
            self._pinned = []
        finally:
            self._lock.release()

    def _call(self, copy: BlockCopy) -> _Call:
        slots = copy.slots
        address = slots.ctypes.data
        last = address + (len(slots) - 1) * slots.strides[0] + slots.shape[1]
        direct = None
        if (
            slots.flags.writeable
            and slots.strides[0] >= slots.shape[1]
            and any(first <= address and last <= end for first, end in self._pinned)
        ):
            direct = torch.from_numpy(slots.view(np.int8))
        sums = np.zeros(len(copy.block_ids), np.uint64)
        return _Call(copy, self._groups[copy.group], direct, sums)

    def _pump(
        self,
        call: _Call,
        cancelled: Callable[[], bool] | None,
        start: Callable[[_Call, _Batch], None],
        end: Callable[[_Call, _Batch], None],
    ) -> bool:
        """Run all batches; each ends while the next is under way. Returns False if cancelled."""
        block_ids, slot_ids = call.copy.block_ids, call.copy.slot_ids
        pages = max(1, -(-call.on_device.row_bytes // SLOT_ALIGNMENT))
        rows = self._rows * self._layout.slot_bytes // (pages * SLOT_ALIGNMENT)
        with self._lock, self._stream.active():
            if call.copy.fence is not None:
                self._stream.wait(call.copy.fence)
            under_way: tuple[object, _Batch] | None = None
            try:
                for number, first in enumerate(range(0, len(block_ids), rows)):
                    if cancelled is not None and cancelled():
                        return False
                    last = first + rows
                    batch = _Batch(number % 2, first, block_ids[first:last], slot_ids[first:last])
                    start(call, batch)
                    before, under_way = under_way, (self._stream.mark(), batch)
                    if before is not None:
                        self._stream.finish(before[0])
                        end(call, before[1])
                if under_way is not None:
                    self._stream.finish(under_way[0])
                    end(call, under_way[1])
            finally:
                # Nothing may still use the staging buffers, or write blocks, after an error.
                self._stream.finish(None)
        return True

    def _out(self, call: _Call, batch: _Batch) -> None:
        staged = self._buffer(self._staged, call, batch)
        call.on_device.gather(self._to_device(batch.block_ids), staged)
        if call.direct is None:
            self._buffer(self._bounced, call, batch).copy_(staged, non_blocking=True)
        else:
            for rows, slots in self._pieces(call, batch, call.direct):
                slots.copy_(staged[rows], non_blocking=True)

    def _land(self, call: _Call, batch: _Batch) -> None:
        size = call.on_device.row_bytes
        if call.direct is None:
            bounced = self._buffer(self._bounced, call, batch).numpy().view(np.uint8)
            for row, slot in enumerate(batch.slot_ids.tolist()):
                call.copy.slots[slot, :size] = bounced[row]
        self._hash(call, batch, call.copy.slots, batch.slot_ids.tolist())

    def _in(self, call: _Call, batch: _Batch) -> None:
        staged = self._buffer(self._staged, call, batch)
        if call.direct is None:
            bounce = self._buffer(self._bounced, call, batch)
            bounced = bounce.numpy().view(np.uint8)
            for row, slot in enumerate(batch.slot_ids.tolist()):
                bounced[row] = call.copy.slots[slot, : call.on_device.row_bytes]
            # The very bytes that the device gets: the slot may have changed since.
            self._hash(call, batch, bounced, range(len(batch.slot_ids)))
            staged.copy_(bounce, non_blocking=True)
        else:
            for rows, slots in self._pieces(call, batch, call.direct):
                staged[rows].copy_(slots, non_blocking=True)
        call.on_device.scatter(self._to_device(batch.block_ids), staged)

    def _landed(self, call: _Call, batch: _Batch) -> None:
        if call.direct is not None:
            self._hash(call, batch, call.copy.slots, batch.slot_ids.tolist())

    def _hash(
        self, call: _Call, batch: _Batch, rows: NDArray[np.uint8], indices: Sequence[int]
    ) -> None:
        if call.copy.checksum:
            for i, row in enumerate(indices):
                stored = rows[row, : call.on_device.row_bytes]
                call.sums[batch.first + i] = xxhash.xxh3_64_intdigest(stored.data)

    def _pieces(
        self, call: _Call, batch: _Batch, direct: torch.Tensor
    ) -> list[tuple[slice, torch.Tensor]]:
        """The batch's rows beside the slots for them, both contiguous."""
        size = call.on_device.row_bytes
        limit = len(batch.slot_ids) if size == direct.stride(0) else 1
        pieces = []
        for row, slot, count in consecutive(np.arange(len(batch.slot_ids)), batch.slot_ids, limit):
            pieces.append((slice(row, row + count), direct[slot : slot + count, :size]))
        return pieces

    def _buffer(self, pair: list[torch.Tensor], call: _Call, batch: _Batch) -> torch.Tensor:
        """Int8 `(n, row_bytes)`: the batch's part of a staging buffer."""
        nbytes = self._rows * self._layout.slot_bytes
        if not pair:
            for _ in range(2):
                if pair is self._staged:
                    pair.append(torch.empty(nbytes, dtype=torch.int8, device=self._device))
                else:
                    pair.append(self._stream.host_buffer(nbytes))
        size = call.on_device.row_bytes
        count = len(batch.block_ids)
        return pair[batch.buffer][: count * size].view(count, size)

    def _to_device(self, ids: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self._device)
