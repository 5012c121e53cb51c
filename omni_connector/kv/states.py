# SPDX-License-Identifier: Apache-2.0
"""How tensor-parallel ranks share out a recurrent state, and a state made from other ranks' states.

A state is one tensor or several, one after the other. Each is a number of equal rows, and a row is
a few parts side by side, such as query, key and value of a convolution. Ranks share out each part
by itself, so that a rank's bytes of a row are not consecutive in a row of the whole model:

    whole model   q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 v4 v5 v6 v7
    rank 1 of 2         q2 q3 |       k2 k3 |             v4 v5 v6 v7
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from omni_connector.errors import LayoutError
from omni_connector.kv.heads import HeadSlice, head_sources

_Text = Annotated[str, Meta(max_length=64)]
_Size = Annotated[int, Meta(ge=1, lt=1 << 31)]


class StatePart(msgspec.Struct, frozen=True):
    """Consecutive units of each row of a tensor, which ranks share out among them.

    Attributes:
        name: what they are, such as `key`.
        total: units of the whole model. Each of n ranks has total / n consecutive ones, or, with
            fewer units than ranks, the one that it shares with its neighbours.
        units: of one rank.
        unit_bytes: bytes of a unit.
    """

    name: _Text
    total: _Size
    units: _Size
    unit_bytes: _Size

    @property
    def nbytes(self) -> int:
        """Bytes of the part in one row of a rank."""
        return self.units * self.unit_bytes


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor of a state.

    Attributes:
        dtype: of its numbers.
        rows: how many rows it has; as many on each rank.
        parts: of a row, in their order.
    """

    dtype: _Text
    rows: _Size
    parts: Annotated[tuple[StatePart, ...], Meta(min_length=1, max_length=8)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of one rank."""
        return sum(part.nbytes for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor of one rank."""
        return self.rows * self.row_bytes


StateCut = tuple[StateTensor, ...]
"""The tensors of a state, in their order."""


def cut_bytes(cut: StateCut) -> int:
    """Bytes of the state of one rank."""
    return sum(tensor.nbytes for tensor in cut)


def state_units(part: StatePart, ranks: int) -> int | None:
    """Units of a part that each rank has of `ranks`; None if they cannot be divided evenly."""
    if part.total % ranks and ranks % part.total:
        return None
    return max(1, part.total // ranks)


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal pieces at equal distances, from one page to another.

    Attributes:
        source, target: where the first piece begins.
        source_step, target_step: bytes from one piece to the next.
        count, size: pieces, and bytes of each.
    """

    source: int
    source_step: int
    target: int
    target_step: int
    count: int
    size: int


class StateSlices:
    """What one rank of a peer has of our states, and where it belongs in our slots.

    Has the methods of `SlotConverter` that a load uses.

    Args:
        runs: the pieces of one page.
        pages: for each layer where its page begins, in the peer's slots and in ours.
        source_bytes: bytes of one block in a slot of the peer's.
    """

    def __init__(
        self, runs: Sequence[_Run], pages: Sequence[tuple[int, int]], source_bytes: int
    ) -> None:
        self._runs = tuple(runs)
        self._pages = tuple(pages)
        self.source_bytes = source_bytes

    def copy(
        self,
        source: NDArray[np.uint8],
        source_block: int,
        target: NDArray[np.uint8],
        target_block: int,
        heads: Sequence[HeadSlice],
        *,
        end_token: int,
    ) -> None:
        """Copy what the peer's slot has of ours; other bytes of `target` stay.

        Args:
            source: `(n,)`, the peer's slot.
            target: `(n,)`, contiguous and writable, our slot.
            source_block, target_block, heads, end_token: of no meaning here, as a state belongs to
                no block in particular.
        """
        for begin, to in self._pages:
            for run in self._runs:
                _pieces(target, to + run.target, run.target_step, run)[:] = _pieces(
                    source, begin + run.source, run.source_step, run
                )


def _pieces(slot: NDArray[np.uint8], first: int, step: int, run: _Run) -> NDArray[np.uint8]:
    """`(count, size)`, a view of a slot."""
    part = slot[first : first + (run.count - 1) * step + run.size]
    if len(part) != (run.count - 1) * step + run.size:
        raise ValueError(f"a slot of {len(slot)} bytes has no piece at {first} of {run}")
    return as_strided(part, (run.count, run.size), (step, 1))


def state_sources(
    source: StateCut,
    source_ranks: int,
    target: StateCut,
    target_rank: int,
    target_ranks: int,
    *,
    pages: Sequence[tuple[int, int]] = ((0, 0),),
    source_bytes: int = 0,
) -> dict[int, StateSlices]:
    """Find the ranks of a peer that have the state of one of our ranks.

    Args:
        source, target: how the two engines cut their states.
        source_ranks, target_ranks: their tensor-parallel sizes.
        target_rank: which of ours.
        pages, source_bytes: see `StateSlices`.

    Returns:
        What each of these ranks has.

    Raises:
        LayoutError: the states are not the same, or ranks share them out in another way.
    """
    if len(source) != len(target):
        raise LayoutError(f"states of {len(source)} tensors and of {len(target)}")
    found: dict[int, list[_Run]] = {}
    shared: list[tuple[int, _Run, range]] = []  # first of the ranks that have the same, and all
    ours = theirs = 0  # where the tensor begins
    for here, there in zip(source, target, strict=True):
        _require_same(here, there)
        at = from_part = 0
        for part, own in zip(here.parts, there.parts, strict=True):
            for ranks, each in ((source_ranks, part), (target_ranks, own)):
                if state_units(each, ranks) != each.units:
                    raise LayoutError(
                        f"{each.units} of {each.total} units of {each.name} on each of {ranks} "
                        "ranks"
                    )
            copies = max(1, source_ranks // part.total)
            for rank, piece in head_sources(
                total=part.total,
                source_heads=part.units,
                source_ranks=source_ranks,
                target_heads=own.units,
                target_rank=target_rank,
                target_ranks=target_ranks,
            ):
                run = _Run(
                    theirs + from_part + piece.source * part.unit_bytes,
                    here.row_bytes,
                    ours + at + piece.target * own.unit_bytes,
                    there.row_bytes,
                    here.rows,
                    piece.count * part.unit_bytes,
                )
                if copies == 1:
                    found.setdefault(rank, []).append(run)
                else:
                    first = rank // copies * copies
                    shared.append((rank, run, range(first, first + copies)))
            from_part += part.nbytes
            at += own.nbytes
        theirs += here.nbytes
        ours += there.nbytes
    for rank, run, holders in shared:
        # Of the ranks that have it one that is read in any case, so that no slot more is.
        found.setdefault(next((each for each in holders if each in found), rank), []).append(run)
    return {rank: StateSlices(runs, pages, source_bytes) for rank, runs in sorted(found.items())}


def _require_same(one: StateTensor, other: StateTensor) -> None:
    told = [
        (each.dtype, each.rows, [(part.name, part.total, part.unit_bytes) for part in each.parts])
        for each in (one, other)
    ]
    if told[0] != told[1]:
        raise LayoutError(f"states of other tensors: {told[0]} and {told[1]}")
