# SPDX-License-Identifier: Apache-2.0
"""What model runners do with a connector, in the order in which each of them does it.

`v1` and `v2` are vLLM's own. `v2` zeroes and copies blocks before the connector hears of the step.
`older` is the `KVConnectorModelRunnerMixin` of the time before vLLM 0.30; see `compat`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.toy_runner import ToyRunner

Workers = Sequence[KVConnectorBase_V1]
Breathe = Callable[[], None]
"""Called where other threads may run in the middle of a step."""

Lifecycle = Callable[[Workers, ToyRunner, SchedulerOutput, Breathe], list[ModelRunnerOutput]]


def alone(
    workers: Workers, runner: ToyRunner, step: SchedulerOutput, breathe: Breathe
) -> list[ModelRunnerOutput]:
    """Without a connector."""
    return [model_output(*runner.execute(step))]


def v1(
    workers: Workers, runner: ToyRunner, step: SchedulerOutput, breathe: Breathe
) -> list[ModelRunnerOutput]:
    """vLLM's `GPUModelRunner`, and the mixin's calls."""
    for worker in workers:
        worker.handle_preemptions(_metadata(step))
    breathe()
    runner.prepare(step)
    breathe()
    for worker in workers:
        worker.bind_connector_metadata(_metadata(step))
    breathe()
    return _forward(workers, runner, step, breathe, _endless(workers, step))


def v2(
    workers: Workers, runner: ToyRunner, step: SchedulerOutput, breathe: Breathe
) -> list[ModelRunnerOutput]:
    """vLLM's newer model runner: `ActiveKVConnector`, and what comes before it."""
    runner.prepare(step)
    breathe()
    for worker in workers:
        worker.handle_preemptions(_metadata(step))
        worker.bind_connector_metadata(_metadata(step))
    breathe()
    return _forward(workers, runner, step, breathe)


def older(
    workers: Workers, runner: ToyRunner, step: SchedulerOutput, breathe: Breathe
) -> list[ModelRunnerOutput]:
    """A runner before vLLM 0.30: it tells only finished ids, blocks and statistics."""
    for worker in workers:
        worker.bind_connector_metadata(_metadata(step))
        worker.start_load_kv(_no_context())
    breathe()
    batch = runner.execute(step)
    breathe()
    outputs = []
    for worker in workers:
        output = KVConnectorOutput()
        if step.total_num_scheduled_tokens:
            _wait_for_save(worker)
            breathe()
        finished: Any = worker.get_finished(step.finished_req_ids)
        output.finished_sending, output.finished_recving = finished
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = worker.get_kv_connector_stats()
        worker.clear_connector_metadata()
        outputs.append(model_output(*batch, output))
    return outputs


LIFECYCLES: Final[dict[str, Lifecycle]] = {"v1": v1, "v2": v2, "older": older}


def _endless(workers: Workers, step: SchedulerOutput) -> Workers:
    """Those for which `GPUModelRunner` does not end the step, as it ends it where it drafts: in the
    last pipeline stage."""
    if not workers or not step.total_num_scheduled_tokens:
        return ()
    config = workers[0]._vllm_config
    last_stage = config.parallel_config.tensor_parallel_size
    return () if config.speculative_config is None else workers[:-last_stage]


def _forward(
    workers: Workers,
    runner: ToyRunner,
    step: SchedulerOutput,
    breathe: Breathe,
    endless: Workers = (),
) -> list[ModelRunnerOutput]:
    for worker in workers if step.has_sync_kv_loads else ():  # of another connector
        worker.start_load_kv(_no_context())
    batch = runner.forward(step)
    breathe()
    for worker in workers:
        if not step.has_sync_kv_loads:
            worker.start_load_kv(_no_context())
        if worker not in endless:
            _wait_for_save(worker)
        breathe()
    runner.postprocess()
    return [
        model_output(*batch, connector_output(worker, step, ends=worker not in endless))
        for worker in workers
    ]


def connector_output(
    worker: KVConnectorBase_V1, step: SchedulerOutput, *, ends: bool = True
) -> KVConnectorOutput:
    """What vLLM asks of a worker's connector after a step; the step's metadata is over with it,
    unless the runner does not end the step."""
    results = worker.get_transfer_results(step.finished_req_ids)
    output = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_stats=worker.get_kv_connector_stats(),
        kv_cache_events=worker.get_kv_connector_kv_cache_events(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    if ends:
        worker.clear_connector_metadata()
    return output


def model_output(
    request_ids: list[str],
    sampled: list[list[int]],
    connector_output: KVConnectorOutput | None = None,
) -> ModelRunnerOutput:
    """What the worker sends the scheduler."""
    if connector_output is not None and _is_empty(connector_output):
        connector_output = None
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
        sampled_token_ids=sampled,
        kv_connector_output=connector_output,
    )


def _metadata(step: SchedulerOutput) -> Any:
    assert step.kv_connector_metadata is not None
    return step.kv_connector_metadata


def _no_context() -> Any:
    return None


def _wait_for_save(worker: Any) -> None:
    worker.wait_for_save()


def _is_empty(output: Any) -> bool:
    return bool(output.is_empty())
