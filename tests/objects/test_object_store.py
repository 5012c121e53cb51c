# SPDX-License-Identifier: Apache-2.0
import errno
import itertools
import os
import struct
import threading
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from omni_connector.arena import arena
from omni_connector.arena.arena import Arena
from omni_connector.arena.buffers import Buffers
from omni_connector.arena.format import SlotState
from omni_connector.errors import (
    ArenaFullError,
    ChecksumError,
    ConfigError,
    IntegrityError,
    ProtocolError,
    StaleSlotError,
    TransportError,
)
from omni_connector.objects import object_store as objects
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.object_store import (
    MAX_OBJECTS,
    RUN,
    FreePages,
    ObjectStore,
    StoredObject,
    find_object,
    fitting,
    object_geometry,
    read_object,
)
from omni_connector.runtime import shared_work
from omni_connector.testing import FakeClock

SLOT_BYTES = 4096
N_SLOTS = 8
TTL_S = 60.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Iterator[ObjectStore]:
    store = ObjectStore(Arena.create(N_SLOTS, SLOT_BYTES), clock.ns, ttl_s=TTL_S, clock=clock)
    yield store
    store.close()


def read_stored(
    store: ObjectStore, name: str, stored: StoredObject, buffers: Buffers | None = None
) -> memoryview:
    """What a reader makes of what the owner says of an object."""
    memory = buffers or Buffers()
    size = N_SLOTS * SLOT_BYTES
    return read_object(
        store.arena, size, key(name).digest, stored, lambda pieces, nbytes: memory.take(nbytes)
    )


def free(store: ObjectStore) -> int:
    """Pages; a slot here has as many bytes as a page."""
    return store.free_bytes // SLOT_BYTES


def key(name: str) -> ObjectKey:
    return ObjectKey("0", "1", name)


def put(store: ObjectStore, name: str, content: bytes) -> StoredObject:
    return store.store(key(name), [memoryview(content)])


def read(store: ObjectStore, name: str) -> bytes:
    stored = store.find(key(name).digest)
    assert stored is not None
    return bytes(read_stored(store, name, stored))


@pytest.mark.parametrize("sizes", [(0,), (1, 0, 1), (4096, 1), (5000, 5000, 5000), (4095, 4097)])
def test_parts_are_joined(store: ObjectStore, sizes: tuple[int, ...]) -> None:
    parts = [os.urandom(size) for size in sizes]
    stored = store.store(key("k"), [memoryview(part) for part in parts])
    assert stored.length == sum(sizes)
    assert read(store, "k") == b"".join(parts)


def test_scattered_object_is_whole(store: ObjectStore) -> None:
    for i in range(N_SLOTS):
        put(store, f"r{i}", b"x")
    for i in (0, 2, 3, 6, 7):
        store.drop(f"r{i}")
    content = os.urandom(4 * SLOT_BYTES - 7)
    stored = put(store, "k", content)
    # A page has the table of runs.
    assert sorted(stored.runs) == [(0, 1), (2, 2), (6, 2)]
    assert read(store, "k") == content
    assert find_object(store.arena, key("k").digest) == stored
    assert [read(store, f"r{i}") for i in (1, 4, 5)] == [b"x"] * 3


def test_old_object_stays_until_the_new_one_is_complete(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "k", b"old")

    def fail(*args: object) -> None:
        assert read(store, "k") == b"old"
        raise RuntimeError("no")

    monkeypatch.setattr(store.arena, "publish", fail)
    with pytest.raises(RuntimeError):
        put(store, "k", b"new")
    monkeypatch.undo()
    assert read(store, "k") == b"old"
    assert free(store) == N_SLOTS - 1


def test_refused_object_changes_nothing(store: ObjectStore) -> None:
    put(store, "k", b"old")
    put(store, "other", bytes(3 * SLOT_BYTES))
    with pytest.raises(ArenaFullError, match="20480 of 32768 bytes"):
        put(store, "k", bytes(6 * SLOT_BYTES))
    with pytest.raises(ArenaFullError, match="never"):
        put(store, "k", bytes(N_SLOTS * SLOT_BYTES + 1))
    assert read(store, "k") == b"old"
    assert free(store) == 4


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("-inf"), float("inf")])
def test_without_a_time_unread_objects_stay(clock: FakeClock, ttl_s: float) -> None:
    store = ObjectStore(Arena.create(1, SLOT_BYTES), clock.ns, ttl_s=ttl_s, clock=clock)
    put(store, "k", b"x")
    clock.advance(1e9)
    with pytest.raises(ArenaFullError):
        put(store, "other", b"x")
    store.close()


def test_a_time_must_be_a_number() -> None:
    with Arena.create(1, SLOT_BYTES) as memory, pytest.raises(ValueError, match="nan"):
        ObjectStore(memory, ttl_s=float("nan"))


NAMES = st.sampled_from("abcdefgh")
SIZES = st.integers(0, 2 * SLOT_BYTES) | st.integers(0, 6 * SLOT_BYTES)


class StoreBeside(RuleBasedStateMachine):
    """An `ObjectStore` beside the plainest books: what is there, and in which order it may go."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        memory = Arena.create(N_SLOTS, SLOT_BYTES)
        self.store = ObjectStore(memory, self.clock.ns, ttl_s=TTL_S, clock=self.clock)
        self.there: dict[str, tuple[StoredObject, bytes]] = {}
        self.unread: dict[str, float] = {}  # and when each may go
        self.evictable: dict[str, bool] = {}  # in their order, and whether each was read
        self.gone: list[tuple[str, StoredObject]] = []

    def pages(self, names: Iterable[str]) -> int:
        return sum(self.there[name][0].pages for name in names)

    def remove(self, name: str) -> None:
        self.gone.append((name, self.there.pop(name)[0]))
        self.unread.pop(name, None)
        self.evictable.pop(name, None)

    @initialize(full=st.booleans())
    def begin(self, full: bool) -> None:
        for name in "abcdefgh" if full else "":
            self.put(name, 1, 0)  # what is dropped leaves holes

    @rule(name=NAMES, size=SIZES, seed=st.integers(0, 255))
    def put(self, name: str, size: int, seed: int) -> None:
        content, needed = bytes([seed]) * size, max(1, -(-size // SLOT_BYTES))
        room, order = N_SLOTS - self.pages(self.there), [n for n in self.evictable if n != name]
        own = self.pages([name] if name in self.there else [])
        try:
            stored = put(self.store, name, content)
        except ArenaFullError:
            # Scattered pages need one more, for the table of their runs.
            assert room + self.pages(order) + own <= needed
            return
        went = [n for n in order if self.store.find(key(n).digest) is None]
        assert went == order[: len(went)]
        assert not went or room + self.pages(went[:-1]) <= needed, "an object went in vain"
        assert room + self.pages(went) >= needed or went == order, "it was replaced too early"
        earlier = [each.generation for each, _ in self.there.values()]
        assert stored.generation >= max([self.clock.ns(), *(each + 1 for each in earlier)])
        for each in [*went, *([name] if name in self.there else [])]:
            self.remove(each)
        self.there[name], self.unread[name] = (stored, content), self.clock() + TTL_S

    @rule(name=NAMES, stale=st.booleans(), gone=st.booleans())
    def mark(self, name: str, stale: bool, gone: bool) -> None:
        stored = self.there[name][0] if name in self.there else None
        generation = 7 if stored is None else stored.generation - stale
        if gone:
            self.store.mark_read(key(name).digest, generation, gone=True)
        else:
            self.store.mark_read(key(name).digest, generation)
        if stored is None or stale:
            return
        if gone:
            self.remove(name)
            return
        self.unread.pop(name, None)
        self.evictable.pop(name, None)
        self.evictable[name] = True

    @rule(part=st.sampled_from([0.001, 0.4, 0.6, 1.0]))
    def wait(self, part: float) -> None:
        self.clock.advance(part * TTL_S)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        assert self.store.drop(name) == (name in self.there)
        if name in self.there:
            self.remove(name)

    @rule()
    def reap(self) -> None:
        read = [name for name, was_read in self.evictable.items() if was_read]
        assert self.store.reap() == len(read)
        for name in read:
            self.remove(name)

    @invariant()
    def agree(self) -> None:
        for name in [name for name, until in self.unread.items() if until <= self.clock()]:
            del self.unread[name]
            self.evictable[name] = False
        store = self.store
        assert len(store) == len(self.there)
        assert store.free_bytes == (N_SLOTS - self.pages(self.there)) * SLOT_BYTES
        assert store.evictable_bytes == self.pages(self.evictable) * SLOT_BYTES
        states = [store.arena.header(slot).state for slot in range(N_SLOTS)]
        assert states.count(SlotState.PUBLISHED) == len(self.there)
        for name, (stored, content) in self.there.items():
            digest = key(name).digest
            assert store.find(digest) == find_object(store.arena, digest) == stored
            # The first bytes alone do not make it another's.
            assert find_object(store.arena, digest[:12] + bytes(20)) is None
            assert bytes(read_stored(store, name, stored)) == content
        for name, stored in self.gone[-4:]:
            with pytest.raises(StaleSlotError):
                read_stored(store, name, stored)

    def teardown(self) -> None:
        self.store.close()


def test_the_store_keeps_evicts_and_frees_as_the_plainest_books_say() -> None:
    run_state_machine_as_test(
        StoreBeside, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


def test_every_byte_of_an_object_is_checked(store: ObjectStore) -> None:
    content = os.urandom(3 * SLOT_BYTES - 100)
    stored = put(store, "k", content)
    ((first, _),) = stored.runs
    flat = store.arena.slots.reshape(-1)[first * SLOT_BYTES :]
    for at in (0, SLOT_BYTES - 1, SLOT_BYTES, 2 * SLOT_BYTES + 5, len(content) - 1):
        flat[at] ^= 1
        with pytest.raises(ChecksumError):
            read(store, "k")
        flat[at] ^= 1
    assert read(store, "k") == content


def test_contents_of_slots_that_change_places_are_detected(store: ObjectStore) -> None:
    stored = put(store, "k", os.urandom(2 * SLOT_BYTES))
    ((first, _),) = stored.runs
    store.arena.slots[[first, first + 1]] = store.arena.slots[[first + 1, first]]
    with pytest.raises(ChecksumError):
        read(store, "k")


@pytest.mark.parametrize("length", [2 * SLOT_BYTES - 1, 2 * SLOT_BYTES - 5])
def test_length_that_the_owner_did_not_store_is_detected(store: ObjectStore, length: int) -> None:
    stored = put(store, "k", bytes(2 * SLOT_BYTES - 4))
    with pytest.raises(ChecksumError):
        read_stored(store, "k", msgspec.structs.replace(stored, length=length))


@pytest.mark.parametrize("reuse", [1, 3])
def test_object_dropped_while_it_is_copied_is_refused(store: ObjectStore, reuse: int) -> None:
    """Also where only one of its later slots is written again, by an object that starts there."""
    stored = put(store, "k", b"a" * (4 * SLOT_BYTES))

    class Dropping(Buffers):
        def take(self, nbytes: int) -> NDArray[np.uint8]:
            store.drop("k")
            for i in range(reuse):
                put(store, f"r{i}", b"b")
            if reuse == 3:
                store.drop("r0")
            return super().take(nbytes)

    with pytest.raises(StaleSlotError):
        read_stored(store, "k", stored, Dropping())


def test_reader_of_an_object_that_is_replaced_never_gets_a_mixture(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_work, "_BYTES_PER_THREAD", SLOT_BYTES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    stop = threading.Event()
    put(store, "k", bytes(3 * SLOT_BYTES))

    def replace() -> None:
        for i in itertools.cycle(range(256)):
            if stop.is_set():
                return
            put(store, "k", bytes([i]) * (3 * SLOT_BYTES))

    writer = threading.Thread(target=replace)
    writer.start()
    found, stale = [], 0
    try:
        for _ in range(300):
            try:
                found.append(set(read(store, "k")))
            except StaleSlotError:
                stale += 1
    finally:
        stop.set()
        writer.join()
    assert found
    assert all(len(content) == 1 for content in found)


def test_memory_is_had_for_what_is_written(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(store.arena, "prefault", lambda *each: asked.append(each))
    put(store, "k", bytes(SLOT_BYTES + 10))
    put(store, "k", b"again, in another page")
    store.drop("k")
    put(store, "k", bytes(SLOT_BYTES + 10))
    put(store, "k2", bytes(200))
    assert asked == [(0, 2 * SLOT_BYTES), (2 * SLOT_BYTES, SLOT_BYTES)]


def test_object_there_is_no_memory_for_is_refused(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "k", b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(arena, "prefault", fail)
    with pytest.raises(TransportError, match="no memory"):
        put(store, "k", bytes(2 * SLOT_BYTES))
    monkeypatch.undo()
    assert (read(store, "k"), free(store)) == (b"old", N_SLOTS - 1)


@pytest.mark.parametrize(
    ("gib", "geometry"),
    [
        (1.0, (4096, 256 << 10)),
        (4, (4096, 1 << 20)),
        (5, (4096, 1280 << 10)),
        (16, (4096, 4 << 20)),
        (1e-9, (1, 4096)),
        (1 / 1024, (256, 4096)),
    ],
)
def test_size_of_the_arena(gib: float, geometry: tuple[int, int]) -> None:
    assert object_geometry(gib) == geometry


@pytest.mark.parametrize(("memory_gib", "mib"), [(20, 2048), (1000, 4096)])
def test_size_of_the_arena_unless_configured(
    monkeypatch: pytest.MonkeyPatch, memory_gib: int, mib: int
) -> None:
    monkeypatch.setattr(objects, "memory_limit_bytes", lambda: memory_gib << 30)
    assert object_geometry(None) == (MAX_OBJECTS, mib << 8)


@pytest.mark.parametrize(
    ("left_mib", "slot_kib", "warned"), [(5000, 1024, False), (500, 100, True), (50, 4, True)]
)
def test_the_arena_is_no_larger_than_the_memory_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    left_mib: int,
    slot_kib: int,
    warned: bool,
) -> None:
    monkeypatch.setattr(objects, "unclaimed_bytes", lambda: left_mib << 20)
    monkeypatch.setattr(objects, "spared_bytes", lambda: 100 << 20)
    assert fitting(4096, 1 << 20) == (4096, slot_kib << 10)
    assert any("Lower object_gib" in message for message in caplog.messages) == warned


@pytest.mark.parametrize("gib", [0, -1, float("inf"), float("nan")])
def test_impossible_size_of_the_arena_is_refused(gib: float) -> None:
    with pytest.raises(ConfigError, match="object_gib"):
        object_geometry(gib)


def test_object_under_another_key_is_refused(store: ObjectStore) -> None:
    stored = put(store, "k", b"object")
    with pytest.raises(StaleSlotError):
        read_stored(store, "other", stored)


@pytest.mark.parametrize(
    ("runs", "length"),
    [
        (((0, 1),), -1),
        (((0, 1),), SLOT_BYTES + 1),
        (((0, 2),), 5),
        (((-1, 1),), 5),
        (((N_SLOTS, 1),), 5),
        (((0, 0),), 0),
        (((2, -1), (0, 2)), 5),
        (((0, N_SLOTS), (0, 1)), N_SLOTS * SLOT_BYTES + 5),
        (((0, N_SLOTS),) * 1000, 1000 * N_SLOTS * SLOT_BYTES),
        ((), 0),
    ],
)
def test_impossible_descriptions_are_refused(
    store: ObjectStore, runs: tuple[tuple[int, int], ...], length: int
) -> None:
    put(store, "k", b"object")
    with pytest.raises(ProtocolError):
        read_stored(store, "k", StoredObject(0, 1, runs, length))


def test_closed_store_takes_nothing(store: ObjectStore) -> None:
    put(store, "k", b"object")
    for _ in range(2):
        store.close()
    with pytest.raises(TransportError):
        put(store, "k", b"object")
    assert len(store) == 0


def test_store_that_is_closed_meanwhile_fails_cleanly(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = store.arena.publish

    def close_after(*args: object) -> None:
        publish(*args)  # type: ignore[arg-type]
        store.close()

    monkeypatch.setattr(store.arena, "publish", close_after)
    with pytest.raises(TransportError):
        put(store, "k", b"object")
    assert len(store) == 0


def test_small_objects_take_a_page_each(clock: FakeClock) -> None:
    store = ObjectStore(Arena.create(16, 4 * SLOT_BYTES), clock.ns, clock=clock)
    for i in range(16):
        put(store, f"k{i}", b"tiny")
    assert free(store) == 64 - 16
    with pytest.raises(ArenaFullError, match="room for 0 of 16 objects"):
        put(store, "k", b"one object more than there are slots")
    store.close()


def test_of_two_objects_under_a_key_readers_find_the_newer_one(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    put(store, "k", b"older")
    clock.advance(1)
    # The moment at which the newer one is whole, and the older one still there.
    monkeypatch.setattr(store, "_remove", lambda digest: None)
    newer = put(store, "k", b"newer")
    found = find_object(store.arena, key("k").digest)
    assert found == newer


@pytest.mark.parametrize(
    ("first", "runs", "length"),
    [(0, 0, 5), (0, MAX_OBJECTS + 1, 5), (7, 4096, 5), (2**32 - 1, 2, 5), (8, 1, 5), (0, 1, 2**60)],
)
def test_headers_that_no_owner_writes_are_refused(
    store: ObjectStore, first: int, runs: int, length: int
) -> None:
    digest = key("k").digest
    store.arena.begin_write(3, 1)
    store.arena.publish(3, 1, struct.pack("<16sIIQ", digest, first, runs, length), 0, 0)

    def find_and_read() -> None:
        found = find_object(store.arena, digest)
        assert found is not None
        read_stored(store, "k", found)

    with pytest.raises((IntegrityError, ProtocolError)):
        find_and_read()


def test_a_table_of_runs_that_no_owner_writes_is_refused(store: ObjectStore) -> None:
    digest = key("k").digest
    for runs in (
        [(0, 1), (9, 1)],
        [(0, 1), (2**32 - 1, 2**32 - 1)],
        [(0, 1), (0, 0)],
        [(0, 9)] * 2,
    ):
        table = store.arena.slots[0, : 2 * RUN.itemsize].view(RUN)
        table[:] = np.array(runs, RUN)
        store.arena.begin_write(3, 1 + table["count"].tolist()[1])
        where = struct.pack("<16sIIQ", digest, 0, 2, 5)
        store.arena.publish(3, 1 + table["count"].tolist()[1], where, 0, 0)
        found = find_object(store.arena, digest)
        assert found is not None
        with pytest.raises(ProtocolError):
            read_stored(store, "k", found)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60), st.integers(1, 40))
def test_pages_are_given_out_once_and_taken_back(
    orders: list[tuple[bool, int]], count: int
) -> None:
    pages = FreePages(count)
    there = [True] * count
    taken: list[tuple[tuple[int, int], ...]] = []
    for take, number in orders:
        if take:
            longest = max(len(run) for run in "".join("x" if f else " " for f in there).split(" "))
            runs = pages.take(number)
            # One page more has the table of several runs.
            fits = number <= longest or number + 1 <= sum(there)
            assert (runs is not None) == fits
            if runs is None:
                continue
            assert (len(runs) == 1) == (number <= longest)
            ids = [page for start, size in runs for page in range(start, start + size)]
            assert len(ids) == len(set(ids)) == number + (len(runs) > 1)
            assert all(size > 0 for _, size in runs)
            assert all(there[page] for page in ids)
            taken.append(runs)
        elif taken:
            runs = taken.pop(number % len(taken))
            ids = [page for start, size in runs for page in range(start, start + size)]
            pages.give(runs)
        else:
            continue
        for page in ids:
            there[page] = not there[page]
        assert pages.free == sum(there)
    for runs in taken:
        pages.give(runs)
    assert pages.take(count) == ((0, count),)


@pytest.mark.parametrize(
    ("name", "request_id", "wanted"),
    [
        ("req-1", "req-1", True),
        ("omni_0_to_1_kv_cache_req-1", "req-1", True),
        ("req-1_0_0_2_3", "req-1", True),
        ("req-1@0", "req-1", False),
        ("a/req-1/b", "req-1", False),
        ("omni_0_to_1_kv_cache_user_1_2", "user_1", False),
        ("omni_0_to_1_kv_cache_user_1_2", "user_1_2", True),
        ("user_1_2_0_0_0_1", "user_1", False),
        ("user_1_2_0_0_0_1", "user_1_2", True),
        ("a_7_0_0_1_1", "7_0_0", False),
        ("a_7_0_0_1_1", "a_7", True),
        ("a_7_0_1_0_0_1_1", "7_0_1", False),
        ("a_7_0_1_0_0_1_1", "a_7", False),
        ("r_1_0_0_0", "r", False),
        ("omni_0_to_1_kv_cache_r_0_0_0_1", "r", False),
        ("omni_0_to_1_kv_cache_r_0_0_0_1", "r_0_0_0_1", True),
        ("omni_0_to_2_kv_cache_r", "r", False),
        ("r\n_0_0_0_1", "r\n", True),
        ("r_0_0_0_1\n", "r", False),
        ("r_0_0_\u0661_1", "r", False),
        ("req-10", "req-1", False),
        ("xreq-1", "req-1", False),
        ("req-1-0", "req-1", False),
        ("req-1.0", "req-1", False),
        ("req-1é", "req-1", False),
        ("omni_0_to_1_kv_cache_req-1", "0", False),
        ("omni_0_to_1_kv_cache_req-1", "omni_0_to_1_kv_cache_req-1", True),
        ("req-1_0_0_2_3", "3", False),
        ("7_0_0_2_3", "7", True),
        ("omni_0_to_1_kv_cache_0", "0", True),
        ("0_0_0_0_0", "0", True),
        ("req-1", "", False),
        ("", "", False),
        ("r.*", ".*", False),
        ("/r/", "/r/", True),
        ("x/r/y", "/r/", False),
    ],
)
def test_request_of_a_key(name: str, request_id: str, wanted: bool) -> None:
    assert key(name).belongs_to(request_id) is wanted


def test_the_hosts_memory_is_asked_for_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in files, which would be read for each object."""
    put(store, "k", b"object")
    stored = store.find(key("k").digest)
    assert stored is not None
    read_stored(store, "k", stored)
    monkeypatch.setattr(objects, "memory_limit_bytes", lambda: 1 // 0)
    content = read_stored(store, "k", stored)
    assert bytes(content) == b"object"
