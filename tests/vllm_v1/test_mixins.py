# SPDX-License-Identifier: Apache-2.0
"""The same transfers under every model runner that drives a connector: vLLM's two, and older ones.

`V1Runner` and `V2Runner` are vLLM's own code of the installed version. The older ones are what
runners maintained elsewhere may still do: load first, no `wait_for_save` without a forward pass,
`get_finished`, no announced preemption, no failed loads, no worker metadata.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from omni_connector.vllm_v1 import scheduler as scheduler_half
from omni_connector.vllm_v1 import worker as worker_half

from .harness import (
    HANDOFF,
    InProcessEngine,
    Mixin,
    assert_clean,
    hand_off,
    model_output,
    prompt,
    run,
    wait,
)
from .toy import BLOCK

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)


class V1Runner(Mixin):
    """vLLM's `KVConnectorModelRunnerMixin` itself, called as `GPUModelRunner` calls it."""

    def execute(
        self, engine: InProcessEngine, worker: KVConnectorBase_V1, step: SchedulerOutput
    ) -> ModelRunnerOutput:
        with transfer_group(worker):
            worker.handle_preemptions(step.kv_connector_metadata)
            if not step.total_num_scheduled_tokens:
                engine.runner.execute(step)
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(step, engine.config)
            with (
                set_forward_context(None, engine.config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as output,
            ):
                request_ids, sampled = engine.runner.execute(step)
        return model_output(request_ids, sampled, output)


class V2Runner(Mixin):
    """vLLM's `ActiveKVConnector` itself."""

    def register(self, engine: InProcessEngine, kv_caches: dict[str, torch.Tensor]) -> None:
        assert engine.worker is not None
        with transfer_group(engine.worker):
            self._active = get_kv_connector(engine.config, kv_caches)
        assert isinstance(self._active, ActiveKVConnector)

    def execute(
        self, engine: InProcessEngine, worker: KVConnectorBase_V1, step: SchedulerOutput
    ) -> ModelRunnerOutput:
        if not step.total_num_scheduled_tokens:
            engine.runner.execute(step)
            return self._active.no_forward(step)
        self._active.pre_forward(step)
        request_ids, sampled = engine.runner.execute(step)
        self._active.finish_forward()
        output = self._active.post_forward(step.finished_req_ids)
        return model_output(request_ids, sampled, output)


class OlderRunner(Mixin):
    """The lifecycle before all that; of what ended it tells only finished ids and blocks."""

    def execute(
        self, engine: InProcessEngine, worker: KVConnectorBase_V1, step: SchedulerOutput
    ) -> ModelRunnerOutput:
        output = KVConnectorOutput()
        if step.preempted_req_ids:
            self.announce(worker, step.preempted_req_ids)
        worker.bind_connector_metadata(step.kv_connector_metadata)
        worker.start_load_kv(None)
        engine.wait_for_copies()
        request_ids, sampled = engine.runner.execute(step)
        if step.total_num_scheduled_tokens:
            worker.wait_for_save()
        output.finished_sending, output.finished_recving = worker.get_finished(
            step.finished_req_ids
        )
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = worker.get_kv_connector_stats()
        self.more(worker, output)
        worker.clear_connector_metadata()
        return model_output(request_ids, sampled, output)

    def announce(self, worker: KVConnectorBase_V1, preempted: set[str]) -> None:
        """Say nothing of preempted requests."""

    def more(self, worker: KVConnectorBase_V1, output: KVConnectorOutput) -> None:
        """Ask for nothing more."""


class OldRunner(OlderRunner):
    """A little younger: it announces preemptions, by request ids, and carries worker metadata."""

    def announce(self, worker: KVConnectorBase_V1, preempted: set[str]) -> None:
        worker.handle_preemptions(preempted)

    def more(self, worker: KVConnectorBase_V1, output: KVConnectorOutput) -> None:
        output.kv_connector_worker_meta = worker.build_connector_worker_meta()


@contextmanager
def transfer_group(worker: KVConnectorBase_V1) -> Iterator[None]:
    """Make a connector that of this process, as it is in an engine's worker."""
    before = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = worker
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = before


OLD = [OldRunner, OlderRunner]
RUNNERS = [V1Runner, V2Runner, *OLD]


@pytest.fixture(params=RUNNERS, ids=lambda runner: runner.__name__)
def runner(request) -> type[Mixin]:
    return request.param


@pytest.fixture(params=OLD, ids=lambda runner: runner.__name__)
def old_runner(request) -> type[Mixin]:
    return request.param


@pytest.mark.parametrize("length", [BLOCK - 5, BLOCK, 5 * BLOCK + 1, 20 * BLOCK])
def test_a_hand_off_arrives(engine, tokens, runner, length):
    prefill = engine("kv_producer", mixin=runner(), max_tokens_a_step=4 * BLOCK)
    decode = engine("kv_consumer", mixin=runner())
    text = prompt(length)
    assert hand_off(prefill, decode, text) == tokens(text, 6)
    assert decode.count("handoffs_received") == 1
    assert (
        decode.count("blocks_loaded") == prefill.count("blocks_saved") == -(-(length - 1) // BLOCK)
    )
    assert_clean(prefill, decode)
    assert hand_off(prefill, decode, text) == tokens(text, 6)
    assert_clean(prefill, decode)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_many_at_once_arrive(engine, tokens, runner, overlap):
    options = {"async_scheduling": overlap, "mixin": runner()}
    both = engine("kv_both", max_tokens_a_step=3 * BLOCK, **options)
    decode = engine("kv_consumer", **options | {"mixin": runner()})
    texts = [prompt(length, seed=5) for length in range(BLOCK, 9 * BLOCK, 25)]
    handed = [both.submit(text, params=HANDOFF) for text in texts]
    both.run(lambda: both.done(*handed))
    claims = [
        decode.submit(text, max_tokens=4, params=both.answers[request_id].params)
        for text, request_id in zip(texts, handed, strict=True)
    ]
    run([both, decode], lambda: decode.done(*claims))
    assert [decode.answers[claim].tokens for claim in claims] == [tokens(t, 4) for t in texts]
    assert decode.count("handoffs_received") == len(texts)
    assert_clean(both, decode)


def test_copies_of_lost_blocks_are_given_up(engine, tokens, runner):
    """Also where nobody announces a preemption, or only by request ids."""
    prefill = engine(
        "kv_producer",
        mixin=runner(),
        usable_blocks=14,
        max_tokens_a_step=4 * BLOCK,
        long_prefill=2 * BLOCK,
    )
    decode = engine("kv_consumer", mixin=runner())
    long, text = prompt(12 * BLOCK, seed=1), prompt(8 * BLOCK, seed=2)
    held = prefill.hold(saves=True)
    other = prefill.submit(long, max_tokens=2)
    handed = prefill.submit(text, params=HANDOFF)
    prefill.run(lambda: handed in prefill.preempted and prefill.done(other))
    held.open()
    prefill.settle()
    answer = prefill.answers[handed].params
    assert decode.generate(text, 6, params=answer).tokens == tokens(text, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


def test_blocks_stay_until_their_copies_ended(engine, tokens, runner):
    prefill, decode = (engine(role, mixin=runner()) for role in ("kv_producer", "kv_consumer"))
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


@pytest.mark.parametrize("by_block", [True, False], ids=["by block", "whole"])
def test_a_failed_load_is_computed_instead(engine, tokens, runner, by_block, monkeypatch):
    for half in (scheduler_half, worker_half):
        monkeypatch.setattr(half, "fails_by_block", lambda config: by_block)
    prefill, decode = (engine(role, mixin=runner()) for role in ("kv_producer", "kv_consumer"))
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    other = decode.submit(prompt(50, seed=1), max_tokens=4)
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.answers[other].tokens == tokens(prompt(50, seed=1), 4)
    assert decode.failures() == {"checksum_mismatch": 1}
    assert_clean(prefill, decode)
    # Nor is anything of it in the prefix cache.
    assert decode.generate(PROMPT, 6).tokens == tokens(PROMPT, 6)


def test_a_failed_load_that_the_runner_keeps_to_itself_would_be_served(
    engine, tokens, old_runner, monkeypatch
):
    """What the test above would see, were it not for `compat.recompute`."""
    for half in (scheduler_half, worker_half):
        monkeypatch.setattr(half, "fails_by_block", lambda config: False)
    monkeypatch.setattr(scheduler_half, "recompute", lambda request, manager: None)
    prefill, decode = (engine(r, mixin=old_runner()) for r in ("kv_producer", "kv_consumer"))
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    assert decode.generate(PROMPT, 6, params=answer).tokens != tokens(PROMPT, 6)


def test_a_request_that_is_aborted_while_its_load_fails_leaves_nothing(
    engine, tokens, old_runner, monkeypatch
):
    for half in (scheduler_half, worker_half):
        monkeypatch.setattr(half, "fails_by_block", lambda config: False)
    prefill, decode = (engine(r, mixin=old_runner()) for r in ("kv_producer", "kv_consumer"))
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    held = decode.hold(loads=True)
    claim = decode.submit(PROMPT, max_tokens=6, params=answer)
    decode.run(held.waiting.is_set)
    decode.abort(claim)
    held.open()
    assert_clean(prefill, decode)
    assert decode.generate(PROMPT, 6).tokens == tokens(PROMPT, 6)


def test_a_load_ends_no_earlier_than_what_is_said_of_it(engine, tokens, monkeypatch):
    """The first step of a runner that carries no worker metadata: nobody knows that yet."""
    for half in (scheduler_half, worker_half):
        monkeypatch.setattr(half, "fails_by_block", lambda config: False)
    prefill = engine("kv_producer")
    decode = engine("kv_consumer", mixin=OlderRunner(), instant_copies=True)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    claim = decode.submit(PROMPT, max_tokens=6, params=answer)
    # The answer is there before the first step, so that this one starts the load.
    assert decode.half._receiver._loads[claim].future.result(10) is not None
    decode.settle()
    assert decode.answers[claim].tokens == tokens(PROMPT, 6)
    assert decode.failures() == {"checksum_mismatch": 1}
    assert_clean(prefill, decode)


def spoil_a_slot(prefill: InProcessEngine) -> None:
    slot = next(iter(prefill.half._directory._handoffs.values())).slots[0][2]
    prefill.worker_half._arena.slots[slot][5] ^= 0x10
