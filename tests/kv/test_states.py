# SPDX-License-Identifier: Apache-2.0
"""States of a rank, made of the states of a peer's ranks."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.errors import LayoutError
from omni_connector.kv.states import (
    StatePart,
    StateTensor,
    cut_bytes,
    state_sources,
    state_units,
)

RANKS = st.sampled_from((1, 2, 3, 4, 8))


def cut_of(tensors, ranks):
    """How so many ranks cut a state, whose tensors are given by rows and parts of the whole
    model."""
    return tuple(
        StateTensor(
            "float16",
            rows,
            tuple(
                StatePart(f"part {number}", total, max(1, total // ranks), size)
                for number, (total, size) in enumerate(parts)
            ),
        )
        for rows, parts in tensors
    )


def page_of(tensors, rank, ranks):
    """The state of one rank, as vLLM cuts it: each byte has a number of its own."""
    page, first = [], 0
    for rows, parts in tensors:
        widths = [total * size for total, size in parts]
        whole = first + np.arange(rows * sum(widths)).reshape(rows, -1)
        first += whole.size
        cut = []
        for (total, size), (begin, end) in zip(
            parts, pairwise(np.cumsum([0, *widths])), strict=True
        ):
            units = whole[:, begin:end].reshape(rows, total, size)
            each = max(1, total // ranks)
            own = rank * each if total >= ranks else rank // (ranks // total)
            cut.append(units[:, own : own + each].reshape(rows, -1))
        page.append(np.concatenate(cut, axis=1).ravel())
    return (np.concatenate(page) % 251).astype(np.uint8)


PARTS = st.lists(st.tuples(st.sampled_from((1, 24, 48)), st.integers(1, 6)), min_size=1, max_size=4)
TENSORS = st.lists(st.tuples(st.integers(1, 4), PARTS), min_size=1, max_size=3)


@given(tensors=TENSORS, ranks=st.tuples(RANKS, RANKS), layers=st.integers(1, 3), data=st.data())
def test_each_byte_of_a_rank_comes_from_a_rank_that_has_it(tensors, ranks, layers, data):
    rank = data.draw(st.integers(0, ranks[1] - 1))
    cuts = [cut_of(tensors, each) for each in ranks]
    sizes = [cut_bytes(cut) for cut in cuts]
    # Our layers stand the other way round.
    pages = [(layer * sizes[0], (layers - 1 - layer) * sizes[1]) for layer in range(layers)]
    sources = state_sources(
        cuts[0],
        ranks[0],
        cuts[1],
        rank,
        ranks[1],
        pages=pages,
        source_bytes=layers * sizes[0],
    )
    made = np.full(layers * sizes[1], 255, np.uint8)
    for source, slices in sources.items():
        slot = np.tile(page_of(tensors, source, ranks[0]), layers)
        slot.flags.writeable = False
        assert slices.source_bytes == len(slot)
        slices.copy(slot, 0, made, 0, (), end_token=0)
    assert made.tobytes() == np.tile(page_of(tensors, rank, ranks[1]), layers).tobytes()
    assert len(sources) <= max(1, ranks[0] // ranks[1] + (ranks[0] % ranks[1] > 0)) + 1


def test_what_all_ranks_have_costs_no_slot_more():
    tensors = [(3, [(8, 2), (1, 4), (1, 4)])]
    found = state_sources(cut_of(tensors, 4), 4, cut_of(tensors, 2), 1, 2)
    assert list(found) == [2, 3]


def test_a_state_that_is_cut_as_one_piece_is_another_state():
    """The control: parts are what matters."""
    tensors, joined = [(3, [(8, 2), (8, 2)])], [(3, [(16, 2)])]
    made = np.zeros(cut_bytes(cut_of(tensors, 1)), np.uint8)
    for source, slices in state_sources(cut_of(joined, 2), 2, cut_of(joined, 1), 0, 1).items():
        slices.copy(page_of(tensors, source, 2), 0, made, 0, (), end_token=0)
    assert made.tobytes() != page_of(tensors, 0, 1).tobytes()


PART = StatePart("head", 4, 4, 8)
TENSOR = StateTensor("float16", 2, (PART,))


@pytest.mark.parametrize(
    ("source", "ranks", "why"),
    [
        ((TENSOR, TENSOR), 1, "states of 2 tensors and of 1"),
        ((msgspec.structs.replace(TENSOR, dtype="float32"),), 1, "states of other tensors"),
        ((msgspec.structs.replace(TENSOR, rows=3),), 1, "states of other tensors"),
        ((msgspec.structs.replace(TENSOR, parts=(PART, PART)),), 1, "states of other tensors"),
        ((TENSOR,), 2, "4 of 4 units of head on each of 2 ranks"),
        ((TENSOR,), 3, "4 of 4 units of head on each of 3 ranks"),
    ],
)
def test_a_peer_that_tells_of_another_state_is_refused(source, ranks, why):
    with pytest.raises(LayoutError, match=why):
        state_sources(source, ranks, (TENSOR,), 0, 1)


def test_a_slot_that_is_too_short_is_not_read():
    (slices,) = state_sources((TENSOR,), 1, (TENSOR,), 0, 1).values()
    whole, short = np.zeros(64, np.uint8), np.zeros(63, np.uint8)
    for source, target in ((whole, short), (short, whole)):
        with pytest.raises(ValueError, match="a slot of 63 bytes has no piece"):
            slices.copy(source, 0, target, 0, (), end_token=0)


@pytest.mark.parametrize(
    ("total", "ranks", "units"), [(8, 2, 4), (8, 8, 1), (1, 8, 1), (2, 8, 1), (6, 4, None)]
)
def test_units_of_a_rank(total, ranks, units):
    assert state_units(StatePart("head", total, 1, 2), ranks) == units
