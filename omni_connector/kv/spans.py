# SPDX-License-Identifier: Apache-2.0
"""What a job copies: blocks of several groups, beside the chunks of blocks on its far side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK_ID: Final = 0
"""The block that vLLM puts in a table where there is none: never read, never written."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockSpans:
    """Consecutive blocks of a request, for each group of its KV cache.

    Args:
        block_ids: `(n,)`, the groups' blocks one group after the other; kept as a read-only copy.
        group_sizes: how many of them each group has.
        block_indices: for each group the index, in the request, of its first block.

    Raises:
        ValueError: the three disagree, or a number is negative; the message names the group.
    """

    block_ids: NDArray[np.int64]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        found = np.asarray(self.block_ids)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise ValueError(f"block ids are {found.dtype} of shape {found.shape}, not integers")
        if len(self.group_sizes) != len(self.block_indices):
            raise ValueError(
                f"{len(self.group_sizes)} group sizes, but {len(self.block_indices)} block indices"
            )
        for group, (size, index) in enumerate(
            zip(self.group_sizes, self.block_indices, strict=True)
        ):
            if size < 0:
                raise ValueError(f"group {group}: {size} blocks")
            if index < 0:
                raise ValueError(f"group {group}: first block has index {index}")
        if sum(self.group_sizes) != len(found):
            raise ValueError(
                f"group sizes {self.group_sizes} add up to {sum(self.group_sizes)}, "
                f"but there are {len(found)} blocks"
            )
        if (found < 0).any():
            raise ValueError(f"block {found.min()} is negative")
        kept = found.astype(np.int64)
        kept.setflags(write=False)
        object.__setattr__(self, "block_ids", kept)

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Sequence[int]]]) -> Self:
        """Spans of so many groups: the index of the first block, and the block ids, of each.

        They agree by being made so, and nothing is checked.
        """
        spans = cls.__new__(cls)
        ids = [block_id for _, block_ids in groups for block_id in block_ids]
        sizes = tuple(len(block_ids) for _, block_ids in groups)
        object.__setattr__(spans, "block_ids", np.array(ids, np.int64))
        object.__setattr__(spans, "group_sizes", sizes)
        object.__setattr__(spans, "block_indices", tuple(index for index, _ in groups))
        return spans

    @property
    def held(self) -> list[int]:
        """The blocks of all groups, without the null blocks."""
        held: list[int] = self.block_ids[self.block_ids != NULL_BLOCK_ID].tolist()
        return held

    def batches(self, limits: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield blocks that are copied at once: their group, and their places in `block_ids`.

        Null blocks, which stand for blocks that are not copied, are left out.

        Args:
            limits: for each group the most blocks of a batch.
        """
        start = 0
        for group, size in enumerate(self.group_sizes):
            places = start + np.flatnonzero(self.block_ids[start : start + size] != NULL_BLOCK_ID)
            start += size
            for first in range(0, len(places), limits[group]):
                yield group, places[first : first + limits[group]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TransferSpec:
    """What a job copies. Each kind of job adds where to, or where from.

    Attributes:
        fills_blocks: whether the blocks are written, not read.
        blocks: the KV blocks; a null block stands for one that is not copied.
        request_id: the request that waits for it; empty where none does.
    """

    fills_blocks: ClassVar[bool] = False

    blocks: BlockSpans
    request_id: str = ""

    def check(self, num_blocks: int, num_slots: int) -> None:
        """Refuse a job whose ids do not fit; copiers rely on that.

        Args:
            num_blocks: of the KV cache.
            num_slots: of this engine's own arena.

        Raises:
            IndexError: there is no such block or slot.
            ValueError: a block or slot would be written twice.
        """
        held = self.blocks.block_ids[self.blocks.block_ids != NULL_BLOCK_ID]
        check_ids(held, num_blocks, "block", written=self.fills_blocks)


def check_ids(ids: NDArray[np.int64], limit: int, what: str, *, written: bool) -> None:
    """Refuse ids that are not below `limit`, or of which one is written twice.

    Raises:
        IndexError: there is no such block or slot.
        ValueError: an id is there twice, and `written`.
    """
    outside = ids[(ids < 0) | (ids >= limit)]
    if outside.size:
        raise IndexError(f"{what} {outside[0]} of {limit}")
    if written:
        ordered = np.sort(ids)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        if again.size:
            raise ValueError(f"{what} {again[0]} is written twice")


class GroupSpan(NamedTuple):
    """One group's copies: block `block_ids[i]` beside place `places[i]` of chunk `chunk_ids[i]`.

    Each is int64 `(n,)`; a place counts blocks from the chunk's first.
    """

    block_ids: NDArray[np.int64]
    chunk_ids: NDArray[np.int64]
    places: NDArray[np.int64]


def expand(
    spans: BlockSpans,
    blocks_per_chunk: int | Sequence[int],
    chunk_ids: Sequence[NDArray[np.int64]],
) -> tuple[GroupSpan, ...]:
    """Find each block's chunk, and its place in it.

    Chunks start at multiples of `blocks_per_chunk` in the request, so a transfer may begin
    and end inside one.

    Args:
        spans: the blocks.
        blocks_per_chunk: blocks of one chunk; where groups differ (in their block sizes, say,
            beside chunks of as many tokens), of one chunk of each group.
        chunk_ids: for each group the chunks that its blocks lie in, in order; none for a
            group without blocks.

    Raises:
        ValueError: a group's chunks are too few or too many for its blocks; the message names
            the group.
    """
    if isinstance(blocks_per_chunk, int):
        per_chunk = (blocks_per_chunk,) * len(spans.group_sizes)
    else:
        per_chunk = tuple(blocks_per_chunk)
    if min(per_chunk, default=1) <= 0:
        raise ValueError(f"{blocks_per_chunk} blocks in a chunk")
    if len(per_chunk) != len(spans.group_sizes):
        raise ValueError(f"{len(spans.group_sizes)} groups, but chunks of {blocks_per_chunk}")
    if len(chunk_ids) != len(spans.group_sizes):
        raise ValueError(f"{len(spans.group_sizes)} groups, but chunks for {len(chunk_ids)}")
    expanded = []
    start = 0
    for group, (size, index) in enumerate(zip(spans.group_sizes, spans.block_indices, strict=True)):
        chunks = np.asarray(chunk_ids[group])
        if chunks.ndim != 1 or (chunks.size and chunks.dtype.kind not in "iu"):
            raise ValueError(
                f"group {group}: chunk ids are {chunks.dtype} of shape {chunks.shape}, not integers"
            )
        blocks = per_chunk[group]
        skip = index % blocks
        needed = -(-(size + skip) // blocks) if size else 0
        if len(chunks) != needed:
            raise ValueError(
                f"group {group}: {size} blocks from index {index} lie in {needed} chunks of "
                f"{blocks}, but {len(chunks)} are given"
            )
        places = np.arange(skip, skip + size, dtype=np.int64)
        expanded.append(
            GroupSpan(
                spans.block_ids[start : start + size],
                chunks.astype(np.int64)[places // blocks],
                places % blocks,
            )
        )
        start += size
    return tuple(expanded)
