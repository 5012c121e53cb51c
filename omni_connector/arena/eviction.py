# SPDX-License-Identifier: Apache-2.0
"""The order in which cached slots are evicted, and which new blocks are admitted.

The least recently used slot is evicted first, with a bonus by kind. The bonus is counted in
evictions, with `n` slots in the arena:

    used once    0        evicted when it is the least recently used
    used again   n        stays for n more evictions, so that prompts that come once take less room
    pinned       never evicted

A block also counts as used again if it was evicted recently and is now copied anew.

Each use of a block is a use of all blocks before it. So the end of a prefix is evicted before its
beginning, which ARC and S3-FIFO do not guarantee.
A request's blocks may be copied in several steps; `requeue` puts them into that order at its end.

Where prompts rarely come again, copying them is wasted. So new blocks that would evict others may
be passed over (`admits`): they get slots when they are seen for the second time. Whether blocks are
used again is learnt by depth, which is how many of the prompt's first blocks were found: a further
turn of a conversation finds more than its first turn does, and than a document that comes once.

Slots come and go by the prompt, so the order consists of batches of slots that were used together.
"""

from collections import OrderedDict
from dataclasses import dataclass
from heapq import merge
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Depths = NDArray[np.uint8]

_SMALL: Final = 64
"""Most slots of a batch that the next slots still join. Bounds the memory of many small batches."""

_LOWER_HALF: Final = (1 << 32) - 1

DEPTHS: Final = 17
"""Classes of prompts by depth. In class d, 2^(d-1) blocks or more are found, and fewer than 2^d.
The last class is that of `TAILS`."""

TAILS: Final = DEPTHS - 1
"""The depth of tails (`prefix.tails`): whether they are used is learnt apart from other blocks. A
tail that was used is evicted as early as one that was not, as its user leaves a longer one."""

WORTH: Final = 8
"""New blocks of a depth are passed over while fewer than one in 8 is used again. With one in 32 up
to three times as many blocks are saved, and up to 3 points fewer of all blocks are found or 1 point
more; see `benchmarks/results/admission.md`."""

LEAST: Final = 32
"""New blocks of a depth that are kept before any is passed over. Fewer would be no sample."""

_FADES: Final = 4
"""New blocks for each slot of the arena after which counts are halved. Old workloads fade so, and
blocks have had the time to be used again."""

KINDS: Final = 3
"""The kinds of slots: used once (0), used again (1), pinned (2)."""

_PINNED: Final = 2
_STAY: Final = (0, 1, 1)
"""The bonus of each kind, in evictions a slot of the arena."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Slots that were used together.

    Attributes:
        turn: number of evictions before the use, plus the bonus; the least is evicted first.
        slot_ids: in the order of eviction. A slot whose stamp is another by now has left the batch.
        alive: number of slots that have not left.
    """

    turn: int
    slot_ids: NDArray[np.int32]
    alive: int


class EvictionOrder:
    """The cached slots of an arena, in the order in which they are evicted.

    Args:
        num_slots: of the arena.
        stripes: ranks over which slots are spread; see `kv.stripes`. 1 if `evict_in` is not used.

    Attributes:
        pinned: which slots are pinned, in the order or not; (slots,) bool.
        num_pins: their number.
        num_pinned: slots in the order that are pinned.
        by_stripe: for each stripe the number of slots in the order that are not pinned; (stripes,)
            int64. It is kept up to date where there are several stripes.
        remembers: whether any content was evicted, or passed over, since the start.
    """

    def __init__(self, num_slots: int, stripes: int = 1) -> None:
        self._num_slots = num_slots
        self._stripes = stripes
        self.by_stripe: Ints = np.zeros(stripes, np.int64)
        self._evicted = 0
        # By kind, the batches by stamp, the oldest first.
        self._batches: tuple[OrderedDict[int, _Batch], ...]
        self._batches = tuple(OrderedDict() for _ in range(KINDS))
        # The stamp of each slot's batch, 0 for none. A stamp modulo `KINDS` is the kind.
        self._stamp: Ints = np.zeros(num_slots, np.int64)
        self._last_stamp = 0
        self._again = np.zeros(num_slots, bool)
        self.pinned = np.zeros(num_slots, bool)
        self.num_pins = 0
        self.num_pinned = 0
        self._hash: Ints = np.zeros(num_slots, np.int64)
        # The content evicted recently, a hash table without chains: at `hash % len` the upper half
        # of the hash, and in the lower half the number of evictions at the time. A later eviction
        # overwrites an earlier one.
        self._past: Ints = np.zeros(2 * num_slots, np.int64)
        self.remembers = False
        # By depth, how many blocks were new, and how many of these were used again; and the depth
        # at which the content of each slot, and of each entry of `_past`, was new.
        self._new = np.zeros(DEPTHS)
        self._used_again = np.zeros(DEPTHS)
        self._depth = np.zeros(num_slots, np.uint8)
        self._past_depth = np.zeros(2 * num_slots, np.uint8)

    def here(self, slot_ids: Ints) -> NDArray[np.bool_]:
        """Which of these slots are in the order."""
        here: NDArray[np.bool_] = self._stamp[slot_ids] > 0
        return here

    def clear(self) -> Ints:
        """Take every slot out of the order, and return them in ascending order. Their content is
        forgotten, and no slot is pinned any more."""
        here = self._stamp != 0
        self._stamp[:] = 0
        self._again &= ~here
        for queue in self._batches:
            queue.clear()
        self.pinned[:] = False
        self.num_pins = self.num_pinned = 0
        self.by_stripe[:] = 0
        return np.flatnonzero(here)

    def used_again(self, slot_ids: Ints) -> None:
        """Another request uses the content of these slots."""
        self._used_again += _by_depth(self._depth[slot_ids[~self._again[slot_ids]]])
        self._again[slot_ids[~self.are_tails(slot_ids)]] = True

    def are_tails(self, slot_ids: Ints) -> NDArray[np.bool_]:
        """Which of these slots hold tails."""
        tails: NDArray[np.bool_] = self._depth[slot_ids] == TAILS
        return tails

    def pin(self, slot_ids: Ints, pinned: bool) -> None:
        """Pin these slots, or end their pins. Each is named once."""
        self.num_pins += (len(slot_ids) if pinned else 0) - self._pins_among(slot_ids)
        self.pinned[slot_ids] = pinned
        self._move(slot_ids)

    def _pins_among(self, slot_ids: Ints) -> int:
        return int(np.count_nonzero(self.pinned[slot_ids]))

    def requeue(self, slot_ids: Ints) -> None:
        """Move slots to the end of the order without counting another use.

        Slots that are not in the order, or pinned, are ignored.
        """
        self._move(slot_ids[~self.pinned[slot_ids]])

    def _move(self, slot_ids: Ints) -> None:
        here = slot_ids[self.here(slot_ids)]
        # Sorted by batch: `remove` costs time for each run of slots of one batch.
        self.remove(here[np.argsort(self._stamp[here], kind="stable")])
        self.add(here)

    def fill(self, slot_ids: Ints, hashes: Ints, prompts: Ints | None = None) -> None:
        """Set the content of slots that are not in the order.

        Args:
            slot_ids: in the order of their prompts: a block that was used before implies that the
                blocks before it in its prompt were, too.
            hashes: 64 bits of each content.
            prompts: a small number for each slot's prompt, which modulo `DEPTHS` is its depth; None
                where all are of one prompt of depth 0.
        """
        self._hash[slot_ids] = hashes
        depths = _depths(hashes, prompts)
        if self.remembers:
            lately = self.evicted_lately(hashes)
            known = _known(lately, prompts)
            self._again[slot_ids] |= known
            first = self._past_depth[hashes[lately] % len(self._past)]
            self._used_again += _by_depth(first)
            self._depth[slot_ids] = depths
            self._depth[slot_ids[lately]] = first
            depths = depths[~known]
        else:
            self._depth[slot_ids] = depths
        self._count_new(depths)

    def admits(self, hashes: Ints, prompts: Ints | None = None) -> NDArray[np.bool_]:
        """Which contents shall get a slot; the arguments are as for `fill`.

        Contents passed over are remembered as if they had been evicted, so that they are admitted
        when they come again.
        """
        depths = _depths(hashes, prompts)
        admitted = ~self._rarely_again[depths]
        if admitted.all():
            return admitted
        admitted |= _known(self.evicted_lately(hashes), prompts)
        passed_over = ~admitted
        self._remember(hashes[passed_over], depths[passed_over])
        self._count_new(depths[passed_over])
        return admitted

    @property
    def _rarely_again(self) -> NDArray[np.bool_]:
        """At which depths new contents are rarely used again `(DEPTHS,)`."""
        return (self._new >= LEAST) & (self._used_again * WORTH < self._new)

    def _count_new(self, depths: Depths) -> None:
        """Count contents that nobody remembers."""
        self._new += _by_depth(depths)
        if self._new.sum() > _FADES * self._num_slots:
            self._new /= 2
            self._used_again /= 2

    def evicted_lately(self, hashes: Ints) -> NDArray[np.bool_]:
        """Which of these contents were among the last `num_slots` evicted ones, as far as
        remembered."""
        past = self._past[hashes % len(self._past)]
        since = (self._evicted - past) & _LOWER_HALF
        known: NDArray[np.bool_] = ((past ^ hashes) >> 32 == 0) & (since <= self._num_slots)
        return known

    def unused(self, slot_ids: Ints) -> None:
        """Forget all about the content of slots that are not in the order."""
        self.num_pins -= self._pins_among(slot_ids)
        self._again[slot_ids] = self.pinned[slot_ids] = False

    def add(self, slot_ids: Ints) -> None:
        """Put slots at the end of the order. Slots of one kind are evicted in the order given."""
        if not len(slot_ids):
            return
        again = self._again[slot_ids]
        pinned = self.pinned[slot_ids]
        if not (again.any() or pinned.any()):  # most often
            self.add_of_kind(0, slot_ids)
            return
        kinds = np.where(pinned, _PINNED, again)
        for kind in range(KINDS):
            part = slot_ids[kinds == kind]
            if len(part):
                self.add_of_kind(kind, part)

    def add_of_kind(self, kind: int, slot_ids: Ints) -> None:
        """The same for slots of one kind; at least one."""
        self.num_pinned += len(slot_ids) if kind == _PINNED else 0
        if self._stripes > 1 and kind != _PINNED:
            self.by_stripe += count_by_stripe(slot_ids, self._stripes)
        queue = self._batches[kind]
        turn = self._evicted + _STAY[kind] * self._num_slots
        stamp, last = next(reversed(queue.items())) if queue else (0, None)
        if (
            last is not None
            and len(last.slot_ids) + len(slot_ids) <= _SMALL
            and turn - last.turn <= self._num_slots // 16
        ):
            last.slot_ids = np.concatenate([self._living(stamp, last), slot_ids], dtype=np.int32)
            last.alive += len(slot_ids)
        else:
            self._last_stamp += KINDS
            stamp = self._last_stamp + kind
            queue[stamp] = _Batch(turn, slot_ids.astype(np.int32), len(slot_ids))
        self._stamp[slot_ids] = stamp

    def _living(self, stamp: int, batch: _Batch) -> NDArray[np.int32]:
        if batch.alive == len(batch.slot_ids):
            return batch.slot_ids
        living: NDArray[np.int32] = batch.slot_ids[self._stamp[batch.slot_ids] == stamp]
        return living

    def remove(self, slot_ids: Ints) -> None:
        """Take slots out of the order. All are in it, and each is named once."""
        stamps = self._stamp[slot_ids]
        if self._stripes > 1:
            evictable = slot_ids[stamps % KINDS != _PINNED]
            self.by_stripe -= count_by_stripe(evictable, self._stripes)
        self._stamp[slot_ids] = 0
        at = np.flatnonzero(np.diff(stamps, prepend=-1))
        counts = np.diff(at, append=len(stamps))
        for stamp, count in zip(stamps[at].tolist(), counts.tolist(), strict=True):
            queue = self._batches[stamp % KINDS]
            batch = queue[stamp]
            batch.alive -= count
            self.num_pinned -= count if stamp % KINDS == _PINNED else 0
            if not batch.alive:
                del queue[stamp]
            elif 2 * batch.alive < len(batch.slot_ids):
                batch.slot_ids = self._living(stamp, batch)

    def evict(self, count: int) -> Ints:
        """Evict `count` slots and return them. At least as many in the order are not pinned."""
        self._evicted += count
        evicted: list[NDArray[np.int32]] = []
        while count:
            heads = (next(iter(queue.items())) for queue in self._batches[:_PINNED] if queue)
            stamp, batch = min(heads, key=lambda pair: pair[1].turn)
            living = self._living(stamp, batch)
            gone, batch.slot_ids = living[:count], living[count:]
            batch.alive = len(batch.slot_ids)
            if not batch.alive:
                del self._batches[stamp % KINDS][stamp]
            evicted.append(gone)
            count -= len(gone)
        slot_ids = np.concatenate(evicted, dtype=np.int64)
        if self._stripes > 1:
            self.by_stripe -= count_by_stripe(slot_ids, self._stripes)
        return self._end(slot_ids)

    def evict_in(self, stripe: int, count: int) -> Ints:
        """Evict `count` slots of a stripe and return them. The order has at least as many slots of
        the stripe that are not pinned."""
        queues = (queue.items() for queue in self._batches[:_PINNED])
        evicted: list[NDArray[np.int32]] = []
        left = count
        for stamp, batch in merge(*queues, key=lambda pair: pair[1].turn):
            living = self._living(stamp, batch)
            gone = living[living % self._stripes == stripe][:left]
            evicted.append(gone)
            left -= len(gone)
            if not left:
                break
        slot_ids = np.concatenate(evicted, dtype=np.int64)
        self.remove(slot_ids)
        self._evicted += count
        return self._end(slot_ids)

    def _end(self, slot_ids: Ints) -> Ints:
        """Remember the content of evicted slots; returns the slots."""
        self._stamp[slot_ids] = 0
        self._again[slot_ids] = False
        self._remember(self._hash[slot_ids], self._depth[slot_ids])
        return slot_ids

    def _remember(self, hashes: Ints, depths: Depths) -> None:
        self.remembers = True
        places = hashes % len(self._past)
        self._past[places] = (hashes & ~_LOWER_HALF) | (self._evicted & _LOWER_HALF)
        self._past_depth[places] = depths


def _known(lately: NDArray[np.bool_], prompts: Ints | None) -> NDArray[np.bool_]:
    """Which contents, given as for `EvictionOrder.fill`, are known to have been evicted.

    Args:
        lately: which of them are remembered as evicted.
    """
    # The entry of a block may have been overwritten. If a later block of the prompt is remembered,
    # this one was there, too, and the later one is of no use without it.
    known = lately.copy()
    places = np.flatnonzero(lately)
    if prompts is None:
        known[: places.max(initial=0)] = True
    elif len(places):
        last = np.full(prompts.max() + 1, -1)
        np.maximum.at(last, prompts[places], places)
        known = np.arange(len(known)) <= last[prompts]
    return known


def count_by_stripe(slot_ids: Ints, stripes: int) -> Ints:
    """How many of these slots are in each stripe `(stripes,)`."""
    return np.bincount(slot_ids % stripes, minlength=stripes)


def depth_of(blocks: int) -> int:
    """The depth of a prompt whose first `blocks` blocks were found."""
    return min(blocks.bit_length(), TAILS - 1)


def _depths(hashes: Ints, prompts: Ints | None) -> Depths:
    """The depth of each content, given as for `EvictionOrder.fill`."""
    if prompts is None:
        return np.zeros(len(hashes), np.uint8)
    return (prompts % DEPTHS).astype(np.uint8)


def _by_depth(depths: Depths) -> Ints:
    """How many have each depth `(DEPTHS,)`."""
    counts: Ints = np.bincount(depths, minlength=DEPTHS)
    return counts
