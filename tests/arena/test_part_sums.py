# SPDX-License-Identifier: Apache-2.0
"""Sums at the ends of parts: written with a slot, found by who knows them, and never of others."""

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena.arena import Arena
from omni_connector.arena.part_sums import LEAST_SLOTS, PartSums, SumsLayout, SumTable
from omni_connector.kv.parts import PART_BYTES, inner_ends

SLOTS, SLOT_BYTES, ENDS = 100, 4096, 3


def layout(most_ends=ENDS):
    found = SumsLayout.of(SLOTS, SLOT_BYTES, most_ends)
    assert found is not None
    return found


@pytest.fixture
def arena():
    with Arena.create(SLOTS, SLOT_BYTES) as made:
        yield made


def drawn(count, ends=ENDS, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 63, (count, ends, 8), np.uint64)


def write(sums, slots, generations, drawn):
    """What machine code writes as it saves these slots."""
    rows = sums.rows()
    rows[slots, 0] = generations
    rows[slots, 8 : 8 * (1 + drawn.shape[1])] = drawn.reshape(len(slots), -1)


@given(
    n_slots=st.integers(1, 1 << 20),
    slot_bytes=st.integers(1, 1 << 12).map(lambda pages: 4096 * pages),
    most_ends=st.integers(0, 1 << 10),
)
def test_rows_fit_the_slots_that_are_taken_and_no_slot_is_taken_for_nothing(
    n_slots, slot_bytes, most_ends
):
    found = SumsLayout.of(n_slots, slot_bytes, most_ends)
    if not most_ends or n_slots <= LEAST_SLOTS:
        assert found is None
        return
    taken = n_slots - found.num_slots
    row_bytes = 8 * found.row_words
    assert found.num_slots * row_bytes <= taken * slot_bytes
    assert (found.num_slots + 1) * row_bytes > (taken - 1) * slot_bytes
    assert row_bytes == 64 * (1 + most_ends)


@pytest.mark.parametrize("page", [64, 512, 4096, 16 << 10, 256 << 10])
@pytest.mark.parametrize("layers", [2, 16, 64, 1024])
def test_sums_take_less_than_two_hundredths_of_an_arena(page, layers):
    size = -(-page * layers // 4096) * 4096
    found = SumsLayout.of(10_000, size, len(inner_ends([page] * layers)))
    if found is not None:
        assert 10_000 - found.num_slots <= 200
        assert 64 / PART_BYTES < 0.01


def test_sums_are_found_as_they_were_written(arena):
    own = PartSums.create(arena, layout())
    sums = drawn(3)
    write(own, np.array([5, 90, 7]), np.array([11, 12, 13]), sums)
    found = PartSums.found(arena, layout())
    assert found is not None
    read = found.read(np.array([90, 5]), np.array([12, 11]), ENDS)
    assert np.array_equal(read, sums[[1, 0]])


def test_a_group_with_fewer_parts_has_its_own_sums_only(arena):
    own = PartSums.create(arena, layout())
    write(own, np.array([5]), np.array([11]), drawn(1, 1))
    read = own.read(np.array([5]), np.array([11]), 1)
    assert np.array_equal(read, drawn(1, 1))


def test_sums_of_other_generations_are_none(arena):
    own = PartSums.create(arena, layout())
    write(own, np.array([5, 6]), np.array([11, 12]), drawn(2))
    assert own.read(np.array([5, 6]), np.array([11, 13]), ENDS) is None
    assert own.read(np.array([4]), np.array([11]), ENDS) is None


def test_slots_that_hold_the_sums_have_none(arena):
    own = PartSums.create(arena, layout())
    for slot in (-1, layout().num_slots, SLOTS):
        assert own.read(np.array([slot]), np.array([0]), ENDS) is None


def test_arenas_without_sums_or_with_others_have_none(arena):
    assert PartSums.found(arena, layout()) is None
    PartSums.create(arena, layout())
    assert PartSums.found(arena, layout()) is not None
    assert PartSums.found(arena, layout(most_ends=ENDS - 1)) is None
    arena.retire(layout().num_slots)
    assert PartSums.found(arena, layout()) is None


def test_a_slot_with_a_block_in_the_place_of_the_header_is_none(arena):
    arena.begin_write(layout().num_slots, 1)
    arena.publish(layout().num_slots, 1, b"a block", SLOT_BYTES, 5)
    assert PartSums.found(arena, layout()) is None


def test_rows_that_are_not_in_whole_lines_are_refused(arena):
    rows = PartSums.create(arena, layout()).rows()
    assert SumTable(rows).places == ENDS
    for wrong in (rows[:, :16], rows[:, :-1], rows.reshape(-1)[1:9].reshape(1, -1)):
        with pytest.raises(ValueError, match="rows of sums"):
            SumTable(wrong)


def test_the_table_is_that_of_the_rows_and_let_go_of_at_the_end(arena):
    own = PartSums.create(arena, layout())
    table = own.table
    assert table.address == own.rows().ctypes.data
    assert table is own.table
    gone = weakref.ref(table)
    del table
    own.close()
    own.close()
    assert gone() is None


def test_other_slots_keep_their_bytes(arena):
    own = PartSums.create(arena, layout())
    arena.slots[: layout().num_slots] = 7
    every = np.arange(layout().num_slots)
    write(own, every, every, drawn(len(every)))
    assert (arena.slots[: layout().num_slots] == 7).all()
