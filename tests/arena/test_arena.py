# SPDX-License-Identifier: Apache-2.0
import contextlib
import errno
import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_connector.arena import arena as arena_module
from omni_connector.arena import prefault as prefault_module
from omni_connector.arena.arena import (
    SEALS,
    Arena,
    ArenaView,
    memfd,
)
from omni_connector.arena.format import ArenaGeometry, PublishedSlots, SlotState
from omni_connector.errors import (
    IncompatiblePeerError,
    IntegrityError,
    OmniError,
    PeerRefusedError,
    ProtocolError,
    StaleSlotError,
    TransportError,
)

N_SLOTS = 5
SLOT_BYTES = 8192


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(N_SLOTS, SLOT_BYTES) as arena:
        yield arena


@pytest.fixture
def view(arena: Arena) -> Iterator[ArenaView]:
    with view_of(arena) as view:
        yield view


def view_of(arena: Arena) -> ArenaView:
    return ArenaView.open(
        arena.fd, epoch=arena.epoch, n_slots=arena.n_slots, slot_bytes=arena.slot_bytes
    )


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_view_sees_what_the_owner_publishes(arena: Arena, view: ArenaView) -> None:
    arena.begin_write(4, 11)
    arena.slots[4] = 7
    arena.publish(4, 11, b"k" * 32, SLOT_BYTES, 99)
    header = view.verify(4, 11)
    assert header == arena.verify(4, 11)
    assert (header.key, header.length, header.checksum) == (b"k" * 32, SLOT_BYTES, 99)
    assert (view.slots[4] == 7).all()
    assert (view.slots[:4] == 0).all()


def test_headers_of_neighbours_are_apart(arena: Arena) -> None:
    for slot in range(N_SLOTS):
        arena.begin_write(slot, 100 + slot)
        arena.publish(slot, 100 + slot, bytes([slot]) * slot, slot, slot * 3)
    arena.retire(2)
    for slot in range(N_SLOTS):
        header = arena.header(slot)
        wanted = SlotState.FREE if slot == 2 else SlotState.PUBLISHED
        assert header.state is wanted
        assert header.generation == 100 + slot
        if slot != 2:
            assert (header.key, header.length, header.checksum) == (
                bytes([slot]) * slot,
                slot,
                slot * 3,
            )


def test_size_and_content_are_sealed(arena: Arena) -> None:
    size = os.fstat(arena.fd).st_size
    reopened = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    for fd in (arena.fd, reopened):
        for attempt in (
            lambda fd=fd: os.ftruncate(fd, size - 4096),
            lambda fd=fd: os.ftruncate(fd, size + 4096),
            lambda fd=fd: os.pwrite(fd, b"x", 0),
            lambda fd=fd: mmap.mmap(fd, size),
            lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                attempt()
    os.close(reopened)
    arena.slots[0, 0] = 1


@pytest.mark.parametrize(("n_slots", "slot_bytes"), [(0, 4096), (-1, 4096), (1, 0), (1, 4097)])
def test_impossible_geometry_is_refused(n_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="slot"):
        Arena.create(n_slots, slot_bytes)


def test_more_memory_than_there_can_be_is_refused_cleanly() -> None:
    before = open_fds()
    with pytest.raises(TransportError):
        Arena.create(1 << 50, 1 << 20)
    assert open_fds() <= before


def test_out_of_range_arguments_are_refused(arena: Arena) -> None:
    for slot in (-1, N_SLOTS):
        for call in (
            lambda slot=slot: arena.begin_write(slot, 1),
            lambda slot=slot: arena.publish(slot, 1, b"", 0, 0),
            lambda slot=slot: arena.retire(slot),
            lambda slot=slot: arena.header(slot),
        ):
            with pytest.raises(IndexError, match=str(slot)):
                call()
    for generation in (-1, 2**64):
        with pytest.raises(ValueError, match="u64"):
            arena.begin_write(0, generation)
    arena.begin_write(0, 1)
    for key, length, checksum in (
        (b"k" * 33, 0, 0),
        (b"", SLOT_BYTES + 1, 0),
        (b"", -1, 0),
        (b"", 0, 2**64),
        (b"", 0, -1),
    ):
        with pytest.raises(ValueError):
            arena.publish(0, 1, key, length, checksum)
    assert arena.header(0).state is SlotState.WRITING


def test_impossible_headers_of_a_peer_are_refused(arena: Arena, view: ArenaView) -> None:
    headers = np.frombuffer(arena._map, np.uint64, N_SLOTS * 8, 4096).reshape(N_SLOTS, 8)
    headers[0] = (1, 3, 0, 0, 0, 0, 0, 0)  # no such state
    headers[1] = (1, 2 | 33 << 32, 0, 0, 0, 0, 0, 0)  # key too long
    headers[2] = (1, 2, 0, 0, 0, 0, SLOT_BYTES + 1, 0)  # longer than the slot
    headers[3] = 2**64 - 1
    for slot in range(4):
        with pytest.raises(IntegrityError):
            view.verify(slot, 1)
    del headers


def forged(
    write: Callable[[mmap.mmap], object], seals: int = SEALS, size: int | None = None
) -> int:
    geometry = ArenaGeometry(N_SLOTS, SLOT_BYTES)
    fd = memfd("forged")
    os.ftruncate(fd, geometry.total_bytes if size is None else size)
    with mmap.mmap(fd, max(os.fstat(fd).st_size, 1)) as mapped:
        superblock = geometry.superblock(b"e" * 16)
        mapped[: len(superblock)] = superblock
        write(mapped)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def poke(at: int, new: bytes) -> Callable[[mmap.mmap], object]:
    def write(mapped: mmap.mmap) -> None:
        mapped[at : at + len(new)] = new

    return write


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (poke(0, b"X"), ProtocolError),
        (poke(8, struct.pack("=I", 2)), IncompatiblePeerError),
        (poke(12, struct.pack("=I", 128)), ProtocolError),
        (poke(16, struct.pack("=Q", N_SLOTS - 1)), ProtocolError),
        (poke(24, struct.pack("=Q", 4096)), ProtocolError),
        (poke(40, struct.pack("=Q", 0)), ProtocolError),
        (poke(56, b"f"), IncompatiblePeerError),
        (poke(72, b"xxxxxxxx"), ProtocolError),
        (poke(0, bytes(80)), ProtocolError),
    ],
)
def test_forged_superblock_is_refused(
    write: Callable[[mmap.mmap], object], error: type[OmniError]
) -> None:
    before = open_fds()
    fd = forged(write)
    with pytest.raises(error):
        ArenaView.open(fd, epoch=b"e" * 16, n_slots=N_SLOTS, slot_bytes=SLOT_BYTES)
    os.close(fd)
    assert open_fds() <= before


@pytest.mark.parametrize("missing", [1 << bit for bit in range(8) if SEALS & 1 << bit])
def test_file_without_a_seal_is_refused(missing: int) -> None:
    fd = forged(lambda mapped: None, seals=SEALS & ~missing)
    with pytest.raises(PeerRefusedError, match="seals"):
        ArenaView.open(fd, epoch=b"e" * 16, n_slots=N_SLOTS, slot_bytes=SLOT_BYTES)
    os.close(fd)


@pytest.mark.parametrize("change", [-4096, 0, 4096])
def test_only_a_file_of_the_right_size_is_opened(change: int) -> None:
    fd = forged(lambda mapped: None, size=ArenaGeometry(N_SLOTS, SLOT_BYTES).total_bytes + change)
    with pytest.raises(ProtocolError, match="bytes") if change else contextlib.nullcontext():
        ArenaView.open(fd, epoch=b"e" * 16, n_slots=N_SLOTS, slot_bytes=SLOT_BYTES).close()
    os.close(fd)


@pytest.mark.parametrize(("n_slots", "slot_bytes"), [(0, 4096), (1, 1), (-5, 4096), (2**62, 2**62)])
def test_announced_geometry_is_not_trusted(arena: Arena, n_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        ArenaView.open(arena.fd, epoch=arena.epoch, n_slots=n_slots, slot_bytes=slot_bytes)


def test_descriptor_that_is_no_memfd_is_refused(place: Path) -> None:
    reader, writer = os.pipe()
    with tempfile.TemporaryFile(dir=place) as file, open("/dev/zero", "rb") as zero:
        for fd in (reader, file.fileno(), zero.fileno()):
            with pytest.raises(PeerRefusedError):
                ArenaView.open(fd, epoch=b"e" * 16, n_slots=1, slot_bytes=4096)
    os.close(reader)
    os.close(writer)


def outcome(look: Callable[[], object]) -> object:
    """What a call returns, or the error that it raises."""
    try:
        return look()
    except (OmniError, IndexError) as error:
        return type(error), str(error)


HEADERS = st.tuples(
    st.sampled_from([*map(int, SlotState), 3]),  # the last is no state
    st.integers(4, 6),  # generations: the reader asks for 5
    st.binary(max_size=32),
    st.integers(0, SLOT_BYTES + 1),
    st.integers(0, 2**64 - 1),
)


@given(
    headers=st.lists(HEADERS, min_size=N_SLOTS, max_size=N_SLOTS),
    slots=st.lists(st.integers(-1, N_SLOTS), max_size=6),
    many=st.sampled_from([0, 4]),
)
@example(headers=[(0, 5, b"", 0, 0)] * N_SLOTS, slots=[0, -1], many=4)
def test_several_slots_are_verified_as_one_after_the_other(
    headers: list[tuple[int, int, bytes, int, int]], slots: list[int], many: int
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        Arena.create(N_SLOTS, SLOT_BYTES) as arena,
        view_of(arena) as view,
    ):
        patch.setattr(arena_module, "_MANY", many)
        for slot, (state, generation, key, length, checksum) in enumerate(headers):
            at = 4096 + 64 * slot
            packed = struct.pack(
                "=QQ32sQQ", generation, state | len(key) << 32, key, length, checksum
            )
            assert arena._map is not None
            arena._map[at : at + 64] = packed
        ids = np.array(slots, np.int64)
        found = outcome(lambda: view.verify_all(ids, np.full(len(ids), 5)))
        each = outcome(lambda: [view.verify(slot, 5) for slot in slots])
    if len(slots) >= many and any(not 0 <= slot < N_SLOTS for slot in slots):
        assert isinstance(found, tuple)
        assert found[0] is IndexError
    elif isinstance(each, list):
        assert isinstance(found, PublishedSlots)
        assert found.keys == [header.key for header in each]
        assert found.lengths.tolist() == [header.length for header in each]
        assert found.checksums.tolist() == [header.checksum for header in each]
    else:
        assert found == each


def raw_headers(arena: Arena) -> bytes:
    assert arena._map is not None
    return bytes(arena._map[4096 : 4096 + 64 * N_SLOTS])


@given(
    headers=st.lists(HEADERS, min_size=N_SLOTS, max_size=N_SLOTS),
    slots=st.lists(st.integers(-1, N_SLOTS), min_size=1, max_size=6, unique=True),
    generations=st.lists(st.integers(-1, 6), min_size=6, max_size=6),
    key=st.binary(max_size=33),
    length=st.integers(-1, SLOT_BYTES + 1),
    publishes=st.booleans(),
    alone=st.booleans(),
)
@example(
    headers=[(1, 5, b"", 0, 0)] * N_SLOTS,
    slots=[0, 1],
    generations=[5] * 6,
    key=b"key",
    length=7,
    publishes=True,
    alone=False,
)
@example(
    headers=[(1, 1 << 63, b"", 0, 0)] * N_SLOTS,
    slots=[2],
    generations=[1 << 63] * 6,
    key=b"key",
    length=7,
    publishes=True,
    alone=True,
)
def test_the_headers_of_several_slots_are_written_or_none(
    headers: list[tuple[int, int, bytes, int, int]],
    slots: list[int],
    generations: list[int],
    key: bytes,
    length: int,
    publishes: bool,
    alone: bool,
) -> None:
    """By the calls for several slots, or by those for one."""
    slots = slots[:1] if alone else slots
    ids = np.array(slots, np.int64)
    new = np.array(generations[: len(ids)], np.uint64 if max(generations) > 6 else np.int64)
    keys = [key[: at + 28] for at in range(len(ids))]
    sums = np.arange(len(ids), dtype=np.uint64) + np.uint64((1 << 64) - 9)
    before = [
        struct.pack("=QQ32sQQ", generation, state | len(key) << 32, key, size, checksum)
        for state, generation, key, size, checksum in headers
    ]
    allowed = all(0 <= slot < N_SLOTS for slot in slots)
    after = list(before)
    for slot, generation, name, checksum in zip(slots, new.tolist(), keys, sums, strict=True):
        if not allowed:
            break
        state, present, *_ = headers[slot]
        if publishes:
            allowed = (state, present) == (SlotState.WRITING, generation)
            allowed &= len(name) <= 32 and 0 <= length <= SLOT_BYTES
            if allowed:
                words = generation, SlotState.PUBLISHED | len(name) << 32, name, length, checksum
                after[slot] = struct.pack("=QQ32sQQ", *words)
        else:
            allowed = generation >= 0
            allowed &= (state, present) != (SlotState.PUBLISHED, generation)
            if allowed:
                after[slot] = struct.pack("=QQ", generation, SlotState.WRITING) + before[slot][16:]
    with Arena.create(N_SLOTS, SLOT_BYTES) as arena:
        assert arena._map is not None
        arena._map[4096 : 4096 + 64 * N_SLOTS] = b"".join(before)
        try:
            if alone and publishes:
                arena.publish(ids[0], new[0], keys[0], np.int64(length), sums[0])
            elif alone:
                arena.begin_write(ids[0], new[0])
            elif publishes:
                arena.publish(ids, new, keys, length, sums)
            else:
                arena.begin_write(ids, new)
        except (IndexError, ValueError, StaleSlotError):
            assert not allowed
            after = before
        else:
            assert allowed
        assert raw_headers(arena) == b"".join(after)


def test_a_slot_that_is_written_again_while_its_header_is_read_is_refused(
    arena: Arena, view: ArenaView, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in (0, 1):
        arena.begin_write(slot, 5)
        arena.publish(slot, 5, b"key", 8, 9)
    barrier = arena_module._barrier
    calls = iter(range(100))

    def change() -> None:
        barrier()
        if next(calls) == 1:  # between the two looks
            arena.begin_write(1, 6)
            arena.publish(1, 6, b"other", 8, 9)

    monkeypatch.setattr(arena_module, "_MANY", 0)
    monkeypatch.setattr(arena_module, "_barrier", change)
    with pytest.raises(StaleSlotError):
        view.verify_all(np.array([0, 1]), np.array([5, 5]))
    monkeypatch.undo()
    assert view.verify_all(np.array([0, 1]), np.array([5, 6])).keys == [b"key", b"other"]


def test_closed_arena_refuses_and_held_arrays_stay_valid() -> None:
    before = open_fds()
    arena = Arena.create(2, 4096, prefault=True)
    view = view_of(arena)
    arena.begin_write(1, 3)
    arena.publish(1, 3, b"", 4096, 0)
    held, seen = arena.slots, view.slots
    arena.close()
    arena.close()
    assert view.verify(1, 3).length == 4096
    for _ in range(2):
        view.close()
    held[1] = 5
    assert (seen[1] == 5).all()
    for call in (
        lambda: arena.slots,
        lambda: arena.fd,
        lambda: arena.begin_write(0, 1),
        lambda: arena.retire(0),
        lambda: view.slots,
        lambda: view.verify(0, 1),
        lambda: view.verify_all(np.array([0]), np.array([1])),
    ):
        with pytest.raises(TransportError, match="closed"):
            call()
    del held, seen, call
    assert open_fds() <= before


def allocated(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_memory_is_had_at_once_where_the_kernel_may_refuse_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Arena.create(4, 1 << 20) as arena:
        assert allocated(arena) < 1 << 20
    monkeypatch.setattr(arena_module, "overcommit_is_strict", lambda: True)
    with Arena.create(4, 1 << 20) as arena:
        assert allocated(arena) >= 4 << 20


@pytest.mark.parametrize("kernel_can", [True, False])
def test_slot_has_memory_once_populated(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, kernel_can: bool
) -> None:
    if not kernel_can:  # before Linux 5.14 the advice is unknown
        monkeypatch.setattr(prefault_module, "MADV_POPULATE_WRITE", 9999)
    arena.slots[1] = 7

    before = allocated(arena)
    arena.prefault(SLOT_BYTES, SLOT_BYTES)
    assert allocated(arena) == before
    arena.prefault(3 * SLOT_BYTES, SLOT_BYTES)
    assert allocated(arena) == before + SLOT_BYTES
    assert (arena.slots[1] == 7).all()


def test_prefault_without_memory_is_an_error(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault_module, "MADV_POPULATE_WRITE", 9999)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(TransportError, match="no memory for 4096 bytes of an arena"):
        arena.prefault(2 * SLOT_BYTES, 4096)
    arena.close()
    with pytest.raises(TransportError, match="closed"):
        arena.prefault(2 * SLOT_BYTES, 4096)
