# SPDX-License-Identifier: Apache-2.0
"""Which slot holds the block of a key, and which slots hold other blocks than before.

A prompt may have tens of thousands of blocks, and to look up each would take longer than a step of
the engine may. But a key names all blocks before its own too, as vLLM's hashes do: two prompts with
the same key at one place have the same keys at all places before. So the index keeps the slots of
recent prompts in arrays, and takes what a new prompt has in common with one of them as a whole. And
as a prefix is not evicted before what continues it, a look-up ends at the first missing block.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.row_table import row_table, rows_of

SlotKey = bytes
"""vLLM's block hash, within a cache group."""

Ints = NDArray[np.int64]

_BATCH: Final = 256
"""Blocks that are looked up at once. No run is kept of shorter prompts."""

_RUNS: Final = 16


@dataclass(slots=True, eq=False)
class _Run:
    group: int
    keys: Sequence[SlotKey | None]
    slots: Ints
    generations: Ints

    def common(self, keys: Sequence[SlotKey | None]) -> int:
        """How many keys at its beginning are also those at the beginning of `keys`."""
        ours = self.keys
        return bisect_left(
            range(min(len(ours), len(keys))),
            True,
            key=lambda i: keys[i] is None or keys[i] != ours[i],
        )


class SlotIndex:
    """Finds slots by group and key. The caller holds the directory's lock.

    Args:
        generation: of each slot, int64; the directory's own array.

    Attributes:
        keyed: whether a slot is found by its key; (slots,) bool. With each new generation of a slot
            the caller makes it false.
    """

    def __init__(self, generation: Ints) -> None:
        self._generation = generation
        self.keyed = np.zeros(len(generation), bool)
        self._table = row_table(self.keyed)
        self._runs: deque[_Run] = deque(maxlen=_RUNS)

    def find(self, group: int, keys: Sequence[SlotKey | None], first: int) -> Ints:
        """The slot of each of these blocks, -1 where there is none, or none was looked for.

        Args:
            keys: of consecutive blocks of the group. One may be None, if no key follows it.
            first: logical index of the first of them.
        """
        found = np.full(len(keys), -1, np.int64)
        if not keys or keys[0] is None:
            return found
        at = 0 if first else self._of_run(group, keys, found)
        while at < len(keys):
            batch = self._table.find(rows_of(group, keys[at : at + _BATCH]))
            found[at : at + len(batch)] = batch
            if first == 0 and batch[-1] < 0:
                break
            at += len(batch)
        return found

    def _of_run(self, group: int, keys: Sequence[SlotKey | None], found: Ints) -> int:
        """Find the blocks that a recent prompt has in common; returns how many they are."""
        alike = [each for each in self._runs if (each.group, each.keys[0]) == (group, keys[0])]
        if not alike:
            return 0
        longest, run = max(((each.common(keys), each) for each in alike), key=itemgetter(0))
        slots = run.slots[:longest]
        alive = (self._generation[slots] == run.generations[:longest]) & self.keyed[slots]
        count = longest if alive.all() else int(alive.argmin())
        found[:count] = slots[:count]
        return count

    def remember(
        self, group: int, keys: Sequence[SlotKey | None], first: int, slots: Ints, generations: Ints
    ) -> None:
        """Keep the slots of a prompt for others that begin like it; they may be named later.

        The arguments are as for `find`, and the caller does not change them any more.
        """
        if first or len(keys) < _BATCH or keys[0] is None:
            return
        for run in self._runs:  # the new run replaces one that it continues or repeats
            last = len(run.keys) - 1 - (run.keys[-1] is None)
            if run.group == group and last < len(keys) and run.keys[last] == keys[last]:
                self._runs.remove(run)
                break
        self._runs.append(_Run(group, keys, slots, generations))

    def name(self, group: int, keys: Sequence[SlotKey | None], slots: Ints) -> None:
        """Let these slots be found by their keys, except where a key is None or finds another slot.

        Args:
            keys, slots: of blocks of the group, in any order; slots in their present generations.
        """
        self._table.name(rows_of(group, keys), slots)

    def clear(self) -> None:
        """Forget all keys."""
        self._runs.clear()
        self.keyed[:] = False


class SlotChanges:
    """In which slots peers find other blocks than when one asked last. The caller holds the lock of
    the pool.

    Only the latest state of a slot is kept, so whoever asks seldom learns less, but nothing wrong.

    Args:
        num_slots: of the arena.
    """

    def __init__(self, num_slots: int) -> None:
        self._names: list[tuple[int, SlotKey] | None] = [None] * num_slots
        self._shown: dict[int, bool] = {}  # of the slots that have changed
        self._hidden: set[tuple[int, SlotKey] | None] = set()
        self._cleared = False

    def name(self, group: int, keys: Sequence[SlotKey | None], slots: Ints) -> None:
        """These slots will hold these blocks."""
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self._names[slot] = None if key is None else (group, key)

    def show(self, slots: Ints, shown: bool) -> None:
        """Peers find these slots from now on, or find them no more."""
        numbers = slots.tolist()
        self._shown.update(dict.fromkeys(numbers, shown))
        if not shown:
            self._hidden.update(self._names[slot] for slot in numbers)

    def clear(self) -> None:
        """Peers find nothing any more."""
        self._shown.clear()
        self._cleared = True

    def lost(self, group: int, key: SlotKey) -> bool:
        """Whether peers may have found this block no more at some time since one asked last."""
        return self._cleared or (group, key) in self._hidden

    def take(self) -> tuple[bool, dict[int, tuple[int, SlotKey] | None]]:
        """Whether nothing was found any more at some time since the last call; and, since that time
        or the last call, the slots that have changed, with group and key of the block that peers
        find in each now, or None."""
        cleared, self._cleared = self._cleared, False
        self._hidden.clear()
        changed, self._shown = self._shown, {}
        return cleared, {s: self._names[s] if shown else None for s, shown in changed.items()}
