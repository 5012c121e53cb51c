# SPDX-License-Identifier: Apache-2.0
"""The bytes of a block as few regular runs, each copied in one call."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from omni_connector.kv.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from omni_connector.kv.slots import SlotLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of contiguous bytes at regular distances, packed one after the other in a slot.

    Args:
        storage: address of the storage that holds them.
        start: bytes from the storage's first to this run's first, in block 0.
        dims: (count, distance in bytes) of the rows, slowest first; empty for one row.
        row_bytes: bytes of one row.
        block_stride: bytes from one block to the next.
        slot_offset: bytes from the slot's first to this run's first.
    """

    storage: int
    start: int
    dims: tuple[tuple[int, int], ...]
    row_bytes: int
    block_stride: int
    slot_offset: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows along each of `dims`."""
        return tuple(count for count, _ in self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        total = self.row_bytes
        for count, _ in self.dims:
            total *= count
        return total


def segments_of(
    canonical: CanonicalKVCaches, layout: SlotLayout, group: int
) -> tuple[Segment, ...]:
    """The runs of one group's content, in slot order."""
    refs = canonical.group_data_refs[group]
    return _joined(
        _run(canonical, ref, 0, ref.page_size_bytes, offset)
        for ref, offset in zip(refs, layout.ref_offsets[group], strict=True)
    )


def padding_of(canonical: CanonicalKVCaches, group: int) -> tuple[Segment, ...]:
    """The runs that one group reserves for its content but does not use; in no slot."""
    return _joined(
        _run(canonical, ref, ref.page_size_bytes, ref.padded_size_bytes, 0)
        for ref in canonical.group_data_refs[group]
        if ref.page_size_bytes < ref.padded_size_bytes
    )


def reserved_of(canonical: CanonicalKVCaches, group: int) -> tuple[Segment, ...]:
    """The runs of one group's content and padding; in no slot."""
    return _joined(
        _run(canonical, ref, 0, ref.padded_size_bytes, 0)
        for ref in canonical.group_data_refs[group]
    )


def _run(
    canonical: CanonicalKVCaches, ref: CanonicalKVCacheRef, first: int, end: int, slot_offset: int
) -> Segment:
    tensor = canonical.tensors[ref.tensor_idx].tensor
    return Segment(
        storage=tensor.untyped_storage().data_ptr(),
        start=int(tensor.storage_offset()) + first,
        dims=(),
        row_bytes=end - first,
        block_stride=int(tensor.stride(0)),
        slot_offset=slot_offset,
    )


def _joined(parts: Iterable[Segment]) -> tuple[Segment, ...]:
    segments = list(parts)
    while len(shorter := _merge(segments)) < len(segments):
        segments = shorter
    return tuple(segments)


def split(segment: Segment, limit: int) -> Iterator[Segment]:
    """Cut a run into runs of at most `limit` bytes a block, in slot order."""
    if segment.nbytes <= limit:
        yield segment
        return
    count, distance = segment.dims[0] if segment.dims else (segment.row_bytes, 1)
    inner = segment.nbytes // count
    step = max(1, limit // inner)
    for first in range(0, count, step):
        taken = min(step, count - first)
        part = replace(
            segment,
            start=segment.start + first * distance,
            slot_offset=segment.slot_offset + first * inner,
        )
        if not segment.dims:
            yield replace(part, row_bytes=taken)
        elif taken > 1:
            yield replace(part, dims=((taken, distance), *segment.dims[1:]))
        else:
            yield from split(replace(part, dims=segment.dims[1:]), limit)


def _merge(segments: Sequence[Segment]) -> list[Segment]:
    """Join neighbours of the same shape that lie at one distance from each other."""
    merged: list[Segment] = []
    first = 0
    while first < len(segments):
        head = segments[first]
        end = first + 1
        distance = 0
        while end < len(segments) and _alike(head, segments[end]):
            gap = segments[end].start - segments[end - 1].start
            if gap <= 0 or (end > first + 1 and gap != distance):
                break
            distance = gap
            end += 1
        merged.append(_repeat(head, end - first, distance))
        first = end
    return merged


def _alike(one: Segment, other: Segment) -> bool:
    return (one.storage, one.dims, one.row_bytes, one.block_stride) == (
        other.storage,
        other.dims,
        other.row_bytes,
        other.block_stride,
    )


def _repeat(segment: Segment, count: int, distance: int) -> Segment:
    if count == 1:
        return segment
    if not segment.dims and distance == segment.row_bytes:
        return replace(segment, row_bytes=count * segment.row_bytes)
    if segment.dims and distance == segment.dims[0][0] * segment.dims[0][1]:
        inner, step = segment.dims[0]
        return replace(segment, dims=((count * inner, step), *segment.dims[1:]))
    return replace(segment, dims=((count, distance), *segment.dims))
