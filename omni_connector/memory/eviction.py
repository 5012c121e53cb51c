# SPDX-License-Identifier: Apache-2.0
"""Which of the cached slots are given to other blocks first.

Those go first that were used the longest ago, but one whose content was used again stays longer:
for as many more evictions as there are slots. So prompts that never come again take less room from
those that do. A block was used again, too, if it was evicted not long ago and is now copied anew.
Each use of a block is a use of all blocks before it; hence the end of a prefix goes before its
beginning, which with ARC or S3-FIFO it does not always. `benchmarks/results/eviction.md` compares
them.

Slots come and go by the prompt, so they are kept in batches of slots that were used together.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_SMALL: Final = 64
"""A batch of no more slots is joined by the next ones, as a batch of its own takes memory."""

_LOWER_HALF: Final = (1 << 32) - 1


@dataclass(slots=True, eq=False)
class _Batch:
    """Slots that were used together.

    Attributes:
        turn: the batch with the least goes first. It is the number of evictions before the use.
        numbers: of the slots, the first to go first. Those that have another stamp by now have left
            the batch.
        alive: how many have not left.
    """

    turn: int
    numbers: Ints
    alive: int


class EvictionOrder:
    """The cached slots of an arena, in the order in which they are evicted.

    Args:
        num_slots: of the arena.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._evicted = 0
        # Batches by stamp, the oldest first: of slots used once, and of those used again.
        self._batches: tuple[OrderedDict[int, _Batch], OrderedDict[int, _Batch]]
        self._batches = (OrderedDict(), OrderedDict())
        # Of each slot the stamp of its batch, 0 for none. Even ones are of slots used once.
        self._stamp: Ints = np.zeros(num_slots, np.int64)
        self._last_stamp = 2
        self._again = np.zeros(num_slots, bool)
        self._hash: Ints = np.zeros(num_slots, np.int64)
        # What was evicted, at places that the low bits of hashes name: the upper half of the hash,
        # and the lower half of the number of evictions then. A later one replaces an earlier one.
        places = 1 << (4 * num_slots - 1).bit_length()
        self._past: Ints = np.zeros(places, np.int64)

    def here(self, numbers: Ints) -> NDArray[np.bool_]:
        """Which of these slots are in the order."""
        here: NDArray[np.bool_] = self._stamp[numbers] > 0
        return here

    def clear(self) -> Ints:
        """Take every slot out of the order, and return them."""
        numbers = np.flatnonzero(self._stamp)
        self._stamp[numbers] = 0
        for queue in self._batches:
            queue.clear()
        return numbers

    def used_again(self, numbers: Ints) -> None:
        """Somebody else uses the content of these slots, too."""
        self._again[numbers] = True

    def fill(self, numbers: Ints, hashes: Ints) -> None:
        """These slots, which are not in the order, get the content of these hashes, of 64 bits.

        They come as in the prompt: if one was used before, so were those that come first.
        """
        self._hash[numbers] = hashes
        known = self.evicted_lately(hashes)
        # Without a block whose entry was overwritten, those after it would be of no use.
        self._again[numbers] |= np.logical_or.accumulate(known[::-1])[::-1]

    def evicted_lately(self, hashes: Ints) -> NDArray[np.bool_]:
        """Whether content of these hashes was among the last that were evicted, as many as there
        are slots, as far as that is remembered."""
        past = self._past[hashes & (len(self._past) - 1)]
        since = (self._evicted - past) & _LOWER_HALF
        known: NDArray[np.bool_] = ((past ^ hashes) >> 32 == 0) & (since <= self._num_slots)
        return known

    def unused(self, numbers: Ints) -> None:
        """The content of these slots, which are not in the order, is no longer of use."""
        self._again[numbers] = False

    def add(self, numbers: Ints) -> None:
        """The use of these slots, which are not in the order, has ended. Of those used once, and of
        those used again, the ones that come first here are evicted first."""
        again = self._again[numbers]
        for kind, part in enumerate((numbers[~again], numbers[again])):
            if len(part):
                self._append(kind, part)

    def _append(self, kind: int, numbers: Ints) -> None:
        queue = self._batches[kind]
        turn = self._evicted + kind * self._num_slots
        stamp, last = next(reversed(queue.items())) if queue else (0, None)
        if (
            last is not None
            and len(last.numbers) + len(numbers) <= _SMALL
            and turn - last.turn <= self._num_slots // 16
        ):
            last.numbers = np.concatenate([self._living(stamp, last), numbers])
            last.alive += len(numbers)
        else:
            self._last_stamp += 2
            stamp = self._last_stamp + kind
            queue[stamp] = _Batch(turn, numbers, len(numbers))
        self._stamp[numbers] = stamp

    def _living(self, stamp: int, batch: _Batch) -> Ints:
        if batch.alive == len(batch.numbers):
            return batch.numbers
        living: Ints = batch.numbers[self._stamp[batch.numbers] == stamp]
        return living

    def remove(self, numbers: Ints) -> None:
        """Take these slots, all of them different and in the order, out of it."""
        stamps = self._stamp[numbers]
        self._stamp[numbers] = 0
        at = np.flatnonzero(np.diff(stamps, prepend=-1))
        counts = np.diff(at, append=len(stamps))
        for stamp, count in zip(stamps[at].tolist(), counts.tolist(), strict=True):
            queue = self._batches[stamp % 2]
            batch = queue[stamp]
            batch.alive -= count
            if not batch.alive:
                del queue[stamp]
            elif 2 * batch.alive < len(batch.numbers):
                batch.numbers = self._living(stamp, batch)

    def evict(self, count: int) -> Ints:
        """Take so many slots out, those whose turn it is; there are as many."""
        self._evicted += count
        evicted: list[Ints] = []
        while count:
            queue = min((queue for queue in self._batches if queue), key=_first_turn)
            stamp, batch = next(iter(queue.items()))
            living = self._living(stamp, batch)
            gone, batch.numbers = living[:count], living[count:]
            batch.alive = len(batch.numbers)
            if not batch.alive:
                del queue[stamp]
            evicted.append(gone)
            count -= len(gone)
        numbers = np.concatenate(evicted)
        self._stamp[numbers] = 0
        self._again[numbers] = False
        hashes = self._hash[numbers]
        self._past[hashes & (len(self._past) - 1)] = (hashes & ~_LOWER_HALF) | (
            self._evicted & _LOWER_HALF
        )
        return numbers


def _first_turn(queue: OrderedDict[int, _Batch]) -> int:
    return next(iter(queue.values())).turn
