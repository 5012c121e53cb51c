# SPDX-License-Identifier: Apache-2.0
"""Children of n > 1, retries and rejected requests: who shares slots, and when they go."""

import threading

import pytest

from omni_connector.runtime.shared_work import Helpers
from tests.toy import BLOCK

from .harness import (
    HANDOFF,
    assert_clean,
    hand_off,
    prompt,
    slots,
    wait,
)

pytestmark = pytest.mark.vllm

LENGTH = 6 * BLOCK - 3
PROMPT = prompt(LENGTH)


@pytest.mark.parametrize("family", ["full", "window and full", "all three"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.values
def test_siblings_load_from_one_hand_off_each_under_its_own_lease(engine, family, overlap):
    """With the policy that makes a failed load an error to the client."""
    prefill = engine("kv_producer", family=family)
    decode = engine(
        "kv_consumer", policy="fail", prefix_caching=False, family=family, async_scheduling=overlap
    )
    right = engine(family=family).generate(PROMPT, 6).tokens
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    held = decode.hold(loads=True)
    first, *others = [decode.submit(PROMPT, max_tokens=6, params=answer) for _ in range(3)]
    for each in (first, *others):
        decode.lease_answer(each)
    assert prefill.usage[2] == 3
    decode.run(held.waiting.is_set)
    decode.abort(first)  # its lease ends, and theirs do not
    held.open()
    decode.settle()
    for each in others:
        assert decode.answers[each].tokens == right
    assert not decode.failures()
    assert_clean(prefill, decode)
    assert prefill.usage[0] == 0


@pytest.mark.parametrize("family", ["full", "window and full", "all three"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "uncached"])
@pytest.mark.values
def test_identical_prefills_share_one_set_of_slots(engine, family, caching):
    options = {"family": family, "prefix_caching": caching, "max_tokens_a_step": 4 * BLOCK}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    right = engine(family=family).generate(PROMPT, 6).tokens
    once = prefill.generate(prompt(LENGTH, seed=9), params=HANDOFF)
    alone, saved = prefill.usage[0], prefill.count("blocks_saved")
    ids = [prefill.submit(PROMPT, params=HANDOFF) for _ in range(4)]
    prefill.run(lambda: prefill.done(*ids))
    prefill.settle()
    assert prefill.usage[0] == 2 * alone
    assert prefill.count("blocks_saved") == 2 * saved
    answers = [prefill.answers[each].params for each in ids]
    assert len({answer["omni_token"] for answer in answers}) == 4
    for answer in answers:
        decode.scheduler.reset_prefix_cache()
        assert decode.generate(PROMPT, 6, params=answer).tokens == right
    assert decode.count("handoffs_received") == 4
    decode.generate(prompt(LENGTH, seed=9), params=once.params)
    assert_clean(prefill, decode)


def test_a_request_that_the_server_refused_ends_its_hand_off(engine):
    """vLLM tells of it by a prompt of one token in its place, which it aborts at once."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    assert prefill.usage[0] == 6
    decode.abort(decode.submit([0], params=answer))
    wait(lambda: prefill.usage[0] == 0)
    assert not decode.failures()
    assert_clean(prefill, decode)


def test_a_large_prompt_is_not_overtaken_for_ever_by_small_ones(engine, tokens):
    prefill, decode = engine("kv_producer", extra=slots(8)), engine("kv_consumer")
    small = [prompt(2 * BLOCK + 1, seed) for seed in range(6)]
    answers = [prefill.generate(each, params=HANDOFF).params for each in small[:4]]
    large = prefill.submit(prompt(8 * BLOCK + 1), params=HANDOFF)
    later = [prefill.submit(each, params=HANDOFF) for each in small[4:]]
    prefill.step()
    for each, answer in zip(small[:4], answers, strict=True):
        assert not prefill.done(*later)
        decode.generate(each, params=answer)
        for _ in range(3):
            prefill.step()
    wait(lambda: prefill.usage[0] == 0 or prefill.usage[0] == 8)
    prefill.run(lambda: prefill.done(large))
    assert not prefill.done(*later)
    answer = prefill.answers[large].params
    right = tokens(prompt(8 * BLOCK + 1), 6)
    assert decode.generate(prompt(8 * BLOCK + 1), 6, params=answer).tokens == right
    prefill.run(lambda: prefill.done(*later))
    for each, request_id in zip(small[4:], later, strict=True):
        answer = prefill.answers[request_id].params
        assert decode.generate(each, 6, params=answer).tokens == tokens(each, 6)
    assert decode.count("handoffs_received") == 7
    assert_clean(prefill, decode)


def test_steps_that_compute_nothing_help_with_copies(engine, monkeypatch):
    lent = []
    monkeypatch.setattr(Helpers, "lend", lambda self, needed: lent.append(needed()))
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    held = decode.hold(loads=True)
    decode.submit(PROMPT, max_tokens=6, params=answer)
    lent.clear()
    decode.run(held.waiting.is_set)
    decode.step()
    assert lent[-1] is True
    held.open()
    decode.settle()
    lent.clear()
    decode.generate(prompt(BLOCK), 1)
    assert True not in lent


def test_a_step_that_helps_is_told_of_the_end_of_a_copy(engine, monkeypatch):
    told = []
    monkeypatch.setattr(
        Helpers, "tell_lender", lambda self: told.append(threading.current_thread().name)
    )
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    hand_off(prefill, decode, PROMPT)
    assert set(told) == {"omni-save", "omni-load"}
