# SPDX-License-Identifier: Apache-2.0
"""Names of tails: the same for the same tokens behind the same block, and for no others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.kv.tails import (
    FINGERPRINT_BYTES,
    cell_marks,
    fingerprints,
    tail_name,
    tail_names,
    tokens_of_a_cell,
)

TOKENS = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=60)
PARENTS = st.binary(min_size=16, max_size=63)


@given(PARENTS, TOKENS)
def test_a_name_begins_with_the_fingerprint_of_its_length(parent: bytes, tokens: list[int]) -> None:
    found = fingerprints(parent, tokens)
    for number in range(1, len(tokens) + 1):
        name = tail_name(parent, tokens[:number])
        assert name[:FINGERPRINT_BYTES] == found[number - 1].tobytes()
        assert len(name) == 24


@given(st.lists(st.tuples(PARENTS, TOKENS), min_size=2, max_size=20))
def test_other_tails_have_other_names(tails: list[tuple[bytes, list[int]]]) -> None:
    different = {(parent, tuple(tokens)) for parent, tokens in tails}
    names = [tail_name(parent, tokens) for parent, tokens in different]
    assert len(set(names)) == len(different)
    assert len({name[:FINGERPRINT_BYTES] for name in names}) == len(different)
    assert len({name[FINGERPRINT_BYTES:] for name in names}) == len(different)


@given(PARENTS, TOKENS, st.data())
def test_every_token_and_its_place_counts(
    parent: bytes, tokens: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = tokens.copy()
    other[place] += 1
    assert tail_name(parent, other) != tail_name(parent, tokens)
    turned = tokens[::-1]
    assert (tail_name(parent, turned) == tail_name(parent, tokens)) == (turned == tokens)


@given(PARENTS, TOKENS, st.data())
def test_names_of_several_lengths_are_those_of_each(
    parent: bytes, tokens: list[int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(1, len(tokens)))
    names = [tail_name(parent, tokens[:number]) for number in range(first, len(tokens) + 1)]
    assert tail_names(parent, tokens, first) == names


@given(PARENTS, TOKENS, st.integers(1, 20), st.data())
def test_whoever_begins_with_a_tail_asks_for_its_mark(
    parent: bytes, tokens: list[int], cell: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(tokens)))
    mark = cell_marks(parent, tokens[: number // cell * cell], cell)[-1]
    marks = cell_marks(parent, tokens, cell)
    assert marks[number // cell] == mark
    assert len(set(marks)) == len(marks) == len(tokens) // cell + 1
    assert len(mark) == len(tail_name(parent, tokens))
    other = [tokens[0] + 1, *tokens[1:]]
    assert not set(marks[1:]) & set(cell_marks(parent, other, cell)[1:])
    assert not set(marks) & set(cell_marks(parent[::-1] + b"!", tokens, cell))


@pytest.mark.parametrize("block_size", [1, 16, 784, 2096, 8960])
def test_few_keys_are_asked_for_in_a_block(block_size: int) -> None:
    cell = tokens_of_a_cell(block_size)
    assert 1 <= cell <= block_size
    assert cell + block_size // cell <= 2 * block_size**0.5 + 2


def test_fingerprints_of_a_long_block_differ() -> None:
    found = fingerprints(b"parent", [0] * 8960)
    assert len(np.unique(found)) == 8960
