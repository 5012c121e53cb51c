# SPDX-License-Identifier: Apache-2.0
"""Whole objects in the slots of an arena: which slots each has, and when it may be evicted.

An object has one header, that of its first slot. The owner changes this header before any slot of
the object is written again. So a reader that finds the first slot published with the object's
generation, both before and after its copy, has copied the whole object. The header's checksum
covers the checksums of all slots, which several threads compute.

An object that was read may be evicted when another needs its room. One that was not read is kept
until its time to live is over.
"""

import functools
import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.arena.available import memory_limit_bytes, spared_bytes
from omni_connector.arena.memory_claims import unclaimed_bytes
from omni_connector.errors import ArenaFullError, ConfigError, ProtocolError, TransportError
from omni_connector.objects import codec
from omni_connector.objects.base import ObjectKey, check_times, objects_of
from omni_connector.objects.progress import progress_of
from omni_connector.runtime.shared_work import share_out

logger = logging.getLogger(__name__)

# One message, of bounded size, describes an object even if none of its slots are consecutive.
MAX_OBJECT_SLOTS: Final = 4096

# Bytes of a slot, unless the arena is so large that slots have to be larger.
_SLOT_BYTES: Final = 1 << 20

# Largest arena whose size nobody has chosen, in bytes.
_MAX_DEFAULT_BYTES: Final = 4 << 30

# Seconds for which an object that nobody reads is kept: as long as vLLM-Omni waits by default.
DEFAULT_TTL_S: Final = 300.0

Runs = tuple[tuple[int, int], ...]


def object_geometry(gib: float | None) -> tuple[int, int]:
    """The number of slots, and the bytes of each, of an arena for objects.

    Args:
        gib: size in GiB; None takes a tenth of the machine's memory, 4 GiB at most.

    Raises:
        ConfigError: `gib` is not a positive number.
    """
    if gib is None:
        total = min(memory_limit_bytes() // 10, _MAX_DEFAULT_BYTES)
    elif math.isfinite(gib * (1 << 30)) and gib > 0:
        total = int(gib * (1 << 30))
    else:
        raise ConfigError(f"object_gib must be a positive number, not {gib!r}")
    slot_bytes = _SLOT_BYTES
    while total > slot_bytes * MAX_OBJECT_SLOTS:
        slot_bytes *= 2
    return max(1, total // slot_bytes), slot_bytes


def fitting(n_slots: int, slot_bytes: int) -> tuple[int, int]:
    """A geometry with no more slots than there is memory for now: beyond that the kernel kills the
    process while it fills the arena."""
    left = unclaimed_bytes()
    room = max(1, (left - spared_bytes()) // slot_bytes)
    if room < n_slots:
        logger.warning(
            "The arena for objects gets %.2f GiB instead of %.2f: the machine and its cgroups have "
            "%.2f left. Lower object_gib, or raise the memory limit",
            *(each / (1 << 30) for each in (room * slot_bytes, n_slots * slot_bytes, left)),
        )
    return min(n_slots, room), slot_bytes


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Where an object is.

    Attributes:
        runs: (first slot, number of slots) in the order of the bytes.
        generation: that of its first slot.
        length: bytes.
        stamp: the host's monotonic clock in ns when it was stored; the greater is the newer.
    """

    runs: Runs
    generation: int
    length: int
    stamp: int

    def slots_in(self, n_slots: int, slot_bytes: int) -> list[int]:
        """The slots of the object, in the order of its bytes, in an arena of this geometry.

        Raises:
            ProtocolError: there is no such object in an arena of this geometry.
        """
        count = count_of(self.runs)
        capacity = count * slot_bytes
        impossible = self.length < 0 or any(
            start < 0 or count < 1 or start + count > n_slots for start, count in self.runs
        )
        # No slot counts twice. A copy is no larger than the arena, nor, as the arena may be only
        # announced, than this host's memory.
        impossible = impossible or count > min(n_slots, MAX_OBJECT_SLOTS)
        impossible = impossible or self.length > host_bytes()
        if impossible or not capacity - slot_bytes < max(self.length, 1) <= capacity:
            raise ProtocolError(
                f"{self.length} bytes in slots {self.runs[:8]} do not describe an object in "
                f"{n_slots} slots of {slot_bytes} bytes"
            )
        return ids_of(self.runs)


class ObjectStore:
    """The objects of this process, in an arena that it owns and closes.

    Args:
        arena: an arena that nobody else writes.
        clock_ns: a clock that all senders share.
        catch_up: called without a lock where a `store` finds no room: marks the objects that peers
            say they have read. After that the store tries once more.
        ttl_s: seconds after which an object may be evicted though nobody has read it; zero or less
            is never.
        clock: seconds, monotonic, for `ttl_s`.

    Raises:
        ValueError: the arena has more than `MAX_OBJECT_SLOTS` slots, or `ttl_s` is no number.
    """

    def __init__(
        self,
        arena: Arena,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        catch_up: Callable[[], None] | None = None,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_times(ttl_s)
        if arena.n_slots > MAX_OBJECT_SLOTS:
            raise ValueError(f"at most {MAX_OBJECT_SLOTS} slots of objects, not {arena.n_slots}")
        self.arena: Final = arena
        self._clock_ns = clock_ns
        self._catch_up = catch_up
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[bytes, tuple[ObjectKey, StoredObject]] = {}
        # Objects that nobody has read, and when each may be evicted; the earliest first.
        self._unread: OrderedDict[bytes, float] = OrderedDict()
        # All other objects in the order of eviction, and whether each was read; below, the number
        # of their slots.
        self._evictable: OrderedDict[bytes, bool] = OrderedDict()
        self._evictable_slots = 0
        self._free = np.ones(arena.n_slots, np.bool_)
        # How many bytes of each slot have memory, which comes with the first use and stays.
        self._prefaulted = np.zeros(arena.n_slots, np.int64)
        self._generations = itertools.count(1)

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def free_slots(self) -> int:
        """How many slots hold nothing."""
        return int(np.count_nonzero(self._free))

    @property
    def evictable_slots(self) -> int:
        """How many slots hold objects that may be evicted: read, or past their time to live."""
        with self._lock:
            self._expire()
            return self._evictable_slots

    def store(self, key: ObjectKey, parts: Sequence[memoryview]) -> StoredObject:
        """Keep the concatenated parts under a key, in place of what was there.

        What was there stays until the new object is complete, unless there is room for only one
        of them. Where room is short, objects are evicted that were read or are past their time to
        live, beginning with the object for which this has been so for longest.

        Raises:
            ArenaFullError: there is no room; what was under the key is still there.
            TransportError: the arena is closed.
        """
        length = sum(part.nbytes for part in parts)
        digest = key.digest
        needed = self._slots_for(length)
        runs = self._allocate(digest, needed)
        if runs is None and self._catch_up is not None:
            self._catch_up()
            runs = self._allocate(digest, needed)
        if runs is None:
            raise self._full(digest, length, needed)
        generation = next(self._generations)
        try:
            self._write(runs, generation, key, digest, parts, length)
        except BaseException:
            with self._lock:
                self._release(runs)
            raise
        with self._lock:
            if self.arena.closed:
                raise TransportError("the objects were freed while one was stored")
            stored = StoredObject(runs, generation, length, self._clock_ns())
            if digest in self._objects:
                self._remove(digest)
            self._objects[digest] = key, stored
            self._unread[digest] = self._clock() + self._ttl_s if self._ttl_s > 0 else math.inf
        return stored

    def mark_read(self, digest: bytes, generation: int) -> None:
        """Note that this object was read just now. Ignored if it is not here (any more)."""
        with self._lock:
            entry = self._objects.get(digest)
            if entry is None or entry[1].generation != generation:
                return
            self._let_go(digest)
            self._evictable[digest] = True
            self._evictable.move_to_end(digest)

    def reap(self) -> int:
        """Free the objects that were read; returns how many there were."""
        with self._lock:
            consumed = [digest for digest, read in self._evictable.items() if read]
            for digest in consumed:
                self._remove(digest)
        return len(consumed)

    def find(self, digest: bytes) -> StoredObject | None:
        """The object whose key has this digest."""
        with self._lock:
            entry = self._objects.get(digest)
        return None if entry is None else entry[1]

    def drop(self, request_id: str) -> int:
        """Free the objects of a key or request (`objects_of`); returns how many there were."""
        with self._lock:
            dropped = objects_of(request_id, ((d, key) for d, (key, _) in self._objects.items()))
            for digest in dropped:
                self._remove(digest)
        return len(dropped)

    def close(self) -> None:
        """Free everything. Idempotent."""
        with self._lock:
            self._objects.clear()
            self._unread.clear()
            self._evictable.clear()
            self._evictable_slots = 0
            self.arena.close()

    def _slots_for(self, length: int) -> int:
        needed = max(1, -(-length // self.arena.slot_bytes))
        if needed > self.arena.n_slots:
            raise ArenaFullError(
                f"an object of {length} bytes can never fit in {self.arena.n_slots} slots of "
                f"{self.arena.slot_bytes} bytes; raise object_gib"
            )
        return needed

    def _allocate(self, digest: bytes, needed: int) -> Runs | None:
        with self._lock:
            self._expire()
            own, others = self._replaceable(digest)
            free = self.free_slots
            if needed > free + own + others:
                return None
            # The object that is replaced goes early only where evicting all others is too little.
            if needed > free + others:
                self._remove(digest)
                free += own
            while needed > free:
                oldest = next(each for each in self._evictable if each != digest)
                free += self._remove(oldest)
            runs = _choose(self._free, needed)
            for start, count in runs:
                self._free[start : start + count] = False
        return runs

    def _replaceable(self, digest: bytes) -> tuple[int, int]:
        # Holds the lock. Slots of the object under this key, and of all others that may be evicted.
        entry = self._objects.get(digest)
        own = 0 if entry is None else count_of(entry[1].runs)
        return own, self._evictable_slots - (own if digest in self._evictable else 0)

    def _full(self, digest: bytes, length: int, needed: int) -> ArenaFullError:
        with self._lock:
            room = self.free_slots + sum(self._replaceable(digest))
        return ArenaFullError(
            f"an object of {length} bytes needs {needed} slots, {room} of {self.arena.n_slots} are "
            "free or hold what was received; the others hold what nobody has received yet: "
            "receive it, clean up requests that are done, raise object_gib, or lower "
            "buffer_ttl_seconds"
        )

    def _expire(self) -> None:
        # Holds the lock. All have the same time to live, so the first is the next to go.
        now = self._clock()
        while self._unread:
            digest, until = next(iter(self._unread.items()))
            if until > now:
                return
            self._let_go(digest)

    def _let_go(self, digest: bytes) -> None:
        # Holds the lock. Makes an object evictable.
        if self._unread.pop(digest, None) is not None:
            self._evictable[digest] = False
            self._evictable_slots += count_of(self._objects[digest][1].runs)

    def _remove(self, digest: bytes) -> int:
        # Holds the lock. Returns how many slots become free.
        _, stored = self._objects.pop(digest)
        count = count_of(stored.runs)
        if self._unread.pop(digest, None) is None:
            del self._evictable[digest]
            self._evictable_slots -= count
        self._release(stored.runs)
        return count

    def _release(self, runs: Runs) -> None:
        # Holds the lock. A reader checks the first slot, so that is retired before any slot of the
        # object can be chosen again. A closed arena has no slots to retire.
        if not self.arena.closed:
            self.arena.retire(runs[0][0])
        for start, count in runs:
            self._free[start : start + count] = True

    def _write(
        self,
        runs: Runs,
        generation: int,
        key: ObjectKey,
        digest: bytes,
        parts: Sequence[memoryview],
        length: int,
    ) -> None:
        slots = self.arena.slots
        copied = progress_of(logger, "storing", key, length)
        ids = ids_of(runs)
        checksums = np.empty(len(ids), np.uint64)

        def fill(job: tuple[int, int, list[NDArray[np.uint8]]]) -> None:
            index, slot, segments = job
            room = slots[slot]
            used = sum(segment.size for segment in segments)
            if used > self._prefaulted[slot]:
                self.arena.prefault(slot, used)
                self._prefaulted[slot] = used
            at = 0
            for segment in segments:
                np.copyto(room[at : at + segment.size], segment)
                at += segment.size
            checksums[index] = xxhash.xxh3_64_intdigest(room[:used].data)
            copied(used)

        self.arena.begin_write(ids[0], generation)
        segments = codec.cut(parts, self.arena.slot_bytes)
        share_out(fill, zip(range(len(ids)), ids, segments, strict=True), length)
        first = min(length, self.arena.slot_bytes)
        self.arena.publish(ids[0], generation, digest, first, codec.checksum_of(length, checksums))


@functools.cache
def host_bytes() -> int:
    """`memory_limit_bytes`, which reads files, read once."""
    return memory_limit_bytes()


def count_of(runs: Runs) -> int:
    """How many slots these runs have."""
    return sum(count for _, count in runs)


def ids_of(runs: Runs) -> list[int]:
    """The slots of these runs, in their order."""
    return [slot for start, count in runs for slot in range(start, start + count)]


def _choose(free: NDArray[np.bool_], needed: int) -> Runs:
    """The smallest run of free slots that suffices; where none does, several, the largest first."""
    walled = np.zeros(free.size + 2, np.bool_)
    walled[1:-1] = free
    edges = np.flatnonzero(walled[1:] != walled[:-1])
    runs = [(int(start), int(end - start)) for start, end in edges.reshape(-1, 2)]
    enough = [run for run in runs if run[1] >= needed]
    if enough:
        return ((min(enough, key=lambda run: run[1])[0], needed),)
    chosen: list[tuple[int, int]] = []
    for start, count in sorted(runs, key=lambda run: -run[1]):
        chosen.append((start, min(count, needed)))
        needed -= chosen[-1][1]
        if not needed:
            break
    return tuple(chosen)
