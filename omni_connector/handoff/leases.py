# SPDX-License-Identifier: Apache-2.0
"""The slot directory: which hand-off holds which slots, who may read them, and until when.

One directory lives in an engine's scheduler half and decides for all its ranks: slot number n
is slot n of every rank's arena. The engine's thread and the control thread use it, under one lock
that nobody holds during I/O.

Each decode request that asks for a hand-off gets a lease. A hand-off ends with its last lease; when
its time to live passes without a lease request or a release; or when a copy into one of its slots
fails.
"""

import secrets
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby, takewhile
from typing import NamedTuple

import numpy as np

from omni_connector.arena.slot_index import Ints, SlotKey
from omni_connector.arena.slot_pool import NONE, SlotPool
from omni_connector.copy.held_blocks import Block
from omni_connector.errors import ArenaFullError
from omni_connector.handoff.messages import TOKEN_BYTES, DigestKind
from omni_connector.handoff.prompt import Prompt
from omni_connector.kv.stripes import SlotGroup
from omni_connector.net.status import Usage
from omni_connector.runtime.context import EngineContext


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
        keys: of each held block, one list for each slot group; see `SlotDirectory.open`.
        first_blocks: logical index of the first held block, one for each slot group.
        slots, generations: of each held block, one array for each slot group.
        identity: of the prompt.
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
    committed: bool = False
    leases: dict[Hashable, float] = field(default_factory=dict)
    closed: bool = False

    def places(self, blocks: Sequence[Block]) -> Iterator[tuple[int, Ints]]:
        """Where blocks are in `slots`: each group, and the positions in its array."""
        for g, members in groupby(blocks, key=lambda block: block[0]):
            yield g, np.array([i for _, i in members], np.int64) - self.first_blocks[g]

    def slots_of(self, blocks: Sequence[Block]) -> Ints:
        """Slots of several blocks."""
        return np.concatenate([NONE, *(self.slots[g][at] for g, at in self.places(blocks))])

    @property
    def held(self) -> Ints:
        """All its slots."""
        return np.concatenate([*self.slots, NONE])


class LeaseAnswer(NamedTuple):
    """What `SlotDirectory.lease` answers.

    Attributes:
        handoff: the one that is leased; None where none is. It may end at any time.
        until: when the lease ends, in seconds of the clock.
    """

    state: LeaseState
    handoff: Handoff | None = None
    until: float = 0.0


class SlotDirectory:
    """Keeps the hand-offs of an arena, and their leases.

    Below, a group is a slot group; see `kv.stripes`.

    Args:
        num_slots: slots of each rank's arena.
        context: clock, randomness and locks.
        ttl: seconds that a hand-off waits for a lease request, and a lease for its release.
        groups: as of `SlotPool`.
    """

    def __init__(
        self,
        num_slots: int,
        context: EngineContext,
        ttl: float,
        groups: Sequence[SlotGroup] = (),
    ) -> None:
        self.num_slots = num_slots
        self._clock = context.clock
        self._ttl = ttl
        self._randbytes = context.randbytes
        self.pool = SlotPool(num_slots, context.lock, groups)
        self._lock = self.pool.lock
        self._handoffs: dict[bytes, Handoff] = {}
        self._twins: dict[Hashable, dict[bytes, Handoff]] = {}
        # Until when, the earliest first: each finished hand-off; each lease, by its token and name.
        self._ends: OrderedDict[bytes, float] = OrderedDict()
        self._leases: OrderedDict[tuple[bytes, Hashable], float] = OrderedDict()
        self.pool.on_lost = self._close_holders

    def open(
        self,
        prompt: Prompt,
        keys: Sequence[Sequence[SlotKey | None]],
        first_blocks: Sequence[int] | None = None,
    ) -> Handoff | None:
        """Take the slots for a hand-off, all of them or none.

        Args:
            prompt: whose KV the slots will hold.
            keys: for each group the key of each block to be held. A key names all blocks
                before its own too. It is None where only an equal prompt can use the block: the
                last one, which is not full, or where blocks are not hashed. They must not change.
            first_blocks: for each group the logical index of the first of these blocks; else 0.

        Returns:
            The hand-off, or None when there is no room now.

        Raises:
            ArenaFullError: it would not fit into an empty arena.
        """
        total = self.pool.least_slots([len(group) for group in keys])
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
                self.pool.hold(np.concatenate(slots))
                generations = [self.pool.generation[group] for group in slots]
            elif (taken := self.pool.take(keys, first_blocks)) is not None:
                slots, generations = taken
            else:
                return None
            token = self._randbytes(TOKEN_BYTES)
            handoff = Handoff(token, prompt, keys, first_blocks, slots, generations, identity)
            self._handoffs[handoff.token] = handoff
            self._twins.setdefault(identity, {})[handoff.token] = handoff
            return handoff

    def copying(self, handoff: Handoff, blocks: Sequence[Block]) -> list[Block] | None:
        """Choose the blocks that a worker shall copy now, and make their slots busy until
        `filled` or `unfilled`. The others are copied for another hand-off. None when this one is
        closed, as its slots may be in other use already."""
        with self._lock:
            if handoff.closed:
                return None
            chosen: list[Block] = []
            for g, at in handoff.places(blocks):
                at = at[self.pool.lacks(handoff.slots[g][at])]
                chosen += [(g, i) for i in (at + handoff.first_blocks[g]).tolist()]
                keys = [handoff.keys[g][i] for i in at.tolist()]
                self.pool.fill(g, keys, handoff.slots[g][at])
            return chosen

    def filled(self, handoff: Handoff, blocks: Sequence[Block]) -> None:
        """Every rank has committed these blocks."""
        with self._lock:
            self.pool.filled(handoff.slots_of(blocks))

    def unfilled(self, handoff: Handoff, blocks: Sequence[Block]) -> None:
        """The copies were cancelled or have failed: close every hand-off that holds one of these
        slots, so that nobody reads them."""
        with self._lock:
            self.pool.unfilled(handoff.slots_of(blocks))

    def _close_holders(self, numbers: Ints) -> None:
        for each in list(self._handoffs.values()):
            if np.isin(each.held, numbers).any():
                self._close(each)

    def close_holders(self, handoff: Handoff, blocks: Sequence[Block]) -> None:
        """Copies under way are of no use: close every hand-off that holds one of these slots, so
        that nobody leases them. They stay taken until the copies end."""
        with self._lock:
            self._close_holders(handoff.slots_of(blocks))

    def wanted(self, handoff: Handoff, blocks: Sequence[Block]) -> bool:
        """Whether other hand-offs hold the slots of these blocks, after their own was closed."""
        with self._lock:
            return self.pool.any_held(handoff.slots_of(blocks))

    def commit(self, handoff: Handoff) -> None:
        """The prefill is finished; the hand-off's time to live begins."""
        with self._lock:
            handoff.committed = True
            if not handoff.closed:
                self._ends[handoff.token] = self._clock() + self._ttl

    def lease(
        self, token: bytes, num_tokens: int, digest: bytes, kind: DigestKind, lease: Hashable
    ) -> LeaseAnswer:
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
            return LeaseAnswer(LeaseState.UNKNOWN)
        prompt = handoff.prompt
        if prompt.num_tokens != num_tokens or not secrets.compare_digest(
            prompt.digest(kind), digest
        ):
            return LeaseAnswer(LeaseState.OTHER_PROMPT)
        with self._lock:
            if handoff.closed:
                return LeaseAnswer(LeaseState.UNKNOWN)
            if self._waits(handoff):
                return LeaseAnswer(LeaseState.PENDING)
            until = self._ends[token] = self._clock() + self._ttl
            handoff.leases[lease] = self._leases[token, lease] = until
            self._ends.move_to_end(token)
            self._leases.move_to_end((token, lease))
            return LeaseAnswer(LeaseState.GRANTED, handoff, until)

    def pending(self, token: bytes) -> bool:
        """Whether a lease request for this hand-off has to wait; cheaper than `lease`."""
        with self._lock:
            handoff = self._handoffs.get(token)
            return handoff is not None and self._waits(handoff)

    def _waits(self, handoff: Handoff) -> bool:
        return not handoff.committed or bool(self.pool.lacks(handoff.held).any())

    def release(self, token: bytes, lease: Hashable) -> None:
        """End a lease, and with the last one the hand-off. Unknown ones are ignored."""
        with self._lock:
            handoff = self._handoffs.get(token)
            if handoff is None or handoff.leases.pop(lease, None) is None:
                return
            del self._leases[token, lease]
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
        self._ends.pop(handoff.token, None)
        handoff.closed = True
        for lease in handoff.leases:
            del self._leases[handoff.token, lease]
        handoff.leases.clear()
        twins = self._twins[handoff.identity]
        del twins[handoff.token]
        if not twins:
            del self._twins[handoff.identity]
        # In this order the end of a prefix is evicted before its beginning.
        self.pool.let_go(handoff.held[::-1])

    def expire(self) -> int:
        """End leases, hand-offs and pins that are past their time; returns how many hand-offs."""
        now = self._clock()
        with self._lock:
            self.pool.end_pins(now)
            late = list(takewhile(lambda each: self._ends[each] <= now, self._ends))
            for token in late:
                self._close(self._handoffs[token])
            ended = list(takewhile(lambda each: self._leases[each] <= now, self._leases))
            for token, lease in ended:
                del self._leases[token, lease], self._handoffs[token].leases[lease]
        return len(late)

    def void(self) -> tuple[list[int], list[int]]:
        """Close every hand-off, and share no block that is here now with later ones.

        Returns:
            Slots that peers may be reading, and for each a generation that no block has. Written to
            the slot's header, it tells readers that the slot is void.
        """
        with self._lock:
            leased = [each.held for each in self._handoffs.values() if each.leases]
            for handoff in list(self._handoffs.values()):
                self._close(handoff)
            self.pool.forget()
            numbers = np.unique(np.concatenate([*leased, NONE]))
            self.pool.generation[numbers] += 1
            return numbers.tolist(), self.pool.generation[numbers].tolist()

    def usage(self) -> tuple[int, int, int]:
        """(slots held, slots cached, leases)."""
        with self._lock:
            free, cached, _ = self.pool.counts()
            return self.num_slots - free - cached, cached, len(self._leases)

    @property
    def num_handoffs(self) -> int:
        """Hand-offs that have not ended, those of running prefills included; takes no lock."""
        return len(self._handoffs)

    def counts(self) -> tuple[tuple[int, int, int], int]:
        """(what the pool counts, leases), for each step: cheap, as it takes no lock.

        While another thread changes them, the numbers may not fit together.
        """
        return self.pool.counts(), len(self._leases)

    def status(self) -> Usage:
        """The same, and how many slots, open hand-offs and pinned slots there are."""
        pinned = self.pool.num_pinned
        return Usage(self.num_slots, *self.usage(), len(self._handoffs), pinned)
