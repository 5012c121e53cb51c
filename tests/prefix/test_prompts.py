# SPDX-License-Identifier: Apache-2.0
"""What names a prompt's blocks, and how far a prefix reaches if some of its blocks are held."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.prefix.hints import Hints
from omni_connector.prefix.lookups import Held
from omni_connector.prefix.prompts import SharedPrompt, reach

from ..kv.shapes import group_shape

HASHES = [bytes([n]) * 32 for n in range(6)]


def shared(adapter: str = "", hashed_tokens: int | None = None, step: int = 1) -> SharedPrompt:
    request: Any = SimpleNamespace(request_id="r", block_hashes=HASHES)
    return SharedPrompt(
        request=request,
        loads=True,
        hashed_tokens=hashed_tokens,
        adapter=adapter,
        block_sizes=((16 * step, step),),
        sent=[0],
        hints=Hints(),
    )


def test_blocks_of_an_adapter_are_named_by_its_content() -> None:
    """vLLM's hashes name an adapter, whose files may have changed."""
    assert shared().keys(HASHES) == HASHES
    assert shared("content").keys(HASHES) == shared("content").keys(HASHES)
    named = [key for each in ("", "one", "other") for key in shared(each).keys(HASHES)]
    assert len(set(named)) == 3 * len(HASHES)
    assert {len(key) for key in named} == {32}


def test_blocks_in_a_store_are_named_by_the_content_of_an_adapter() -> None:
    assert shared().key_prefix("engines") == "engines"
    assert len({shared(each).key_prefix("engines") for each in ("", "one", "other")}) == 3


@pytest.mark.parametrize(
    ("hashed", "first", "end", "found"),
    [
        (None, 0, None, [1, 3, 5]),
        (None, 1, None, [3, 5]),
        (None, 0, 2, [1, 3]),
        (64, 0, None, [1, 3]),
        (64, 0, 1, [1]),
        (63, 0, 3, [1]),
    ],
)
def test_the_hash_of_a_block_is_that_of_its_last_part(
    hashed: int | None, first: int, end: int | None, found: list[int]
) -> None:
    prompt = shared(hashed_tokens=hashed, step=2)
    assert prompt.full_hashes(0, first, end) == [HASHES[n] for n in found]


FULL = group_shape(block_size=16)
WINDOW = group_shape(kind="sliding_window", attention_type="window", window=33, block_size=16)


SHAPES = (
    FULL,
    WINDOW,
    group_shape(kind="chunked_local_attention", attention_type="chunk", window=48, block_size=16),
    group_shape(kind="mamba", attention_type="last", block_size=32),
    group_shape(kind="sliding_window", attention_type="window", window=100, block_size=32),
)


@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.lists(st.booleans(), max_size=12)), max_size=3),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_no_longer_prefix_has_all_blocks_that_are_read(
    groups: list[tuple[Any, list[bool]]], start: int, end: int
) -> None:
    def has(shape: Any, held: list[bool], tokens: int) -> bool:
        return all(i < len(held) and held[i] for i in shape.needed(tokens, start))

    held = [(shape, Held.of(blocks)) for shape, blocks in groups]
    expected = [
        tokens
        for tokens in range(start + 1, end + 1)
        if tokens % 32 == 0 and all(has(*each, tokens) for each in groups)
    ]
    assert reach(held, 32, start, end) == max(expected, default=start)
