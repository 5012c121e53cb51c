# SPDX-License-Identifier: Apache-2.0
"""Where the slots of replicated KV lie: each in the arena of one rank, its owning rank.

The tensor-parallel ranks of an engine hold the same bytes of a latent cache (MLA). So one copy of a
block is enough for all of them. Its slot lies in a stripe:

    slot           0  1  2  3  4  5  6
    owning rank    0  1  2  0  1  2  0     of 3 ranks
    row            0  0  0  1  1  1  2     in the arena of that rank

The owning rank saves the block, and every rank loads it from there. Where each rank holds bytes of
its own, there is one stripe: a slot has the same number in the arena of every rank.
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
        stripes: ranks over which slots are spread: `ranks` or 1.

    Returns:
        Numbers of ranks, counted stage by stage.
    """
    first = stage * ranks
    return tuple(range(first, first + stripes)) if stripes > 1 else (first + rank,)


def by_stripe(slots: Ints, stripes: int) -> Iterator[tuple[int, Ints, Ints]]:
    """Divide slots by their owning ranks.

    Args:
        slots: slot numbers `(n,)`.
        stripes: ranks over which slots are spread.

    Yields:
        Each owning rank that has some: its number in the pipeline stage, the positions of its slots
        in `slots`, and their rows in its arena.

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
        rank: of the owning rank, in its pipeline stage.
        stripes: ranks over which slots are spread.
    """
    rows, owners = np.divmod(slots, stripes)
    own: NDArray[np.bool_] = owners == rank % stripes
    return own, rows
