# SPDX-License-Identifier: Apache-2.0
"""Blocks that have filled are collected by runs, and considered each once."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.prefix.filled import FilledRuns
from omni_connector.prefix.hints import NO_HINTS, FilledBlocks, Hints

PINNED = Hints(pin_s=5.0)
PREFETCHED = Hints(prefetch=True)

runs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
        st.sampled_from([NO_HINTS, PINNED, PREFETCHED]),
    ),
    min_size=1,
    max_size=5,
)


Asked = list[tuple[list[int], Hints]]


def of_a_step(asked: Asked) -> FilledBlocks:
    filled = FilledRuns()
    for number, (blocks, hints) in enumerate(asked):
        keys = [b"%d" % each for each in blocks]
        hashes = [b"h" + each for each in keys]
        ids = [10 * number + each for each in blocks]
        filled.add(keys, hashes, ids, prompt=number, hints=hints)
    return filled.blocks()


def that_have_waited(asked: Asked) -> FilledBlocks:
    """Each run has waited by itself, since a step of its own."""
    steps = [of_a_step([([], NO_HINTS)] * number + [each]) for number, each in enumerate(asked)]
    return FilledBlocks.joined(steps)


@pytest.mark.parametrize("collected", [of_a_step, that_have_waited])
@given(asked=runs)
def test_each_key_is_there_once_with_the_hints_of_all_its_requests(
    collected: Callable[[Asked], FilledBlocks], asked: Asked
) -> None:
    blocks = collected(asked)
    last: dict[bytes, tuple[int, int]] = {}
    wanted: dict[bytes, Hints] = {}
    for number, (numbers, hints) in enumerate(asked):
        for each in numbers:
            key = b"%d" % each
            last[key] = number, 10 * number + each
            wanted[key] = hints.joined(wanted.get(key, hints))
    places = zip(blocks.prompts.tolist(), blocks.block_ids.tolist(), strict=True)
    assert dict(zip(blocks.keys, places, strict=True)) == last
    assert blocks.cached_as == [b"h" + each for each in blocks.keys]
    if blocks.hints is None:
        assert all(hints is NO_HINTS for _, hints in asked)
    else:
        assert blocks.hints == [wanted[each] for each in blocks.keys]
