# SPDX-License-Identifier: Apache-2.0
"""Rows between buffers and slots, and their checksums, against numpy and xxhash."""

from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.copy import host_rows
from omni_connector.copy.host_rows import HostRows, begin_hashing, in_parts
from omni_connector.copy.native import ALIGNMENT, native_copy


class InTurn:
    """Threads that work one after the other."""

    def __init__(self, threads):
        self.threads = threads

    def share(self, work, items):
        for item in items:
            work(item)


def ids(values):
    return np.array(values, dtype=np.int64)


def aligned(rows, nbytes, seed):
    """Rows of random bytes that begin at multiples of a page, `(rows, nbytes)`."""
    room = np.random.default_rng(seed).integers(0, 256, rows * nbytes + 4096, np.uint8)
    first = -room.ctypes.data % 4096
    return room[first : first + rows * nbytes].reshape(rows, nbytes)


SIZES = st.one_of(st.integers(1, 40).map(lambda n: n * ALIGNMENT), st.integers(1, 700))
WAYS = st.sampled_from([None, InTurn(1), InTurn(3)])


@given(
    nbytes=SIZES,
    rows=st.permutations(range(6)),
    count=st.integers(0, 6),
    helpers=WAYS,
    checksum=st.booleans(),
    by_machine_code=st.booleans(),
)
def test_rows_are_copied_and_hashed_and_no_others(
    nbytes, rows, count, helpers, checksum, by_machine_code
):
    sources = aligned(6, nbytes, 1)
    targets = aligned(6, nbytes, 2)
    source_ids = ids(range(count))
    target_ids = ids(rows[:count])
    expected = targets.copy()
    expected[target_ids] = sources[source_ids]
    with pytest.MonkeyPatch.context() as patch:
        if not by_machine_code:
            patch.setattr(host_rows, "native_copy", lambda: None)
        moved = HostRows(helpers)
        moved.shared_bytes = 1
        sums = moved.copy(targets, sources, target_ids, source_ids, checksum=checksum)
        hashes = moved.hash(targets, target_ids)
    np.testing.assert_array_equal(targets, expected)
    true = [xxhash.xxh3_64_intdigest(sources[row].data) for row in range(count)]
    assert sums.tolist() == (true if checksum else [0] * count)
    assert hashes.tolist() == true


@pytest.mark.skipif(native_copy() is None, reason="machine code is not to be had here")
@given(
    parts=st.lists(st.integers(1, 12).map(lambda n: n * ALIGNMENT), min_size=1, max_size=5).filter(
        lambda parts: sum(parts) >= 256
    ),
    helpers=WAYS,
    copied=st.booleans(),
)
def test_a_slot_that_is_filled_part_by_part_has_the_checksum_of_all(parts, helpers, copied):
    slots = aligned(5, sum(parts), 1)
    slot_ids = ids([3, 0, 4])
    states = begin_hashing(parts, slots, len(slot_ids))
    assert states is not None
    rows = HostRows(helpers)
    rows.shared_bytes = 1
    sums = ids([])
    first = 0
    for nbytes in parts:
        part = slots[:, first : first + nbytes]
        if copied:
            source = aligned(3, nbytes, first)
            pair = slot_ids, ids(range(3))
            sums = rows.copy(part, source, *pair, checksum=True, states=states)
        else:
            sums = rows.hash(part, slot_ids, states)
        first += nbytes
    true = [xxhash.xxh3_64_intdigest(slots[slot].data) for slot in slot_ids]
    assert sums.tolist() == true


@pytest.mark.parametrize(
    ("lengths", "shift"),
    [([100, 200], 0), ([64, 64], 0), ([256], 1)],
    ids=["no multiples of a line", "too short", "slots that are not aligned"],
)
def test_what_cannot_be_hashed_in_parts_has_no_states(lengths, shift):
    slots = aligned(2, 4096, 1)[:, shift:]
    assert begin_hashing(lengths, slots, 2) is None


def test_states_for_other_rows_are_refused_before_anything_is_copied():
    slots = aligned(2, 512, 1)
    states = begin_hashing([512], slots, 2)
    before = slots.copy()
    both = ids([0, 1])
    with pytest.raises(ValueError, match="was not told of"):
        HostRows().copy(
            slots[:, :100], aligned(2, 100, 2), both, both, checksum=True, states=states
        )
    np.testing.assert_array_equal(slots, before)


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_does_not_exist_is_refused(row):
    rows = aligned(2, 256, 1)
    with pytest.raises(IndexError, match="of 2"):
        HostRows().copy(rows, rows, ids([0]), ids([row]), checksum=False)
    with pytest.raises(IndexError, match="of 2"):
        HostRows().hash(rows, ids([row]))


@given(count=st.integers(0, 40), nbytes=st.integers(0, 10_000), threads=st.integers(1, 9))
def test_parts_are_all_items_once_and_in_order(count, nbytes, threads):
    for helpers in (None, SimpleNamespace(threads=threads, share=InTurn(threads).share)):
        seen = []
        in_parts(helpers, count, nbytes, seen.append, least=1000)
        assert [item for some in seen for item in range(some.start, some.stop)] == list(
            range(count)
        )
        if helpers is not None:
            assert len(seen) <= max(1, min(2 * threads, nbytes // 1000))
