# SPDX-License-Identifier: Apache-2.0
"""Where the slots of replicated KV lie: each in the arena of one rank, its owning rank.

All tensor-parallel ranks of an engine hold the same bytes of a latent cache (MLA). Where a model
has fewer KV heads than ranks, as many consecutive ranks hold the same head. One copy of a block is
enough for the ranks that hold the same bytes. Its slot lies in a stripe:

    slot           0  1  2  3  4  5  6
    owning rank    0  1  2  0  1  2  0     of 3 ranks that hold the same
    row            0  0  0  1  1  1  2     in the arena of that rank

The owning rank saves the block, and the ranks that hold the same load it from there. With 6 ranks
and 2 KV heads, ranks 0 to 2 have a copy of the first head, and ranks 3 to 5 one of the second: slot
1 lies in the arenas of ranks 1 and 4. Where each rank holds bytes of its own, there is one stripe:
a slot has the same number in the arena of every rank.

Some models have groups of both kinds: KV that ranks hold alike, beside recurrent states of which
each rank has its own. A block of the second kind is divided into *shards*, one for each stripe. A
shard has a slot of its own, which lies in the arena of the rank that has the bytes. With 3 stripes,
a block of KV and one of states:

    slot           0    1    2    3    4    5    6
    holds          KV        s2   s0   s1
    owning rank    0    1    2    0    1    2    0

So a state takes three slots, as many bytes as where each rank keeps all slots, and KV takes one.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class SlotGroup(NamedTuple):
    """Slots that are taken and read together: those of a cache group, or of one of its shards.

    Attributes:
        group: number of the cache group.
        stripe: the stripe that all of them lie in; None where they may lie in any.
    """

    group: int
    stripe: int | None = None


def is_divided(copies: int, shards: int) -> bool:
    """Whether the blocks of a cache group are divided into `shards` shards.

    Args:
        copies: how many consecutive ranks hold the same bytes; see `GroupShape.num_copies`.
        shards: of the blocks that are divided; 1 divides none.
    """
    return copies % shards > 0


def slot_groups_of(copies: Sequence[int], shards: int) -> tuple[SlotGroup, ...]:
    """The slot groups of an engine, in the order in which slots are leased.

    Args:
        copies: for each cache group, how many consecutive ranks hold the same bytes.
        shards: of the blocks that are divided; see `is_divided`.

    >>> [(each.group, each.stripe) for each in slot_groups_of([4, 1], 2)]
    [(0, None), (1, 0), (1, 1)]
    """
    found: list[SlotGroup] = []
    for group, number in enumerate(copies):
        if is_divided(number, shards):
            found += [SlotGroup(group, stripe) for stripe in range(shards)]
        else:
            found.append(SlotGroup(group))
    return tuple(found)


def slot_group_ranges(groups: Sequence[SlotGroup]) -> list[range]:
    """For each cache group the numbers of its slot groups.

    >>> slot_group_ranges(slot_groups_of([4, 1, 4], 2))
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    found: list[range] = []
    for number, each in enumerate(groups):
        if each.group == len(found):
            found.append(range(number, number + 1))
        else:
            found[-1] = range(found[-1].start, number + 1)
    return found


def owning_arenas(stage: int, rank: int, ranks: int, stripes: int) -> tuple[int, ...]:
    """The arenas that have the bytes of one rank: its slots are spread over them, in this order.

    Args:
        stage, rank: the pipeline stage, and the tensor-parallel rank in it.
        ranks: tensor-parallel size.
        stripes: ranks over which slots are spread; it divides `ranks`.

    Returns:
        Numbers of ranks, counted stage by stage.

    >>> owning_arenas(stage=0, rank=4, ranks=6, stripes=3)
    (3, 4, 5)
    """
    first = stage * ranks + rank - rank % stripes
    return tuple(range(first, first + stripes))


def by_stripe(slots: Ints, stripes: int) -> Iterator[tuple[int, Ints, Ints]]:
    """Divide slots by their owning ranks.

    Args:
        slots: slot numbers `(n,)`.
        stripes: ranks over which slots are spread.

    Yields:
        Each owning rank that has some: its number among the ranks that hold the same bytes, the
        positions of its slots in `slots`, and their rows in its arena.

    >>> [(rank, at.tolist(), rows.tolist()) for rank, at, rows in by_stripe(np.array([4, 3, 2]), 2)]
    [(0, [0, 2], [2, 1]), (1, [1], [1])]
    """
    if stripes == 1:
        if len(slots):
            yield 0, np.arange(len(slots)), slots
        return
    rows, owners = np.divmod(slots, stripes)
    for rank in range(stripes):
        at = np.flatnonzero(owners == rank)
        if len(at):
            yield rank, at, rows[at]


def of_stripe(slots: Ints, rank: int, stripes: int) -> tuple[NDArray[np.bool_], Ints]:
    """Which slots a rank owns, and the rows that slots have in the arenas of their owning ranks.

    Args:
        slots: slot numbers `(n,)`.
        rank: the owning rank, counted in its pipeline stage or stage by stage.
        stripes: ranks over which slots are spread.
    """
    rows, owners = np.divmod(slots, stripes)
    own: NDArray[np.bool_] = owners == rank % stripes
    return own, rows
