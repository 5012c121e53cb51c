# SPDX-License-Identifier: Apache-2.0
"""What an index says was said by its owner, whatever its bytes are; all else is a miss."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_connector.arena import arena, block_index
from omni_connector.arena.arena import SEALS, memfd
from omni_connector.arena.block_index import (
    MAX_SLOTS,
    BlockIndex,
    BlockIndexView,
    Tags,
    find_prefix,
    index_bytes,
    tag_of,
    tags_of,
)
from omni_connector.arena.format import PAGE_BYTES
from omni_connector.arena.slot_index import Ints
from omni_connector.errors import (
    IncompatiblePeerError,
    OmniError,
    PeerRefusedError,
    ProtocolError,
    TransportError,
)
from tests import inspection

EPOCH = b"epoch of an aren"
N_SLOTS = 24


@pytest.fixture
def index() -> Iterator[BlockIndex]:
    with BlockIndex.create(N_SLOTS, EPOCH) as index:
        yield index


@pytest.fixture
def view(index: BlockIndex) -> Iterator[BlockIndexView]:
    with view_of(index) as view:
        yield view


def view_of(index: BlockIndex) -> BlockIndexView:
    return BlockIndexView.open(index.fd, epoch=EPOCH, num_slots=index.num_slots)


@pytest.mark.parametrize("limit", [block_index._PREFAULTED_BYTES, PAGE_BYTES])
def test_the_pages_of_random_places_are_there_from_the_start(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no block that is listed waits for the kernel."""
    monkeypatch.setattr(block_index, "_PREFAULTED_BYTES", limit)
    monkeypatch.setattr(arena, "overcommit_is_strict", lambda: False)
    slots = 1000
    with BlockIndex.create(slots, EPOCH) as index:
        allocated = os.fstat(index.fd).st_blocks * 512
    fingerprints_and_cells = slots * 8 * 5
    assert (allocated >= fingerprints_and_cells) == (limit > PAGE_BYTES)
    assert allocated < index_bytes(slots)


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def some_tags(*values: int) -> Tags:
    return np.array(values, np.uint64)


def random_tags(count: int, seed: int = 0) -> Tags:
    return np.random.default_rng(seed).integers(1, 1 << 64, count, np.uint64)


def found(index: BlockIndex | BlockIndexView, *tags: int) -> list[tuple[int, int]]:
    slots, generations = index.find(some_tags(*tags))
    return list(zip(slots.tolist(), generations.tolist(), strict=True))


MISS = (-1, -1)


def test_a_full_arena_is_found_whole() -> None:
    count = 50_000
    tags, slots = random_tags(count), np.random.default_rng(1).permutation(count)
    with BlockIndex.create(count, EPOCH) as index, view_of(index) as view:
        for part in np.array_split(np.arange(count), 100):
            index.add(tags[part], slots[part], slots[part] * 2)
        hits, generations = view.find(tags)
        # In one of so many runs a block would find its bucket full.
        assert (hits >= 0).sum() >= count - 2
        assert np.array_equal(hits[hits >= 0], slots[hits >= 0])
        assert np.array_equal(generations[hits >= 0], 2 * slots[hits >= 0])
        assert (view.find(random_tags(count, seed=2))[0] < 0).all()


CROWDED = [
    high << 62 | middle << 7 | low for high in (0, 3) for middle in range(7) for low in (1, 127)
]
"""Tags of two buckets; in each bucket half of them have the same fingerprints."""


class Model(RuleBasedStateMachine):
    """What is found is what a dict holds, where a bucket has no more than eight."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex.create(N_SLOTS, EPOCH)
        self.view = view_of(self.index)
        self.held: dict[int, tuple[int, int]] = {}
        self.generation = 0

    @rule(blocks=st.dictionaries(st.integers(0, N_SLOTS - 1), st.sampled_from(CROWDED)))
    def add(self, blocks: dict[int, int]) -> None:
        for slot in blocks:
            self.held.pop(slot, None)
        first = self.generation
        for slot, tag in blocks.items():
            beside = [each for each, _ in self.held.values() if each >> 62 == tag >> 62]
            if len(beside) < 8:
                self.held[slot] = tag, self.generation
            self.generation += 1
        generations = np.arange(first, self.generation)
        self.index.add(some_tags(*blocks.values()), ints(*blocks), generations)

    @rule(slots=st.lists(st.integers(0, N_SLOTS - 1)))
    def remove(self, slots: list[int]) -> None:
        for slot in slots:
            self.held.pop(slot, None)
        self.index.remove(ints(*slots))

    @rule()
    def clear(self) -> None:
        self.held.clear()
        self.index.clear()

    @invariant()
    def finds_what_is_held(self) -> None:
        assert found(self.view) == []
        assert found(self.index, *CROWDED) == found(self.view, *CROWDED)
        for tag, place in zip(CROWDED, found(self.view, *CROWDED), strict=True):
            right = [
                (slot, generation) for slot, (each, generation) in self.held.items() if each == tag
            ]
            assert place in right or (place == MISS and not right)
            assert self.view.may_hold(tag) or not right

    def teardown(self) -> None:
        self.view.close()
        self.index.close()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("turns", [1, 2, 7])
def test_the_leading_blocks_are_found_wherever_they_are(count: int, turns: int) -> None:
    tags = random_tags(1001)
    owners = np.arange(1001) * turns // 1001
    indexes = [BlockIndex.create(2000, EPOCH) for _ in range(7)]
    for number, index in enumerate(indexes):
        mine = np.flatnonzero((owners == number) & (np.arange(1001) != count))
        index.add(tags[mine], mine + number, mine + 5)
    which, slots, generations = find_prefix(indexes, tags)
    assert which.tolist() == owners[:count].tolist()
    assert slots.tolist() == (np.arange(count) + owners[:count]).tolist()
    assert generations.tolist() == list(range(5, count + 5))
    for index in indexes:
        index.close()


def test_a_fingerprint_alone_is_no_leading_block(index: BlockIndex) -> None:
    index.add(some_tags(1), ints(0), ints(0))
    assert index.may_hold(129)
    assert find_prefix([index], some_tags(129, 1))[0].tolist() == []
    assert find_prefix([], some_tags(1))[0].tolist() == []


@given(noise=st.binary(min_size=1, max_size=64), seed=st.integers(0, 1 << 32), dense=st.booleans())
def test_nonsense_in_the_file_costs_misses(noise: bytes, seed: int, dense: bool) -> None:
    size = index_bytes(N_SLOTS) - PAGE_BYTES
    content = np.resize(np.frombuffer(noise, np.uint8), size)
    if not dense:
        content = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    with BlockIndex.create(N_SLOTS, EPOCH) as index, view_of(index) as view:
        write(index, content.tobytes())
        # Tags that the file has, and tags of any kind.
        tags = np.concatenate([content[:512].view(np.uint64), random_tags(50, seed)])
        slots, generations = view.find(tags)
        assert ((slots >= -1) & (slots < N_SLOTS)).all()
        assert ((generations >= 0) | (slots < 0)).all()
        # Both look-ups take the same for right: what one finds, the other does.
        for tag in tags.tolist():
            places = find_prefix([view], some_tags(tag))
            assert [each.tolist() for each in places[1:]] == [
                [each] if each >= 0 else [] for each in found(view, tag)[0]
            ]


def write(index: BlockIndex, content: bytes) -> None:
    """Overwrite all of the file but the header, as a hostile owner may."""
    inspection.mapped(index)[PAGE_BYTES:] = content


def content(index: BlockIndex) -> Tags:
    return np.frombuffer(inspection.mapped(index)[PAGE_BYTES:], np.uint64)


@given(
    rounds=st.lists(
        st.dictionaries(st.integers(0, 3), st.sampled_from(CROWDED), min_size=1), min_size=2
    ),
    seed=st.integers(0, 1 << 32),
)
def test_any_mixture_of_older_and_newer_words_yields_what_was_written(
    rounds: list[dict[int, int]], seed: int
) -> None:
    """Whatever a reader sees of a file that changes meanwhile."""
    rng = np.random.default_rng(seed)
    written: set[tuple[int, int, int]] = set()
    with BlockIndex.create(N_SLOTS, EPOCH) as index, BlockIndex.create(N_SLOTS, EPOCH) as torn:
        states = [content(index)]
        for generation, blocks in enumerate(rounds):
            index.add(some_tags(*blocks.values()), ints(*blocks), np.full(len(blocks), generation))
            written |= {(tag, slot, generation) for slot, tag in blocks.items()}
            states.append(content(index))
            if generation % 3 == 2:
                index.remove(ints(*blocks))
                states.append(content(index))
        choices = np.array(states)
        for _ in range(5):
            picked = rng.integers(0, len(states), choices.shape[1])
            write(torn, choices[picked, np.arange(choices.shape[1])].tobytes())
            for tag, (slot, generation) in zip(CROWDED, found(torn, *CROWDED), strict=True):
                assert slot < 0 or (tag, slot, generation) in written


READER = """
import sys
import numpy as np
from omni_connector.arena.block_index import BlockIndexView

view = BlockIndexView.open(int(sys.argv[1]), epoch=sys.argv[2].encode(), num_slots=4)
tags = np.arange(1, 8, dtype=np.uint64)
hits = 0
for _ in range(5000):
    slots, generations = view.find(tags)
    for tag, slot, generation in zip(tags.tolist(), slots.tolist(), generations.tolist()):
        if slot >= 0:
            assert (tag, slot) == (generation % 7 + 1, generation % 4), (tag, slot, generation)
            hits += 1
assert hits
"""


def test_a_reader_beside_a_writer_finds_only_what_was_written_together() -> None:
    with BlockIndex.create(4, EPOCH) as index:
        index.add(some_tags(1), ints(0), ints(0))
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(index.fd), EPOCH.decode()], pass_fds=[index.fd]
        )
        generation = 0
        while reader.poll() is None:
            generation += 1
            index.add(some_tags(generation % 7 + 1), ints(generation % 4), ints(generation))
        assert reader.returncode == 0
        assert generation > 1


def test_tags_depend_on_prefix_group_and_hash_alone() -> None:
    hashes = [os.urandom(32) for _ in range(1000)]
    tags = tags_of(b"model", 0, hashes)
    assert tags.dtype == np.uint64
    assert len(set(tags.tolist())) == 1000
    assert np.array_equal(tags[10:20], tags_of(b"model", 0, hashes[10:20]))
    for prefix, group in ((b"other", 0), (b"model", 1), (b"", 0)):
        assert not set(tags.tolist()) & set(tags_of(prefix, group, hashes).tolist())


@given(hashes=st.lists(st.binary(max_size=40), unique=True))
def test_hashes_of_any_length_have_tags(hashes: list[bytes]) -> None:
    tags = tags_of(b"model", 0, hashes)
    assert tags.shape == (len(hashes),)
    assert tags.all()
    short = [each for each in hashes if len(each) < 8]
    assert len(set(tags_of(b"model", 0, short).tolist())) == len(short)


def test_no_tag_is_zero() -> None:
    seed = xxhash.xxh3_64_intdigest(b"3/model")
    assert tags_of(b"model", 3, [seed.to_bytes(8, sys.byteorder) * 4]).tolist() == [1]
    assert tag_of(b"model", 3, seed.to_bytes(8, sys.byteorder) * 4) == 1


@given(
    prefix=st.binary(max_size=20),
    group=st.integers(0, 99),
    hashes=st.integers(8, 40).flatmap(
        lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=5)
    ),
)
def test_the_tag_of_one_block_is_that_which_it_has_among_others(
    prefix: bytes, group: int, hashes: list[bytes]
) -> None:
    tags = tags_of(prefix, group, hashes).tolist()
    assert tags == [tag_of(prefix, group, each) for each in hashes]


def test_slots_that_do_not_exist_are_refused(index: BlockIndex) -> None:
    for slot in (-1, N_SLOTS, 1 << 40):
        with pytest.raises(IndexError, match=str(slot)):
            index.add(some_tags(1), ints(slot), ints(1))
        with pytest.raises(IndexError, match=str(slot)):
            index.remove(ints(0, slot))
    assert found(index, 1) == [MISS]


@pytest.mark.parametrize("num_slots", [0, -1, MAX_SLOTS + 1, 1 << 62])
def test_impossible_sizes_are_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        BlockIndex.create(num_slots, EPOCH)
    with BlockIndex.create(1, EPOCH) as index, pytest.raises(ProtocolError, match="impossible"):
        BlockIndexView.open(index.fd, epoch=EPOCH, num_slots=num_slots)


def forged(raw: bytes, seals: int = SEALS) -> int:
    fd = memfd("forged")
    os.write(fd, raw)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("missing", [1 << bit for bit in range(8) if SEALS & 1 << bit])
def test_a_file_without_a_seal_is_refused(index: BlockIndex, missing: int) -> None:
    fd = forged(os.pread(index.fd, index_bytes(N_SLOTS), 0), SEALS & ~missing)
    with pytest.raises(PeerRefusedError, match="seals"):
        BlockIndexView.open(fd, epoch=EPOCH, num_slots=N_SLOTS)
    os.close(fd)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda raw: raw, None),
        (lambda raw: raw + b"\0", ProtocolError),
        (lambda raw: raw[:-1], ProtocolError),
        (lambda raw: b"", ProtocolError),
        (lambda raw: b"OMNIARNA" + raw[8:], ProtocolError),
        (lambda raw: raw[:8] + b"\2" + raw[9:], IncompatiblePeerError),
        (lambda raw: raw[:32] + b"E" + raw[33:], IncompatiblePeerError),
        (lambda raw: raw[:16] + b"\1" + raw[17:], ProtocolError),
        (lambda raw: raw[:48] + b"\1" + raw[49:], ProtocolError),
    ],
)
def test_a_damaged_header_is_refused_by_name(
    index: BlockIndex, change: Callable[[bytes], bytes], error: type[OmniError] | None
) -> None:
    fd = forged(change(os.pread(index.fd, index_bytes(N_SLOTS), 0)))
    if error is None:
        BlockIndexView.open(fd, epoch=EPOCH, num_slots=N_SLOTS).close()
    else:
        with pytest.raises(error):
            BlockIndexView.open(fd, epoch=EPOCH, num_slots=N_SLOTS)
    os.close(fd)


def test_closing_is_idempotent_and_a_view_outlives_its_owner() -> None:
    before = len(os.listdir("/proc/self/fd"))
    index = BlockIndex.create(N_SLOTS, EPOCH)
    view = view_of(index)
    index.add(some_tags(1), ints(2), ints(3))
    for _ in range(2):
        index.close()
    assert found(view, 1) == [(2, 3)]
    for _ in range(2):
        view.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    for closed in (
        lambda: index.fd,
        lambda: index.find(some_tags(1)),
        lambda: index.add(some_tags(1), ints(1), ints(1)),
        lambda: index.remove(ints()),
        index.clear,
        lambda: view.find(some_tags(1)),
        lambda: find_prefix([view], some_tags(1)),
    ):
        with pytest.raises(TransportError, match="closed"):
            closed()
