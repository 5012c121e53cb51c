# SPDX-License-Identifier: Apache-2.0
"""Saves that follow the forward pass: layers are copied while the next ones are computed."""

from collections.abc import Sequence

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests import inspection
from tests.toy import BLOCK, LAYERS, PAGE

from .harness import HANDOFF, InProcessEngine, assert_clean, hand_off, prompt, wait
from .runners import RUNNERS, transfer_group

pytestmark = pytest.mark.vllm

PROMPT = prompt(5 * BLOCK - 3)
SIZE = 5 * LAYERS * PAGE


def announce(
    engine: InProcessEngine, layer: str, workers: Sequence[KVConnectorBase_V1] | None = None
) -> None:
    """What vLLM's attention layers call, of all workers or of those of a pipeline stage."""
    for worker in engine.workers if workers is None else workers:
        if worker.has_connector_metadata():
            with transfer_group(worker):
                worker.save_kv_layer(layer, None, None)


def drain(engine: InProcessEngine) -> None:
    """Wait until every layer that was told of has been copied."""
    wait(lambda: all(map(inspection.follows, engine.worker_halves)))


@pytest.fixture
def by_layer(engine):
    """Makes engines whose layers tell when they are computed, and are copied at once."""

    def make(role, *, at_once=True, **options):
        made = engine(role, **options)

        def computed(layer):
            announce(made, layer)
            if at_once:
                drain(made)

        made.runner.layer_computed = computed
        return made

    return make


def test_all_layers_are_copied_before_the_forward_pass_has_ended(engine, by_layer, tokens):
    prefill, decode = by_layer("kv_producer"), engine("kv_consumer")
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert prefill.count("bytes_saved") == prefill.count("bytes_saved_early") == SIZE
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


def test_a_load_waits_for_no_work_of_the_step_that_starts_it(engine, tokens, monkeypatch):
    """vLLM starts loads when it has launched the forward pass, which a device may still compute."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    copier = inspection.copier(decode.worker_half)
    forward, fence = decode.runner.forward, copier.fence
    marked, behind = [], []

    def compute(step):
        if decode.worker_half.loads_left:
            behind.append(not marked)
        marked.clear()
        return forward(step)

    monkeypatch.setattr(copier, "fence", lambda: marked.append(True) or fence())
    monkeypatch.setattr(decode.runner, "forward", compute)
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert behind == [False]
    assert not decode.failures()
    assert_clean(prefill, decode)


@pytest.mark.parametrize("runner", RUNNERS)
def test_whatever_drives_the_connector(engine, by_layer, tokens, runner):
    prefill = by_layer("kv_producer", lifecycle=runner())
    decode = engine("kv_consumer", lifecycle=runner())
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert prefill.count("bytes_saved_early") == SIZE
    assert_clean(prefill, decode)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("chunk", [4096, 24], ids=["whole", "chunked"])
@pytest.mark.parametrize("family", ["full", "latent", "window and full", "all three"])
@pytest.mark.values
def test_every_family_arrives(engine, by_layer, family, chunk, overlap, at_once):
    options = {"family": family, "max_tokens_a_step": chunk, "async_scheduling": overlap}
    prefill = by_layer("kv_producer", at_once=at_once, **options)
    decode, alone = engine("kv_consumer", **options), engine(**options)
    for seed in range(3):
        asked = prompt(10 * BLOCK - 7, seed=seed)
        assert hand_off(prefill, decode, asked) == alone.generate(asked, 6).tokens
    assert decode.count("handoffs_received") == 3
    early = prefill.count("bytes_saved_early")
    if at_once:
        # A layer that keeps a state tells nothing.
        whole = prefill.count("bytes_saved")
        assert 0 < early < whole if family == "all three" else early == whole
    assert_clean(prefill, decode)


def test_requests_of_one_batch_and_ranks(engine, by_layer):
    options = {"ranks": 2, "max_tokens_a_step": 64}
    prefill, decode = by_layer("kv_producer", **options), engine("kv_consumer", **options)
    alone = engine(**options)
    prompts = [prompt(40, seed=seed) for seed in range(3)]
    asked = [prefill.submit(each, params=HANDOFF) for each in prompts]
    prefill.run(lambda: prefill.done(*asked))
    for request_id, each in zip(asked, prompts, strict=True):
        params = prefill.answers[request_id].params
        assert decode.generate(each, 6, params=params).tokens == alone.generate(each, 6).tokens
    assert decode.count("handoffs_received") == 3
    assert prefill.count("bytes_saved_early") == prefill.count("bytes_saved") > 0
    assert_clean(prefill, decode)


def test_nothing_can_be_read_before_the_forward_pass_has_ended(by_layer):
    prefill = by_layer("kv_producer")
    states = []
    follow = prefill.runner.layer_computed

    def computed(layer):
        follow(layer)
        arena = prefill.arena()
        for slot in prefill.handoffs[0].slots[0]:
            states.append(inspection.is_published(arena, slot))

    prefill.runner.layer_computed = computed
    prefill.generate(PROMPT, params=HANDOFF)
    assert len(states) == LAYERS * 5
    assert not any(states)


def test_a_layer_that_is_computed_twice_is_copied_anew(engine, by_layer, tokens):
    """As with a batch that is computed in two halves, or a layer that a drafter runs again."""
    prefill, decode = by_layer("kv_producer"), engine("kv_consumer")
    follow, runner = prefill.runner.layer_computed, prefill.runner
    told = []

    def computed(layer):
        if not told:  # the first time with other bytes
            caches = [cache.copy() for cache in runner._layers]
            for cache in runner._layers:
                cache[1:] ^= 0x33
            follow(layer)
            for cache, before in zip(runner._layers, caches, strict=True):
                cache[...] = before
        told.append(layer)
        follow(layer)

    runner.layer_computed = computed
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("drafts", [1, 3])
def test_layers_that_a_drafter_computes_several_times_are_copied_at_the_end(
    engine, by_layer, tokens, drafts
):
    """A drafter of k tokens computes its layers k times, which the first step with them shows."""
    options = {"family": "full with drafter", "drafter": "mtp", "drafts": drafts}
    prefill, decode = by_layer("kv_producer", **options), engine("kv_consumer", **options)
    late = []
    for seed in range(3):
        asked = prompt(5 * BLOCK - 3, seed)
        before = prefill.count("bytes_saved") - prefill.count("bytes_saved_early")
        assert hand_off(prefill, decode, asked) == tokens(asked, 6)
        late.append(prefill.count("bytes_saved") - prefill.count("bytes_saved_early") - before)
    assert late == ([0, 0, 0] if drafts == 1 else [0, SIZE, SIZE])
    assert not decode.failures()
    assert_clean(prefill, decode)


def test_a_forward_pass_that_dies_leaves_no_slot_that_can_be_read(by_layer):
    prefill = by_layer("kv_producer")
    follow = prefill.runner.layer_computed

    def computed(layer):
        follow(layer)
        raise KeyboardInterrupt

    prefill.runner.layer_computed = computed
    prefill.submit(PROMPT, params=HANDOFF)
    with pytest.raises(KeyboardInterrupt):
        prefill.step()
    taken = prefill.handoffs[0].slots[0].tolist()
    worker = prefill.worker_half
    assert not inspection.copies_ended(worker)
    # The step after it, if there is one.
    worker.bind(type(worker._metadata)())
    wait(lambda: inspection.copies_ended(worker))
    assert not any(inspection.is_published(prefill.arena(), slot) for slot in taken)
    worker.collect()
    assert set(worker.take_report().failed.values()) == {"cancelled"}


def test_a_shutdown_in_the_middle_waits_for_nothing(by_layer):
    prefill = by_layer("kv_producer")
    follow = prefill.runner.layer_computed

    def computed(layer):
        follow(layer)
        prefill.shutdown()
        raise KeyboardInterrupt

    prefill.runner.layer_computed = computed
    prefill.submit(PROMPT, params=HANDOFF)
    with pytest.raises(KeyboardInterrupt):
        prefill.step()


def test_a_layer_of_a_step_without_saves_touches_no_thread(engine, monkeypatch):
    decode = engine("kv_both")
    thread = inspection.saves(decode.worker_half)
    monkeypatch.setattr(thread, "notify", lambda: pytest.fail("notified"))
    monkeypatch.setattr(thread, "submit", lambda *args: pytest.fail("started"))
    decode.runner.layer_computed = lambda layer: announce(decode, layer)
    decode.generate(PROMPT, 3)
