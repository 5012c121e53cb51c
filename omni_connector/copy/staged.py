# SPDX-License-Identifier: Apache-2.0
"""Copying a KV cache in a device's memory, through bounded staging buffers."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier, BlockCopy, consecutive
from omni_connector.copy.stream import Stream
from omni_connector.kv.canonical import SLOT_ALIGNMENT, CanonicalKVCaches, SlotLayout
from omni_connector.kv.segments import Segment, content_of, padding_of, reserved_of

logger = logging.getLogger("vllm.omni_connector.staging")

# Longest wait of `close` for a copy under way, in seconds.
_CLOSE_S: Final = 5.0

_STAGING_BYTES = 32 * 1024 * 1024
"""Enough to keep a PCIe link busy; two of them, so that a device and its host work at once."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


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

    def gather(self, stream: Stream, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy blocks to the rows of `staged`, int8 `(n, row_bytes)`, contiguous."""
        if not self.parts:  # rows of no bytes are no whole words
            return
        rows = staged.view(self.word)
        for part in self.parts:
            stream.launch(partial(torch.index_select, part.blocks, 0, block_ids, out=part.of(rows)))

    def scatter(self, stream: Stream, block_ids: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy the rows of `staged`, int8 `(n, row_bytes)`, contiguous, to blocks."""
        rows = staged.view(self.word) if self.parts else staged
        for part in self.parts:
            stream.launch(partial(part.blocks.index_copy_, 0, block_ids, part.of(rows)))
        for padding in self.padding:
            stream.launch(partial(padding.index_fill_, 0, block_ids, 0))

    def zero(self, stream: Stream, block_ids: torch.Tensor) -> None:
        """Zero blocks, padding included."""
        for reserved in self.reserved:
            stream.launch(partial(reserved.index_fill_, 0, block_ids, 0))


def _words(
    canonical: CanonicalKVCaches, segments: Sequence[Segment]
) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Bytes of the widest word that divides all of these segments, and views of them, in all
    blocks, as such words."""
    # Devices gather element by element: bytes one at a time would be the slowest choice.
    width = 8
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


@dataclass(frozen=True, slots=True, eq=False)
class _Pinned:
    """Host memory that the device copies to and from itself.

    Attributes:
        starts, ends: addresses of the pieces that were pinned, in order `(pieces,)`. No copy may
            cross from one piece to the next.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def none(cls) -> "_Pinned":
        """No memory at all."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    def beside(self, start: int, end: int) -> "_Pinned":
        """The same, and one piece more."""
        at = int(np.searchsorted(self.starts, start))
        return _Pinned(np.insert(self.starts, at, start), np.insert(self.ends, at, end))

    def pieces_of(self, rows: NDArray[np.int64], nbytes: int) -> NDArray[np.int64] | None:
        """The piece that each row lies in; None unless each lies in one.

        Args:
            rows: addresses `(n,)`.
            nbytes: of each row.
        """
        pieces = np.searchsorted(self.starts, rows, side="right") - 1
        if not len(self.starts) or (pieces < 0).any() or (rows + nbytes > self.ends[pieces]).any():
            return None
        return pieces


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Blocks that fit a staging buffer.

    Attributes:
        buffer: which of the two buffers.
        first: the place of the first of them in the call.
        block_ids: on the device `(n,)`.
        slot_ids: their slots `(n,)`.
        pieces: the pinned piece that each slot lies in `(n,)`; None where the bytes cross through a
            buffer of the host, as one of the slots lies in none.
    """

    buffer: int
    first: int
    block_ids: torch.Tensor
    slot_ids: NDArray[np.int64]
    pieces: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class _Call:
    """One save or load: what its batches have in common.

    Attributes:
        slots: the slots of the copy, as a tensor; None where the device may not use them itself.
        sums: the checksums `(n,)`.
    """

    copy: BlockCopy
    on_device: GroupOnDevice
    slots: torch.Tensor | None
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
        self._groups = [
            GroupOnDevice.of(canonical, group) for group in range(len(layout.group_bytes))
        ]
        self._rows = max(1, staging_bytes // layout.slot_bytes)
        self._staged: list[torch.Tensor] = []
        self._bounced: list[torch.Tensor] = []
        self._pinned = _Pinned.none()
        self._refused = False
        # The staging buffers serve one call at a time.
        self._lock = threading.Lock()

    def fence(self) -> object:
        return self._stream.fence()

    def pin(self, slots: NDArray[np.uint8]) -> bool:
        if self._refused or not self._stream.pin(slots):
            self._refused = True
            return False
        address = slots.ctypes.data
        # One assignment: copies on other threads look at it without a lock.
        self._pinned = self._pinned.beside(address, address + slots.nbytes)
        return True

    def _copy(
        self, copy: BlockCopy, saving: bool, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.uint64] | None:
        call = self._call(copy)
        start, end = (self._out, self._land) if saving else (self._in, self._landed)
        return call.sums if self._pump(call, cancelled, start, end) else None

    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        with self._lock, self._stream.active():
            on_device = self._stream.to_device(block_ids)
            if fence is not None:
                self._stream.wait(fence)
            try:
                self._groups[group].zero(self._stream, on_device)
            finally:
                self._stream.finish(None)

    def close(self) -> None:
        if not self._lock.acquire(timeout=_CLOSE_S):
            logger.error(
                "A copy of the device did not end in %g s; the device may hang. The memory that it "
                "uses is not freed",
                _CLOSE_S,
            )
            return
        try:
            try:
                self._stream.finish(None)
            except RuntimeError as error:
                logger.warning("The device failed before its last copies had ended: %s", error)
            self._stream.close()
        finally:
            self._groups = []
            self._staged = []
            self._bounced = []
            self._pinned = _Pinned.none()
            self._lock.release()

    def _call(self, copy: BlockCopy) -> _Call:
        slots = None
        # A tensor cannot be read-only, and the slots of peers are.
        if copy.slots.flags.writeable and copy.slots.strides[0] >= copy.slots.shape[1]:
            slots = torch.from_numpy(copy.slots.view(np.int8))
        sums = np.zeros(len(copy.block_ids), np.uint64)
        return _Call(copy, self._groups[copy.group], slots, sums)

    def _batches(self, call: _Call, block_ids: torch.Tensor) -> Iterator[_Batch]:
        copy, size = call.copy, call.on_device.row_bytes
        aligned = max(1, -(-size // SLOT_ALIGNMENT)) * SLOT_ALIGNMENT
        rows = self._rows * self._layout.slot_bytes // aligned
        for number, first in enumerate(range(0, len(block_ids), rows)):
            slot_ids = copy.slot_ids[first : first + rows]
            pieces = None
            if call.slots is not None:
                addresses = copy.slots.ctypes.data + slot_ids * copy.slots.strides[0]
                pieces = self._pinned.pieces_of(addresses, size)
            yield _Batch(number % 2, first, block_ids[first : first + rows], slot_ids, pieces)

    def _pump(
        self,
        call: _Call,
        cancelled: Callable[[], bool] | None,
        start: Callable[[_Call, _Batch], None],
        end: Callable[[_Call, _Batch], None],
    ) -> bool:
        """Run all batches; each ends while the next is under way. Returns False if cancelled."""
        with self._lock, self._stream.active():
            # All of them at once, and before the fence, as the host waits until they are there.
            block_ids = self._stream.to_device(call.copy.block_ids)
            if call.copy.fence is not None:
                self._stream.wait(call.copy.fence)
            under_way: tuple[object, _Batch] | None = None
            try:
                for batch in self._batches(call, block_ids):
                    if cancelled is not None and cancelled():
                        return False
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
        call.on_device.gather(self._stream, batch.block_ids, staged)
        if batch.pieces is None:
            self._cross(self._buffer(self._bounced, call, batch), staged, lands=True)
        else:
            for rows, slots in self._pieces(call, batch):
                self._cross(slots, staged[rows], lands=True)

    def _land(self, call: _Call, batch: _Batch) -> None:
        size = call.on_device.row_bytes
        if batch.pieces is None:
            bounced = self._buffer(self._bounced, call, batch).numpy().view(np.uint8)
            for row, slot in enumerate(batch.slot_ids.tolist()):
                call.copy.slots[slot, :size] = bounced[row]
        self._hash(call, batch, call.copy.slots, batch.slot_ids.tolist())

    def _in(self, call: _Call, batch: _Batch) -> None:
        staged = self._buffer(self._staged, call, batch)
        if batch.pieces is None:
            bounce = self._buffer(self._bounced, call, batch)
            bounced = bounce.numpy().view(np.uint8)
            for row, slot in enumerate(batch.slot_ids.tolist()):
                bounced[row] = call.copy.slots[slot, : call.on_device.row_bytes]
            # The very bytes that the device gets: the slot may have changed since.
            self._hash(call, batch, bounced, range(len(batch.slot_ids)))
            self._cross(staged, bounce)
        else:
            for rows, slots in self._pieces(call, batch):
                self._cross(staged[rows], slots)
        call.on_device.scatter(self._stream, batch.block_ids, staged)

    def _landed(self, call: _Call, batch: _Batch) -> None:
        if batch.pieces is not None:
            self._hash(call, batch, call.copy.slots, batch.slot_ids.tolist())

    def _cross(self, target: torch.Tensor, source: torch.Tensor, *, lands: bool = False) -> None:
        """Copy between the host and the device; `lands` says that the host's memory is written."""
        copy = partial(target.copy_, source, non_blocking=True)
        self._stream.launch(copy, host=target if lands else source, lands=lands)

    def _hash(
        self, call: _Call, batch: _Batch, rows: NDArray[np.uint8], indices: Sequence[int]
    ) -> None:
        if call.copy.checksum:
            for i, row in enumerate(indices):
                stored = rows[row, : call.on_device.row_bytes]
                call.sums[batch.first + i] = xxhash.xxh3_64_intdigest(stored.data)

    def _pieces(self, call: _Call, batch: _Batch) -> Iterator[tuple[slice, torch.Tensor]]:
        """The batch's rows beside the slots for them, both contiguous, each in one pinned piece."""
        slots = call.slots
        assert slots is not None
        assert batch.pieces is not None
        size = call.on_device.row_bytes
        limit = len(batch.slot_ids) if size == slots.stride(0) else 1
        rows = np.arange(len(batch.slot_ids))
        changes = np.flatnonzero(np.diff(batch.pieces)) + 1
        for some in np.split(rows, changes):
            for row, slot, count in consecutive(some, batch.slot_ids[some], limit):
                yield slice(row, row + count), slots[slot : slot + count, :size]

    def _buffer(self, pair: list[torch.Tensor], call: _Call, batch: _Batch) -> torch.Tensor:
        """Int8 `(n, row_bytes)`: the batch's part of a staging buffer."""
        nbytes = self._rows * self._layout.slot_bytes
        if not pair:
            on_device = pair is self._staged
            make = self._stream.device_buffer if on_device else self._stream.host_buffer
            # Both or neither: where memory lacks for the second, the next copy asks for both again.
            pair += [make(nbytes), make(nbytes)]
        size = call.on_device.row_bytes
        count = len(batch.slot_ids)
        return pair[batch.buffer][: count * size].view(count, size)
