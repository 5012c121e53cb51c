# SPDX-License-Identifier: Apache-2.0
"""The slot directory: which slots hold what, who may read them, and until when.

One directory lives in an engine's scheduler half and decides for all its ranks: slot number n
is slot n of every rank's arena. It is plain Python behind one lock that is never held over
I/O, used by the engine's thread and by the control thread. What is known of the slots lies in
arrays, as a prompt may have tens of thousands of them.

A slot is *free*, *taken* for a block that is yet to be copied, *busy* (a worker copies into it), or
*ready*. Hand-offs hold slots, several the same ones where their prompts begin alike or are the
same: also slots that are not ready, whose copy is made once. A ready slot with a key that nobody
holds is *cached*: kept as long as nobody needs the room, so that the next hand-off of the same
prefix need not copy it.

A hand-off is leased to each peer that claims it. It ends with the last lease, or when none was
claimed or released in time; and with a copy that failed, for all that hold the slot.
"""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from itertools import compress, groupby

import numpy as np

from omni_connector.errors import ArenaFullError
from omni_connector.handoff.handoff import Block, Handoff
from omni_connector.handoff.messages import TOKEN_BYTES, DigestKind
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.slot_index import Ints, SlotIndex, SlotKey


class ClaimState(Enum):
    """Outcome of `SlotDirectory.claim`."""

    GRANTED = "granted"
    PENDING = "pending"
    UNKNOWN = "unknown_token"
    OTHER_PROMPT = "other_prompt"


class SlotDirectory:
    """Allocates the slots of an arena and keeps its hand-offs.

    Args:
        num_slots: slots of each rank's arena.
        clock: seconds, monotonic.
        ttl: seconds a hand-off waits for its claim, and a claimed one for its release.
        randbytes: so many bytes that nobody can guess.

    Attributes:
        releases: changes when a slot comes free, or could be evicted.
    """

    def __init__(
        self,
        num_slots: int,
        clock: Callable[[], float],
        ttl: float,
        randbytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.num_slots = num_slots
        self.releases = 0
        self._clock = clock
        self._ttl = ttl
        self._randbytes = randbytes
        self._lock = threading.Lock()
        self._generation: Ints = np.zeros(num_slots, np.int64)
        self._holders: Ints = np.zeros(num_slots, np.int64)
        self._busy = np.zeros(num_slots, bool)
        self._ready = np.zeros(num_slots, bool)
        self._index = SlotIndex(self._generation)
        self._keyed = self._index.keyed
        self._free = np.ones(num_slots, bool)
        self._num_free = num_slots
        # Cached slots, in batches of one stamp each, the oldest first. A slot that has another
        # stamp by now is not cached any more, or again since.
        self._stamp: Ints = np.zeros(num_slots, np.int64)
        self._batches: deque[tuple[int, Ints]] = deque()
        self._last_stamp = 0
        self._num_cached = 0
        self._handoffs: dict[bytes, Handoff] = {}
        self._twins: dict[Hashable, dict[bytes, Handoff]] = {}
        self._num_leases = 0
        self._void: list[Ints] = []  # slots that were voided and nobody was told of

    def open(
        self,
        prompt: Prompt,
        keys: Sequence[Sequence[SlotKey | None]],
        firsts: Sequence[int] | None = None,
    ) -> Handoff | None:
        """Take the slots for a hand-off, all of them or none.

        Args:
            prompt: what the slots will hold.
            keys: for each cache group the key of each block to be held, which names those before
                it too; None for one that only the same prompt can use (the last, partial one; or
                where blocks are not hashed). They are kept, and must not change.
            firsts: for each cache group the logical index of the first of them, else 0.

        Returns:
            The hand-off, or None when there is no room now.

        Raises:
            ArenaFullError: it would not fit into an empty arena.
        """
        total = sum(map(len, keys))
        if total > self.num_slots:
            raise ArenaFullError(
                f"a prompt of {prompt.num_tokens} tokens needs {total} slots, "
                f"the arena has {self.num_slots}; raise arena_gib"
            )
        identity = prompt.identity()
        firsts = list(firsts or (0 for _ in keys))
        with self._lock:
            twins = self._twins.get(identity)
            if twins:
                slots = next(iter(twins.values())).slots
                self._holders[np.concatenate(slots)] += 1
            else:
                found = self._allocate(keys, firsts, total)
                if found is None:
                    return None
                slots = np.split(found, np.cumsum([len(group) for group in keys])[:-1])
            generations = [self._generation[group] for group in slots]
            if not twins:
                for g, group in enumerate(keys):
                    self._index.remember(g, group, firsts[g], slots[g], generations[g])
            handoff = Handoff(
                token=self._randbytes(TOKEN_BYTES),
                prompt=prompt,
                keys=keys,
                firsts=firsts,
                slots=slots,
                generations=generations,
                identity=identity,
            )
            self._handoffs[handoff.token] = handoff
            self._twins.setdefault(identity, {})[handoff.token] = handoff
            return handoff

    def _allocate(
        self, keys: Sequence[Sequence[SlotKey | None]], firsts: Sequence[int], total: int
    ) -> Ints | None:
        parts = [self._index.find(g, group, firsts[g]) for g, group in enumerate(keys)]
        found: Ints = np.concatenate([*parts, np.empty(0, np.int64)])
        lacks = found < 0
        shared = found[~lacks]
        needed = total - len(shared)
        if len(shared):
            from_cache = shared[self._stamp[shared] > 0]
            if needed > self._num_free + self._num_cached - len(from_cache):
                return None
            self._stamp[from_cache] = 0
            self._num_cached -= len(from_cache)
            self._holders[shared] += 1
        elif needed > self._num_free + self._num_cached:
            return None
        if needed:
            found[lacks] = self._take(needed)
        return found

    def _take(self, count: int) -> Ints:
        numbers = np.flatnonzero(self._free)[:count]  # low slots are warm and consecutive
        self._free[numbers] = False
        self._num_free -= len(numbers)
        if len(numbers) < count:
            numbers = np.concatenate([numbers, self._evict(count - len(numbers))])
        self._generation[numbers] += 1
        self._ready[numbers] = self._keyed[numbers] = False
        self._holders[numbers] = 1
        return numbers

    def _evict(self, count: int) -> Ints:
        evicted: list[Ints] = []
        self._num_cached -= count
        while count:
            stamp, batch = self._batches.popleft()
            batch = batch[self._stamp[batch] == stamp]
            if len(batch) > count:
                self._batches.appendleft((stamp, batch[count:]))
                batch = batch[:count]
            self._stamp[batch] = 0
            evicted.append(batch)
            count -= len(batch)
        return np.concatenate(evicted)

    def copying(self, handoff: Handoff, blocks: Sequence[Block]) -> list[Block] | None:
        """A worker is about to write blocks of a hand-off.

        Returns:
            Those of them that it shall write, and that end with `filled` or `unfilled`: their slots
            stay taken until then, whatever becomes of the hand-off. The others were copied for
            another one. None when the hand-off is closed: its slots may be another's already.
        """
        with self._lock:
            if handoff.closed:
                return None
            chosen: list[Block] = []
            for g, members in groupby(blocks, key=lambda block: block[0]):
                asked = list(members)
                at = np.array([i for _, i in asked], np.int64) - handoff.firsts[g]
                numbers = handoff.slots[g][at]
                mine = ~(self._busy[numbers] | self._ready[numbers])
                chosen += compress(asked, mine.tolist())
                numbers = numbers[mine]
                self._busy[numbers] = True
                keys = handoff.keys[g]
                self._index.name(g, [keys[i] for i in at[mine].tolist()], numbers)
            return chosen

    def filled(self, handoff: Handoff, blocks: Sequence[Block]) -> None:
        """Every rank has published these blocks."""
        with self._lock:
            numbers = handoff.slots_of(blocks)
            self._busy[numbers] = False
            self._ready[numbers] = True
            self._settle(numbers[self._holders[numbers] == 0])

    def unfilled(self, handoff: Handoff, blocks: Sequence[Block]) -> None:
        """The copies were cancelled or failed: nothing may be read from these slots, and every
        hand-off that holds one of them is closed."""
        with self._lock:
            numbers = handoff.slots_of(blocks)
            self._busy[numbers] = self._keyed[numbers] = False
            # A rank may have published it all the same: the next copy is another one.
            self._generation[numbers] += 1
            unheld = numbers[self._holders[numbers] == 0]
            if len(unheld) < len(numbers):
                for each in list(self._handoffs.values()):
                    if np.isin(each.held, numbers).any():
                        self._close(each)
            self._settle(unheld)

    def wanted(self, handoff: Handoff, blocks: Sequence[Block]) -> bool:
        """Whether any hand-off holds the slots of these blocks of a closed one."""
        with self._lock:
            return bool(self._holders[handoff.slots_of(blocks)].any())

    def seal(self, handoff: Handoff) -> None:
        """The prefill is finished; from now on the hand-off's time to live runs."""
        with self._lock:
            handoff.sealed = True
            handoff.deadline = self._clock() + self._ttl

    def claim(
        self, token: bytes, num_tokens: int, digest: bytes, kind: DigestKind, lease: Hashable
    ) -> tuple[ClaimState, Handoff | None]:
        """Lease a hand-off's slots to a peer until `ttl` seconds from now.

        The copies of its last blocks may still be under way: readers see in each slot's header
        when it is published, or that it will not be.

        Args:
            lease: names this claim; the same one again is the same lease.
        """
        with self._lock:
            handoff = self._handoffs.get(token)
        if handoff is None:
            return ClaimState.UNKNOWN, None
        prompt = handoff.prompt
        if prompt.num_tokens != num_tokens or not secrets.compare_digest(
            prompt.digest(kind), digest
        ):
            return ClaimState.OTHER_PROMPT, None
        with self._lock:
            if handoff.closed:
                return ClaimState.UNKNOWN, None
            if self._waits(handoff):
                return ClaimState.PENDING, None
            handoff.deadline = self._clock() + self._ttl
            self._num_leases += lease not in handoff.leases
            handoff.leases[lease] = handoff.deadline
            return ClaimState.GRANTED, handoff

    def pending(self, token: bytes) -> bool:
        """Whether a claim of this hand-off has to wait; cheaper than to claim it."""
        with self._lock:
            handoff = self._handoffs.get(token)
            return handoff is not None and self._waits(handoff)

    def _waits(self, handoff: Handoff) -> bool:
        held = handoff.held
        return not handoff.sealed or not bool((self._ready[held] | self._busy[held]).all())

    def release(self, token: bytes, lease: Hashable) -> None:
        """A lease has ended; with the last one the hand-off has. Unknown ones are ignored."""
        with self._lock:
            handoff = self._handoffs.get(token)
            if handoff is None or handoff.leases.pop(lease, None) is None:
                return
            self._num_leases -= 1
            if not handoff.leases:
                self._close(handoff)

    def drop(self, token: bytes) -> None:
        """Nobody will claim this hand-off; one that is leased, or not sealed, stays."""
        with self._lock:
            handoff = self._handoffs.get(token)
            if handoff is not None and handoff.sealed and not handoff.leases:
                self._close(handoff)

    def close(self, token: bytes) -> bool:
        """End a hand-off; unknown tokens are ignored. True if it was there."""
        with self._lock:
            handoff = self._handoffs.get(token)
            if handoff is None:
                return False
            self._close(handoff)
            return True

    def _close(self, handoff: Handoff) -> None:
        del self._handoffs[handoff.token]
        handoff.closed = True
        self._num_leases -= len(handoff.leases)
        handoff.leases.clear()
        twins = self._twins[handoff.identity]
        del twins[handoff.token]
        if not twins:
            del self._twins[handoff.identity]
        held = handoff.held[::-1]  # of a prefix its end is evicted first
        self._holders[held] -= 1
        self._settle(held[self._holders[held] == 0])

    def _settle(self, unheld: Ints) -> None:
        """What becomes of slots that nobody holds."""
        # A copy under way may be cancelled now: nobody joins it any more.
        self._keyed[unheld[~self._ready[unheld]]] = False
        idle = unheld[~self._busy[unheld]]
        keep = self._ready[idle] & self._keyed[idle]
        kept, gone = idle[keep], idle[~keep]
        if len(kept):
            self._last_stamp += 1
            self._stamp[kept] = self._last_stamp
            self._batches.append((self._last_stamp, kept))
            self._num_cached += len(kept)
        self._free[gone] = True
        self._ready[gone] = False
        self._num_free += len(gone)
        self.releases += 1

    def expire(self) -> int:
        """Close the hand-offs past their deadline; how many there were."""
        now = self._clock()
        with self._lock:
            late = [each for each in self._handoffs.values() if each.deadline <= now]
            for handoff in late:
                self._close(handoff)
            for handoff in self._handoffs.values():
                ended = [lease for lease, until in handoff.leases.items() if until <= now]
                for lease in ended:
                    del handoff.leases[lease]
                self._num_leases -= len(ended)
        return len(late)

    def void(self) -> tuple[list[int], list[int]]:
        """Close every hand-off, and let no later one share a block that is here now.

        Returns:
            Slots that peers may be reading, and for each a generation that no block has: given
            to the slot, it tells them that what they read is void.
        """
        with self._lock:
            self._void_all()
            numbers = np.unique(np.concatenate(self._void))
            self._void.clear()
            return numbers.tolist(), self._generation[numbers].tolist()

    def void_unless(self, valid: Callable[[], bool]) -> bool:
        """Free early what a `void` that is due will end; whether there was anything.

        The engine's thread takes no slots between what makes it due and that call of `void`, which
        tells of these slots too.

        Args:
            valid: false from what makes it due until `void` is about to be called.
        """
        with self._lock:
            if valid() or not (self._handoffs or self._num_cached):
                return False
            self._void_all()
            return True

    def _void_all(self) -> None:
        leased = [each.held for each in self._handoffs.values() if each.leases]
        for handoff in list(self._handoffs.values()):
            self._close(handoff)
        self._index.clear()
        cached = np.flatnonzero(self._stamp)
        self._stamp[cached] = 0
        self._batches.clear()
        self._num_cached = 0
        self._settle(cached)
        numbers = np.unique(np.concatenate([*leased, np.empty(0, np.int64)]))
        self._generation[numbers] += 1
        self._void.append(numbers)

    def usage(self) -> tuple[int, int, int]:
        """(slots held, slots cached, leases)."""
        with self._lock:
            held = self.num_slots - self._num_free - self._num_cached
            return held, self._num_cached, self._num_leases
