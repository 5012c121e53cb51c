# SPDX-License-Identifier: Apache-2.0
"""The bytes of a block as few regular segments, each copied in one call."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of contiguous bytes at regular distances, packed one after the other in a slot.

    Args:
        storage: address of the storage that holds them.
        start: bytes from the storage's first to this segment's first, in block 0.
        dims: (count, distance in bytes) of the rows, slowest first; empty for one row.
        row_bytes: bytes of one row.
        padded_bytes: bytes that are reserved for one row, at least `row_bytes`.
        block_stride: bytes from one block to the next.
        slot_offset: bytes from the slot's first to this segment's first.
    """

    storage: int
    start: int
    dims: tuple[tuple[int, int], ...]
    row_bytes: int
    padded_bytes: int
    block_stride: int
    slot_offset: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows along each of `dims`."""
        return tuple(count for count, _ in self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.row_bytes * prod(self.counts)

    @property
    def row_starts(self) -> Iterator[int]:
        """Bytes from the storage's first to each row's first, in block 0 and in slot order."""
        for offsets in product(*(range(0, count * step, step) for count, step in self.dims)):
            yield self.start + sum(offsets)


def packed(
    dims: Sequence[tuple[int, int]], row_bytes: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """The same rows with as few dimensions as possible: (dims, row_bytes).

    Args:
        dims: (count, distance in bytes) of the rows, slowest first.
        row_bytes: bytes of one row.
    """
    kept: list[tuple[int, int]] = []
    for count, distance in reversed(dims):
        if not kept and distance == row_bytes:
            row_bytes *= count
        elif kept and distance == kept[-1][0] * kept[-1][1]:
            kept[-1] = count * kept[-1][0], kept[-1][1]
        else:
            kept.append((count, distance))
    return tuple(reversed(kept)), row_bytes


def content_of(pages: Iterable[Segment]) -> list[Segment]:
    """The segments of one group's content, in slot order, given its pages."""
    return _joined(replace(page, padded_bytes=page.row_bytes) for page in pages)


def padding_of(pages: Iterable[Segment]) -> list[Segment]:
    """The segments that one group reserves for its content but does not use; in no slot."""
    return _joined(
        _bytes_of(page, page.row_bytes, page.padded_bytes)
        for page in pages
        if page.row_bytes < page.padded_bytes
    )


def reserved_of(pages: Iterable[Segment]) -> list[Segment]:
    """The segments of one group's content and padding; in no slot."""
    return _joined(_bytes_of(page, 0, page.padded_bytes) for page in pages)


def _bytes_of(page: Segment, first: int, end: int) -> Segment:
    """Some bytes of each row."""
    size = end - first
    return replace(page, start=page.start + first, row_bytes=size, padded_bytes=size, slot_offset=0)


def _joined(parts: Iterable[Segment]) -> list[Segment]:
    """Join the segments of pages that follow one another in slots."""
    segments = list(parts)
    while len(shorter := _merge(segments)) < len(segments):
        segments = shorter
    return segments


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
        if end > first + 1:
            dims, row_bytes = packed([(end - first, distance), *head.dims], head.row_bytes)
            head = replace(head, dims=dims, row_bytes=row_bytes, padded_bytes=row_bytes)
        merged.append(head)
        first = end
    return merged


def _alike(one: Segment, other: Segment) -> bool:
    return (one.storage, one.dims, one.row_bytes, one.block_stride) == (
        other.storage,
        other.dims,
        other.row_bytes,
        other.block_stride,
    )
