# SPDX-License-Identifier: Apache-2.0
"""What makes parts of slots checkable: the sums of each slot's checksum at the ends of its parts.

A slot has one checksum, xxh3 of all its bytes, which eight sums of 64 bits make stripe by stripe. A
reader that needs some pages goes on from the sums where these begin, and compares its own sums with
those where they end. So it reads nothing else of the slot. Who reads whole slots needs no sums.

The sums lie in the last slots of the arena, which hold no blocks: one row for each other slot, with
the generation that it belongs to, in 64 bytes, and then eight sums for each end that is not the
slot's. The owner writes a row before it publishes the slot, so a row is as good as the slot whose
generation it has. A published header, with a key that names this layout, shows that an arena has
sums. To engines that know none these are slots that nothing ever names.
"""

from dataclasses import dataclass
from typing import Final, Protocol, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.arena.format import SlotHeader
from omni_connector.errors import SlotPendingError, StaleSlotError

LEAST_SLOTS: Final = 64
"""Fewest slots of an arena that has sums: they take at least one slot."""

_GENERATION: Final = 1
_SUMS: Final = 8
_LINE: Final = 8 * _SUMS


@dataclass(frozen=True, slots=True)
class SumsLayout:
    """Where the sums lie in an arena.

    Attributes:
        num_slots: slots of the arena that hold blocks. The first one after them has the header.
        row_words: words of 64 bits of a row.
        slot_bytes: of the arena.
    """

    num_slots: int
    row_words: int
    slot_bytes: int

    @classmethod
    def of(cls, n_slots: int, slot_bytes: int, most_ends: int) -> "SumsLayout | None":
        """The layout in an arena; None where there are no sums.

        Args:
            n_slots, slot_bytes: of the arena.
            most_ends: most inner ends that a slot has.
        """
        if not most_ends or n_slots <= LEAST_SLOTS:
            return None
        row_bytes = 8 * _SUMS * (1 + most_ends)
        taken = -(-n_slots * row_bytes // (slot_bytes + row_bytes))
        return cls(n_slots - taken, row_bytes // 8, slot_bytes)

    @property
    def key(self) -> bytes:
        """What the header says."""
        return xxhash.xxh3_128_digest(b"part sums 1, %d words" % self.row_words)


class SumTable:
    """The rows of sums of an arena, as machine code writes them.

    Args:
        rows: uint64 `(slots, words)`, contiguous, at a multiple of 64 bytes.

    Attributes:
        num_slots: that have rows.
        address, stride: of the first row, and bytes from one to the next.
        places: of eight sums each, behind the 64 bytes that begin with the generation.

    Raises:
        ValueError: an array of another shape.
    """

    def __init__(self, rows: NDArray[np.uint64]) -> None:
        num_slots, words = rows.shape
        self._rows = rows  # whose memory this is
        self.num_slots = num_slots
        self.address = rows.ctypes.data
        self.stride = 8 * words
        self.places = words // _SUMS - 1
        if self.address % _LINE or self.stride % _LINE or not rows.flags.c_contiguous:
            raise ValueError(f"rows of sums {rows.shape} at {self.address:#x}")


class MappedArena(Protocol):
    """A peer's arena that is mapped; see `transports.RemoteArena`."""

    @property
    def slots(self) -> NDArray[np.uint8]:
        """The peer's bytes `(n_slots, slot_bytes)`."""

    def verify(self, slot: int, generation: int) -> SlotHeader:
        """The header of a slot that is published with this generation."""


class PartSums:
    """The sums of the slots of an arena.

    Args:
        arena: which stays its owner's.
        layout: where its sums lie.
    """

    def __init__(self, arena: MappedArena, layout: SumsLayout) -> None:
        self._arena = arena
        self._layout = layout
        self._table: SumTable | None = None

    @classmethod
    def create(cls, arena: Arena, layout: SumsLayout) -> Self:
        """Those of an own arena, whose slots from `layout.num_slots` on hold no blocks."""
        arena.begin_write(layout.num_slots, _GENERATION)
        arena.publish(layout.num_slots, _GENERATION, layout.key, 0, 0)
        return cls(arena, layout)

    @classmethod
    def found(cls, arena: MappedArena, layout: SumsLayout) -> Self | None:
        """Those of a peer's arena that is mapped; None if it has none."""
        try:
            header = arena.verify(layout.num_slots, _GENERATION)
        except (SlotPendingError, StaleSlotError):
            return None
        return cls(arena, layout) if header.key == layout.key else None

    def read(
        self, slots: NDArray[np.int64], generations: NDArray[np.int64], num_ends: int
    ) -> NDArray[np.uint64] | None:
        """The sums `(n, num_ends, 8)` of slots; None unless all have some in these generations.

        The slots have to be verified before and after.
        """
        known = self._layout.num_slots
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < known:
            return None
        rows = self.rows()[slots]
        if not np.array_equal(rows[:, 0], generations.astype(np.uint64)):
            return None
        return rows[:, _SUMS : _SUMS * (1 + num_ends)].reshape(len(slots), num_ends, _SUMS)

    @property
    def table(self) -> SumTable:
        """The rows, which the owner writes with `BlockCopy.sums`."""
        if self._table is None:
            self._table = SumTable(self.rows())
        return self._table

    def close(self) -> None:
        """Let go of the table, which keeps the arena's memory. Idempotent."""
        self._table = None

    def rows(self) -> NDArray[np.uint64]:
        """The rows `(slots, words)`. Who keeps them keeps the arena's memory."""
        layout = self._layout
        shape = layout.num_slots, layout.row_words
        first = layout.num_slots * layout.slot_bytes
        rows: NDArray[np.uint64] = np.ndarray(shape, np.uint64, self._arena.slots, first)
        return rows
