# SPDX-License-Identifier: Apache-2.0
"""Copies of a KV cache that lies in the host's memory."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier, BlockCopy, Landed, consecutive
from omni_connector.copy.host_rows import SHARED_BYTES, Sharing, begin_hashing, in_parts
from omni_connector.copy.native import (
    ALIGNMENT,
    LEAST_HASHED,
    Rows,
    begin,
    checksums,
    native_copy,
)
from omni_connector.kv.canonical import CanonicalKVCaches, SlotLayout
from omni_connector.kv.convert import PageRun
from omni_connector.kv.segments import Segment, content_of, padding_of, reserved_of

_COPIED_BYTES = 4 * 1024 * 1024
"""Bytes copied between two looks at whether the copy is still wanted."""

_MOST_ROWS = 256
"""Most pages of peers of which the rows are remembered. It bounds memory."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment of all blocks `(num_blocks, *counts, row_bytes)`, and its bytes of a slot."""

    blocks: NDArray[np.uint8]
    first: int
    end: int

    @classmethod
    def of(cls, canonical: CanonicalKVCaches, segment: Segment) -> "_Part":
        blocks: NDArray[np.uint8] = canonical.view(segment, torch.uint8).numpy()
        return cls(blocks, segment.slot_offset, segment.slot_offset + segment.nbytes)

    def beside(self, slots: NDArray[np.uint8]) -> "_Pair":
        flat = slots[:, self.first : self.end]
        # Splitting an axis never copies.
        return _Pair(self.blocks, flat.reshape(len(slots), *self.blocks.shape[1:]))


class _Pair(NamedTuple):
    """The bytes of a part in all blocks, and in all slots in the same shape."""

    blocks: NDArray[np.uint8]
    slots: NDArray[np.uint8]

    def copy(self, block: int, slot: int, count: int, saving: bool) -> None:
        """Copy this part of `count` consecutive blocks."""
        if saving:
            self.slots[slot : slot + count] = self.blocks[block : block + count]
        else:
            self.blocks[block : block + count] = self.slots[slot : slot + count]


@dataclass(frozen=True, slots=True)
class _GroupParts:
    """The blocks of one group, as the host copies them.

    Args:
        rows: its content, as machine code copies it.
        pages: its pages, in slot order.
        whole: its segments, in slot order.
        padding: what the group reserves beside its content, `(num_blocks, ...)` each.
        reserved: content and padding, `(num_blocks, ...)` each.
    """

    rows: Rows
    pages: list[_Part]
    whole: list[_Part]
    padding: list[NDArray[np.uint8]]
    reserved: list[NDArray[np.uint8]]

    @classmethod
    def of(cls, canonical: CanonicalKVCaches, group: int) -> "_GroupParts":
        pages = canonical.pages[group]
        content = content_of(pages)
        rows = [
            (segment.storage + start, segment.block_stride, segment.row_bytes)
            for segment in content
            for start in segment.row_starts
        ]
        return cls(
            Rows.of(rows, canonical.num_blocks),
            [_Part.of(canonical, page) for page in pages],
            [_Part.of(canonical, segment) for segment in content],
            [_Part.of(canonical, segment).blocks for segment in padding_of(pages)],
            [_Part.of(canonical, segment).blocks for segment in reserved_of(pages)],
        )


class CpuCopier(BlockCopier):
    """Copies a KV cache in the host's memory, without holding the GIL.

    Args:
        canonical, layout: the cache, and the slots.
        helpers: share in each copy; None leaves all of it to the calling thread.

    Attributes:
        shared_bytes: fewest bytes that a thread copies of a shared copy.
    """

    shared_bytes = SHARED_BYTES

    def __init__(
        self, canonical: CanonicalKVCaches, layout: SlotLayout, helpers: Sharing | None = None
    ) -> None:
        super().__init__(layout)
        self._helpers = helpers
        self._groups = [
            _GroupParts.of(canonical, group) for group in range(len(layout.group_bytes))
        ]
        # Each load from a peer of other layers asks for the same few.
        self._rows_of = functools.lru_cache(_MOST_ROWS)(
            lambda group, first, end: self._groups[group].rows.between(first, end)
        )

    def fence(self) -> None:
        return None

    def reached(self, fence: object) -> bool:
        return True

    def begin(
        self, groups: Sequence[int], slots: NDArray[np.uint8], count: int
    ) -> NDArray[np.uint64] | None:
        rows = [self._groups[group].rows for group in groups]
        if not all(each.whole for each in rows):
            return None
        return begin_hashing([each.nbytes for each in rows], slots, count)

    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object = None) -> None:
        for block, _, count in consecutive(block_ids, block_ids, len(block_ids)):
            _zero(self._groups[group].reserved, block, count)

    def close(self) -> None:
        self._groups = []
        self._rows_of.cache_clear()

    def _copy(
        self,
        copy: BlockCopy,
        saving: bool,
        cancelled: Callable[[], bool] | None,
        landed: Landed | None,
    ) -> NDArray[np.uint64] | None:
        sums = self._copy_all(copy, saving, cancelled)
        if landed is not None and sums is not None:
            landed(slice(0, len(sums)), sums)
        return sums

    def _copy_all(
        self, copy: BlockCopy, saving: bool, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.uint64] | None:
        native = native_copy()
        group = self._groups[copy.group]
        count = len(copy.block_ids)
        size = self._layout.group_bytes[copy.group]
        rows = group.rows
        blocks = rows.blocks(copy.block_ids)
        slots = rows.slots(copy.slots, copy.slot_ids)
        targets = slots if saving else blocks
        sources = blocks if saving else slots
        if (
            native is None
            or not rows.whole
            or (copy.checksum and copy.states is None and rows.nbytes < LEAST_HASHED)
            or np.bitwise_or.reduce(targets, axis=None) % ALIGNMENT
        ):
            if copy.states is not None:
                raise ValueError("states of checksums, for slots that `begin` was not told of")
            return self._shared(
                copy, count * size, lambda part: self._copy_by_numpy(part, saving, cancelled)
            )
        states = begin(count, rows.nbytes) if copy.states is None else copy.states
        run = native.copying(targets, sources, rows.lengths, states, checksum=copy.checksum)
        step = max(1, count if cancelled is None else _COPIED_BYTES // size)
        given_up: list[int] = []

        def copy_part(some: slice) -> None:
            for first in range(some.start, some.stop, step):
                if given_up or (cancelled is not None and cancelled()):
                    given_up.append(first)
                    return
                run(slice(first, min(first + step, some.stop)))

        in_parts(self._helpers, count, count * size, copy_part, self.shared_bytes)
        if given_up:
            return None
        if not saving and group.padding:
            for block, _, together in consecutive(copy.block_ids, copy.slot_ids, count):
                _zero(group.padding, block, together)
        return checksums(states) if copy.checksum else np.zeros(count, np.uint64)

    def _copy_pages(
        self, copy: BlockCopy, runs: tuple[PageRun, ...], length: int
    ) -> NDArray[np.uint64] | None:
        group = self._groups[copy.group]
        rows = [self._rows_of(copy.group, run.first, run.end) for run in runs]
        edges = [length, *(run.at for run in runs)]
        by_native = self._is_for_native(rows, edges if copy.checksum else ())
        if group.padding:
            for block, _, count in consecutive(copy.block_ids, copy.block_ids, length):
                _zero(group.padding, block, count)

        def load(part: BlockCopy) -> NDArray[np.uint64]:
            if by_native:
                return self._load_pages(part, runs, rows, length)
            return self._load_pages_by_numpy(part, runs, length)

        return self._shared(copy, len(copy.block_ids) * sum(run.nbytes for run in runs), load)

    def _shared(
        self,
        copy: BlockCopy,
        nbytes: int,
        work: Callable[[BlockCopy], NDArray[np.uint64] | None],
    ) -> NDArray[np.uint64] | None:
        """What `work` gives for all blocks of a copy of `nbytes`, which the helpers share in."""
        sums: dict[int, NDArray[np.uint64]] = {}
        given_up: list[slice] = []

        def copy_part(some: slice) -> None:
            states = None if copy.states is None else copy.states[some]
            ids = copy.block_ids[some], copy.slot_ids[some]
            each = replace(copy, block_ids=ids[0], slot_ids=ids[1], states=states)
            found = None if given_up else work(each)
            if found is None:
                given_up.append(some)
            else:
                sums[some.start] = found

        in_parts(self._helpers, len(copy.block_ids), nbytes, copy_part, self.shared_bytes)
        return None if given_up else np.concatenate([sums[first] for first in sorted(sums)])

    def _is_for_native(self, rows: Sequence[Rows], hashed: Sequence[int]) -> bool:
        """Whether machine code copies these rows, and hashes between these bytes of a slot."""
        return (
            native_copy() is not None
            and all(each.whole for each in rows)
            and not any((each.starts % ALIGNMENT).any() for each in rows)
            and not any((each.strides % ALIGNMENT).any() for each in rows)
            and not any(edge % ALIGNMENT for edge in hashed)
            and max(hashed, default=LEAST_HASHED) >= LEAST_HASHED
        )

    def _load_pages(
        self,
        copy: BlockCopy,
        runs: Sequence[PageRun],
        rows: Sequence[Rows],
        length: int,
    ) -> NDArray[np.uint64]:
        native = native_copy()
        assert native is not None
        states = begin(len(copy.block_ids), length)
        done = 0
        for run, each in zip(runs, rows, strict=True):
            self._pass_over(copy, done, run.at, states)
            done = run.at + run.nbytes
            sources = each.slots(copy.slots[:, run.at : done], copy.slot_ids)
            targets = each.blocks(copy.block_ids)
            native(targets, sources, each.lengths, states, checksum=copy.checksum)
        self._pass_over(copy, done, length, states)
        return checksums(states) if copy.checksum else np.zeros(len(states), np.uint64)

    def _pass_over(self, copy: BlockCopy, first: int, end: int, states: NDArray[np.uint64]) -> None:
        """Hash bytes of slots that are not copied."""
        native = native_copy()
        if not copy.checksum or first == end or native is None:
            return
        start = copy.slots.ctypes.data + first
        sources = start + copy.slot_ids[:, None] * copy.slots.strides[0]
        native.hash(sources, np.array([end - first]), states)

    def _load_pages_by_numpy(
        self, copy: BlockCopy, runs: Sequence[PageRun], length: int
    ) -> NDArray[np.uint64]:
        pages = self._groups[copy.group].pages
        sums = np.zeros(len(copy.block_ids), np.uint64)
        ids = zip(copy.block_ids.tolist(), copy.slot_ids.tolist(), strict=True)
        for i, (block, slot) in enumerate(ids):
            for run in runs:
                for page in pages:
                    if run.first <= page.first and page.end <= run.end:
                        at = run.at + page.first - run.first
                        content = copy.slots[slot, at : at + page.end - page.first]
                        page.blocks[block] = content.reshape(page.blocks.shape[1:])
            if copy.checksum:  # after the copy; see `_copy_by_numpy`
                sums[i] = xxhash.xxh3_64_intdigest(copy.slots[slot, :length].data)
        return sums

    def _copy_by_numpy(
        self, copy: BlockCopy, saving: bool, cancelled: Callable[[], bool] | None
    ) -> NDArray[np.uint64] | None:
        group = self._groups[copy.group]
        parts = [part.beside(copy.slots) for part in group.whole]
        size = self._layout.group_bytes[copy.group]
        stored = copy.slots[:, :size]
        sums: list[int] = []
        most = max(1, _COPIED_BYTES // max(1, size))
        for block, slot, count in consecutive(copy.block_ids, copy.slot_ids, most):
            if cancelled is not None and cancelled():
                return None
            for part in parts:
                part.copy(block, slot, count, saving)
            # A slot is hashed after it was copied, never before: a slot that is rewritten during a
            # load then fails its checksum instead of passing with other bytes.
            if copy.checksum:
                sums += [
                    xxhash.xxh3_64_intdigest(stored[i].data) for i in range(slot, slot + count)
                ]
            if not saving:
                _zero(group.padding, block, count)
        return np.array(sums, np.uint64) if sums else np.zeros(len(copy.block_ids), np.uint64)


def _zero(parts: Sequence[NDArray[np.uint8]], block: int, count: int) -> None:
    for part in parts:
        part[block : block + count] = 0
