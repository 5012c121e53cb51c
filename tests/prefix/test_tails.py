# SPDX-License-Identifier: Apache-2.0
"""Which tails have a name, and of which models any are kept."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena.block_index import tags_of, tags_of_words
from omni_connector.kv.tails import fingerprints, tail_name
from omni_connector.prefix.hints import Hints
from omni_connector.prefix.lookups import Held
from omni_connector.prefix.prompts import SharedGroups, SharedPrompt
from omni_connector.prefix.tails import Tails, keeps_tails

from ..kv.shapes import group_shape

BLOCK = 32
FULL = group_shape(block_size=BLOCK)
STATE = group_shape(block_size=BLOCK, kind="mamba", attention_type="last")
WINDOW = group_shape(block_size=BLOCK, kind="sliding_window", attention_type="window", window=40)
RING = group_shape(block_size=8, kind="circular_buffer", attention_type="ring", uncached=True)
TAILS = Tails(SharedGroups((FULL, STATE), (0, 1), BLOCK), None)
HASHES = [bytes([n]) * 32 for n in range(1, 4)]


def groups(*shapes: Any, **options: Any) -> SharedGroups:
    return SharedGroups(shapes, tuple(range(len(shapes))), BLOCK, **options)


def named(end: int, **options: Any) -> bytes | None:
    """The name of a tail of a request of 100 tokens, three full blocks among them."""
    return TAILS.name(prompt_of(list(range(100)), **options), end)


def prompt_of(tokens: list[int], **options: Any) -> SharedPrompt:
    """A request whose full blocks have the same hashes, whatever its tokens."""
    request: Any = SimpleNamespace(
        request_id="r",
        block_hashes=HASHES,
        num_tokens=len(tokens),
        all_token_ids=tokens,
        cache_salt=options.pop("salt", None),
    )
    return SharedPrompt(
        request=request,
        loads=True,
        hashed_tokens=options.pop("hashed_tokens", None),
        adapter=options.pop("adapter", ""),
        block_sizes=((BLOCK, 1),) * 2,
        sent=[0, 0],
        hints=Hints(),
        **options,
    )


def test_models_with_states_keep_tails() -> None:
    assert keeps_tails(groups(FULL, STATE))
    assert keeps_tails(groups(STATE, STATE, FULL, WINDOW))


@pytest.mark.parametrize(
    "others",
    [
        groups(FULL),
        groups(FULL, WINDOW),
        groups(STATE),
        groups(FULL, STATE, RING),
        groups(group_shape(block_size=16), STATE),
        groups(FULL, STATE, tokens_ahead=1),
    ],
    ids=["full", "windows", "states alone", "ring", "block sizes", "drafter"],
)
def test_other_models_keep_none(others: SharedGroups) -> None:
    assert not keeps_tails(others)


def test_a_tail_is_named_by_the_block_before_it_and_its_tokens() -> None:
    assert named(70) == tail_name(HASHES[1], list(range(64, 70)))
    assert named(20) != named(20, salt="mine") != named(20, salt="yours")
    assert len({named(end) for end in (20, 30, 70, 95, 100)}) == 5


@pytest.mark.parametrize("begin", [0, 64])
def test_the_name_says_which_adapter_it_is(begin: int) -> None:
    assert len({named(begin + 9, adapter=each) for each in ("", "one", "other")}) == 3


@pytest.mark.parametrize("end", [0, 1, 32, 33, 64, 96, 101, 140])
def test_full_blocks_short_tails_and_unknown_tokens_have_no_name(end: int) -> None:
    """The least part of a block is two tokens here."""
    assert named(end) is None


def test_a_tail_of_a_prompt_that_was_cut_ends_before_the_cut() -> None:
    """The token after that is not the one that vLLM's hashes have seen."""
    assert named(70, hashed_tokens=70) == named(70)
    assert named(71, hashed_tokens=70) is None


def test_tails_with_images_have_no_name() -> None:
    """Their ids are the same whatever they show. A block before the tail has vLLM's hash of it."""
    image = ((40, 68),)
    assert named(38, opaque=image) == named(38)
    assert named(40, opaque=image) == named(40)
    assert named(41, opaque=image) is None
    assert named(63, opaque=image) is None
    assert named(70, opaque=image) is None
    assert named(98, opaque=image) == named(98)


def searched(prompt: SharedPrompt, store: set[tuple[int, bytes]], whole: int) -> int | None:
    """Where the tail ends that a search finds in a store which holds so many full blocks, but none
    of their states."""
    held = [Held.of([True] * whole), Held.of([False] * whole)]
    search = TAILS.search(prompt, prompt.request.num_tokens - 1, held)
    asked = 0
    try:
        names = next(search)
        while True:
            asked += len(names)
            names = search.send([each in store for each in names])
    except StopIteration as found:
        # Of each block the marks, and the tails and their other groups of a few cells.
        assert asked <= (whole + 1) * (7 + 4 * (5 + 4))
        return None if found.value is None else int(found.value.end)


@given(
    st.integers(2, 100),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 110), st.integers(0, 110), st.booleans()), max_size=8),
)
def test_a_search_finds_the_longest_tail_that_a_store_holds(
    length: int, whole: int, stored: list[tuple[int, int, bool]]
) -> None:
    """Tails of requests that part from the prompt somewhere, some of them without a group."""
    tokens = list(range(length))
    prompt, store, right = prompt_of(tokens), set[tuple[int, bytes]](), set[int]()
    whole = min(whole, (length - 1) // BLOCK)
    for end, same, in_all in stored:
        other = [*tokens, *range(1000, 1110)]
        other[same:] = [token + 5000 for token in other[same:]]
        request = prompt_of(other[: max(end, 1)])
        name, mark = TAILS.name(request, end), TAILS.mark(request, end)
        if name is None or mark is None:
            continue
        store |= {(1, mark), (1, name)}
        if in_all:
            store.add((0, name))
            if end <= min(same, length - 1) and end // BLOCK <= whole:
                right.add(end)
    found = searched(prompt, store, whole)
    # Of several that lack a group few are tried.
    assert found == max(right, default=None) or len(stored) > 4
    assert found is None or found in right


def test_the_index_finds_a_tail_by_its_fingerprint() -> None:
    tokens = list(range(50))
    names = [tail_name(b"parent", tokens[:n]) for n in range(1, 51)]
    words = fingerprints(b"parent", tokens)
    for group in (0, 3):
        assert np.array_equal(tags_of(b"p", group, names), tags_of_words(b"p", group, words))
