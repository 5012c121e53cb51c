# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a slot end."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from omni_connector.kv.parts import PART_BYTES, inner_ends

SIZES = st.lists(st.integers(1, 300).map(lambda lines: 64 * lines), max_size=80)


@given(SIZES)
def test_parts_end_with_pages_and_are_never_small_but_for_the_last(sizes):
    ends = inner_ends(sizes)
    assert set(ends) <= set(accumulate(sizes[:-1]))
    assert all(end - first >= PART_BYTES for first, end in pairwise((0, *ends)))


@given(SIZES)
def test_pages_of_a_part_would_be_too_few_bytes_without_its_last_page(sizes):
    starts = [0, *accumulate(sizes)]
    for first, end in pairwise((0, *inner_ends(sizes))):
        last = max(start for start in starts if start < end)
        assert last - first < PART_BYTES


@given(SIZES, st.integers(1, 63))
def test_slots_with_pages_that_a_checksum_does_not_end_at_have_one_part(sizes, odd):
    assert not inner_ends([*sizes, 64 * 200 + odd, 64])


def test_many_tiny_layers_have_few_parts():
    assert len(inner_ends([64] * 1024)) == 7
