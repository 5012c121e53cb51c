# SPDX-License-Identifier: Apache-2.0
"""Blocks to slots and back: every byte where it belongs, and no other byte touched."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_connector.copy.choice import make_copier as choose_copier
from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.host import CpuCopier
from omni_connector.copy.staged import StagedCopier
from omni_connector.copy.staging import WORDS
from omni_connector.errors import DeviceMemoryError, LayoutError
from omni_connector.kv.canonical import (
    GroupSpec,
    LayerSpec,
    SlotLayout,
    canonicalize,
    canonicalize_cross_layers,
)
from omni_connector.kv.convert import PageRun
from omni_connector.runtime.stats import failure_kind

thorough = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def ids(values):
    return np.array(values, dtype=np.int64)


def opened(cache):
    canonical = canonicalize(cache.groups, cache.views, cache.num_blocks)
    return canonical, SlotLayout.of(canonical)


def random_slots(count, layout, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, layout.slot_bytes), dtype=np.uint8)


def check_transfer(make_copier, source, target, group, pairs, slots_used, checksum, seed):
    """Save blocks of `source`, load them into other blocks of `target`, and compare everything
    with copies made through the layers' own views."""
    from_blocks = ids([one for one, _ in pairs])
    to_blocks = ids([two for _, two in pairs])
    slot_ids = ids(slots_used)

    canonical, layout = opened(source)
    slots = random_slots(max(slots_used, default=0) + 2, layout, seed)
    expected_slots = slots.copy()
    for block, slot in zip(from_blocks, slot_ids, strict=True):
        content = source.slot(group, block)
        assert len(content) == layout.group_bytes[group]
        expected_slots[slot, : len(content)] = content
    untouched = source.buffer.clone()
    sums = make_copier(canonical, layout, slots).save(
        BlockCopy(group, from_blocks, slots, slot_ids, checksum=checksum)
    )
    np.testing.assert_array_equal(slots, expected_slots)
    assert torch.equal(source.buffer, untouched)

    expected = target.clone()
    for block, other in pairs:
        expected.loaded(group, other, source, block)
    other_canonical, other_layout = opened(target)
    assert other_layout.group_bytes == layout.group_bytes
    assert other_layout.slot_bytes == layout.slot_bytes
    assert other_canonical.page_orders == canonical.page_orders
    loaded = make_copier(other_canonical, other_layout, slots).load(
        BlockCopy(group, to_blocks, slots, slot_ids, checksum=checksum)
    )
    assert torch.equal(target.buffer, expected.buffer)
    np.testing.assert_array_equal(slots, expected_slots)

    for got in (sums, loaded):
        assert got.dtype == np.uint64
        assert got.tolist() == [
            xxhash.xxh3_64_intdigest(source.slot(group, block).tobytes()) if checksum else 0
            for block in from_blocks
        ]


@thorough
@given(data=st.data())
def test_every_value_arrives_where_it_belongs_and_no_other_byte_is_touched(kv, make_copier, data):
    source, target = data.draw(kv.caches())
    group = data.draw(st.integers(0, len(source.groups) - 1))
    count = data.draw(st.integers(0, min(source.num_blocks, target.num_blocks)))
    from_blocks = data.draw(st.permutations(range(source.num_blocks)))[:count]
    to_blocks = data.draw(st.permutations(range(target.num_blocks)))[:count]
    if data.draw(st.booleans()):
        from_blocks, to_blocks = sorted(from_blocks), sorted(to_blocks)
    used = data.draw(st.permutations(range(count + 3)))[:count]
    if data.draw(st.booleans()):
        used = sorted(used)
    check_transfer(
        make_copier,
        source,
        target,
        group,
        list(zip(from_blocks, to_blocks, strict=True)),
        used,
        data.draw(st.booleans()),
        data.draw(st.integers(0, 2**16)),
    )


@thorough
@given(data=st.data())
def test_zeroed_blocks_are_zeros_up_to_their_last_padding_and_nothing_else_is(
    kv, make_copier, data
):
    cache, _ = data.draw(kv.caches())
    group = data.draw(st.integers(0, len(cache.groups) - 1))
    blocks = data.draw(st.lists(st.integers(0, cache.num_blocks - 1), max_size=12))
    if data.draw(st.booleans()):
        blocks = sorted(blocks)
    expected = cache.clone()
    for block in blocks:
        expected.zeroed(group, block)
    canonical, layout = opened(cache)
    make_copier(canonical, layout, random_slots(1, layout)).zero(group, ids(blocks))
    assert torch.equal(cache.buffer, expected.buffer)


@thorough
@given(data=st.data())
def test_pages_of_slots_with_other_layers_arrive_and_the_rest_of_the_blocks_stays(
    kv, make_copier, data
):
    source, target = data.draw(kv.caches())
    group = data.draw(st.integers(0, len(source.groups) - 1))
    count = data.draw(st.integers(0, min(source.num_blocks, target.num_blocks)))
    blocks = data.draw(st.permutations(range(target.num_blocks)))[:count]
    used = data.draw(st.permutations(range(count + 2)))[:count]
    canonical, layout = opened(target)
    pages = canonical.pages[group]
    order = data.draw(st.permutations(range(-2, len(pages))))  # negative ones are not ours
    taken = [place for place in order if place >= 0 and data.draw(st.booleans())]
    foreign = data.draw(st.sampled_from([8, 64, 256]))
    runs, length = [], 0
    for place in order:
        if place in taken:
            first = pages[place].slot_offset
            runs.append(PageRun(length, first, first + pages[place].nbytes))
        length += pages[place].nbytes if place >= 0 else foreign
    distance = data.draw(st.sampled_from([length + 3, -(-length // 64) * 64]))
    slots = aligned_slots(count + 2, max(1, distance))
    slots[:] = np.random.default_rng(0).integers(0, 256, slots.shape, np.uint8)
    for number, slot in enumerate(used):
        content = source.slot(group, number)
        for run in runs:
            slots[slot, run.at : run.at + run.nbytes] = content[run.first : run.end]
    before = slots.copy()
    expected = target.clone()
    layers = {}
    for layer in target.groups[group].layers:
        layers.setdefault(target.views[layer.name].data_ptr(), layer)
    for number, block in enumerate(blocks):
        for place, layer in enumerate(layers.values()):
            expected.padding(layer, block).zero_()
            if place in taken:
                expected.block(layer.name, block)[...] = source.block(layer.name, number)
    checksum = data.draw(st.booleans())
    found = make_copier(canonical, layout, slots).load_pages(
        BlockCopy(group, ids(blocks), slots, ids(used), checksum), runs, length
    )
    np.testing.assert_array_equal(slots, before)
    assert torch.equal(target.buffer, expected.buffer)
    assert found.tolist() == [
        xxhash.xxh3_64_intdigest(slots[slot, :length].tobytes()) if checksum else 0 for slot in used
    ]


def aligned_slots(count, slot_bytes):
    room = np.zeros(count * slot_bytes + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][: count * slot_bytes].reshape(count, slot_bytes)


@pytest.mark.parametrize(
    "runs",
    [
        [PageRun(0, 0, 129)],
        [PageRun(0, -64, 64)],
        [PageRun(-64, 0, 64)],
        [PageRun(512, 0, 64)],
        [PageRun(64, 0, 64), PageRun(64, 64, 128)],
        [PageRun(64, 64, 64)],
    ],
)
@pytest.mark.values
def test_pages_that_slots_or_blocks_do_not_have_are_refused(kv, make_copier, runs):
    cache = kv.build("LBHNC", 2, [[kv.Shape(2, 1, 2, 32)]])
    before = cache.buffer.clone()
    canonical, layout = opened(cache)
    slots = random_slots(2, layout)
    copier = make_copier(canonical, layout, slots)
    with pytest.raises(ValueError, match="in a slot of 512 bytes"):
        copier.load_pages(BlockCopy(0, ids([0]), slots, ids([1]), True), runs, 512)
    assert torch.equal(cache.buffer, before)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ("BLCNHC", (6, 3, 2, 4, 2, 8)),  # the blocks outermost
        ("CLBNHC", (2, 3, 6, 4, 2, 8)),  # all keys, then all values
        ("BHLNC", (12, 2, 3, 2, 16)),  # two kernel blocks to a block
    ],
)
@pytest.mark.values
def test_one_tensor_of_all_layers_is_copied_like_their_views(make_copier, dims, shape, checksum):
    names = ["a", "b", "c"]
    group = GroupSpec("full_attention", 4, tuple(LayerSpec(n, 256, 256) for n in names))
    source, target = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    canonical = canonicalize_cross_layers([group], source, names, 6, dims=dims)
    other = canonicalize_cross_layers([group], target, names, 6, dims=dims)
    layout = SlotLayout.of(canonical)
    slots = random_slots(4, layout)
    sums = make_copier(canonical, layout, slots).save(
        BlockCopy(0, ids([5, 0, 2]), slots, ids([1, 2, 0]), checksum=checksum)
    )
    expected = target.clone().movedim(dims.index("B"), 0).unflatten(0, (6, -1))
    blocks = source.movedim(dims.index("B"), 0).unflatten(0, (6, -1))
    expected[[1, 3, 4]] = blocks[[5, 0, 2]]
    loaded = make_copier(other, layout, slots).load(
        BlockCopy(0, ids([1, 3, 4]), slots, ids([1, 2, 0]), checksum=checksum)
    )
    assert torch.equal(target.movedim(dims.index("B"), 0).unflatten(0, (6, -1)), expected)
    assert loaded.tolist() == sums.tolist()


class NoOpCopier(CpuCopier):
    def _copy(self, copy, *args):
        return np.zeros(len(copy.block_ids), np.uint64)


class SavesOnly(CpuCopier):
    def load(self, copy):
        return np.zeros(len(copy.block_ids), np.uint64)


@pytest.mark.parametrize("copier", [NoOpCopier, SavesOnly])
def test_a_copier_that_does_not_copy_fails_the_check(kv, copier):
    shapes = [[kv.Shape(layers=2, heads=1, tokens=2, content=8)]]
    source = kv.build("LBHNC", 3, shapes, seed=1)
    target = kv.build("LBHNC", 3, shapes, seed=2)
    with pytest.raises(AssertionError):
        check_transfer(
            lambda canonical, layout, slots: copier(canonical, layout),
            source, target, 0, [(1, 2)], [0], False, 0,
        )  # fmt: skip


@pytest.fixture
def small(kv, make_copier):
    """A cache of 4 blocks, 5 slots for it, and its copier."""
    cache = kv.build("LBHNC", 4, [[kv.Shape(2, 2, 2, 8)], [kv.Shape(1, 1, 2, 8)]], seed=1)
    canonical, layout = opened(cache)
    slots = random_slots(5, layout)
    copier = make_copier(canonical, layout, slots)
    yield cache, slots, copier
    for _ in range(2):
        copier.close()


@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.parametrize(
    ("blocks", "slots_used", "message"),
    [([1, 2], [0], "2 blocks, but 1 slots"), ([[1, 2]], [0, 1], "blocks, but")],
)
@pytest.mark.values
def test_what_does_not_fit_is_refused_before_anything_is_copied(
    small, verb, blocks, slots_used, message
):
    cache, slots, copier = small
    before = cache.buffer.clone(), slots.copy()
    with pytest.raises(ValueError, match=message):
        getattr(copier, verb)(
            BlockCopy(0, np.array(blocks), slots, np.array(slots_used), checksum=True)
        )
    assert torch.equal(cache.buffer, before[0])
    np.testing.assert_array_equal(slots, before[1])


def test_a_source_may_be_named_twice(small):
    cache, slots, copier = small
    copier.save(BlockCopy(0, ids([2, 2]), slots, ids([4, 1]), checksum=False))
    for slot in (4, 1):
        np.testing.assert_array_equal(slots[slot, :64], cache.slot(0, 2))
    copier.load(BlockCopy(0, ids([0, 1]), slots, ids([4, 4]), checksum=False))
    for block in (0, 1):
        np.testing.assert_array_equal(cache.slot(0, block), cache.slot(0, 2))


@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.values
def test_slots_of_another_shape_are_refused(small, verb):
    _, slots, copier = small
    for wrong in (slots[:, :63], slots[0], slots.view(np.uint16), slots.view(np.int8)):
        with pytest.raises(ValueError, match="slots"):
            getattr(copier, verb)(BlockCopy(0, ids([0]), wrong, ids([0]), checksum=False))


@pytest.mark.parametrize("cut", [True, False], ids=["far apart", "wide"])
@pytest.mark.values
def test_slots_may_be_wider_than_ours_or_further_apart(small, cut):
    cache, slots, copier = small
    wide = np.zeros((5, slots.shape[1] + 4096), np.uint8)
    given = wide[:, : slots.shape[1]] if cut else wide
    blocks, used = [0, 1, 3], [2, 3, 0]
    copier.save(BlockCopy(0, ids(blocks), given, ids(used), checksum=False))
    before = [cache.slot(0, block) for block in blocks]
    np.testing.assert_array_equal(wide[used, :64], before)
    assert not wide[[1, 4]].any()
    assert not wide[:, 64:].any()
    copier.load(BlockCopy(0, ids([1, 3, 2]), given, ids(used), checksum=False))
    np.testing.assert_array_equal([cache.slot(0, block) for block in (1, 3, 2)], before)


def test_loads_and_zeroing_may_come_from_several_threads_at_once(small):
    cache, slots, copier = small

    def load_over_and_over(block):
        for _ in range(200):
            found = copier.load(BlockCopy(0, ids([block]), slots, ids([block]), checksum=True))
            assert found[0] == xxhash.xxh3_64_intdigest(slots[block, :64].data)

    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(load_over_and_over, block) for block in (0, 1, 2)]:
            copier.zero(0, ids([3]))
            each.result()
    for block in (0, 1, 2):
        np.testing.assert_array_equal(cache.slot(0, block), slots[block, :64])
    assert not cache.slot(0, 3).any()


def test_read_only_slots_are_loaded_from_but_never_saved_to(small):
    cache, slots, copier = small
    slots.setflags(write=False)
    sums = copier.load(BlockCopy(1, ids([3]), slots, ids([2]), checksum=True))
    np.testing.assert_array_equal(cache.slot(1, 3), slots[2, :16])
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(slots[2, :16].tobytes())]
    with pytest.raises(ValueError, match="read-only"):
        copier.save(BlockCopy(1, ids([3]), slots, ids([2]), checksum=False))


def test_a_cancelled_save_says_so_and_goes_no_further(kv, make_copier):
    # Blocks large enough that each is a step of its own, for every copier.
    cache = kv.build("LBHNC", 4, [[kv.Shape(1, 1, 1, 5 * 1024 * 1024)]], seed=1)
    canonical, layout = opened(cache)
    slots = np.zeros((4, layout.slot_bytes), np.uint8)
    copier = make_copier(canonical, layout, slots)
    answers = iter([False, False, True])
    done = copier.save(
        BlockCopy(0, ids([0, 1, 2, 3]), slots, ids([0, 1, 2, 3]), checksum=True),
        cancelled=answers.__next__,
    )
    assert done is None
    assert next(answers, "none left") == "none left"
    assert not slots[2:].any()
    again = copier.save(
        BlockCopy(0, ids([3]), slots, ids([0]), checksum=True), cancelled=lambda: False
    )
    assert again.tolist() == [xxhash.xxh3_64_intdigest(cache.slot(0, 3).tobytes())]


def test_a_group_without_layers_copies_nothing(kv, make_copier):
    cache = kv.build("LBHNC", 3, [[kv.Shape(1, 1, 2, 8)]], seed=1)
    empty = kv.Cache(
        cache.layout,
        cache.num_blocks,
        cache.buffer,
        (*cache.groups, GroupSpec("mamba", 16, ())),
        cache.views,
    )
    canonical, layout = opened(empty)
    assert layout.group_bytes == (16, 0)
    slots = random_slots(2, layout)
    before = slots.copy(), cache.buffer.clone()
    copier = make_copier(canonical, layout, slots)
    nothing = xxhash.xxh3_64_intdigest(b"")
    for verb in (copier.save, copier.load):
        assert (
            verb(BlockCopy(1, ids([0, 2]), slots, ids([1, 0]), checksum=True)).tolist()
            == [nothing] * 2
        )
    np.testing.assert_array_equal(slots, before[0])
    assert torch.equal(cache.buffer, before[1])


def test_a_cpu_cache_gets_the_cpu_copier_and_other_devices_are_refused(kv):
    cache = kv.build("LBHNC", 2, [[kv.Shape(1, 1, 1, 8)]])
    canonical, layout = opened(cache)
    assert isinstance(choose_copier(canonical, layout), CpuCopier)
    meta = torch.empty(16, dtype=torch.int8, device="meta").view(2, 1, 1, 8)
    canonical = canonicalize(cache.groups, {cache.groups[0].layers[0].name: meta}, 2)
    with pytest.raises(LayoutError, match="meta"):
        choose_copier(canonical, SlotLayout.of(canonical))


def test_a_fence_is_waited_for_before_any_block_is_touched(kv):
    cache = kv.build("LBHNC", 3, [[kv.Shape(1, 1, 1, 8)]])
    canonical, layout = opened(cache)
    stream = kv.HostStream()
    copier = StagedCopier(canonical, layout, stream)
    fence = copier.fence()
    slots = random_slots(3, layout)
    for verb in (copier.save, copier.load):
        stream.log.clear()
        verb(BlockCopy(0, ids([0, 1]), slots, ids([0, 1]), checksum=False, fence=fence))
        assert stream.log[0] == ("wait", fence)
        assert stream.log[1][0] == "mark"
    stream.log.clear()
    copier.zero(0, ids([0, 1]), fence=fence)
    assert stream.log == [("wait", fence), ("finish", None)]


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_staging_buffer_is_used_again_only_after_its_last_use_is_over(kv, verb):
    cache = kv.build("LBHNC", 5, [[kv.Shape(1, 1, 1, 8)]])
    canonical, layout = opened(cache)
    stream = kv.HostStream()
    copier = StagedCopier(canonical, layout, stream, staging_bytes=1)
    slots = random_slots(5, layout)
    getattr(copier, verb)(
        BlockCopy(0, ids([0, 1, 2, 3, 4]), slots, ids([4, 3, 2, 1, 0]), checksum=False)
    )
    # Of each batch one mark says that its buffer is filled, the next that it is empty again.
    assert [what for verb, what in stream.log if verb == "follow"] == [1, 3, 5, 7, 9]
    marks = [stream.log.index(("mark", n)) for n in range(1, 11, 2)]
    ends = [stream.log.index(("finish", n)) for n in range(2, 11, 2)]
    assert all(marks[n] < ends[n] for n in range(5))
    assert all(ends[n] < marks[n + 2] for n in range(3))
    assert stream.log[-1] == ("finish", None)


def test_the_device_is_idle_after_a_copy_that_failed(kv, monkeypatch):
    cache = kv.build("LBHNC", 3, [[kv.Shape(1, 1, 1, 8)]])
    canonical, layout = opened(cache)
    stream = kv.HostStream()
    copier = StagedCopier(canonical, layout, stream, staging_bytes=1)
    slots = random_slots(3, layout)

    def broken(stream, block_ids, staged):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(
        "omni_connector.copy.staged.GroupOnDevice.gather", lambda self, *a: broken(*a)
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        copier.save(BlockCopy(0, ids([0, 1]), slots, ids([0, 1]), checksum=False))
    assert stream.log[-1] == ("finish", None)


def test_a_loads_checksum_is_of_the_bytes_loaded_even_when_the_slot_is_rewritten(
    kv, make_copier, monkeypatch
):
    cache = kv.build("LBHNC", 4, [[kv.Shape(2, 2, 2, 8)]], seed=1)
    canonical, layout = opened(cache)
    slots = random_slots(3, layout)
    copier = make_copier(canonical, layout, slots)
    digest = xxhash.xxh3_64_intdigest

    def hash_then_rewrite(stored):
        value = digest(stored)
        slots[...] += 1
        return value

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", hash_then_rewrite)
    # Two segments, so that the second one meets rewritten slots.
    sums = copier.load(BlockCopy(0, ids([3, 0, 1]), slots, ids([2, 0, 1]), checksum=True))
    loaded = [digest(cache.slot(0, block).tobytes()) for block in (3, 0, 1)]
    monkeypatch.undo()
    # A slot rewritten meanwhile may fail its checksum, but never passes with other bytes.
    assert sums[0] == loaded[0]
    originals = random_slots(3, layout)[[2, 0, 1], : layout.group_bytes[0]]
    for value, bytes_loaded, original in zip(sums.tolist(), loaded, originals, strict=True):
        assert value == bytes_loaded or value != digest(original.tobytes())


def little_memory(kv, left):
    """A stream of a device that has so many bytes, and none any more once a copier was made."""

    def take(nbytes):
        nonlocal left
        left -= nbytes

    class Little(kv.HostStream):
        def device_buffer(self, nbytes):
            if nbytes > left:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            memory = np.empty(nbytes, np.int8)
            take(nbytes)
            weakref.finalize(memory, take, -nbytes)
            return torch.from_numpy(memory)

    return Little(hashes=True)


@pytest.mark.parametrize(("slots_of_memory", "held"), [(40, 8), (31, 4), (4, 1)])
def test_staging_is_allocated_at_the_start_and_shrinks_where_memory_lacks(
    kv, caplog, slots_of_memory, held
):
    cache = kv.build("LBHNC", 9, [[kv.Shape(1, 1, 1, 1 << 18)]], seed=1)
    canonical, layout = opened(cache)
    slots = np.zeros((9, layout.slot_bytes), np.uint8)
    stream = little_memory(kv, slots_of_memory * layout.slot_bytes + 4 * 8 * WORDS)
    copier = StagedCopier(canonical, layout, stream, staging_bytes=8 * layout.slot_bytes)
    assert ("copies are slower" in caplog.text) == (held < 8)
    assert "CUDA out of memory" in caplog.text or held == 8
    stream.device_buffer = stream.host_buffer = None  # nothing is allocated any more
    expected = [xxhash.xxh3_64_intdigest(cache.slot(0, block)) for block in range(9)]
    copy = BlockCopy(0, ids(range(9)), slots, ids(range(9)), checksum=True)
    assert copier.save(copy).tolist() == expected
    copier.zero(0, ids(range(9)))
    assert not cache.buffer.any()
    stream.log.clear()
    assert copier.load(copy).tolist() == expected
    assert sum(verb == "follow" for verb, _ in stream.log) == -(-9 // held)


def test_without_memory_for_staging_each_copy_fails_by_name_and_blocks_are_zeroed(kv, caplog):
    cache = kv.build("LBHNC", 3, [[kv.Shape(1, 1, 1, 1 << 18)]], seed=1)
    canonical, layout = opened(cache)
    copier = StagedCopier(canonical, layout, little_memory(kv, layout.slot_bytes))
    assert "No KV is saved or loaded" in caplog.text
    slots = np.zeros((3, layout.slot_bytes), np.uint8)
    copy = BlockCopy(0, ids([0]), slots, ids([1]), checksum=True)
    for work in (copier.save, copier.load):
        with pytest.raises(DeviceMemoryError, match="staging buffers") as caught:
            work(copy)
        assert failure_kind(caught.value, "other") == "no_device_memory"
    kept = cache.slot(0, 1).copy()
    copier.zero(0, ids([0, 2]))
    assert not cache.slot(0, 0).any()
    assert not cache.slot(0, 2).any()
    np.testing.assert_array_equal(cache.slot(0, 1), kept)
    copier.close()


def test_a_load_that_is_ready_ends_while_a_saves_fence_is_closed(kv):
    """Neither the save's stream nor its lock is in the load's way."""
    opens = threading.Event()
    begun = threading.Event()

    class Fenced(kv.HostStream):
        """Does the work behind the fence of a save when that opens."""

        def __init__(self):
            super().__init__()
            self.fenced = False

        def beside(self):
            return Fenced()

        def wait(self, fence):
            self.fenced |= fence == "closed"

        def finish(self, mark):
            if self.fenced:
                begun.set()
                assert opens.wait(60)

    cache = kv.build("LBHNC", 4, [[kv.Shape(2, 2, 2, 8)]], seed=1)
    canonical, layout = opened(cache)
    copier = StagedCopier(canonical, layout, Fenced())
    slots = random_slots(4, layout)
    with ThreadPoolExecutor(2) as pool:
        try:
            save = BlockCopy(0, ids([0]), slots, ids([0]), checksum=False, fence="closed")
            saving = pool.submit(copier.save, save)
            assert begun.wait(60)
            load = BlockCopy(0, ids([1]), slots, ids([1]), checksum=False)
            pool.submit(copier.load, load).result(60)
            pool.submit(copier.zero, 0, ids([2])).result(60)
            assert not saving.done()
        finally:
            opens.set()
    np.testing.assert_array_equal(cache.slot(0, 1), slots[1, :64])
    np.testing.assert_array_equal(cache.slot(0, 0), slots[0, :64])
    copier.close()


def test_slots_are_pinned_piece_by_piece_and_no_copy_crosses_from_one_to_the_next(kv):
    # A slot has no gap to the next, so that copies join slots where they may.
    cache = kv.build("LBHNC", 9, [[kv.Shape(4, 2, 16, 32)]], seed=1)
    canonical, layout = opened(cache)
    assert layout.group_bytes == (layout.slot_bytes,)
    crossed = []

    class Stream(kv.HostStream):
        def launch(self, work, *, host=None, lands=False):
            if host is not None and host.dtype == torch.int8:  # no ids
                first = (host.data_ptr() - slots.ctypes.data) / layout.slot_bytes
                of_slots = 0 <= first < len(slots)
                crossed.append((first, len(host)) if of_slots else "a buffer")
            work()

    slots = np.zeros((8, layout.slot_bytes), np.uint8)
    copier = StagedCopier(canonical, layout, Stream(pins=True), staging_bytes=8 * layout.slot_bytes)
    copier.direct_bytes = 0
    block_ids = ids(range(1, 9))
    some = BlockCopy(0, block_ids[:4], slots, ids(range(4)), checksum=False)
    copier.save(some)
    assert crossed == ["a buffer"]
    for piece in (slots[:3], slots[5:7], slots[3:5]):
        assert copier.pin(piece) == 0
    crossed.clear()
    copier.save(some)
    assert crossed == [(0.0, 3), (3.0, 1)]
    crossed.clear()
    copier.save(BlockCopy(0, block_ids, slots, ids(range(8)), checksum=False))
    assert crossed == ["a buffer"]  # the last slot is in no piece
    for block, slot in zip(range(1, 9), slots, strict=True):
        np.testing.assert_array_equal(slot, cache.slot(0, block))
    crossed.clear()
    copier.direct_bytes = 2 * layout.slot_bytes + 1  # two transfers, of three slots and of one
    copier.save(some)
    assert crossed == ["a buffer"]


def test_the_device_reads_slots_of_a_peer_itself_while_they_are_pinned(kv, monkeypatch):
    cache = kv.build("LBHNC", 9, [[kv.Shape(4, 2, 16, 32)]], seed=1)
    canonical, layout = opened(cache)
    slots = random_slots(8, layout)
    slots.flags.writeable = False
    stream = kv.HostStream(pins=True)
    copier = StagedCopier(canonical, layout, stream)
    copier.direct_bytes = 0
    block_ids = ids(range(1, 9))
    copy = BlockCopy(0, block_ids, slots, ids(range(8)), checksum=True)
    expected = [xxhash.xxh3_64_intdigest(slot[: layout.group_bytes[0]].data) for slot in slots]
    by_host = []
    on_host = copier._host_rows.copy

    def copy_on_host(*rows, **options):
        by_host.append(True)
        return on_host(*rows, **options)

    monkeypatch.setattr(copier._host_rows, "copy", copy_on_host)
    for step, host_copies in (("before", True), ("pinned", False), ("let go of", True)):
        cache.buffer.zero_()
        if step == "pinned":
            assert copier.pin(slots) == 0
        elif step == "let go of":
            copier.unpin(slots)
            assert stream.log[-1] == ("unpin", slots.ctypes.data)
        by_host.clear()
        assert copier.load(copy).tolist() == expected
        assert bool(by_host) == host_copies
        for block, slot in zip(block_ids, slots, strict=True):
            np.testing.assert_array_equal(slot[: layout.group_bytes[0]], cache.slot(0, block))


def test_a_copier_of_a_device_that_has_failed_can_be_closed(kv):
    cache = kv.build("LBHNC", 3, [[kv.Shape(1, 1, 1, 8)]])
    canonical, layout = opened(cache)

    class Failed(kv.HostStream):
        def finish(self, mark):
            raise RuntimeError("an illegal memory access was encountered")

    stream = Failed()
    copier = StagedCopier(canonical, layout, stream)
    copier.close()
    assert stream.log[-1] == ("close", None)
