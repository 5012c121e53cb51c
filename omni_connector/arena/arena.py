# SPDX-License-Identifier: Apache-2.0
"""An arena: equal slots in one memfd. Its owner writes each slot and its checksum; peers map it
read-only.

The file is [superblock | one header of 64 bytes per slot | slots], each part starting on a page.
It has no name, so nothing is left of it when processes are killed. It is sealed: its size cannot
change, so that no reader can be made to fault, and only the owner's mapping can be written.

There is no lock in the file. The owner marks a slot as being written and gives it a new
generation *before* it touches the bytes, and marks it published *after*. A reader verifies the
slot, copies, and verifies again: when both calls succeed with the same generation, the bytes
copied in between are those of that generation.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from omni_connector.arena.format import (
    EPOCH_BYTES,
    HEADER_BYTES,
    KEY_LENGTH_SHIFT,
    MAX_KEY_BYTES,
    PAGE_BYTES,
    SUPERBLOCK_BYTES,
    ArenaGeometry,
    PublishedSlots,
    SlotHeader,
    SlotState,
    states_of,
)
from omni_connector.arena.pinning import PinnedMemory, Pins
from omni_connector.arena.prefault import (
    Prefaulter,
    ReaderPrefaulter,
    overcommit_is_strict,
    prefault,
)
from omni_connector.errors import (
    PeerRefusedError,
    ProtocolError,
    SlotPendingError,
    StaleSlotError,
    TransportError,
)
from omni_connector.net.descriptors import reason

# Constants of Linux that the standard library of Python 3.11 lacks.
F_SEAL_FUTURE_WRITE: Final = 0x0010
MFD_NOEXEC_SEAL: Final = 0x0008

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

_WORDS: Final = HEADER_BYTES // 8

_MANY: Final = 8
"""Slots from which on it takes less time to look at all headers at once."""


_barrier_lock = threading.Lock()


def _u64s(what: str, values: ArrayLike) -> NDArray[np.uint64]:
    """One value or several `(n,)`, as the words `(n,)` that stand in headers."""
    try:
        given = np.asarray(
            values, None if isinstance(values, np.ndarray | np.generic) else np.uint64
        )
    except OverflowError as error:
        raise ValueError(f"a {what} of {values!r} is not a u64") from error
    if given.dtype.kind == "i" and given.size and given.min() < 0:
        raise ValueError(f"a {what} of {given.min()} is not a u64")
    return np.atleast_1d(given).astype(np.uint64, copy=False)


def _barrier() -> None:
    # Python has no memory barrier, so this takes a lock twice. On x86 and ARMv8 no access moves
    # from before a release to behind it, or from behind an acquire to before it, and a release and
    # an acquire after it keep their order. So accesses before the first release stay before
    # accesses after the second acquire.
    with _barrier_lock:
        pass
    with _barrier_lock:
        pass


class _Mapping:
    """A mapped arena: what the owner's and a reader's side have in common."""

    def __init__(self, mapped: mmap.mmap, geometry: ArenaGeometry, epoch: bytes) -> None:
        self.n_slots: Final = geometry.n_slots
        self.slot_bytes: Final = geometry.slot_bytes
        self.epoch: Final = epoch
        self._map: mmap.mmap | None = mapped
        headers = memoryview(mapped)[PAGE_BYTES : PAGE_BYTES + self.n_slots * HEADER_BYTES]
        self._words: memoryview[int] | None = headers.cast("Q")
        table = np.frombuffer(headers, np.uint64).reshape(self.n_slots, _WORDS)
        self._table: NDArray[np.uint64] | None = table
        content = self.n_slots * self.slot_bytes
        flat = np.frombuffer(mapped, np.uint8, count=content, offset=geometry.slots_at)
        self._slots: NDArray[np.uint8] | None = flat.reshape(self.n_slots, self.slot_bytes)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._map is None

    @property
    def slots(self) -> NDArray[np.uint8]:
        """The bytes, (n_slots, slot_bytes) uint8. Arrays that outlive `close` stay valid."""
        slots = self._slots
        if slots is None:
            raise TransportError("the arena is closed")
        return slots

    def header(self, slot: int) -> SlotHeader:
        """The header of one slot, consistent in itself.

        Raises:
            IndexError: there is no such slot.
            SlotPendingError: the owner was changing the header.
            IntegrityError: no owner writes such a header.
            TransportError: the arena is closed.
        """
        words, first = self._locate(slot)
        _barrier()
        raw = words[first : first + _WORDS].tobytes()
        _barrier()
        if words[first : first + 2].tobytes() != raw[:16]:
            raise SlotPendingError(f"slot {slot} changed while its header was read")
        return SlotHeader.decode(raw, slot, self.slot_bytes)

    def slots_keyed(self, start: bytes) -> list[int]:
        """The slots whose keys begin with these 8 bytes; nothing else of their headers is looked
        at.

        Raises:
            TransportError: the arena is closed.
        """
        table = self._table
        if table is None:
            raise TransportError("the arena is closed")
        found: list[int] = np.flatnonzero(
            table[:, 2] == int.from_bytes(start, sys.byteorder)
        ).tolist()
        return found

    def verify(self, slot: int, generation: int) -> SlotHeader:
        """The header of one slot, published with exactly this generation.

        Call it before a copy of the bytes, for their length, and again after it, to see that they
        were not overwritten meanwhile.

        Raises:
            SlotPendingError: the slot is not published with this generation yet.
            StaleSlotError: it never will be: it has a later generation, or was retired.
            IndexError, IntegrityError, TransportError: as `header`.
        """
        header = self.header(slot)
        header.require_published(slot, generation)
        return header

    def verify_all(
        self, slots: NDArray[np.int64], generations: NDArray[np.int64]
    ) -> PublishedSlots:
        """What `verify` says of several slots `(n,)`, with their generations `(n,)`.

        Raises:
            As `verify`, of one of them.
        """
        table = self._table
        if table is None:
            raise TransportError("the arena is closed")
        pairs = list(zip(slots.tolist(), generations.tolist(), strict=True))
        if len(pairs) < _MANY:
            return PublishedSlots.of([self.verify(slot, generation) for slot, generation in pairs])
        self._require(slots)
        _barrier()
        words = table[slots]
        _barrier()
        if (table[slots, :2] == words[:, :2]).all():
            found = PublishedSlots.decode(words, generations, self.slot_bytes)
            if found is not None:
                return found
        for slot, generation in pairs:
            self.verify(slot, generation)
        raise SlotPendingError(f"one of {len(slots)} slots changed while its header was read")

    def close(self) -> None:
        """Unmap the arena. Idempotent.

        Arrays taken from `slots` stay valid: the mapping goes with the last of them.
        """
        mapped, self._map = self._map, None
        self._words = self._slots = self._table = None
        if mapped is not None:
            # While a copy holds an array, the mapping cannot be closed; it goes with the array.
            with contextlib.suppress(BufferError):
                mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _require(self, slots: NDArray[np.int64]) -> None:
        if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self.n_slots:
            raise IndexError(
                f"slots from {slots.min()} to {slots.max()}, of an arena of {self.n_slots} slots"
            )

    def _locate(self, slot: int) -> tuple["memoryview[int]", int]:
        words = self._words
        if words is None:
            raise TransportError("the arena is closed")
        if not 0 <= slot < self.n_slots:
            raise IndexError(f"slot {slot} is outside an arena of {self.n_slots} slots")
        return words, int(slot) * _WORDS


class Arena(_Mapping):
    """The owner's side of an arena; made by `Arena.create`.

    One thread at a time may write a given slot; different slots may be written by different
    threads.
    """

    def __init__(self, fd: int, mapped: mmap.mmap, geometry: ArenaGeometry, epoch: bytes) -> None:
        super().__init__(mapped, geometry, epoch)
        self._fd = fd
        self._slots_at = geometry.slots_at
        self._prefaulter: Prefaulter | None = None

    @classmethod
    def create(
        cls,
        n_slots: int,
        slot_bytes: int,
        *,
        prefault: bool = False,
        randbytes: Callable[[int], bytes] = os.urandom,
        populated: Callable[[NDArray[np.uint8], int], object] = lambda slots, end: None,
        cores: Collection[int] = (),
    ) -> Self:
        """Make an arena of `n_slots` slots of `slot_bytes` bytes, all of them free.

        Args:
            n_slots: number of slots, at least one.
            slot_bytes: bytes of a slot, a positive multiple of `PAGE_BYTES`.
            prefault: allocate all the memory in the background. The first touch of a page costs
                many times a copy into it.
            randbytes: draws the epoch, which names this arena.
            populated: called on another thread with the slots, and the end of those whose memory
                is allocated now.
            cores: of the process that allocates the memory, and so of the memory node on which it
                lies; none for those of the caller.

        Raises:
            ValueError: the geometry is out of range.
            TransportError: the kernel has no memory for it, or lacks a seal (before Linux 5.1).
        """
        geometry = ArenaGeometry(n_slots, slot_bytes)
        epoch = randbytes(EPOCH_BYTES)

        def begin(fd: int, mapped: mmap.mmap) -> None:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
            superblock = geometry.superblock(epoch)
            mapped[: len(superblock)] = superblock

        fd, mapped = make_sealed(
            "arena",
            f"{n_slots} slots of {slot_bytes} bytes",
            geometry.total_bytes,
            begin,
        )
        arena = cls(fd, mapped, geometry, epoch)
        if prefault:
            slots = arena.slots
            progress = _PopulatedSlots(slots, geometry.slots_at, lambda end: populated(slots, end))
            arena._prefaulter = Prefaulter(fd, mapped, populated=progress, cores=cores)
        return arena

    @property
    def fd(self) -> int:
        """The memfd, valid until `close`; to keep it longer, duplicate it."""
        if self.closed:
            raise TransportError("the arena is closed")
        return self._fd

    def touch(self, slot: int) -> None:
        """Allocate the memory of a slot that is about to be used, if `prefault` has not yet."""
        if self._prefaulter is not None:
            start = self._slots_at + slot * self.slot_bytes
            self._prefaulter.touch(start, start + self.slot_bytes)

    def prefault(self, start: int, nbytes: int) -> None:
        """Allocate memory for whole pages of the slots now, before their first touch.

        Args:
            start: the first byte, from the start of the first slot.
            nbytes: how many.

        Raises:
            TransportError: there is no memory, or the arena is closed.
        """
        mapped = self._map
        if mapped is None:
            raise TransportError("the arena is closed")
        pages: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        try:
            prefault(self._fd, pages, self._slots_at + start, nbytes)
        except OSError as error:
            raise TransportError(f"no memory for {nbytes} bytes of an arena: {error}") from error

    def begin_write(self, slots: ArrayLike, generations: ArrayLike) -> None:
        """Give slots new generations; from now on no reader accepts their bytes.

        Args:
            slots: their numbers, `(n,)` or a single one.
            generations: one for each.

        Raises:
            IndexError: there is no such slot.
            ValueError: a slot is published with this very generation, so that readers could not
                tell the new bytes from the old, or it is not a u64. No write is begun.
            TransportError: the arena is closed.
        """
        table, numbers, words = self._headers_of(slots, generations)
        again = (table[numbers, 0] == words) & (states_of(table[numbers, 1]) == SlotState.PUBLISHED)
        if again.any():
            at = int(again.argmax())
            raise ValueError(f"slot {numbers[at]} is already published with generation {words[at]}")
        if self._prefaulter is not None:
            for slot in numbers.tolist():
                self.touch(slot)
        table[numbers, 1] = SlotState.WRITING
        table[numbers, 0] = words
        _barrier()

    def publish(
        self,
        slots: ArrayLike,
        generations: ArrayLike,
        keys: bytes | Sequence[bytes],
        length: int,
        checksums: ArrayLike,
    ) -> None:
        """Let readers read slots, whose bytes are complete.

        Args:
            slots: the slots that `begin_write` was called for, `(n,)` or a single one.
            generations: those given to `begin_write`.
            keys: for each up to 32 bytes that name the content.
            length: bytes of content of each, from the start of the slot.
            checksums: for each xxh3_64 of the content, or 0.

        Raises:
            IndexError: there is no such slot.
            StaleSlotError: a slot is not being written with this generation (any more). None is
                published.
            ValueError: a key or `length` is too long, or a checksum is not a u64.
            TransportError: the arena is closed.
        """
        table, numbers, words = self._headers_of(slots, generations)
        sums = _u64s("checksum", checksums)
        names = [keys] if isinstance(keys, bytes) else keys
        key_lengths = np.array([len(key) for key in names], np.uint64)
        if len(numbers) and key_lengths.max() > MAX_KEY_BYTES:
            raise ValueError(
                f"a key has at most {MAX_KEY_BYTES} bytes, not {int(key_lengths.max())}"
            )
        if not 0 <= length <= self.slot_bytes:
            raise ValueError(f"{length} bytes of content in a slot of {self.slot_bytes}")
        writing = (table[numbers, 0] == words) & (states_of(table[numbers, 1]) == SlotState.WRITING)
        if not writing.all():
            at = int(writing.argmin())
            raise StaleSlotError(
                f"slot {numbers[at]} is not being written with generation {words[at]} (any more)"
            )
        padded = b"".join([key.ljust(MAX_KEY_BYTES, b"\0") for key in names])
        table[numbers, 2:6] = np.frombuffer(padded, np.uint64).reshape(
            len(names), MAX_KEY_BYTES // 8
        )
        table[numbers, 6] = length
        table[numbers, 7] = sums
        statuses = key_lengths << np.uint64(KEY_LENGTH_SHIFT) | np.uint64(SlotState.PUBLISHED)
        _barrier()
        table[numbers, 1] = statuses

    def _headers_of(
        self, slots: ArrayLike, generations: ArrayLike
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64]]:
        """The headers of all slots; these slots, after a look whether it has them; and their
        generations."""
        table = self._table
        if table is None:
            raise TransportError("the arena is closed")
        numbers = np.atleast_1d(np.asarray(slots, np.int64))
        self._require(numbers)
        return table, numbers, _u64s("generation", generations)

    def retire(self, slot: int) -> None:
        """Retire the slot: readers refuse it from now on. Idempotent.

        Raises:
            IndexError: there is no such slot.
            TransportError: the arena is closed.
        """
        words, first = self._locate(slot)
        words[first + 1] = SlotState.FREE
        _barrier()

    def close(self) -> None:
        """Stop prefaulting, unmap, and close the memfd. Peers keep what they mapped. Idempotent."""
        if self._prefaulter is not None:
            self._prefaulter.stop()
        super().close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _PopulatedSlots:
    """Turns a prefaulter's progress in bytes into whole slots.

    Args:
        slots: of the arena.
        slots_at: the byte at which they begin.
        populated: called with the end of the slots that have memory, when there are more.
    """

    def __init__(
        self,
        slots: NDArray[np.uint8],
        slots_at: int,
        populated: Callable[[int], object],
    ) -> None:
        self._slots = slots
        self._slots_at = slots_at
        self._populated = populated
        self._end = 0

    def __call__(self, end: int) -> None:
        """All bytes of the file before `end` are allocated."""
        slots = min(len(self._slots), max(0, end - self._slots_at) // self._slots.shape[1])
        if slots > self._end:
            self._end = slots
            self._populated(slots)


class ArenaView(_Mapping):
    """A reader's side of an arena: a read-only mapping of a memfd that a peer sent."""

    _prefaulter: ReaderPrefaulter | None = None
    _pinned: PinnedMemory | None = None
    _to_pin: _PopulatedSlots | None = None
    _fd = -1  # of the memfd; -1 where the process had no descriptor left
    _unread = False  # the slots were not read yet, and the first read prefaults

    @classmethod
    def open(
        cls, fd: int, *, epoch: bytes, n_slots: int, slot_bytes: int, prefault: bool = False
    ) -> Self:
        """Check that a received memfd is safe to read, and map it. The caller closes `fd`.

        Args:
            fd: a descriptor that a peer has sent; not trusted.
            epoch: that of the arena that was asked for.
            n_slots: the announced number of slots.
            slot_bytes: the announced bytes of each slot.
            prefault: map the memory that the owner has allocated, in the background, from the first
                read on; after a minute in which it allocates none, from the next read on. An arena
                that is never read takes no page tables. The memfd's descriptor is kept for that,
                and for `descriptor`.

        Raises:
            PeerRefusedError: this is no memfd, or not sealed against change of size and writing.
            ProtocolError: this is no arena, or not of the announced size.
            IncompatiblePeerError: it has another format, geometry or epoch than announced.
        """
        require_sealed(fd)
        try:
            geometry = ArenaGeometry(n_slots, slot_bytes)
        except ValueError as error:
            raise ProtocolError(f"the peer announces an impossible arena: {error}") from error
        mapped = map_sealed(fd, geometry.total_bytes, f"{n_slots} slots of {slot_bytes} bytes")
        try:
            geometry.check_superblock(bytes(mapped[:SUPERBLOCK_BYTES]), epoch)
        except ProtocolError:
            mapped.close()
            raise
        view = cls(mapped, geometry, epoch)
        if prefault:
            # Without it, pages are mapped as they are read.
            with contextlib.suppress(OSError):
                view._fd = os.dup(fd)
            view._unread = view._fd >= 0
        return view

    def descriptor(self) -> int:
        """A descriptor of the memfd, which the caller closes.

        Raises:
            TransportError: the arena is closed, or the process has no descriptor for it.
        """
        try:
            with _barrier_lock:  # `close` takes it, too
                if self._fd >= 0:
                    return os.dup(self._fd)
        except OSError as error:
            raise TransportError(f"no descriptor of an arena: {reason(error)}") from error
        raise TransportError("no descriptor of the arena was kept")

    def pin_with(self, pins: Pins) -> None:
        """Have slots pinned after the first read, in the background, as far as the owner has
        allocated their memory; of what it allocates later, after later reads. `close` lets go of
        them."""
        slots = super().slots
        self._pinned = pins.follow(slots)
        slots_at = ArenaGeometry(self.n_slots, self.slot_bytes).slots_at
        self._to_pin = _PopulatedSlots(slots, slots_at, self._pinned.populated)

    def mapped_until(self, end: int) -> None:
        """All bytes of the file before `end` have memory, which is mapped."""
        if (to_pin := self._to_pin) is not None:
            to_pin(end)

    @property
    def slots(self) -> NDArray[np.uint8]:
        """As `_Mapping.slots`."""
        if self._may_prefault:
            self._prefault()
        return super().slots

    @property
    def _may_prefault(self) -> bool:
        """Whether nobody looks which memory the owner has allocated: no slot was read before, or no
        memory came for a while."""
        prefaulter = self._prefaulter
        return self._unread or (prefaulter is not None and prefaulter.gave_up)

    def _prefault(self) -> None:
        with _barrier_lock:
            wanted = self._may_prefault
            start = 0
            self._unread = False
            if self._prefaulter is not None:
                start = self._prefaulter.end
                self._prefaulter.gave_up = False
        mapped = self._map
        if not wanted or mapped is None:
            return
        with contextlib.suppress(TransportError):  # without it, pages are mapped as they are read
            fd = self.descriptor()
            try:
                with contextlib.suppress(OSError, RuntimeError):
                    self._prefaulter = ReaderPrefaulter(fd, mapped, self.mapped_until, start)
            finally:
                os.close(fd)

    def _take_fd(self) -> int:
        """The descriptor of the memfd, which the caller closes; -1 if there is none any more.

        Any thread may call this.
        """
        with _barrier_lock:
            fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """As `_Mapping.close`, and stop prefaulting. No copy of a device may be under way."""
        if (fd := self._take_fd()) >= 0:
            os.close(fd)
        if self._prefaulter is not None:
            self._prefaulter.stop()
        self._to_pin = None  # it would keep the mapping alive
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()
        super().close()

    def abandon(self) -> None:
        """As `close`, in a forked child. Takes no lock: a thread of the parent may have held it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if self._prefaulter is not None:
            self._prefaulter.abandon()
        super().close()


def memfd(name: str) -> int:
    """Make a memfd that can be sealed.

    Raises:
        OSError: the kernel makes none.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # Some hosts refuse memfds that might be executed.
        return os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the flag is unknown before Linux 6.3
            raise
    return os.memfd_create(name, flags)


def make_sealed(
    kind: str,
    what: str,
    size: int,
    begin: Callable[[int, mmap.mmap], object],
) -> tuple[int, mmap.mmap]:
    """Make a memfd with all of `SEALS`, and map it.

    Args:
        kind: the end of its name, by which `/proc/PID/maps` shows it.
        what: what is in it, for errors.
        size: its bytes.
        begin: writes what is there from the beginning, given the descriptor and the mapping.

    Raises:
        TransportError: the kernel has no memory for it, or lacks a seal (before Linux 5.1).
    """
    try:
        fd = memfd(f"omni-connector-{kind}")
    except OSError as error:
        hint = ""
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            hint = "; allow memfd_create, which the container's seccomp profile may forbid"
        raise TransportError(f"cannot make a memfd: {reason(error)}{hint}") from error
    try:
        os.ftruncate(fd, size)
        mapped = mmap.mmap(fd, size)
        if overcommit_is_strict():
            os.posix_fallocate(fd, 0, size)
        begin(fd, mapped)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except (OSError, OverflowError, ValueError) as error:
        os.close(fd)
        raise TransportError(f"cannot make an {kind} of {what}: {reason(error)}") from error
    return fd, mapped


def map_sealed(fd: int, size: int, what: str) -> mmap.mmap:
    """Map a file that a peer sent, and `require_sealed` has accepted, read-only.

    Args:
        size: bytes that it must have.
        what: what needs so many, for errors.

    Raises:
        ProtocolError: it has another size.
        TransportError: it cannot be mapped.
    """
    found = os.fstat(fd).st_size
    if found != size:
        raise ProtocolError(f"the peer's memfd has {found} bytes, {what} need {size}")
    try:
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot map the peer's {size} bytes: {reason(error)}") from error


def require_sealed(fd: int) -> None:
    """Refuse a received file unless it is a memfd with all of `SEALS`.

    Raises:
        PeerRefusedError: this is no memfd, or not sealed against change of size and writing.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise PeerRefusedError(f"the peer sent a file that is no memfd: {error}") from error
    if seals & SEALS != SEALS:
        raise PeerRefusedError(f"the peer's memfd has seals {seals:#x}, wanted {SEALS:#x}")
