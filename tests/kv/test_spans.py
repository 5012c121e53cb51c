# SPDX-License-Identifier: Apache-2.0
"""Which chunk, and which place in it, belongs to each block of a transfer."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.copies.jobs import LoadSpec, SaveSpec
from omni_connector.kv import BlockSpans, expand
from omni_connector.prefix.jobs import StoreLoadSpec, StoreSaveSpec


def one_block_at_a_time(block_ids, sizes, indices, per_chunk, chunks):
    """The same, walking the request: a block's chunk changes where its index says so."""
    groups = []
    left = list(block_ids)
    for size, index, blocks, ids in zip(sizes, indices, per_chunk, chunks, strict=True):
        copies = []
        chunk = -1
        for i in range(index, index + size):
            if chunk < 0 or i % blocks == 0:
                chunk += 1
            copies.append((left.pop(0), ids[chunk], i % blocks))
        assert chunk + 1 == len(ids)
        groups.append(copies)
    assert not left
    return groups


@st.composite
def transfers(draw):
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    per_chunk = [draw(st.integers(1, 5)) for _ in sizes]
    indices = [draw(st.integers(0, 20)) for _ in sizes]
    block_ids = draw(st.permutations(range(100)))[: sum(sizes)]
    chunks = []
    for size, index, blocks in zip(sizes, indices, per_chunk, strict=True):
        last = index + size - 1
        count = last // blocks - index // blocks + 1 if size else 0
        chunks.append([draw(st.integers(0, 50)) for _ in range(count)])
    return block_ids, sizes, indices, per_chunk, chunks


@given(transfers())
def test_blocks_lie_where_walking_the_request_finds_them(transfer):
    block_ids, sizes, indices, per_chunk, chunks = transfer
    spans = BlockSpans(np.array(block_ids, np.int64), tuple(sizes), tuple(indices))
    # One number where the groups are alike.
    given_size = per_chunk[0] if len(set(per_chunk)) == 1 else per_chunk
    expanded = expand(spans, given_size, [np.array(ids, np.int64) for ids in chunks])
    found = [
        list(zip(g.block_ids.tolist(), g.chunk_ids.tolist(), g.places.tolist(), strict=True))
        for g in expanded
    ]
    assert found == one_block_at_a_time(block_ids, sizes, indices, per_chunk, chunks)
    for group in expanded:
        assert {array.dtype for array in group} == {np.dtype(np.int64)}


def test_groups_may_have_chunks_of_different_numbers_of_blocks():
    """Blocks of 16 tokens and of 64 beside chunks of 64: four of the first, one of the second."""
    spans = BlockSpans(np.arange(8), (6, 2), (3, 1))
    small, large = expand(spans, (4, 1), [np.array([5, 6, 9]), np.array([6, 9])])
    assert small.chunk_ids.tolist() == [5, 6, 6, 6, 6, 9]
    assert small.places.tolist() == [3, 0, 1, 2, 3, 0]
    assert large.chunk_ids.tolist() == [6, 9]
    assert large.places.tolist() == [0, 0]


def test_a_transfer_may_begin_and_end_inside_a_chunk():
    spans = BlockSpans(np.arange(10, 16), (0, 6), (7, 2))
    empty, group = expand(spans, 4, [np.array([]), np.array([8, 5])])
    assert [len(array) for array in empty] == [0, 0, 0]
    assert group.block_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert group.chunk_ids.tolist() == [8, 8, 5, 5, 5, 5]
    assert group.places.tolist() == [2, 3, 0, 1, 2, 3]


@given(transfers(), st.data())
def test_too_few_or_too_many_chunks_are_refused_by_group(transfer, data):
    block_ids, sizes, indices, per_chunk, chunks = transfer
    group = data.draw(st.integers(0, len(sizes) - 1))
    if chunks[group] and data.draw(st.booleans()):
        chunks[group].pop()
    else:
        chunks[group].append(0)
    spans = BlockSpans(np.array(block_ids, np.int64), tuple(sizes), tuple(indices))
    with pytest.raises(ValueError, match=f"group {group}: {sizes[group]} blocks"):
        expand(spans, per_chunk, [np.array(ids, np.int64) for ids in chunks])


@pytest.mark.parametrize(
    ("block_ids", "sizes", "indices", "message"),
    [
        ([1, 2], (1,), (0,), "add up to 1, but there are 2"),
        ([1, 2], (3, -1), (0, 0), "group 1: -1 blocks"),
        ([1, 2], (1, 1), (0, -4), "group 1: first block has index -4"),
        ([1, 2], (1, 1), (0,), "2 group sizes, but 1 block indices"),
        ([1, -2], (2,), (0,), "block -2 is negative"),
        ([[1, 2]], (2,), (0,), "not integers"),
        ([1.5], (1,), (0,), "not integers"),
    ],
)
def test_spans_that_disagree_are_refused_when_made(block_ids, sizes, indices, message):
    with pytest.raises(ValueError, match=message):
        BlockSpans(np.array(block_ids), sizes, indices)


@pytest.mark.parametrize(
    ("per_chunk", "chunks", "message"),
    [
        (0, [np.array([1])], "0 blocks in a chunk"),
        ((0,), [np.array([1])], "blocks in a chunk"),
        ((1, 1), [np.array([1])], "1 groups, but chunks of"),
        (1, [], "1 groups, but chunks for 0"),
        (1, [np.array([1.0])], "group 0: chunk ids are float64"),
    ],
)
def test_chunks_that_make_no_sense_are_refused(per_chunk, chunks, message):
    spans = BlockSpans(np.array([3]), (1,), (0,))
    with pytest.raises(ValueError, match=message):
        expand(spans, per_chunk, chunks)


def test_spans_keep_their_own_blocks():
    given_ids = np.array([1, 2])
    spans = BlockSpans(given_ids, (2,), (0,))
    given_ids[0] = 9
    assert spans.block_ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        spans.block_ids[0] = 9


def test_batches_are_of_one_group_and_leave_out_null_blocks():
    spans = BlockSpans.of([(3, [7, 0, 8, 9]), (0, []), (5, [4, 0])])
    assert spans.group_sizes == (4, 0, 2)
    assert spans.block_indices == (3, 0, 5)
    assert spans.held == [7, 8, 9, 4]
    batches = [(group, places.tolist()) for group, places in spans.batches([2, 2, 2])]
    assert batches == [(0, [0, 2]), (0, [3]), (2, [4])]


def jobs_with(block_ids):
    """A job of each kind, of these blocks."""
    blocks, numbers = BlockSpans.of([(0, block_ids)]), np.arange(len(block_ids))
    return {
        "save": SaveSpec(blocks=blocks, slots=numbers, generations=numbers, keys=[]),
        "load": LoadSpec(blocks=blocks, slots=blocks, generations=numbers, arenas=(), timeout=1.0),
        "store save": StoreSaveSpec(blocks=blocks, prefix="", hashes=[]),
        "store load": StoreLoadSpec(blocks=blocks, prefix="", hashes=[], timeout=1.0),
    }


@pytest.mark.parametrize("kind", jobs_with([]))
@pytest.mark.parametrize("block", [-1, 8, 2**40])
def test_a_job_with_a_block_that_does_not_exist_is_refused(kind, block):
    jobs_with([7, 0, 1, 0])[kind].check(num_blocks=8, num_slots=4)
    with pytest.raises(IndexError, match=f"block {block} of 8"):
        jobs_with([7, 0, block])[kind].check(num_blocks=8, num_slots=4)


def test_a_job_that_writes_a_block_twice_is_refused():
    jobs = jobs_with([2, 1, 2])
    for kind in ("load", "store load"):
        with pytest.raises(ValueError, match="block 2 is written twice"):
            jobs[kind].check(num_blocks=8, num_slots=0)
    for kind in ("save", "store save"):
        jobs[kind].check(num_blocks=8, num_slots=4)


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ([0, 9, 4], IndexError, "slot 4 of 4"),
        ([-2, 9, 0], IndexError, "slot -2 of 4"),
        ([3, 9, 3], ValueError, "slot 3 is written twice"),
    ],
)
def test_a_save_to_a_slot_that_does_not_exist_or_twice_to_one_is_refused(slots, error, message):
    blocks = BlockSpans.of([(0, [1, 0, 2])])  # the slot of the null block is not used
    unused = np.zeros(3, np.int64)
    SaveSpec(blocks=blocks, slots=np.array([3, 3, 0]), generations=unused, keys=[]).check(8, 4)
    with pytest.raises(error, match=message):
        SaveSpec(blocks=blocks, slots=np.array(slots), generations=unused, keys=[]).check(8, 4)


def test_spans_of_no_groups_hold_nothing():
    spans = BlockSpans.of(())
    assert spans.held == []
    assert list(spans.batches([])) == []


def test_spans_are_the_same_after_a_journey_to_a_worker():
    spans = pickle.loads(pickle.dumps(BlockSpans.of([(3, [7, 0]), (1, [2])])))  # noqa: S301
    assert spans.block_ids.tolist() == [7, 0, 2]
    assert (spans.group_sizes, spans.block_indices) == ((2, 1), (3, 1))


def test_spans_need_no_torch():
    code = "import sys, omni_connector.kv.spans; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
