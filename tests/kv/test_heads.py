# SPDX-License-Identifier: Apache-2.0
"""Which source ranks give a target rank its heads."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from omni_connector.errors import LayoutError
from omni_connector.kv.heads import HeadSlice, head_sources

RANKS = st.sampled_from((1, 2, 3, 4, 6, 8, 16))


def held(total, rank, ranks):
    """The heads of one rank, as vLLM shards them."""
    if total >= ranks:
        each = total // ranks
        return list(range(rank * each, (rank + 1) * each))
    return [rank // (ranks // total)]


def divides(total, ranks):
    return total % ranks == 0 or ranks % total == 0


@given(total=RANKS, source_ranks=RANKS, target_ranks=RANKS, known=st.booleans(), data=st.data())
def test_every_head_of_a_rank_is_taken_once_from_a_rank_that_holds_it(
    total, source_ranks, target_ranks, known, data
):
    assume(divides(total, source_ranks) and divides(total, target_ranks))
    # Unknown, the heads must add up: none may be replicated.
    assume(known or max(source_ranks, target_ranks) <= total)
    rank = data.draw(st.integers(0, target_ranks - 1))
    ours = held(total, rank, target_ranks)
    sources = head_sources(
        total=total if known else None,
        source_heads=len(held(total, 0, source_ranks)),
        source_ranks=source_ranks,
        target_heads=len(ours),
        target_rank=rank,
        target_ranks=target_ranks,
    )
    found = {}
    for source_rank, part in sources:
        theirs = held(total, source_rank, source_ranks)
        for i in range(part.count):
            assert part.target + i not in found
            found[part.target + i] = theirs[part.source + i]
    assert [found[i] for i in range(len(ours))] == ours
    assert len(found) == len(ours)
    if source_ranks == target_ranks:
        assert sources == ((rank, HeadSlice(0, 0, len(ours))),)
    if total == 1:
        assert sources == ((rank % source_ranks, HeadSlice(0, 0, 1)),)


def test_ranks_take_turns_at_the_holders_of_a_replicated_head():
    sources = [
        head_sources(
            total=2, source_heads=1, source_ranks=4, target_heads=1, target_rank=r, target_ranks=8
        )
        for r in range(8)
    ]
    assert [rank for ((rank, _),) in sources] == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_count_that_both_sides_contradict_is_not_used():
    # An indexer's cache beside attention, say: its heads are not the model's.
    assert head_sources(
        total=32, source_heads=2, source_ranks=2, target_heads=4, target_rank=0, target_ranks=1
    ) == ((0, HeadSlice(0, 0, 2)), (1, HeadSlice(0, 2, 2)))
    assert head_sources(
        total=32, source_heads=1, source_ranks=4, target_heads=1, target_rank=2, target_ranks=4
    ) == ((2, HeadSlice(0, 0, 1)),)


@pytest.mark.parametrize(
    ("total", "source", "target", "message"),
    [
        (None, (1, 2), (1, 1), "1 KV heads on each of 2 ranks and 1 on each of 1"),
        (8, (4, 2), (4, 1), "the model has 8"),
        (6, (1, 4), (6, 1), "6 heads cannot be shared out over 4 ranks"),
        (None, (3, 2), (2, 4), "3 KV heads on each of 2 ranks and 2 on each of 4"),
    ],
)
def test_heads_that_do_not_fit_are_refused_with_their_numbers(total, source, target, message):
    with pytest.raises(LayoutError, match=message):
        head_sources(
            total=total,
            source_heads=source[0],
            source_ranks=source[1],
            target_heads=target[0],
            target_rank=0,
            target_ranks=target[1],
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_rank": 2},
        {"target_rank": -1},
        {"source_ranks": 0},
        {"source_heads": 0},
        {"total": 0},
    ],
)
def test_numbers_that_make_no_sense_are_refused(wrong):
    right = {
        "total": 4,
        "source_heads": 2,
        "source_ranks": 2,
        "target_heads": 2,
        "target_rank": 0,
        "target_ranks": 2,
    }
    with pytest.raises(ValueError):
        head_sources(**right | wrong)


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_slices_that_make_no_sense_are_refused_when_made(numbers):
    with pytest.raises(ValueError, match="slice of heads"):
        HeadSlice(*numbers)
