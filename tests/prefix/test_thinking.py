# SPDX-License-Identifier: Apache-2.0
"""Where an answer begins to think, whatever the pieces in which its tokens come."""

from hypothesis import given
from hypothesis import strategies as st

from omni_connector.prefix.thinking import ThinkingTokens, Thoughts

ids = st.integers(0, 3)
marks = st.lists(ids, min_size=1, max_size=3).map(tuple)


def first(token_ids: list[int], wanted: tuple[int, ...], begin: int) -> int | None:
    """Where these tokens stand first, from `begin` on."""
    for place in range(begin, len(token_ids) - len(wanted) + 1):
        if tuple(token_ids[place : place + len(wanted)]) == wanted:
            return place
    return None


@given(
    answer=st.lists(ids, max_size=60),
    start=marks,
    pieces=st.lists(st.integers(1, 20), min_size=1, max_size=30),
)
def test_the_first_thought_is_found_in_whatever_pieces(
    answer: list[int], start: tuple[int, ...], pieces: list[int]
) -> None:
    tokens = [9, 9, *answer]
    thoughts = Thoughts(ThinkingTokens(start, (8,)))
    wanted = first(tokens, start, 2)
    end = 0
    for piece in [*pieces, len(tokens)]:
        end = min(end + piece, len(tokens))
        # Known is what was sampled; steps under way are counted as computed.
        found = thoughts.find(tokens[:end], 2, end + piece)
        known = first(tokens[:end], start, 2)
        assert found == known
    assert thoughts.begin == wanted


@given(prompt=st.lists(st.sampled_from([3, 7, 8]), min_size=1, max_size=20))
def test_a_prompt_that_ends_within_thoughts_has_opened_those_of_the_answer(
    prompt: list[int],
) -> None:
    opened = [token for token in prompt if token in (7, 8)][-1:] == [7]
    thoughts = Thoughts(ThinkingTokens((7,), (8,)))
    assert thoughts.find([*prompt, 5], len(prompt), len(prompt)) is None
    found = thoughts.find([*prompt, 5], len(prompt), len(prompt) + 1)
    assert found == (len(prompt) if opened else None)


def test_thoughts_that_an_earlier_message_has_left_open_are_not_those_of_the_answer() -> None:
    thoughts = Thoughts(ThinkingTokens((7,), (8,)))
    prompt = [7, *range(100, 140)]
    assert thoughts.find([*prompt, 5], len(prompt), len(prompt) + 1) is None


def test_what_comes_after_the_thoughts_is_not_kept_either() -> None:
    thoughts = Thoughts(ThinkingTokens((7,), (8,)))
    tokens = [1, 2, 3, 7, 4, 8, 5, 6]
    assert [thoughts.find(tokens[:end], 1, end) for end in range(1, 9)] == [None] * 3 + [3] * 5
