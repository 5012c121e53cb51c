# SPDX-License-Identifier: Apache-2.0
"""Drafters with KV of their own, which depends on the tokens after a position: the toy's.

The runner compares, position by position, what a drafter finds of tokens that others have computed.
"""

import copy

import pytest

from omni_connector.errors import ConfigError
from omni_connector.vllm_v1.drafter import drafter_id, require_supported_drafter, tokens_ahead
from tests import inspection
from tests.toy import BLOCK, DRAFTED, LAYERS
from tests.toy_runner import WrongBytes

from .harness import HANDOFF, SEVERAL_MODULES, prompt

pytestmark = pytest.mark.vllm

LENGTHS = (2, 5, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5)
WAYS = [("mtp", 1), ("mtp", 3), ("modules", 2)]

of_all = pytest.mark.parametrize("family", DRAFTED)
by_way = pytest.mark.parametrize(("drafter", "drafts"), WAYS)


@pytest.mark.shows(
    "the same drafter on both sides: every page of its KV",
    control="test_a_drafter_that_finds_other_kv_is_noticed",
)
@of_all
@by_way
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.values
def test_the_drafter_finds_what_its_tokens_give(engine, family, drafter, drafts, length):
    options = {"family": family, "drafter": drafter, "drafts": drafts}
    prefill = engine("kv_producer", **options)
    decode = engine("kv_consumer", **options)
    tokens = prompt(length)
    right = engine(None, **options).generate(tokens, 6).tokens
    other: list[int] = []
    if drafter == "modules" and family != "full and drafter":
        # The prefill engine stops early, and does not know the token that the last module reads.
        decode.runner.drafter_differs = lambda _, position, *found: other.append(position)
    params = prefill.generate(tokens, 1, HANDOFF).params
    left = drafts if drafter == "modules" else 1
    if length <= left:
        assert params["omni_no_handoff"] == "nothing_to_hand_off"
        return
    assert decode.generate(tokens, 6, params).tokens == right
    in_block = (length - left) % BLOCK
    if "state" in family and in_block and in_block + left > BLOCK:
        assert decode.failures() == {"state_boundary": 1}
        return
    assert decode.stats.data["counts"]["tokens_loaded"] == length - left
    assert set(other) <= {length - left - 1}


OTHER_STAGES = [((1,), (1,)), ((1,), ()), ((), (1,)), ((1,), (1, LAYERS + 1))]


@pytest.mark.shows(
    "the same drafter on both sides, with pipeline stages",
    control="test_a_drafter_that_finds_other_kv_is_noticed",
)
@of_all
@pytest.mark.parametrize(("theirs", "ours"), OTHER_STAGES, ids=str)
@pytest.mark.parametrize("length", [5, 3 * BLOCK + 5])
@pytest.mark.values
def test_pipeline_stages_have_the_drafter_in_the_last(engine, family, theirs, ours, length):
    options = {"family": family, "drafter": "mtp", "drafts": 1}
    prefill = engine("kv_producer", stages=theirs, **options)
    decode = engine("kv_consumer", stages=ours, **options)
    tokens = prompt(length)
    right = engine(None, **options).generate(tokens, 6).tokens
    params = prefill.generate(tokens, 1, HANDOFF).params
    assert decode.generate(tokens, 6, params).tokens == right
    assert decode.stats.data["counts"]["tokens_loaded"] == length - 1


@of_all
@pytest.mark.parametrize("stages", [(), (1,)], ids=["one stage", "two stages"])
def test_a_drafter_that_finds_other_kv_is_noticed(engine, family, stages):
    options = {"family": family, "drafter": "mtp", "drafts": 1, "stages": stages}
    prefill = engine("kv_producer", **options)
    decode = engine("kv_consumer", **options)
    prefill.runner.tokens_ahead = 0  # it leaves what no other drafter computes
    params = prefill.generate(prompt(30), 1, HANDOFF).params
    with pytest.raises(WrongBytes, match="position"):
        decode.generate(prompt(30), 6, params)


def test_prompts_that_differ_in_the_next_token_alone_share_no_slot(engine):
    options = {"family": "full and drafter", "drafter": "mtp", "drafts": 1}
    prefill = engine("kv_producer", prefix_caching=False, **options)
    decode = engine("kv_consumer", prefix_caching=False, **options)
    shared = prompt(2 * BLOCK)
    answers = []
    for last in (7, 8):
        tokens = [*shared, last]
        answers.append((tokens, prefill.generate(tokens, 1, HANDOFF).params))
    for tokens, params in answers:
        decode.generate(tokens, 3, params)
    # Nor does a decode engine take the hand-off of the one for the other.
    tokens, params = answers[0]
    decode.generate([*shared, 8], 3, prefill.generate(tokens, 1, HANDOFF).params)
    assert decode.failures() == {"other_prompt": 1}


def test_a_shortened_prompt_is_answered_with_the_token_that_follows(engine):
    options = {"family": "window, full and drafter", "drafter": "mtp", "drafts": 1}
    prefill = engine("kv_producer", **options)
    tokens = prompt(30)
    assert prefill.generate(tokens, 1, HANDOFF).tokens == [tokens[-1]]


@pytest.mark.parametrize("drafter", ["ngram", "mtp", "modules"])
def test_tokens_ahead_are_those_that_the_drafter_reads(engine, drafter):
    family = "full" if drafter == "ngram" else "full and drafter"
    made = engine("kv_both", family=family, drafter=drafter, drafts=3)
    assert tokens_ahead(made.config) == {"ngram": 0, "mtp": 1, "modules": 3}[drafter]


def test_a_drafter_of_which_nothing_is_known_is_refused(engine):
    made = engine(None, family="full and drafter", drafter="mtp", drafts=1)
    made.config.speculative_config.method = "dflash"
    with pytest.raises(ConfigError, match="dflash"):
        require_supported_drafter(made.config)


@by_way
def test_a_shared_block_is_that_of_the_same_next_tokens(engine, drafter, drafts):
    options = {
        "family": "full and drafter",
        "drafter": drafter,
        "drafts": drafts,
        "extra": {"share": True},
        "instant_copies": True,
        "usable_blocks": 24,
    }
    sharer = engine("kv_both", **options)
    shared = prompt(3 * BLOCK)
    sharer.generate([*shared, *prompt(9, 1)], 1)
    for seed in range(2, 8):  # until vLLM's own cache has lost it
        sharer.generate(prompt(9 * BLOCK, seed), 1)
    before = sharer.stats.data["counts"].get("tokens_kept", 0)
    sharer.generate([*shared, *prompt(9, 9)], 1)
    # Of the last block the drafter's KV depends on the token after it.
    assert sharer.stats.data["counts"].get("tokens_kept", 0) - before == 2 * BLOCK


def test_beside_a_drafter_no_block_waits_for_its_copy(engine):
    """vLLM's hash of a block may be that of a later block with other next tokens."""
    options = {"family": "full and drafter", "drafter": "mtp", "drafts": 1}
    extra = {"share": True}
    alone = engine("kv_both", extra=extra, usable_blocks=24, **options)
    held = alone.hold(saves=True)
    asked = alone.submit(prompt(9 * BLOCK), max_tokens=1)
    alone.run(lambda: alone.done(asked))
    assert not inspection.waiting(alone.half)
    assert alone.count("blocks_dropped") > 0
    held.open()
    alone.settle()


def drafter(engine, *changes):
    """The identity of a drafter whose configuration is changed so."""
    config = copy.deepcopy(engine.config)
    for change in changes:
        change(config.speculative_config)
    return drafter_id(config, lambda model: None)


def test_a_drafter_is_known_by_all_that_its_kv_depends_on(engine):
    made = engine(None, family="full and drafter", drafter="mtp", drafts=3)
    changes = [
        lambda speculative: setattr(speculative, "method", "eagle"),
        lambda speculative: setattr(speculative.draft_model_config, "model", "other"),
        lambda speculative: setattr(speculative.draft_model_config, "revision", "other"),
        lambda speculative: setattr(
            speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", [1, 2]
        ),
        lambda speculative: setattr(
            speculative.draft_model_config.hf_config, "num_nextn_predict_layers", 3
        ),
        lambda speculative: setattr(speculative, "parallel_drafting", True),
    ]
    if not SEVERAL_MODULES:
        del changes[4]
    found = [drafter(made), *(drafter(made, each) for each in changes)]
    assert len(set(found)) == len(found)
    # How many tokens it drafts makes no difference to the KV of those before them.
    assert drafter(made, lambda each: setattr(each, "num_speculative_tokens", 2)) == found[0]
    assert drafter_id(made.config, lambda model: "the same files") != found[0]
