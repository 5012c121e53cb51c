# SPDX-License-Identifier: Apache-2.0
"""One engine of a simulation: vLLM's scheduler, both halves of the connector, the toy model.

It does what `EngineCore` does: requests, aborts and calls that come in wait until a step has ended;
a step is scheduled, executed and its output taken, and with async scheduling the next one is
scheduled before that. Each of these is an act of its own: the seed draws what comes between.
"""

import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise, starmap
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from omni_connector.identity.adapters import version_of
from omni_connector.identity.epochs import WeightsDigest
from omni_connector.vllm_v1.drafter import tokens_ahead
from tests import inspection
from tests.simulation.engines.answering import PLAIN, Answering, AnyToken
from tests.simulation.engines.connector import ADAPTERS_OF
from tests.simulation.engines.lifecycles import LIFECYCLES, alone
from tests.simulation.engines.settings import (
    EngineShape,
    cache_config,
    extra_config,
    vllm_config,
)
from tests.simulation.inputs import (
    NOTHING,
    EncodedRequest,
    Inputs,
    adapter,
    adapter_content,
)
from tests.simulation.surroundings.device import Device, Event
from tests.simulation.surroundings.world import (
    NEVER,
    Actor,
    Killed,
    Violation,
    World,
)
from tests.toy import GROUPS, MAX_LAYERS, VOCAB, reference, stage_config
from tests.toy_runner import ToyRunner, WrongBytes

_IDLE_S = 1.0

# Where vLLM's scheduler has its requests, by any of the versions' names.
_QUEUES: Final = (
    *("running", "waiting"),
    *("kv_holding_waiting", "deferred_waiting", "skipped_waiting"),
)
_SLOT_BYTES = 4096

_WHILE_IT_COMPUTES = 12
"""Acts of other threads, at most, while an engine waits for what its accelerator computes."""

Output = Callable[[str, list[int], Any, Any], None]
"""Called with request id, new tokens, finish reason and `kv_transfer_params`."""

Look = Callable[[], None]
"""Called when a step was scheduled."""


class SimulatedEngine(Actor):
    """An engine's main thread.

    Args:
        world: that it lives in.
        shape: of the engine.
        weights: of its model.
        output: takes what it answers.
        look: looks at whether all holds.
        device: its accelerator; None: it computes on the host.
    """

    on_engine_thread = True

    def __init__(
        self,
        world: World,
        shape: EngineShape,
        weights: bytes,
        output: Output,
        look: Look,
        device: Device | None = None,
    ) -> None:
        super().__init__(shape.name, shape.name)
        self.world = world
        self.shape = shape
        self.device = device
        self.alive = True
        self.ends = False
        self._output = output
        self._look = look
        self._idle = 0
        self._busy_until = 0.0
        self.unoccupied = Unoccupied(world.clock)
        # What `unoccupied.seconds` was when a step began, and when a request arrived.
        self.step_began = 0.0
        self.arrived: dict[str, float] = {}
        self.added: dict[str, Any] = {}  # requests since its hints were looked at
        self._inputs: deque[Callable[[], object]] = deque()
        self.inputs: dict[str, bytes] = {}  # of requests, beside their tokens
        self._adapters: dict[int, bytes] = {}  # those that were loaded
        # Adapters that were replaced in place, and requests with them: vLLM goes on with blocks of
        # the former ones.
        self._replaced: set[int] = set()
        self.mixed: set[str] = set()
        self._aborts: list[str] = []
        self._aborts_behind: list[str] = []  # told once, and to be told behind the inputs
        self._scheduled: deque[SchedulerOutput] = deque()
        self._were_loading: set[str] = set()
        self._executed: deque[tuple[SchedulerOutput, ModelRunnerOutput, Event | None]] = deque()
        self.config = vllm_config(shape, extra_config(shape, _SLOT_BYTES))
        self.kv_config, block_size, hash_block_size = cache_config(shape, self.config)
        sizes = [group.kv_cache_spec.block_size for group in self.kv_config.kv_cache_groups]
        stages = [
            stage_config(self.kv_config, layers)
            for layers in starmap(range, pairwise([0, *shape.stages, MAX_LAYERS]))
        ]
        configs = [each for each in stages for _ in range(shape.ranks)]
        caches = [
            allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC, sizes)
            for config in configs
        ]
        self._layers = [each.keys() for each in caches]  # of each worker
        self.runner = CheckedRunner(self, caches, weights)
        self.runner.tokens_ahead = tokens_ahead(self.config)
        self.runner.drafter_runs = max(1, shape.drafts)
        self.runner.spoil(list(range(shape.blocks + 1)), world.draw.randrange(1 << 30))
        self.workers: list[KVConnectorBase_V1] = []
        self._halves: list[Any] = []
        if shape.role is not None:
            for rank, config in enumerate(configs):
                self.config.parallel_config.rank = rank
                worker = KVConnectorFactory.create_connector(
                    config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=config
                )
                self.workers.append(worker)
                worker.register_kv_caches(caches[rank])
        if device is not None:
            device.capture()
        scheduler: Any = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler(
            vllm_config=self.config,
            kv_cache_config=stages[0],
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.loaded: dict[str, int] = {}  # tokens, by request
        # By request, the first token of its last load, and whether that has the drafter's KV.
        self.loads: dict[str, tuple[int, bool]] = {}
        self._preempt = self.scheduler._preempt_request
        self.scheduler._preempt_request = self._preempt_request
        if shape.zeroes:
            self.scheduler.needs_kv_cache_zeroing = True
        if self.workers:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
                {
                    divmod(rank, shape.ranks): each.get_handshake_metadata()
                    for rank, each in enumerate(self.workers)
                }
            )
        if self.workers and shape.beside:
            scheduler_half, *_ = inspection.halves_beside(self.scheduler.connector, self.workers)
            inspection.stands_beside(scheduler_half)
        if not shape.drafter:
            world.without_drafter.add(shape.name)
        elif self.workers:
            self._note_loads(self.scheduler.connector)
        self._lifecycle = LIFECYCLES[shape.runner] if self.workers else alone
        self._aggregator = KVOutputAggregator(len(configs))
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(hash_block_size, hash_fn)
        self._batches = self.config.max_concurrent_batches
        if shape.overlap and shape.stages:
            # V2's rules, by which a request's steps are as many steps apart as there are stages.
            # Without them more steps than one are scheduled behind the end of a request, and leave
            # recurrent states from which a session cannot go on.
            self.scheduler.use_v2_model_runner = True
            self._batches = len(stages) + 1
        if "replayed" in GROUPS[shape.family]:
            # V1 has no replay: it would not hear where a resumed request begins one.
            self.scheduler.use_v2_model_runner = True
        self.failures: set[str] = set()
        # Of each request, why it was to get no hand-off, just before it arrived and just after.
        self.offer_refusals: dict[str, tuple[str | None, str | None]] = {}
        self.all_free = self.free_blocks
        self.due = world.now
        world.add(self)

    def _note_loads(self, connector: Any) -> None:
        allocated, matched = (
            connector.update_state_after_alloc,
            connector.get_num_new_matched_tokens,
        )
        cached: dict[str, int] = {}

        def asked(request: Request, num_computed: int) -> Any:
            cached[request.request_id] = num_computed
            return matched(request, num_computed)

        def noted(request: Request, blocks: Any, num_external_tokens: int) -> None:
            self.loaded[request.request_id] = num_external_tokens
            if num_external_tokens:
                shared = inspection.offers_shared(self.halves[0], request.request_id)
                prefill = (request.kv_transfer_params or {}).get("remote_engine_id")
                whole = shared or prefill not in self.world.without_drafter
                self.loads[request.request_id] = cached[request.request_id], whole
            elif not request.num_computed_tokens:  # else that is what was loaded
                self.loads.pop(request.request_id, None)
            allocated(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = noted

    # What comes in

    def call(self, what: Callable[[], object]) -> None:
        """Have something done on the engine's thread, between two steps."""
        self._inputs.append(what)
        self._wake()

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        params: Any = None,
        salt: str | None = None,
        priority: int = 0,
        inputs: Inputs = NOTHING,
        how: Answering = PLAIN,
        resumable: bool = False,
        afresh: bool = False,
    ) -> None:
        """A request arrives, or the next part of a streaming session.

        Args:
            afresh: whether vLLM computes its whole prompt, as for one that wants log probabilities.
        """

        def add() -> None:
            self.inputs[request_id] = inputs.content(self._load_adapter(inputs.adapter))
            self.mixed.discard(request_id)
            if inputs.adapter in self._replaced:
                self.mixed.add(request_id)
            sampling = SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                extra_args=None if params is None else {"kv_transfer_params": params},
                stop_token_ids=list(range(0, VOCAB, how.stops)) if how.stops else None,
                min_tokens=min(how.min_tokens, max_tokens),
                structured_outputs=how.grammar,
            )
            request = EncodedRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=sampling,
                pooling_params=None,
                cache_salt=salt,
                priority=priority,
                resumable=resumable,
                arrival_time=self.world.now,
                block_hasher=self._hasher if self.shape.caching else None,
                **inputs.options(list(prompt)),
            )
            request.skip_reading_prefix_cache |= afresh
            self.arrived[request_id] = self.unoccupied.seconds
            self.loaded.pop(request_id, None)  # one of this id may have been here
            self.loads.pop(request_id, None)
            if request.structured_output_request is not None:
                self._compile(request.structured_output_request, how)
            before = self._offer_refusal()
            self.scheduler.add_request(request)
            self.added[request_id] = request
            self.offer_refusals[request_id] = before, self._offer_refusal()

        self.call(add)

    def _offer_refusal(self) -> str | None:
        """Why the engine offers no new hand-offs now, by its role or as it drains."""
        if not self.halves:
            return None
        serving = inspection.serving(self.halves[0])
        if serving.draining:
            return "draining"
        return "decode_role" if serving.role == "decode" else None

    def _load_adapter(self, number: int) -> bytes:
        """What an adapter held when it was loaded, which is ahead of its first request."""
        if number and number not in self._adapters:
            self._read_adapter(number)
        return self._adapters.get(number, b"")

    def _read_adapter(self, number: int) -> None:
        self._adapters[number] = adapter_content(number)
        version = version_of(adapter(number).lora_path)
        for loads in ADAPTERS_OF.get(self.shape.name, ()):
            loads.note(adapter(number), version, version)

    def uses_adapter(self, number: int) -> bool:
        """Whether a request is being computed with an adapter."""
        used = (request.lora_request for request in self.scheduler.requests.values())
        return any(lora is not None and lora.lora_int_id == number for lora in used)

    def replace_adapter(self, number: int) -> None:
        """Load an adapter in place, as with `load_inplace`. Called on the engine's thread."""
        self._read_adapter(number)
        self._replaced.add(number)

    def _compile(self, structured: Any, how: Answering) -> None:
        """What vLLM's structured output manager does on a thread of its own."""
        grammar: Future[AnyToken] = Future()
        structured.grammar = grammar

        def end() -> None:
            if how.compiles:
                grammar.set_result(AnyToken())
            else:
                error = ValueError("no grammar")
                self.world.told_to_vllm.append(error)
                grammar.set_exception(error)

        self.world.later(how.compile_s or 0.0, end)

    def abort(self, request_id: str) -> None:
        """The client of a request is gone."""
        self._aborts.append(request_id)
        self._wake()

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        # With priorities vLLM may preempt a request that it has scheduled in the same step. It
        # would go on to find by their hashes the blocks that this step was to fill.
        manager = self.scheduler.kv_cache_manager
        for group, ids in zip(
            self.kv_config.kv_cache_groups, manager.get_block_ids(request.request_id), strict=True
        ):
            computed = request.num_computed_tokens // group.kv_cache_spec.block_size
            manager.evict_blocks({each for each in ids[computed:] if each})
        self._preempt(request, *args, **kwargs)

    def abort_all(self) -> None:
        """Every client is gone; called on the engine's thread."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)

    def _wake(self) -> None:
        self._idle = 0
        self.due = max(min(self.due, self.world.now), self._busy_until)

    def look(self) -> None:
        """Something has happened beside it. vLLM would not have waited to look."""
        if self.due < NEVER:
            self._wake()

    def may_interrupt(self, owner: str) -> bool:
        # The end of an engine waits for its threads, which end long before it gives up.
        return self.owner == owner and not self.ends

    # What it does

    def act(self) -> None:
        try:
            busy = self._once()
        except (Violation, Killed):
            raise
        except WrongBytes as error:
            raise Violation("wrong_bytes", f"{self.name}: {error}") from error
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise Violation(
                "engine_died",
                f"{self.name}: {type(error).__name__}: {error} ({where.line})",
            ) from error
        now = self.world.now
        if busy is None:
            self.due = NEVER
        elif busy:
            self.due = max(now, self._busy_until)
        else:
            self._idle = min(self._idle + 1, 20)
            self.due = now + min(_IDLE_S, 0.0005 * 2**self._idle)

    def _once(self) -> bool | None:
        """Whether something was done; None: there is nothing to do at all."""
        if self._scheduled and (self._executed or self.world.chance(0.7)):
            self._executed.append(self._execute(self._scheduled.popleft()))
            return True
        several = self.shape.overlap or bool(self.shape.stages)  # steps under way at once
        between = not self._scheduled and (not self._executed or several)
        if between and self._inputs:
            self._inputs.popleft()()
            return True
        if (between or self._executed) and (aborted := self._to_abort()):
            if self._inputs:
                self._aborts_behind += aborted
            self._aborts = [each for each in self._aborts if each not in aborted]
            self.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
            return True
        in_flight = len(self._scheduled) + len(self._executed)
        if in_flight < self._batches and self.scheduler.has_requests():
            self.step_began = self.unoccupied.seconds
            self._were_loading.update(
                request_id
                for request_id, request in self.scheduler.requests.items()
                if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            )
            step = self.scheduler.schedule()
            if step.total_num_scheduled_tokens:
                self.unoccupied.ends()
            self._scheduled.append(step)
            self._look()
            return True
        if self._scheduled:
            self._executed.append(self._execute(self._scheduled.popleft()))
            return True
        if self._executed:
            return self._update(*self._executed.popleft())
        return None

    def _to_abort(self) -> list[str]:
        """The aborts to tell the scheduler. In the middle of a step, requests that are still to be
        added are left out: vLLM tells of an abort a second time, behind the requests and the next
        turns of sessions that came before it."""
        if not self._inputs:
            self._aborts += self._aborts_behind
            self._aborts_behind = []
            return self._aborts
        return [each for each in self._aborts if each in self.scheduler.requests]

    def _execute(
        self, step: SchedulerOutput
    ) -> tuple[SchedulerOutput, ModelRunnerOutput, Event | None]:
        """The step, what its workers report, and when the tokens are in that."""
        # Layers tell nothing where a graph of the whole model is replayed; in a batch that is
        # computed in two halves they tell twice. Both happen with batches of some sizes.
        number = step.total_num_scheduled_tokens % 4
        by_layer = bool(self.workers) and number > 0
        self.runner.layer_computed = partial(self._layer_computed, step) if by_layer else None
        self.runner.halves = number == 1
        outputs = self._lifecycle(self.workers, self.runner, step, self._breathe)
        if step.total_num_scheduled_tokens:
            self._busy_until = self.world.now + self.shape.step_s
        done = self.runner.done
        if not self.shape.overlap:
            if done is not None:
                self._breathe(_WHILE_IT_COMPUTES)
            self.runner.finish()
        output = outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(list(outputs))
        assert output is not None
        return step, output, done

    def _layer_computed(self, step: SchedulerOutput, layer: str) -> None:
        """What vLLM's attention layers do."""
        metadata: Any = step.kv_connector_metadata
        unused: Any = None
        for worker, layers in zip(self.workers, self._layers, strict=True):
            if layer not in layers:  # another pipeline stage computes it
                continue
            worker.save_kv_layer(layer, unused, unused)
            if getattr(metadata, "saves", True):  # MultiConnector's tells nothing of that
                self._breathe()

    def _breathe(self, most: int = 3) -> None:
        self.world.breathe(most)
        if not self.alive:
            raise Killed

    def _update(self, step: SchedulerOutput, output: ModelRunnerOutput, done: Event | None) -> bool:
        self.runner.finish(done)
        for engine_output in self.scheduler.update_from_output(step, output).values():
            self._count(engine_output.scheduler_stats)
            for out in sorted(engine_output.outputs, key=_errors_last):
                self._output(
                    out.request_id, out.new_token_ids, out.finish_reason, out.kv_transfer_params
                )
        if self.shape.drafts and not self.shape.overlap and step.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self.runner.drafts())
        self.unoccupied.begins()
        if step.total_num_scheduled_tokens == 0:
            return False
        self._idle = 0
        return True

    def _count(self, stats: Any) -> None:
        told = getattr(stats, "kv_connector_stats", None) or {}
        counts = told.get("SimulatedConnector", told).get("counts", {})
        self.failures |= {
            name.removeprefix("failure:") for name in counts if name.startswith("failure:")
        }

    # What an operator does

    def pause(self, state: PauseState) -> None:
        """vLLM's pause; steps that were begun end first."""
        self.scheduler.set_pause_state(state)
        self._wake()

    @property
    def has_inputs(self) -> bool:
        """Whether something has come in that the engine has yet to look at."""
        return bool(self._inputs or self._aborts or self._aborts_behind)

    @property
    def steps_to_execute(self) -> int:
        """How many steps the workers have yet to hear of."""
        return len(self._scheduled)

    @property
    def idle(self) -> bool:
        """Whether a pause is complete, as `EngineCore` sees it, which looks between two steps."""
        in_a_step = self in self.world.acting or self._scheduled or self._executed
        return not (self.scheduler.has_requests() or in_a_step)

    @property
    def stalled(self) -> bool:
        """Whether vLLM itself cannot go on: requests whose KV was loaded hold all blocks, none of
        them runs, and it preempts only what runs."""
        return not self.scheduler.running and bool(_loaded_and_waiting(self.scheduler))

    def has_forgotten(self, request_id: str) -> bool:
        """Whether vLLM has nothing left of a request, so that another one may have its id."""
        steps = [*self._scheduled, *(step for step, *_ in self._executed)]
        return not (
            self in self.world.acting
            or request_id in self.scheduler.requests
            or request_id in (*self._aborts, *self._aborts_behind)
            or any(request_id in step.num_scheduled_tokens for step in steps)
        )

    def has_lost(self, request_id: str) -> bool:
        """Whether vLLM has a request in no queue: a streaming session that goes on with its next
        prompt, and was preempted while the last token of its answer was in flight."""
        request = self.scheduler.requests.get(request_id)
        if request is None or not request.resumable or request.status != RequestStatus.WAITING:
            return False
        return not any(request in getattr(self.scheduler, each, ()) for each in _QUEUES)

    def shutdown(self) -> None:
        """End both halves, in vLLM's order."""
        self.alive = False
        self.world.remove(self)
        if self.device is not None:
            self.device.closing = True
        self.scheduler.shutdown()
        for worker in self.workers:
            end: Any = worker.shutdown
            end()
        if self.device is not None:
            self.device.close()

    # What a check looks at

    @property
    def halves(self) -> list[Any]:
        """The scheduler half and the worker halves."""
        if not self._halves:
            self._halves = inspection.halves_beside(self.scheduler.connector, self.workers)
        return self._halves

    @property
    def begins(self) -> bool:
        """Whether the step that was scheduled last begins to compute requests that wait as long as
        a connector wants. vLLM lets those wait for none that read no prefix cache, and those no
        more whose KV has been loaded meanwhile."""
        begun = (
            self.scheduler.requests[new.req_id] for new in self._scheduled[-1].scheduled_new_reqs
        )
        return not all(
            request.skip_reading_prefix_cache or request.request_id in self._were_loading
            for request in begun
        )

    @property
    def latest(self) -> list[str]:
        """The requests of the step that was scheduled last."""
        return list(self._scheduled[-1].num_scheduled_tokens)

    def turns(self, name: str) -> list[Any]:
        """Threads of the connector that have this name."""
        return [each for each in self.world.actors if each.name == f"{self.owner}'s {name}"]

    @property
    def free_blocks(self) -> int:
        """KV blocks that nobody holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


class SimulatedRankCopies:
    """Says which copies of an engine have ended, as its ranks' sockets would; see `RankCopies`."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._halves = engine.halves[1:]

    def ended(self, job_ids: Collection[int]) -> set[int] | None:
        """Those of these jobs that have ended on every rank; None if there are none, as no copy
        goes on while somebody waits here.

        Raises:
            Violation: no rank was told of one, so none can end it.
        """
        last = max(map(inspection.last_started, self._halves))
        if max(job_ids) > last and not self._engine.steps_to_execute:
            raise Violation("never_ends", "a reset waits for a copy that waits for a step")
        ended = set(job_ids).intersection(*(half.ended(job_ids) for half in self._halves))
        return ended or None

    def close(self) -> None:
        """There is no connection."""


class Unoccupied:
    """How long an engine has had nothing to compute, in all.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._since: float | None = clock()

    @property
    def seconds(self) -> float:
        """So far."""
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)

    def begins(self) -> None:
        """What was computed is there."""
        self._since = self._clock() if self._since is None else self._since

    def ends(self) -> None:
        """There is something to compute."""
        self._seconds, self._since = self.seconds, None


def _errors_last(out: EngineCoreOutput) -> tuple[bool, str]:
    """vLLM tells of errors in the order of a set of request ids; here they are sorted."""
    failed = out.finish_reason is FinishReason.ERROR
    return failed, out.request_id if failed else ""


class CheckedRunner(ToyRunner):
    """Compares each token with what the engine's weights answer at that moment.

    Attributes:
        done: when the forward pass that was launched last is done; None where it is at once.
        of_ranks: the weights of ranks that have others than the engine as a whole, by rank.
        judged: whether tokens are compared: not where a trainer has left vLLM's cache as it was.
    """

    def __init__(self, engine: SimulatedEngine, caches: Any, weights: bytes) -> None:
        super().__init__(caches, engine.kv_config, weights)
        self.done: Event | None = None
        self.of_ranks: dict[int, bytes] = {}
        self.judged = True
        self._engine = engine
        self._reference = reference(self._kinds)
        if engine.device is not None:
            self.launch = partial(engine.device.launch, engine.device.engine)

    def digest(self, rank: int) -> Generator[None, None, WeightsDigest]:
        """What a rank hashes when it is asked for its weights."""
        return inspection.hashed(lambda: self.of_ranks.get(rank, self.weights))

    def forward(self, step: SchedulerOutput) -> tuple[list[str], list[list[int]]]:
        answers = super().forward(step)
        if self._engine.device is not None:
            self.done = self._engine.device.engine.mark()
        return answers

    def postprocess(self) -> None:
        super().postprocess()
        if self._engine.device is not None:
            self.done = self._engine.device.engine.mark()

    def finish(self, done: Event | None = None) -> None:
        """Wait for a forward pass, or for the last."""
        device, done = self._engine.device, done or self.done
        if device is not None and done is not None:
            device.finish(done, device.engine)

    def weights_of(self, request_id: str) -> bytes:
        return self.weights + self._engine.inputs.get(request_id, b"")

    def proposed(self, token_ids: list[int]) -> list[int]:
        shape, world = self._engine.shape, self._engine.world
        if not shape.drafts:
            return []
        # A drafter may find fewer, or none; where vLLM runs ahead, it always has as many.
        number = shape.drafts if shape.overlap else world.draw.randrange(shape.drafts + 1)
        drafts: list[int] = []
        for _ in range(number):
            right = self._reference.next_token(self.weights, [*token_ids, *drafts])
            drafts.append(right if world.chance(0.6) else world.draw.randrange(3, VOCAB))
        return drafts

    def drafter_differs(self, request_id: str, position: int, computed: int, found: bytes) -> None:
        """vLLM's own cache gives a request blocks whose last positions depend on what followed them
        in another request. What it has given so may come from anywhere then. And an engine without
        the drafter hands off zeros in the place of the drafter's KV, which vLLM's own cache keeps;
        but no other engine hands some off, nor does any share some."""
        shape = self._engine.shape
        first, whole = self._engine.loads.get(request_id, (computed, True))
        zeros = self._engine.world.without_drafter and not any(found)
        if zeros and (position < first or not whole):
            return
        local = computed - self._engine.loaded.get(request_id, 0)
        at_end = shape.block_size - position % shape.block_size <= self.tokens_ahead
        if not self.judged or (at_end and position < local):
            self._engine.world.excused_drafts.add(found)
        elif found not in self._engine.world.excused_drafts:
            raise Violation(
                "wrong_draft_kv",
                f"{self._engine.name}: the drafter of {request_id} finds other KV of position "
                f"{position} than its tokens give",
            )

    def sampled(self, request_id: str, token_ids: list[int], token: int) -> None:
        right = self._reference.next_token(self.weights_of(request_id), token_ids)
        if token != right and self.judged and request_id not in self._engine.mixed:
            raise Violation(
                "wrong_answer",
                f"{self._engine.name} answers {request_id} with another token than its weights "
                f"give, after {len(token_ids)} tokens",
            )


def _loaded_and_waiting(scheduler: Any) -> list[Request]:
    """Requests that vLLM's scheduler lets wait, with KV blocks, after their KV was loaded."""
    waiting = getattr(scheduler, "kv_holding_waiting", None)  # from 0.31 on
    if waiting is not None:
        return [each for each in waiting if each.status == RequestStatus.WAITING]
    told = [scheduler.requests[each] for each in scheduler.finished_recving_kv_req_ids]
    # Once vLLM has seen that it was loaded, a request waits among those that hold nothing.
    seen = [
        each
        for each in (*scheduler.waiting, *scheduler.skipped_waiting)
        if each.status == RequestStatus.WAITING and each.num_computed_tokens
    ]
    return [*told, *seen]
