# SPDX-License-Identifier: Apache-2.0
"""Hand-offs share an arena that may be too small for all of them."""

import pytest

from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, hand_off, prompt, slots

pytestmark = pytest.mark.vllm

LENGTH = 4 * BLOCK - 3


def test_others_overtake_a_handoff_that_waits(engine, tokens):
    prefill = engine("kv_both", extra=slots(4))
    prefill.generate(prompt(LENGTH), params=HANDOFF)
    waiting = prefill.submit(prompt(LENGTH, seed=1), params=HANDOFF)
    local = prefill.submit(prompt(LENGTH, seed=2), max_tokens=3)
    prefill.run(lambda: prefill.done(local))
    assert prefill.answers[local].tokens == tokens(prompt(LENGTH, seed=2), 3)
    assert not prefill.done(waiting)
    prefill.abort(waiting)
    prefill.settle()


def test_after_its_time_a_waiting_handoff_is_given_up(engine, tokens, log):
    prefill = engine("kv_producer", extra={**slots(4), "arena_wait_s": 0.1})
    decode = engine("kv_consumer")
    first = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    late = prefill.generate(prompt(LENGTH, seed=1), params=HANDOFF)
    assert late.tokens == tokens(prompt(LENGTH, seed=1), 1)
    assert late.params["omni_no_handoff"] == "arena_full"
    assert late.params["do_remote_prefill"] is False
    assert prefill.failures() == {"arena_full": 1}
    assert len(log) == 1
    assert "arena" in log[0]
    for seed, answer in enumerate((first, late.params)):
        got = decode.generate(prompt(LENGTH, seed), 6, params=answer).tokens
        assert got == tokens(prompt(LENGTH, seed), 6)
    assert decode.count("handoffs_received") == 1
    assert not decode.failures()
    assert len(log) == 2
    assert "the prefill engine hands nothing off (its arena is full)" in log[1]
    assert_clean(prefill, decode)


def test_a_prompt_larger_than_the_arena_is_answered_at_once(engine, tokens, log):
    prefill = engine("kv_producer", extra=slots(4))  # and no time to wait for more: 10 s
    decode = engine("kv_consumer")
    large = prompt(4 * BLOCK + 2)
    request_id = prefill.submit(large, params=HANDOFF)
    prefill.step()
    answer = prefill.answers[request_id]
    assert answer.tokens == tokens(large, 1)
    assert answer.params["omni_no_handoff"] == "prompt_too_long"
    assert prefill.failures() == {"prompt_too_long": 1}
    assert len(log) == 1
    assert "arena_gib" in log[0]
    assert decode.generate(large, 6, params=answer.params).tokens == tokens(large, 6)
    assert_clean(prefill, decode)


def test_a_prompt_as_large_as_the_arena_is_handed_off(engine, tokens):
    prefill, decode = engine("kv_producer", extra=slots(4)), engine("kv_consumer")
    for seed in range(3):
        each = prompt(4 * BLOCK + 1, seed)
        assert hand_off(prefill, decode, each) == tokens(each, 6)
    assert decode.count("handoffs_received") == 3
    assert_clean(prefill, decode)
