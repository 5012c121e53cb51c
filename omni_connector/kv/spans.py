# SPDX-License-Identifier: Apache-2.0
"""What a job copies: consecutive blocks of a request, in each of its cache groups."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from omni_connector.kv.shapes import GroupShape

NULL_BLOCK_ID: Final = 0
"""The block that vLLM puts in a table where there is none: never read, never written."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockSpans:
    """Consecutive blocks of a request, for each group of its KV cache.

    Attributes:
        block_ids: int64 `(n,)`, the groups' blocks one group after the other.
        group_sizes: how many of them each group has.
        block_indices: for each group the index, in the request, of its first block.
    """

    block_ids: NDArray[np.int64]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Sequence[int] | NDArray[np.int64]]]) -> Self:
        """Spans of groups, each given by the index of its first block and its block ids."""
        ids = [np.asarray(block_ids, np.int64) for _, block_ids in groups]
        return cls(
            np.concatenate([np.empty(0, np.int64), *ids]),
            tuple(map(len, ids)),
            tuple(index for index, _ in groups),
        )

    @property
    def held(self) -> list[int]:
        """The blocks of all groups, without the null blocks."""
        held: list[int] = self.block_ids[self.block_ids != NULL_BLOCK_ID].tolist()
        return held

    def groups(self) -> Iterator[tuple[int, slice]]:
        """Yield for each group the index of its first block, and its part of `block_ids`."""
        start = 0
        for index, size in zip(self.block_indices, self.group_sizes, strict=True):
            yield index, slice(start, start + size)
            start += size

    def batches(self, limits: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield blocks that are copied at once: their group, and their places in `block_ids`.

        Null blocks, which stand for blocks that are not copied, are left out.

        Args:
            limits: for each group the most blocks of a batch.
        """
        for group, (_, own) in enumerate(self.groups()):
            places = own.start + np.flatnonzero(self.block_ids[own] != NULL_BLOCK_ID)
            for first in range(0, len(places), limits[group]):
                yield group, places[first : first + limits[group]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TransferSpec:
    """What a job copies. Each kind of job adds where to, or where from.

    Attributes:
        fills_blocks: whether the blocks are written, not read.
        background: whether nobody waits for it, so that it steps back for other jobs.
        span: the name of its spans in a trace.
        timed_as, counted_as: what its seconds, and its bytes and blocks, are counted as; empty
            where they are not.
        blocks: the KV blocks; a null block stands for one that is not copied.
        request_id: the request that waits for it; empty where none does.
    """

    fills_blocks: ClassVar[bool] = False
    background: ClassVar[bool] = False
    span: ClassVar[str]
    timed_as: ClassVar[str] = ""
    counted_as: ClassVar[str] = ""

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
    """Refuse ids that are not below `limit`, or an id that is written twice.

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


def shares(tokens: int, parts: Sequence[BlockSpans]) -> list[int]:
    """Divide the loaded tokens among the parts that bring them."""
    if len(parts) < 2:
        return [tokens] * len(parts)
    # By the blocks of the group that loads most: one that keeps a window loads few.
    ends = [np.cumsum(part.group_sizes)[:-1] for part in parts]
    counts = np.array(
        [
            [np.count_nonzero(ids) for ids in np.split(part.block_ids, end)]
            for part, end in zip(parts, ends, strict=True)
        ]
    )
    most = counts[:, counts.sum(axis=0).argmax()]
    upto = np.cumsum(most) * tokens // most.sum()
    parted: list[int] = np.diff(upto, prepend=0).tolist()
    return parted


def whole_blocks(
    shape: GroupShape,
    block_ids: list[int],
    hashes: Sequence[bytes],
    finds: Callable[[Sequence[int], Sequence[bytes]], Sequence[bool]],
) -> list[int]:
    """Blocks of a group that hold what their hashes name, with null blocks for the others.

    The first block of a window may have been handed off in part; see `HandoffReceiver.incomplete`.
    A step that computes several blocks of tokens leaves the state of its last token only, and that
    lies at the end of a block only where vLLM let the step end there. vLLM gives a block of a state
    its hash where both are so, and from then on writes the states of later tokens to other blocks.

    Args:
        shape: of the group.
        block_ids: consecutive blocks of a request, which the step has filled.
        hashes: of the tokens up to the end of each.
        finds: says of each of some blocks whether vLLM's own prefix cache finds it by its hash.
    """
    if shape.attention_type == "all":
        return block_ids
    found = zip(block_ids, finds(block_ids, hashes), strict=True)
    return [block_id if there else NULL_BLOCK_ID for block_id, there in found]
