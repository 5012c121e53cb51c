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
    wait,
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


def test_copies_of_lost_blocks_go_on(engine, tokens, runner):
    """Also where nobody announces a preemption."""
    prefill = engine(
        "kv_producer",
        lifecycle=runner(),
        usable_blocks=14,
        max_tokens_a_step=4 * BLOCK,
        long_prefill=2 * BLOCK,
    )
    decode = engine("kv_consumer", lifecycle=runner())
    long, text = prompt(12 * BLOCK, seed=1), prompt(8 * BLOCK, seed=2)
    held = prefill.hold(saves=True)
    other = prefill.submit(long, max_tokens=2)
    handed = prefill.submit(text, params=HANDOFF)
    prefill.run(lambda: handed in prefill.preempted)
    for _ in range(10):
        prefill.step()
    held.open()
    prefill.settle()
    assert prefill.answers[other].tokens == tokens(long, 2)
    answer = prefill.answers[handed].params
    assert decode.generate(text, 6, params=answer).tokens == tokens(text, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


def test_blocks_stay_until_their_copies_ended(engine, tokens, runner):
    prefill, decode = (engine(role, lifecycle=runner()) for role in ("kv_producer", "kv_consumer"))
    before = prefill.free_blocks
    held = prefill.hold(saves=True)
    handed = prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: prefill.done(handed))
    wait(held.waiting.is_set)
    for _ in range(10):  # steps without a forward pass
        prefill.step()
    assert prefill.free_blocks < before
    held.open()
    prefill.settle()
    assert prefill.free_blocks == before
    answer = prefill.answers[handed].params
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert_clean(prefill, decode)


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
