# SPDX-License-Identifier: Apache-2.0
"""Whole objects in the slots of an arena: who holds which slots, and how a reader checks them."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import (
    ArenaFullError,
    ChecksumError,
    ProtocolError,
    StaleSlotError,
    TransportError,
)
from omni_connector.transports.arena import Arena, ArenaView
from omni_connector.transports.base import ObjectKey

# An object in as many pieces as can be must still be described by one bounded message.
MAX_OBJECT_SLOTS: Final = 4096

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Where an object is.

    Attributes:
        runs: (first slot, number of slots) in the order of the bytes.
        generation: that of all its slots.
        length: bytes.
        stamp: the host's monotonic clock in ns when it was stored; the greater is the newer.
    """

    runs: Runs
    generation: int
    length: int
    stamp: int


class ObjectStore:
    """The objects of this process, in an arena that it owns and closes.

    Args:
        arena: an arena that nobody else writes.
        clock_ns: a clock that all processes of the host share.

    Raises:
        ValueError: the arena has more than `MAX_OBJECT_SLOTS` slots.
    """

    def __init__(self, arena: Arena, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        if arena.n_slots > MAX_OBJECT_SLOTS:
            raise ValueError(f"at most {MAX_OBJECT_SLOTS} slots of objects, not {arena.n_slots}")
        self.arena: Final = arena
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._objects: dict[bytes, tuple[ObjectKey, StoredObject]] = {}
        self._free = np.ones(arena.n_slots, np.bool_)
        self._generations = itertools.count(1)

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return int(np.count_nonzero(self._free))

    def store(self, key: ObjectKey, parts: Sequence[memoryview]) -> StoredObject:
        """Keep the concatenated parts under a key, in place of what was there.

        What was there stays until the new object is complete, unless there is only room for
        one of them.

        Raises:
            ArenaFullError: there is no room; what was there is still there.
            TransportError: the arena is closed.
        """
        length = sum(part.nbytes for part in parts)
        digest = key.digest
        runs = self._allocate(digest, length)
        generation = next(self._generations)
        try:
            self._write(runs, generation, digest, parts)
        except BaseException:
            with self._lock:
                self._release(runs)
            raise
        with self._lock:
            if self.arena.closed:
                raise TransportError("the objects were freed while one was stored")
            stored = StoredObject(runs, generation, length, self._clock_ns())
            replaced = self._objects.get(digest)
            self._objects[digest] = key, stored
            if replaced is not None:
                self._release(replaced[1].runs)
        return stored

    def find(self, digest: bytes) -> StoredObject | None:
        """The object whose key has this digest."""
        with self._lock:
            entry = self._objects.get(digest)
        return None if entry is None else entry[1]

    def drop(self, request_id: str) -> int:
        """Free the objects whose keys mention a request; returns how many there were."""
        with self._lock:
            dropped = [d for d, (key, _) in self._objects.items() if key.mentions(request_id)]
            for digest in dropped:
                self._release(self._objects.pop(digest)[1].runs)
        return len(dropped)

    def close(self) -> None:
        """Free everything. Idempotent."""
        with self._lock:
            self._objects.clear()
            self.arena.close()

    def _allocate(self, digest: bytes, length: int) -> Runs:
        needed = max(1, -(-length // self.arena.slot_bytes))
        if needed > self.arena.n_slots:
            raise ArenaFullError(
                f"an object of {length} bytes can never fit in {self.arena.n_slots} slots of "
                f"{self.arena.slot_bytes} bytes"
            )
        with self._lock:
            if needed > self.free_slots:
                entry = self._objects.get(digest)
                room = self.free_slots + (_count(entry[1].runs) if entry else 0)
                if entry is None or needed > room:
                    raise ArenaFullError(
                        f"an object of {length} bytes needs {needed} slots, {room} of "
                        f"{self.arena.n_slots} are free; clean up requests that are done"
                    )
                del self._objects[digest]
                self._release(entry[1].runs)
            runs = _choose(self._free, needed)
            for start, count in runs:
                self._free[start : start + count] = False
        return runs

    def _release(self, runs: Runs) -> None:
        # Holds the lock. A closed arena has no slots to retire.
        for start, count in runs:
            self._free[start : start + count] = True
            for slot in range(start, start + count):
                if not self.arena.closed:
                    self.arena.retire(slot)

    def _write(
        self, runs: Runs, generation: int, digest: bytes, parts: Sequence[memoryview]
    ) -> None:
        slots = self.arena.slots
        pending = [np.frombuffer(part, np.uint8) for part in parts if part.nbytes]
        for start, count in runs:
            for slot in range(start, start + count):
                self.arena.begin_write(slot, generation)
            room = slots[start : start + count].reshape(-1)
            filled = 0
            while pending and filled < room.size:
                piece = pending[0][: room.size - filled]
                np.copyto(room[filled : filled + piece.size], piece)
                filled += piece.size
                pending[0] = pending[0][piece.size :]
                if not pending[0].size:
                    del pending[0]
            for slot in range(start, start + count):
                used = min(max(filled, 0), self.arena.slot_bytes)
                checksum = xxhash.xxh3_64_intdigest(slots[slot, :used].data)
                self.arena.publish(slot, generation, digest, used, checksum)
                filled -= used


def read_object(arena: Arena | ArenaView, digest: bytes, stored: StoredObject) -> memoryview:
    """A verified copy of an object in an arena.

    Args:
        arena: where it is.
        digest: of the key that was asked for.
        stored: what its owner says of it; checked.

    Raises:
        StaleSlotError: it was replaced or dropped meanwhile.
        ChecksumError: the bytes are not those that were stored.
        ProtocolError: the description makes no sense.
        TransportError: the arena is closed, or there is no memory for the copy.
    """
    capacity = _count(stored.runs) * arena.slot_bytes
    impossible = stored.length < 0 or any(
        start < 0 or count < 1 or start + count > arena.n_slots for start, count in stored.runs
    )
    if impossible or not capacity - arena.slot_bytes < max(stored.length, 1) <= capacity:
        raise ProtocolError(
            f"{stored.length} bytes in slots {stored.runs[:8]} do not describe an object in "
            f"{arena.n_slots} slots of {arena.slot_bytes} bytes"
        )
    slots = arena.slots
    try:
        content: NDArray[np.uint8] = np.empty(stored.length, np.uint8)
    except MemoryError as error:
        raise TransportError(f"no memory for an object of {stored.length} bytes") from error
    done = 0
    for start, count in stored.runs:
        copy = content[done : done + count * arena.slot_bytes]
        for slot in range(start, start + count):
            arena.verify(slot, stored.generation)
        np.copyto(copy, slots[start : start + count].reshape(-1)[: copy.size])
        for i, slot in enumerate(range(start, start + count)):
            header = arena.verify(slot, stored.generation)
            piece = copy[i * arena.slot_bytes : (i + 1) * arena.slot_bytes]
            if header.key != digest or header.length != piece.size:
                raise StaleSlotError(f"slot {slot} holds {header.length} bytes of another object")
            if header.checksum != xxhash.xxh3_64_intdigest(piece.data):
                raise ChecksumError(f"slot {slot} generation {header.generation}: wrong checksum")
        done += copy.size
    return content.data


def _count(runs: Runs) -> int:
    return sum(count for _, count in runs)


def _choose(free: NDArray[np.bool_], needed: int) -> Runs:
    """The smallest run of free slots that suffices, else the largest ones there are."""
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
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
