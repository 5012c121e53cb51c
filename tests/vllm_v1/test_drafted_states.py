# SPDX-License-Identifier: Apache-2.0
"""Recurrent states with speculative decoding: a step leaves one after each draft, in blocks that
follow the one of the state before, and only the next step knows which of them is right."""

import math
import random

import pytest

from omni_connector.copy.held_blocks import CopyLedger
from omni_connector.handoff.truncation import goes_on_after
from omni_connector.prefix import saves
from omni_connector.prefix.saves import PrefixSaves
from tests import toy, toy_runner
from tests.toy import BLOCK, GROUPS

from .harness import assert_clean, hand_off, lose_loads, prompt, run
from .stores import PREFIX, QUESTION, publish

pytestmark = pytest.mark.vllm

FAMILIES = ["state and full", "all three", "all and a ring", "state, full and drafter"]
LENGTHS = (2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 3 * BLOCK, 5 * BLOCK + 7)
of_all = pytest.mark.parametrize("family", FAMILIES)
overlapping = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])


def options_of(family, drafts, **options):
    without_kv = "ngram_gpu" if options.get("async_scheduling") else "ngram"
    drafter = "mtp" if "drafter" in family else without_kv
    return {"family": family, "drafter": drafter, "drafts": drafts, **options}


def drafting(engine, drafts):
    """Have an engine propose tokens of which some are right; returns it."""
    right = toy.reference(tuple(k for k in toy.kinds_of(engine.kv_config) if not ahead(k)))

    def proposed(token_ids):
        draw, known = random.Random(len(token_ids)), list(token_ids)
        for _ in range(drafts):
            known.append(right.next_token(b"", known) if draw.random() < 0.7 else 7)
        return known[len(token_ids) :]

    engine.runner.proposed = proposed
    return engine


def ahead(kind):
    return kind.attention == "ahead"


def target(family):
    """The same model without a drafter's KV."""
    return family.replace(", full and drafter", " and full")


@pytest.mark.shows(
    "recurrent states beside drafts: hand-offs",
    control="test_a_hand_off_without_the_state_is_found_out",
)
@of_all
@overlapping
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "uncached"])
@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.values
def test_a_state_is_handed_off_and_goes_on_with_drafts(engine, family, overlap, caching, drafts):
    plain = engine(family=target(family), prefix_caching=caching)
    options = options_of(family, drafts, async_scheduling=overlap, prefix_caching=caching)
    prefill = drafting(engine("kv_producer", **options), drafts)
    decode = drafting(engine("kv_consumer", **options), drafts)
    for length in LENGTHS:
        asked = prompt(length)
        assert (
            hand_off(prefill, decode, asked, 3 * BLOCK) == plain.generate(asked, 3 * BLOCK).tokens
        )
    assert decode.count("handoffs_received") == len(LENGTHS)
    assert not decode.failures()
    assert_clean(prefill, decode)


@of_all
def test_a_hand_off_without_the_state_is_found_out(engine, family, monkeypatch):
    options = options_of(family, 3)
    prefill = drafting(engine("kv_producer", **options), 3)
    decode = drafting(engine("kv_consumer", **options), 3)
    lose_loads(decode, GROUPS[family].index("state"), monkeypatch)
    asked = prompt(3 * BLOCK)
    expected = engine(family=target(family)).generate(asked, 6).tokens
    assert hand_off(prefill, decode, asked) != expected


@of_all
def test_a_model_that_takes_the_state_of_a_wrong_draft_is_found_out(engine, family, monkeypatch):
    """A control of the toy: vLLM's own moves of states are what these tests rely on."""
    monkeypatch.setattr(
        toy_runner._State,
        "accept",
        lambda self, table, end, known, accepted: ((-(-end // self.block_size) - 1, 0), None),
    )
    alone = drafting(engine(**options_of(family, 3)), 3)
    plain = engine(family=target(family))
    asked = prompt(3 * BLOCK)
    assert alone.generate(asked, 40).tokens != plain.generate(asked, 40).tokens


# Shared prefixes


@of_all
@overlapping
@pytest.mark.parametrize("step", [4096, 2 * BLOCK], ids=["whole", "chunks"])
@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.values
def test_the_states_of_a_prompt_are_shared(sharer, shelf, engine, family, overlap, drafts, step):
    options = options_of(family, drafts, async_scheduling=overlap, max_tokens_a_step=step)
    first, second = (drafting(sharer(**options), drafts) for _ in range(2))
    publish(first, shelf)
    answer = second.generate(QUESTION, 3 * BLOCK).tokens
    assert answer == engine(family=target(family)).generate(QUESTION, 3 * BLOCK).tokens
    assert second.count("tokens_shared") >= len(PREFIX) - 3 * BLOCK
    assert not second.failures()
    assert_clean(first, second)


@pytest.mark.parametrize("more", range(1, 6))
def test_with_several_modules_too(sharer, shelf, engine, more):
    """What is left of the prompt may be less than the modules read ahead."""
    options = options_of("state, full and drafter", 3, drafter="modules")
    first, second = (drafting(sharer(**options), 3) for _ in range(2))
    publish(first, shelf)
    asked = [*PREFIX[: 4 * BLOCK], *prompt(more)]
    plain = engine(family="state and full")
    assert second.generate(asked, 3 * BLOCK).tokens == plain.generate(asked, 3 * BLOCK).tokens
    assert not second.failures()
    assert_clean(first, second)


class WrongState(AssertionError):
    """After a state that it has loaded, an engine answers otherwise than it should."""


def answers_shared(first, second, shelf, plain):
    """Have one engine answer prompts, and another go on from each end of a block in these answers.

    Returns:
        The number of these ends at which a prefix may end; and how many of these states the second
        engine has found.

    Raises:
        WrongState: the second engine goes on otherwise than the first.
    """
    unit = math.lcm(*(group.kv_cache_spec.block_size for group in first.kv_config.kv_cache_groups))
    ends = found = 0
    for seed in range(6):
        asked = prompt(BLOCK + 5 * seed, seed=seed)
        reply = publish(first, shelf, asked, max_tokens=10 * BLOCK).tokens
        assert reply == plain.generate(asked, 10 * BLOCK).tokens
        known = asked + reply
        # Each time the second has computed all that comes before, so only the state is missing.
        for end in range(-(-len(asked) // unit) * unit, len(known) - 5, unit):
            before = second.count("tokens_shared")
            answer = second.generate(known[: end + 2], 3).tokens
            if answer != known[end + 2 : end + 5]:
                raise WrongState
            ends += 1
            found += second.count("tokens_shared") > before
    return ends, found


@pytest.mark.shows(
    "recurrent states beside drafts: shared prefixes, also within answers",
    control="test_a_state_whose_block_vllm_has_given_away_is_found_out",
)
@of_all
@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.values
def test_all_states_within_answers_are_shared_where_vllm_runs_ahead(
    sharer, shelf, engine, family, drafts
):
    options = options_of(family, drafts, async_scheduling=True, instant_copies=True)
    first, second = (drafting(sharer(**options), drafts) for _ in range(2))
    plain = engine(family=target(family))
    ends, found = answers_shared(first, second, shelf, plain)
    assert found == ends > 10
    assert not second.failures()
    assert_clean(first, second)


@of_all
@pytest.mark.parametrize(("drafts", "least"), [(1, 1.0), (3, 0.6)])
@pytest.mark.values
def test_where_vllm_does_not_run_ahead_only_states_with_a_hash_are_shared(
    sharer, shelf, engine, family, drafts, least
):
    """A state after two drafts or more that are right gets none, unless it is the step's last."""
    options = options_of(family, drafts, instant_copies=True)
    first, second = (drafting(sharer(**options), drafts) for _ in range(2))
    plain = engine(family=target(family))
    ends, found = answers_shared(first, second, shelf, plain)
    assert found >= least * ends
    assert not second.failures()
    assert_clean(first, second)


def wrong_after_many(first, second, plain):
    """Have one engine answer many prompts at once, so that blocks that one request frees go to
    others, and another go on from each end of a block in these answers; the number of answers of
    either that are wrong."""
    asked = [prompt(BLOCK + 7 * seed, seed=seed) for seed in range(6)]
    sent = [first.submit(each, max_tokens=8 * BLOCK) for each in asked]
    run([first], lambda: first.done(*sent))
    wrong = 0
    for each, one in zip(asked, sent, strict=True):
        known = each + first.answers[one].tokens
        wrong += known != each + plain.generate(each, 8 * BLOCK).tokens
        for end in range(-(-len(each) // BLOCK) * BLOCK, len(known) - 5, BLOCK):
            wrong += second.generate(known[: end + 2], 3).tokens != known[end + 2 : end + 5]
    return wrong


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_state_whose_block_vllm_has_given_away_is_found_out(sharer, engine, family, monkeypatch):
    """A control: blocks that vLLM has freed are taken although it has used them anew."""
    monkeypatch.setattr(CopyLedger, "is_free", lambda self, block_id: True)
    monkeypatch.setattr(saves, "whole_blocks", lambda shape, block_ids, *_: block_ids)
    options = options_of(family, 3, instant_copies=True)
    first, second = (drafting(sharer(**options, usable_blocks=n), 3) for n in (70, 200))
    assert wrong_after_many(first, second, engine(family=target(family)))


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_a_state_that_is_kept_before_it_is_in_place_is_found_out(
    sharer, shelf, engine, family, monkeypatch
):
    """A control: where drafts are in a step, the block of a state holds an earlier one for now.

    With a drafter that has KV, blocks have their names only a step later.
    """
    build = PrefixSaves.build
    monkeypatch.setattr(PrefixSaves, "build", lambda self, *args: build(self, *args[:3]))
    options = options_of(family, 3, instant_copies=True)
    first, second = (drafting(sharer(**options), 3) for _ in range(2))
    plain = engine(family=target(family))
    wrong = 0
    for seed in range(6):
        asked = prompt(BLOCK + 5 * seed, seed=seed)
        reply = publish(first, shelf, asked, max_tokens=7 * BLOCK).tokens
        again = asked + reply + prompt(9, seed=2)
        wrong += second.generate(again, 6).tokens != plain.generate(again, 6).tokens
    assert wrong


@pytest.mark.parametrize(
    ("loaded", "prompt", "ahead", "goes_on"),
    [
        (15, 16, 1, True),
        (15, 17, 2, False),
        (14, 16, 2, True),
        (16, 18, 2, True),
        (14, 17, 3, False),
        (13, 16, 3, True),
        (31, 34, 3, False),
    ],
)
def test_where_vllm_stops_before_the_last_tokens(loaded, prompt, ahead, goes_on):
    assert goes_on_after(loaded, prompt, ahead=ahead, state_block=BLOCK) is goes_on
    assert goes_on_after(loaded, prompt, ahead=ahead, state_block=0)
