# SPDX-License-Identifier: Apache-2.0
"""Allocates the slots of an arena: which are free, held, being filled, or cached.

A slot is in one of four states:

    free --take--> taken --fill--> busy --filled--> ready
                                   busy --unfilled--> taken (or free, if nobody holds it)

A taken slot waits for its copy, a busy one is being filled, a ready one has content. Users hold
slots in any state but free. Prompts that begin alike hold the same slots, so each block is copied
once. A ready slot that has a key and no user is *cached*: it keeps its block until the slot is
needed, and later prompts with the same beginning use it. A *pinned* slot without a user is cached,
too, but is not evicted before its pin ends.

A prompt may have tens of thousands of blocks, so the state of slots is kept in arrays.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.block_index import BlockIndex, Tags, first_words, tags_of
from omni_connector.arena.eviction import EvictionOrder, count_by_stripe
from omni_connector.arena.format import header_keys
from omni_connector.arena.slot_index import Ints, SlotChanges, SlotIndex, SlotKey
from omni_connector.kv.stripes import SlotGroup
from omni_connector.runtime.turns import MakeLock

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

PIN_PART: Final = 4
"""At most one slot in 4 is pinned. Clients choose their pins, and hand-offs and the blocks of
others get no pinned slot."""

_PIN_TICK_S: Final = 0.25
"""The end of a pin is rounded up to a multiple of this, in seconds. That bounds the searches for
ended pins, each of which looks at every slot, to four a second."""

_HASHED_BYTES: Final = 8
"""Bytes of a key that are its content's hash. vLLM's keys have 16 or 32, all of them random."""

NONE: Final[Ints] = np.empty(0, np.int64)
"""No slots."""


class SlotListing:
    """Lists ready slots in the arena's index for peers. The caller holds the lock of the pool.

    Args:
        index: of the arena; closed by its owner.
        key_prefix: as for `header_keys`.

    Attributes:
        key_prefix: prefix of the keys of blocks that are named from now on; may be changed.
        changes: records what is listed and unlisted, for KV events; None where none are published.
    """

    def __init__(
        self, index: BlockIndex, key_prefix: bytes, changes: SlotChanges | None = None
    ) -> None:
        self._index = index
        self.key_prefix = key_prefix
        self.changes = changes
        self._tags: Tags = np.zeros(index.num_slots, np.uint64)

    def name(
        self,
        group: int,
        keys: Sequence[SlotKey | None],
        slots: Ints,
        tags: Tags | None = None,
    ) -> None:
        """Set the blocks that these slots will hold; a slot without a key is never listed.

        Args:
            tags: of the blocks, if the caller has them, and each has a key.
        """
        if tags is not None:
            self._tags[slots] = tags
        elif len(slots):
            # `tags_of` takes all hashes of a group in one call: their tags depend on whether all
            # have the same length.
            named = np.array([key is not None for key in keys])
            hashes = [key for key in keys if key is not None]
            self._tags[slots[named]] = tags_of(self.key_prefix, group, hashes)
        if self.changes is not None:
            self.changes.name(group, keys, slots)

    def show(self, slots: Ints, generations: Ints) -> None:
        """List these slots: peers find them from now on."""
        if len(slots):
            self._index.add(self._tags[slots], slots, generations)
            if self.changes is not None:
                self.changes.show(slots, True)

    def hide(self, slots: Ints) -> None:
        """Remove these slots from the index."""
        self._index.remove(slots)
        if self.changes is not None:
            self.changes.show(slots, False)

    def clear(self) -> None:
        """Remove all slots from the index."""
        self._index.clear()
        if self.changes is not None:
            self.changes.clear()


class Kept(NamedTuple):
    """Result of `SlotPool.keep`.

    Attributes:
        chosen: positions of the keys that got a slot.
        slots: the slots they got.
        dropped: number of blocks that got none because no slot was available, or beyond `most`.
        beyond: positions of keys beyond `most` for which slots are available now. They are counted
            as dropped, too.
    """

    chosen: Ints
    slots: Ints
    dropped: int
    beyond: Ints


class KeptShards(NamedTuple):
    """Result of `SlotPool.keep_shards`.

    Attributes:
        shards: for each shard the positions of the keys that got a slot for it, and these slots.
        num_blocks: number of keys that got slots.
        dropped, beyond: as of `Kept`.
    """

    shards: list[tuple[Ints, Ints]]
    num_blocks: int
    dropped: int
    beyond: Ints


class SlotPool:
    """The slots of one arena. Callers hold `lock` during each call, and never during I/O.

    Below, a group is a slot group; see `kv.stripes`.

    Args:
        num_slots: of the arena; as many in each stripe.
        lock: makes the lock.
        groups: the slot groups; none where each cache group has one, with slots in any stripe.

    Attributes:
        lock: guards the pool.
        listing: lists ready slots for peers; None where no peer looks anything up.
        generation: (slots,) int64; grows with each use of a slot.
        releases: changes when a slot becomes free or cached.
        num_cached: cached slots, pinned ones included.
        on_lost: called with the slots of a failed copy if a user holds one of them.
    """

    def __init__(
        self,
        num_slots: int,
        lock: MakeLock = threading.Lock,
        groups: Sequence[SlotGroup] = (),
    ) -> None:
        self.lock = lock()
        self.listing: SlotListing | None = None
        self.generation: Ints = np.zeros(num_slots, np.int64)
        self.releases = 0
        self.num_cached = 0
        self.on_lost: Callable[[Ints], None] = lambda slot_ids: None
        self._users = np.zeros(num_slots, np.int32)
        self._busy = np.zeros(num_slots, bool)
        self._ready = np.zeros(num_slots, bool)
        self._index = SlotIndex(self.generation)
        self._keyed = self._index.keyed
        # A stack of the free slots, the first `_num_free` entries. The slot freed last is taken
        # first: its memory is warm. And no array is searched, whatever the arena's size.
        self._free = np.arange(num_slots - 1, -1, -1, np.int32)
        self._num_free = num_slots
        # The stripe in which the slots of each group must lie; None for any.
        self._stripe_of = [each.stripe for each in groups]
        # 1 where slots of all groups may lie anywhere.
        self._stripes = 1 + max((each for each in self._stripe_of if each is not None), default=0)
        self._free_by_stripe = count_by_stripe(np.arange(num_slots), self._stripes)
        self._order = EvictionOrder(num_slots, self._stripes)
        # When the pins end that requests have asked for by themselves, and those of sessions.
        self._pinned_until = np.zeros(num_slots)
        self._session_until = np.zeros(num_slots)
        self._next_end = float("inf")  # the earliest end of a pin

    def counts(self) -> tuple[int, int, int]:
        """Numbers of (free, cached, cached and pinned) slots."""
        return self._num_free, self.num_cached, self._order.num_pinned

    @property
    def num_pinned(self) -> int:
        """Number of cached slots that are pinned."""
        return self._order.num_pinned

    @property
    def _num_available(self) -> int:
        return self._num_free + self.num_cached - self._order.num_pinned

    def least_slots(self, sizes: Sequence[int]) -> int:
        """How many slots an arena needs for a prompt.

        Args:
            sizes: blocks of the prompt, by group.
        """
        if self._stripes == 1:
            return sum(sizes)
        return max(sum(sizes), self._stripes * int(self._needs(sizes).max()))

    def _needs(self, sizes: Sequence[int]) -> Ints:
        """How many slots each stripe must have for blocks that may lie nowhere else `(stripes,)`.

        Args:
            sizes: blocks, by group.
        """
        needs: Ints = np.zeros(self._stripes, np.int64)
        for stripe, size in zip(self._stripe_of, sizes, strict=False):
            if stripe is not None:
                needs[stripe] += size
        return needs

    @property
    def _available_by_stripe(self) -> Ints:
        """The slots of each stripe that are free, or cached and not pinned `(stripes,)`."""
        return self._free_by_stripe + self._order.by_stripe

    def take(
        self, keys: Sequence[Sequence[SlotKey | None]], first_blocks: Sequence[int]
    ) -> tuple[list[Ints], list[Ints]] | None:
        """Hold a slot for each block of a prompt: the slot that has its key, else a new one.

        Args:
            keys: by group, the key of each block; None for a block without. Kept by the pool:
                not to be changed afterwards.
            first_blocks: by group, the logical index of the first block.

        Returns:
            Slots and generations, both by group; None if too few slots are available.
        """
        parts = [self._index.find(g, group, first_blocks[g]) for g, group in enumerate(keys)]
        found: Ints = np.concatenate([NONE, *parts])
        lacks = found < 0
        shared = found[~lacks]
        needed = len(found) - len(shared)
        from_cache = shared[self._order.here(shared)]
        lost = len(from_cache) - np.count_nonzero(self.pinned(from_cache))
        if needed > self._num_available - lost:
            return None
        if self._stripes > 1:
            needs = self._needs([int(np.count_nonzero(part < 0)) for part in parts])
            evictable = from_cache[~self.pinned(from_cache)]
            left = self._available_by_stripe - count_by_stripe(evictable, self._stripes)
            if (needs > left).any():
                return None
        self._order.remove(from_cache)
        self._order.used_again(shared)
        self.num_cached -= len(from_cache)
        self._users[shared] += 1
        if needed and self._stripes > 1:
            found[lacks] = self._new_in_stripes(parts)
        elif needed:
            found[lacks] = self._new(needed)
        ends = accumulate(map(len, keys))
        slots = [found[end - len(group) : end] for group, end in zip(keys, ends, strict=True)]
        generations = [self.generation[group] for group in slots]
        for g, group in enumerate(keys):
            self._index.remember(g, group, first_blocks[g], slots[g], generations[g])
        return slots, generations

    def _new(self, count: int) -> Ints:
        slot_ids = self._unused(count)
        self._renew(slot_ids)
        return slot_ids

    def _new_in_stripes(self, found: Sequence[Ints]) -> Ints:
        """New slots for the blocks of each group that have none, where -1 stands in `found`."""
        counts = [int(np.count_nonzero(part < 0)) for part in found]
        stripes = self._stripe_of[: len(counts)]
        slots = [NONE] * len(counts)
        # Those that may lie in any stripe come last, as they might take the last of a stripe.
        for g in sorted(range(len(counts)), key=lambda g: stripes[g] is None):
            slots[g] = self._unused(counts[g], stripes[g])
        slot_ids = np.concatenate(slots)
        self._renew(slot_ids)
        return slot_ids

    def _unused(self, count: int, stripe: int | None = None) -> Ints:
        """Free slots, or ones that are evicted now. At least as many are available.

        Args:
            stripe: in which they must lie; None for any.
        """
        if stripe is None:
            left = max(0, self._num_free - count)
            slot_ids: Ints = self._free[left : self._num_free][::-1].astype(np.int64)
            self._num_free = left
        else:
            slot_ids = self._free_in(stripe, count)
        if self._stripes > 1:
            self._free_by_stripe -= count_by_stripe(slot_ids, self._stripes)
        if (lacks := count - len(slot_ids)) > 0:
            order = self._order
            evicted = order.evict(lacks) if stripe is None else order.evict_in(stripe, lacks)
            self.num_cached -= len(evicted)
            slot_ids = np.concatenate([slot_ids, evicted])
        return slot_ids

    def _free_in(self, stripe: int, count: int) -> Ints:
        """Take free slots of a stripe off the stack, `count` at most."""
        size = 0
        places = NONE
        while len(places) < min(count, self._free_by_stripe[stripe]):
            # Most often they lie near the top.
            size = min(self._num_free, max(4 * size, 2 * self._stripes * count))
            top = self._free[self._num_free - size : self._num_free]
            places = np.flatnonzero(top % self._stripes == stripe)[::-1][:count]
        if not len(places):
            return NONE
        slot_ids: Ints = top[places].astype(np.int64)
        first = self._num_free - size
        self._num_free -= len(slot_ids)
        self._free[first : self._num_free] = np.delete(top, places)
        return slot_ids

    def _renew(self, slot_ids: Ints) -> None:
        """Unused slots get one user, and no content yet."""
        if self.listing is not None:
            self.listing.hide(slot_ids)
        self.generation[slot_ids] += 1
        self._ready[slot_ids] = self._keyed[slot_ids] = False
        self._users[slot_ids] = 1

    def touch(self, slot_ids: Ints, generations: Ints) -> None:
        """Count hits of peers, which read these slots in these generations.

        Slots of another generation by now, and slots outside the arena, are ignored. The cached
        slots move to the end of the eviction order, in the order given, except those of tails. A
        slot may be named twice.
        """
        known = (slot_ids >= 0) & (slot_ids < len(self.generation))
        slot_ids, generations = slot_ids[known], generations[known]
        slot_ids = slot_ids[self._ready[slot_ids] & (self.generation[slot_ids] == generations)]
        self._order.used_again(slot_ids)
        moves = self._order.here(slot_ids) & ~self._order.are_tails(slot_ids)
        latest = slot_ids[moves][::-1]
        _, first = np.unique(latest, return_index=True)
        cached = latest[np.sort(first)][::-1]
        self._order.remove(cached)
        self._order.add(cached)

    def requeue(self, slot_ids: Ints, generations: Ints) -> None:
        """Move slots to the end of the eviction order, without counting a hit.

        For the request that filled them, at its end. Each slot is named once; slots of another
        generation by now are ignored.
        """
        self._order.requeue(slot_ids[self.generation[slot_ids] == generations])

    def find(self, group: int, keys: Sequence[SlotKey]) -> Ints:
        """The slots that hold or will hold these blocks of a group; blocks without are left out."""
        found = self.places(group, keys)
        return found[found >= 0]

    def places(self, group: int, keys: Sequence[SlotKey]) -> Ints:
        """For each of these blocks of a group the slot that holds or will hold it, or -1."""
        return self._index.find(group, keys, 1)

    def keep(
        self,
        group: int,
        keys: Sequence[SlotKey],
        most: int,
        prompts: Ints | None = None,
        tags: Tags | None = None,
    ) -> Kept:
        """Hold a new slot for each block that has none, as long as slots are available.

        Args:
            keys: of different blocks of the group, in any order.
            most: most slots to take.
            prompts: as for `EvictionOrder.fill`.
            tags: of the blocks, if the caller has them.
        """
        lacking = np.flatnonzero(self._index.each(group, keys) < 0)
        chosen = lacking[: min(most, self._num_available)]
        if len(chosen) < len(keys):
            keys = [keys[i] for i in chosen.tolist()]
            prompts = None if prompts is None else prompts[chosen]
            tags = None if tags is None else tags[chosen]
        slots = NONE
        if len(chosen):
            slots = self._unused(len(chosen))
            self._begin(group, keys, slots, prompts, tags)
        beyond = lacking[most:][: self._num_available]
        return Kept(chosen, slots, len(lacking) - len(chosen), beyond)

    def keep_shards(
        self,
        groups: Sequence[int],
        keys: Sequence[SlotKey],
        most: int,
        prompts: Ints | None = None,
        tags: Sequence[Tags] | None = None,
    ) -> KeptShards:
        """Hold a new slot for each shard that has none, as long as there are slots for all shards
        of a block; see `keep`.

        Args:
            groups: the slot groups of the shards, each with a stripe of its own.
            keys, prompts: as for `keep`.
            most: most blocks to keep.
            tags: of the blocks, by shard, if the caller has them.
        """
        # (shards, blocks)
        lacks = np.array([self._index.each(group, keys) < 0 for group in groups])
        lacking = np.flatnonzero(lacks.any(axis=0))
        wanted = lacking[:most]
        stripes = np.array([self._stripe_of[group] for group in groups], np.int64)
        available = self._available_by_stripe[stripes]
        # The leading blocks for whose shards there are slots.
        fit = (lacks[:, wanted].cumsum(axis=1) <= available[:, None]).all(axis=0)
        chosen = wanted[: np.count_nonzero(fit)]
        shards: list[tuple[Ints, Ints]] = []
        for shard, (group, stripe) in enumerate(zip(groups, stripes.tolist(), strict=True)):
            places = chosen[lacks[shard, chosen]]
            slots = NONE
            if len(places):
                slots = self._unused(len(places), stripe)
                self._begin(
                    group,
                    [keys[i] for i in places.tolist()],
                    slots,
                    None if prompts is None else prompts[places],
                    None if tags is None else tags[shard][places],
                )
            shards.append((places, slots))
        left = self._available_by_stripe[stripes].min()
        return KeptShards(shards, len(chosen), len(lacking) - len(chosen), lacking[most:][:left])

    def _begin(
        self,
        group: int,
        keys: Sequence[SlotKey],
        slots: Ints,
        prompts: Ints | None,
        tags: Tags | None,
    ) -> None:
        """Copies of blocks begin, into unused slots; the arguments are as for `keep`."""
        self._renew(slots)
        self.fill(group, keys, slots, prompts, tags)

    def admits(self, group: int, keys: Sequence[SlotKey], prompts: Ints | None = None) -> Bools:
        """Which blocks of a group shall get a slot; see `EvictionOrder.admits`."""
        if len(keys) <= self._num_free:
            return np.ones(len(keys), bool)
        return self._order.admits(_content_hashes(group, keys), prompts)

    def pin(self, slot_ids: Ints, until: Floats | float, of_session: Bools | bool = False) -> int:
        """Pin slots that `find` has found: they are not evicted before their pins end.

        A pin ends when `end_pins` finds its time over, and when its block goes: with `forget`, or
        with a failed copy. A pin that ends later than `until` keeps its end.

        Args:
            slot_ids: in the order of their prompts, each once. As many as `PIN_PART` allows are
                pinned, the first of them.
            until: when the pins end, by the caller's clock, or an array with the end of each.
            of_session: which of the pins `end_session_pins` ends.

        Returns:
            Number of these slots that are pinned now.
        """
        new = ~self.pinned(slot_ids)
        room = len(self.generation) // PIN_PART - self._order.num_pins
        granted = ~new | (new.cumsum() <= room)
        pinned = slot_ids[granted]
        if not len(pinned):
            return 0
        ends = np.ceil(np.broadcast_to(until, len(slot_ids))[granted] / _PIN_TICK_S) * _PIN_TICK_S
        of_session = np.broadcast_to(of_session, len(slot_ids))[granted]
        for until_of, asked in (
            (self._pinned_until, np.where(of_session, 0.0, ends)),
            (self._session_until, np.where(of_session, ends, 0.0)),
        ):
            until_of[pinned] = np.maximum(until_of[pinned] * self.pinned(pinned), asked)
        self._next_end = min(self._next_end, float(ends.min()))
        self._order.pin(pinned[::-1], pinned=True)
        return len(pinned)

    def pinned(self, slot_ids: Ints) -> Bools:
        """Which of these slots are pinned."""
        return self._order.pinned[slot_ids]

    def end_pins(self, now: float) -> None:
        """End the pins whose time is over."""
        if now < self._next_end:
            return
        slot_ids = np.flatnonzero(self._order.pinned)
        ends = np.maximum(self._pinned_until[slot_ids], self._session_until[slot_ids])
        due = slot_ids[ends <= now]
        self._next_end = float(ends[ends > now].min(initial=np.inf))
        if len(due):
            # In descending order, so that the end of a prompt is evicted before its beginning:
            # most prompts got their slots in ascending order.
            self._order.pin(due[::-1], pinned=False)
            self.releases += 1

    def pins_until(self, slot_ids: Ints) -> float:
        """When the first of the pins of these slots ends; 0 if one of them is not pinned."""
        if not len(slot_ids) or not self.pinned(slot_ids).all():
            return 0.0
        until = np.maximum(self._pinned_until[slot_ids], self._session_until[slot_ids])
        return float(until.min())

    def cached(self) -> Ints:
        """The cached slots, pinned ones included, in ascending order."""
        return np.flatnonzero(self._order.here(np.arange(len(self.generation))))

    def drop(self, slot_ids: Ints) -> int:
        """Free those of these slots that are cached, pinned or not; returns their number. Each is
        named once. Slots that somebody holds, or that are being filled, stay as they are."""
        cached = slot_ids[self._order.here(slot_ids)]
        if not len(cached):
            return 0
        self._order.pin(cached[self.pinned(cached)], pinned=False)
        self._order.remove(cached)
        self.num_cached -= len(cached)
        if self.listing is not None:
            self.listing.hide(cached)
        self._keyed[cached] = False
        self._settle(cached)
        return len(cached)

    def end_session_pins(self, slot_ids: Ints, now: float) -> int:
        """End the pins that these slots, each named once, have for sessions; returns how many of
        the slots are not pinned any more."""
        slot_ids = slot_ids[self.pinned(slot_ids) & (self._session_until[slot_ids] > 0)]
        self._session_until[slot_ids] = 0.0
        over = slot_ids[self._pinned_until[slot_ids] <= now]
        if len(over):
            self._order.pin(over[::-1], pinned=False)
            self.releases += 1
        return len(over)

    def fix_session_pins(self, slot_ids: Ints) -> int:
        """The pins that these slots have for sessions stay until their time; returns how many."""
        slot_ids = slot_ids[self.pinned(slot_ids) & (self._session_until[slot_ids] > 0)]
        until = np.maximum(self._pinned_until[slot_ids], self._session_until[slot_ids])
        self._pinned_until[slot_ids] = until
        self._session_until[slot_ids] = 0.0
        return len(slot_ids)

    def hold(self, slot_ids: Ints) -> None:
        """Add a user to slots that are held already."""
        self._users[slot_ids] += 1

    def let_go(self, slot_ids: Ints) -> None:
        """Remove one user. Slots without a user become cached or free. The cached ones are evicted
        in the order given."""
        self._users[slot_ids] -= 1
        self._settle(slot_ids[self._users[slot_ids] == 0])

    def header_keys(self, group: int, keys: Sequence[SlotKey | None]) -> list[bytes]:
        """The keys for the slots' headers; empty ones where no peer looks anything up."""
        if self.listing is None:
            return [b""] * len(keys)
        return header_keys(self.listing.key_prefix, group, keys)

    def any_held(self, slot_ids: Ints) -> bool:
        """Whether somebody holds one of these slots."""
        return bool(self._users[slot_ids].any())

    def evicted_lately(self, group: int, key: SlotKey) -> bool:
        """Whether this block was among the last `num_slots` evicted ones, as far as remembered."""
        if not self._order.remembers:
            return False
        return bool(self._order.evicted_lately(_content_hashes(group, [key]))[0])

    def lacks(self, slot_ids: Ints) -> Bools:
        """Which of these slots have no content, and no copy under way that would give them some."""
        lacks: Bools = ~(self._busy[slot_ids] | self._ready[slot_ids])
        return lacks

    def fill(
        self,
        group: int,
        keys: Sequence[SlotKey | None],
        slot_ids: Ints,
        prompts: Ints | None = None,
        tags: Tags | None = None,
    ) -> None:
        """Copies into these slots begin; `find` finds them by their keys from now on.

        Args:
            prompts: as for `EvictionOrder.fill`.
            tags: of the blocks, if the caller has them, and each has a key.
        """
        self._busy[slot_ids] = True
        self._index.name(group, keys, slot_ids)
        if self.listing is not None:
            self.listing.name(group, keys, slot_ids, tags)
        self._order.fill(slot_ids, _content_hashes(group, keys), prompts)

    def filled(self, slot_ids: Ints) -> None:
        """Every rank has committed these slots."""
        self._busy[slot_ids] = False
        self._ready[slot_ids] = True
        if self.listing is not None:
            keyed = self._keyed[slot_ids]
            shown = slot_ids if keyed.all() else slot_ids[keyed]
            self.listing.show(shown, self.generation[shown])
        held = self._users[slot_ids] > 0
        if not held.all():
            self._settle(slot_ids[~held])

    def unfilled(self, slot_ids: Ints) -> None:
        """Copies into these slots were cancelled or have failed."""
        self._busy[slot_ids] = self._keyed[slot_ids] = False
        # A rank may have committed the slot nevertheless. The next copy gets a new generation, so
        # that nobody takes the one for the other.
        self.generation[slot_ids] += 1
        unheld = slot_ids[self._users[slot_ids] == 0]
        self._settle(unheld)
        if len(unheld) < len(slot_ids):
            self.on_lost(slot_ids)

    def _settle(self, unheld: Ints) -> None:
        """Cache or free slots that nobody holds."""
        if not len(unheld):
            return
        cached = self._ready[unheld] & self._keyed[unheld] & ~self._busy[unheld]
        if cached.all():  # most often
            self._order.add(unheld)
            self.num_cached += len(unheld)
            self.releases += 1
            return
        # Without a user a copy under way may be cancelled. So nobody may find its slot any more,
        # pinned or not.
        lost = unheld[~self._ready[unheld]]
        if len(lost):
            self._keyed[lost] = False
            self._order.unused(lost)
        idle = unheld[~self._busy[unheld]]
        keep = self._ready[idle] & self._keyed[idle]
        kept, gone = idle[keep], idle[~keep]
        if len(kept):
            self._order.add(kept)
            self.num_cached += len(kept)
        self.releases += 1
        if not len(gone):
            return
        self._free[self._num_free : self._num_free + len(gone)] = np.sort(gone)[::-1]
        self._ready[gone] = False
        self._order.unused(gone)
        self._num_free += len(gone)
        if self._stripes > 1:
            self._free_by_stripe += count_by_stripe(gone, self._stripes)

    def forget(self) -> None:
        """Free the cached slots and forget all keys."""
        self._index.clear()
        if self.listing is not None:
            self.listing.clear()
        self.num_cached = 0
        cached = self._order.clear()
        # What `_settle` does with slots that have content and no key, of which there may be many.
        self._free[self._num_free : self._num_free + len(cached)] = cached[::-1]
        self._num_free += len(cached)
        if self._stripes > 1:
            self._free_by_stripe += count_by_stripe(cached, self._stripes)
        self._ready[cached] = False
        self.releases += 1


def _content_hashes(group: int, keys: Sequence[SlotKey | None]) -> Ints:
    """64 bits of each key, by which evicted content is remembered: its first 8 bytes, as keys are
    hashes. Of a shorter key, and of none, Python's own hash."""
    lengths = {len(key or b"") for key in keys}
    if len(lengths) == 1 and min(lengths) >= _HASHED_BYTES:
        hashes: Ints = first_words(keys).view(np.int64)  # type: ignore[arg-type]
    else:
        parts = (
            key[:_HASHED_BYTES]
            if key is not None and len(key) >= _HASHED_BYTES
            else hash(key).to_bytes(_HASHED_BYTES, sys.byteorder, signed=True)
            for key in keys
        )
        hashes = np.frombuffer(b"".join(parts), np.int64)
    return hashes ^ group
