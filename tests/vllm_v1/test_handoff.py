# SPDX-License-Identifier: Apache-2.0
"""A prompt prefilled on one engine is decoded on another as if it had been computed there."""

import dataclasses

import pytest

from tests.toy import BLOCK, LAYERS, PAGE, kv_cache_config

from . import harness
from .harness import HANDOFF, InProcessEngine, assert_clean, hand_off, prompt

pytestmark = pytest.mark.vllm

LENGTHS = [
    1,
    2,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    2 * BLOCK - 1,
    4 * BLOCK,
    4 * BLOCK + 1,
    10 * BLOCK - 7,
]
BLOCK_BYTES = LAYERS * PAGE


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk", [4096, 24], ids=["whole", "chunked"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("instant", [False, True], ids=["late", "instant"])
@pytest.mark.values
def test_tokens_are_those_of_a_single_engine(engine, tokens, length, chunk, overlap, instant):
    options = {
        "max_tokens_a_step": chunk,
        "async_scheduling": overlap,
        "instant_copies": instant,
    }
    prefill = engine("kv_producer", **options)
    decode = engine("kv_consumer", **options)
    assert hand_off(prefill, decode, prompt(length)) == tokens(prompt(length), 6)
    # The decode engine computes the last token in any case, so its KV need not come.
    assert prefill.count("handoffs_offered") == (length > 1)
    assert prefill.count("blocks_saved") == -(-(length - 1) // BLOCK)
    assert prefill.count("bytes_saved") == prefill.count("blocks_saved") * BLOCK_BYTES
    assert decode.count("handoffs_received") == (length > 1)
    assert decode.count("tokens_loaded") == length - 1
    assert decode.count("blocks_loaded") == -(-(length - 1) // BLOCK)
    assert decode.count("bytes_loaded") == decode.count("blocks_loaded") * BLOCK_BYTES
    assert not prefill.failures()
    assert not decode.failures()
    assert_clean(prefill, decode)


@pytest.mark.parametrize("length", LENGTHS[1:])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_a_connector_that_moves_nothing_is_found_out(engine, tokens, length, overlap):
    options = {"connector": "NoOpConnector", "async_scheduling": overlap}
    prefill = engine("kv_producer", **options)
    decode = engine("kv_consumer", **options)
    assert hand_off(prefill, decode, prompt(length)) != tokens(prompt(length), 6)


def test_the_prefill_engine_answers_with_the_first_token(engine, tokens):
    prefill = engine("kv_producer")
    answer = prefill.generate(prompt(50), params=HANDOFF)
    assert answer.tokens == tokens(prompt(50), 1)
    assert answer.params["do_remote_prefill"] is True
    assert answer.params["do_remote_decode"] is False
    assert answer.params["remote_engine_id"] == prefill.engine_id


def test_requests_without_handoff_leave_the_arena_alone(engine, tokens):
    both = engine("kv_both")
    assert both.generate(prompt(50), 4).tokens == tokens(prompt(50), 4)
    assert both.generate(prompt(50), 4, params={}).tokens == tokens(prompt(50), 4)
    assert both.usage == (0, 0, 0)
    assert_clean(both)


def test_an_engine_takes_its_own_handoff(engine, tokens):
    both = engine("kv_both", prefix_caching=False)
    assert hand_off(both, both, prompt(90)) == tokens(prompt(90), 6)
    assert both.count("tokens_loaded") == 89
    assert_clean(both)


def test_blocks_that_depend_on_later_tokens_are_nobody_elses(engine, monkeypatch):
    """As in models that attend to all of a prompt: vLLM turns its prefix caching off."""

    def non_causal(*args, **kwargs):
        config = kv_cache_config(*args, **kwargs)
        for group in config.kv_cache_groups:
            group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, non_causal=True)
        return config

    monkeypatch.setattr(harness, "kv_cache_config", non_causal)
    prefill = engine("kv_producer", prefix_caching=False)
    for seed in range(2):
        prefill.generate(prompt(64) + prompt(20, seed=seed), params=HANDOFF)
    one, other = prefill.handoffs
    assert not set(one.slots[0].tolist()) & set(other.slots[0].tolist())


def test_what_the_decode_engine_holds_is_not_moved(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    full = prompt(10 * BLOCK + 3)
    assert decode.generate(full[: 6 * BLOCK + 5], 1).tokens == tokens(full[: 6 * BLOCK + 5], 1)
    assert hand_off(prefill, decode, full) == tokens(full, 6)
    assert decode.count("tokens_loaded") == 4 * BLOCK + 2
    assert decode.count("blocks_loaded") == 5
    assert decode.count("bytes_loaded") == 5 * BLOCK_BYTES
    assert_clean(prefill, decode)


def test_a_prompt_held_but_for_its_last_block_moves_only_that(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    decode.generate(prompt(4 * BLOCK), 1)
    assert hand_off(prefill, decode, prompt(4 * BLOCK)) == tokens(prompt(4 * BLOCK), 6)
    assert decode.count("blocks_loaded") == 1  # vLLM never takes a whole prompt from its cache
    assert_clean(prefill, decode)


def test_a_shared_prefix_is_copied_to_slots_once(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", prefix_caching=False)
    prefix = prompt(5 * BLOCK)
    first, second = prefix + prompt(20, seed=1), prefix + prompt(37, seed=2)
    assert hand_off(prefill, decode, first) == tokens(first, 6)
    assert prefill.count("blocks_saved") == 5 + 2
    assert hand_off(prefill, decode, second) == tokens(second, 6)
    assert prefill.count("blocks_saved") == 5 + 2 + 3
    assert decode.count("blocks_loaded") == 7 + 8
    assert_clean(prefill, decode)


def test_prompts_of_different_salts_share_nothing(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", prefix_caching=False)
    for salt in ("a", "b"):
        request_id = prefill.submit(prompt(50), params=HANDOFF, salt=salt)
        prefill.settle()
        answer = prefill.answers[request_id].params
        request_id = decode.submit(prompt(50), max_tokens=6, params=answer, salt=salt)
        decode.settle()
        assert decode.answers[request_id].tokens == tokens(prompt(50), 6)
    assert prefill.count("blocks_saved") == 8
    assert decode.count("handoffs_received") == 2
    assert_clean(prefill, decode)


def test_a_decode_request_of_another_salt_gets_nothing(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(prompt(50), params=HANDOFF).params
    request_id = decode.submit(prompt(50), max_tokens=6, params=answer, salt="other")
    decode.settle()
    assert decode.answers[request_id].tokens == tokens(prompt(50), 6)
    assert decode.failures() == {"other_prompt": 1}


def test_a_prefill_that_generates_more_than_one_token_is_handed_off(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(prompt(40), 5, params=HANDOFF)
    assert answer.tokens == tokens(prompt(40), 5)
    assert decode.generate(prompt(40), 6, params=answer.params).tokens == tokens(prompt(40), 6)
    assert decode.count("tokens_loaded") == 39
    assert_clean(prefill, decode)


def test_a_prefill_only_engine_and_a_decode_only_engine_ignore_the_other_half(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = decode.generate(prompt(40), params=HANDOFF)
    assert answer.tokens == tokens(prompt(40), 1)
    assert answer.params is None
    offered = engine("kv_producer").generate(prompt(40), params=HANDOFF).params
    assert prefill.generate(prompt(40), 6, params=offered).tokens == tokens(prompt(40), 6)
    assert prefill.count("handoffs_received") == 0


def test_reference_engines_agree_however_they_chunk(engine):
    engines = [
        engine(),
        engine(max_tokens_a_step=24, prefix_caching=False),
        engine(max_tokens_a_step=9, async_scheduling=True),
    ]
    assert all(isinstance(each, InProcessEngine) for each in engines)
    answers = [each.generate(prompt(100), 8).tokens for each in engines]
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 1
