# SPDX-License-Identifier: Apache-2.0
"""Requests lose their KV blocks, to get others later; copies of the old ones may be under way."""

import threading

import pytest

from omni_connector.testing.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, assert_clean, prompt, run, wait

pytestmark = pytest.mark.vllm

LONG, HANDED = prompt(12 * BLOCK, seed=1), prompt(8 * BLOCK, seed=2)


@pytest.fixture(params=[True, False], ids=["caching", "no caching"])
def tight(engine, request):
    """A prefill engine where a long request takes the blocks of one that is handed off.

    Both are prefilled two blocks a step. After three steps each has six, after four the long
    one has the last two of fourteen, and the other is preempted with copies in flight; the next
    blocks of the long one are those it has lost.
    """

    def make(**options) -> InProcessEngine:
        options = {
            "usable_blocks": 14,
            "max_tokens_a_step": 4 * BLOCK,
            "long_prefill": 2 * BLOCK,
            "prefix_caching": request.param,
            **options,
        }
        return engine("kv_producer", **options)

    return make


def preempt(prefill: InProcessEngine) -> tuple[str, str]:
    """Step until the request to be handed off has lost its blocks; both requests' ids."""
    long = prefill.submit(LONG, max_tokens=2)
    handed = prefill.submit(HANDED, params=HANDOFF)
    prefill.run(lambda: handed in prefill.preempted)
    return long, handed


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_a_preempted_prefill_is_handed_off_right(engine, tight, tokens, overlap):
    prefill, decode = tight(async_scheduling=overlap), engine("kv_consumer")
    long, handed = preempt(prefill)
    prefill.settle()
    assert prefill.answers[long].tokens == tokens(LONG, 2)
    answer = prefill.answers[handed]
    assert answer.tokens == tokens(HANDED, 1)
    assert decode.generate(HANDED, 6, params=answer.params).tokens == tokens(HANDED, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_copies_of_lost_blocks_are_given_up(engine, tight, tokens, overlap):
    prefill, decode = tight(async_scheduling=overlap), engine("kv_consumer")
    held = prefill.hold(saves=True)
    long, handed = preempt(prefill)
    prefill.run(lambda: prefill.done(long))  # its blocks are overwritten
    held.open()
    prefill.settle()
    answer = prefill.answers[handed].params
    assert decode.generate(HANDED, 6, params=answer).tokens == tokens(HANDED, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


def test_without_the_fence_the_race_is_lost(engine, tight, tokens):
    prefill, decode = tight(), engine("kv_consumer")
    prefill.worker_half.fence = lambda metadata: None
    held = prefill.hold(saves=True)
    long, handed = preempt(prefill)
    prefill.run(lambda: prefill.done(long))
    held.open()
    wait(lambda: len(held.saved_blocks) == 6)
    prefill.settle()
    answer = prefill.answers[handed].params
    assert decode.generate(HANDED, 6, params=answer).tokens != tokens(HANDED, 6)


def test_a_copy_that_cannot_stop_is_waited_for(engine, tight, tokens):
    prefill, decode = tight(), engine("kv_consumer")
    held = prefill.hold(saves=True, deaf=True)
    long = prefill.submit(LONG, max_tokens=2)
    handed = prefill.submit(HANDED, params=HANDOFF)
    for _ in range(3):
        prefill.step()
    wait(held.waiting.is_set)
    stepping = threading.Thread(target=prefill.step)
    stepping.start()
    wait(lambda: handed in prefill.preempted)
    stepping.join(0.05)
    assert stepping.is_alive()  # in the fence, before anything is overwritten
    assert held.saved_blocks == []
    held.open()
    stepping.join(20)
    assert not stepping.is_alive()
    prefill.settle()
    assert prefill.answers[long].tokens == tokens(LONG, 2)
    answer = prefill.answers[handed].params
    assert decode.generate(HANDED, 6, params=answer).tokens == tokens(HANDED, 6)
    assert_clean(prefill, decode)


def test_an_abort_after_the_preemption_leaves_nothing(tight):
    prefill = tight()
    held = prefill.hold(saves=True)
    _, handed = preempt(prefill)
    prefill.abort(handed)
    prefill.settle()
    held.open()
    assert_clean(prefill)


def test_finished_requests_keep_their_blocks_until_they_are_copied(engine, tokens):
    prefill, decode = engine("kv_producer", usable_blocks=9), engine("kv_consumer")
    held = prefill.hold(saves=True)
    first = prefill.submit(HANDED, params=HANDOFF)
    prefill.run(lambda: prefill.done(first))
    second = prefill.submit(prompt(5 * BLOCK, seed=3))
    for _ in range(10):
        prefill.step()
    assert not prefill.done(second)  # there are no blocks for it
    held.open()
    prefill.settle()
    assert prefill.answers[second].tokens == tokens(prompt(5 * BLOCK, seed=3), 1)
    answer = prefill.answers[first].params
    assert decode.generate(HANDED, 6, params=answer).tokens == tokens(HANDED, 6)
    assert_clean(prefill, decode)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_a_preempted_decode_recomputes_what_it_had_loaded(engine, tokens, overlap, caching):
    prefill = engine("kv_producer")
    decode = engine(
        "kv_consumer", usable_blocks=9, async_scheduling=overlap, prefix_caching=caching
    )
    prompts = [prompt(4 * BLOCK - 3, seed) for seed in range(2)]
    ids = [
        decode.submit(each, max_tokens=20, params=prefill.generate(each, params=HANDOFF).params)
        for each in prompts
    ]
    decode.run(lambda: decode.done(*ids))
    assert decode.preempted
    for request_id, each in zip(ids, prompts, strict=True):
        assert decode.answers[request_id].tokens == tokens(each, 20)
    assert decode.count("handoffs_received") == 2
    assert_clean(prefill, decode)


@pytest.mark.parametrize("chunk", [3 * BLOCK, 4096], ids=["in between", "prompt computed"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_a_reset_in_the_middle_of_a_prefill(engine, tokens, overlap, chunk):
    prefill = engine("kv_producer", max_tokens_a_step=chunk, async_scheduling=overlap)
    decode = engine("kv_consumer")
    held = prefill.hold(saves=True)
    request_id = prefill.submit(HANDED, max_tokens=4, params=HANDOFF)
    prefill.step()
    wait(held.waiting.is_set)
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.run(lambda: prefill.done(request_id))
    held.open()
    prefill.settle()
    answer = prefill.answers[request_id]
    assert answer.tokens == tokens(HANDED, 4)
    assert decode.generate(HANDED, 6, params=answer.params).tokens == tokens(HANDED, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_copies_whose_end_is_told_after_the_answer_are_made_again(engine, tokens, overlap):
    prefill, decode = engine("kv_producer", async_scheduling=overlap), engine("kv_consumer")
    held = prefill.hold(saves=True, deaf=True)
    first = prefill.submit(prompt(40, seed=5), params=HANDOFF)
    prefill.step()
    wait(held.waiting.is_set)  # in front of the copies that are cancelled in the queue
    request_id = prefill.submit(HANDED, max_tokens=2, params=HANDOFF)
    prefill.run(lambda: bool(prefill.answers[request_id].tokens))
    with pytest.raises(RuntimeError):  # vLLM misses the blocks of the first, but has preempted
        prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.run(lambda: prefill.done(request_id))
    assert request_id in prefill.preempted
    claim = decode.submit(HANDED, max_tokens=6, params=prefill.answers[request_id].params)
    for _ in range(10):
        prefill.step()
        decode.step()
    assert not decode.worker_half._loading  # it is told to wait
    held.open()
    run([prefill, decode], lambda: decode.done(claim))
    assert decode.answers[claim].tokens == tokens(HANDED, 6)
    assert decode.count("handoffs_received") == 1
    decode.generate(prompt(40, seed=5), params=prefill.answers[first].params)
    assert_clean(prefill, decode)
