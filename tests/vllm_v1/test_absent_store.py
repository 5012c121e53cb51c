# SPDX-License-Identifier: Apache-2.0
"""A shared store that is away, goes, or is slow: every answer is right, and no later than told."""

import time

import pytest

from omni_connector.prefix import saves, store_jobs
from tests import inspection
from tests.toy import BLOCK

from .harness import assert_clean, prompt
from .stores import IMPATIENT, PREFIX, QUESTION, landed, publish

pytestmark = pytest.mark.vllm


def test_a_store_that_was_never_there(sharer, shelf, tokens):
    shelf.unreachable = True
    engine = sharer()
    assert engine.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    landed(engine)
    assert engine.failures() == {"store_put_failed": 1}
    assert_clean(engine)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_store_that_goes_while_it_is_read(sharer, shelf, tokens, policy):
    first, second = sharer(), sharer(policy=policy)
    publish(first, shelf)
    shelf.before_get = lambda keys: setattr(shelf, "unreachable", True)
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.failures()["store_blocks_gone"] == 1
    shelf.before_get, shelf.unreachable = (lambda keys: None), False
    other = PREFIX[: 3 * BLOCK] + prompt(20, seed=2)
    assert second.generate(other, 6).tokens == tokens(other, 6)
    assert_clean(first, second)


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_told(sharer, shelf, tokens):
    first, second = sharer(), sharer(extra=IMPATIENT)
    publish(first, shelf)
    questions = [QUESTION, *(prompt(40, seed=seed) for seed in range(3))]
    expected = [tokens(each, 6) for each in questions]
    shelf.stalled = shelf.endless = True
    started = time.monotonic()
    ids = [second.submit(each, max_tokens=6) for each in questions]
    second.run(lambda: second.done(*ids))
    assert time.monotonic() - started >= 0.25
    assert [second.answers[each].tokens for each in ids] == expected
    assert second.failures()["store_lookup_timeout"] == 4
    shelf.stalled = False


def test_a_load_that_stalls_ends_at_its_deadline(sharer, shelf, tokens, monkeypatch):
    monkeypatch.setattr(store_jobs, "_GET_S", 0.2)
    first, second = sharer(), sharer(policy="fail")
    publish(first, shelf)
    expected = tokens(QUESTION, 6)
    shelf.before_get = lambda keys: setattr(shelf, "stalled", True)
    request_id = second.submit(QUESTION, max_tokens=6)
    other = second.submit(prompt(50, seed=1), max_tokens=6)
    second.run(lambda: second.done(request_id, other))
    assert second.answers[request_id].tokens == expected
    assert second.failures()["store_blocks_gone"] == 1
    shelf.stalled = False


def test_a_slow_store_costs_saves_not_time(sharer, shelf, tokens, monkeypatch):
    monkeypatch.setattr(store_jobs, "_STAGING_BUFFERS", 1)
    monkeypatch.setattr(store_jobs, "_MAX_ROWS", 2)
    monkeypatch.setattr(store_jobs, "_STAGING_WAIT_S", 0.05)
    engine = sharer(extra=IMPATIENT)
    shelf.stalled = shelf.endless = True
    assert engine.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert engine.count("blocks_dropped") == 4
    shelf.stalled = False
    landed(engine)
    assert_clean(engine)


def test_copies_hold_a_part_of_the_blocks_at_most(sharer, shelf, tokens):
    engine = sharer(usable_blocks=19)
    held = engine.hold(saves=True)
    request_id = engine.submit(QUESTION, max_tokens=6)
    engine.run(lambda: engine.done(request_id))
    assert engine.answers[request_id].tokens == tokens(QUESTION, 6)
    assert inspection.prefix_saves(engine.half).num_held == 5
    assert engine.count("blocks_dropped") == 1
    held.open()
    assert_clean(engine)


@pytest.mark.parametrize("seconds", [60.0, 0.0], ids=["soon", "late"])
def test_only_copies_that_end_soon_are_waited_for_where_blocks_lack(
    sharer, shelf, tokens, monkeypatch, seconds
):
    monkeypatch.setattr(saves, "_HELD_PART", 1)
    monkeypatch.setattr(saves, "_COPY_S", seconds)
    engine = sharer(usable_blocks=14)
    held = engine.hold(saves=True)
    ended = engine.submit(PREFIX, max_tokens=1)
    engine.run(lambda: engine.done(ended))
    one, other = prompt(3 * BLOCK - 2, seed=1), prompt(2 * BLOCK - 2, seed=2)
    ids = [engine.submit(each, max_tokens=2 * BLOCK) for each in (one, other)]
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.run(lambda: bool(engine.preempted) or not pool.get_num_free_blocks())
    for _ in range(BLOCK):
        engine.step()
    assert not engine.done(*ids)
    assert bool(engine.preempted) is not bool(seconds)
    held.open()
    engine.run(lambda: engine.done(*ids))
    for request_id, each in zip(ids, (one, other), strict=True):
        assert engine.answers[request_id].tokens == tokens(each, 2 * BLOCK)
    landed(engine)
    assert_clean(engine)
