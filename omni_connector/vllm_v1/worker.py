# SPDX-License-Identifier: Apache-2.0
"""The worker half: one rank's KV caches, its arena, and the copies between them and peers'.

A preemption needs no work here: until a copy has ended, the scheduler half holds its blocks
(`copy.held_blocks`), so that vLLM gives them to no other request.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from vllm.logger import init_logger

from omni_connector.arena.nodes import near_cores, process_cores
from omni_connector.config import OmniConfig
from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.cuda import pci_address
from omni_connector.copy.ended import ended_copies
from omni_connector.copy.jobs import LoadSpec, Saver, SaveSpec
from omni_connector.copy.layered import Forward, LayerRanges, TracedCopier
from omni_connector.copy.loading import Loader
from omni_connector.copy.pinning import PinnedBytes, Pinning
from omni_connector.copy.prefix_jobs import HostLoadSpec, KeepSpec, StoreLoadSpec, StoreSaveSpec
from omni_connector.copy.threads import (
    CLOSE_S,
    NO_JOB_ID,
    CopyThread,
    Outcome,
    Work,
    none_ended,
    traced,
)
from omni_connector.kv.canonical import (
    CanonicalKVCaches,
    SlotLayout,
    canonicalize,
    canonicalize_cross_layers,
)
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import TransferSpec
from omni_connector.kv.stripes import of_stripe
from omni_connector.net.introductions import introduction
from omni_connector.net.rank_socket import RankAnswers
from omni_connector.prefix.attaching import attached_ahead
from omni_connector.prefix.store_jobs import StoreJobs
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.shared_work import Helpers
from omni_connector.stores.block_store import BlockStore
from omni_connector.transports.choice import Transports
from omni_connector.vllm_v1.adapter_loads import AdapterLoads
from omni_connector.vllm_v1.kernels import attention_of, kept_of, kernel_orders, scales_id
from omni_connector.vllm_v1.metadata import (
    OmniConnectorMetadata,
    OmniHandshakeMetadata,
    WorkerReport,
)
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.outcomes import JobOutcomes
from omni_connector.vllm_v1.rank_arena import ArenaPlan, RankArena
from omni_connector.vllm_v1.rank_weights import AnsweredWeights, ReadWeights
from omni_connector.vllm_v1.specs import (
    fails_by_block,
    group_shapes,
    group_specs,
    with_copies,
)
from omni_connector.vllm_v1.states import cuts_of
from omni_connector.vllm_v1.surroundings import Surroundings

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.omni_connector.worker")

# The cores before the engine pinned any thread: this module is imported while it starts.
_PROCESS_CORES: Final = process_cores()


_Bodies = dict[type[TransferSpec], tuple[CopyThread, Callable[[int, Any, object], Work]]]
"""By the kind of job: the thread that makes it, and what makes its body."""


class _Threads:
    """The threads that copy, those that share in a copy, and the cores that they run on."""

    def __init__(self, context: EngineContext) -> None:
        pinned = frozenset(os.sched_getaffinity(0))
        self.cores = near_cores(_PROCESS_CORES, pinned, pci_address())
        if self.cores != _PROCESS_CORES:
            near = ", ".join(map(str, sorted(self.cores)))
            logger.info("Copies and the arena of this rank are near to cores %s", near)
        self.helpers = Helpers(self.cores)
        start = context.start
        on_end = self.helpers.tell_lender
        self.loads = CopyThread("omni-load", self.cores, start, on_end, context.clock)
        self.saves = CopyThread(
            "omni-save", self.cores, start, on_end, context.clock, first=self.loads
        )

    def close(self) -> None:
        """Stop them. Idempotent."""
        self.saves.close()
        self.loads.close()
        self.helpers.close(CLOSE_S)


@dataclass(frozen=True)
class _RegisteredCaches:
    """The KV caches of a rank, what copies to and from them, and its arena.

    Attributes:
        arena, saver: None on an engine that keeps and hands off nothing.
        store_jobs: None where there is no store.
    """

    copier: BlockCopier
    pinning: Pinning
    loader: Loader
    handshake: OmniHandshakeMetadata
    bodies: _Bodies
    arena: RankArena | None
    saver: Saver | None
    store_jobs: StoreJobs | None

    def close_jobs(self) -> None:
        """Stop what reads and writes the caches and the arena. Idempotent."""
        if self.store_jobs is not None:
            self.store_jobs.close()
        self.loader.close()

    def close(self) -> None:
        """Let go of the caches and the arena. Idempotent."""
        self.pinning.close()
        self.copier.close()
        if self.arena is not None:
            self.arena.close()


class OmniWorker:
    """Executes the copy jobs of the scheduler half.

    It saves blocks to this rank's arena (for a hand-off, or to share them with the host's other
    engines) and to a store. It loads blocks from a hand-off, from its own and other engines' arenas
    and from a store. Arenas of the host's other engines are attached ahead, when the scheduler half
    asks for that at this rank's socket.

    Args:
        config: the connector's settings.
        kv_cache_config: what vLLM allocates.
        layers: the model's layers by name.
        transports: export our arena and read the peers'.
        rank: of this worker, of all ranks, counted stage by stage.
        stage_ranks, local_ranks: how many ranks a pipeline stage has, and this host.
        arena: how this rank's arena is opened; None where the engine has none.
        answer: answers the scheduler half at this rank's socket; returns what ends that.
        shares: whether this rank attaches arenas of neighbours when the scheduler half asks.
        store: where prefixes are shared beyond the host, closed with this; None has none.
        context: clock, randomness and threads; the trace is closed with this.
        stats: those of the context.
        surroundings: make the copier.
        weights: reads the weights of this rank.
        head_copies: says how many ranks hold the same KV head, by layer.
        adapters: which LoRA adapters vLLM has loaded; None where it loads none.
        drafts: whether a drafter has layers in the KV cache.

    Attributes:
        loads_left: whether loads of this step have not been started.
        forward: the forward pass under way, if saves follow it layer by layer.
    """

    def __init__(
        self,
        *,
        config: OmniConfig,
        kv_cache_config: "KVCacheConfig",
        layers: Mapping[str, Any],
        transports: Transports,
        rank: int,
        stage_ranks: int,
        local_ranks: int,
        arena: ArenaPlan | None,
        answer: Callable[[RankAnswers], Callable[[], None]],
        shares: bool,
        store: BlockStore | None,
        context: EngineContext,
        stats: OmniStats,
        surroundings: Surroundings,
        weights: ReadWeights,
        head_copies: Callable[[], Mapping[str, int]],
        adapters: AdapterLoads | None,
        drafts: bool = False,
    ) -> None:
        self._weights = AnsweredWeights(rank, weights, context)
        self._head_copies = head_copies
        self._adapters = adapters
        self._drafts = drafts
        # Layers of the drafter, once it has computed them more than once in a step.
        self._repeated_layers: frozenset[str] = frozenset()
        self._context = context
        self._config = config
        self._surroundings = surroundings
        self._kv_cache_config = kv_cache_config
        self._layers = layers
        self._transports = transports
        self._rank = rank
        self._stage_ranks = stage_ranks
        self._local_ranks = local_ranks
        self._arena_plan = arena
        self._answer = answer
        self._shares = shares
        self._end_answers: Callable[[], None] | None = None
        self._store = store
        self._checksum = config.integrity == "full"
        self._threads = _Threads(context)
        self._copy_threads = [self._threads.saves, self._threads.loads]
        self._caches: _RegisteredCaches | None = None
        self._metadata: OmniConnectorMetadata | None = None
        self.loads_left = self._saves_left = False
        self._blocks_ready: object = None  # the fence of the step's loads
        # The saves that follow the forward pass layer by layer.
        self.forward: Forward | None = None
        self._following: dict[int, TransferSpec] = {}
        self._under_way: dict[int, TransferSpec] = {}
        self._last_started = NO_JOB_ID  # jobs have ascending numbers
        self._pinned = PinnedBytes()  # what the scheduler half was told
        self._outcomes = JobOutcomes(stats, fails_by_block=fails_by_block(kv_cache_config))
        self.take_finished_loads = self._outcomes.take_finished_loads
        self.take_bad_block_ids = self._outcomes.take_bad_block_ids
        self._stats = stats
        self._closed = False

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Bring the caches into canonical form and open the arena.

        Raises:
            LayoutError: a cache family or layout that is not supported.
            ConfigError: the arena would not hold a single slot.
        """
        groups = group_specs(self._kv_cache_config)
        self._open(canonicalize(groups, kv_caches, self._kv_cache_config.num_blocks), kv_caches)

    def register_cross_layers(self, kv_cache: "torch.Tensor", dims: str) -> None:
        """Like `register_kv_caches`, with one tensor of all layers.

        Args:
            kv_cache: the tensor.
            dims: its dimensions; see `canonicalize_cross_layers`.
        """
        config = self._kv_cache_config
        names = [name for tensor in config.kv_cache_tensors for name in tensor.layers]
        self._open(
            canonicalize_cross_layers(
                group_specs(config), kv_cache, names, config.num_blocks, dims=dims
            ),
            dict(zip(names, kv_cache.unbind(dims.index("L")), strict=True)),
        )

    def _open(self, canonical: CanonicalKVCaches, views: "Mapping[str, torch.Tensor]") -> None:
        """Take the caches in canonical form, and each layer's view of them."""
        layout = SlotLayout.of(canonical)
        addresses = [
            {layer.name: views[layer.name].data_ptr() for layer in group.layers}
            for group in group_specs(self._kv_cache_config)
        ]
        layer_ranges = LayerRanges.of(canonical, layout, addresses)
        cores = len(_PROCESS_CORES) // self._local_ranks
        self._threads.helpers.threads = 1 + _copy_threads(cores, canonical.device.type)
        copier = self._surroundings.copier(
            layer_ranges.canonical, layer_ranges.layout, self._threads.helpers
        )
        if self._context.trace.is_recording:
            copier = TracedCopier(copier, layer_ranges, self._context.trace)
        context = self._context
        pinning = Pinning(copier, context.clock, context.start, context.lock)
        try:
            self._caches = self._registered(canonical, layer_ranges, copier, pinning)
        except BaseException:
            copier.close()
            raise

    def _registered(
        self,
        canonical: CanonicalKVCaches,
        layer_ranges: LayerRanges,
        copier: BlockCopier,
        pinning: Pinning,
    ) -> "_RegisteredCaches":
        layout = layer_ranges.layout
        helpers = self._threads.helpers
        groups = self._group_shapes(canonical)
        scales = scales_id(self._kv_cache_config, self._layers)
        saves, loads = self._threads.saves, self._threads.loads
        bodies: _Bodies = {}
        arena: RankArena | None = None
        saver: Saver | None = None
        store_jobs: StoreJobs | None = None
        checksum = self._checksum or self._transports.needs_checksums
        if self._arena_plan is not None:
            cores = self._threads.cores
            arena = self._arena_plan.open(layout.slot_bytes, groups, pinning, cores)
            saver = Saver(
                arena=arena.arena, copier=copier, layer_ranges=layer_ranges, checksum=checksum
            )
            bodies[SaveSpec] = bodies[KeepSpec] = saves, saver.work
        try:
            if self._store is not None:
                store_jobs = StoreJobs(
                    store=self._store,
                    copier=copier,
                    layout=layout,
                    groups=groups,
                    rank=self._rank,
                    ranks=self._stage_ranks,
                    affinity=self._threads.cores,
                    context=self._context,
                    on_end=helpers.tell_lender,
                )
                bodies[StoreSaveSpec] = saves, store_jobs.save_work
                bodies[StoreLoadSpec] = store_jobs.loads, store_jobs.load_work
                self._copy_threads.append(store_jobs.loads)
            loader = Loader(
                transports=self._transports,
                copier=copier,
                layout=layout,
                groups=groups,
                rank=self._rank,
                ranks=self._stage_ranks,
                stripes=1 if arena is None else arena.stripes,
                shards=1 if arena is None else arena.shards,
                checksum=self._checksum,
                threads=helpers.threads if canonical.device.type == "cpu" else 1,
                context=self._context,
                notify=loads.notify,
                queued=loads.queued,
                own=(arena.arena, arena.endpoints) if arena is not None else None,
                pins=pinning,
            )
        except BaseException:
            copier.close()
            if arena is not None:
                arena.close()
            raise
        bodies[LoadSpec] = bodies[HostLoadSpec] = loads, loader.work
        if arena is None:
            handshake = OmniHandshakeMetadata((), groups, scales)
        else:
            handshake = OmniHandshakeMetadata(
                arena.endpoints, groups, scales, arena.stripes, arena.shards
            )
        return _RegisteredCaches(
            copier, pinning, loader, handshake, bodies, arena, saver, store_jobs
        )

    def _group_shapes(self, canonical: CanonicalKVCaches) -> tuple[GroupShape, ...]:
        """What this rank keeps, by what its layers and their kernels say."""
        orders = kernel_orders(self._kv_cache_config, self._layers, canonical.page_orders)
        attention = attention_of(self._kv_cache_config, self._layers)
        kept = kept_of(self._kv_cache_config, self._layers)
        cuts = cuts_of(self._kv_cache_config, self._layers, self._stage_ranks)
        return with_copies(
            group_shapes(self._kv_cache_config, orders, attention, kept, cuts),
            self._kv_cache_config,
            self._head_copies(),
            self._stage_ranks,
        )

    def listen(self, *, introduces: bool) -> None:
        """Answer the scheduler half at this rank's socket, if it has anything to ask there. The
        caches are registered.

        Args:
            introduces: whether to say who this is, and which copies have ended.

        Raises:
            TransportError: another process has this rank's socket.
        """
        assert self._caches is not None
        answers: dict[type[msgspec.Struct], Callable[[Any], msgspec.Struct]] = {}
        if self._shares:
            loader = self._caches.loader
            answers |= attached_ahead(loader.arenas.attach_ahead, loader.arenas.keep)
            if loader.copies is not None:
                answers |= loader.copies.answers
        if introduces:
            answers |= introduction(self._caches.handshake.encode())
            answers |= ended_copies(self.ended)
        if answers:
            self._end_answers = self._answer(answers)

    def captured(self) -> None:
        """vLLM has captured its CUDA graphs, or captures none: it asks for the handshake after
        that, and makes steps. Cheap, also when called again."""
        if self._caches is not None:
            self._caches.pinning.begin()

    @property
    def handshake(self) -> OmniHandshakeMetadata | None:
        """What the scheduler half must know; None before the caches are registered."""
        return None if self._caches is None else self._caches.handshake

    def bind(self, metadata: OmniConnectorMetadata) -> None:
        """Take the work of a step."""
        self.captured()
        if self._caches is not None:
            self._caches.pinning.step_begins()
        if self._following:  # the forward pass before this one has not come to its end
            self._threads.saves.cancel(set(self._following))
            self._following = {}
        self._metadata = metadata
        if metadata.weights_asked:
            self._weights.ask(metadata.weights_asked)
        self.loads_left = bool(metadata.loads)
        # vLLM has launched what prepares blocks for the step (zeroes, copies), and nothing of the
        # forward pass, which does not touch them. It may start loads long after it.
        self._blocks_ready = None
        if metadata.loads and self._caches is not None:
            self._blocks_ready = self._caches.copier.fence()
        self._saves_left = bool(metadata.saves or metadata.void[0])
        self.forward = None
        if metadata.saves and SaveSpec in map(type, metadata.saves.values()):
            self.forward = Forward(self._repeated_layers)

    def follows_layers(self) -> bool:
        """Whether a save of this step follows the forward pass."""
        return self.forward is not None

    def clear(self) -> None:
        """End of a step: whatever the runner did not start by itself starts now."""
        if self.loads_left:
            self.start_loads()
        if self._saves_left:
            self.start_saves()
        if self._caches is not None:
            self._caches.pinning.step_launched()
        metadata, self._metadata = self._metadata, None
        if metadata is None:
            return
        if metadata.loads or metadata.saves:
            self._last_started = max([self._last_started, *metadata.loads, *metadata.saves])
        if metadata.cancel:
            for thread in self._copy_threads:
                thread.cancel(set(metadata.cancel))

    def start_loads(self) -> None:
        """Start the step's loads; returns at once. Once a step, before or after the forward."""
        if not self.loads_left:
            return
        self.loads_left = False
        assert self._metadata is not None
        fence, self._blocks_ready = self._blocks_ready, None
        self._start(self._metadata.loads, fence)

    def layer_computed(self, layer: str) -> None:
        """The forward pass has computed the KV of a layer; returns at once.

        The first time in a step, its saves to slots start: never sooner, as blocks may be zeroed
        and copied before.
        """
        forward = self.forward
        if forward is None or self._caches is None or self._metadata is None:
            return
        forward.computed(layer, self._caches.copier.fence())
        if self._following:
            self._threads.saves.notify()
            return
        saves = self._metadata.saves.items()
        self._following = {job_id: spec for job_id, spec in saves if type(spec) is SaveSpec}
        self._start_void(self._metadata)
        self._start(self._following, forward)

    def start_saves(self) -> None:
        """Start those of the step's saves that have not been; returns at once. Call it when the
        forward has been launched."""
        if not self._saves_left:
            return
        self._saves_left = False
        metadata = self._metadata
        assert metadata is not None
        forward, self.forward = self.forward, None
        following, self._following = self._following, {}
        if not following:
            self._start_void(metadata)
        if not metadata.saves:
            return
        if following:
            assert forward is not None
            forward.end(None if self._caches is None else self._caches.copier.fence())
            if self._drafts:
                self._repeated_layers |= forward.again
            self._threads.saves.notify()
        saves = metadata.saves.items()
        self._start({job_id: spec for job_id, spec in saves if job_id not in following})

    def _start_void(self, metadata: OmniConnectorMetadata) -> None:
        if metadata.void[0]:
            # After the copies under way, before any into the same slots.
            assert self._caches is not None
            assert self._caches.saver is not None
            assert self._caches.arena is not None
            slots, generations = map(np.array, metadata.void)
            own, rows = of_stripe(slots, self._rank, self._caches.arena.stripes)
            work = self._caches.saver.void_work(rows[own], generations[own])
            self._threads.saves.submit(NO_JOB_ID, work, in_order=True)

    def _start(self, jobs: Mapping[int, TransferSpec], fence: object = None) -> None:
        self._outcomes.expect(jobs.values())
        for job_id, spec in jobs.items():
            if not self.transfer_async(job_id, spec, fence=fence):
                bad = frozenset(spec.blocks.held)
                self._outcomes.add(spec, Outcome(job_id, "job_failed", bad_block_ids=bad))

    def transfer_async(self, job_id: int, spec: TransferSpec, *, fence: object = None) -> bool:
        """Start a copy job, of whatever kind; returns at once.

        Args:
            job_id: what this rank's report calls it.
            spec: what is copied.
            fence: of the copier, when the blocks may be read or written; or the forward pass that
                a save follows; None for now.

        Returns:
            Whether it was started. It is not before the caches that it needs are registered, nor
            after `close`, nor where its ids do not fit.
        """
        caches = self._caches
        if self._closed or caches is None or type(spec) not in caches.bodies:
            return False
        if isinstance(spec, SaveSpec) and caches.arena is not None and caches.arena.stripes > 1:
            spec = spec.of_rank(self._rank, caches.arena.stripes, caches.arena.slot_groups)
        try:
            slots = 0 if caches.arena is None else caches.arena.arena.n_slots
            spec.check(self._kv_cache_config.num_blocks, slots)
        except (IndexError, ValueError):
            logger.exception("Copy job %d was not started; please report it", job_id)
            return False
        thread, body = caches.bodies[type(spec)]
        work = body(job_id, spec, caches.copier.fence() if fence is None else fence)
        work = traced(self._context.trace, spec.span, job_id, work, spec.request_id)
        self._under_way[job_id] = spec
        written = spec.blocks.held if spec.request_id else ()
        thread.submit(job_id, work, written, background=spec.background)
        return True

    def collect(self) -> None:
        """Look at what has ended; help with what has not if this step computes nothing."""
        metadata = self._metadata
        if metadata and metadata.idle and not metadata.cancel and self._surroundings.lingers:
            self._threads.helpers.lend(lambda: none_ended(self._copy_threads))
        if self._under_way:
            for thread in self._copy_threads:
                for outcome in thread.take_ended():
                    self._outcomes.add(self._under_way.pop(outcome.job_id), outcome)
        if self._caches is not None and self._caches.store_jobs is not None:
            self._caches.store_jobs.count_events()

    def ended(self, job_ids: Collection[int]) -> list[int]:
        """Those of these jobs that touch their blocks no more, reported or not. Any thread may ask.

        A job of a step that this rank has yet to make counts as one that has not ended.
        """
        last_started = self._last_started  # before the threads are asked
        under_way = set().union(*(thread.under_way() for thread in self._copy_threads))
        return [each for each in job_ids if each <= last_started and each not in under_way]

    def take_report(self) -> WorkerReport | None:
        """What the scheduler half must know of; None when there is nothing."""
        adapters = self._adapters
        weights = self._weights
        loaded = adapters.take(self._rank) if adapters is not None and adapters.found else ()
        answers = weights.take() if weights.answers else ()
        pinned = self._pinned if self._caches is None else self._caches.pinning.bytes
        news = {} if pinned == self._pinned else {self._rank: pinned}
        if not (loaded or answers or news or self._outcomes.has_ended):
            return None  # most often
        self._pinned = pinned
        return self._outcomes.take_report(loaded, answers, news)

    def take_stats(self) -> OmniStats | None:
        """What was counted since the last call, and the report; None when there is neither."""
        for choice in self._transports.take_choices():
            self._stats.choose(choice.transport, choice.reason)
            logger.info(
                "Reading the arena at %s by %s (%s)", choice.address, choice.transport, choice.why
            )
        self._stats.fail_ended_threads()
        self._stats.report = self.take_report()
        return self._stats.take()

    def close(self) -> None:
        """Stop the threads, then let go of the arenas. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._end_answers is not None:
            self._end_answers()
        self._threads.close()
        self._weights.close()
        if self._caches is not None:
            self._caches.close_jobs()
        elif self._store is not None:
            self._store.close()
        self._transports.close()
        if self._caches is not None:
            self._caches.close()
        self._context.trace.close()


def _copy_threads(cores: int, device: str) -> int:
    """Threads that one copy is shared by.

    Args:
        cores: of this host, for each rank of the engine.
        device: type of the device of the KV cache.
    """
    computing = torch.get_num_threads() if device == "cpu" else 0
    return max(1, min(4, cores - computing))
