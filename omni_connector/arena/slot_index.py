# SPDX-License-Identifier: Apache-2.0
"""The owner's index: which slot holds the block of a key, and which slots have changed.

A prompt may have tens of thousands of blocks; a look-up of each would take longer than a step may.
Two properties of keys make it fast:

- A key covers all blocks before its own, as vLLM's hashes do. Two prompts with the same key at one
  place have the same keys at all places before. So the index keeps the slots of recent prompts
  (runs) in arrays, and a new prompt takes its common beginning with one of them as a whole. In an
  arena of a million slots 32,768 blocks take 1 ms so, and 30 ms one by one.
- The end of a prefix is evicted before its beginning. So a look-up ends at the first missing block.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

SlotKey = bytes
"""vLLM's block hash, within a cache group."""

Ints = NDArray[np.int64]

_BATCH: Final = 256
"""Blocks looked up in one call. Shorter prompts need one call, so no run of them is kept."""

_RUNS: Final = 16
"""Recent prompts whose slots are kept. Each look-up compares its first key with all of theirs."""


@dataclass(slots=True, eq=False)
class _Run:
    group: int
    keys: Sequence[SlotKey | None]
    slots: Ints
    generations: Ints

    def common(self, keys: Sequence[SlotKey | None]) -> int:
        """Length of the common beginning of this run's keys and `keys`."""
        ours = self.keys
        return bisect_left(
            range(min(len(ours), len(keys))),
            True,
            key=lambda i: keys[i] is None or keys[i] != ours[i],
        )


class SlotIndex:
    """Finds slots by group and key. The caller holds the lock of the pool.

    Args:
        generation: (slots,) int64; the pool's own array.

    Attributes:
        keyed: (slots,) bool, whether a slot is found by its key. The caller clears it whenever a
            slot gets a new generation.
    """

    def __init__(self, generation: Ints) -> None:
        self._generation = generation
        self.keyed = np.zeros(len(generation), bool)
        # By group, the slot of each key. A slot of which `keyed` is cleared has lost its key.
        self._slots: defaultdict[int, dict[SlotKey | None, int]] = defaultdict(dict)
        # The group and key that each slot had last.
        self._names: list[tuple[int, SlotKey] | None] = [None] * len(generation)
        self._runs: deque[_Run] = deque(maxlen=_RUNS)

    def each(self, group: int, keys: Sequence[SlotKey | None]) -> Ints:
        """The slot of each of these blocks; -1 for a missing one."""
        found = np.fromiter(map(self._slots[group].get, keys, repeat(-1)), np.int64, len(keys))
        found[~self.keyed[found]] = -1
        return found

    def find(self, group: int, keys: Sequence[SlotKey | None], first: int) -> Ints:
        """The slot of each block; -1 for a missing block and, in a prompt, all blocks after one.

        Args:
            keys: of consecutive blocks of the group. The last one may be None.
            first: logical index of the first block. If it is not 0, each block is looked up.
        """
        found = np.full(len(keys), -1, np.int64)
        if not keys or keys[0] is None:
            return found
        at = 0 if first else self._of_run(group, keys, found)
        while at < len(keys):
            batch = self.each(group, keys[at : at + _BATCH])
            found[at : at + len(batch)] = batch
            if first == 0 and batch[-1] < 0:
                break
            at += len(batch)
        return found

    def _of_run(self, group: int, keys: Sequence[SlotKey | None], found: Ints) -> int:
        """Fill in the slots of the common beginning with a recent prompt; returns its length."""
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
        """Keep the slots of a prompt as a run. They are found by it once `name` has named them.

        The arguments are as for `find`, and must not be changed afterwards.
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
        """Enter slots under their keys, except if a key is None or has another slot already.

        Args:
            keys, slots: of blocks, in any order; slots in their present generations.

        Raises:
            IndexError: there is no such slot.
        """
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(self.keyed):
            raise IndexError(f"slots from {slots.min()} to {slots.max()}, of {len(self.keyed)}")
        of_group = self._slots[group]
        keyed = memoryview(self.keyed.data)  # faster than numpy for single slots
        for key, slot in zip(keys, slots.tolist(), strict=True):
            there = of_group.get(key, -1)
            if key is None or (there >= 0 and keyed[there]):
                continue
            if (former := self._names[slot]) is not None:
                of_former = self._slots[former[0]]
                if of_former.get(former[1]) == slot:
                    del of_former[former[1]]
            of_group[key] = slot
            self._names[slot] = (group, key)
            keyed[slot] = True

    def clear(self) -> None:
        """Forget all keys."""
        self._runs.clear()
        self.keyed[:] = False


class SlotChanges:
    """Records which slots were listed for peers, or unlisted, since the last `take`.

    Only the latest state of a slot is kept: a block listed and unlisted in between does not show.
    The caller holds the lock of the pool.

    Args:
        num_slots: of the arena.
    """

    def __init__(self, num_slots: int) -> None:
        self._names: list[tuple[int, SlotKey] | None] = [None] * num_slots
        self._shown: dict[int, bool] = {}  # by slot that has changed, whether it is listed now
        self._hidden: set[tuple[int, SlotKey] | None] = set()
        self._cleared = False

    def name(self, group: int, keys: Sequence[SlotKey | None], slots: Ints) -> None:
        """Set the blocks that these slots will hold."""
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self._names[slot] = None if key is None else (group, key)

    def show(self, slots: Ints, shown: bool) -> None:
        """These slots are listed now, or unlisted."""
        slot_ids = slots.tolist()
        self._shown.update(dict.fromkeys(slot_ids, shown))
        if not shown:
            self._hidden.update(self._names[slot] for slot in slot_ids)

    def clear(self) -> None:
        """All slots were unlisted."""
        self._shown.clear()
        self._cleared = True

    def lost(self, group: int, key: SlotKey) -> bool:
        """Whether this block may have been unlisted since the last `take`, if only for a while."""
        return self._cleared or (group, key) in self._hidden

    def take(self) -> tuple[bool, dict[int, tuple[int, SlotKey] | None]]:
        """The changes since the last call.

        Returns:
            (whether all slots were unlisted since, the slots that have changed after that). A slot
            has the group and key of the block that it is listed with now, or None.
        """
        cleared = self._cleared
        changed = self._shown
        self._cleared = False
        self._shown = {}
        self._hidden.clear()
        return cleared, {s: self._names[s] if shown else None for s, shown in changed.items()}
