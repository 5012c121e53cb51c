# SPDX-License-Identifier: Apache-2.0
"""New weights: nothing that was computed before is handed off, loaded or kept."""

import threading
import time
from collections.abc import Iterator

import pytest
from vllm.v1.outputs import KVConnectorOutput

from omni_connector.copy import held_blocks
from omni_connector.errors import StaleSlotError
from omni_connector.identity import epochs
from omni_connector.identity.loaded_weights import UnreadableWeightsError
from omni_connector.vllm_v1 import connector
from tests import inspection
from tests.simulation import check
from tests.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, assert_clean, hand_off, leased, prompt, wait

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)


def new_weights(*engines: InProcessEngine) -> None:
    """Have engines compute other KV from now on, all of them the same."""
    for engine in engines:
        engine.runner.weights = b"new"


@pytest.fixture
def after(engine):
    """What an engine that has the new weights from its start generates."""

    def generate(text: list[int], count: int, **options) -> list[int]:
        alone = engine(**options)
        new_weights(alone)
        return alone.generate(text, count).tokens

    return generate


RESETS = {
    "plain": {},
    "with connector": {"reset_connector": True},
    "of running requests": {"reset_running_requests": True},
}


@pytest.mark.parametrize("reset", RESETS)
def test_slots_that_were_cached_are_not_handed_off_again(engine, after, reset):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    decode.generate(PROMPT, 6, params=answer)
    assert_clean(prefill, decode)
    assert prefill.usage[1] > 0
    for each in (prefill, decode):
        new_weights(each)
        assert each.scheduler.reset_prefix_cache(**RESETS[reset])
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    assert decode.generate(PROMPT, 6, params=answer).tokens == after(PROMPT, 6)
    assert decode.count("handoffs_received") == 2
    assert_clean(prefill, decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_under_way_comes_to_nothing(engine, hasty_resets, after, policy):
    """vLLM does not reset its blocks while they are loaded, but tells the connector."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer", policy=policy)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    held = decode.hold(loads=True)
    request_id = decode.submit(PROMPT, max_tokens=6, params=answer)
    decode.run(held.waiting.is_set)
    new_weights(decode)
    assert not decode.scheduler.reset_prefix_cache(reset_connector=True)
    held.open()
    decode.settle()
    assert decode.answers[request_id].tokens == after(PROMPT, 6)
    # Nor is anything of it in the prefix cache.
    assert decode.generate(PROMPT, 6).tokens == after(PROMPT, 6)
    assert_clean(prefill, decode)


def test_after_two_resets_without_a_step_readers_are_told_of_both(engine):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    leased(prefill, decode, PROMPT)
    [handoff] = prefill.handoffs
    read = list(zip(handoff.slots[0].tolist(), handoff.generations[0].tolist(), strict=True))
    for slot, generation in read:
        prefill.arena().verify(slot, generation)
    for weights in (b"new", b"newer"):
        prefill.runner.weights = weights
        assert prefill.half.reset_cache()
        inspection.know_weights(prefill.half, 1, weights)
    prefill.generate(prompt(20, seed=3))  # a step tells the workers
    wait(lambda: inspection.copies_ended(prefill.worker_half))
    for slot, generation in read:
        with pytest.raises(StaleSlotError):
            prefill.arena().verify(slot, generation)


@pytest.mark.parametrize("one_process", [True, False])
def test_an_engine_in_its_callers_process_needs_no_step_for_a_reset(
    engine, monkeypatch, one_process
):
    """vLLM's `LLM` without multiprocessing makes no step when all requests have ended."""
    prefill = engine("kv_producer")
    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: one_process)
    monkeypatch.setattr(connector, "get_kv_transfer_group", lambda: prefill.worker)
    request_id = prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id))
    assert prefill.half.copying()
    assert prefill.scheduler.reset_prefix_cache() == one_process
    prefill.settle()


def test_a_reset_waits_for_no_end_of_a_copy_that_is_on_its_way(engine, monkeypatch):
    """The worker is in the scheduler's process, and a step in flight has told that the copy has
    ended."""
    prefill = engine("kv_producer", async_scheduling=True)
    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(connector, "get_kv_transfer_group", lambda: prefill.worker)
    others = [prefill.submit(prompt(20, seed=seed), max_tokens=60) for seed in range(2)]
    prefill.submit(PROMPT, params=HANDOFF)

    def told():
        outputs = [output.kv_connector_output for _, output in prefill.flying]
        counted = [each.kv_connector_stats for each in outputs if each is not None]
        reports = [each.report for each in counted if each is not None]
        return any(each is not None and each.done for each in reports)

    prefill.run(told)
    assert prefill.half.copying()
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.settle()
    assert not prefill.half.copying()
    assert all(prefill.done(each) for each in others)


def test_what_another_connector_has_failed_to_load_is_not_handed_off(engine, after):
    """vLLM computes it anew, when its blocks have been copied already."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    request_id = prefill.submit(PROMPT, max_tokens=3, params=HANDOFF)
    held = prefill.hold(saves=True)
    while not prefill.half.copying():
        prefill.step()
    request = prefill.scheduler.requests[request_id]
    assert request.num_computed_tokens > BLOCK
    computed, request.num_computed_tokens = request.num_computed_tokens, 0
    prefill.half.update_output(KVConnectorOutput(invalid_block_ids={1}))
    request.num_computed_tokens = computed
    held.open()
    prefill.settle()
    answer = prefill.answers[request_id].params
    assert prefill.failures() == {"load_failed": 1}
    assert decode.generate(PROMPT, 6, params=answer).tokens
    assert decode.count("handoffs_received") == 0
    assert_clean(prefill, decode)


def test_a_hand_off_shares_no_copy_of_what_another_connector_has_failed_to_load(engine):
    """Two requests of one prompt share slots. The first, whose blocks are copied, is aborted in the
    step in which a load of these blocks fails."""
    prefill = engine("kv_producer", prefix_caching=False)
    decode = engine("kv_consumer", prefix_caching=False)
    first, second = (prefill.submit(PROMPT, params=HANDOFF) for _ in range(2))
    held = prefill.hold(saves=True)
    while not prefill.half.copying():
        prefill.step()
    prefill.abort(first)
    prefill.half.update_output(KVConnectorOutput(invalid_block_ids={1}))
    held.open()
    prefill.settle()
    answer = prefill.answers[second].params
    assert decode.generate(PROMPT, 6, params=answer).tokens == engine().generate(PROMPT, 6).tokens
    assert decode.count("handoffs_received") == 0
    assert_clean(prefill, decode)


SHARES = {"share": True}


@pytest.mark.parametrize("family", ["full", "all three"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_reset_waits_for_the_copies_of_all_ranks(engine, family, goes_on):
    """And for none that waits for a step: of a request that has just ended, the last blocks."""
    sharer = engine("kv_both", ranks=2, family=family, extra=SHARES)
    held = sharer.hold(saves=True)  # of one rank
    request_id = sharer.submit(PROMPT, max_tokens=30)
    if goes_on:
        sharer.run(lambda: len(sharer.answers[request_id].tokens) > 2)
    else:
        sharer.run(lambda: sharer.done(request_id))
    wait(held.waiting.is_set)
    assert sharer.half.copying()
    opener = threading.Timer(0.1, held.open)
    opener.start()
    assert sharer.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert held.opened  # not before
    opener.join()
    assert sharer.half.copying()  # the ranks tell of it with a step
    sharer.settle()
    alone = engine(family=family, ranks=2)
    assert sharer.answers[request_id].tokens == alone.generate(PROMPT, 30).tokens
    assert_clean(sharer)


@pytest.mark.parametrize(
    ("ranks", "extra", "sockets"),
    [(2, SHARES, 2), (2, {}, 2), (1, SHARES, 1), (1, {}, 0)],
    ids=["asked all", "asked of copies", "asked for arenas", "asked nothing"],
)
def test_a_rank_has_one_socket_for_what_it_is_asked(engine, runtime, ranks, extra, sockets):
    one = engine("kv_both", ranks=ranks, extra=extra)
    assert len(list(runtime.rglob("r-*.sock"))) == sockets
    assert_clean(one)


def test_a_reset_does_not_wait_for_copies_where_requests_hold_blocks(engine, monkeypatch):
    sharer = engine("kv_both", ranks=2, extra=SHARES)
    held = sharer.hold(saves=True)
    sharer.submit(PROMPT, max_tokens=30)
    sharer.run(held.waiting.is_set)
    monkeypatch.setattr(held_blocks, "SETTLE_S", 1e9)
    assert not sharer.scheduler.reset_prefix_cache()
    held.open()
    sharer.settle()


def test_a_reset_fails_where_a_rank_does_not_answer(engine, hasty_resets, log):
    sharer = engine("kv_both", ranks=2, extra=SHARES)
    held = sharer.hold(saves=True)
    request_id = sharer.submit(PROMPT)
    sharer.run(lambda: sharer.done(request_id) and held.waiting.is_set())
    inspection.end_answers(sharer.workers[1])
    assert not sharer.scheduler.reset_prefix_cache()
    assert ["not reset" in line for line in log] == [True]
    held.open()
    sharer.settle()
    assert sharer.scheduler.reset_prefix_cache()


def test_a_hand_off_and_a_lease_of_before_a_reset_that_changes_nothing_stay_good(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    request_id = leased(prefill, decode, PROMPT)
    other = prompt(6 * BLOCK, seed=2)
    answer = prefill.generate(other, params=HANDOFF).params
    for each in (decode, prefill):
        assert each.scheduler.reset_prefix_cache(reset_connector=each is prefill)
    decode.settle()
    assert decode.answers[request_id].tokens == tokens(PROMPT, 6)
    assert decode.generate(other, 6, params=answer).tokens == tokens(other, 6)
    assert decode.count("handoffs_received") == 2
    assert not decode.failures()
    assert_clean(prefill, decode)


def found(each: InProcessEngine) -> tuple[int, int]:
    """Tokens that an engine has loaded from its own arena and from those of others."""
    return each.count("tokens_kept"), each.count("tokens_from_host")


def met(*engines: InProcessEngine) -> None:
    """Wait until these engines read each other's indexes."""
    for each in engines:
        wait(lambda each=each: len(inspection.present(each.half)) == len(engines) - 1)
    for each in engines:
        each._before = check.sizes(each)


@pytest.mark.parametrize("reset", RESETS)
def test_after_a_reset_that_changes_nothing_all_is_found_but_what_was_to_be_forgotten(
    engine, tokens, reset
):
    first, second = (engine("kv_both", extra=SHARES) for _ in range(2))
    met(first, second)
    texts = [prompt(4 * BLOCK, seed=seed) for seed in (1, 2)]
    for each, text in zip((first, second), texts, strict=True):
        each.generate(text)
        assert each.scheduler.reset_prefix_cache(**RESETS[reset])
    for text in texts:
        assert first.generate(text, 6).tokens == tokens(text, 6)
    own, others = found(first)
    assert (own > 0) == (reset != "with connector")
    assert (others > 0) == (reset != "with connector")
    # What is computed from now on is shared as before.
    third = prompt(4 * BLOCK, seed=3)
    second.generate(third)
    before = found(first)[1]
    assert first.generate(third, 6).tokens == tokens(third, 6)
    assert found(first)[1] > before
    assert_clean(first, second)


@pytest.mark.parametrize("known", [True, False])
def test_nothing_is_kept_of_what_is_computed_before_the_weights_are_known(
    engine, known, monkeypatch
):
    monkeypatch.setattr(epochs, "WAIT_S", 0.1)
    alone = engine("kv_both", extra=SHARES)
    alone.generate(prompt(BLOCK))
    alone.run(lambda: not inspection.being_kept(alone.half)[1])
    before = inspection.indexed(alone.half)
    request_id = alone.submit(prompt(BLOCK - 3, seed=5), max_tokens=3 * BLOCK)
    alone.run(lambda: alone.answers[request_id].tokens)
    if not known:
        inspection.read_weights(alone.worker_half, never_read)
        called(alone)
    alone.run(lambda: alone.done(request_id))
    alone.settle()
    assert (inspection.indexed(alone.half) > before) == known


def test_an_engine_shares_from_its_first_request_on(engine, tokens):
    engines = [engine("kv_both", extra=SHARES, fresh=True) for _ in range(2)]
    met(*engines)
    for each in engines:
        assert each.generate(PROMPT, 6).tokens == tokens(PROMPT, 6)
    assert found(engines[1])[1] > 0
    assert_clean(*engines)


def unread(each: InProcessEngine) -> None:
    """Let the weights of an engine be unreadable from now on."""

    def fail() -> None:
        raise UnreadableWeightsError("they are hidden")

    inspection.read_weights(each.worker_half, fail)


def test_an_engine_whose_weights_cannot_be_read_shares_with_nobody_and_says_so(engine, log):
    engines = [engine("kv_both", extra=SHARES, fresh=True) for _ in range(2)]
    met(*engines)
    for each in engines:
        unread(each)
        each.generate(PROMPT)
        each.generate(PROMPT)
    assert [found(each)[1] for each in engines] == [0, 0]
    assert len([line for line in log if "they are hidden" in line]) == 2
    assert_clean(*engines)


def test_fixed_weights_with_a_name_need_no_digest(engine, tokens):
    extra = {**SHARES, "model_id": "m", "weights": "fixed"}
    engines = [engine("kv_both", extra=extra, fresh=True) for _ in range(2)]
    met(*engines)
    for each in engines:
        unread(each)
        assert each.scheduler.reset_prefix_cache()
        assert each.generate(PROMPT, 6).tokens == tokens(PROMPT, 6)
    assert found(engines[1])[1] > 0
    assert_clean(*engines)


@pytest.mark.parametrize(("weights", "handed_off"), [("fixed", 2), ("may_change", 0)])
def test_fixed_weights_that_cannot_be_read_are_those_of_the_files_whatever_is_called(
    engine, tokens, weights, handed_off
):
    prefill = engine("kv_producer", extra={"weights": weights}, fresh=True)
    decode = engine("kv_consumer")
    unread(prefill)
    for _ in range(2):  # before its first request, and after it
        called(prefill)
        assert prefill.scheduler.reset_prefix_cache()
        answer = prefill.generate(PROMPT, params=HANDOFF).params
        assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
        assert decode.scheduler.reset_prefix_cache()
    assert decode.count("handoffs_received") == handed_off


def test_requests_that_wait_too_long_for_the_weights_are_computed_and_not_shared(
    engine, monkeypatch
):
    prefill = engine("kv_producer", fresh=True)
    monkeypatch.setattr(epochs, "WAIT_S", 0.05)
    inspection.read_weights(prefill.worker_half, never_read)
    answer = prefill.generate(PROMPT, params=HANDOFF)
    assert answer.params["omni_no_handoff"] == "weights_unknown"
    assert_clean(prefill)


def test_where_digests_cannot_be_compared_the_trainers_name_decides(engine, after):
    """The decode engine has another number of ranks."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer", ranks=2)
    for version, compared in (("", False), ("step 1", True)):
        for each in (prefill, decode):
            each.runner.weights = b"new" + version.encode()
            assert each.scheduler.reset_prefix_cache()
            if version:
                each.weights_said.weights_named(version)
        answer = prefill.generate(PROMPT, params=HANDOFF).params
        decode.generate(PROMPT, 6, params=answer)
        assert decode.count("handoffs_received") == compared
        assert decode.failures() == {"other_weights": 1}
    # The name is of the weights that it was given to.
    prefill.runner.weights = b"unnamed"
    assert prefill.scheduler.reset_prefix_cache()
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    decode.generate(PROMPT, 6, params=answer)
    assert decode.count("handoffs_received") == 1
    assert_clean(decode)  # what was handed off waits for an engine of these weights


def never_read() -> Iterator[None]:
    """A reading of weights that does not end, and leaves the cores to others."""
    while True:
        time.sleep(0.001)
        yield


def called(*engines: InProcessEngine) -> None:
    """As if somebody had called all workers of these engines, which may change weights."""
    for each in engines:
        each.weights_said.workers_called()


def test_a_call_that_changes_nothing_ends_nothing(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    called(prefill, decode)
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert hand_off(prefill, decode, prompt(4 * BLOCK, seed=2))
    assert decode.count("handoffs_received") == 2
    assert not decode.failures()
    assert_clean(prefill, decode)


def test_what_was_computed_before_the_first_digest_is_not_taken_for_what_it_names(
    engine, monkeypatch, log
):
    """The weights are changed while the first digest is late, and requests do not wait for it."""
    first, second = engine("kv_both", extra=SHARES, fresh=True), engine("kv_both", extra=SHARES)
    met(first, second)
    text = prompt(4 * BLOCK, seed=8)
    with monkeypatch.context() as late:
        late.setattr(epochs, "WAIT_S", 0.05)
        inspection.read_weights(first.worker_half, never_read)
        first.generate(text)
    new_weights(first, second)
    called(first)
    inspection.read_weights(first.worker_half, lambda: inspection.hashed(lambda: b"new"))
    first.generate([*text, *prompt(2 * BLOCK, seed=9)])  # upon blocks of the former weights
    assert [line for line in log if "Until the prefix cache is reset" in line]
    assert second.scheduler.reset_prefix_cache()
    second.generate([*text, *prompt(2 * BLOCK, seed=9)])
    assert found(second) == (0, 0)


def test_weights_that_were_called_for_before_the_first_request_may_not_be_those_of_the_files(
    engine,
):
    prefill = engine("kv_producer", fresh=True)
    decode = engine("kv_consumer", ranks=2, fresh=True)  # digests cannot be compared
    called(prefill)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    decode.generate(PROMPT, 6, params=answer)
    assert decode.failures() == {"other_weights": 1}


def test_a_request_that_waits_for_the_weights_is_handed_off_though_a_drain_begins(engine, tokens):
    prefill, decode = engine("kv_producer", fresh=True), engine("kv_consumer")
    request_id = prefill.submit(PROMPT, params=HANDOFF)
    prefill.half.leave(300.0)
    late = prefill.submit(prompt(4 * BLOCK, seed=2), params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id, late))
    prefill.run(lambda: not prefill.half.copying())
    assert prefill.answers[late].params["omni_no_handoff"] == "draining"
    answer = prefill.answers[request_id].params
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1


def test_engines_of_other_files_hand_off_once_they_have_the_same_weights(engine, after):
    prefill, decode = engine("kv_producer", files="a"), engine("kv_consumer", files="b")
    new_weights(prefill, decode)
    for each in (prefill, decode):
        assert each.scheduler.reset_prefix_cache()
    decode.generate(prompt(20, seed=1))
    assert hand_off(prefill, decode, PROMPT) == after(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    # With the first weights again their files count.
    for each in (prefill, decode):
        each.runner.weights = b""
        assert each.scheduler.reset_prefix_cache()
        each.generate(prompt(20, seed=1))
    hand_off(prefill, decode, PROMPT)
    assert decode.count("handoffs_received") == 1


def test_what_was_being_copied_when_the_weights_became_unknown_is_leased_by_an_idle_engine(
    engine, tokens
):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    held = prefill.hold(saves=True)
    request_id = prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id) and held.waiting.is_set())
    called(prefill)
    held.open()
    prefill.settle()
    answer = prefill.answers[request_id].params
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)
