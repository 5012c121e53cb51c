# SPDX-License-Identifier: Apache-2.0
"""The same transfers under every model runner that drives a connector: vLLM's two, and older ones.

`V1Runner` and `V2Runner` are vLLM's own code of the installed version. The older ones are what
runners maintained elsewhere may still do: load first, no `wait_for_save` without a forward pass,
`get_finished`, no announced preemption, no failed loads, no worker metadata.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from omni_connector.errors import LayoutError
from omni_connector.plugin import CONNECTOR_NAME
from omni_connector.vllm_v1 import scheduler
from omni_connector.vllm_v1.compat import ReportingStats, carried_report, cross_layer_dims
from omni_connector.vllm_v1.metadata import OmniWorkerMetadata
from omni_connector.vllm_v1.metrics import OmniStats

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
from .test_shared_prefix import QUESTION, landed, publish
from .toy import BLOCK, ToyRunner

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

    def register(self, engine: InProcessEngine, kv_caches: list[dict[str, torch.Tensor]]) -> None:
        with transfer_group(engine.workers[0]):
            self._active = get_kv_connector(engine.config, kv_caches[0])
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
        for each in engine.workers:
            if step.preempted_req_ids:
                self.announce(each, step.preempted_req_ids)
            each.bind_connector_metadata(step.kv_connector_metadata)
            each.start_load_kv(None)
        engine.wait_for_copies()
        request_ids, sampled = engine.runner.execute(step)
        outputs = []
        for each in engine.workers:
            output = KVConnectorOutput()
            if step.total_num_scheduled_tokens:
                each.wait_for_save()
            output.finished_sending, output.finished_recving = each.get_finished(
                step.finished_req_ids
            )
            output.invalid_block_ids = each.get_block_ids_with_load_errors()
            output.kv_connector_stats = each.get_kv_connector_stats()
            self.more(each, output)
            each.clear_connector_metadata()
            outputs.append(model_output(request_ids, sampled, output))
        return engine.joined(outputs)

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


@pytest.fixture(params=["full", "window", "all three"])
def family(request) -> str:
    """A failed load is reported by its blocks for the first, as a whole for the others."""
    return request.param


@pytest.mark.parametrize("length", [BLOCK - 5, BLOCK, 5 * BLOCK + 1, 20 * BLOCK])
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


def test_copies_of_lost_blocks_go_on(engine, tokens, runner):
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


def test_a_failed_load_that_the_runner_keeps_to_itself_would_be_served(
    engine, old_runner, monkeypatch
):
    """What the test above would see, were it not for `compat.recompute`."""
    monkeypatch.setattr(scheduler, "recompute", lambda request, manager: None)
    prefill, decode, reference = trio(engine, old_runner, family="all three")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    wrong = decode.generate(PROMPT, 6, params=answer).tokens
    assert wrong != reference.generate(PROMPT, 6).tokens


def test_a_request_that_is_aborted_while_its_load_fails_leaves_nothing(engine, old_runner, family):
    prefill, decode, reference = trio(engine, old_runner, family=family)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    held = decode.hold(loads=True)
    claim = decode.submit(PROMPT, max_tokens=6, params=answer)
    decode.run(held.waiting.is_set)
    decode.abort(claim)
    held.open()
    assert_clean(prefill, decode)
    assert decode.generate(PROMPT, 6).tokens == reference.generate(PROMPT, 6).tokens


def test_a_shared_prefix_arrives_or_is_computed(sharer, shelf, tokens, runner):
    first, second = (sharer(mixin=runner(), policy="fail") for _ in range(2))
    publish(first, shelf)
    shelf.before_get = lambda keys: shelf.evict()
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.failures() == {"store_blocks_gone": 1}
    landed(second)  # what was computed anew
    shelf.before_get = lambda keys: None
    third = sharer(mixin=runner())
    assert third.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert third.count("tokens_shared") == 6 * BLOCK
    assert_clean(first, second, third)


def test_a_load_ends_no_earlier_than_what_is_said_of_it(engine):
    """The first step of a runner that carries no worker metadata: nobody knows that yet."""
    prefill, _, reference = trio(engine, OlderRunner, family="all three")
    decode = engine("kv_consumer", mixin=OlderRunner(), family="all three", instant_copies=True)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    claim = decode.submit(PROMPT, max_tokens=6, params=answer)
    # The answer is there before the first step, so that this one starts the load.
    assert decode.half._receiver._loads[claim].future.result(10) is not None
    decode.settle()
    assert decode.answers[claim].tokens == reference.generate(PROMPT, 6).tokens
    assert decode.failures() == {"checksum_mismatch": 1}
    assert_clean(prefill, decode)


def test_what_two_ranks_report_is_added_up(engine, old_runner, family):
    """Also where it comes with the statistics; and one rank alone may fail."""
    prefill, decode, reference = trio(engine, old_runner, family=family, ranks=2)
    for spoiled in (False, True):
        text = prompt(6 * BLOCK - 3, seed=spoiled)
        answer = prefill.generate(text, params=HANDOFF).params
        if spoiled:
            spoil_a_slot(prefill, rank=1)
        assert decode.generate(text, 6, params=answer).tokens == reference.generate(text, 6).tokens
        assert_clean(prefill, decode)
    assert decode.count("handoffs_received") == 1
    assert decode.failures() == {"checksum_mismatch": 1}


def test_a_report_is_found_among_those_of_other_connectors():
    report = OmniWorkerMetadata(done={3: 1})
    ours = ReportingStats({}, report)
    several = MultiKVConnectorStats(data={"Other": OmniStats(), CONNECTOR_NAME: ours})
    for stats, found in (
        (None, None),
        (OmniStats(), None),
        (ours, report),
        (several, report),
        (MultiKVConnectorStats(data={"Other": OmniStats()}), None),
    ):
        assert carried_report(KVConnectorOutput(kv_connector_stats=stats)) is found


class Backend:
    """An attention backend of the time of cross-layer tensors, K and V apart."""

    ORDER = (1, 0, 2, 3, 4, 5)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool) -> tuple[int, ...]:
        assert include_num_layers_dimension
        return cls.ORDER


class HeadsFirst(Backend):
    ORDER = (1, 4, 0, 2, 3, 5)


class BlocksSecond(Backend):
    ORDER = (2, 0, 1, 3, 4, 5)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size


class Unordered(Backend):
    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool) -> tuple[int, ...]:
        raise NotImplementedError


class Latent:
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


class Folded:
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks * block_size, num_kv_heads, head_size


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        (Backend, "BLCNHC"),
        (HeadsFirst, "BHLCNC"),
        (BlocksSecond, "BLCNHC"),
        (Unordered, "LBCNHC"),
        (Latent, "LBNC"),
    ],
)
def test_a_backend_says_what_the_dimensions_are(backend, dims):
    assert cross_layer_dims(backend) == dims


def test_dimensions_that_cannot_be_told_apart_are_refused():
    with pytest.raises(LayoutError, match=r"Folded: dimension 0 .*'B', 'N'"):
        cross_layer_dims(Folded)


class Packed(Backend):
    """K and V in one dimension, as the toy model takes them."""

    ORDER = (1, 0, 2, 3, 4)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks, block_size, num_kv_heads, 2 * head_size


class PackedHeadsFirst(Packed):
    ORDER = (1, 3, 0, 2, 4)


class CrossLayerRunner(OlderRunner):
    """It allocates one tensor of all layers, where the connector prefers that."""

    def __init__(self, backend: type[Backend]) -> None:
        self._backend = backend

    def register(self, engine: InProcessEngine, kv_caches: list[dict[str, torch.Tensor]]) -> None:
        (worker,), (names,) = engine.workers, kv_caches
        assert worker.prefer_cross_layer_blocks
        spec = engine.kv_config.kv_cache_groups[0].kv_cache_spec
        num_blocks = engine.kv_config.num_blocks
        shape = self._backend.get_kv_cache_shape(
            num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
        )
        order = self._backend.ORDER
        tensor = torch.zeros([(len(names), *shape)[i] for i in order], dtype=spec.dtype)
        layers = tensor.permute(*[order.index(i) for i in range(len(order))])
        views = {name: layers[i].transpose(1, 2) for i, name in enumerate(names)}  # B, H, N, C
        engine.runner = ToyRunner([views], engine.kv_config)
        worker.register_cross_layers_kv_cache(tensor, self._backend)


@pytest.mark.parametrize("backend", [Packed, PackedHeadsFirst])
def test_a_tensor_of_all_layers_is_handed_off(engine, tokens, backend):
    prefill = engine("kv_producer", mixin=CrossLayerRunner(backend))
    decode = engine("kv_consumer", mixin=CrossLayerRunner(backend))
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("backend", [Packed, PackedHeadsFirst])
def test_a_tensor_of_all_layers_comes_from_and_goes_to_an_engine_without_one(
    engine, tokens, backend
):
    old = engine("kv_both", mixin=CrossLayerRunner(backend))
    new = engine("kv_both")
    for prefill, decode in ((old, new), (new, old)):
        text = prompt(6 * BLOCK - 3, seed=decode is old)
        assert hand_off(prefill, decode, text) == tokens(text, 6)
        assert decode.count("handoffs_received") == 1
        assert_clean(prefill, decode)


def trio(
    engine, runner: type[Mixin], **options: Any
) -> tuple[InProcessEngine, InProcessEngine, InProcessEngine]:
    """A prefill and a decode engine under such runners, and one without connector."""
    prefill, decode = (
        engine(role, mixin=runner(), **options) for role in ("kv_producer", "kv_consumer")
    )
    return prefill, decode, engine(**options)


def spoil_a_slot(prefill: InProcessEngine, rank: int = 0) -> None:
    """Change a byte of what is handed off."""
    slot = next(iter(prefill.half._directory._handoffs.values())).slots[0][-1]
    prefill.worker_halves[rank]._arena.slots[slot][5] ^= 0x10
