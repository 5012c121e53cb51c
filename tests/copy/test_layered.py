# SPDX-License-Identifier: Apache-2.0
"""Layers that are copied while the next ones are computed make the slots that whole blocks make."""

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_connector.copy import threads as copy_threads
from omni_connector.copy.host import CpuCopier
from omni_connector.copy.layered import Forward, LayeredSave, LayerRanges, TracedCopier
from omni_connector.copy.threads import UNTIL_NOTIFIED, CopyThread, Outcome
from omni_connector.kv.canonical import SlotLayout, canonicalize
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.testing import FakeClock

thorough = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def never():
    return False


def layer_ranges_of(cache):
    canonical = canonicalize(cache.groups, cache.views, cache.num_blocks)
    addresses = [
        {layer.name: cache.views[layer.name].data_ptr() for layer in group.layers}
        for group in cache.groups
    ]
    return LayerRanges.of(canonical, SlotLayout.of(canonical), addresses)


class Saving:
    """A save of all blocks but the null block, each in the slot of its place.

    `source` holds what a forward pass has not computed yet, `after` what it computes.
    """

    def __init__(self, make_copier, source, after, *, checksum=True):
        self.source, self.after = source, after
        self.layer_ranges = layer_ranges_of(source)
        self.forward = Forward()
        of_group = np.array_split(np.arange(1, source.num_blocks), len(source.groups))
        self.blocks = BlockSpans.of([(0, [NULL_BLOCK_ID, *ids.tolist()]) for ids in of_group])
        count = len(self.blocks.block_ids)
        # As in an arena: machine code writes to whole lines only.
        size = self.layer_ranges.layout.slot_bytes
        wide = np.zeros((count * -(-size // 64) + 1) * 64, np.uint8)
        lines = wide[-wide.ctypes.data % 64 :][: count * -(-size // 64) * 64]
        self.slots = lines.reshape(count, -1)[:, :size]
        self.copier = make_copier(self.layer_ranges.canonical, self.layer_ranges.layout, self.slots)
        self.checksum = checksum
        self.copies = LayeredSave(
            self.copier,
            self.layer_ranges,
            checksum,
            self.forward,
            self.blocks,
            self.slots,
            np.arange(count)[::-1].copy(),
        )
        self.pieces = self.copies.follow(never)

    @property
    def layers(self):
        return [layer.name for group in self.source.groups for layer in group.layers]

    def write(self, layer):
        self.source.views[layer][...] = self.after.views[layer]

    def compute(self, layer):
        self.write(layer)
        self.forward.computed(layer, self.copier.fence())

    def advance(self, pieces):
        """Make so many pieces, and return whether there are none for now."""
        return any(next(self.pieces) is UNTIL_NOTIFIED for _ in range(pieces))

    def end(self):
        """Compute what is left, end the pass and the save; returns the bytes copied before."""
        self.source.buffer.copy_(self.after.buffer)
        self.forward.end(self.copier.fence())
        while True:
            try:
                next(self.pieces)
            except StopIteration as end:
                return end.value

    def check(self, limit):
        """Finish in batches of so many blocks, and look at every slot."""
        count = len(self.blocks.block_ids)
        expected = np.zeros_like(self.slots)
        for group, places in self.blocks.batches([limit] * len(self.source.groups)):
            sums = {}

            def landed(some, checksums, places=places, sums=sums):
                sums.update(zip(places[some].tolist(), checksums.tolist(), strict=True))

            assert self.copies.finish(group, places, never, landed)
            for place, found in sums.items():
                content = self.after.slot(group, self.blocks.block_ids[place])
                expected[count - 1 - place, : len(content)] = content
                assert found == (xxhash.xxh3_64_intdigest(content) if self.checksum else 0)
            assert sums.keys() == set(places.tolist())
        np.testing.assert_array_equal(self.slots, expected)


@thorough
@given(data=st.data())
def test_slots_are_the_same_whatever_the_order_of_layers_and_copies(kv, make_copier, data):
    source, _ = data.draw(kv.caches())
    after = source.clone()
    after.buffer.copy_(after.buffer ^ 0x55)
    saving = Saving(make_copier, source, after, checksum=data.draw(st.booleans()))
    order = list(saving.layers)
    if data.draw(st.booleans()):
        order = data.draw(st.permutations(order))
    for layer in order[: data.draw(st.integers(0, len(order)))]:
        saving.compute(layer)
        saving.advance(data.draw(st.integers(0, 4)))
    saving.end()
    saving.check(data.draw(st.integers(1, 4)))


@thorough
@given(data=st.data())
def test_a_layer_that_is_computed_again_is_copied_again(kv, make_copier, data):
    source, _ = data.draw(kv.caches())
    after = source.clone()
    after.buffer.copy_(after.buffer ^ 0x55)
    saving = Saving(make_copier, source, after)
    order = saving.layers
    for layer in order:  # with the bytes of before
        saving.forward.computed(layer, saving.copier.fence())
        saving.advance(data.draw(st.integers(0, 4)))
    for layer in order:
        saving.compute(layer)
    saving.end()
    saving.check(data.draw(st.integers(1, 4)))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.values
def test_layers_are_copied_in_the_order_of_the_slot(kv, make_copier, order):
    source = kv.build("LBHNC", 4, [[kv.Shape(3, 2, 4, 8)]], seed=1)
    saving = Saving(make_copier, source, source.clone())
    computed = set()
    for number in order:
        saving.compute(saving.layers[number])
        computed.add(number)
        while not saving.advance(1):
            pass
        ready = next((i for i in range(3) if i not in computed), 3)
        assert saving.copies._done == [ready]
    assert saving.end() == 3 * 3 * 64
    saving.check(8)


@pytest.mark.parametrize("layers", [1, 4])
def test_checksums_go_on_from_layer_to_layer_in_machine_code(kv, layers):
    source = kv.build("LBHNC", 6, [[kv.Shape(layers, 2, 16, 64)], [kv.Shape(2, 2, 16, 64)]], seed=1)
    saving = Saving(
        lambda canonical, layout, slots: CpuCopier(canonical, layout), source, source.clone()
    )
    for layer_ranges in saving.layer_ranges.of_groups:
        numbers = [layer_range.number for layer_range in layer_ranges]
        assert saving.copier.begin(numbers, saving.slots, 2) is not None
        assert saving.copier.begin(numbers, saving.slots[:, 1:], 2) is None
    for layer in saving.layers[:-1]:
        saving.compute(layer)
        while not saving.advance(1):
            pass
    saving.end()
    saving.check(2)


def test_a_pass_that_tells_nothing_is_copied_at_its_end(kv, make_copier):
    source = kv.build("BLHNC", 4, [[kv.Shape(3, 2, 4, 8)], [kv.Shape(1, 2, 4, 8)]], seed=1)
    saving = Saving(make_copier, source, source.clone())
    assert saving.advance(1)
    assert saving.end() == 0
    saving.check(8)


def test_layers_that_tell_nothing_do_not_hold_up_those_of_other_groups(kv, make_copier):
    source = kv.build("LBHNC", 7, [[kv.Shape(2, 2, 4, 8)], [kv.Shape(2, 2, 4, 8)]], seed=1)
    saving = Saving(make_copier, source, source.clone())
    for layer in saving.layers[2:]:
        saving.compute(layer)
    while not saving.advance(1):
        pass
    assert saving.copies._done == [0, 2]
    assert saving.end() == 3 * 2 * 64
    saving.check(8)


def test_a_save_that_is_cancelled_copies_no_more_of_its_layer(kv, make_copier):
    """A layer of a long prompt takes long, and its blocks are wanted back."""
    source = kv.build("LBHNC", 9, [[kv.Shape(2, 2, 4, 8)]], seed=1)
    saving = Saving(make_copier, source, source.clone())
    saving.copier.layer_bytes = 1  # one block a piece
    cancelled = []
    saving.pieces = saving.copies.follow(lambda: bool(cancelled))
    saving.compute(saving.layers[0])
    assert not saving.advance(3)
    copied = saving.slots.copy()
    assert np.count_nonzero(copied.any(axis=1)) == 3
    cancelled.append(True)
    assert saving.end() == 3 * 64
    ((group, places),) = saving.blocks.batches([8])
    assert not saving.copies.finish(group, places, lambda: True, pytest.fail)
    np.testing.assert_array_equal(saving.slots, copied)


def test_a_layer_that_others_read_waits_for_all_of_them(kv):
    cache = kv.build("LBHNC", 4, [[kv.Shape(2, 2, 4, 8)]], shared_layers=True)
    first, second = layer_ranges_of(cache).of_groups[0]
    assert first.layers == {"group0.shape0.layer0", "group0.shared"}
    assert second.layers == {"group0.shape0.layer1"}
    forward = Forward()
    forward.computed("group0.shape0.layer0", None)
    assert not forward.has(first.layers)
    forward.computed("group0.shared", None)
    assert forward.has(first.layers)
    assert not forward.repeated(first.layers)


def test_bytes_without_a_name_wait_for_the_end():
    forward = Forward()
    forward.computed("a layer", None)
    assert not forward.has(frozenset())


def staged(kv, stream, layers):
    """A save by a copier that stages, on a stream."""
    from omni_connector.copy.staged import StagedCopier

    source = kv.build("LBHNC", 3, [[kv.Shape(layers, 2, 4, 8)]], seed=1)
    return Saving(
        lambda canonical, layout, slots: StagedCopier(canonical, layout, stream),
        source,
        source.clone(),
    )


def test_a_copy_waits_for_what_its_layer_marked(kv):
    """A device computes behind its host: each layer's copy comes after that layer's mark."""
    stream = kv.HostStream()
    saving = staged(kv, stream, 2)
    for number, layer in enumerate(saving.layers):
        saving.forward.computed(layer, f"layer {number}")
        saving.advance(1)
    saving.end()
    assert [what for verb, what in stream.log if verb == "wait"] == ["layer 0", "layer 1"]
    saving.check(8)


@pytest.mark.parametrize("device_behind", [True, False])
def test_a_device_that_is_behind_its_launches_is_followed_layer_by_layer(kv, device_behind):
    """All layers are launched before the first is there: each copy waits for its own layer alone.
    Once the device has ended the pass, nothing is left to wait for but that."""

    class Behind(kv.HostStream):
        def reached(self, fence):
            return not device_behind

    stream = Behind()
    saving = staged(kv, stream, 3)
    for number, layer in enumerate(saving.layers):
        saving.forward.computed(layer, f"layer {number}")
    saving.end()
    saving.check(8)
    waited = [what for verb, what in stream.log if verb == "wait"]
    assert waited == (["layer 0", "layer 1", "layer 2"] if device_behind else ["a fence"])


class ByHand:
    """A thread whose turns a test makes."""

    def __init__(self, name, turn, **options):
        self.turn, self.woken = turn, 0

    def wake(self):
        self.woken += 1

    def join(self, timeout):
        while self.turn() == 0.0:
            pass

    def is_alive(self):
        return True


@pytest.fixture
def made():
    return []


@pytest.fixture
def waiting(made):
    """Makes a job that waits until it is notified, `pieces` times."""

    def job(number, pieces, meanwhile=lambda: None):
        def work(cancelled):
            for piece in range(pieces):
                meanwhile()
                yield UNTIL_NOTIFIED
                made.append((number, "cancelled" if cancelled() else piece))
                if cancelled():
                    break
            return Outcome(number)

        return work

    return job


def turns(thread):
    """Make turns until nothing is due."""
    while (seconds := thread._thread.turn()) == 0.0:
        pass
    return seconds


def test_jobs_that_wait_go_on_in_their_order_when_notified(waiting, made):
    thread = CopyThread("omni-test", None, ByHand)
    for number in (1, 2):
        thread.submit(number, waiting(number, 2))
    assert turns(thread) > 1e9  # until it is woken
    assert made == []
    thread.notify()
    turns(thread)
    assert made == [(1, 0), (2, 0)]
    thread.notify()
    turns(thread)
    assert made == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert [outcome.job_id for outcome in thread.take_ended()] == [1, 2]
    assert not thread._queue


def test_a_notification_between_a_look_and_the_wait_is_not_lost(waiting, made):
    thread = CopyThread("omni-test", None, ByHand)
    notified = iter([True])
    thread.submit(1, waiting(1, 1, lambda: next(notified, False) and thread.notify()))
    turns(thread)
    assert made == [(1, 0)]


@pytest.mark.parametrize("notified", [True, False])
def test_a_wait_ends_with_its_time_and_with_a_notification(made, notified):
    clock = FakeClock()
    thread = CopyThread("omni-test", None, ByHand, clock=clock)

    def work(cancelled):
        yield 25.0
        made.append(1)
        return Outcome(1)

    thread.submit(1, work)
    assert turns(thread) == 25.0
    assert made == []
    if notified:
        woken = thread._thread.woken
        thread.notify()
        assert thread._thread.woken == woken + 1
    else:
        clock.advance(24.0)
        assert turns(thread) == 1.0
        assert made == []
        clock.advance(1.0)
    turns(thread)
    assert made == [1]


def test_the_thread_sleeps_until_the_first_of_several_waits_is_over(waiting, made):
    thread = CopyThread("omni-test", None, ByHand, clock=FakeClock())

    def work(seconds):
        def pieces(cancelled):
            while True:
                yield seconds

        return pieces

    for number, seconds in enumerate((7.0, 5.0, False), 1):
        thread.submit(number, work(seconds))
        assert turns(thread) == pytest.approx(seconds or copy_threads._NOT_YET_S)
    thread.submit(4, waiting(4, 1))
    assert turns(thread) == pytest.approx(copy_threads._NOT_YET_S)


def test_what_counts_as_queued_is_time_in_which_others_go_on(made):
    clock = FakeClock()
    thread = CopyThread("omni-test", None, ByHand, clock=clock)

    def work(number, *waits):
        def pieces(cancelled):
            for each in waits:
                made.append((number, round(thread.queued(), 6)))
                clock.advance(1.0)
                yield each
            made.append((number, round(thread.queued(), 6)))
            return Outcome(number)

        return pieces

    thread.submit(1, work(1, True, UNTIL_NOTIFIED))
    thread.submit(2, work(2, 5.0, True))
    thread.submit(3, work(3, True))
    turns(thread)
    assert made == [(1, 0), (1, 0), (2, 2), (3, 3), (3, 3)]
    made.clear()
    clock.advance(30.0)  # it waits for something outside
    thread.submit(4, work(4, True))
    turns(thread)
    assert made == [(2, 2), (2, 2), (4, 1), (4, 1)]
    made.clear()
    thread.notify()
    turns(thread)
    assert made == [(1, 0)]


@pytest.mark.parametrize("end", [lambda t: t.cancel({1}), lambda t: t.close()])
def test_a_job_that_waits_ends_when_it_is_cancelled(waiting, made, end):
    thread = CopyThread("omni-test", None, ByHand)
    thread.submit(1, waiting(1, 5))
    turns(thread)
    end(thread)
    turns(thread)
    assert made == [(1, "cancelled")]


def test_a_real_thread_sleeps_until_it_is_notified(waiting, made):
    ended = threading.Event()
    thread = CopyThread("omni-test")

    def work(cancelled):
        yield UNTIL_NOTIFIED
        ended.set()
        return Outcome(1)

    thread.submit(1, work)
    while not ended.wait(0.01):
        thread.notify()
    thread.close()
    assert thread.take_ended()[0].failure is None


def test_a_layer_of_a_device_goes_to_pinned_slots_in_batches_of_its_own_size(kv):
    from omni_connector.copy.staged import StagedCopier

    stream = kv.HostStream(pins=True)
    source = kv.build("LBHNC", 9, [[kv.Shape(4, 2, 16, 128)]], seed=1)
    made = []

    def make(canonical, layout, slots):
        made.append(StagedCopier(canonical, layout, stream, staging_bytes=layout.slot_bytes))
        made[0].direct_bytes = 0
        made[0].pin(slots)
        return made[0]

    saving = Saving(make, source, source.clone())
    saving.compute(saving.layers[0])
    while not saving.advance(1):
        pass
    # Eight blocks: a slot's room holds one layer of four of them.
    assert sum(verb == "follow" for verb, _ in stream.log) == 2
    saving.end()
    saving.check(3)


def test_a_device_hashes_layer_by_layer(kv):
    from omni_connector.copy.staged import StagedCopier

    stream = kv.HostStream(pins=True, hashes=True, moves=True)
    source = kv.build("LBHNC", 9, [[kv.Shape(4, 2, 16, 128)]], seed=1)

    def make(canonical, layout, slots):
        copier = StagedCopier(canonical, layout, stream, staging_bytes=layout.slot_bytes)
        copier.direct_bytes = 1 << 40
        copier.pin(slots)
        copier._host_rows = None  # the host neither copies nor hashes
        return copier

    saving = Saving(make, source, source.clone())
    for layer in saving.layers:
        saving.compute(layer)
        while not saving.advance(1):
            pass
    saving.end()
    saving.check(len(saving.layers))
    assert ("move", True) in stream.log


def test_zeroed_blocks_are_traced() -> None:
    told: list[Any] = []
    inner: Any = SimpleNamespace(
        speed=1,
        layer_bytes=1,
        pinned_at_once=0,
        zero=lambda group, ids, fence=None: told.append(len(ids)),
    )
    layer_ranges: Any = SimpleNamespace(layout=None, of_groups=())
    trace: Any = SimpleNamespace(span=lambda name, began, **what: told.append((name, what)))
    TracedCopier(inner, layer_ranges, trace).zero(1, np.arange(3))
    assert told == [3, ("zero", {"group": 1, "blocks": 3})]
