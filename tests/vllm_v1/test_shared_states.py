# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in the shared prefix cache: a prompt goes on where a state was kept."""

import dataclasses

import pytest

from omni_connector.plugin import installed_vllm
from omni_connector.prefix import saves
from tests.toy import BLOCK

from . import harness
from .harness import assert_clean, hand_off, prompt
from .places import Place, ask, publish
from .stores import MASTER, PREFIX, QUESTION

pytestmark = pytest.mark.vllm

FAMILIES = ["state and full", "all three"]


@pytest.fixture(params=["arena", "store"])
def place(request, engine, shelf):
    if request.param == "arena":
        return Place(engine, {"share": True}, "tokens_from_host")
    return Place(engine, MASTER, "tokens_shared")


def splits_whole_blocks():
    """Whether vLLM leaves a state before the last block of a prompt that ends with a block.

    Before 0.32 it computes all of it at once: such a prompt cannot be used again by itself.
    """
    major, minor, *_ = installed_vllm().version.split(".")
    return (int(major), int(minor)) >= (0, 32)


@pytest.mark.parametrize(
    ("length", "loaded"),
    [(BLOCK, 0), (3 * BLOCK + 7, 0), (5 * BLOCK, 0), (5 * BLOCK + 1, 5), (6 * BLOCK, 5)],
)
@pytest.mark.values
def test_a_prompt_goes_on_where_a_step_left_a_state(place, engine, length, loaded):
    """vLLM computes all but the last block at once, so there are states after five and six."""
    if not splits_whole_blocks():
        loaded = 0
    first, second = place(family="all three"), place(family="all three")
    publish(place, first)
    question = [*PREFIX[:length], 7]
    if length % BLOCK == 0:
        question = question[:-1]
    assert ask(place, second, question, engine(family="all three")) == loaded * BLOCK
    assert not second.failures()


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.values
def test_every_chunk_of_a_prompt_leaves_a_state(place, engine, family, overlap):
    options = {"family": family, "async_scheduling": overlap, "max_tokens_a_step": 2 * BLOCK + 5}
    first, second, alone = place(**options), place(**options), engine(family=family)
    long = prompt(9 * BLOCK + 3, seed=3)
    publish(place, first, long)
    loaded = [
        ask(place, second, [*long[: blocks * BLOCK + 5], *prompt(40, seed=blocks)], alone)
        for blocks in (3, 7, 8)
    ]
    assert loaded == [2 * BLOCK, 4 * BLOCK, 2 * BLOCK]  # up to 2, 6 and 8 blocks
    assert_clean(first, second)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.values
def test_answers_leave_a_state_in_every_block(place, engine, family, overlap):
    options = {"family": family, "async_scheduling": overlap}
    first, alone = place(**options), engine(family=family)
    reply = publish(place, first, QUESTION, max_tokens=4 * BLOCK)
    told = QUESTION + reply
    for blocks in range(7, (len(told) - 1) // BLOCK + 1):
        second = place(**options)
        again = [*told[: blocks * BLOCK], 11, 12]
        assert ask(place, second, again, alone) == blocks * BLOCK
        assert_clean(second)


def test_states_of_other_tokens_are_noticed_by_these_tests(place, engine, monkeypatch):
    def latest(shape, block_ids, *_):
        """As if the last state were that of the end of every block."""
        return block_ids[-1:] * len(block_ids) if shape.attention_type == "last" else block_ids

    monkeypatch.setattr(saves, "whole_blocks", latest)
    first, second = place(family="all three"), place(family="all three")
    publish(place, first)
    question = [*PREFIX[: 3 * BLOCK], 7]
    answer = second.generate(question, 6).tokens
    assert place.loaded(second) == 3 * BLOCK
    assert answer != engine(family="all three").generate(question, 6).tokens


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_a_handed_off_prompt_and_its_answer_are_found_by_a_third_engine(place, engine, ranks):
    options = {"family": "all three", "ranks": ranks}
    prefill, decode = place("kv_producer", **options), place("kv_consumer", **options)
    alone = engine(**options)
    for length in (5 * BLOCK + 1, 6 * BLOCK, 6 * BLOCK + 5):
        text = prompt(length)
        answer = hand_off(prefill, decode, text, 2 * BLOCK)
        assert answer == alone.generate(text, 2 * BLOCK).tokens
        place.settle(prefill, decode)
        third = place(**options)
        told = [*text, *answer, 3]
        assert ask(place, third, told, alone) == len(told) - 2
    assert_clean(prefill, decode)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_gets_back_the_states_that_its_own_cache_has_evicted(engine, family):
    alone = engine("kv_both", extra={"share": True}, family=family, usable_blocks=60)
    reference = engine(family=family)
    for text in (PREFIX, *(prompt(8 * BLOCK, seed) for seed in range(9))):
        alone.generate(text)
        assert_clean(alone)
    assert alone.generate(QUESTION, 6).tokens == reference.generate(QUESTION, 6).tokens
    assert alone.count("tokens_kept") == 6 * BLOCK
    assert_clean(alone)


def test_states_that_vllm_does_not_keep_are_not_shared(place, engine, monkeypatch):
    """`--prefix-cache-retention-interval 0` has it keep those at the ends of prompts only, at whole
    blocks. The connector keeps the ends of prompts and requests."""
    make = harness.kv_cache_config
    monkeypatch.setattr(
        harness,
        "kv_cache_config",
        lambda *args, **options: dataclasses.replace(
            make(*args, **options), prefix_cache_retention_interval=0
        ),
    )
    options = {"family": "state and full", "max_tokens_a_step": 2 * BLOCK}
    first, second, alone = place(**options), place(**options), engine(family="state and full")
    publish(place, first, QUESTION, max_tokens=3 * BLOCK)
    assert ask(place, second, [*QUESTION[: 4 * BLOCK], 5], alone) == 0
    # Four blocks it has itself now.
    assert ask(place, second, [*QUESTION, 5], alone) == len(QUESTION) - 4 * BLOCK
    assert_clean(first, second)
