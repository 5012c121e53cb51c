# SPDX-License-Identifier: Apache-2.0
"""Model runners that drive a connector: vLLM's own, an older one, and what their tests share.

`V1Runner` and the `V2` ones are vLLM's own code of the installed version. The older one is what
runners maintained elsewhere may still do: load first, no `wait_for_save` without a forward pass,
`get_finished`, no announced preemption, no failed loads, no worker metadata.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.simulation.engines import lifecycles
from tests.simulation.engines.lifecycles import model_output

from .harness import InProcessEngine, Lifecycle


class V1Runner(Lifecycle):
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


class V2Runner(Lifecycle):
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
        output = self._finish(step.finished_req_ids)
        return model_output(request_ids, sampled, output)

    def _finish(self, finished_req_ids: set[str]) -> KVConnectorOutput | None:
        return self._active.post_forward(finished_req_ids)


class V2DraftingRunner(V2Runner):
    """With a drafter, after which alone KV is saved: from vLLM 0.33 on."""

    def _finish(self, finished_req_ids: set[str]) -> KVConnectorOutput | None:
        output = self._active.post_forward(finished_req_ids, defer_finalize=True)
        self._active.finalize_step()
        return output


class OlderRunner(Lifecycle):
    """One before vLLM 0.30; of what ended it tells only finished ids, blocks and statistics."""

    def execute(
        self, engine: InProcessEngine, worker: KVConnectorBase_V1, step: SchedulerOutput
    ) -> ModelRunnerOutput:
        return engine.joined(
            lifecycles.older(engine.workers, engine.runner, step, engine.wait_for_copies)
        )


@contextmanager
def transfer_group(worker: KVConnectorBase_V1) -> Iterator[None]:
    """Make a connector that of this process, as it is in an engine's worker."""
    before = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = worker
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = before


DRAFTING = [V2DraftingRunner] if hasattr(ActiveKVConnector, "finalize_step") else []
RUNNERS = [V1Runner, V2Runner, *DRAFTING, OlderRunner]


def trio(
    engine, runner: type[Lifecycle], **options: Any
) -> tuple[InProcessEngine, InProcessEngine, InProcessEngine]:
    """A prefill and a decode engine under such runners, and one without connector."""
    prefill, decode = (
        engine(role, lifecycle=runner(), **options) for role in ("kv_producer", "kv_consumer")
    )
    return prefill, decode, engine(**options)


def spoil_a_slot(prefill: InProcessEngine, rank: int = 0) -> None:
    """Change a byte of what is handed off."""
    slot = prefill.handoffs[0].slots[0][-1]
    prefill.arena(rank).slots[slot][5] ^= 0x10
