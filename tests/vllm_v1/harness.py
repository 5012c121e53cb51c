# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler and both halves of a connector in this process, around a toy model.

What `EngineCore` and its worker do between scheduler, connector and model is done here in the
same order; everything on vLLM's side of the connector but the model is vLLM's own.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import random
import threading
import time
import unittest.mock
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import FinishReason, Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from omni_connector.arena.arena import Arena
from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.load_plans import LoadPlans
from omni_connector.handoff.leases import Handoff, SlotDirectory
from omni_connector.identity.adapters import version_of
from omni_connector.identity.epochs import WeightsSaid
from omni_connector.plugin import CONNECTOR_NAME, register
from omni_connector.runtime.turns import Turns
from omni_connector.testing import no_op
from omni_connector.vllm_v1 import connector as connector_module
from omni_connector.vllm_v1.adapter_loads import AdapterLoads
from omni_connector.vllm_v1.connector import OmniKVConnector
from omni_connector.vllm_v1.drafter import tokens_ahead
from omni_connector.vllm_v1.identity import weight_files, weights_id
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.scheduler import OmniScheduler
from omni_connector.vllm_v1.worker import OmniWorker
from tests import inspection
from tests.simulation import check
from tests.simulation.engines import lifecycles
from tests.toy import (
    BLOCK,
    GROUPS,
    MAX_LAYERS,
    PAGE,
    SLOT,
    drafting,
    head_copies,
    kv_cache_config,
    layers_with_states,
    stage_config,
    tell_hash_block_size,
)
from tests.toy_runner import ToyRunner

from .held import Exchangeable, HeldCopier

GIB = 1 << 30
DEADLINE = 120.0  # stops a hang, and is waited for by no test that passes

ALONE = {"arena_gib": 0.004, "share": False}
HANDOFF = {"do_remote_decode": True, "do_remote_prefill": False}
# vLLM 0.30 takes MTP of several modules for MTP of one.
SEVERAL_MODULES = hasattr(VllmConfig, "num_prefill_lookahead_tokens")
_numbers = itertools.count()


@dataclass
class Answer:
    """What a client of the engine has got so far."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    params: dict[str, Any] | None = None


class Clock:
    """The clock of one engine, which a test may put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Lifecycle:
    """What a model runner does with a connector: here as `KVConnectorModelRunnerMixin` does it."""

    def register(self, engine: "InProcessEngine", kv_caches: list[dict[str, torch.Tensor]]) -> None:
        """Hand over the caches of each rank, when they are allocated."""
        for rank, (worker, caches) in enumerate(zip(engine.workers, kv_caches, strict=True)):
            # In vLLM each worker has a process, which knows its rank and what connector it drives.
            engine.config.parallel_config.rank = rank
            with unittest.mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker):
                worker.register_kv_caches(caches)

    def execute(
        self, engine: "InProcessEngine", worker: KVConnectorBase_V1, step: SchedulerOutput
    ) -> ModelRunnerOutput:
        """One step, the forward pass included."""
        return engine.joined(
            lifecycles.v1(engine.workers, engine.runner, step, engine.wait_for_copies)
        )


class InProcessEngine:
    """One engine: a real scheduler, a connector in two halves, a toy model.

    Args:
        model: folder of `write_model`.
        role: `kv_role`; None makes an engine without connector, the reference.
        engine_id: name that peers find it by.
        connector: `OmniKVConnector` or `NoOpConnector`.
        extra: `kv_connector_extra_config`; by default hand-offs alone, in a small arena.
        before, after: other children of `MultiConnector`, as its configuration names them.
        policy: `kv_load_failure_policy`.
        usable_blocks: KV blocks that requests can have.
        long_prefill: most tokens of one prompt in a step where others wait, 0 for no limit.
        instant_copies: every copy ends in the step that starts it; else in some later one, mostly.
        family: of `toy.FAMILIES`.
        ranks: tensor-parallel size; each rank has caches and a worker half of its own.
        stages: numbers of the layers at which the pipeline stages after the first begin; each stage
            has as many ranks.
        lifecycle: what the model runner does with the connector.
        hash_algorithm: `--prefix-caching-hash-algo`.
        data_parallel_index: of this engine among those of one deployment.
        events: `--kv-events-config`.
        weights: of the toy; the file in `model` should hold the same.
        hashes_files: whether it makes the digest of all bytes of its files.
        thinking: the token that opens the model's thoughts and the one that closes them, as
            `--reasoning-parser` tells them.
        drafter, drafts: of `toy.drafting`; with a drafter that has KV, `family` is of
            `toy.DRAFTED`.
        match_unit: `--prefix-match-unit`; 0: as vLLM chooses it.
    """

    def __init__(
        self,
        model: Path,
        role: str | None = None,
        *,
        engine_id: str | None = None,
        connector: str = CONNECTOR_NAME,
        extra: dict[str, Any] | None = None,
        before: Sequence[dict[str, Any]] = (),
        after: Sequence[dict[str, Any]] = (),
        policy: str = "recompute",
        usable_blocks: int = 64,
        block_size: int = BLOCK,
        max_tokens_a_step: int = 4096,
        max_num_seqs: int = 8,
        long_prefill: int = 0,
        prefix_caching: bool = True,
        async_scheduling: bool = False,
        instant_copies: bool = False,
        lifecycle: "Lifecycle | None" = None,
        family: str = "full",
        ranks: int = 1,
        stages: Sequence[int] = (),
        hash_algorithm: str = "sha256",
        data_parallel_index: int = 0,
        events: KVEventsConfig | None = None,
        weights: bytes = b"",
        hashes_files: bool = False,
        thinking: tuple[int, int] | None = None,
        drafter: str = "",
        drafts: int = 0,
        match_unit: int = 0,
        fresh: bool = False,
        files: str = "",
    ) -> None:
        _register()
        self._lifecycle = lifecycle or Lifecycle()
        self.engine_id = engine_id or f"engine-{next(_numbers)}"
        transfer = None
        if role is not None:
            moves_nothing = connector == "NoOpConnector"
            settings = {} if moves_nothing else {**ALONE, **(extra or {})}
            if connector == "MultiConnector":
                child = {"kv_connector": CONNECTOR_NAME, "kv_role": role}
                child = {**child, "kv_connector_extra_config": settings}
                settings = {"connectors": [*before, child, *after]}
            transfer = KVTransferConfig(
                kv_connector=connector,
                kv_connector_module_path=no_op.MODULE if moves_nothing else None,
                kv_role=role,
                engine_id=self.engine_id,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=settings,
            )
        self.config = _vllm_config(
            model,
            transfer,
            block_size=block_size,
            enable_prefix_caching=prefix_caching,
            num_blocks=usable_blocks + 1,
            scheduler=SchedulerConfig(
                max_model_len=4096,
                is_encoder_decoder=False,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_tokens_a_step,
                long_prefill_token_threshold=long_prefill,
                enable_chunked_prefill=True,
            ),
            async_scheduling=async_scheduling,
        )
        self._hashes_files = hashes_files
        self.config.cache_config.prefix_caching_hash_algo = hash_algorithm
        self.config.cache_config.prefix_match_unit = match_unit or None
        if thinking is not None:
            start, end = thinking
            self.config.reasoning_config = SimpleNamespace(
                reasoning_start_token_ids=[start], natural_reasoning_end_token_ids=[end]
            )
        if drafter:
            self.config.speculative_config = drafting(self.config, drafter, drafts)
        self.config.kv_events_config = events
        # Block 0 is vLLM's null block, which nobody gets.
        self.kv_config = kv_cache_config(
            usable_blocks + 1,
            block_size,
            family,
            ranks=ranks,
            caching=prefix_caching,
            drafts=drafts,
        )
        layers = layers_with_states(self.kv_config)
        self.config.compilation_config.static_forward_context.update(layers)
        if self.kv_config.has_mamba_layers and prefix_caching:
            self.config.cache_config.mamba_cache_mode = "align"
        self.config.parallel_config.tensor_parallel_size = ranks
        self.config.parallel_config.pipeline_parallel_size = 1 + len(stages)
        # Each of several ranks has a process of its own; on a CPU mostly a single one has, too.
        several = ranks > 1 or bool(stages)
        self.config.parallel_config.distributed_executor_backend = "mp" if several else "uni"
        self.config.parallel_config.data_parallel_index = data_parallel_index
        scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(
            self.kv_config, self.config
        )
        tell_hash_block_size(self.kv_config, hash_block_size)
        kernel_block_sizes = [
            group.kv_cache_spec.block_size for group in self.kv_config.kv_cache_groups
        ]
        self.stage_configs = [
            stage_config(self.kv_config, layers)
            for layers in itertools.starmap(range, itertools.pairwise([0, *stages, MAX_LAYERS]))
        ]
        # vLLM counts ranks stage by stage.
        configs = [each for each in self.stage_configs for _ in range(ranks)]
        kv_caches = [
            allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC, kernel_block_sizes)
            for config in configs
        ]
        self.runner = ToyRunner(kv_caches, self.kv_config, weights)
        self.runner.tokens_ahead = tokens_ahead(self.config)
        self.runner.drafter_runs = max(1, drafts)
        self.runner.spoil(list(range(usable_blocks + 1)), next(_numbers))
        self.weights_said = WeightsSaid()
        self._files = files
        self._clock = Clock()
        self._threads: list[Turns] = []
        self.workers: list[KVConnectorBase_V1] = []
        self._copiers: list[Exchangeable] = []
        self._adapter_loads: list[AdapterLoads] = []
        self._adapters: set[int] = set()
        with contextlib.ExitStack() as failed:  # where vLLM's processes would end
            failed.enter_context(self._surroundings())
            if transfer is not None:
                for rank, config in enumerate(configs):
                    self.config.parallel_config.rank = rank
                    worker = KVConnectorFactory.create_connector(
                        config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=config
                    )
                    self.workers.append(worker)
                    failed.callback(worker.shutdown)
                self._lifecycle.register(self, kv_caches)
            self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
                vllm_config=self.config,
                kv_cache_config=self.stage_configs[0],
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=scheduler_block_size,
                hash_block_size=hash_block_size,
                log_stats=True,
            )
            # V1 has no replay: it would not hear where a resumed request begins one.
            self.scheduler.use_v2_model_runner |= "replayed" in GROUPS[family]
            failed.callback(self.scheduler.shutdown)
            found = {
                divmod(rank, ranks): metadata
                for rank, worker in enumerate(self.workers)
                if (metadata := worker.get_handshake_metadata()) is not None
            }
            if self.workers:
                self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(found)
            failed.pop_all()
        ours = inspection.halves_beside(self.scheduler.connector, self.workers)
        if not fresh and ours:
            inspection.know_weights(ours[0], len(configs), weights)
        self._aggregator = KVOutputAggregator(len(configs))
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(hash_block_size, hash_fn)
        self.flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._overlap = self.config.max_concurrent_batches
        self.all_free = self.free_blocks
        self.instant_copies = instant_copies
        self.answers: dict[str, Answer] = {}
        self.stats = OmniStats()
        self.preempted: list[str] = []
        self._held: list[HeldCopier] = []
        self._before = check.sizes(self)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Connectors that are made meanwhile have copiers that a test can exchange."""
        make = connector_module.SURROUNDINGS.copier

        def copier(*args: Any) -> Exchangeable:
            self._copiers.append(Exchangeable(make(*args)))
            return self._copiers[-1]

        # In this process models are written at any time, and no engine really reads them.
        known: Any = functools.partial(weights_id, unchanged_since=math.inf)
        if self._files:
            known = lambda *_: self._files  # noqa: E731

        start = connector_module.SURROUNDINGS.context.start

        def started(*args: Any, **options: Any) -> Turns:
            self._threads.append(start(*args, **options))
            return self._threads[-1]

        def adapter_loads(_: VllmConfig) -> AdapterLoads:
            self._adapter_loads.append(AdapterLoads())
            return self._adapter_loads[-1]

        ours = dataclasses.replace(
            connector_module.SURROUNDINGS,
            context=dataclasses.replace(
                connector_module.SURROUNDINGS.context, clock=self._clock, start=started
            ),
            copier=copier,
            weights_id=known,
            weight_files=weight_files if self._hashes_files else None,
            adapter_loads=adapter_loads,
            read_weights=lambda _: inspection.hashed(lambda: self.runner.weights),
            weights_said=lambda _: self.weights_said,
            head_copies=lambda config: head_copies(
                self.kv_config, config.parallel_config.tensor_parallel_size
            ),
        )
        with unittest.mock.patch.object(connector_module, "SURROUNDINGS", ours):
            yield

    # What a client does

    def request(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        params: Any = None,
        request_id: str | None = None,
        salt: str | None = None,
        prompt_logprobs: int | None = None,
        lora: LoRARequest | None = None,
        xargs: dict[str, Any] | None = None,
        embeds: torch.Tensor | None = None,
        is_token: list[bool] | None = None,
        resumable: bool = False,
    ) -> Request:
        """What a client asks.

        Args:
            embeds: one row for each token of the prompt, read in its place; all of them without
                `is_token`, which says of each token whether it is read itself.
            resumable: whether it is a part of a session of streamed input.
        """
        request_id = request_id or f"request-{next(_numbers)}"
        extra = dict(xargs or {})
        if params is not None:
            extra["kv_transfer_params"] = params
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            extra_args=extra or None,
            prompt_logprobs=prompt_logprobs,
        )
        if embeds is not None:
            more = {"prompt_embeds": embeds, "prompt_is_token_ids": is_token}
        else:
            more = {}
        return Request(
            request_id=request_id,
            prompt_token_ids=None if embeds is not None and is_token is None else list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            lora_request=lora,
            block_hasher=self.hasher,
            resumable=resumable,
            **more,
        )

    def load_adapter(self, lora: LoRARequest) -> None:
        """What each worker does at `/v1/load_lora_adapter`, or when a request needs an adapter."""
        try:
            version = version_of(lora.lora_path)
        except OSError:
            version = None
        for loads in self._adapter_loads:
            loads.note(lora, version, version)
        self._adapters.add(lora.lora_int_id)

    def submit(self, prompt: Sequence[int], **options: Any) -> str:
        """Add a request, whose adapter was loaded before; its id."""
        lora = options.get("lora")
        if lora is not None and (lora.lora_int_id not in self._adapters or lora.load_inplace):
            self.load_adapter(lora)
        request = self.request(prompt, **options)
        self.answers[request.request_id] = Answer()
        self.scheduler.add_request(request)
        return request.request_id

    def abort(self, request_id: str) -> None:
        """The client of a request is gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def generate(
        self, prompt: Sequence[int], max_tokens: int = 1, params: Any = None, **options: Any
    ) -> Answer:
        """Submit, and step until it is answered and the engine has nothing more to do."""
        request_id = self.submit(prompt, max_tokens=max_tokens, params=params, **options)
        self.run(lambda: self.done(request_id))
        self.settle()
        return self.answers[request_id]

    def done(self, *request_ids: str) -> bool:
        """Whether all of these have ended."""
        return all(self.answers[request_id].reason is not None for request_id in request_ids)

    # What EngineCore does

    def step(self) -> bool:
        """One turn of the engine's loop; False when there was nothing to do."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.flying.append((scheduled, self.execute(scheduled)))
            if len(self.flying) < self._overlap and (
                scheduled.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            ):
                return True
        elif not self.flying:
            return False
        scheduled, output = self.flying.popleft()
        for engine_output in self.scheduler.update_from_output(scheduled, output).values():
            for out in engine_output.outputs:
                answer = self.answers[out.request_id]
                answer.tokens += out.new_token_ids
                answer.reason = out.finish_reason
                answer.params = out.kv_transfer_params or answer.params
            scheduler_stats = engine_output.scheduler_stats
            if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
                self._add_stats(scheduler_stats.kv_connector_stats)
        # Where the scheduler runs ahead, the workers know the drafts, and it only counts them.
        drafts = self.config.speculative_config is not None
        if drafts and not self.config.scheduler_config.async_scheduling:
            self.scheduler.update_draft_token_ids(self.runner.drafts())
        return True

    def run(self, until: Callable[[], bool]) -> None:
        """Step until a condition holds."""
        run([self], until)

    def settle(self) -> None:
        """Step until there is nothing left to do."""
        self.run(lambda: not self.scheduler.has_requests() and not self.flying)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """The worker's part of a step."""
        self.preempted += step.preempted_req_ids or ()
        if self.worker is None:
            return lifecycles.model_output(*self.runner.execute(step))
        return self._lifecycle.execute(self, self.worker, step)

    def joined(self, outputs: list[ModelRunnerOutput]) -> ModelRunnerOutput:
        """What the ranks report, as vLLM's executor adds it up."""
        if len(outputs) == 1:
            return outputs[0]
        output = self._aggregator.aggregate(list(outputs))
        assert output is not None
        return output

    def wait_for_copies(self) -> None:
        """With `instant_copies`, wait until the copies of this step have ended."""
        if self.instant_copies:
            wait(lambda: all(map(inspection.copies_ended, self.worker_halves)))

    def shutdown(self) -> None:
        """Stop both halves, in vLLM's order."""
        for held in self._held:
            held.open()
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    # What a test looks at, and gets hold of

    def pass_time(self, seconds: float) -> None:
        """Have so much time passed for this engine, and its threads look what is due by now."""
        self._clock.ahead += seconds
        for thread in self._threads:
            if thread.is_alive():
                thread.wake()

    def hold(self, *, saves: bool = False, loads: bool = False, deaf: bool = False) -> "HeldCopier":
        """Hold back every copy that starts from now on."""
        copier = self._copiers[0]
        held = HeldCopier(copier.inner, saves=saves, loads=loads, deaf=deaf)
        copier.inner = held
        self._held.append(held)
        return held

    @property
    def halves(self) -> list[Any]:
        """The scheduler half and the worker halves; none of another connector."""
        return inspection.halves(self.scheduler.connector, self.workers)

    @property
    def half(self) -> OmniScheduler:
        """The scheduler half."""
        half: OmniScheduler = self.halves[0]
        return half

    @property
    def worker(self) -> KVConnectorBase_V1 | None:
        """The connector of the first rank; None on an engine without connector."""
        return self.workers[0] if self.workers else None

    @property
    def worker_halves(self) -> list[OmniWorker]:
        """The worker half of each rank."""
        return self.halves[1:]

    @property
    def worker_half(self) -> OmniWorker:
        """The worker half of the first rank."""
        return self.worker_halves[0]

    @property
    def free_blocks(self) -> int:
        """KV blocks that nobody holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def usage(self) -> tuple[int, int, int]:
        """(slots held, slots cached, leases); zeros on an engine that hands nothing off."""
        directory = inspection.directory(self.half)
        return (0, 0, 0) if directory is None else directory.usage()

    @property
    def directory(self) -> SlotDirectory:
        """What the engine keeps of its slots."""
        directory = inspection.directory(self.half)
        assert directory is not None, "this engine hands nothing off"
        return directory

    @property
    def handoffs(self) -> list[Handoff]:
        """Those that are open, oldest first."""
        return inspection.handoffs(self.half)

    def arena(self, rank: int = 0) -> Arena:
        """The arena of a rank."""
        return inspection.arena(self.worker_halves[rank])

    def lease_answer(self, request_id: str) -> object:
        """Wait for the peer's answer to a request's lease request, without a step."""
        return inspection.lease_answer(self.half, request_id, DEADLINE)

    @property
    def loads_under_way(self) -> int:
        """Of how many requests the first rank loads KV."""
        return inspection.loads_under_way(self.worker_half)

    def count(self, name: str) -> int:
        """What the engine has counted so far under a name of `metrics`."""
        for connector in (self.scheduler.connector, *self.workers):
            stats = connector.get_kv_connector_stats() if connector is not None else None
            if stats is not None:
                self._add_stats(stats.data)
        return int(self.stats.data["counts"].get(name, 0))

    def failures(self) -> dict[str, int]:
        """Failures counted so far, by kind."""
        self.count("")
        prefix = "failure:"
        counts = self.stats.data["counts"]
        return {k.removeprefix(prefix): n for k, n in counts.items() if k.startswith(prefix)}

    def _add_stats(self, data: dict[str, Any]) -> None:
        data = data.get(CONNECTOR_NAME, data)  # as MultiConnector has them
        self.stats.aggregate(OmniKVConnector.build_kv_connector_stats(data))

    def leftovers(self) -> list[str]:
        """Whatever an engine without requests should not have any more; empty when all is well."""
        return check.leftovers(self, self._before)


def run(engines: Sequence[InProcessEngine], until: Callable[[], bool]) -> None:
    """Step engines in turn until a condition holds."""
    end = time.monotonic() + DEADLINE
    while not until():
        assert time.monotonic() < end, "nothing more happens"
        worked = [engine.step() for engine in engines]
        if not any(worked) or all(not e.scheduler.running for e in engines):
            time.sleep(0.0002)  # everybody waits for a thread of a connector


def wait(until: Callable[[], bool]) -> None:
    """Wait for another thread, without a step of any engine."""
    run([], until)


def assert_clean(*engines: InProcessEngine) -> None:
    """Engines without requests hold no block, no slot, no lease and no memory of requests."""
    for engine in engines:
        engine.settle()
        for half in engine.halves[:1]:
            inspection.tell_hits(half)
    end = time.monotonic() + DEADLINE
    while any(engine.leftovers() for engine in engines):  # releases travel between threads
        left = {engine.engine_id: engine.leftovers() for engine in engines}
        assert time.monotonic() < end, left
        time.sleep(0.002)


def hand_off(
    prefill: InProcessEngine,
    decode: InProcessEngine,
    prompt: Sequence[int],
    count: int = 6,
) -> list[int]:
    """Prefill a prompt on one engine, generate on the other; the tokens generated."""
    answer = prefill.generate(prompt, params=HANDOFF).params
    assert answer is not None
    return decode.generate(prompt, count, params=answer).tokens


def require_right_handoffs(
    prefill: InProcessEngine,
    decode: InProcessEngine,
    reference: InProcessEngine,
    lengths: Sequence[int],
    *,
    loads_all: bool = True,
) -> None:
    """Hand off a prompt of each length to an engine that has received none. Raise AssertionError
    unless it answers as `reference` does, and nothing fails or is left behind.

    Args:
        loads_all: whether every prompt has blocks to load.
    """
    for length in lengths:
        asked = prompt(length)
        assert hand_off(prefill, decode, asked) == reference.generate(asked, 6).tokens
    if loads_all:
        assert decode.count("handoffs_received") == len(lengths)
    assert not prefill.failures()
    assert not decode.failures()
    assert_clean(prefill, decode)


def spoil(prefill: InProcessEngine, page: int) -> None:
    """Change a byte of a page in the last slot of the oldest hand-off, on the first rank."""
    slot = prefill.handoffs[0].slots[-1][-1]
    prefill.arena(0).slots[slot][page * PAGE + 3] ^= 1


def lose_loads(decode: InProcessEngine, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, spoil what loads bring of a group."""
    copier = inspection.copier(decode.worker_half)
    load = copier.load

    def all_but_the_group(copy: BlockCopy) -> Any:
        sums = load(copy)
        if copy.group == group:
            decode.runner.spoil(np.asarray(copy.block_ids).tolist(), seed=3)
        return sums

    monkeypatch.setattr(copier, "load", all_but_the_group)


def turn_plans(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any, int, LoadPlans], Any]
) -> None:
    """Have ranks load from other sources than they should, as a control.

    Args:
        change: returns what is taken in the place of a source, given it, the plan that has it, the
            group, and the rank's plans.
    """
    plan = LoadPlans._plan

    def turned(plans: LoadPlans, source: Any, group: int) -> Any:
        found = plan(plans, source, group)
        sources = tuple(change(each, found, group, plans) for each in found.sources)
        return dataclasses.replace(found, sources=sources)

    monkeypatch.setattr(LoadPlans, "_plan", turned)


def count_computed(engine: InProcessEngine) -> list[int]:
    """Tokens computed in each step with any, from now on."""
    steps: list[int] = []
    execute = engine.execute

    def counted(step: SchedulerOutput) -> ModelRunnerOutput:
        if step.total_num_scheduled_tokens:
            steps.append(step.total_num_scheduled_tokens)
        return execute(step)

    engine.execute = counted  # type: ignore[method-assign]
    return steps


def leased(
    prefill: InProcessEngine, decode: InProcessEngine, prompt: Sequence[int], **options: Any
) -> str:
    """Prefill a prompt; return a decode request that has a lease on it and has loaded nothing."""
    answer = prefill.generate(prompt, params=HANDOFF).params
    request_id = decode.submit(prompt, max_tokens=6, params=answer, **options)
    assert decode.lease_answer(request_id) is not None
    return request_id


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that share no block with those of another seed or length."""
    draw = random.Random(f"{seed}/{length}")
    return [draw.randrange(3, 500) for _ in range(length)]


def slots(count: int) -> dict[str, float]:
    """The setting of an arena with room for so many blocks."""
    return {"arena_gib": count * SLOT / GIB}


def connector_threads() -> set[threading.Thread]:
    """Running threads of engines, without threads that live as long as the process, or as metrics
    that pytest keeps to the end of a test."""
    ours = (thread for thread in threading.enumerate() if thread.name.startswith("omni-"))
    return {thread for thread in ours if not thread.name.startswith(_LASTING)}


_LASTING = ("omni-live-gauges", "omni-connector-async")


def sockets(runtime: Path) -> list[Path]:
    """Sockets in a runtime folder."""
    return [path for path in runtime.rglob("*") if path.is_socket()]


_register = functools.cache(register)  # vLLM calls it once a process


@functools.cache
def _model_config(model: Path) -> ModelConfig:
    """Reading it takes longer than all else that an engine does to start."""
    return ModelConfig(
        model=str(model), skip_tokenizer_init=True, dtype="float16", max_model_len=4096
    )


def _vllm_config(
    model: Path,
    transfer: KVTransferConfig | None,
    *,
    block_size: int,
    enable_prefix_caching: bool,
    num_blocks: int,
    scheduler: SchedulerConfig,
    async_scheduling: bool,
) -> VllmConfig:
    config = VllmConfig(
        model_config=copy.deepcopy(_model_config(model)),
        cache_config=CacheConfig(
            block_size=block_size, enable_prefix_caching=enable_prefix_caching
        ),
        scheduler_config=scheduler,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    config.parallel_config.rank = 0
    # vLLM turns it off on a CPU; the scheduler is the same one everywhere.
    config.scheduler_config.async_scheduling = async_scheduling
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.kv_cache_layout = "LBHNC"
    return config
