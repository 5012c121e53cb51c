# SPDX-License-Identifier: Apache-2.0
"""Copying a KV cache in a device's memory, through bounded staging buffers."""

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.copy.host_rows import HostRows, Sharing, begin_hashing
from omni_connector.copy.stream import Stream
from omni_connector.kv.canonical import SLOT_ALIGNMENT, CanonicalKVCaches, SlotLayout
from omni_connector.kv.segments import Segment, content_of, padding_of, reserved_of

logger = logging.getLogger("vllm.omni_connector.staging")

# Longest wait of `close` for a copy under way, in seconds.
_CLOSE_S: Final = 5.0

_STAGING_BYTES: Final = 32 << 20
"""Of each of two staging buffers. A GPU of 2023 copies these in 0.6 ms, beside which launches and
checksums take a quarter (benchmarks/results/device.md)."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


_NO_SLOTS: Final = np.empty((0, 0), np.uint8)
_NOTHING: Final = torch.empty(0, dtype=torch.int64)


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

    def without(self, start: int) -> "_Pinned":
        """The same, without the piece that begins at an address."""
        others = self.starts != start
        return _Pinned(self.starts[others], self.ends[others])

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


class _Run(NamedTuple):
    """Rows of a batch beside slots that lie together, all in one pinned piece."""

    rows: slice
    slots: slice


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Blocks that fit a staging buffer.

    Attributes:
        buffer: which of the two buffers.
        places: of these blocks among those of the call.
        slot_ids: their slots `(n,)`.
        runs: what the device transfers from and to slots itself; None where it does not.
        by_kernel: whether a kernel of the device reads or writes the slots instead. If it does not
            either, the bytes cross through a buffer of the host.
    """

    buffer: int
    places: slice
    slot_ids: NDArray[np.int64]
    runs: list[_Run] | None
    by_kernel: bool

    @property
    def bounces(self) -> bool:
        """Whether the bytes cross through a buffer of the host."""
        return self.runs is None and not self.by_kernel


@dataclass(frozen=True, slots=True)
class _Call:
    """One save or load: what its batches have in common.

    Attributes:
        slots: the slots of the copy, as a tensor; None where the device may not use them itself.
        sums: the checksums `(n,)`.
        device_hashes: whether the device makes them.
        block_ids: on the device `(n,)`.
        rows: the addresses of the slots, on the device `(n,)`; None where no kernel asks for them.
    """

    copy: BlockCopy
    on_device: GroupOnDevice
    slots: torch.Tensor | None
    sums: NDArray[np.uint64]
    device_hashes: bool
    block_ids: torch.Tensor = _NOTHING
    rows: torch.Tensor | None = None

    @property
    def host_hashes(self) -> bool:
        """Whether the host makes the checksums."""
        return self.copy.checksum and not self.device_hashes

    @property
    def stored(self) -> NDArray[np.uint8]:
        """The bytes of all slots that hold blocks."""
        return self.copy.slots[:, : self.on_device.row_bytes]

    def addresses(self, slot_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of some slots `(n,)`."""
        assert self.slots is not None
        return self.slots.data_ptr() + slot_ids * self.slots.stride(0)

    def rows_of(self, batch: _Batch) -> torch.Tensor:
        """The addresses of a batch's slots, on the device."""
        assert self.rows is not None
        return self.rows[batch.places]

    def slots_of(self, run: _Run) -> torch.Tensor:
        """The slots of a run, as the device copies them."""
        assert self.slots is not None
        return self.slots[run.slots, : self.on_device.row_bytes]

    def states(self, batch: _Batch) -> NDArray[np.uint64] | None:
        """States of the batch's checksums."""
        states = self.copy.states
        return None if states is None else states[batch.places]


def _as_tensor(slots: NDArray[np.uint8]) -> torch.Tensor:
    """Slots as a tensor, int8, which must not be used after them.

    Torch knows no read-only tensors, and warns where it makes one of a read-only array, as the
    slots of peers are. So this hides that from it.
    """
    count, nbytes = slots.shape
    distance = slots.strides[0]
    memory = (ctypes.c_int8 * ((count - 1) * distance + nbytes)).from_address(slots.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.int8).as_strided((count, nbytes), (distance, 1))


class StagedCopier(BlockCopier):
    """Copies a KV cache in a device's memory, one contiguous transfer for many blocks.

    Blocks are gathered into a staging buffer on the device and cross to the host, straight into
    slots that were pinned, else in one piece into a pinned buffer; loads are the same backwards.
    The device makes the checksums from the staging buffer, if it can. What the host does for one
    batch it does while the device works on the next.

    Args:
        canonical: the KV cache.
        layout: its slots.
        stream: where the device's work goes; owned, and closed with the copier.
        helpers: share in what the host does; None leaves all of it to the calling thread.
        staging_bytes: bytes of each of the two staging buffers; at least one slot is staged.

    Attributes:
        direct_bytes: the device transfers from and to pinned slots where as many bytes lie
            together, on average. Else it takes the host longer to ask for each transfer than a
            kernel to move all of them.
    """

    speed = 16
    direct_bytes = 4 << 20

    def __init__(
        self,
        canonical: CanonicalKVCaches,
        layout: SlotLayout,
        stream: Stream,
        helpers: Sharing | None = None,
        *,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        super().__init__(layout)
        self._stream = stream
        self._host_rows = HostRows(helpers)
        self._groups = [
            GroupOnDevice.of(canonical, group) for group in range(len(layout.group_bytes))
        ]
        self._rows = max(1, staging_bytes // layout.slot_bytes)
        self._staged: list[torch.Tensor] = []
        self._bounced: list[torch.Tensor] = []
        # Replaced under the lock. Copies on other threads look at it without.
        self._pinned = _Pinned.none()
        self._pinning = threading.Lock()
        self._refused: set[bool] = set()  # slots by whether they may be written
        # The staging buffers serve one call at a time.
        self._lock = threading.Lock()

    def fence(self) -> object:
        return self._stream.fence()

    def pin(self, slots: NDArray[np.uint8]) -> bool:
        writable = slots.flags.writeable
        if writable in self._refused or not self._stream.pin(slots):
            self._refused.add(writable)
            return False
        address = slots.ctypes.data
        with self._pinning:
            self._pinned = self._pinned.beside(address, address + slots.nbytes)
        return True

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        with self._pinning:
            self._pinned = self._pinned.without(slots.ctypes.data)
        self._stream.unpin(slots)

    def begin(
        self, groups: Sequence[int], slots: NDArray[np.uint8], count: int
    ) -> NDArray[np.uint64] | None:
        return begin_hashing([self._groups[group].row_bytes for group in groups], slots, count)

    def can_hash(self, group: int) -> bool:
        return self._stream.can_hash(self._groups[group].row_bytes)

    def hash_blocks(
        self, group: int, block_ids: NDArray[np.int64], *, fence: object
    ) -> NDArray[np.uint64]:
        nowhere = np.zeros_like(block_ids)
        call = self._call(BlockCopy(group, block_ids, _NO_SLOTS, nowhere, True, fence))
        self._pump(call, None, self._look, lambda call, batch: None)
        return call.sums

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
        if len(copy.slots) and copy.slots.strides[0] >= copy.slots.shape[1]:
            slots = _as_tensor(copy.slots)
        on_device = self._groups[copy.group]
        whole = copy.checksum and copy.states is None
        device_hashes = whole and self._stream.can_hash(on_device.row_bytes)
        sums = np.zeros(len(copy.block_ids), np.uint64)
        return _Call(copy, on_device, slots, sums, device_hashes)

    def _batches(self, call: _Call) -> Iterator[_Batch]:
        size = call.on_device.row_bytes
        aligned = max(1, -(-size // SLOT_ALIGNMENT)) * SLOT_ALIGNMENT
        rows = self._rows * self._layout.slot_bytes // aligned
        count = len(call.copy.block_ids)
        for number, first in enumerate(range(0, count, rows)):
            places = slice(first, min(first + rows, count))
            slot_ids = call.copy.slot_ids[places]
            pieces = self._pieces(call, slot_ids)
            by_kernel = call.rows is not None and pieces is not None
            runs = None
            if pieces is not None and not by_kernel:
                runs = self._runs(call, slot_ids, pieces)
            yield _Batch(number % 2, places, slot_ids, runs, by_kernel)

    def _sent(self, call: _Call) -> _Call:
        """The call, with its ids on the device. All of them at once, and before the fence, as the
        host waits until they are there."""
        block_ids = self._stream.to_device(call.copy.block_ids)
        rows = None
        if self._for_kernels(call):
            rows = self._stream.to_device(call.addresses(call.copy.slot_ids))
        return replace(call, block_ids=block_ids, rows=rows)

    def _for_kernels(self, call: _Call) -> bool:
        """Whether kernels of the device read or write the slots, where these are pinned."""
        slots = call.slots
        size = call.on_device.row_bytes
        if slots is None or not self._stream.can_move(size):
            return False
        if slots.data_ptr() % 16 or slots.stride(0) % 16:
            return False
        count = len(call.copy.slot_ids)
        joined = int(np.count_nonzero(np.diff(call.copy.slot_ids) == 1))
        runs = count - joined if size == slots.stride(0) else count
        return count * size < runs * self.direct_bytes

    def _pieces(self, call: _Call, slot_ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The pinned piece that each slot lies in; None unless each lies in one."""
        if call.slots is None:
            return None
        return self._pinned.pieces_of(call.addresses(slot_ids), call.on_device.row_bytes)

    def _runs(
        self, call: _Call, slot_ids: NDArray[np.int64], pieces: NDArray[np.int64]
    ) -> list[_Run] | None:
        """What the device transfers itself; None where the host takes less time."""
        assert call.slots is not None
        size = call.on_device.row_bytes
        distance = call.slots.stride(0)
        apart = np.diff(slot_ids) != 1
        apart |= np.diff(pieces) != 0
        apart |= size != distance
        firsts = np.flatnonzero(np.append(True, apart))
        if len(slot_ids) * size < len(firsts) * self.direct_bytes:
            return None
        ends = np.append(firsts[1:], len(slot_ids))
        slots = slot_ids[firsts]
        return [
            _Run(slice(first, end), slice(slot, slot + end - first))
            for first, end, slot in zip(firsts.tolist(), ends.tolist(), slots.tolist(), strict=True)
        ]

    def _pump(
        self,
        call: _Call,
        cancelled: Callable[[], bool] | None,
        start: Callable[[_Call, _Batch], torch.Tensor | None],
        end: Callable[[_Call, _Batch], None],
    ) -> bool:
        """Run all batches; each ends while the next is under way. Returns False if cancelled."""
        with self._lock, self._stream.active():
            call = self._sent(call)
            if call.copy.fence is not None:
                self._stream.wait(call.copy.fence)
            under_way: deque[tuple[object, _Batch, torch.Tensor | None]] = deque()

            def end_first() -> None:
                mark, batch, sums = under_way.popleft()
                self._stream.finish(mark)
                end(call, batch)
                if sums is not None:
                    call.sums[batch.places] = sums.numpy().view(np.uint64)

            try:
                for batch in self._batches(call):
                    if cancelled is not None and cancelled():
                        return False
                    sums = start(call, batch)
                    under_way.append((self._stream.mark(), batch, sums))
                    if len(under_way) > 1:
                        end_first()
                while under_way:
                    end_first()
            finally:
                # Nothing may still use the staging buffers, or write blocks, after an error.
                self._stream.finish(None)
        return True

    def _out(self, call: _Call, batch: _Batch) -> torch.Tensor | None:
        """Begin to save a batch. Returns its checksums, if the device makes them."""
        staged = self._buffer(self._staged, call, batch)
        call.on_device.gather(self._stream, call.block_ids[batch.places], staged)
        there = self._stream.mark() if call.device_hashes else None
        if batch.by_kernel:
            self._stream.move(staged, call.rows_of(batch), to_host=True)
        elif batch.runs is None:
            self._cross(self._buffer(self._bounced, call, batch), staged, lands=True)
        else:
            for run in batch.runs:
                self._cross(call.slots_of(run), staged[run.rows], lands=True)
        return None if there is None else self._stream.hash(staged, there=there)

    def _look(self, call: _Call, batch: _Batch) -> torch.Tensor:
        """Begin to hash a batch that stays where it is."""
        staged = self._buffer(self._staged, call, batch)
        call.on_device.gather(self._stream, call.block_ids[batch.places], staged)
        return self._stream.hash(staged, there=self._stream.mark())

    def _land(self, call: _Call, batch: _Batch) -> None:
        """End to save a batch whose bytes are in the host's memory."""
        if batch.bounces:
            self._bounce(call, batch, saving=True)
        elif call.host_hashes:
            self._hash(call, batch)

    def _in(self, call: _Call, batch: _Batch) -> torch.Tensor | None:
        """Begin to load a batch; returns as `_out`."""
        staged = self._buffer(self._staged, call, batch)
        if batch.by_kernel:
            self._stream.move(staged, call.rows_of(batch), to_host=False)
        elif batch.runs is None:
            self._cross(staged, self._bounce(call, batch, saving=False))
        else:
            for run in batch.runs:
                self._cross(staged[run.rows], call.slots_of(run))
        there = self._stream.mark() if call.device_hashes else None
        call.on_device.scatter(self._stream, call.block_ids[batch.places], staged)
        return None if there is None else self._stream.hash(staged, there=there)

    def _landed(self, call: _Call, batch: _Batch) -> None:
        """End to load a batch that is in its blocks."""
        if call.host_hashes and not batch.bounces:
            self._hash(call, batch)

    def _bounce(self, call: _Call, batch: _Batch, *, saving: bool) -> torch.Tensor:
        """Copy the batch's rows between their slots and a buffer of the host, which this returns.
        What the host hashes is what it has written: a slot may have changed since."""
        buffer = self._buffer(self._bounced, call, batch)
        rows = buffer.numpy().view(np.uint8)
        places = np.arange(len(rows))
        stored = call.stored
        pairs = stored, rows, batch.slot_ids, places
        if not saving:
            pairs = rows, stored, places, batch.slot_ids
        states = call.states(batch)
        sums = self._host_rows.copy(*pairs, checksum=call.host_hashes, states=states)
        if call.host_hashes:
            call.sums[batch.places] = sums
        return buffer

    def _cross(self, target: torch.Tensor, source: torch.Tensor, *, lands: bool = False) -> None:
        """Copy between the host and the device; `lands` says that the host's memory is written."""
        copy = partial(target.copy_, source, non_blocking=True)
        self._stream.launch(copy, host=target if lands else source, lands=lands)

    def _hash(self, call: _Call, batch: _Batch) -> None:
        """Hash the batch's slots."""
        sums = self._host_rows.hash(call.stored, batch.slot_ids, call.states(batch))
        call.sums[batch.places] = sums

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
