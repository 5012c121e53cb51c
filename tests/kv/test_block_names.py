# SPDX-License-Identifier: Apache-2.0
"""Names of blocks whose KV depends on tokens after them."""

from hypothesis import given
from hypothesis import strategies as st

from omni_connector.kv.block_names import block_names

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def hashes(tokens: list[int], size: int) -> list[bytes]:
    """Stand for vLLM's: of all tokens up to the end of each full block."""
    return [bytes(tokens[:end]).ljust(64, b"\xff") for end in range(size, len(tokens) + 1, size)]


def names(tokens: list[int], size: int, ahead: int, first: int = 0) -> list[bytes]:
    return block_names(
        hashes(tokens, size)[first:], tokens, first=first, block_size=size, tokens_ahead=ahead
    )


@given(TOKENS, st.integers(1, 6))
def test_without_tokens_ahead_they_are_the_hashes(tokens, size):
    assert names(tokens, size, 0) == hashes(tokens, size)


@given(TOKENS, TOKENS, st.integers(1, 6), st.integers(1, 3))
def test_blocks_are_named_alike_where_the_tokens_ahead_are_the_same(one, other, size, ahead):
    pairs = zip(names(one, size, ahead), names(other, size, ahead), strict=False)
    for block, (here, there) in enumerate(pairs, 1):
        end = block * size + ahead
        assert (here == there) == (one[:end] == other[:end])


@given(TOKENS, st.integers(1, 6), st.integers(0, 3), st.integers(0, 5))
def test_those_have_names_whose_tokens_ahead_are_known(tokens, size, ahead, first):
    found = names(tokens, size, ahead)
    assert len(found) == max(0, len(tokens) - ahead) // size
    assert names(tokens, size, ahead, first) == found[first:]
    assert {len(each) for each in found} <= {64}
