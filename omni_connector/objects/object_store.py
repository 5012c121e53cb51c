# SPDX-License-Identifier: Apache-2.0
"""Whole objects in an arena: where each lies, how readers find it, and when it may be evicted.

An object takes whole pages of the arena's content, in as few runs as there is room for, and the
header of one slot, any one. The header's key is the half of a digest of the object's key, and
where the object lies:

    digest 16 bytes | first page u32 | number of runs u32 | length u64

An object in several runs begins with a table of them (`RUN`). The header's generation is the time
at which the object was put, so the newest of several objects has the greatest. The checksum covers
the checksums of all pieces of the object, which several threads compute.

The owner changes the header before any page of the object is written again. So a reader that finds
the header published with the object's generation, both before and after its copy, has copied the
whole object.

An object that was read may be evicted when another needs its room. One that was not read is kept
until its time to live is over.
"""

import copy
import functools
import itertools
import logging
import math
import struct
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.available import memory_limit_bytes, spared_bytes
from omni_connector.arena.format import PAGE_BYTES, SlotHeader, SlotState
from omni_connector.arena.memory_claims import unclaimed_bytes
from omni_connector.errors import (
    ArenaFullError,
    ChecksumError,
    ConfigError,
    IntegrityError,
    ProtocolError,
    SlotPendingError,
    StaleSlotError,
    TransportError,
)
from omni_connector.objects import codec
from omni_connector.objects.base import ObjectKey, check_times, objects_of
from omni_connector.runtime.shared_work import share_out
from omni_connector.transports.base import RemoteArena

logger = logging.getLogger(__name__)

MAX_OBJECTS: Final = 4096
"""Most objects of an arena, and so most runs of one. A look-up reads a word of each header."""

# Largest arena whose size nobody has chosen, in bytes.
_MAX_DEFAULT_BYTES: Final = 4 << 30

# Most bytes of a piece: what one thread copies and hashes at a time.
_PIECE_BYTES: Final = 1 << 20

# Seconds for which an object that nobody reads is kept: as long as vLLM-Omni waits by default.
DEFAULT_TTL_S: Final = 300.0

_KEY: Final = struct.Struct("<16sIIQ")
_DIGEST_BYTES: Final = 16
RUN: Final = np.dtype([("start", "<u4"), ("count", "<u4")])
"""First page and number of pages of a run, in the table of an object's runs."""

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
    pages = max(1, total // PAGE_BYTES)
    pages_a_slot = -(-pages // MAX_OBJECTS)
    return pages // pages_a_slot, pages_a_slot * PAGE_BYTES


def fitting(n_slots: int, slot_bytes: int) -> tuple[int, int]:
    """A geometry with no more bytes than there is memory for now: beyond that the kernel kills the
    process while it fills the arena."""
    left = unclaimed_bytes()
    wanted = n_slots * slot_bytes
    room = max(n_slots * PAGE_BYTES, left - spared_bytes())
    if room >= wanted:
        return n_slots, slot_bytes
    slot_bytes = room // n_slots // PAGE_BYTES * PAGE_BYTES
    logger.warning(
        "The arena for objects gets %.2f GiB instead of %.2f: the machine and its cgroups have "
        "%.2f left. Lower object_gib, or raise the memory limit",
        *(each / (1 << 30) for each in (n_slots * slot_bytes, wanted, left)),
    )
    return n_slots, slot_bytes


class StoredObject(msgspec.Struct, frozen=True):
    """Where an object is.

    Attributes:
        slot: the slot that has its header.
        generation: of that; the time in ns, on a clock that all senders share, at which the object
            was put. The greater is the newer.
        runs: (first page, number of pages) in the order of the bytes.
        length: bytes, without the table of runs.
    """

    slot: int
    generation: int
    runs: Runs
    length: int

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of runs before the object."""
        return _table_bytes(len(self.runs))

    @property
    def pages(self) -> int:
        """Pages that it takes."""
        return sum(count for _, count in self.runs)

    def pieces(self, content_bytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the parts that are copied and hashed at a time, in order.

        Args:
            content_bytes: bytes of the arena's content.

        Raises:
            ProtocolError: there is no such object in an arena of this size.
        """
        total = self.length + self.table_bytes
        # No page counts twice. A copy is no larger than the arena, nor, as the arena may be only
        # announced, than this host's memory.
        impossible = (
            not 0 <= self.length <= host_bytes()
            or not 1 <= len(self.runs) <= MAX_OBJECTS
            or any(
                start < 0 or count < 1 or (start + count) * PAGE_BYTES > content_bytes
                for start, count in self.runs
            )
            or self.pages * PAGE_BYTES > content_bytes
            or self.pages != _pages_of(total)
        )
        if impossible:
            raise ProtocolError(
                f"{self.length} bytes in runs {self.runs[:8]} do not describe an object in "
                f"{content_bytes} bytes"
            )
        return list(_cut(self.runs, total))


def find_object(arena: Arena | ArenaView, digest: bytes) -> StoredObject | None:
    """The newest object of this digest in an arena that is mapped; not trusted.

    Raises:
        IntegrityError: the arena has a header that no owner writes.
        TransportError: the arena is closed.
    """
    found = [_described(arena, slot, digest) for slot in arena.slots_keyed(digest[:8])]
    there = [each for each in found if each is not None]
    return max(there, key=lambda each: each.generation) if there else None


def _described(arena: Arena | ArenaView, slot: int, digest: bytes) -> StoredObject | None:
    try:
        header = arena.header(slot)
    except SlotPendingError:
        return None  # it is just being published, or retired
    if header.state is not SlotState.PUBLISHED or not names(header, digest):
        return None
    _, first, runs, length = _KEY.unpack(header.key)
    if runs == 1:
        place: Runs = ((first, _pages_of(length)),)
    else:
        content = arena.slots.reshape(-1)
        at = first * PAGE_BYTES
        if not 1 < runs <= MAX_OBJECTS or at + runs * RUN.itemsize > content.size:
            raise IntegrityError(f"slot {slot} describes an object in {runs} runs from {first}")
        place = tuple(content[at : at + runs * RUN.itemsize].view(RUN).tolist())
    return StoredObject(slot, header.generation, place, length)


def read_object(
    arena: Arena | ArenaView | RemoteArena,
    content_bytes: int,
    digest: bytes,
    stored: StoredObject,
    take: Callable[[list[tuple[int, int]], int], NDArray[np.uint8]],
) -> memoryview:
    """Copy an object out of an arena, and verify the copy.

    Args:
        arena: of the object.
        content_bytes: bytes of the arena's content, as its owner has named them.
        digest: of the object's key.
        stored: where the object is; not trusted.
        take: memory for the copy, given the pieces and the sum of their bytes; where the arena is
            not mapped, with the bytes in it.

    Raises:
        StaleSlotError: the object was replaced or dropped meanwhile.
        ChecksumError: the bytes differ from what was stored.
        ProtocolError: there is no such object in an arena of this size.
        TransportError: the arena is closed or cannot be read, or there is no memory for the copy.
    """
    pieces = stored.pieces(content_bytes)
    content = take(pieces, stored.length + stored.table_bytes)
    source = None if isinstance(arena, RemoteArena) else arena.slots.reshape(-1)
    checksums = np.empty(len(pieces), np.uint64)
    ends = list(itertools.accumulate(size for _, size in pieces))

    def take_up(job: tuple[int, tuple[int, int]]) -> None:
        index, (at, size) = job
        segment = content[ends[index] - size : ends[index]]
        if source is not None:
            segment[:] = source[at : at + size]
        checksums[index] = xxhash.xxh3_64_intdigest(segment.data)

    share_out(take_up, enumerate(pieces), stored.length)
    header = arena.verify(stored.slot, stored.generation)
    if not names(header, digest):
        raise StaleSlotError(f"slot {stored.slot} has another object")
    if header.checksum != codec.checksum_of(stored.length, checksums):
        raise ChecksumError(f"generation {header.generation} of an object: wrong checksum")
    # Of the memoryview, which keeps `content`: its memory is used again when that is collected.
    return content.data[stored.table_bytes :]


def names(header: SlotHeader, digest: bytes) -> bool:
    """Whether the header of a slot is that of an object of this digest."""
    return len(header.key) == _KEY.size and header.key[:_DIGEST_BYTES] == digest[:_DIGEST_BYTES]


class FreePages:
    """The pages of an arena that hold nothing, as runs.

    Args:
        count: pages of the arena.

    Attributes:
        free: how many there are.
    """

    def __init__(self, count: int) -> None:
        self.free = count
        self._starts = [0]
        self._counts = {0: count}

    def take(self, needed: int) -> Runs | None:
        """Pages that are free no more: the smallest run that suffices; where none does, several
        runs, the largest first. They have room for their table, too. None if there is no room.

        Args:
            needed: pages of an object in one run.
        """
        enough = [(count, start) for start, count in self._counts.items() if count >= needed]
        if enough:
            _, start = min(enough)
            return (self._shorten(start, needed),)
        runs: list[tuple[int, int]] = []
        left = needed
        for start, count in sorted(self._counts.items(), key=lambda run: -run[1]):
            runs.append((start, count))
            left = needed + _pages_of(_table_bytes(len(runs))) - sum(each[1] for each in runs)
            if left <= 0:
                break
        else:
            return None
        taken = [self._shorten(start, count) for start, count in runs[:-1]]
        taken.append(self._shorten(runs[-1][0], runs[-1][1] + left))
        return tuple(taken)

    def give(self, runs: Runs) -> None:
        """Pages are free again."""
        for start, count in runs:
            self.free += count
            at = bisect_left(self._starts, start)
            following = start + count
            if at < len(self._starts) and self._starts[at] == following:
                count += self._counts.pop(self._starts.pop(at))
            if at and self._starts[at - 1] + self._counts[self._starts[at - 1]] == start:
                self._counts[self._starts[at - 1]] += count
            else:
                insort(self._starts, start)
                self._counts[start] = count

    def _shorten(self, start: int, needed: int) -> tuple[int, int]:
        count = self._counts.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        if count > needed:
            insort(self._starts, start + needed)
            self._counts[start + needed] = count - needed
        self.free -= needed
        return start, needed


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
        ValueError: `ttl_s` is no number.
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
        # of their pages.
        self._evictable: OrderedDict[bytes, bool] = OrderedDict()
        self._evictable_pages = 0
        self._content: NDArray[np.uint8] = arena.slots.reshape(-1)
        self._pages = FreePages(self._content.size // PAGE_BYTES)
        self._slots = list(range(arena.n_slots))
        # Which pages have memory, which comes with the first use and stays.
        self._allocated = np.zeros(self._pages.free, np.bool_)
        self._last_generation = 0

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def free_bytes(self) -> int:
        """Bytes that hold nothing."""
        return self._pages.free * PAGE_BYTES

    @property
    def evictable_bytes(self) -> int:
        """Bytes that hold objects that may be evicted: read, or past their time to live."""
        with self._lock:
            self._expire()
            return self._evictable_pages * PAGE_BYTES

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
        if self.arena.closed:
            raise TransportError("the objects were freed")
        if _pages_of(length) * PAGE_BYTES > self._content.size:
            raise ArenaFullError(
                f"an object of {length} bytes can never fit in {self._content.size} bytes; raise "
                "object_gib"
            )
        stored = self._allocate(digest, length)
        if stored is None and self._catch_up is not None:
            self._catch_up()
            stored = self._allocate(digest, length)
        if stored is None:
            raise self._full(digest, length)
        try:
            self._write(stored, key, digest, parts)
        except BaseException:
            with self._lock:
                self._release(stored)
            raise
        with self._lock:
            if self.arena.closed:
                raise TransportError("the objects were freed while one was stored")
            if digest in self._objects:
                self._remove(digest)
            self._objects[digest] = key, stored
            self._unread[digest] = self._clock() + self._ttl_s if self._ttl_s > 0 else math.inf
        return stored

    def mark_read(self, digest: bytes, generation: int, *, gone: bool = False) -> None:
        """Note that this object was read just now. Ignored if it is not here (any more).

        Args:
            digest, generation: of the object.
            gone: whether its reader says that nobody else will read it.
        """
        with self._lock:
            entry = self._objects.get(digest)
            if entry is None or entry[1].generation != generation:
                return
            if gone:
                self._remove(digest)
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
            self._evictable_pages = 0
            self._content = np.empty(0, np.uint8)  # it would keep the mapping
            self.arena.close()

    def _allocate(self, digest: bytes, length: int) -> StoredObject | None:
        with self._lock:
            self._expire()
            runs = self._room_for(digest, _pages_of(length))
            if runs is None:
                return None
            self._last_generation = max(self._last_generation + 1, self._clock_ns())
            return StoredObject(self._slots.pop(), self._last_generation, runs, length)

    def _room_for(self, digest: bytes, needed: int) -> Runs | None:
        # Holds the lock. Pages, and a slot, after evicting what must be; nothing goes in vain.
        if self._slots and (runs := self._pages.take(needed)) is not None:
            return runs
        if needed > self._pages.free + sum(self._replaceable(digest)):
            return None
        pages = copy.deepcopy(self._pages)
        # The object that is replaced goes early only where evicting all others is too little.
        order = [each for each in self._evictable if each != digest]
        order += [digest] if digest in self._objects else []
        gone: list[bytes] = []
        for each in order:
            gone.append(each)
            pages.give(self._objects[each][1].runs)
            if pages.free >= needed and pages.take(needed) is not None:
                break
        else:
            return None
        for each in gone:
            self._remove(each)
        return self._pages.take(needed)

    def _replaceable(self, digest: bytes) -> tuple[int, int]:
        # Holds the lock. Pages of the object under this key, and of all others that may be evicted.
        entry = self._objects.get(digest)
        own = 0 if entry is None else entry[1].pages
        return own, self._evictable_pages - (own if digest in self._evictable else 0)

    def _full(self, digest: bytes, length: int) -> ArenaFullError:
        with self._lock:
            room = self._pages.free + sum(self._replaceable(digest))
            slots = len(self._slots) + len(self._evictable)
        return ArenaFullError(
            f"an object of {length} bytes finds no room: {room * PAGE_BYTES} of "
            f"{self._content.size} bytes, and room for {slots} of {self.arena.n_slots} objects, "
            "are free or hold what was received; the others hold what nobody has received yet: "
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
            self._evictable_pages += self._objects[digest][1].pages

    def _remove(self, digest: bytes) -> None:
        # Holds the lock.
        _, stored = self._objects.pop(digest)
        if self._unread.pop(digest, None) is None:
            del self._evictable[digest]
            self._evictable_pages -= stored.pages
        self._release(stored)

    def _release(self, stored: StoredObject) -> None:
        # Holds the lock. A reader checks the header, so that is retired before any page of the
        # object can be chosen again. A closed arena has no slots to retire.
        if not self.arena.closed:
            self.arena.retire(stored.slot)
        self._slots.append(stored.slot)
        self._pages.give(stored.runs)

    def _write(
        self, stored: StoredObject, key: ObjectKey, digest: bytes, parts: Sequence[memoryview]
    ) -> None:
        content = self._content
        pieces = stored.pieces(content.size)
        checksums = np.empty(len(pieces), np.uint64)
        if stored.table_bytes:
            parts = [_table_of(stored.runs), *parts]
        for start, count in stored.runs:
            if not self._allocated[start : start + count].all():
                self.arena.prefault(start * PAGE_BYTES, count * PAGE_BYTES)
                self._allocated[start : start + count] = True

        def fill(job: tuple[int, tuple[int, int], list[NDArray[np.uint8]]]) -> None:
            index, (at, size), segments = job
            room = content[at : at + size]
            end = 0
            for segment in segments:
                room[end : end + segment.size] = segment
                end += segment.size
            checksums[index] = xxhash.xxh3_64_intdigest(room.data)

        self.arena.begin_write(stored.slot, stored.generation)
        segments = codec.cut(parts, [size for _, size in pieces])
        share_out(fill, zip(range(len(pieces)), pieces, segments, strict=True), stored.length)
        where = _KEY.pack(
            digest[:_DIGEST_BYTES], stored.runs[0][0], len(stored.runs), stored.length
        )
        checksum = codec.checksum_of(stored.length, checksums)
        self.arena.publish(stored.slot, stored.generation, where, 0, checksum)


@functools.cache
def host_bytes() -> int:
    """`memory_limit_bytes`, which reads files, read once."""
    return memory_limit_bytes()


def _pages_of(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE_BYTES))


def _table_bytes(runs: int) -> int:
    # Whole pages, so that an object of known length takes a known number of them.
    return 0 if runs == 1 else _pages_of(runs * RUN.itemsize) * PAGE_BYTES


def _table_of(runs: Runs) -> memoryview:
    table = np.zeros(_table_bytes(len(runs)), np.uint8)
    table[: len(runs) * RUN.itemsize].view(RUN)[:] = np.array(list(runs), RUN)
    return table.data


def _cut(runs: Runs, total: int) -> Iterator[tuple[int, int]]:
    for start, count in runs:
        at, end = start * PAGE_BYTES, (start + count) * PAGE_BYTES
        while at < end and total > 0:
            size = min(_PIECE_BYTES, end - at, total)
            yield at, size
            at += size
            total -= size
