# SPDX-License-Identifier: Apache-2.0
"""The slot directory: what the slots hold, who may read them, and when a lease expires.

One directory lives in an engine's scheduler half and decides for all its ranks: slot number n
is slot n of every rank's arena. The engine's thread and the control thread use it, under one lock
that nobody holds during I/O. A prompt may have tens of thousands of blocks, so arrays hold what is
known of the slots.

A slot is *free*, *taken* for a block that will be copied, *busy* while a worker copies into it, or
*ready*. Hand-offs hold slots in any state. Those of equal prompts, or of prompts that begin alike,
hold the same slots, and each block is copied once. A ready slot that has a key and that no hand-off
holds is *cached*: while there is room it is kept, and later hand-offs of its prefix use it.

Each decode request that asks for a hand-off gets a lease. A hand-off ends with its last lease; when
its time to live passes without a lease request or a release; or when a copy into one of its slots
fails.
"""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

import numpy as np

from omni_connector.errors import ArenaFullError
from omni_connector.handoff.messages import TOKEN_BYTES, DigestKind
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.slot_index import Ints, SlotIndex, SlotKey
from omni_connector.kv.ledger import Block

_NONE: Ints = np.empty(0, np.int64)


class LeaseState(Enum):
    """Outcome of `SlotDirectory.lease`."""

    GRANTED = "granted"
    PENDING = "pending"
    UNKNOWN = "unknown_token"
    OTHER_PROMPT = "other_prompt"


@dataclass(slots=True, eq=False)
class Handoff:
    """A prefill, running or finished, whose KV a peer may lease.

    Attributes:
        token: its name, which nobody can guess.
        prompt: whose KV the slots hold.
        keys: of each held block, one list a cache group; see `SlotDirectory.open`.
        first_blocks: logical index of the first held block, one a cache group.
        slots, generations: of each held block, one array a cache group.
        identity: of the prompt.
        deadline: seconds of the clock when it ends unless a request or a release comes before.
        committed: whether the prefill is finished; before, no lease is given.
        leases: until when each decode request may read the slots, in seconds of the clock.
        closed: whether it has ended.
    """

    token: bytes
    prompt: Prompt
    keys: Sequence[Sequence[SlotKey | None]]
    first_blocks: list[int]
    slots: list[Ints]
    generations: list[Ints]
    identity: Hashable
    deadline: float = float("inf")
    committed: bool = False
    leases: dict[Hashable, float] = field(default_factory=dict)
    closed: bool = False

    def slot(self, block: Block) -> int:
        """Slot of a block."""
        return int(self.slots[block[0]][block[1] - self.first_blocks[block[0]]])

    def generation(self, block: Block) -> int:
        """Generation of the slot of a block."""
        return int(self.generations[block[0]][block[1] - self.first_blocks[block[0]]])

    def places(self, blocks: Sequence[Block]) -> Iterator[tuple[int, Ints]]:
        """Where blocks are in `slots`: each group, and the positions in its array."""
        for g, members in groupby(blocks, key=lambda block: block[0]):
            yield g, np.array([i for _, i in members], np.int64) - self.first_blocks[g]

    def slots_of(self, blocks: Sequence[Block]) -> Ints:
        """Slots of several blocks."""
        return np.concatenate([_NONE, *(self.slots[g][at] for g, at in self.places(blocks))])

    @property
    def held(self) -> Ints:
        """All its slots."""
        return np.concatenate([*self.slots, _NONE])


class SlotDirectory:
    """Allocates the slots of an arena, and keeps its hand-offs and their leases.

    Args:
        num_slots: slots of each rank's arena.
        clock: seconds, monotonic.
        ttl: seconds that a hand-off waits for a lease request, and a lease for its release.
        randbytes: returns so many bytes that nobody can guess.

    Attributes:
        releases: changes when a slot becomes free or cached.
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
        self._users: Ints = np.zeros(num_slots, np.int64)
        self._busy = np.zeros(num_slots, bool)
        self._ready = np.zeros(num_slots, bool)
        self._index = SlotIndex(self._generation)
        self._keyed = self._index.keyed
        self._free = np.ones(num_slots, bool)
        self._num_free = num_slots
        # Cached slots in batches, the oldest first, each batch with a stamp. A slot whose stamp
        # differs from its batch's is no longer cached, or was cached again later.
        self._stamp: Ints = np.zeros(num_slots, np.int64)
        self._batches: deque[tuple[int, Ints]] = deque()
        self._last_stamp = 0
        self._num_cached = 0
        self._handoffs: dict[bytes, Handoff] = {}
        self._twins: dict[Hashable, dict[bytes, Handoff]] = {}
        self._num_leases = 0
        self._void: list[Ints] = []  # slots whose readers have not been told that they are void

    def open(
        self,
        prompt: Prompt,
        keys: Sequence[Sequence[SlotKey | None]],
        first_blocks: Sequence[int] | None = None,
    ) -> Handoff | None:
        """Take the slots for a hand-off, all of them or none.

        Args:
            prompt: whose KV the slots will hold.
            keys: for each cache group the key of each block to be held. A key names all blocks
                before its own too. It is None where only an equal prompt can use the block: the
                last one, which is not full, or where blocks are not hashed. They must not change.
            firsts: for each cache group the logical index of the first of these blocks; None: 0.

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
        first_blocks = list(first_blocks or (0 for _ in keys))
        with self._lock:
            twins = self._twins.get(identity)
            if twins:
                slots = next(iter(twins.values())).slots
                self._users[np.concatenate(slots)] += 1
            else:
                found = self._allocate(keys, first_blocks, total)
                if found is None:
                    return None
                slots = np.split(found, np.cumsum([len(group) for group in keys])[:-1])
            generations = [self._generation[group] for group in slots]
            if not twins:
                for g, group in enumerate(keys):
                    self._index.remember(g, group, first_blocks[g], slots[g], generations[g])
            token = self._randbytes(TOKEN_BYTES)
            handoff = Handoff(token, prompt, keys, first_blocks, slots, generations, identity)
            self._handoffs[handoff.token] = handoff
            self._twins.setdefault(identity, {})[handoff.token] = handoff
            return handoff

    def _allocate(
        self, keys: Sequence[Sequence[SlotKey | None]], first_blocks: Sequence[int], total: int
    ) -> Ints | None:
        parts = (self._index.find(g, group, first_blocks[g]) for g, group in enumerate(keys))
        found: Ints = np.concatenate([_NONE, *parts])
        lacks = found < 0
        shared = found[~lacks]
        needed = total - len(shared)
        from_cache = shared[self._stamp[shared] > 0]
        if needed > self._num_free + self._num_cached - len(from_cache):
            return None
        self._stamp[from_cache] = 0
        self._num_cached -= len(from_cache)
        self._users[shared] += 1
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
        self._users[numbers] = 1
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
        """Choose the blocks that a worker shall copy now, and make their slots busy until
        `filled` or `unfilled`. The others are copied for another hand-off. None when this one is
        closed, as its slots may be in other use already."""
        with self._lock:
            if handoff.closed:
                return None
            chosen: list[Block] = []
            for g, at in handoff.places(blocks):
                numbers = handoff.slots[g][at]
                mine = ~(self._busy[numbers] | self._ready[numbers])
                at, numbers = at[mine], numbers[mine]
                chosen += [(g, i) for i in (at + handoff.first_blocks[g]).tolist()]
                self._busy[numbers] = True
                self._index.name(g, [handoff.keys[g][i] for i in at.tolist()], numbers)
            return chosen

    def filled(self, handoff: Handoff, blocks: Sequence[Block]) -> None:
        """Every rank has committed these blocks."""
        with self._lock:
            numbers = handoff.slots_of(blocks)
            self._busy[numbers] = False
            self._ready[numbers] = True
            self._settle(numbers[self._users[numbers] == 0])

    def unfilled(self, handoff: Handoff, blocks: Sequence[Block]) -> None:
        """The copies were cancelled or have failed: close every hand-off that holds one of these
        slots, so that nobody reads them."""
        with self._lock:
            numbers = handoff.slots_of(blocks)
            self._busy[numbers] = self._keyed[numbers] = False
            # A rank may have committed the slot nevertheless; the next copy must be another one.
            self._generation[numbers] += 1
            unheld = numbers[self._users[numbers] == 0]
            if len(unheld) < len(numbers):
                for each in list(self._handoffs.values()):
                    if np.isin(each.held, numbers).any():
                        self._close(each)
            self._settle(unheld)

    def wanted(self, handoff: Handoff, blocks: Sequence[Block]) -> bool:
        """Whether another hand-off holds slots of these blocks of a closed one."""
        with self._lock:
            return bool(self._users[handoff.slots_of(blocks)].any())

    def commit(self, handoff: Handoff) -> None:
        """The prefill is finished; the hand-off's time to live begins."""
        with self._lock:
            handoff.committed = True
            handoff.deadline = self._clock() + self._ttl

    def lease(
        self, token: bytes, num_tokens: int, digest: bytes, kind: DigestKind, lease: Hashable
    ) -> tuple[LeaseState, Handoff | None]:
        """Lease a hand-off's slots to a peer for `ttl` seconds.

        Copies of its last blocks may still be under way: each slot's header tells readers when the
        slot is committed, or that it will not be.

        Args:
            token: the hand-off's.
            num_tokens, digest, kind: of the asker's prompt, which must be that of the hand-off.
            lease: names the request; one of the same name renews its lease.
        """
        with self._lock:
            handoff = self._handoffs.get(token)
        if handoff is None:
            return LeaseState.UNKNOWN, None
        prompt = handoff.prompt
        if prompt.num_tokens != num_tokens or not secrets.compare_digest(
            prompt.digest(kind), digest
        ):
            return LeaseState.OTHER_PROMPT, None
        with self._lock:
            if handoff.closed:
                return LeaseState.UNKNOWN, None
            if self._waits(handoff):
                return LeaseState.PENDING, None
            handoff.deadline = self._clock() + self._ttl
            self._num_leases += lease not in handoff.leases
            handoff.leases[lease] = handoff.deadline
            return LeaseState.GRANTED, handoff

    def pending(self, token: bytes) -> bool:
        """Whether a lease request for this hand-off has to wait; cheaper than `lease`."""
        with self._lock:
            handoff = self._handoffs.get(token)
            return handoff is not None and self._waits(handoff)

    def _waits(self, handoff: Handoff) -> bool:
        held = handoff.held
        return not handoff.committed or not bool((self._ready[held] | self._busy[held]).all())

    def release(self, token: bytes, lease: Hashable) -> None:
        """End a lease, and with the last one the hand-off. Unknown ones are ignored."""
        with self._lock:
            handoff = self._handoffs.get(token)
            if handoff is None or handoff.leases.pop(lease, None) is None:
                return
            self._num_leases -= 1
            if not handoff.leases:
                self._close(handoff)

    def drop(self, token: bytes) -> None:
        """End a hand-off that nobody wants, unless it is leased or its prefill still runs."""
        with self._lock:
            handoff = self._handoffs.get(token)
            if handoff is not None and handoff.committed and not handoff.leases:
                self._close(handoff)

    def close(self, token: bytes) -> bool:
        """End a hand-off; returns whether there was one of this token."""
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
        held = handoff.held[::-1]  # so that the end of a prefix is evicted before its beginning
        self._users[held] -= 1
        self._settle(held[self._users[held] == 0])

    def _settle(self, unheld: Ints) -> None:
        """Cache or free slots that no hand-off holds."""
        # A copy under way may be cancelled now, so no other hand-off may find its slot.
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
        """End the leases and the hand-offs that are past their time; returns how many hand-offs."""
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
        """Close every hand-off, and share no block that is here now with later ones.

        Returns:
            Slots that peers may be reading, and for each a generation that no block has. Written to
            the slot's header, it tells readers that the slot is void.
        """
        with self._lock:
            self._void_all()
            numbers = np.unique(np.concatenate(self._void))
            self._void.clear()
            return numbers.tolist(), self._generation[numbers].tolist()

    def void_unless(self, valid: Callable[[], bool]) -> bool:
        """Do the work of a `void` that is due, before it is called; returns whether there was any.

        The engine's thread takes no slots between the reset and that call of `void`, which then
        returns these slots too.

        Args:
            valid: returns False from the reset until `void` is about to be called.
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
        numbers = np.unique(np.concatenate([*leased, _NONE]))
        self._generation[numbers] += 1
        self._void.append(numbers)

    def usage(self) -> tuple[int, int, int]:
        """(slots held, slots cached, leases)."""
        with self._lock:
            held = self.num_slots - self._num_free - self._num_cached
            return held, self._num_cached, self._num_leases
