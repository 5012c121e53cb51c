# SPDX-License-Identifier: Apache-2.0
"""Requests lose their KV blocks, to get others later; copies of the old ones may be under way."""

import pytest

from tests.inspection import hold_no_blocks
from tests.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, Lifecycle, assert_clean, prompt, wait

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
def test_copies_of_lost_blocks_go_on_and_are_made_once(engine, tight, tokens, overlap):
    prefill, decode = tight(async_scheduling=overlap), engine("kv_consumer")
    held = prefill.hold(saves=True)
    long, handed = preempt(prefill)
    for _ in range(10):
        prefill.step()
    assert not prefill.done(long)  # what a copy reads is given to nobody
    held.open()
    prefill.settle()
    assert prefill.answers[long].tokens == tokens(LONG, 2)
    assert sorted(held.saved_blocks) == sorted({*held.saved_blocks})
    assert prefill.count("blocks_saved") == 8
    answer = prefill.answers[handed].params
    assert decode.generate(HANDED, 6, params=answer).tokens == tokens(HANDED, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


class ZeroesFirst(Lifecycle):
    """The V2 runner's order: new blocks are zeroed before the connector hears of the step."""

    def execute(self, engine, worker, step):
        cached = step.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id not in cached.resumed_req_ids:  # theirs may be found in the cache
                for block_ids in new or ():
                    engine.runner.spoil([each for each in block_ids if each], 7)
        return super().execute(engine, worker, step)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_blocks_that_are_zeroed_first_are_not_those_under_a_copy(engine, tight, tokens, overlap):
    prefill = tight(async_scheduling=overlap, lifecycle=ZeroesFirst())
    decode = engine("kv_consumer")
    held = prefill.hold(saves=True)
    long, handed = preempt(prefill)
    for _ in range(10):
        prefill.step()
    held.open()
    prefill.settle()
    assert prefill.answers[long].tokens == tokens(LONG, 2)
    answer = prefill.answers[handed].params
    assert decode.generate(HANDED, 6, params=answer).tokens == tokens(HANDED, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


def test_without_the_references_the_race_is_lost(engine, tight, tokens):
    prefill, decode = tight(lifecycle=ZeroesFirst()), engine("kv_consumer")
    hold_no_blocks(prefill.half)
    held = prefill.hold(saves=True)
    long, handed = preempt(prefill)
    prefill.run(lambda: prefill.done(long))
    held.open()
    wait(lambda: len(held.saved_blocks) == 6)
    prefill.settle()
    answer = prefill.answers[handed].params
    assert decode.generate(HANDED, 6, params=answer).tokens != tokens(HANDED, 6)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("family", ["full", "window", "all three"])
@pytest.mark.values
def test_a_request_resumes_and_ends_while_its_copies_wait(engine, hasty_resets, family, overlap):
    """Its blocks are left to others under copies that were queued before it was preempted."""
    options = {"family": family, "usable_blocks": 40}
    prefill = engine("kv_producer", async_scheduling=overlap, max_tokens_a_step=48, **options)
    decode, alone = engine("kv_consumer", **options), engine(**options)
    held = prefill.hold(saves=True, deaf=True)
    request_id = prefill.submit(HANDED, params=HANDOFF)
    for _ in range(2):
        prefill.step()
    with pytest.raises(RuntimeError):  # the copies hold blocks; but all requests are preempted
        prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.run(lambda: prefill.done(request_id))
    assert request_id in prefill.preempted
    others = [prefill.submit(prompt(4 * BLOCK, seed), max_tokens=4) for seed in range(5, 9)]
    for _ in range(30):
        prefill.step()
    held.open()
    prefill.settle()
    for seed, other in enumerate(others, start=5):
        right = alone.generate(prompt(4 * BLOCK, seed), 4).tokens
        assert prefill.answers[other].tokens == right
    answer = prefill.answers[request_id].params
    right = alone.generate(HANDED, 6).tokens
    assert decode.generate(HANDED, 6, params=answer).tokens == right
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


def preempt_now(engine: InProcessEngine, request_id: str) -> None:
    """Have vLLM preempt a running request as it does where it needs its blocks."""
    scheduler = engine.scheduler
    request = scheduler.requests[request_id]
    scheduler.running.remove(request)
    # What vLLM before 0.32 does not ask a connector, it does not drop.
    drops = getattr(scheduler, "requires_kv_delivery", False)
    scheduler._preempt_request(request, 0.0, **({"drop_stale_output": True} if drops else {}))
    scheduler.prev_step_scheduled_req_ids.discard(request_id)


@pytest.mark.parametrize("family", ["full", "window", "all three"])
def test_a_prefill_that_is_preempted_with_its_token_in_flight_is_not_computed_again(
    engine, monkeypatch, family
):
    options = {"family": family, "usable_blocks": 40}
    prefill = engine("kv_both", async_scheduling=True, prefix_caching=False, **options)
    decode, alone = engine("kv_consumer", **options), engine(**options)
    computed = []
    execute = prefill.execute
    monkeypatch.setattr(
        prefill,
        "execute",
        lambda step: computed.append(step.total_num_scheduled_tokens) or execute(step),
    )
    held = prefill.hold(saves=True)
    handed = prefill.submit(HANDED, params=HANDOFF)
    prefill.step()
    assert not prefill.done(handed)
    preempt_now(prefill, handed)
    # Others get the blocks that it has lost, but not those under its copies.
    others = [prefill.submit(prompt(4 * BLOCK, seed), max_tokens=2) for seed in range(5, 9)]
    prefill.run(lambda: prefill.done(handed))
    for _ in range(10):
        prefill.step()
    held.open()
    prefill.settle()
    computed_here = HANDED if family == "full" else HANDED[:-1]
    assert prefill.answers[handed].tokens == alone.generate(computed_here, 1).tokens
    most = len(HANDED) + len(others) * (4 * BLOCK + 2)
    assert sum(computed) <= most
    params = prefill.answers[handed].params
    right = alone.generate(HANDED, 6).tokens
    assert decode.generate(HANDED, 6, params=params).tokens == right
    assert decode.count("handoffs_received") == 1
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
    received = 0
    # On a busy machine one may have ended before the other is loaded.
    while not decode.preempted and received < 20:
        prompts = [prompt(4 * BLOCK - 3, seed) for seed in (received, received + 1)]
        ids = [
            decode.submit(each, max_tokens=20, params=prefill.generate(each, params=HANDOFF).params)
            for each in prompts
        ]
        decode.run(lambda ids=ids: decode.done(*ids))
        for request_id, each in zip(ids, prompts, strict=True):
            assert decode.answers[request_id].tokens == tokens(each, 20)
        received += 2
        assert decode.count("handoffs_received") == received
    assert decode.preempted
    assert_clean(prefill, decode)
