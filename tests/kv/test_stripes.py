# SPDX-License-Identifier: Apache-2.0
"""Slots of replicated KV are spread over ranks, so that each has one owner and one place there."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.kv import shapes, stripes
from omni_connector.kv.stripes import by_stripe, of_stripe, owning_arenas

SLOTS = st.lists(st.integers(0, 1 << 40), max_size=40).map(lambda each: np.array(each, np.int64))
RANKS = st.integers(1, 16)


@given(SLOTS, RANKS)
def test_each_slot_is_read_where_its_owning_rank_saves_it(slots, ranks):
    read = {}
    for rank, at, rows in by_stripe(slots, ranks):
        assert len(at), "an arena of which nothing is read"
        read |= {place: (rank, row) for place, row in zip(at.tolist(), rows.tolist(), strict=True)}
    saved = {}
    for rank in range(ranks):
        own, rows = of_stripe(slots, rank, ranks)
        for place in np.flatnonzero(own).tolist():
            assert place not in saved, "a block that two ranks save"
            saved[place] = rank, int(rows[place])
    assert read == saved
    assert len(read) == len(slots)


@given(st.integers(1, 200), RANKS)
def test_no_two_slots_lie_in_one_place_and_none_is_left_free(rows, ranks):
    slots = np.arange(rows * ranks)
    places = {(rank, row) for rank, _, found in by_stripe(slots, ranks) for row in found.tolist()}
    assert places == {(rank, row) for rank in range(ranks) for row in range(rows)}


@given(SLOTS, st.integers(0, 1023))
def test_where_ranks_hold_bytes_of_their_own_slots_keep_their_numbers(slots, rank):
    own, rows = of_stripe(slots, rank, 1)
    assert own.all()
    assert np.array_equal(rows, slots)
    assert [found.tolist() for _, _, found in by_stripe(slots, 1)] == [slots.tolist()] * any(
        [len(slots)]
    )


@pytest.mark.parametrize(
    ("stage", "rank", "ranks", "stripes", "arenas"),
    [
        (0, 0, 1, 1, (0,)),
        (0, 1, 2, 1, (1,)),
        (2, 1, 2, 1, (5,)),
        (0, 1, 2, 2, (0, 1)),
        (2, 0, 2, 2, (4, 5)),
        (0, 3, 8, 2, (2, 3)),
        (0, 4, 8, 4, (4, 5, 6, 7)),
        (1, 1, 8, 4, (8, 9, 10, 11)),
        (1, 7, 8, 2, (14, 15)),
    ],
)
def test_slots_lie_in_the_arenas_of_a_pipeline_stage(stage, rank, ranks, stripes, arenas):
    assert owning_arenas(stage, rank, ranks, stripes) == arenas


@given(st.integers(0, 4), st.integers(1, 8), st.integers(1, 8), st.data())
def test_ranks_that_hold_the_same_read_the_same_arenas_and_theirs_alone(stage, heads, copies, data):
    ranks = heads * copies
    stripes = data.draw(st.sampled_from([n for n in range(1, copies + 1) if copies % n == 0]))
    for rank in range(ranks):
        arenas = owning_arenas(stage, rank, ranks, stripes)
        assert stage * ranks + rank in arenas
        assert {(each - stage * ranks) // copies for each in arenas} == {rank // copies}
        assert [each % stripes for each in arenas] == list(range(stripes)), "each has its stripe"


@pytest.mark.parametrize("module", [stripes, shapes])
def test_the_examples_are_right(module):
    assert doctest.testmod(module).failed == 0
