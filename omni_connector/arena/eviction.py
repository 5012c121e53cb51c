# SPDX-License-Identifier: Apache-2.0
"""Which of the cached slots are given to other blocks first.

Those go first that were used the longest ago, but one whose content was used again stays longer:
for as many more evictions as there are slots. So prompts that never come again take less room from
those that do. A block was used again, too, if it was evicted not long ago and is now copied anew.
Favoured slots stay for four times as many evictions, so that they too go some day if nobody uses
them. Pinned slots are never evicted.
Each use of a block is a use of all blocks before it; hence the end of a prefix goes before its
beginning, which with ARC or S3-FIFO it does not always. `benchmarks/results/eviction.md` compares
them. Blocks that were copied in several steps are put into that order when their request is over.

Where prompts hardly ever come again, copying them is of no use. So new blocks that would take the
slots of others may be passed over: they get slots when they are seen for the second time.

Slots come and go by the prompt, so they are kept in batches of slots that were used together.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.config import Admission

Ints = NDArray[np.int64]

_SMALL: Final = 64
"""A batch of no more slots is joined by the next ones, as a batch of its own takes memory."""

_LOWER_HALF: Final = (1 << 32) - 1

# Admission is `auto`: where fewer than one in so many new blocks are used again, they are admitted
# only at the second hit.
_WORTH: Final = 32

# Slots are used once, used again, favoured or pinned. Those of one kind stay for so many times as
# many evictions as there are slots.
_KINDS: Final = 4
_PINNED: Final = 3
_STAY: Final = (0, 1, 4, 4)


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
    numbers: NDArray[np.int32]
    alive: int


class EvictionOrder:
    """The cached slots of an arena, in the order in which they are evicted.

    Args:
        num_slots: of the arena.

    Attributes:
        pinned: which slots are pinned, in the order or not; (slots,) bool.
        num_pinned: slots in the order that are pinned.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._evicted = 0
        # For each kind of slots their batches by stamp, the oldest first.
        self._batches: tuple[OrderedDict[int, _Batch], ...]
        self._batches = tuple(OrderedDict() for _ in range(_KINDS))
        # Of each slot the stamp of its batch, 0 for none. Modulo `_KINDS` it is the kind.
        self._stamp: Ints = np.zeros(num_slots, np.int64)
        self._last_stamp = 0
        self._again = np.zeros(num_slots, bool)
        self._favoured = np.zeros(num_slots, bool)
        self.pinned = np.zeros(num_slots, bool)
        self.num_pinned = 0
        self._hash: Ints = np.zeros(num_slots, np.int64)
        # What was evicted, at the place that its hash modulo their number names: the upper half of
        # the hash, and the lower half of the number of evictions then. A later one replaces an
        # earlier one.
        self._past: Ints = np.zeros(2 * num_slots, np.int64)
        # How much content was new, and how much was used again. Both are halved when as much was
        # new as there are slots.
        self._new = self._used_again = 0

    def here(self, numbers: Ints) -> NDArray[np.bool_]:
        """Which of these slots are in the order."""
        here: NDArray[np.bool_] = self._stamp[numbers] > 0
        return here

    def clear(self) -> Ints:
        """Take every slot out of the order, and return them. No slot is pinned any more."""
        numbers = np.flatnonzero(self._stamp)
        self._stamp[numbers] = 0
        for queue in self._batches:
            queue.clear()
        self.pinned[:] = False
        self.num_pinned = 0
        return numbers

    def used_again(self, numbers: Ints) -> None:
        """Somebody else uses the content of these slots, too."""
        self._used_again += int(np.count_nonzero(~self._again[numbers]))
        self._again[numbers] = True

    def favour(self, numbers: Ints) -> None:
        """The content of these slots shall stay longer than other content."""
        self._favoured[numbers] = True
        self._move(numbers)

    def pin(self, numbers: Ints, pinned: bool) -> None:
        """From now on these slots are pinned, or are not."""
        self.pinned[numbers] = pinned
        self._move(numbers)

    def privileged(self, numbers: Ints) -> NDArray[np.bool_]:
        """Which of these slots are favoured or pinned."""
        privileged: NDArray[np.bool_] = self._favoured[numbers] | self.pinned[numbers]
        return privileged

    def requeue(self, numbers: Ints) -> None:
        """Those of these slots that are in the order, and not pinned, have been used until now.
        That is no other use of theirs."""
        self._move(numbers[~self.pinned[numbers]])

    def _move(self, numbers: Ints) -> None:
        here = numbers[self.here(numbers)]
        # Batch by batch: `remove` takes its time for each change of the batch.
        self.remove(here[np.argsort(self._stamp[here], kind="stable")])
        self.add(here)

    def fill(self, numbers: Ints, hashes: Ints, prompts: Ints | None = None) -> None:
        """These slots, which are not in the order, get the content of these hashes, of 64 bits.

        They come as in their prompts: if one was used before, so were those of its prompt that come
        first.

        Args:
            prompts: a small number for the prompt of each; None where all are of one.
        """
        self._hash[numbers] = hashes
        known = self._known(hashes, prompts)
        self._again[numbers] |= known
        self._count(int(np.count_nonzero(~known)), int(np.count_nonzero(known)))

    def admits(
        self, hashes: Ints, admission: Admission, prompts: Ints | None = None
    ) -> NDArray[np.bool_]:
        """Which contents of these hashes, which come as for `fill`, are worth a slot. Those that
        are not are remembered as if they had been evicted."""
        rarely_again = self._used_again * _WORTH < self._new
        if admission == "all" or (admission == "auto" and not rarely_again):
            return np.ones(len(hashes), bool)
        known = self._known(hashes, prompts)
        self._remember(hashes[~known])
        self._count(int(np.count_nonzero(~known)), 0)
        return known

    def _count(self, new: int, again: int) -> None:
        self._new += new
        self._used_again += again
        if self._new > self._num_slots:
            self._new //= 2
            self._used_again //= 2

    def _known(self, hashes: Ints, prompts: Ints | None) -> NDArray[np.bool_]:
        """Which of these, which come as for `fill`, were there before."""
        known = self.evicted_lately(hashes)
        # Without a block whose entry was overwritten, those after it would be of no use.
        places = np.flatnonzero(known)
        if prompts is None:
            known[: places.max(initial=0)] = True
        elif len(places):
            last = np.full(prompts.max() + 1, -1)
            np.maximum.at(last, prompts[places], places)
            known = np.arange(len(known)) <= last[prompts]
        return known

    def evicted_lately(self, hashes: Ints) -> NDArray[np.bool_]:
        """Whether content of these hashes was among the last that were evicted, as many as there
        are slots, as far as that is remembered."""
        past = self._past[hashes % len(self._past)]
        since = (self._evicted - past) & _LOWER_HALF
        known: NDArray[np.bool_] = ((past ^ hashes) >> 32 == 0) & (since <= self._num_slots)
        return known

    def unused(self, numbers: Ints) -> None:
        """The content of these slots, which are not in the order, is no longer of use."""
        self._again[numbers] = self._favoured[numbers] = self.pinned[numbers] = False

    def add(self, numbers: Ints) -> None:
        """The use of these slots, which are not in the order, has ended. Of those of one kind, the
        ones that come first here are evicted first."""
        kinds = np.where(self._favoured[numbers], 2, self._again[numbers])
        kinds[self.pinned[numbers]] = _PINNED
        for kind in range(_KINDS):
            part = numbers[kinds == kind]
            if len(part):
                self._append(kind, part)
        self.num_pinned += int(np.count_nonzero(kinds == _PINNED))

    def _append(self, kind: int, numbers: Ints) -> None:
        queue = self._batches[kind]
        turn = self._evicted + _STAY[kind] * self._num_slots
        stamp, last = next(reversed(queue.items())) if queue else (0, None)
        if (
            last is not None
            and len(last.numbers) + len(numbers) <= _SMALL
            and turn - last.turn <= self._num_slots // 16
        ):
            last.numbers = np.concatenate([self._living(stamp, last), numbers], dtype=np.int32)
            last.alive += len(numbers)
        else:
            self._last_stamp += _KINDS
            stamp = self._last_stamp + kind
            queue[stamp] = _Batch(turn, numbers.astype(np.int32), len(numbers))
        self._stamp[numbers] = stamp

    def _living(self, stamp: int, batch: _Batch) -> NDArray[np.int32]:
        if batch.alive == len(batch.numbers):
            return batch.numbers
        living: NDArray[np.int32] = batch.numbers[self._stamp[batch.numbers] == stamp]
        return living

    def remove(self, numbers: Ints) -> None:
        """Take these slots, all of them different and in the order, out of it."""
        stamps = self._stamp[numbers]
        self._stamp[numbers] = 0
        at = np.flatnonzero(np.diff(stamps, prepend=-1))
        counts = np.diff(at, append=len(stamps))
        for stamp, count in zip(stamps[at].tolist(), counts.tolist(), strict=True):
            queue = self._batches[stamp % _KINDS]
            batch = queue[stamp]
            batch.alive -= count
            self.num_pinned -= count if stamp % _KINDS == _PINNED else 0
            if not batch.alive:
                del queue[stamp]
            elif 2 * batch.alive < len(batch.numbers):
                batch.numbers = self._living(stamp, batch)

    def evict(self, count: int) -> Ints:
        """Take so many slots out, those whose turn it is; there are as many that are not pinned."""
        self._evicted += count
        evicted: list[NDArray[np.int32]] = []
        while count:
            heads = (next(iter(queue.items())) for queue in self._batches[:_PINNED] if queue)
            stamp, batch = min(heads, key=lambda pair: pair[1].turn)
            living = self._living(stamp, batch)
            gone, batch.numbers = living[:count], living[count:]
            batch.alive = len(batch.numbers)
            if not batch.alive:
                del self._batches[stamp % _KINDS][stamp]
            evicted.append(gone)
            count -= len(gone)
        return self._end(np.concatenate(evicted, dtype=np.int64))

    def evict_of(self, numbers: Ints, count: int) -> Ints:
        """Take so many of these slots out, those whose turn it is first; fewer where the others are
        not in the order, or are pinned."""
        here = numbers[self.here(numbers) & ~self.pinned[numbers]]
        stamps = np.unique(self._stamp[here]).tolist()
        batches = ((stamp, self._batches[stamp % _KINDS][stamp]) for stamp in stamps)
        in_turn = sorted(batches, key=lambda pair: pair[1].turn)
        living = np.concatenate([here[:0], *(self._living(*pair) for pair in in_turn)])
        gone: Ints = living[np.isin(living, here)][:count]
        self.remove(gone)
        self._evicted += len(gone)
        return self._end(gone)

    def _end(self, numbers: Ints) -> Ints:
        """These slots were evicted; returns them."""
        self._stamp[numbers] = 0
        self._again[numbers] = self._favoured[numbers] = False
        self._remember(self._hash[numbers])
        return numbers

    def _remember(self, hashes: Ints) -> None:
        self._past[hashes % len(self._past)] = (hashes & ~_LOWER_HALF) | (
            self._evicted & _LOWER_HALF
        )
