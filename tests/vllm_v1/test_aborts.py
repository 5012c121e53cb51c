# SPDX-License-Identifier: Apache-2.0
"""A client that leaves, at whatever moment, leaves nothing behind."""

import pytest

from tests import inspection
from tests.toy import BLOCK

from .harness import (
    DEADLINE,
    HANDOFF,
    InProcessEngine,
    assert_clean,
    hand_off,
    prompt,
    slots,
    wait,
)

pytestmark = pytest.mark.vllm

LENGTH = 6 * BLOCK - 3


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def pair(engine, request):
    """A prefill engine that chunks its prompts, and a decode engine."""
    options = {"max_tokens_a_step": 2 * BLOCK, "async_scheduling": request.param}
    return engine("kv_producer", **options), engine("kv_consumer", **options)


@pytest.fixture
def still_serve(tokens):
    """Checks that nothing is left, and that a hand-off works as ever."""

    def check(prefill: InProcessEngine, decode: InProcessEngine) -> None:
        assert_clean(prefill, decode)
        before = decode.count("handoffs_received")
        again = prompt(LENGTH, seed=99)
        assert hand_off(prefill, decode, again) == tokens(again, 6)
        assert decode.count("handoffs_received") == before + 1
        assert_clean(prefill, decode)

    return check


def test_before_the_prefill_is_scheduled(pair, still_serve):
    prefill, decode = pair
    prefill.abort(prefill.submit(prompt(LENGTH), params=HANDOFF))
    still_serve(prefill, decode)


def test_while_the_prefill_waits_for_room_in_the_arena(engine, tokens, still_serve):
    prefill, decode = engine("kv_producer", extra=slots(8)), engine("kv_consumer")
    first = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    second = prefill.submit(prompt(LENGTH, seed=1), params=HANDOFF)
    for _ in range(5):
        prefill.step()
    assert prefill.usage == (6, 0, 0)
    assert not prefill.scheduler.running
    prefill.abort(second)
    prefill.settle()
    assert decode.generate(prompt(LENGTH), 6, params=first).tokens == tokens(prompt(LENGTH), 6)
    still_serve(prefill, decode)


def test_in_the_middle_of_the_prefill(pair, still_serve):
    prefill, decode = pair
    prefill.instant_copies = True
    request_id = prefill.submit(prompt(LENGTH), params=HANDOFF)
    prefill.run(lambda: prefill.count("blocks_saved") >= 2)
    assert not prefill.done(request_id)
    prefill.abort(request_id)
    still_serve(prefill, decode)


def test_in_the_middle_of_the_prefill_with_copies_in_flight(pair, still_serve):
    prefill, decode = pair
    held = prefill.hold(saves=True)
    request_id = prefill.submit(prompt(LENGTH), params=HANDOFF)
    for _ in range(2):
        prefill.step()
    wait(held.waiting.is_set)
    assert not prefill.done(request_id)
    prefill.abort(request_id)
    prefill.settle()  # the copies are given up, not waited for
    assert held.saved_blocks == []
    held.open()
    still_serve(prefill, decode)


def test_after_the_prefill_with_copies_in_flight(pair, tokens, still_serve):
    prefill, decode = pair
    held = prefill.hold(saves=True)
    request_id = prefill.submit(prompt(LENGTH), params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id))
    prefill.abort(request_id)  # the answer is out: the hand-off stands
    for _ in range(5):
        prefill.step()
    assert prefill.free_blocks < 64  # a copy may still read them
    held.open()
    prefill.settle()
    assert prefill.free_blocks == 64
    answer = prefill.answers[request_id].params
    assert decode.generate(prompt(LENGTH), 6, params=answer).tokens == tokens(prompt(LENGTH), 6)
    assert decode.count("handoffs_received") == 1
    still_serve(prefill, decode)


def test_while_the_lease_request_is_answered_late(pair, still_serve):
    prefill, decode = pair
    held = prefill.hold(saves=True)
    request_id = prefill.submit(prompt(LENGTH), params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id))
    decoded = decode.submit(prompt(LENGTH), max_tokens=6, params=prefill.answers[request_id].params)
    decode.step()
    decode.abort(decoded)
    decode.settle()  # it is not waited for
    assert decode.free_blocks == 64
    held.open()
    still_serve(prefill, decode)


def test_when_the_lease_request_was_just_sent(pair, still_serve):
    prefill, decode = pair
    answer = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    decode.abort(decode.submit(prompt(LENGTH), max_tokens=6, params=answer))
    still_serve(prefill, decode)


def test_leased_but_without_room_to_load(engine, tokens, still_serve):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", usable_blocks=8)
    busy = decode.submit(prompt(4 * BLOCK, seed=1), max_tokens=30)
    decode.step()
    answer = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    waiting = decode.submit(prompt(LENGTH), max_tokens=6, params=answer)
    load = inspection.fetches(decode.half)[waiting]
    load.future.result(DEADLINE)
    decode.step()
    assert load.lease is not None
    assert load.job_id is None
    assert prefill.usage[2] == 1
    decode.abort(waiting)
    decode.run(lambda: decode.done(busy))
    assert decode.answers[busy].tokens == tokens(prompt(4 * BLOCK, seed=1), 30)
    still_serve(prefill, decode)


def test_while_the_kv_is_loaded(pair, still_serve):
    prefill, decode = pair
    answer = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    held = decode.hold(loads=True)
    request_id = decode.submit(prompt(LENGTH), max_tokens=6, params=answer)
    decode.run(held.waiting.is_set)
    decode.abort(request_id)
    for _ in range(5):
        decode.step()
    assert decode.free_blocks == 64 - 6  # the load may still write to them
    held.open()
    decode.settle()
    assert decode.free_blocks == 64
    still_serve(prefill, decode)


def test_while_the_load_waits_for_the_copies_of_its_peer(pair, still_serve):
    prefill, decode = pair
    held = prefill.hold(saves=True)
    request_id = prefill.submit(prompt(LENGTH), params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id))
    prefill.step()
    decoded = decode.submit(prompt(LENGTH), max_tokens=6, params=prefill.answers[request_id].params)
    decode.run(lambda: bool(decode.loads_under_way))
    decode.abort(decoded)
    decode.step()
    held.open()
    still_serve(prefill, decode)


def test_while_decoding(pair, still_serve):
    prefill, decode = pair
    answer = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    request_id = decode.submit(prompt(LENGTH), max_tokens=50, params=answer)
    decode.run(lambda: len(decode.answers[request_id].tokens) > 3)
    decode.abort(request_id)
    still_serve(prefill, decode)


def test_everybody_at_once(pair, still_serve):
    prefill, decode = pair
    answers = [prefill.generate(prompt(40, seed), params=HANDOFF).params for seed in range(4)]
    for seed, answer in enumerate(answers):
        decode.submit(prompt(40, seed), max_tokens=30, params=answer)
    started = {seed: prefill.submit(prompt(LENGTH, seed), params=HANDOFF) for seed in range(4, 8)}
    for _ in range(3):
        prefill.step()
        decode.step()
    for each in pair:
        for request_id in list(each.scheduler.requests):
            each.abort(request_id)
    for seed in range(4, 8):
        answer = prefill.answers[started[seed]].params
        if answer is not None:  # it was faster
            decode.generate(prompt(LENGTH, seed), params=answer)
    still_serve(prefill, decode)


def test_a_handoff_that_nobody_leases_expires_while_the_engine_idles(engine, tokens):
    prefill = engine("kv_producer", extra={"handoff_ttl_s": 20.0})
    answer = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    assert prefill.usage[0] == 6
    prefill.pass_time(20.0)
    wait(lambda: prefill.usage[0] == 0)
    assert prefill.count("handoffs_expired") == 1
    decode = engine("kv_consumer")
    assert decode.generate(prompt(LENGTH), 6, params=answer).tokens == tokens(prompt(LENGTH), 6)
    assert decode.failures() == {"unknown_token": 1}


def test_a_lease_that_is_never_released_expires(engine):
    prefill = engine("kv_producer", extra={"handoff_ttl_s": 20.0})
    decode = engine("kv_consumer", usable_blocks=8)
    decode.submit(prompt(4 * BLOCK, seed=1), max_tokens=60)
    decode.step()
    answer = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    waiting = decode.submit(prompt(LENGTH), max_tokens=6, params=answer)
    load = inspection.fetches(decode.half)[waiting]
    load.future.result(DEADLINE)
    decode.step()
    assert load.lease is not None
    assert prefill.usage == (6, 0, 1)
    for each in (prefill, decode):
        each.pass_time(20.0)
    wait(lambda: prefill.usage[0] == 0)  # the decode engine stands still
    assert prefill.usage[2] == 0
    decode.settle()
    assert decode.failures() == {"lease_expired": 1}
    assert_clean(prefill, decode)


def test_a_short_time_to_live_is_enough_for_who_is_quick(engine):
    prefill = engine("kv_producer", extra={"handoff_ttl_s": 0.9})
    decode = engine("kv_consumer")
    for each in (prefill, decode):
        each.stop_time()
    answer = prefill.generate(prompt(LENGTH), params=HANDOFF).params
    decode.generate(prompt(LENGTH), 6, params=answer)
    assert decode.count("handoffs_received") == 1
