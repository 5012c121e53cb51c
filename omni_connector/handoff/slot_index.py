# SPDX-License-Identifier: Apache-2.0
"""Which slot holds the block of a key.

A prompt may have tens of thousands of blocks, and to look each of them up takes longer than an
engine's step may. But a key names all the blocks before it as well, as vLLM's hashes do. So where
two prompts have the same key at one place they have it at all places before; the slots of prompts
seen lately are kept in arrays, and what a new prompt has in common with one of them is taken as
a whole. And as a prefix is never evicted before what continues it, a look-up ends with the first
piece that lacks its last block.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

SlotKey = bytes
"""vLLM's block hash, within a cache group."""

Ints = NDArray[np.int64]

_PIECE: Final = 256
"""Blocks that are looked up at once. Shorter prompts are not kept as runs."""

_RUNS: Final = 16


@dataclass(slots=True, eq=False)
class _Run:
    group: int
    keys: Sequence[SlotKey | None]
    slots: Ints
    generations: Ints

    def common(self, keys: Sequence[SlotKey | None]) -> int:
        """With how many of its first keys others begin."""
        ours = self.keys
        return bisect_left(
            range(min(len(ours), len(keys))),
            True,
            key=lambda i: keys[i] is None or keys[i] != ours[i],
        )


class SlotIndex:
    """Finds slots by group and key. Its methods are called under the directory's lock.

    Args:
        generation: of each slot, int64; the directory's own array. What was named in an earlier
            generation of a slot is not found any more.

    Attributes:
        keyed: whether a slot is found by its key, while its generation is the one it was named
            in; (slots,) bool.
    """

    def __init__(self, generation: Ints) -> None:
        self._generation = generation
        self._num_slots = len(generation)
        self.keyed = np.zeros(self._num_slots, bool)
        # By group and key: generation and slot in one number. Those of an earlier generation are
        # left behind, and swept when they are many.
        self._by_key: dict[int, dict[SlotKey, int]] = {}
        self._runs: deque[_Run] = deque(maxlen=_RUNS)

    def find(self, group: int, keys: Sequence[SlotKey | None], first: int) -> Ints:
        """The slot of each of these blocks, -1 where there is none, or it was not looked for.

        Args:
            group: the cache group.
            keys: of its blocks, one after the other; None only where none follows with a key.
            first: logical index of the first of them.
        """
        found = np.full(len(keys), -1, np.int64)
        known = self._by_key.get(group)
        if not known or not keys or keys[0] is None:
            return found
        at = 0
        if first == 0:
            at = self._of_run(group, keys, found)
        while at < len(keys):
            piece = self._look_up(known, keys[at : at + _PIECE])
            found[at : at + len(piece)] = piece
            if first == 0 and piece[-1] < 0:
                break
            at += len(piece)
        return found

    def _of_run(self, group: int, keys: Sequence[SlotKey | None], found: Ints) -> int:
        """Find what a prompt seen lately has in common; how many blocks that is."""
        begin_alike = [each for each in self._runs if each.group == group]
        longest, run = max(
            ((each.common(keys), each) for each in begin_alike if each.keys[0] == keys[0]),
            key=lambda pair: pair[0],
            default=(0, None),
        )
        if run is None:
            return 0
        slots = run.slots[:longest]
        alive = (self._generation[slots] == run.generations[:longest]) & self.keyed[slots]
        count = longest if alive.all() else int(alive.argmin())
        found[:count] = slots[:count]
        return count

    def _look_up(self, known: dict[SlotKey, int], keys: Sequence[SlotKey | None]) -> Ints:
        packed = np.fromiter(map(known.get, keys, repeat(-1)), np.int64, len(keys))  # type: ignore[arg-type]
        slots = packed % self._num_slots
        alive = (self._generation[slots] == packed // self._num_slots) & self.keyed[slots]
        return np.where((packed >= 0) & alive, slots, -1)

    def remember(
        self,
        group: int,
        keys: Sequence[SlotKey | None],
        first: int,
        slots: Ints,
        generations: Ints,
    ) -> None:
        """Keep the slots of a prompt for those that begin like it; they may be named later.

        Args:
            group, keys, first: as for `find`; the keys do not change any more, nor do the arrays.
            slots, generations: of the blocks.
        """
        if first or len(keys) < _PIECE or keys[0] is None:
            return
        for run in self._runs:  # what it continues or repeats, it replaces
            last = len(run.keys) - 1 - (run.keys[-1] is None)
            if run.group == group and last < len(keys) and run.keys[last] == keys[last]:
                self._runs.remove(run)
                break
        self._runs.append(_Run(group, keys, slots, generations))

    def name(self, group: int, keys: Sequence[SlotKey | None], slots: Ints) -> None:
        """Have these slots found by their keys, but those whose key is None or finds another.

        Args:
            group: the cache group.
            keys: of the blocks, in any order.
            slots: of the blocks, in their present generations.
        """
        known = self._by_key.setdefault(group, {})
        new = (self._look_up(known, keys) < 0) & np.fromiter(
            (key is not None for key in keys), bool, len(keys)
        )
        if len(known) > 4 * self._num_slots:
            alive = self._look_up(known, list(known)) >= 0
            self._by_key[group] = known = dict(
                item for item, lives in zip(known.items(), alive.tolist(), strict=True) if lives
            )
        packed = (self._generation[slots] * self._num_slots + slots).tolist()
        for i in np.flatnonzero(new).tolist():
            key = keys[i]
            assert key is not None
            known[key] = packed[i]
        self.keyed[slots[new]] = True

    def clear(self) -> None:
        """Have nothing found any more."""
        self._by_key.clear()
        self._runs.clear()
        self.keyed[:] = False
