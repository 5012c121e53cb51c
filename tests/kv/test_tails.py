# SPDX-License-Identifier: Apache-2.0
"""Names of tails: the same for the same tokens behind the same block, and for no others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.kv.tails import FINGERPRINT_BYTES, fingerprints, tail_name

TOKENS = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=60)
PARENTS = st.binary(min_size=16, max_size=64)


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


def test_fingerprints_of_a_long_block_differ() -> None:
    found = fingerprints(b"parent", [0] * 8960)
    assert len(np.unique(found)) == 8960
