# SPDX-License-Identifier: Apache-2.0
"""What a job copies: batches of its blocks, and the jobs that are refused."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from omni_connector.copy.jobs import LoadSpec, SaveSpec
from omni_connector.copy.prefix_jobs import StoreLoadSpec, StoreSaveSpec
from omni_connector.kv.spans import BlockSpans


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
