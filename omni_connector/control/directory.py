# SPDX-License-Identifier: Apache-2.0
"""The slot directory: which slots hold what, who may read them, and until when.

One directory lives in an engine's scheduler half and decides for all its ranks: slot number n
is slot n of every rank's arena. It is plain Python behind one lock that is never held over
I/O, used by the engine's thread and by the control thread.

A slot is *free*, *filling* (a worker copies into it), or *ready*. A hand-off holds its slots
until it is released, dropped or expired. A ready slot with a key that nobody holds is kept as
long as nobody needs the room, so that the next hand-off of the same prefix need not copy it.
"""

import heapq
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from omni_connector.control.messages import TOKEN_BYTES, DigestKind
from omni_connector.control.prompt import Prompt
from omni_connector.errors import ArenaFullError

SlotKey = tuple[int, bytes]
"""(cache group, vLLM's block hash)."""


@dataclass(slots=True)
class _Slot:
    generation: int = 0
    key: SlotKey | None = None
    holders: int = 0
    busy: int = 0
    ready: bool = False


@dataclass(slots=True)
class Handoff:
    """One finished or running prefill whose KV a peer may claim.

    Attributes:
        token: unguessable name of the hand-off.
        prompt: what the slots will hold the KV of.
        firsts: logical index of the first block that is held, one a cache group.
        slots: slot of each logical block from there, one list a cache group.
        generations: generation of each of these slots.
        missing: (group, index) of the blocks that are not ready yet.
        deadline: seconds of the clock when the slots go if nobody claims them.
        sealed: the prefill is finished; the hand-off can be granted once each missing block is
            at least being copied.
    """

    token: bytes
    prompt: Prompt
    firsts: list[int]
    slots: list[list[int]]
    generations: list[list[int]]
    missing: set[tuple[int, int]]
    deadline: float
    sealed: bool = False
    leased: bool = False
    held: list[int] = field(default_factory=list)

    def slot(self, block: tuple[int, int]) -> int:
        """Slot of a (group, index) block."""
        g, i = block
        return self.slots[g][i - self.firsts[g]]

    def generation(self, block: tuple[int, int]) -> int:
        """Generation of the slot of a (group, index) block."""
        g, i = block
        return self.generations[g][i - self.firsts[g]]


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
    """

    def __init__(
        self,
        num_slots: int,
        clock: Callable[[], float],
        ttl: float,
        randbytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.num_slots = num_slots
        self._clock = clock
        self._ttl = ttl
        self._randbytes = randbytes
        self._lock = threading.Lock()
        self._slots = [_Slot() for _ in range(num_slots)]
        self._free = list(range(num_slots))  # a heap: low slots are warm and consecutive
        self._cached: OrderedDict[SlotKey, int] = OrderedDict()  # ready, unheld: oldest first
        self._by_key: dict[SlotKey, int] = {}
        self._handoffs: dict[bytes, Handoff] = {}

    def open(
        self,
        prompt: Prompt,
        keys: Sequence[Sequence[SlotKey | None]],
        firsts: Sequence[int] | None = None,
    ) -> Handoff | None:
        """Take the slots for a hand-off, all of them or none.

        Args:
            prompt: what the slots will hold.
            keys: for each cache group the key of each block to be held, None for one that
                nobody else can use (the last, partial one; or where blocks are not hashed).
            firsts: for each cache group the logical index of the first of them, else 0.

        Returns:
            The hand-off, or None when there is no room now.

        Raises:
            ArenaFullError: it would not fit into an empty arena.
        """
        total = sum(len(group) for group in keys)
        if total > self.num_slots:
            raise ArenaFullError(
                f"a prompt of {prompt.num_tokens} tokens needs {total} slots, "
                f"the arena has {self.num_slots}; raise arena_gib"
            )
        with self._lock:
            asked = [key for group in keys for key in group if key is not None]
            found = {key: self._by_key[key] for key in asked if key in self._by_key}
            in_cache = sum(1 for key in found if key in self._cached)
            needed = total - sum(1 for key in asked if key in found)
            if needed > len(self._free) + len(self._cached) - in_cache:
                return None
            for key, slot in found.items():
                self._cached.pop(key, None)
                self._slots[slot].holders += 1
            handoff = Handoff(
                token=self._randbytes(TOKEN_BYTES),
                prompt=prompt,
                firsts=list(firsts or (0 for _ in keys)),
                slots=[],
                generations=[],
                missing=set(),
                deadline=float("inf"),
                held=list(found.values()),
            )
            for g, group in enumerate(keys):
                numbers = []
                for i, wanted in enumerate(group, start=handoff.firsts[g]):
                    number = found.get(wanted) if wanted is not None else None
                    if number is None:
                        number = self._take(wanted)
                        handoff.held.append(number)
                        handoff.missing.add((g, i))
                    numbers.append(number)
                handoff.slots.append(numbers)
                handoff.generations.append([self._slots[n].generation for n in numbers])
            self._handoffs[handoff.token] = handoff
            return handoff

    def _take(self, key: SlotKey | None) -> int:
        if self._free:
            number = heapq.heappop(self._free)
        else:
            oldest, number = self._cached.popitem(last=False)
            del self._by_key[oldest]
        slot = self._slots[number]
        slot.generation += 1
        slot.key = key
        slot.ready = False
        slot.holders = 1
        return number

    def copying(self, handoff: Handoff, blocks: Sequence[tuple[int, int]]) -> bool:
        """A worker is about to write these (group, index) blocks: their slots stay taken
        until `filled` or `unfilled`, whatever becomes of the hand-off. False, and nothing may
        be written, when the hand-off is closed: its slots may be another's already."""
        with self._lock:
            if handoff.token not in self._handoffs:
                return False
            for block in blocks:
                self._slots[handoff.slot(block)].busy += 1
            return True

    def filled(self, handoff: Handoff, blocks: Sequence[tuple[int, int]]) -> None:
        """Every rank has published these blocks."""
        with self._lock:
            for block in blocks:
                number = handoff.slot(block)
                slot = self._slots[number]
                slot.busy -= 1
                handoff.missing.discard(block)
                slot.ready = True
                if slot.key is not None:
                    if slot.key in self._by_key:
                        slot.key = None  # another hand-off published the same block meanwhile
                    else:
                        self._by_key[slot.key] = number
                self._settle(number)

    def unfilled(self, handoff: Handoff, blocks: Sequence[tuple[int, int]]) -> None:
        """The copies were cancelled or failed: nothing may be read from these slots."""
        with self._lock:
            for g, i in blocks:
                number = handoff.slot((g, i))
                slot = self._slots[number]
                slot.busy -= 1
                # A rank may have published it all the same: the next copy is another one.
                slot.generation += 1
                handoff.generations[g][i - handoff.firsts[g]] = slot.generation
                self._settle(number)

    def seal(self, handoff: Handoff) -> None:
        """The prefill is finished; from now on the hand-off's time to live runs."""
        with self._lock:
            handoff.sealed = True
            handoff.deadline = self._clock() + self._ttl

    def claim(
        self, token: bytes, num_tokens: int, digest: bytes, kind: DigestKind
    ) -> tuple[ClaimState, Handoff | None]:
        """Lease a hand-off's slots to a peer until `ttl` seconds from now.

        The copies of its last blocks may still be under way: readers see in each slot's header
        when it is published, or that it will not be. A second claim of the same hand-off is
        answered like the first, as the slots are only read.
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
            if token not in self._handoffs:
                return ClaimState.UNKNOWN, None
            if self._waits(handoff):
                return ClaimState.PENDING, None
            handoff.leased = True
            handoff.deadline = self._clock() + self._ttl
            return ClaimState.GRANTED, handoff

    def pending(self, token: bytes) -> bool:
        """Whether a claim of this hand-off has to wait; cheaper than to claim it."""
        with self._lock:
            handoff = self._handoffs.get(token)
            return handoff is not None and self._waits(handoff)

    def _waits(self, handoff: Handoff) -> bool:
        return not handoff.sealed or not all(
            self._slots[handoff.slot(block)].busy for block in handoff.missing
        )

    def close(self, token: bytes) -> bool:
        """Release or drop a hand-off; unknown tokens are ignored. True if it was there."""
        with self._lock:
            return self._close(token)

    def _close(self, token: bytes) -> bool:
        handoff = self._handoffs.pop(token, None)
        if handoff is None:
            return False
        for number in reversed(handoff.held):  # of a prefix its end is evicted first
            self._slots[number].holders -= 1
            self._settle(number)
        return True

    def _settle(self, number: int) -> None:
        slot = self._slots[number]
        if slot.holders or slot.busy:
            return
        if slot.ready and slot.key is not None:
            self._cached[slot.key] = number
            self._cached.move_to_end(slot.key)
        else:
            slot.key = None
            slot.ready = False
            heapq.heappush(self._free, number)

    def expire(self) -> int:
        """Close the hand-offs past their deadline; how many there were."""
        now = self._clock()
        with self._lock:
            late = [h.token for h in self._handoffs.values() if h.deadline <= now]
            for token in late:
                self._close(token)
        return len(late)

    def forget(self) -> None:
        """Let no later hand-off share a block that is here now; what is handed off stays."""
        with self._lock:
            unheld = list(self._cached.values())
            self._cached.clear()
            self._by_key.clear()
            for slot in self._slots:
                slot.key = None
            for number in unheld:
                self._settle(number)

    def usage(self) -> tuple[int, int, int]:
        """(slots held, slots cached, leases)."""
        with self._lock:
            cached = len(self._cached)
            held = self.num_slots - len(self._free) - cached
            return held, cached, sum(1 for h in self._handoffs.values() if h.leased)
