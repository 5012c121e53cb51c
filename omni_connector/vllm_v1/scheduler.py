# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of an engine decides about slots, hand-offs, shared blocks and loads.

It decides, and the workers copy. Nothing here waits while the engine computes: lease requests are
answered on the control channel's thread, and the workers report copies with each step. A preemption
needs no work: `CopyLedger` holds the blocks that are being copied, whatever happens to the request.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger

from omni_connector.copy.ended import CopiesOfRanks
from omni_connector.copy.held_blocks import CopyLedger
from omni_connector.errors import OmniError
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.params import wants_handoff
from omni_connector.handoff.parts import Fetch
from omni_connector.handoff.periodic_tasks import PeriodicTasks
from omni_connector.handoff.serving import ServingState
from omni_connector.identity.adapters import AdapterContents, Replaced
from omni_connector.identity.epochs import RankWeights, WeightsEpoch
from omni_connector.identity.full_digest import WeightFilesDigest
from omni_connector.kv.spans import NULL_BLOCK_ID
from omni_connector.net.warnings import Warnings
from omni_connector.prefix.shared_prefix import SharedPrefix
from omni_connector.requests.phases import Phase
from omni_connector.requests.product import Product, Step
from omni_connector.requests.state import Offer, Requests, RequestState
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.trace import now
from omni_connector.vllm_v1.compat import (
    cache_hit_source,
    copy_blocks,
    hash_block_size,
    take_worker_stats,
)
from omni_connector.vllm_v1.events import KVEvents
from omni_connector.vllm_v1.load_room import LoadRoom
from omni_connector.vllm_v1.metadata import (
    OmniConnectorMetadata,
    WorkerReport,
    num_workers,
)
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.requests import (
    complete_hashes,
    drop_unusable,
    recompute,
    take_hints,
)
from omni_connector.vllm_v1.scheduler_report import SchedulerReport
from omni_connector.vllm_v1.specs import attends_to_all, uncached_groups
from omni_connector.vllm_v1.undrafted import UndraftedBlocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.omni_connector.scheduler")

_ASK_AGAIN: Final = (None, False)
_UNKNOWN: Final = "it is not known yet which weights this engine has"

_NO_DRAFTER_KV: Final = "some of its blocks came from an engine without the drafter"
_SPOILED: Final = "another connector failed to load blocks that it was computed upon"
_LOAD_FAILED: Final = "its load has failed"


class OmniScheduler:
    """The part of the connector that lives beside vLLM's scheduler.

    Its products decide which prompts are handed off and fetched, which full blocks are kept in this
    engine's arena or a store, and which blocks of a prompt are loaded from there or from the arenas
    of the host's other engines. Here it is decided what holds for all of them: whether it is known
    what a request is computed with, whether there is room for a load, and which blocks nobody else
    may have. It is made when the workers have registered their KV caches; see
    `assembly.make_scheduler`.

    Args:
        manager: knows the block ids of running requests.
        context: clock, threads, statistics, and the trace, which is closed with this.
        weights: their epoch.
        ledger: the copy jobs.
        room: which loads may begin.
        periodic_tasks: what is done beside the steps.
        channel: to peers; closed with this.
        directory: slots; None on an engine without an arena.
        products: those that this engine has, closed with this: hand-off out, hand-off in, and
            shared prefixes, in the order in which they are asked.
        shared: the last of them; None on an engine that shares none.
        incomplete: see `HandoffReceiver.incomplete`.
        weight_files: makes the digest of the weights' files, closed with this; None makes none.
        events: of arena and store, for vLLM to publish; None where it publishes none.
        report: tells vLLM and the status file what was counted; closed with this.
        requests: all that vLLM has; whatever they ask for, others find what they compute in its own
            cache.
        serving: which hand-offs this engine takes part in now.
        undrafted: which blocks lack the drafter's KV.
        spoiled: which blocks hold what was computed upon blocks that another connector failed to
            load.
        alone: whether no other connector beside this one sees the requests.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        *,
        manager: "KVCacheManager",
        context: EngineContext,
        weights: WeightsEpoch,
        ledger: CopyLedger,
        room: LoadRoom,
        periodic_tasks: PeriodicTasks,
        channel: ControlChannel,
        directory: SlotDirectory | None,
        products: tuple[Product, ...],
        shared: SharedPrefix | None,
        incomplete: dict[Fetch, None],
        weight_files: WeightFilesDigest | None,
        events: KVEvents | None,
        report: SchedulerReport,
        requests: Requests,
        serving: ServingState,
        undrafted: UndraftedBlocks,
        spoiled: UndraftedBlocks,
        alone: bool,
    ) -> None:
        self._trace = context.trace
        self._clock = context.clock
        self._manager = manager
        # `KVCacheManager.get_blocks` makes an object of them, which costs as much as the rest.
        self._blocks_of = manager.coordinator.get_blocks
        self._weights = weights
        self._ledger = ledger
        self._room = room
        self._periodic_tasks = periodic_tasks
        self._channel = channel
        self._directory = directory
        self._products = products
        self._incomplete = incomplete
        self._shared = shared
        self._weight_files = weight_files
        self._events = events
        self._stats = context.stats
        self._hint_warnings = Warnings(logger, context.clock)
        self._report = report
        self._serving = serving
        self._undrafted = undrafted
        self._spoiled = spoiled
        serving.busy = self._busy
        self._alone = alone
        self._adapters = AdapterContents(context, num_workers(vllm_config))
        self._hash_block_size = hash_block_size(vllm_config, kv_cache_config)
        self._dtype = vllm_config.model_config.dtype
        # Where a group keeps its last tokens only, a prefill must end where the decode begins.
        self._stops_early = not attends_to_all(kv_cache_config)
        # Of vLLM's groups; with context parallelism a block has more.
        groups = kv_cache_config.kv_cache_groups
        self._block_tokens = [each.kv_cache_spec.block_size for each in groups]
        self._transferred = tuple(kv_cache_config.transfer_group_ids)
        uncached = uncached_groups(kv_cache_config)
        self._cached = tuple(each for each in self._transferred if each not in uncached)
        self._states = requests
        self._void: tuple[list[int], list[int]] = [], []
        # Beside other connectors: the blocks, by group, of requests that have ended, and how many
        # of the steps that were under way then have not ended.
        self._left: deque[tuple[list[list[int]], int]] = deque()
        self._resets_told = weights.resets
        self._told_unreadable = False
        self._by_files = True
        self._shared_as: str | None = None
        self._share()
        # Whether each of the steps that have not ended computes anything.
        # With pipeline stages vLLM has as many steps under way.
        stages = vllm_config.parallel_config.pipeline_parallel_size
        self._computing: deque[bool] = deque(maxlen=8 * stages)

    def _follow_weights(self) -> None:
        if not self._weights.noticed():
            return
        if self._events is not None and self._weights.resets != self._resets_told:
            self._resets_told = self._weights.resets
            self._events.changes.forgotten()
        if self._weights.known:  # they are fixed
            self._tell_again()
            return
        for product in self._products:
            product.suspend(self._states.values())

    def _tell_again(self) -> None:
        """Tell routers of the KV that outlived a reset: it is of the engine's weights."""
        if self._events is not None:
            self._events.changes.tell_again()

    def _take_weights(self, answers: Iterable[RankWeights]) -> None:
        """Ranks have said which weights they have."""
        if not [each for each in answers if self._weights.answer(each)]:
            return
        was_stained = self._weights.stained
        changed = self._weights.settle()
        if self._weights.stained and not was_stained:
            logger.warning(
                "vLLM's prefix cache may hold KV of other weights than this engine has now: a "
                "reset has failed, or workers were called before it was known which weights they "
                "had. Until the prefix cache is reset, nothing is handed off or shared"
            )
        if changed:
            logger.info("This engine has other weights now: its KV from before is void")
            self._void_all()
            self._weights.begin()  # the control thread gives leases from here on, so not before
        else:
            for product in self._products:
                product.settle()
            self._tell_again()
        if self._weights.name.changed == self._by_files:
            self._by_files = not self._by_files
            self._channel.judge_by_files(self._by_files)
        if self._weights.problem and not self._told_unreadable:
            self._told_unreadable = True
            logger.warning(
                "It is not known which weights this engine has in its memory: %s. It shares "
                "prefixes with no other engine. If weights never change while engines run, set "
                "`model_id` to the same name on all that have the same, and `weights` to `fixed`",
                self._weights.problem,
            )
        self._share()

    def _share(self) -> None:
        """Share with the engines of the same weights, if it is known which these are."""
        if self._weights.sharing_id != self._shared_as:
            self._shared_as = self._weights.sharing_id
            for product in self._products:
                product.follow(self._shared_as)

    def _waits_for_weights(self, state: RequestState) -> bool:
        """Whether a request has to wait until the weights are known that it is computed with.

        It does not for ever: after that it is computed, and nothing of it is shared."""
        self._weights.ask()
        if self._shared is None and not state.request.kv_transfer_params:
            # If workers are called before the first answer, nothing tells which weights computed
            # what is in vLLM's cache then.
            return self._weights.waits and not self._weights.begun
        if self._weights.waits:
            return True
        state.adapter_asked = None
        if not state.begun:
            self._begin_alone(state, "weights_unknown")
            self._stats.fail("weights_unknown")
        for product in self._products:
            product.takes_nothing(state, "weights_unknown", _UNKNOWN)
            product.gives_nothing(state, "weights_unknown", _UNKNOWN)
        return False

    def _void_all(self) -> None:
        """Whatever was computed so far is void, here and at the peers that are reading it."""
        if self._directory is not None:
            slots, generations = self._directory.void()
            self._void[0].extend(slots)
            self._void[1].extend(generations)
        for product in self._products:
            product.void(self._states.values())

    def _blocks_void(self, block_ids: Collection[int]) -> None:
        """A connector beside this one has failed to load these KV blocks. They hold what no model
        has computed, and so does what was computed upon them.

        vLLM has one of their requests compute them anew. Other requests that have them go on
        meanwhile, and new ones would find them (vLLM #49250).
        """
        void = {each for each in block_ids if 0 < each < len(self._manager.block_pool.blocks)}
        # A request that has ended has left them in vLLM's own cache, with those behind them. vLLM
        # ends requests of this step before it tells of the failure.
        running = [(each, self._ids_of(each.request)) for each in self._states.values()]
        ended = [left for left, _ in self._left]
        tables = [ids for each in (*ended, *(of for _, of in running)) for ids in each]
        size = 0
        while size < len(void):  # others have found what was computed upon them
            size = len(void)
            for ids in tables:
                void.update(dropwhile(lambda each: each not in void, ids))
            void.discard(NULL_BLOCK_ID)
        for state, of_request in running:
            request = state.request
            for ids, tokens in zip(of_request, self._block_tokens, strict=True):
                first = next((i for i, each in enumerate(ids) if each in void), None)
                if first is None:
                    continue
                if request.num_computed_tokens > first * tokens:  # another one computes them
                    self._gives_nothing(state, "load_failed", _SPOILED)
                    self._spoiled.goes_on_without(request, first * tokens)
        self._manager.evict_blocks(void)
        for product in self._products:
            product.blocks_void(void)

    def _ids_of(self, request: "Request") -> list[list[int]]:
        """The blocks of a request, by vLLM's groups."""
        return [[each.block_id for each in of] for of in self._blocks_of(request.request_id)]

    def on_new_request(self, request: "Request") -> None:
        """A request has arrived: ask for its KV elsewhere, or prepare to hand it off."""
        self._follow_weights()
        drop_unusable(request, self._stats)
        hashes = complete_hashes(request, self._hash_block_size, self._dtype)
        hints = take_hints(request, self._shared, self._stats, self._hint_warnings)
        state = self._states.arrive(request, hints)
        self._adapters.begins(request)
        if not (request.kv_transfer_params or self._shared is not None):
            return
        if not hashes:
            self._stats.fail("prompt_embeds")
            self._begin_alone(state, "prompt_embeds")
            return
        state.refusals = self._serving.refusals()
        waits = self._adapters.arrives(state)
        if self._weights.known and not waits:
            self._begin(state)
        else:
            state.begun = False
            state.enter(Phase.UNKNOWN, self._trace)

    def _begin_alone(self, state: RequestState, reason: str) -> None:
        """Begin a request that nothing is fetched for, and that is not handed off."""
        state.begun = True
        for product in self._products:
            product.declines(state, reason)

    def _begin(self, state: RequestState) -> None:
        adapter = self._adapters.content(state.request, self._weights.number)
        if adapter is None:
            self._begin_alone(state, "adapter_unknown")
            return
        state.begun = True
        handed_off = wants_handoff(state.request.kv_transfer_params or {})
        state.shortened = self._stops_early and handed_off
        for product in self._products:
            product.arrives(state, adapter)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond these can be loaded; see `KVConnectorBase_V1`."""
        state = self._states[request.request_id]
        state.offer = None
        if state.send is not None and state.send.waits:
            return _ASK_AGAIN  # vLLM asks in each step for each of them: nothing else is looked at
        if self._incomplete and self._uncache_incomplete():
            return _ASK_AGAIN  # vLLM may have found such a block for this request just now
        self._follow_weights()
        if not self._weights.known and self._waits_for_weights(state):
            state.enter(Phase.UNKNOWN, self._trace)
            return _ASK_AGAIN
        if state.adapter_asked is not None:
            if self._adapters.waits(state):
                return _ASK_AGAIN
            state.adapter_asked = None
        if not state.begun:
            self._begin(state)
            return _ASK_AGAIN  # it may be shorter now, so vLLM has to look at it anew
        self._undrafted.asked(request.request_id, num_computed_tokens)
        self._spoiled.asked(request.request_id, num_computed_tokens)
        matched = 0
        for product in self._products:
            found = product.offer(state, num_computed_tokens)
            if found is None:
                state.enter(product.waits_in, self._trace)
                return _ASK_AGAIN
            if found:
                matched = found
                state.offer = Offer(product, num_computed_tokens, product.brings_all)
                break
        if matched or state.phase is not Phase.QUEUED:
            state.enter(Phase.ROOM, self._trace)
        if matched == 0:
            self._room.ends(state)
        elif not self._room.admits(state, num_computed_tokens, num_computed_tokens + matched):
            return _ASK_AGAIN
        return matched, bool(matched)

    def loaded_groups(self, request: "Request") -> tuple[int, ...]:
        """The groups, among all of vLLM's, that the load of a request fills.

        After a load that leaves out a window which vLLM keeps in no prefix cache, vLLM computes the
        last tokens of the hit again. Its scheduler asks after each offer, and after the load.
        """
        offer = self._states[request.request_id].offer
        return self._transferred if offer is not None and offer.brings_all else self._cached

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external: int
    ) -> None:
        """Blocks were allocated; `num_external` of their tokens are ours to load."""
        state = self._states[request.request_id]
        if num_external > 0:
            self._room.begins(state)
            state.enter(Phase.LOAD, self._trace)
        elif state.phase is not Phase.QUEUED and state.phase is not Phase.COMPUTING:
            # With `skip_reading_prefix_cache` vLLM goes on before it is known what can be loaded.
            state.enter(Phase.SCHEDULING, self._trace)
        lacks_drafter = False
        for product in self._products:
            lacks_drafter |= product.allocated(state, blocks, num_external)
        if lacks_drafter:
            first = self._undrafted.loaded(request, blocks.blocks, num_external)
            for product in self._products:
                product.lacks_drafter(blocks.blocks, first)
        # Beside other connectors `blocks` are none unless we load some.
        if self._undrafted.has(request, self._blocks_of):
            self._gives_nothing(state, "no_drafter_kv", _NO_DRAFTER_KV)
        if self._spoiled.has(request, self._blocks_of):
            self._gives_nothing(state, "load_failed", _SPOILED)

    def _gives_nothing(self, state: RequestState, reason: str, text: str) -> None:
        """A request has blocks that lack KV, which others would expect there."""
        for product in self._products:
            product.gives_nothing(state, reason, text)

    def hit_sources(self, request: "Request", tokens: int) -> dict[Any, int]:
        """See `KVConnectorBase_V1`."""
        prefix = self._states[request.request_id].prefix
        read = {} if prefix is None else prefix.sources
        sources: Counter[Any] = Counter()
        for counter, number in (read or {"tokens_loaded": tokens}).items():
            sources[cache_hit_source(counter)] += number
        return +sources

    def _uncache_incomplete(self) -> bool:
        """Take the blocks that were not loaded as a whole out of vLLM's own prefix cache; returns
        whether it had any.

        vLLM enters them when it turns to their request. It may look up the next request at once,
        without another call of ours (`Scheduler._ec_transfer_pending`).
        """
        blocks = self._manager.block_pool.blocks
        found = False
        for fetch in list(self._incomplete):
            if any(blocks[each].block_hash is not None for each in fetch.incomplete):
                self._manager.evict_blocks(fetch.incomplete)
                del self._incomplete[fetch]
                found = True
        return found

    def build_meta(self, scheduler_output: "SchedulerOutput") -> OmniConnectorMetadata:
        """This step's work for the workers."""
        computes = scheduler_output.total_num_scheduled_tokens > 0
        # While an earlier step computes, its results must not wait for this step.
        meta = OmniConnectorMetadata(idle=not computes and True not in self._computing)
        self._computing.append(computes)
        self._periodic_tasks.ended()  # it ends leases in place of a thread that has ended
        self._follow_weights()
        known = self._weights.known
        if not known:
            if computes:
                self._weights.ask(computes=True)
            meta.weights_asked = self._weights.asked
        if self._void[0]:
            meta.void, self._void = self._void, ([], [])
        scheduled = scheduler_output.num_scheduled_tokens
        if self._room.under_way:
            self._room.scheduled(scheduled)
        self._undrafted.note(scheduled, self._blocks_of)
        self._spoiled.note(scheduled, self._blocks_of)
        if self._incomplete:
            self._uncache_incomplete()
        for request in scheduler_output.scheduled_new_reqs:
            tokens = len(request.prompt_token_ids or ())
            state = self._states[request.req_id]
            state.enter(Phase.COMPUTING, self._trace)
            self._report.prompt(state, tokens, request.num_computed_tokens)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._states[request_id].enter(Phase.COMPUTING, self._trace)
        step = Step(meta, scheduler_output, not meta.idle, known, self._states, self._blocks_of)
        if copies := scheduler_output.kv_cache_block_copies:
            with self._held([block_id for copy in copies for block_id in copy]):
                self._step(step)
        else:
            self._step(step)
        if self._ledger.block_copies:
            copy_blocks(scheduler_output, self._ledger.block_copies)
            self._ledger.block_copies = []
        if self._ledger.revoked:
            meta.cancel = self._ledger.take_revoked()
        return meta

    def _step(self, step: Step) -> None:
        for product in self._products:
            product.step(step)

    @contextmanager
    def _held(self, block_ids: Sequence[int]) -> Iterator[None]:
        """Keep blocks that vLLM copies in this step from being targets of our own copies.

        vLLM has let go of them, and makes its copies and ours together. Where layers lie in one
        tensor, it goes through that tensor's views one after the other: a block that is a target
        and a source has been overwritten in part when it is read.
        """
        pool = self._manager.block_pool
        blocks = [pool.blocks[each] for each in block_ids]
        pool.touch(blocks)
        try:
            yield
        finally:
            pool.free_blocks(blocks)

    def update_output(self, output: "KVConnectorOutput") -> None:
        """Take the workers' reports."""
        for request_id in output.finished_recving or ():
            state = self._states.get(request_id)
            if state is not None and state.phase is Phase.LOAD:  # else another connector's load
                state.enter(Phase.SCHEDULING, self._trace)
        report: WorkerReport | None = None
        if (counted := take_worker_stats(output)) is not None:
            report, counted.report = counted.report, None
            self._report.workers(counted)
        if output.invalid_block_ids:
            # Of our own loads nothing was copied, as a request that waits for one computes nothing.
            failed = report.failed if report is not None else ()
            own = self._ledger.blocks_of(failed)
            if others := output.invalid_block_ids - own:
                self._blocks_void(others)
        if report is None:
            return
        self._follow_weights()
        for load in report.adapters:
            replaced = self._adapters.loaded(load, self._weights.number)
            if replaced is Replaced.IN_USE:
                self._void_all()
                self._weights.void()
                self._share()
            if replaced is not None:
                for product in self._products:
                    product.distrust()
        if report.weights:
            self._take_weights(report.weights)
        if report.pinned:
            self._report.pinned(report.pinned)
        self._ledger.report(report.done, report.failed)
        for product in self._products:
            for request, vllm_learns in product.failed_loads(output.failed_recving or ()):
                state = self._states.get(request.request_id)
                if state is not None and state.request is request:
                    for each in self._products:
                        each.takes_nothing(state, "load_failed", _LOAD_FAILED)
                if not vllm_learns:
                    recompute(request, self._manager)

    def step_ended(self) -> "Iterable[KVCacheEvent]":
        """vLLM has taken over what a step has computed; returns the KV events since the last."""
        if self._computing:
            self._computing.popleft()
        for _ in range(len(self._left)):
            left, steps = self._left.popleft()
            if steps > 1:
                self._left.append((left, steps - 1))
        if self._adapters.used:
            self._adapters.step_ended()
        for product in self._products:
            product.step_ended()
        return () if self._events is None else self._events.take()

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """The request is over, in whatever way; see `SupportsHMA`."""
        self._follow_weights()
        state = self._states[request.request_id]
        self._room.ends(state)
        self._adapters.ends(request)
        self._undrafted.finish(request, self._blocks_of)
        self._spoiled.finish(request, self._blocks_of)
        if not self._alone and self._computing:
            self._left.append((self._ids_of(request), len(self._computing)))
        blocks_of = self._blocks_of if self._weights.known else None
        answers = [product.ends(state, blocks_of) for product in self._products]
        answer = next((each for each in answers if each is not None), None)
        computed = state.phase is Phase.COMPUTING
        state.enter(Phase.ENDED, self._trace)
        if computed and state.send is not None:
            self._trace.span("answer", now(), request.request_id, request=request.request_id)
        self._states.end(request.request_id)
        return False, answer

    def copying(self) -> bool:
        """Whether a later step has to free blocks that copies hold, to copy more, or to learn which
        weights the ranks have."""
        return (
            bool(self._ledger)
            or (not self._weights.known and self._learns_weights())
            or any(product.has_work() for product in self._products)
        )

    def _learns_weights(self) -> bool:
        """Whether answers are to come that requests wait for, or copied blocks."""
        if self._weights.waits:
            return True
        return self._weights.asked > 0 and any(each.unsettled() for each in self._products)

    def _busy(self) -> bool:
        return self.copying() or (self._directory is not None and self._directory.num_handoffs > 0)

    def leave(self, timeout: float) -> None:
        """vLLM shuts this engine down within so many seconds. Called within a signal handler."""
        self._serving.leave(timeout)

    def has_work(self) -> bool:
        """Whether vLLM has to go on stepping although it has nothing to compute."""
        return self.copying() or self._serving.stays()

    def settle(self, copies: Callable[[], CopiesOfRanks]) -> None:
        """Wait until no copy of any rank touches KV blocks any more, where that alone blocks a
        reset; see `CopyLedger.settle`. Copies that no worker was told of yet are given up.

        Args:
            copies: makes what asks the ranks.
        """
        if not self._ledger.holds_alone:
            return
        if self._shared is not None:
            self._shared.saves.withdraw()
        try:
            ranks = copies()
        except OmniError as error:
            logger.warning(
                "The prefix cache is not reset, as copies hold blocks and a rank cannot be asked "
                "whether they have ended: %s",
                error,
            )
            return
        try:
            self._ledger.settle(ranks.ended)
        finally:
            ranks.close()

    def frees_soon(self) -> bool:
        """Whether blocks come free so soon that no request should be preempted for some."""
        return self._ledger.frees_soon()

    def reset_cache(self) -> bool:
        """Forget the blocks that are kept: somebody has asked for that. Hand-offs stay."""
        self.reset_attempted()
        self._follow_weights()
        if self._directory is not None:
            with self._directory.pool.lock:
                self._directory.pool.forget()
        for product in self._products:
            product.clear()
        if self._shared is not None:
            logger.info("The blocks that this engine kept in its arena are forgotten, as was asked")
        return True

    def reset_attempted(self) -> None:
        """vLLM tries to reset its prefix cache: the weights may be others now, or soon."""
        self._weights.attempted()

    def tell_of_reset(self) -> None:
        """Log what vLLM's prefix cache has been reset without."""
        if self._shared is not None:
            logger.info(
                "vLLM's prefix cache was reset. Blocks in arenas and stores stay, for the same "
                "weights; /reset_prefix_cache?reset_external=true empties the arena of the engine "
                "that is asked, too"
            )

    def take_stats(self) -> OmniStats | None:
        """What was counted; None when nothing changed, or if it is told in a later step."""
        if self._serving.has_requests and self._clock() < self._report.next_at:
            return None  # most often
        for product in self._products:
            product.count_failures()
        return self._report.take()

    def close(self) -> None:
        """Stop the control channel, the lookups, and the reading of adapters. Idempotent."""
        self._adapters.close()
        if self._weight_files is not None:
            self._weight_files.close()
        self._channel.close()  # first: its thread may void what the index lists
        for product in self._products:
            product.close()
        self._report.close()
        self._trace.close()
