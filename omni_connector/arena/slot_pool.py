# SPDX-License-Identifier: Apache-2.0
"""Allocates the slots of an arena: which are free, held, being filled, or cached.

A slot is *free*, *taken* for a block that will be copied, *busy* while a worker copies into it, or
*ready*. Users hold slots in any state. Those whose prompts begin alike hold the same slots, and
each block is copied once. A ready slot that has a key and that nobody holds is *cached*: while
there is room it is kept, and later prompts that begin like it use it. A *pinned* slot that nobody
holds is cached, too, but no other block gets it before its pin ends.

Slots that `keep` gives, and privileged ones (pinned, or favoured by the order of eviction), belong
to a tenant; slots of hand-offs do not.

A prompt may have tens of thousands of blocks, so arrays hold what is known of the slots.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.block_index import BlockIndex, Tags, tags_of
from omni_connector.arena.eviction import EvictionOrder
from omni_connector.arena.format import header_keys
from omni_connector.arena.slot_index import Ints, SlotChanges, SlotIndex, SlotKey
from omni_connector.config import Admission
from omni_connector.runtime.turns import MakeLock

Bools = NDArray[np.bool_]

# Pins end at multiples of so many seconds, the next one after their time. So the pinned slots are
# searched for ended pins at most four times a second, however many pins there are.
_PIN_TICK_S: Final = 0.25

NONE: Final[Ints] = np.empty(0, np.int64)
"""No slots."""


class SlotListing:
    """Keeps the index of an arena. The caller holds the lock of the pool.

    Args:
        index: of the arena; closed by its owner.
        key_prefix: as for `header_keys`.

    Attributes:
        key_prefix: what blocks that are named from now on have; may be changed.
        changes: is told of all changes; None where nobody asks for them.
    """

    def __init__(
        self, index: BlockIndex, key_prefix: bytes, changes: SlotChanges | None = None
    ) -> None:
        self._index = index
        self.key_prefix = key_prefix
        self.changes = changes
        self._tags: Tags = np.zeros(index.num_slots, np.uint64)

    def name(self, group: int, keys: Sequence[SlotKey | None], slots: Ints) -> None:
        """These slots will hold these blocks; those without a key are never listed."""
        if len(slots):
            # A tag depends on whether the hashes that come with it have one length.
            named = np.array([key is not None for key in keys])
            hashes = [key for key in keys if key is not None]
            self._tags[slots[named]] = tags_of(self.key_prefix, group, hashes)
            if self.changes is not None:
                self.changes.name(group, keys, slots)

    def show(self, slots: Ints, generations: Ints) -> None:
        """Peers find these slots from now on."""
        if len(slots):
            self._index.add(self._tags[slots], slots, generations)
            if self.changes is not None:
                self.changes.show(slots, True)

    def hide(self, slots: Ints) -> None:
        """Peers find these slots no more."""
        self._index.remove(slots)
        if self.changes is not None:
            self.changes.show(slots, False)

    def clear(self) -> None:
        """Peers find nothing any more."""
        self._index.clear()
        if self.changes is not None:
            self.changes.clear()


class Kept(NamedTuple):
    """What `SlotPool.keep` did for blocks that had no slot.

    Attributes:
        chosen: which of the keys got one.
        slots: these slots.
        over_quota: how many got none because of their tenant's quota.
        dropped: how many got none for lack of room.
        beyond: those of these that were more than were to be taken, as far as there would be room.
    """

    chosen: Ints
    slots: Ints
    over_quota: int
    dropped: int
    beyond: Ints


class SlotPool:
    """The slots of one arena. Whoever calls anything of it holds its lock, and nobody holds that
    during I/O.

    Args:
        num_slots: of the arena.
        lock: makes the lock.

    Attributes:
        lock: the pool's.
        listing: lists for peers the slots that have keys; None where no peer looks for any.
        generation: of each slot; it grows with each use. (slots,) int64.
        releases: changes when a slot becomes free or cached.
        num_cached: slots that are cached, pinned ones included.
        num_privileged: slots that are favoured or pinned, in any state.
        quota: slots that may belong to one tenant; None bounds nobody.
        on_lost: is told the slots of copies that have failed, where somebody holds one of them.
    """

    def __init__(self, num_slots: int, lock: MakeLock = threading.Lock) -> None:
        self.lock = lock()
        self.listing: SlotListing | None = None
        self.generation: Ints = np.zeros(num_slots, np.int64)
        self.releases = 0
        self.num_cached = 0
        self.quota: int | None = None
        self.on_lost: Callable[[Ints], None] = lambda numbers: None
        self._users = np.zeros(num_slots, np.int32)
        self._busy = np.zeros(num_slots, bool)
        self._ready = np.zeros(num_slots, bool)
        self._index = SlotIndex(self.generation)
        self._keyed = self._index.keyed
        # A stack of the free slots, of which there are `_num_free`. Those that came free last are
        # taken first: they are warm, and whatever the arena's size, no array is searched.
        self._free = np.arange(num_slots - 1, -1, -1, np.int32)
        self._num_free = num_slots
        self._order = EvictionOrder(num_slots)
        self._pinned_until = np.zeros(num_slots)
        self._next_end = float("inf")  # no pin ends before
        # Which slots are favoured or pinned; how many are, in all and of each tenant.
        self._privileged = np.zeros(num_slots, bool)
        self.num_privileged = 0
        self._privileged_of: Counter[int] = Counter()
        # To whom each slot belongs, 0 for nobody; and how many belong to each.
        self._tenant: Ints = np.zeros(num_slots, np.int64)
        self._kept_of: Counter[int] = Counter()

    def counts(self) -> tuple[int, int, int]:
        """(free slots, cached slots, pinned ones of these)."""
        return self._num_free, self.num_cached, self._order.num_pinned

    @property
    def num_pinned(self) -> int:
        """Cached slots that are pinned."""
        return self._order.num_pinned

    @property
    def _num_available(self) -> int:
        return self._num_free + self.num_cached - self._order.num_pinned

    def take(
        self, keys: Sequence[Sequence[SlotKey | None]], first_blocks: Sequence[int]
    ) -> tuple[list[Ints], list[Ints]] | None:
        """Hold a slot for each block of a prompt: the one that has its key, else a new one.

        Args:
            keys: for each cache group the key of each block; None for a block that has none. The
                caller does not change them any more.
            first_blocks: for each cache group the logical index of the first of these blocks.

        Returns:
            The slots of each group, and their generations; None when there is no room now.
        """
        parts = (self._index.find(g, group, first_blocks[g]) for g, group in enumerate(keys))
        found: Ints = np.concatenate([NONE, *parts])
        lacks = found < 0
        shared = found[~lacks]
        needed = len(found) - len(shared)
        from_cache = shared[self._order.here(shared)]
        lost = len(from_cache) - np.count_nonzero(self.pinned(from_cache))
        if needed > self._num_available - lost:
            return None
        self._order.remove(from_cache)
        self._order.used_again(shared)
        self.num_cached -= len(from_cache)
        self._users[shared] += 1
        if needed:
            found[lacks] = self._new(needed)
        ends = accumulate(map(len, keys))
        slots = [found[end - len(group) : end] for group, end in zip(keys, ends, strict=True)]
        generations = [self.generation[group] for group in slots]
        for g, group in enumerate(keys):
            self._index.remember(g, group, first_blocks[g], slots[g], generations[g])
        return slots, generations

    def _new(self, count: int) -> Ints:
        left = max(0, self._num_free - count)
        numbers: Ints = self._free[left : self._num_free][::-1].astype(np.int64)
        self._num_free = left
        if len(numbers) < count:
            evicted = self._order.evict(count - len(numbers))
            self.num_cached -= len(evicted)
            self._count_privileged(evicted)
            self._disown(evicted)
            numbers = np.concatenate([numbers, evicted])
        if self.listing is not None:
            self.listing.hide(numbers)
        self.generation[numbers] += 1
        self._ready[numbers] = self._keyed[numbers] = False
        self._users[numbers] = 1
        return numbers

    def touch(self, numbers: Ints, generations: Ints) -> None:
        """Peers have used these slots while they had these generations.

        Slots that have another generation by now, or that are no slots of this arena, are ignored.
        Of cached slots, those that come first are evicted first. A slot may come more than once.
        """
        known = (numbers >= 0) & (numbers < len(self.generation))
        numbers, generations = numbers[known], generations[known]
        numbers = numbers[self._ready[numbers] & (self.generation[numbers] == generations)]
        self._order.used_again(numbers)
        latest = numbers[self._order.here(numbers)][::-1]
        _, first = np.unique(latest, return_index=True)
        cached = latest[np.sort(first)][::-1]
        self._order.remove(cached)
        self._order.add(cached)

    def requeue(self, numbers: Ints, generations: Ints) -> None:
        """Whoever has filled these different slots, in these generations, used them until now.

        Those that are cached are evicted as after `touch`, but they were not used again.
        """
        self._order.requeue(numbers[self.generation[numbers] == generations])

    def find(self, group: int, keys: Sequence[SlotKey]) -> Ints:
        """The slots that have, or will have, these blocks of a group; none for those without."""
        found = self._index.find(group, keys, 1)
        return found[found >= 0]

    def keep(
        self,
        group: int,
        keys: Sequence[SlotKey],
        most: int,
        tenant: Ints | int = 0,
        prompts: Ints | None = None,
    ) -> Kept:
        """Hold a slot, to be filled, for each block that has none, as far as there is room.

        Beyond the quota of a tenant, slots of its own make room, those whose turn it is.

        Args:
            keys: of blocks of the group, in any order, each different.
            most: slots that may be taken.
            tenant: to whom the slots will belong, 0 for nobody; without a quota, to whom each will.
            prompts: as for `EvictionOrder.fill`.
        """
        lacking = np.flatnonzero(self._index.find(group, keys, 1) < 0)
        wanted = lacking[:most]
        tenants = np.broadcast_to(tenant, len(keys))[wanted]
        within = self._room(int(tenants[0]) if len(tenants) else 0, len(wanted))
        chosen = wanted[: min(within, self._num_available)]
        slots = self._new(len(chosen)) if len(chosen) else NONE
        self._own(slots, tenants[: len(slots)])
        whose = None if prompts is None else prompts[chosen]
        self.fill(group, [keys[i] for i in chosen.tolist()], slots, whose)
        over_quota = len(wanted) - within
        dropped = len(lacking) - over_quota - len(chosen)
        quota = len(self.generation) if self.quota is None else self.quota
        left = max(0, min(self._num_available, quota - len(slots)))
        return Kept(chosen, slots, over_quota, dropped, lacking[most:][:left])

    def admits(
        self, group: int, keys: Sequence[SlotKey], admission: Admission, prompts: Ints | None = None
    ) -> Bools:
        """Which blocks of a group are worth a slot; see `EvictionOrder.admits`."""
        if admission != "second_hit" and len(keys) <= self._num_free:
            return np.ones(len(keys), bool)
        return self._order.admits(_content_hashes(group, keys), admission, prompts)

    def _room(self, tenant: int, count: int) -> int:
        """How many of so many more slots may belong to a tenant, after its own have made room."""
        if not tenant or self.quota is None:
            return count
        if (over := self._kept_of[tenant] + count - self.quota) > 0:
            over = max(over, self.quota // 64)  # all slots are looked at for that
            gone = self._order.evict_of(np.flatnonzero(self._tenant == tenant), over)
            self.num_cached -= len(gone)
            self._keyed[gone] = False
            if self.listing is not None:
                self.listing.hide(gone)
            self._settle(gone)
        return max(0, min(count, self.quota - self._kept_of[tenant]))

    def _own(self, numbers: Ints, tenants: Ints | int) -> None:
        """These slots, which belong to nobody, belong to tenants now; to nobody where 0 is one."""
        self._tenant[numbers] = tenants
        self._count_owned(self._kept_of, numbers, 1)

    def _disown(self, numbers: Ints) -> None:
        self._count_owned(self._kept_of, numbers, -1)
        self._tenant[numbers] = 0

    def _count_owned(self, counter: Counter[int], numbers: Ints, each: int) -> None:
        owners = self._tenant[numbers]
        tenants, counts = np.unique(owners[owners != 0], return_counts=True)
        for tenant, count in zip(tenants.tolist(), counts.tolist(), strict=True):
            counter[tenant] += each * count
            if not counter[tenant]:
                del counter[tenant]

    def _count_privileged(self, numbers: Ints) -> None:
        """Count anew what was done to these different slots; before they get another owner."""
        before, now = self._privileged[numbers], self._order.privileged(numbers)
        for changed, each in ((numbers[now & ~before], 1), (numbers[before & ~now], -1)):
            if len(changed):
                self.num_privileged += each * len(changed)
                self._count_owned(self._privileged_of, changed, each)
        self._privileged[numbers] = now

    def privileged_of(self, tenant: int) -> int:
        """How many slots of a tenant are favoured or pinned."""
        return self._privileged_of[tenant]

    def privileged(self, numbers: Ints) -> Bools:
        """Which of these slots are favoured or pinned."""
        return self._privileged[numbers]

    def privilege(
        self, numbers: Ints, tenant: int, *, favour: bool, pin_until: float | None
    ) -> int:
        """Favour or pin slots that were found, in the order of their prompt, for a tenant.

        A favoured slot is evicted later than others, until it holds another block. A pin ends with
        `end_pins`, and with its block: when the slots are forgotten, or a copy has failed. A pin
        that ends later stays as it is.

        Args:
            pin_until: when their pin ends; None pins none.

        Returns:
            How many the quota of the tenant allows.
        """
        owned = self._tenant[numbers] != 0
        kept = numbers[owned]
        if len(kept):  # before others of the tenant make room
            self._privilege(kept, favour, pin_until)
        more = numbers[~owned]
        if len(more):
            more = more[: self._room(tenant, len(more))]
            self._own(more, tenant)
            self._privilege(more, favour, pin_until)
        return len(kept) + len(more)

    def _privilege(self, numbers: Ints, favour: bool, pin_until: float | None) -> None:
        if favour:
            self._order.favour(numbers[::-1])
        if pin_until is not None:
            end = math.ceil(pin_until / _PIN_TICK_S) * _PIN_TICK_S
            former = self._pinned_until[numbers] * self.pinned(numbers)
            self._pinned_until[numbers] = np.maximum(former, end)
            self._next_end = min(self._next_end, end)
            self._order.pin(numbers[::-1], pinned=True)
        self._count_privileged(numbers)

    def pinned(self, numbers: Ints) -> Bools:
        """Which of these slots are pinned."""
        return self._order.pinned[numbers]

    def end_pins(self, now: float) -> None:
        """End the pins whose time has come."""
        if now < self._next_end:
            return
        numbers = np.flatnonzero(self._order.pinned)
        ends = self._pinned_until[numbers]
        due = numbers[ends <= now]
        self._next_end = float(ends[ends > now].min(initial=np.inf))
        if len(due):
            # Most prompts have got their slots in ascending order.
            self._order.pin(due[::-1], pinned=False)
            self._count_privileged(due)
            self.releases += 1

    def hold(self, numbers: Ints) -> None:
        """Hold slots that another user holds already."""
        self._users[numbers] += 1

    def let_go(self, numbers: Ints) -> None:
        """End one user's hold. Slots that nobody else holds are cached or free, and those that come
        first are evicted first."""
        self._users[numbers] -= 1
        self._settle(numbers[self._users[numbers] == 0])

    def header_keys(self, group: int, keys: Sequence[SlotKey | None]) -> list[bytes]:
        """What the headers of slots with these keys say; nothing where nobody looks them up."""
        if self.listing is None:
            return [b""] * len(keys)
        return header_keys(self.listing.key_prefix, group, keys)

    def any_held(self, numbers: Ints) -> bool:
        """Whether somebody holds one of these slots."""
        return bool(self._users[numbers].any())

    def evicted_lately(self, group: int, key: SlotKey) -> bool:
        """Whether this block is remembered as evicted, among the last of as many as there are
        slots."""
        return bool(self._order.evicted_lately(_content_hashes(group, [key]))[0])

    def lacks(self, numbers: Ints) -> Bools:
        """Which of these slots have no content, and get none from a copy under way."""
        lacks: Bools = ~(self._busy[numbers] | self._ready[numbers])
        return lacks

    def fill(
        self,
        group: int,
        keys: Sequence[SlotKey | None],
        numbers: Ints,
        prompts: Ints | None = None,
    ) -> None:
        """Copies into these slots begin; from now on they are found by their keys."""
        self._busy[numbers] = True
        self._index.name(group, keys, numbers)
        if self.listing is not None:
            self.listing.name(group, keys, numbers)
        self._order.fill(numbers, _content_hashes(group, keys), prompts)

    def filled(self, numbers: Ints) -> None:
        """Every rank has committed these slots."""
        self._busy[numbers] = False
        self._ready[numbers] = True
        if self.listing is not None:
            shown = numbers[self._keyed[numbers]]
            self.listing.show(shown, self.generation[shown])
        self._settle(numbers[self._users[numbers] == 0])

    def unfilled(self, numbers: Ints) -> None:
        """Copies were cancelled or have failed."""
        self._busy[numbers] = self._keyed[numbers] = False
        # A rank may have committed the slot nevertheless; the next copy must be another one.
        self.generation[numbers] += 1
        unheld = numbers[self._users[numbers] == 0]
        self._settle(unheld)
        if len(unheld) < len(numbers):
            self.on_lost(numbers)

    def _settle(self, unheld: Ints) -> None:
        """Cache or free slots that nobody holds."""
        # A copy under way may be cancelled now, so no other user may find its slot, pinned or not.
        lost = unheld[~self._ready[unheld]]
        self._keyed[lost] = False
        self._order.unused(lost)
        self._count_privileged(lost)
        idle = unheld[~self._busy[unheld]]
        keep = self._ready[idle] & self._keyed[idle]
        kept, gone = idle[keep], idle[~keep]
        if len(kept):
            self._order.add(kept)
            self.num_cached += len(kept)
        self._free[self._num_free : self._num_free + len(gone)] = np.sort(gone)[::-1]
        self._ready[gone] = False
        self._order.unused(gone)
        self._count_privileged(gone)
        self._disown(gone)
        self._num_free += len(gone)
        self.releases += 1

    def forget(self) -> None:
        """Free the cached slots, and let no slot be found by its key."""
        self._index.clear()
        if self.listing is not None:
            self.listing.clear()
        self.num_cached = 0
        cached = self._order.clear()
        self._count_privileged(np.flatnonzero(self._privileged))
        self._settle(cached)


def _content_hashes(group: int, keys: Sequence[SlotKey | None]) -> Ints:
    return np.fromiter(map(hash, keys), np.int64, len(keys)) ^ group
