# SPDX-License-Identifier: Apache-2.0
"""Copying a KV cache in a device's memory, through bounded staging buffers."""

import ctypes
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier, BlockCopy, Landed
from omni_connector.copy.host_rows import HostRows, Sharing, begin_hashing, hashes_between
from omni_connector.copy.native import ALIGNMENT, LEAST_HASHED, SUMS, begin, checksums
from omni_connector.copy.staging import WORDS, Direction, Staging, allocate
from omni_connector.copy.stream import RowPart, Stream
from omni_connector.errors import DeviceMemoryError
from omni_connector.kv.canonical import SLOT_ALIGNMENT, CanonicalKVCaches, SlotLayout
from omni_connector.kv.convert import PageRun
from omni_connector.kv.segments import Segment, content_of, padding_of, reserved_of

logger = logging.getLogger("vllm.omni_connector.staging")

# Longest wait of `close` for a copy under way, in seconds.
_CLOSE_S: Final = 5.0

_STAGING_BYTES: Final = 16 << 20
"""Of each staging buffer, two for saves and two for loads. A GPU of 2023 copies these in 0.3 ms,
beside which launches and checksums take a quarter (benchmarks/results/device.md)."""

_MOST_PAGES: Final = 256
"""Most choices of pages of peers whose places are remembered. It bounds memory."""

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
        row_bytes = sum(page.nbytes for page in pages)
        word, parts = _parts_of(canonical, content_of(pages), row_bytes)
        padding = _words(canonical, padding_of(pages))[1]
        reserved = _words(canonical, reserved_of(pages))[1]
        return cls(parts, word, row_bytes, padding, reserved)

    def with_pages(
        self, canonical: CanonicalKVCaches, group: int, runs: Sequence[PageRun], length: int | None
    ) -> "GroupOnDevice | None":
        """The same blocks, of which rows hold some pages.

        Args:
            canonical, group: whose blocks these are.
            runs: the pages, in the order of a peer's slots.
            length: bytes of a row that is a whole slot of the peer's; None if rows hold the pages
                alone, packed.

        Returns:
            None if a run is not made of whole pages, or two have the same pages.
        """
        ordered = sorted(runs, key=lambda run: run.first)
        if any(run.end > other.first for run, other in pairwise(ordered)):
            return None  # a device writes them in any order
        of_runs = []
        row_bytes = 0
        for run in runs:
            first = row_bytes if length is None else run.at
            of_runs.append(
                [
                    replace(page, slot_offset=page.slot_offset - run.first + first)
                    for page in canonical.pages[group]
                    if run.first <= page.slot_offset and page.slot_offset + page.nbytes <= run.end
                ]
            )
            if sum(page.nbytes for page in of_runs[-1]) != run.nbytes:
                return None
            row_bytes += run.nbytes
        if length is None:
            of_runs = [[page for pages in of_runs for page in pages]]
        else:
            row_bytes = length
        segments = [segment for pages in of_runs for segment in content_of(pages)]
        word, parts = _parts_of(canonical, segments, row_bytes)
        return replace(self, parts=parts, word=word, row_bytes=row_bytes)

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

    def zero_each(self, stream: Stream, block_ids: NDArray[np.int64]) -> None:
        """The same where the device has no memory for their ids: a launch for each block."""
        for block_id in block_ids.tolist():
            for reserved in self.reserved:
                stream.launch(reserved[block_id].zero_)


def _parts_of(
    canonical: CanonicalKVCaches, segments: Sequence[Segment], row_bytes: int
) -> tuple[torch.dtype, tuple[_Part, ...]]:
    """The parts of rows of so many bytes that hold these segments, and the word that they are
    counted in."""
    width, views = _words(canonical, segments, row_bytes)
    parts = []
    for segment, blocks in zip(segments, views, strict=True):
        first = segment.slot_offset // width
        parts.append(_Part(blocks, first, first + segment.nbytes // width))
    return _WORDS[width], tuple(parts)


def _words(
    canonical: CanonicalKVCaches, segments: Sequence[Segment], row_bytes: int = 0
) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Bytes of the widest word that divides all of these segments, their places, and rows of so
    many bytes; and views of the segments, in all blocks, as such words."""
    # Devices gather element by element: bytes one at a time would be the slowest choice.
    width = gcd(8, row_bytes)
    for segment in segments:
        distances = (distance for _, distance in segment.dims)
        width = gcd(
            width,
            segment.storage + segment.start,
            segment.start,
            segment.slot_offset,
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


class _Taken(NamedTuple):
    """Consecutive bytes of each slot that are copied.

    Attributes:
        at: where they begin in a slot.
        place: where they begin in a row of a staging buffer.
        nbytes: how many they are.
    """

    at: int
    place: int
    nbytes: int

    @property
    def of_slot(self) -> slice:
        """These bytes of a slot."""
        return slice(self.at, self.at + self.nbytes)

    @property
    def of_row(self) -> slice:
        """These bytes of a row."""
        return slice(self.place, self.place + self.nbytes)


class _Run(NamedTuple):
    """Rows of a batch beside slots that lie together, all in one pinned piece."""

    rows: slice
    slots: slice


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Blocks that fit a staging buffer.

    Attributes:
        staging: its buffer.
        places: of these blocks among those of the call.
        slot_ids: their slots `(n,)`.
        runs: what the device transfers from and to slots itself; None where it does not.
        by_kernel: whether a kernel of the device reads or writes the slots instead. If it does not
            either, the bytes cross through a buffer of the host.
    """

    staging: Staging
    places: slice
    slot_ids: NDArray[np.int64]
    runs: list[_Run] | None
    by_kernel: bool

    @property
    def bounces(self) -> bool:
        """Whether the bytes cross through a buffer of the host."""
        return self.runs is None and not self.by_kernel


class _Sent(NamedTuple):
    """What the device was told of a batch.

    Attributes:
        block_ids: of its blocks.
        addresses: of what kernels move of its slots, if they do.
        sums: eight of each row, where its checksum goes on; none where it begins.
    """

    block_ids: torch.Tensor
    addresses: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """One save or load: what its batches have in common.

    Attributes:
        direction: whose streams and buffers it uses.
        taken: what is copied of each slot, in the order of slots and of rows.
        length: bytes of a slot, all of which are hashed.
        slots: the slots of the copy, as a tensor; None where the device may not use them itself.
        sums: the checksums `(n,)`.
        device_hashes: whether the device makes them, of rows that are whole slots or, with states,
            parts of slots.
    """

    direction: Direction
    copy: BlockCopy
    on_device: GroupOnDevice
    taken: tuple[_Taken, ...]
    length: int
    slots: torch.Tensor | None
    sums: NDArray[np.uint64]
    device_hashes: bool

    @property
    def host_hashes(self) -> bool:
        """Whether the host makes the checksums."""
        return self.copy.checksum and not self.device_hashes

    @property
    def hashes_what_it_copies(self) -> bool:
        """Whether the bytes that are hashed are those that are copied, no others."""
        return [(each.at, each.nbytes) for each in self.taken] == [(0, self.length)]

    @property
    def in_a_piece(self) -> bool:
        """Whether slots that lie together are copied as one piece."""
        assert self.slots is not None
        return [each.nbytes for each in self.taken] == [self.slots.stride(0)]

    @property
    def span(self) -> tuple[int, int]:
        """First byte of a slot that is copied, and how many bytes there are up to the last."""
        if not self.taken:
            return 0, 0
        first = self.taken[0].at
        last = self.taken[-1]
        return first, last.at + last.nbytes - first

    @property
    def moved(self) -> int:
        """Bytes of the pieces that kernels move: equal ones, as long as may be."""
        return gcd(*(each.nbytes for each in self.taken))

    @property
    def moves(self) -> int:
        """How many of these pieces a slot has."""
        return sum(each.nbytes for each in self.taken) // self.moved

    def addresses(self, slot_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of some slots `(n,)`."""
        assert self.slots is not None
        return self.slots.data_ptr() + slot_ids * self.slots.stride(0)

    def pieces(self, slot_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses of what kernels move of some slots, in the order of rows."""
        moved = self.moved
        starts = [np.arange(each.at, each.at + each.nbytes, moved) for each in self.taken]
        found: NDArray[np.int64] = np.add.outer(self.addresses(slot_ids), np.concatenate(starts))
        return found.ravel()

    @property
    def summed(self) -> int:
        """Sums of each row that the device goes on with."""
        return SUMS if self.device_hashes and self.copy.states is not None else 0

    def send(self, batch: _Batch) -> _Sent:
        """What the device needs to know of a batch."""
        block_ids = self.copy.block_ids[batch.places]
        pieces = self.pieces(batch.slot_ids) if batch.by_kernel else block_ids[:0]
        states = self.states(batch)
        sums = block_ids[:0]
        if states is not None:
            sums = states[:, : self.summed].ravel().view(np.int64)
        there = batch.staging.send(self.direction.fills, np.concatenate([block_ids, pieces, sums]))
        first = len(block_ids)
        end = first + len(pieces)
        return _Sent(there[:first], there[first:end], there[end:])

    def take(self, batch: _Batch, found: torch.Tensor) -> None:
        """Note what the device has made of a batch: checksums, or sums of a part of its slots."""
        words = found.numpy().view(np.uint64)
        states = self.states(batch)
        if states is None:
            self.sums[batch.places] = words
            return
        if words.ndim == 2:
            states[:, :SUMS] = words
            states[:, -2] -= np.uint64(self.on_device.row_bytes // ALIGNMENT)
        else:
            states[:, -2] = 0
            states[:, -1] = words
        self.sums[batch.places] = checksums(states)

    def slots_of(self, run: _Run, taken: _Taken) -> torch.Tensor:
        """What is taken of the slots of a run, as the device copies it."""
        assert self.slots is not None
        return self.slots[run.slots, taken.of_slot]

    def states(self, batch: _Batch) -> NDArray[np.uint64] | None:
        """States of the batch's checksums."""
        states = self.copy.states
        return None if states is None else states[batch.places]


def _as_tensor(slots: NDArray[np.uint8]) -> torch.Tensor | None:
    """Slots as a tensor, int8, which must not be used after them; None where there are none, or
    they overlap.

    Torch knows no read-only tensors, and warns where it makes one of a read-only array, as the
    slots of peers are. So this hides that from it.
    """
    count, nbytes = slots.shape
    distance = slots.strides[0]
    if not count or distance < nbytes:
        return None
    memory = (ctypes.c_int8 * ((count - 1) * distance + nbytes)).from_address(slots.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.int8).as_strided((count, nbytes), (distance, 1))


class StagedCopier(BlockCopier):
    """Copies a KV cache in a device's memory, one contiguous transfer for many blocks.

    Blocks are gathered into a staging buffer on the device and cross to the host, straight into
    slots that were pinned, else in one piece into a pinned buffer; loads are the same backwards.
    The device makes the checksums from the staging buffer, if it can. What the host does for one
    batch it does while the device works on the next.

    Of slots with other layers only the pages that are read cross to the device, and the host makes
    the checksums. Where the device can make those of whole slots, and these are pinned, the slots
    cross whole: the device takes less time for the other pages than the host for all of them.

    Args:
        canonical: the KV cache.
        layout: its slots.
        stream: of the device, beside which the copier makes its own. It takes the fences, and what
            is pinned; owned, and closed with the copier.
        helpers: share in what the host does; None leaves all of it to the calling thread.
        staging_bytes: bytes of each staging buffer; at least one slot is staged. Saves have two,
            and loads.

    Attributes:
        direct_bytes: the device transfers from and to pinned slots where as many bytes lie
            together, on average. Else it takes the host longer to ask for each transfer than a
            kernel to move all of them.
    """

    speed = 32
    direct_bytes = 4 << 20
    layer_bytes = 256 << 20
    pinned_at_once = 1 << 30

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
        self._canonical: CanonicalKVCaches | None = canonical
        # Each load from a peer of other layers asks for the same few.
        self._with_pages = functools.lru_cache(_MOST_PAGES)(self._make_pages)
        self._groups = [
            GroupOnDevice.of(canonical, group) for group in range(len(layout.group_bytes))
        ]
        # A save may wait for the engine's work that is ahead of it. No load waits for that.
        self._saves = Direction(stream)
        self._loads = Direction(stream)
        self._rows = allocate((self._saves, self._loads), layout.slot_bytes, staging_bytes)
        # Replaced under the lock. Copies on other threads look at it without.
        self._pinned = _Pinned.none()
        self._pinning = threading.Lock()

    def fence(self) -> object:
        return self._stream.fence()

    def reached(self, fence: object) -> bool:
        return self._stream.reached(fence)

    def pin(self, slots: NDArray[np.uint8]) -> int:
        if code := self._stream.pin(slots):
            return code
        address = slots.ctypes.data
        with self._pinning:
            self._pinned = self._pinned.beside(address, address + slots.nbytes)
        return 0

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        with self._pinning:
            self._pinned = self._pinned.without(slots.ctypes.data)
        self._stream.unpin(slots)

    def begin(
        self, groups: Sequence[int], slots: NDArray[np.uint8], count: int
    ) -> NDArray[np.uint64] | None:
        lengths = [self._groups[group].row_bytes for group in groups]
        nbytes = sum(lengths)
        if self._stream.can_hash(nbytes) and not any(each % ALIGNMENT for each in lengths):
            return begin(count, nbytes)
        return begin_hashing(lengths, slots, count)

    def _copy(
        self,
        copy: BlockCopy,
        saving: bool,
        cancelled: Callable[[], bool] | None,
        landed: Landed | None,
    ) -> NDArray[np.uint64] | None:
        call = self._call_of_blocks(copy, self._saves if saving else self._loads)
        start, end = (self._out, self._land) if saving else (self._in, self._landed)
        return call.sums if self._pump(call, cancelled, start, end, landed) else None

    def _copy_pages(
        self, copy: BlockCopy, runs: tuple[PageRun, ...], length: int
    ) -> NDArray[np.uint64] | None:
        call = self._call_of_slots(copy, runs, length)
        if call is None:
            call = self._call_of_pages(copy, runs, length)
        if call is None or not self._rows_at_once(call.on_device):
            return None
        self._pump(call, None, self._in, self._landed)
        return call.sums

    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        stream = self._loads.fills
        with self._loads.lock, stream.active():
            if fence is not None:
                stream.wait(fence)
            for first in range(0, len(block_ids), WORDS):
                some = block_ids[first : first + WORDS]
                try:
                    if self._loads.buffers:
                        there = self._loads.buffers[0].send(stream, some)
                        self._groups[group].zero(stream, there)
                    else:
                        self._groups[group].zero_each(stream, some)
                finally:
                    stream.finish(None)

    def close(self) -> None:
        for each in (self._saves, self._loads):
            if not each.lock.acquire(timeout=_CLOSE_S):
                logger.error(
                    "A copy of the device did not end in %g s; the device may hang. The memory "
                    "that it uses is not freed",
                    _CLOSE_S,
                )
                return
            try:
                each.finish()
            except RuntimeError as error:
                logger.warning("The device failed before its last copies had ended: %s", error)
            finally:
                each.buffers = ()
                each.lock.release()
        for each in (self._saves, self._loads):
            each.close()
        self._stream.close()
        self._groups = []
        self._canonical = None
        self._with_pages.cache_clear()
        self._pinned = _Pinned.none()

    def _call(
        self,
        direction: Direction,
        copy: BlockCopy,
        on_device: GroupOnDevice,
        taken: tuple[_Taken, ...],
        length: int,
        *,
        device_hashes: bool = False,
    ) -> _Call:
        slots = _as_tensor(copy.slots)
        sums = np.zeros(len(copy.block_ids), np.uint64)
        return _Call(direction, copy, on_device, taken, length, slots, sums, device_hashes)

    def _call_of_blocks(self, copy: BlockCopy, direction: Direction) -> _Call:
        """A copy of all pages of blocks."""
        on_device = self._groups[copy.group]
        size = on_device.row_bytes
        hashed = size if copy.states is None else int(copy.states[0, -1]) * ALIGNMENT
        device_hashes = copy.checksum and self._stream.can_hash(hashed)
        taken = (_Taken(0, 0, size),)
        return self._call(direction, copy, on_device, taken, size, device_hashes=device_hashes)

    def _call_of_slots(
        self, copy: BlockCopy, runs: tuple[PageRun, ...], length: int
    ) -> _Call | None:
        """A load of pages for which whole slots cross to the device, which hashes them; None where
        it does not."""
        if not copy.checksum or not self._stream.can_hash(length):
            return None
        on_device = self._with_pages(copy.group, runs, length)
        if on_device is None or not self._rows_at_once(on_device):
            return None
        taken = (_Taken(0, 0, length),)
        call = self._call(self._loads, copy, on_device, taken, length, device_hashes=True)
        return None if self._pieces(call, copy.slot_ids) is None else call

    def _call_of_pages(
        self, copy: BlockCopy, runs: tuple[PageRun, ...], length: int
    ) -> _Call | None:
        """A load of pages that cross to the device alone; None where that is not possible."""
        on_device = self._with_pages(copy.group, runs, None)
        if on_device is None:
            return None
        taken = []
        place = 0
        for run in runs:
            taken.append(_Taken(run.at, place, run.nbytes))
            place += run.nbytes
        edges = [length, *(run.at for run in runs), *(run.nbytes for run in runs)]
        if copy.checksum and length >= LEAST_HASHED and hashes_between(edges):
            copy = replace(copy, states=begin(len(copy.block_ids), length))
        return self._call(self._loads, copy, on_device, tuple(taken), length)

    def _make_pages(
        self, group: int, runs: tuple[PageRun, ...], length: int | None
    ) -> GroupOnDevice | None:
        """See `GroupOnDevice.with_pages`."""
        assert self._canonical is not None
        return self._groups[group].with_pages(self._canonical, group, runs, length)

    def _rows_at_once(self, on_device: GroupOnDevice) -> int:
        """Rows that a staging buffer holds; 0 where one does not fit."""
        aligned = max(1, -(-on_device.row_bytes // SLOT_ALIGNMENT)) * SLOT_ALIGNMENT
        return self._rows * self._layout.slot_bytes // aligned

    def _batches(self, call: _Call) -> Iterator[_Batch]:
        """The batches of a copy; its direction is locked.

        Raises:
            DeviceMemoryError: there are no staging buffers.
        """
        buffers = call.direction.buffers
        if not buffers:
            raise DeviceMemoryError("the device has no memory for staging buffers")
        for_kernels = self._for_kernels(call)
        words = 1 + (call.moves if for_kernels else 0) + call.summed
        rows = min(self._rows_at_once(call.on_device), WORDS // words)
        count = len(call.copy.block_ids)
        for number, first in enumerate(range(0, count, rows)):
            places = slice(first, min(first + rows, count))
            slot_ids = call.copy.slot_ids[places]
            pieces = self._pieces(call, slot_ids)
            by_kernel = for_kernels and pieces is not None
            runs = None
            if pieces is not None and not by_kernel:
                runs = self._runs(call, slot_ids, pieces)
            yield _Batch(buffers[number % 2], places, slot_ids, runs, by_kernel)

    def _for_kernels(self, call: _Call) -> bool:
        """Whether kernels of the device read or write the slots, where these are pinned."""
        slots = call.slots
        if slots is None or not call.taken or not self._stream.can_move(call.moved):
            return False
        if (
            call.moves >= WORDS
            or slots.data_ptr() % 16
            or slots.stride(0) % 16
            or any(each.at % 16 for each in call.taken)
        ):
            return False
        count = len(call.copy.slot_ids)
        joined = int(np.count_nonzero(np.diff(call.copy.slot_ids) == 1)) if call.in_a_piece else 0
        transfers = (count - joined) * len(call.taken)
        return count * call.on_device.row_bytes < transfers * self.direct_bytes

    def _pieces(self, call: _Call, slot_ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The pinned piece that each slot lies in; None unless each lies in one."""
        if call.slots is None:
            return None
        first, nbytes = call.span
        return self._pinned.pieces_of(call.addresses(slot_ids) + first, nbytes)

    def _runs(
        self, call: _Call, slot_ids: NDArray[np.int64], pieces: NDArray[np.int64]
    ) -> list[_Run] | None:
        """What the device transfers itself; None where the host takes less time."""
        apart = np.diff(slot_ids) != 1
        apart |= np.diff(pieces) != 0
        apart |= not call.in_a_piece
        firsts = np.flatnonzero(np.append(True, apart))
        transfers = len(firsts) * len(call.taken)
        if len(slot_ids) * call.on_device.row_bytes < transfers * self.direct_bytes:
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
        landed: Landed | None = None,
    ) -> bool:
        """Run all batches; each ends, and is given to `landed`, while the next is under way.
        Returns False if cancelled."""
        direction = call.direction
        with direction.lock:
            if call.copy.fence is not None:
                direction.fills.wait(call.copy.fence)
            under_way: deque[tuple[object, _Batch, torch.Tensor | None]] = deque()

            def end_first() -> None:
                mark, batch, sums = under_way.popleft()
                direction.empties.finish(mark)
                end(call, batch)
                if sums is not None:
                    call.take(batch, sums)
                if landed is not None:
                    landed(batch.places, call.sums[batch.places])

            try:
                for batch in self._batches(call):
                    if cancelled is not None and cancelled():
                        return False
                    sums = start(call, batch)
                    under_way.append((direction.empties.mark(), batch, sums))
                    if len(under_way) > 1:
                        end_first()
                while under_way:
                    end_first()
            finally:
                # Nothing may still use the staging buffers, or write blocks, after an error.
                direction.finish()
        return True

    def _out(self, call: _Call, batch: _Batch) -> torch.Tensor | None:
        """Begin to save a batch. Returns its checksums, if the device makes them."""
        staged = self._staged(call, batch)
        with call.direction.fills.active():
            sent = call.send(batch)
            call.on_device.gather(call.direction.fills, sent.block_ids, staged)
        there = self._filled(call)
        with call.direction.empties.active():
            self._cross(call, batch, staged, sent, to_host=True)
        return self._hash_there(call, batch, staged, sent, there)

    def _land(self, call: _Call, batch: _Batch) -> None:
        """End to save a batch whose bytes are in the host's memory."""
        if batch.bounces:
            self._bounce_out(call, batch)
        elif call.host_hashes:
            self._hash(call, batch)

    def _in(self, call: _Call, batch: _Batch) -> torch.Tensor | None:
        """Begin to load a batch; returns as `_out`."""
        staged = self._staged(call, batch)
        with call.direction.fills.active():
            sent = call.send(batch)
            self._cross(call, batch, staged, sent, to_host=False)
        there = self._filled(call)
        with call.direction.empties.active():
            call.on_device.scatter(call.direction.empties, sent.block_ids, staged)
        return self._hash_there(call, batch, staged, sent, there)

    def _filled(self, call: _Call) -> object:
        """Mark a batch as filled, before which nothing empties it."""
        there = call.direction.fills.mark()
        call.direction.empties.wait(there)
        return there

    def _landed(self, call: _Call, batch: _Batch) -> None:
        """End to load a batch that is in its blocks."""
        if call.host_hashes and not batch.bounces:
            self._hash(call, batch)

    def _bounce_out(self, call: _Call, batch: _Batch) -> None:
        """Copy the batch's rows from a buffer of the host to their slots. What the host hashes is
        what it has written."""
        rows = self._bounced(call, batch).numpy().view(np.uint8)
        stored = call.copy.slots[:, : call.on_device.row_bytes]
        sums = self._host_rows.copy(
            *(stored, rows, batch.slot_ids, np.arange(len(rows))),
            checksum=call.host_hashes,
            states=call.states(batch) if call.host_hashes else None,
        )
        if call.host_hashes:
            call.sums[batch.places] = sums

    def _bounced_in(self, call: _Call, batch: _Batch) -> torch.Tensor:
        """Copy what is taken of the batch's slots to rows of a buffer of the host, which this
        returns. What the host hashes is what it has written, or what it has read after that: a slot
        may have changed since."""
        buffer = self._bounced(call, batch)
        rows = buffer.numpy().view(np.uint8)
        places = np.arange(len(rows))
        stored = call.copy.slots
        states = call.states(batch)
        hashes = call.host_hashes and (states is not None or call.hashes_what_it_copies)
        done = 0
        for taken in call.taken:
            if hashes and done < taken.at:
                self._host_rows.hash(stored[:, done : taken.at], batch.slot_ids, states)
            done = taken.at + taken.nbytes
            sums = self._host_rows.copy(
                *(rows[:, taken.of_row], stored[:, taken.of_slot], places, batch.slot_ids),
                checksum=hashes,
                states=states,
            )
            if hashes:
                call.sums[batch.places] = sums
        if call.host_hashes and (done < call.length or not hashes or not call.taken):
            rest = stored[:, done if hashes else 0 : call.length]
            sums = self._host_rows.hash(rest, batch.slot_ids, states)
            call.sums[batch.places] = sums
        return buffer

    def _cross(
        self,
        call: _Call,
        batch: _Batch,
        staged: torch.Tensor,
        sent: _Sent,
        *,
        to_host: bool,
    ) -> None:
        """Copy a batch between its buffer on the device and the host, on the active stream."""
        stream = call.direction.empties if to_host else call.direction.fills
        if batch.by_kernel:
            stream.move(staged.view(-1, call.moved), sent.addresses, to_host=to_host)
            return
        pairs: list[tuple[torch.Tensor, torch.Tensor]]
        if batch.runs is None:
            here = self._bounced(call, batch) if to_host else self._bounced_in(call, batch)
            pairs = [(staged, here)]
        else:
            pairs = [
                (staged[run.rows, taken.of_row], call.slots_of(run, taken))
                for run in batch.runs
                for taken in call.taken
            ]
        for there, here in pairs:
            target, source = (here, there) if to_host else (there, here)
            if source.numel():
                copy = partial(target.copy_, source, non_blocking=True)
                stream.launch(copy, host=here, lands=to_host)

    def _hash(self, call: _Call, batch: _Batch) -> None:
        """Hash the batch's slots."""
        stored = call.copy.slots[:, : call.length]
        sums = self._host_rows.hash(stored, batch.slot_ids, call.states(batch))
        call.sums[batch.places] = sums

    def _hash_there(
        self, call: _Call, batch: _Batch, staged: torch.Tensor, sent: _Sent, there: object
    ) -> torch.Tensor | None:
        """Have the device hash the batch's rows, if it does; returns where `_Call.take` finds what
        it has made of them."""
        if not call.device_hashes:
            return None
        count, nbytes = staged.shape
        sums: torch.Tensor = batch.staging.sums[:count]
        part = None
        states = call.states(batch)
        if states is not None:  # the rows of a copy are equally far
            left, length = states[0, -2:].tolist()
            first = (length - left) * ALIGNMENT
            part = RowPart(first, length * ALIGNMENT, sent.sums.view(count, SUMS))
            if not part.ends(nbytes):
                sums = batch.staging.sums[: count * SUMS].view(count, SUMS)
        call.direction.empties.hash(staged, there=there, sums=sums, part=part)
        return sums

    def _staged(self, call: _Call, batch: _Batch) -> torch.Tensor:
        """Int8 `(n, row_bytes)`: the batch's rows on the device."""
        return _rows(batch.staging.rows, call, batch)

    def _bounced(self, call: _Call, batch: _Batch) -> torch.Tensor:
        """The same on the host."""
        return _rows(batch.staging.bounced, call, batch)


def _rows(buffer: torch.Tensor, call: _Call, batch: _Batch) -> torch.Tensor:
    size = call.on_device.row_bytes
    count = len(batch.slot_ids)
    rows: torch.Tensor = buffer[: count * size].view(count, size)
    return rows
