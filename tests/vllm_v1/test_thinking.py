# SPDX-License-Identifier: Apache-2.0
"""Of an answer that thinks, blocks are kept up to its first thought: no later prompt has more."""

import copy

import pytest

from omni_connector.prefix.thinking import ThinkingTokens
from omni_connector.vllm_v1.compat import thinking_tokens
from tests.toy import BLOCK

from .harness import assert_clean, prompt

pytestmark = pytest.mark.vllm

CLOSED = 1  # a token that the toy answers never
ANSWER = 5 * BLOCK
ASKED = prompt(3 * BLOCK + 4, seed=9)
EXTRA = {"share": True}
# Its prompt has three full blocks. The first token of the answer is at its place 4 of a block.
THOUGHT = {"at once": 0, "in the first block": 7, "later": 2 * BLOCK + 5}

by_place = pytest.mark.parametrize("place", THOUGHT.values(), ids=list(THOUGHT))


@pytest.fixture
def answered(engine):
    """Has an engine answer, and returns how many tokens of blocks it has kept."""

    def ask(place, asked=ASKED, params=None, xargs=None, extra=None, opens=None, **options):
        tokens = engine(None).generate(asked, ANSWER).tokens
        if opens is None:
            opens = tokens[place]
            assert opens not in tokens[:place]
        made = engine(
            "kv_both",
            extra={**EXTRA, **(extra or {})},
            thinking=(opens, CLOSED),
            instant_copies=True,
            **options,
        )
        found = made.generate(asked, ANSWER, params, xargs=xargs)
        assert found.tokens == tokens
        assert_clean(made)
        return made, made.count("blocks_saved") * BLOCK

    return ask


@pytest.mark.shows(
    "answers of reasoning models are kept up to their first thought",
    control="test_an_engine_that_is_not_told_keeps_the_answer",
)
@by_place
def test_an_answer_is_kept_up_to_its_first_thought(answered, place):
    made, kept = answered(place)
    assert kept == (len(ASKED) + place) // BLOCK * BLOCK
    assert made.count("answers_cut") == 1


def test_an_answer_that_is_computed_anew_after_new_weights_counts_once(engine):
    place = THOUGHT["later"]
    tokens = engine(None).generate(ASKED, ANSWER).tokens
    made = engine("kv_both", extra=EXTRA, thinking=(tokens[place], CLOSED), instant_copies=True)
    request_id = made.submit(ASKED, max_tokens=3 * ANSWER)
    for new in (b"new", b"newer"):
        said = len(made.answers[request_id].tokens)
        made.run(lambda said=said: len(made.answers[request_id].tokens) > said + place + BLOCK)
        assert not made.done(request_id)
        made.runner.weights = new
        assert made.scheduler.reset_prefix_cache(reset_running_requests=True)
        kept = made.count("blocks_saved")
    made.run(lambda: made.done(request_id))
    assert made.count("blocks_saved") > kept  # it was considered anew
    assert made.count("answers_cut") == 1
    assert_clean(made)


@pytest.mark.parametrize("family", ["window and full", "state and full"])
def test_so_is_that_of_a_hybrid(engine, family):
    place = THOUGHT["later"]
    tokens = engine(None, family=family).generate(ASKED, ANSWER).tokens
    made = {}
    for opens in (tokens[place], CLOSED):
        sharer = engine(
            "kv_both", extra=EXTRA, thinking=(opens, 2), instant_copies=True, family=family
        )
        assert sharer.generate(ASKED, ANSWER).tokens == tokens
        assert_clean(sharer)
        made[opens] = sharer.count("blocks_saved")
        sharer.shutdown()  # what it has kept, the next one would not keep again
    # The blocks that only the answer fills beyond the first thought, in both groups.
    assert 0 < made[tokens[place]] < made[CLOSED]


def test_a_later_turn_without_the_thoughts_finds_as_much(engine, answered):
    place = THOUGHT["later"]
    made, _ = answered(place, usable_blocks=16)
    tokens = made.answers[next(iter(made.answers))].tokens
    turn = [*ASKED, *tokens[:place], *prompt(40, seed=4)]
    for seed in range(10, 16):  # until vLLM's own cache has lost it
        made.generate(prompt(9 * BLOCK, seed=seed), 1)
    before = made.count("tokens_kept")
    right = engine(None).generate(turn, 4).tokens
    assert made.generate(turn, 4).tokens == right
    assert made.count("tokens_kept") - before == (len(ASKED) + place) // BLOCK * BLOCK


def test_a_prompt_may_open_the_thoughts(answered):
    _, kept = answered(0, asked=[*ASKED, 2, 499], opens=2)
    assert kept == CUT


def test_a_prompt_may_close_them_where_the_model_is_not_to_think(answered):
    _, kept = answered(0, asked=[*ASKED, 2, CLOSED], opens=2)
    assert kept == WHOLE


WHOLE = (len(ASKED) + ANSWER - 1) // BLOCK * BLOCK
CUT = len(ASKED) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("hints", "kept"),
    [
        ({"thinking": "keep"}, WHOLE),
        ({"thinking": "drop"}, CUT),
        ({}, CUT),
        # Who wants its blocks kept wants them all.
        ({"pin_s": 60}, WHOLE),
        ({"pin_s": 60, "thinking": "drop"}, CUT),
        ({"cache": "no"}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["params", "xargs"])
@pytest.mark.values
def test_a_request_has_a_say(answered, hints, kept, way):
    told = {"params": {"omni": hints}} if way == "params" else {}
    if way == "xargs":
        told = {"xargs": {f"omni_{name}": value for name, value in hints.items()}}
    assert answered(0, **told)[1] == kept


def test_a_hint_that_the_operator_does_not_allow_is_not_followed(answered):
    made, kept = answered(0, extra={"hints": ["no"]}, params={"omni": {"thinking": "keep"}})
    assert kept == CUT
    assert made.count("hints_refused") == 1


def test_an_engine_that_is_not_told_keeps_the_answer(engine):
    made = engine("kv_both", extra=EXTRA, instant_copies=True)
    made.generate(ASKED, ANSWER)
    assert made.count("blocks_saved") * BLOCK == WHOLE
    assert not made.count("answers_cut")


def test_vllm_tells_the_tokens_in_the_engine_core(engine, monkeypatch):
    """Its front end finds them by the tokenizer, and sends the configuration to the engine core."""
    module = pytest.importorskip("vllm.config.reasoning")

    class Tokenizer:
        def encode(self, text, add_special_tokens):
            return [ord(each) for each in text]

    monkeypatch.setattr(module, "cached_tokenizer_from_config", lambda **_: Tokenizer())
    config = copy.copy(engine(None).config)
    told = module.ReasoningConfig(reasoning_start_str="<t>", reasoning_end_str="</t>")
    told.initialize_token_ids(config.model_config)
    config.reasoning_config = copy.deepcopy(told)
    asked = ThinkingTokens(tuple(map(ord, "<t>")), tuple(map(ord, "</t>")))
    assert thinking_tokens(config) == asked
    config.reasoning_config = module.ReasoningConfig(reasoning_parser="of which nothing is known")
    assert thinking_tokens(config) is None
    config.reasoning_config = None
    assert thinking_tokens(config) is None
