# SPDX-License-Identifier: Apache-2.0
"""Pages that a device loads: as the host loads them, and what crosses to the device for them."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_connector.copy import host_rows
from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.host import CpuCopier
from omni_connector.copy.staged import StagedCopier
from omni_connector.kv.canonical import SlotLayout, canonicalize
from omni_connector.kv.convert import PageRun

from ..kv.conftest import LAYOUTS, HostStream, Shape, build

PAGE = 4096
LAYERS = 6
LENGTH = (LAYERS + 2) * PAGE  # of the peer's slots, which hold two layers more

ONE_RUN = (PageRun(2 * PAGE, PAGE, 4 * PAGE),)
TWO_RUNS = PageRun(0, 0, PAGE), PageRun(3 * PAGE, 2 * PAGE, 4 * PAGE)
"""One page, and then two others; between them are pages that are not read."""


def aligned(count: int, nbytes: int) -> np.ndarray:
    """Random slots `(count, nbytes)` from a multiple of 64 bytes on."""
    room = np.random.default_rng(5).integers(0, 256, count * nbytes + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][: count * nbytes].reshape(count, nbytes)


@dataclass
class Crossings(HostStream):
    """Notes what crosses between the host and the device.

    Attributes:
        read: how often each byte of the host was read, by its address.
        sizes: bytes of each transfer.
        moves: bytes of each launch of a kernel that moves rows.
        launched: how much other work the device was given.
    """

    pins: bool = False
    hashes: bool = False
    can: bool = False
    read: Counter[int] = field(default_factory=Counter)
    sizes: list[int] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    launched: int = 0

    def __post_init__(self) -> None:
        super().__init__(pins=self.pins, hashes=self.hashes, moves=self.can)

    def launch(self, work: Any, *, host: torch.Tensor | None = None, lands: bool = False) -> None:
        work()
        if host is None:
            self.launched += 1
            return
        if host.dtype == torch.int64:  # ids
            return
        assert not lands
        assert host.is_contiguous()
        self.read.update(range(host.data_ptr(), host.data_ptr() + host.numel()))
        self.sizes.append(host.numel())

    def move(self, staged: torch.Tensor, rows: torch.Tensor, *, to_host: bool) -> None:
        assert not to_host
        super().move(staged, rows, to_host=to_host)
        for address in rows.tolist():
            self.read.update(range(address, address + staged.shape[1]))
        self.moves.append(staged.numel())


@dataclass(frozen=True)
class Loading:
    """A cache of six layers, and slots of a peer with two layers more.

    Attributes:
        rows: blocks that a staging buffer holds of the pages.
    """

    stream: Crossings
    runs: tuple[PageRun, ...] = TWO_RUNS
    direct_bytes: int = 0
    rows: int = 4
    slots: np.ndarray = field(default_factory=lambda: aligned(9, LENGTH))

    def load(self, *, checksum: bool, pinned: int = 9) -> tuple[StagedCopier, np.ndarray | None]:
        """Load six blocks, and see that they are what the host makes of them."""
        cache, ours = (build("LBHNC", 8, [[Shape(LAYERS, 2, 16, 128)]], seed=3) for _ in range(2))
        canonical = canonicalize(cache.groups, cache.views, 8)
        layout = SlotLayout.of(canonical)
        size = sum(run.nbytes for run in self.runs)
        copier = StagedCopier(canonical, layout, self.stream, staging_bytes=self.rows * size)
        copier.direct_bytes = self.direct_bytes
        if self.stream.pins:
            copier.pin(self.slots[:pinned])
        copy = BlockCopy(
            *(0, np.array([1, 4, 7, 2, 3, 0]), self.slots, np.array([8, 2, 3, 4, 0, 6]), checksum)
        )
        expected = CpuCopier(canonicalize(ours.groups, ours.views, 8), layout)
        wanted = expected.load_pages(copy, self.runs, LENGTH)
        found = copier.load_pages(copy, self.runs, LENGTH)
        assert torch.equal(cache.buffer, ours.buffer)
        assert found is not None
        assert wanted is not None
        assert found.tolist() == wanted.tolist()
        return copier, found

    def addresses(self, *, whole: bool = False) -> Counter[int]:
        """Of the bytes of the pages, or of the slots, that are loaded, each once."""
        found: Counter[int] = Counter()
        for slot in (8, 2, 3, 4, 0, 6):
            start = self.slots.ctypes.data + slot * LENGTH
            for run in self.runs if not whole else [PageRun(0, 0, LENGTH)]:
                found.update(range(start + run.at, start + run.at + run.nbytes))
        return found


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("runs", [ONE_RUN, TWO_RUNS])
def test_pages_cross_through_a_buffer_in_one_transfer_a_batch(
    runs: tuple[PageRun, ...], checksum: bool
) -> None:
    loading = Loading(Crossings(), runs)
    loading.load(checksum=checksum)
    assert loading.stream.sizes == [4 * 3 * PAGE, 2 * 3 * PAGE]
    assert not loading.stream.moves


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("runs", [ONE_RUN, TWO_RUNS])
def test_of_pinned_slots_the_device_reads_the_pages_and_no_other_byte(
    runs: tuple[PageRun, ...], checksum: bool
) -> None:
    loading = Loading(Crossings(pins=True), runs)
    loading.load(checksum=checksum)
    assert loading.stream.read == loading.addresses()
    assert loading.stream.sizes == 6 * [run.nbytes for run in runs]


@pytest.mark.parametrize("runs", [ONE_RUN, TWO_RUNS])
def test_small_pages_of_pinned_slots_are_moved_by_one_launch_a_batch(
    runs: tuple[PageRun, ...],
) -> None:
    loading = Loading(Crossings(pins=True, can=True), runs, direct_bytes=1 << 40)
    loading.load(checksum=True)
    assert loading.stream.read == loading.addresses()
    assert loading.stream.moves == [4 * 3 * PAGE, 2 * 3 * PAGE]
    assert not loading.stream.sizes


@pytest.mark.parametrize("can", [False, True])
def test_whole_slots_cross_where_the_device_checks_them(can: bool) -> None:
    loading = Loading(Crossings(pins=True, hashes=True, can=can), rows=12)
    loading = replace(loading, direct_bytes=1 << 40 if can else 0)
    loading.load(checksum=True)
    assert loading.stream.read == loading.addresses(whole=True)
    assert loading.stream.moves == ([4 * LENGTH, 2 * LENGTH] if can else [])
    # Three of the slots lie together.
    assert loading.stream.sizes == ([] if can else [LENGTH, 3 * LENGTH, LENGTH, LENGTH])
    loading.stream.read.clear()
    loading.load(checksum=False)
    assert loading.stream.read == loading.addresses()


def test_the_host_checks_slots_that_are_longer_than_the_staging_buffers() -> None:
    loading = Loading(Crossings(pins=True, hashes=True), rows=1)
    loading.load(checksum=True)
    assert loading.stream.read == loading.addresses()


def test_the_host_checks_slots_that_the_device_cannot_read() -> None:
    loading = Loading(Crossings(pins=True, hashes=True))
    loading.load(checksum=True, pinned=8)  # the last one is not pinned
    # The batch with that slot crosses through a buffer.
    assert loading.stream.sizes == [12 * PAGE, PAGE, 2 * PAGE, PAGE, 2 * PAGE]


def test_pages_of_the_device_are_scattered_by_few_launches() -> None:
    """One for pages that follow one another in rows and in memory, in each batch."""
    every_second = tuple(PageRun(at * PAGE, at * PAGE, (at + 1) * PAGE) for at in (0, 2, 4))
    for runs, launches in ((ONE_RUN, 1), (every_second, 1), (TWO_RUNS, 2)):
        loading = Loading(Crossings(), runs)
        loading.load(checksum=False)
        assert loading.stream.launched == 2 * launches


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param((PageRun(0, 0, PAGE + 64),), id="cut"),
        pytest.param((PageRun(0, 0, 2 * PAGE), PageRun(2 * PAGE, PAGE, 2 * PAGE)), id="twice"),
    ],
)
def test_pages_that_are_cut_or_named_twice_are_left_to_who_converts(
    runs: tuple[PageRun, ...],
) -> None:
    loading = Loading(Crossings(), runs)
    before = loading.slots.copy()
    with pytest.raises(AssertionError):
        loading.load(checksum=True)
    assert not loading.stream.sizes
    np.testing.assert_array_equal(loading.slots, before)


@pytest.mark.parametrize("pins", [False, True])
def test_without_machine_code_pages_are_loaded_and_whole_slots_checked(
    monkeypatch: pytest.MonkeyPatch, pins: bool
) -> None:
    monkeypatch.setattr(host_rows, "native_copy", lambda: None)
    loading = Loading(Crossings(pins=pins))
    loading.load(checksum=True)


class Misplaced(StagedCopier):
    """Takes pages that the slots have first."""

    def _call_of_pages(self, copy: BlockCopy, runs: Any, length: int) -> Any:
        call = super()._call_of_pages(copy, runs, length)
        assert call is not None
        return replace(call, taken=tuple(each._replace(at=each.place) for each in call.taken))


def test_a_copier_that_takes_other_pages_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading(Crossings())
    monkeypatch.setattr("tests.copy.test_staged_pages.StagedCopier", Misplaced)
    with pytest.raises(AssertionError):
        loading.load(checksum=True)


@pytest.mark.parametrize("way", ["a buffer", "transfers", "kernels"])
def test_pages_of_a_slot_that_is_rewritten_never_pass_with_other_bytes(way: str) -> None:
    slots = aligned(2, LENGTH)
    originals = slots.copy()

    class Rewritten(Crossings):
        def launch(self, work: Any, *, host: Any = None, lands: bool = False) -> None:
            super().launch(work, host=host, lands=lands)
            slots[...] += 1

        def move(self, staged: torch.Tensor, rows: torch.Tensor, *, to_host: bool) -> None:
            super().move(staged, rows, to_host=to_host)
            slots[...] += 1

    stream = Rewritten(pins=way != "a buffer", can=way == "kernels")
    cache = build("LBHNC", 3, [[Shape(LAYERS, 2, 16, 128)]], seed=3)
    canonical = canonicalize(cache.groups, cache.views, 3)
    copier = StagedCopier(canonical, SlotLayout.of(canonical), stream)
    copier.direct_bytes = 1 << 40 if way == "kernels" else 0
    copier.pin(slots)
    copy = BlockCopy(0, np.array([2, 0]), slots, np.array([0, 1]), True)
    found = copier.load_pages(copy, TWO_RUNS, LENGTH)
    assert found is not None
    for block, original, checksum in zip((2, 0), originals, found.tolist(), strict=True):
        content = cache.slot(0, block)
        right = all(
            np.array_equal(content[run.first : run.end], original[run.at : run.at + run.nbytes])
            for run in TWO_RUNS
        )
        assert right or checksum != xxhash.xxh3_64_intdigest(original.data)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_device_loads_refuses_and_hashes_pages_as_the_host_does(data: st.DataObject) -> None:
    shape = Shape(
        data.draw(st.integers(1, 6)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([8, 64, 192])),
    )
    ours = build(data.draw(st.sampled_from(LAYOUTS)), 4, [[shape]], seed=1)
    theirs = ours.clone()
    canonical = canonicalize(ours.groups, ours.views, 4)
    layout = SlotLayout.of(canonical)
    ends = [0, *(page.slot_offset + page.nbytes for page in canonical.pages[0])]
    wild = not data.draw(st.integers(0, 5))
    runs: list[PageRun] = []
    at = data.draw(st.sampled_from([0, 64, 8 if wild else 128]))
    length = at
    cuts = sorted(data.draw(st.sets(st.sampled_from(ends), min_size=2)))
    for first, end in data.draw(st.permutations(list(pairwise(cuts))))[:3]:
        if wild and data.draw(st.booleans()):
            first, end = end, first
        runs.append(PageRun(at, first, end))
        length = at + end - first
        at = length + data.draw(st.sampled_from([0, 64, 100 if wild else 512]))
    if wild and data.draw(st.booleans()):
        runs.clear()
    length += data.draw(st.sampled_from([0, 64, -64 if wild else 192]))
    distance = data.draw(st.sampled_from([0, 7, 64])) + -(-max(length, 1) // 64) * 64
    slots = aligned(3, distance)
    blocks = data.draw(st.permutations(range(4)))[:2]
    slot_ids = np.array(data.draw(st.permutations(range(3)))[:2])
    checksum = data.draw(st.booleans())
    stream = HostStream(
        pins=data.draw(st.booleans()),
        hashes=data.draw(st.booleans()),
        moves=data.draw(st.booleans()),
    )
    device = StagedCopier(canonical, layout, stream, staging_bytes=8192)
    device.direct_bytes = data.draw(st.sampled_from([0, 1 << 40]))
    device.pin(slots)
    host = CpuCopier(canonicalize(theirs.groups, theirs.views, 4), layout)
    copy = BlockCopy(0, np.array(blocks), slots, slot_ids, checksum)

    def loaded(copier: CpuCopier | StagedCopier) -> Any:
        try:
            return copier.load_pages(copy, runs, length)
        except ValueError as error:
            return str(error)

    wanted = loaded(host)
    np.testing.assert_array_equal(loaded(device), wanted)
    assert torch.equal(ours.buffer, theirs.buffer)
