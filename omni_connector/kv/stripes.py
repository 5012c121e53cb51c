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
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


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
