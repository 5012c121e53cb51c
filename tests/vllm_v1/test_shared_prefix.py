# SPDX-License-Identifier: Apache-2.0
"""Engines that find each other's prefixes in a store: every answer is that of an engine alone."""

import dataclasses
import time

import pytest
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import FinishReason

from omni_connector.identity.loaded_weights import UnreadableWeightsError
from omni_connector.prefix import store_jobs
from tests import inspection
from tests.toy import BLOCK, WINDOW

from . import harness
from .harness import HANDOFF, assert_clean, prompt
from .held import no_such_page
from .stores import PREFIX, QUESTION, SwitchedShelf, landed, publish

pytestmark = pytest.mark.vllm

FAMILIES = [
    "full",
    "window",
    "window and full",
    "latent",
    "state and full",
    "all three",
    "ring and full",
    "all and a ring",
]


def blocks(shelf: SwitchedShelf, group: int = 0, rank: int = 0) -> int:
    """How many entries a rank has of a group."""
    return sum(f"/{group}.{rank}/" in key for key in shelf.entries)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_a_prefix_is_found_by_another_engine(sharer, shelf, engine, family, ranks, overlap):
    options = {"family": family, "ranks": ranks, "async_scheduling": overlap}
    first, second = sharer(**options), sharer(**options)
    publish(first, shelf)
    expected = engine(family=family, ranks=ranks).generate(QUESTION, 20).tokens
    assert second.generate(QUESTION, 20).tokens == expected
    assert second.count("tokens_shared") == 6 * BLOCK
    assert not second.failures()
    assert_clean(first, second)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_bytes_that_nobody_checks_are_noticed_by_these_tests(
    sharer, shelf, engine, monkeypatch, family
):
    monkeypatch.setattr(store_jobs, "verify", lambda *args: None)
    first, second = sharer(family=family), sharer(family=family)
    publish(first, shelf)
    shelf.spoil(3)
    answer = second.generate(QUESTION, 6)
    assert second.count("tokens_shared") == 6 * BLOCK
    assert answer.tokens != engine(family=family).generate(QUESTION, 6).tokens


def test_only_what_is_beyond_the_local_prefix_is_loaded(sharer, shelf, tokens):
    first, second = sharer(), sharer()
    publish(first, shelf)
    second.generate(PREFIX[: 2 * BLOCK] + prompt(20, seed=5), 2)
    before = second.count("tokens_shared")
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_shared") - before == 4 * BLOCK


def test_prompts_part_where_they_differ(sharer, shelf, tokens):
    first, second = sharer(), sharer()
    publish(first, shelf)
    other = PREFIX[: 4 * BLOCK + 5] + prompt(40, seed=3)
    assert second.generate(other, 6).tokens == tokens(other, 6)
    assert second.count("tokens_shared") == 4 * BLOCK


def test_what_is_stored_is_not_sent_again(sharer, shelf):
    first, second = sharer(), sharer()
    publish(first, shelf)
    for engine in (first, second):
        engine.generate(QUESTION, 2)
        landed(engine)
    assert len(shelf.puts) == len(set(shelf.puts)) == 6
    assert first.count("blocks_stored") == 6
    assert second.count("blocks_stored") == 0


def test_what_the_store_lost_is_sent_again_by_who_still_has_it(sharer, shelf):
    first = sharer()
    publish(first, shelf)
    shelf.evict()
    inspection.forget_sent(first.half)
    first.generate(QUESTION, 2)
    landed(first)
    assert blocks(shelf) == 6


# Windows


def test_of_a_window_only_what_is_read_is_needed(sharer, shelf, engine):
    first, second = sharer(family="window"), sharer(family="window")
    publish(first, shelf)
    kept = list(shelf.entries)[-(WINDOW // BLOCK + 1) :]
    shelf.evict(lambda key: key not in kept)
    expected = engine(family="window").generate(QUESTION, 6).tokens
    assert second.generate(QUESTION, 6).tokens == expected
    assert second.count("tokens_shared") == 6 * BLOCK


def test_a_prefix_ends_where_its_window_is_whole(sharer, shelf, engine):
    first, second = sharer(family="window and full"), sharer(family="window and full")
    publish(first, shelf)
    window = [key for key in shelf.entries if "/0.0/" in key]
    shelf.evict(lambda key: key == window[-1])
    expected = engine(family="window and full").generate(QUESTION, 6).tokens
    assert second.generate(QUESTION, 6).tokens == expected
    assert second.count("tokens_shared") == 5 * BLOCK


def test_blocks_that_a_window_left_behind_are_stored_all_the_same(sharer, shelf, engine):
    long = prompt(14 * BLOCK, seed=4)
    options = {"family": "window", "max_tokens_a_step": 2 * BLOCK, "usable_blocks": 16}
    first, second = sharer(**options), sharer(**options)
    held = first.hold(saves=True, deaf=True)
    request_id = first.submit(long, max_tokens=8)
    for _ in range(6):
        first.step()
    held.open()
    first.run(lambda: first.done(request_id))
    first.settle()
    landed(first)
    question = long[: 5 * BLOCK + 3]
    assert second.generate(question, 6).tokens == engine(**options).generate(question, 6).tokens


def test_blocks_that_vllm_retains_below_a_window_are_zeroed(sharer, shelf, engine, monkeypatch):
    """No token reads them, and nobody else's KV is left in them."""
    if not hasattr(SlidingWindowSpec, "extra_retained_tokens"):
        pytest.skip("this vLLM retains only what is read")
    make = harness.kv_cache_config

    def retaining(*args, **options):
        made = make(*args, **options)
        for group in made.kv_cache_groups:
            if isinstance(group.kv_cache_spec, SlidingWindowSpec):
                group.kv_cache_spec = dataclasses.replace(
                    group.kv_cache_spec, extra_retained_tokens=2 * BLOCK
                )
        return made

    monkeypatch.setattr(harness, "kv_cache_config", retaining)
    first, second = (sharer(family="window and full") for _ in range(2))
    publish(first, shelf)
    held = second.hold(loads=True)
    zero, zeroed = held.zero, []
    held.zero = lambda group, ids, **how: (
        zeroed.extend((group, each) for each in ids.tolist()) or zero(group, ids, **how)
    )
    request_id = second.submit(QUESTION, max_tokens=6)
    second.run(held.waiting.is_set)
    window, _ = second.scheduler.kv_cache_manager.get_block_ids(request_id)
    read = (6 * BLOCK - WINDOW + 1) // BLOCK
    retained = [(0, each) for each in window[:read] if each]
    assert len(retained) == 2
    assert zeroed == retained
    held.open()
    second.settle()
    expected = engine(family="window and full").generate(QUESTION, 6).tokens
    assert second.answers[request_id].tokens == expected
    assert second.count("tokens_shared") == 6 * BLOCK
    assert not second.failures()
    assert_clean(first, second)


# Ranks


def test_what_all_ranks_hold_alike_is_stored_once(sharer, shelf):
    publish(sharer(ranks=2, family="latent"), shelf)
    assert (blocks(shelf, rank=0), blocks(shelf, rank=1)) == (6, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"ranks": 2},
        {"block_size": 2 * BLOCK},
        {"family": "window"},
        {"extra": {"model_id": "other"}},
        {"extra": {"namespace": "other"}},
    ],
    ids=str,
)
def test_engines_that_cannot_read_each_other_share_nothing(sharer, shelf, engine, other):
    first, second = sharer(), sharer(**other)
    publish(first, shelf)
    alone = {key: value for key, value in other.items() if key != "extra"}
    assert second.generate(QUESTION, 6).tokens == engine(**alone).generate(QUESTION, 6).tokens
    assert second.count("tokens_shared") == 0
    assert not second.failures()


# Losing blocks, requests, entries


def test_a_load_that_is_aborted_before_it_starts(sharer, shelf):
    first, second = sharer(), sharer()
    publish(first, shelf)
    held = second.hold(loads=True)
    blocking = second.submit(QUESTION)
    second.run(held.waiting.is_set)
    request_id = second.submit(PREFIX + prompt(8, seed=6))
    second.run(lambda: second.loads_under_way == 2)
    second.abort(request_id)
    held.open()
    second.run(lambda: second.done(blocking))
    assert_clean(first, second)


def test_a_load_of_which_a_part_comes_too_late_is_counted_as_such(sharer, shelf, engine):
    family = "window and full"  # one batch for each group
    first, second = sharer(family=family), sharer(family=family, extra={"load_timeout_s": 0.3})
    publish(first, shelf)
    shelf.before_get = lambda keys: time.sleep(0.4)
    expected = engine(family=family).generate(QUESTION, 6).tokens
    assert second.generate(QUESTION, 6).tokens == expected
    assert second.failures() == {"store_load_timeout": 1}
    assert_clean(first, second)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.values
def test_entries_that_go_before_they_are_loaded(sharer, shelf, engine, policy, family, overlap):
    options = {"family": family, "policy": policy, "async_scheduling": overlap}
    first, second = sharer(**options), sharer(**options)
    publish(first, shelf)
    last = list(shelf.entries)[-1]
    shelf.before_get = lambda keys: shelf.evict(lambda key: key == last)
    other = prompt(50, seed=1)
    ids = [second.submit(QUESTION, max_tokens=6), second.submit(other, max_tokens=6)]
    second.settle()
    alone = engine(family=family)
    for request_id, each in zip(ids, (QUESTION, other), strict=True):
        assert second.answers[request_id].reason is FinishReason.LENGTH
        assert second.answers[request_id].tokens == alone.generate(each, 6).tokens
    assert second.failures() == {"store_blocks_gone": 1}
    assert second.count("tokens_shared") == 0
    assert_clean(first, second)
    # Nor is anything of it in the prefix cache; and what is left is loaded the next time.
    assert second.generate(QUESTION, 6).tokens == alone.generate(QUESTION, 6).tokens


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("place", [3, -1, -12], ids=["content", "checksum", "magic"])
@pytest.mark.parametrize("family", ["full", "window and full"])
@pytest.mark.pairs
def test_wrong_bytes_are_computed_anew(sharer, shelf, engine, policy, place, family):
    first, second = (sharer(family=family, policy=policy) for _ in range(2))
    publish(first, shelf)
    shelf.spoil(place)
    expected = engine(family=family).generate(QUESTION, 6).tokens
    assert second.generate(QUESTION, 6).tokens == expected
    assert second.failures() == {"store_checksum_mismatch": 1}
    assert second.count("tokens_shared") == 0
    assert_clean(first, second)
    # They cost one load, not one for each request.
    question = PREFIX + prompt(30, seed=7)
    second.scheduler.reset_prefix_cache()
    assert second.generate(question, 6).tokens == engine(family=family).generate(question, 6).tokens
    assert second.failures() == {"store_checksum_mismatch": 1}


def test_an_entry_of_another_key_is_not_taken(sharer, shelf, tokens):
    first, second = sharer(), sharer()
    publish(first, shelf)
    keys = list(shelf.entries)
    shelf.entries[keys[0]], shelf.entries[keys[1]] = (shelf.entries[k] for k in (keys[1], keys[0]))
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.failures() == {"store_checksum_mismatch": 1}


def test_a_copier_that_fails(sharer, shelf, tokens, log):
    first, second = sharer(), sharer()
    publish(first, shelf)

    held = second.hold()
    held.before_load = no_such_page
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    held.save = no_such_page
    other = prompt(70, seed=8)
    assert second.generate(other, 6).tokens == tokens(other, 6)
    assert second.failures() == {"store_load_failed": 1, "store_save_failed": 1}
    assert second.count("blocks_dropped") == 4
    assert_clean(first, second)


# Beside hand-offs


@pytest.mark.parametrize("family", ["window", "window and full"])
def test_a_prompt_that_was_shortened_is_stored_as_it_was_computed(sharer, shelf, engine, family):
    prefill, decode, third = (sharer(family=family) for _ in range(3))
    answer = publish(prefill, shelf, params=HANDOFF)
    expected = engine(family=family).generate(PREFIX, 6).tokens
    assert decode.generate(PREFIX, 6, params=answer.params).tokens == expected
    assert third.generate(QUESTION, 6).tokens == engine(family=family).generate(QUESTION, 6).tokens
    assert_clean(prefill, decode, third)


def test_a_hand_off_that_is_refused_is_made_up_for_by_the_store(sharer, shelf, tokens):
    prefill, decode = sharer("kv_producer"), sharer("kv_consumer")
    answer = publish(prefill, shelf, QUESTION, params=HANDOFF)
    prefill.directory.close(bytes.fromhex(answer.params["omni_token"]))
    assert decode.generate(QUESTION, 6, params=answer.params).tokens == tokens(QUESTION, 6)
    assert decode.failures() == {"unknown_token": 1}
    assert decode.count("tokens_shared") == 6 * BLOCK
    assert_clean(prefill, decode)


# Other things


def test_the_prompt_log_probabilities_are_computed_here(sharer, shelf, tokens):
    first, second = sharer(), sharer()
    publish(first, shelf)
    assert second.generate(QUESTION, 6, prompt_logprobs=1).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_shared") == 0


def test_what_is_being_loaded_when_the_weights_change_is_not_used(
    sharer, shelf, engine, hasty_resets
):
    """vLLM does not reset a cache whose blocks are being filled, but tells the connector."""
    first, second = sharer(), sharer()
    publish(first, shelf)
    held = second.hold(loads=True)
    request_id = second.submit(QUESTION, max_tokens=6)
    second.run(held.waiting.is_set)
    alone = engine()
    second.runner.weights = alone.runner.weights = b"new"
    assert not second.scheduler.reset_prefix_cache(reset_connector=True)
    held.open()
    second.settle()
    expected = alone.generate(QUESTION, 6).tokens
    assert second.answers[request_id].tokens == expected
    assert second.count("tokens_shared") == 0
    assert not second.failures()
    # Nor is anything of it in the prefix cache.
    assert second.generate(QUESTION, 6).tokens == expected
    assert_clean(first, second)


RESETS = {
    "plain": {},
    "with connector": {"reset_connector": True},
    "of running requests": {"reset_running_requests": True},
    "as pause and sleep do": {"reset_running_requests": True, "reset_connector": True},
}


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("weights", ["may_change", "fixed"])
def test_sharing_goes_on_after_a_reset_that_changes_no_weights(
    sharer, shelf, tokens, weights, reset
):
    first, second = sharer(), sharer(extra={"weights": weights})
    publish(first, shelf)
    assert second.scheduler.reset_prefix_cache(**RESETS[reset])
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_shared") == len(PREFIX)
    # The other way, of what was computed after the reset.
    other, stored, asked = prompt(6 * BLOCK, seed=5), len(shelf.entries), len(shelf.asked)
    second.generate(other)
    landed(second)
    assert len(shelf.entries) > stored
    assert len(shelf.asked) > asked
    assert first.generate(other, 6).tokens == tokens(other, 6)
    assert first.count("tokens_shared") > 0
    assert_clean(first, second)


def test_what_nobody_else_can_find_is_neither_stored_nor_asked_for(sharer, shelf):
    """It would only push out what others can find."""

    def hidden():
        raise UnreadableWeightsError("they are hidden")

    alone = sharer(fresh=True)
    inspection.read_weights(alone.worker_half, hidden)
    stored, asked = len(shelf.entries), len(shelf.asked)
    alone.generate(prompt(6 * BLOCK, seed=5))
    landed(alone)
    assert (len(shelf.entries), len(shelf.asked)) == (stored, asked)
    assert_clean(alone)


def test_an_idle_engine_gives_its_blocks_back(sharer, shelf, hasty_resets):
    engine = sharer()
    held = engine.hold(saves=True)
    request_id = engine.submit(QUESTION)
    engine.run(lambda: engine.done(request_id))
    assert not engine.scheduler.reset_prefix_cache()
    held.open()
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()


def test_clients_are_closed_with_their_engine(sharer, shelf):
    engine = sharer(ranks=2)
    assert shelf.open == 3
    engine.shutdown()
    assert shelf.open == 0
    engine.shutdown()
