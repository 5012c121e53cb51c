# SPDX-License-Identifier: Apache-2.0
"""The same transfers under every model runner that drives a connector."""

import pytest

from tests.toy import BLOCK

from .harness import (
    HANDOFF,
    assert_clean,
    hand_off,
    prompt,
    run,
)
from .runners import spoil_a_slot, trio
from .stores import QUESTION, landed, publish

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)


@pytest.mark.parametrize("length", [BLOCK - 5, BLOCK, 5 * BLOCK + 1, 20 * BLOCK])
@pytest.mark.values
def test_a_hand_off_arrives(engine, runner, family, length):
    prefill, decode, reference = trio(
        engine, runner, family=family, max_tokens_a_step=4 * BLOCK, usable_blocks=90
    )
    text = prompt(length)
    for again in (False, True):
        assert hand_off(prefill, decode, text) == reference.generate(text, 6).tokens
        if not again:
            assert decode.count("handoffs_received") == 1
            assert decode.count("blocks_loaded") == prefill.count("blocks_saved") > 0
        assert_clean(prefill, decode)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.values
def test_many_at_once_arrive(engine, tokens, runner, overlap):
    options = {"async_scheduling": overlap, "lifecycle": runner()}
    both = engine("kv_both", max_tokens_a_step=3 * BLOCK, **options)
    decode = engine("kv_consumer", **options | {"lifecycle": runner()})
    texts = [prompt(length, seed=5) for length in range(BLOCK, 9 * BLOCK, 25)]
    handed = [both.submit(text, params=HANDOFF) for text in texts]
    both.run(lambda: both.done(*handed))
    decoding = [
        decode.submit(text, max_tokens=4, params=both.answers[request_id].params)
        for text, request_id in zip(texts, handed, strict=True)
    ]
    run([both, decode], lambda: decode.done(*decoding))
    assert [decode.answers[each].tokens for each in decoding] == [tokens(t, 4) for t in texts]
    assert decode.count("handoffs_received") == len(texts)
    assert_clean(both, decode)


@pytest.mark.values
def test_a_failed_load_is_computed_instead(engine, runner, family):
    prefill, decode, reference = trio(engine, runner, family=family)
    right = reference.generate(PROMPT, 6).tokens
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    other = decode.submit(prompt(50, seed=1), max_tokens=4)
    assert decode.generate(PROMPT, 6, params=answer).tokens == right
    assert decode.answers[other].tokens == reference.generate(prompt(50, seed=1), 4).tokens
    assert decode.failures() == {"checksum_mismatch": 1}
    assert_clean(prefill, decode)
    # Nor is anything of it in the prefix cache.
    assert decode.generate(PROMPT, 6).tokens == right


def test_a_shared_prefix_arrives_or_is_computed(sharer, shelf, tokens, runner):
    first, second = (sharer(lifecycle=runner(), policy="fail") for _ in range(2))
    publish(first, shelf)
    shelf.before_get = lambda keys: shelf.evict()
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.failures() == {"store_blocks_gone": 1}
    landed(second)  # what was computed anew
    shelf.before_get = lambda keys: None
    third = sharer(lifecycle=runner())
    assert third.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert third.count("tokens_shared") == 6 * BLOCK
    assert_clean(first, second, third)
