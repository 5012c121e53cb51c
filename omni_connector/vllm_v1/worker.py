# SPDX-License-Identifier: Apache-2.0
"""The worker half: one rank's KV caches, its arena, and the copies between them and peers'."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger

from omni_connector.arena.nodes import near_cores, process_cores
from omni_connector.arena.reservations import Reservation
from omni_connector.arena.size import ArenaSizing
from omni_connector.config import OmniConfig
from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.ended import ended_copies
from omni_connector.copy.jobs import LoadSpec, Saver, SaveSpec
from omni_connector.copy.layered import Forward, LayerRanges, TracedCopier
from omni_connector.copy.ledger import Ended
from omni_connector.copy.loading import Loader
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
from omni_connector.net.introductions import introduction
from omni_connector.net.rank_socket import RankAnswers
from omni_connector.prefix.attaching import attached_ahead
from omni_connector.prefix.store_jobs import StoreJobs
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.shared_work import Helpers
from omni_connector.runtime.stats import LEASE_EXPIRED
from omni_connector.stores.block_store import BlockStore
from omni_connector.transports import Arena, Endpoint
from omni_connector.transports.choice import Transports
from omni_connector.vllm_v1.adapter_loads import AdapterLoads
from omni_connector.vllm_v1.kernels import attention_of, kernel_orders, scales_id
from omni_connector.vllm_v1.metadata import (
    OmniConnectorMetadata,
    OmniHandshakeMetadata,
    OmniWorkerMetadata,
)
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.specs import fails_by_block, group_shapes, group_specs
from omni_connector.vllm_v1.surroundings import Surroundings

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.omni_connector.worker")

# As it was before the engine pinned anything: this module is imported while it starts.
_PROCESS_CORES: Final = process_cores()


class OmniWorker:
    """Executes the copy jobs of the scheduler half.

    Args:
        config: the connector's settings.
        kv_cache_config: what vLLM allocates.
        layers: the model's layers by name.
        transports: export our arena and read the peers'.
        rank, ranks: of this worker, and how many its engine has.
        arena_name: under which peers find the arena, unique on this host; it need not be secret.
        arena: how large this rank's arena is; None where the engine hands nothing off.
        answer: answers the scheduler half at this rank's socket; returns what ends that.
        shares: whether the scheduler half has arenas of neighbours attached.
        store: where prefixes are shared, closed with this; None shares none.
        context: clock, randomness and threads; the trace is closed with this.
        stats: those of the context.
        surroundings: make the copier, and say whether memory is prefaulted.
        adapters: which LoRA adapters vLLM has loaded; None where it loads none.
    """

    def __init__(
        self,
        *,
        config: OmniConfig,
        kv_cache_config: "KVCacheConfig",
        layers: Mapping[str, Any],
        transports: Transports,
        rank: int,
        ranks: int,
        arena_name: str,
        arena: ArenaSizing | None,
        answer: Callable[[RankAnswers], Callable[[], None]],
        shares: bool,
        store: BlockStore | None,
        context: EngineContext,
        stats: OmniStats,
        surroundings: Surroundings,
        adapters: AdapterLoads | None,
    ) -> None:
        self._adapters = adapters
        self._context = context
        self._trace = context.trace
        self._config = config
        self._surroundings = surroundings
        self._kv_cache_config = kv_cache_config
        self._layers = layers
        self._transports = transports
        self._rank = rank
        self._ranks = ranks
        self._arena_name = arena_name
        self._sizing = arena
        self._answer = answer
        self._shares = shares
        self._end_answers: Callable[[], None] | None = None
        self._store = store
        self._checksum = config.integrity == "full"
        self._fails_by_block = fails_by_block(kv_cache_config)
        self._arena: Arena | None = None
        self._reservation: Reservation | None = None
        self._copier: BlockCopier | None = None
        self._handshake: OmniHandshakeMetadata | None = None
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._store_jobs: StoreJobs | None = None
        self._cores = near_cores(_PROCESS_CORES, frozenset(os.sched_getaffinity(0)))
        self._helpers = Helpers(self._cores)
        start, on_end = context.start, self._helpers.tell_lender
        clock = context.clock
        self._saves = CopyThread("omni-save", self._cores, start, on_end, clock)
        self._loads = CopyThread("omni-load", self._cores, start, on_end, clock)
        self._threads = [self._saves, self._loads]
        self._metadata: OmniConnectorMetadata | None = None
        self._loads_started = self._saves_started = True
        # The forward pass under way that saves follow, and those that follow it.
        self._forward: Forward | None = None
        self._following: dict[int, TransferSpec] = {}
        # By the kind of job: the thread that makes it, and what makes its body.
        self._bodies: dict[
            type[TransferSpec], tuple[CopyThread, Callable[[int, Any, object], Work]]
        ] = {}
        self._under_way: dict[int, TransferSpec] = {}
        self._last_started = NO_JOB_ID  # jobs have ascending numbers
        self._loads_left: Counter[str] = Counter()  # of each request that waits for several
        self._finished_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._bad_block_ids: set[int] = set()
        self._report = OmniWorkerMetadata()
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
        cores = len(_PROCESS_CORES) // self._ranks
        threads = self._config.copy_threads or _default_copy_threads(cores, canonical.device.type)
        self._helpers.threads = 1 + threads
        self._copier = self._surroundings.copier(
            layer_ranges.canonical, layer_ranges.layout, self._helpers
        )
        if self._trace.is_recording:
            self._copier = TracedCopier(self._copier, layer_ranges, self._trace)
        orders = kernel_orders(self._kv_cache_config, self._layers, canonical.page_orders)
        attention = attention_of(self._kv_cache_config, self._layers)
        groups = group_shapes(self._kv_cache_config, orders, attention)
        endpoints: tuple[Endpoint, ...] = ()
        if self._sizing is not None:
            endpoints = self._open_arena(self._sizing, self._copier, layer_ranges, groups)
        if self._store is not None:
            self._store_jobs = StoreJobs(
                store=self._store,
                copier=self._copier,
                layout=layout,
                groups=groups,
                rank=self._rank,
                affinity=self._cores,
                context=self._context,
                on_end=self._helpers.tell_lender,
            )
            self._threads.append(self._store_jobs.loads)
            self._bodies[StoreSaveSpec] = self._saves, self._store_jobs.save_work
            self._bodies[StoreLoadSpec] = self._store_jobs.loads, self._store_jobs.load_work
        self._loader = Loader(
            transports=self._transports,
            copier=self._copier,
            layout=layout,
            groups=groups,
            rank=self._rank,
            ranks=self._ranks,
            checksum=self._checksum,
            threads=self._helpers.threads if canonical.device.type == "cpu" else 1,
            context=self._context,
            notify=self._loads.notify,
            queued=self._loads.queued,
            own=(self._arena, endpoints) if self._arena is not None else None,
        )
        self._bodies[LoadSpec] = self._bodies[HostLoadSpec] = self._loads, self._loader.work
        self._handshake = OmniHandshakeMetadata(
            endpoints, orders, attention, scales_id(self._kv_cache_config, self._layers)
        )

    def _open_arena(
        self,
        sizing: ArenaSizing,
        copier: BlockCopier,
        layer_ranges: LayerRanges,
        groups: tuple[GroupShape, ...],
    ) -> tuple[Endpoint, ...]:
        slot_bytes = layer_ranges.layout.slot_bytes
        if self._surroundings.prefault:
            size, self._reservation = sizing.reserve(slot_bytes, groups)
        else:
            size = sizing.size(slot_bytes, groups)
        reservation = self._reservation

        def populated(slots: NDArray[np.uint8]) -> None:
            if reservation is not None:
                reservation.populated(slots.nbytes)
            copier.pin(slots)

        self._arena = Arena.create(
            size.slots,
            slot_bytes,
            prefault=self._surroundings.prefault,
            huge_pages=sizing.huge_pages,
            randbytes=self._context.randbytes,
            populated=populated,
        )
        if not self._surroundings.prefault:
            copier.pin(self._arena.slots)  # else piece by piece, as far as there is memory
        self._saver = Saver(
            arena=self._arena,
            copier=copier,
            layer_ranges=layer_ranges,
            checksum=self._checksum or self._transports.needs_checksums,
        )
        self._bodies[SaveSpec] = self._bodies[KeepSpec] = self._saves, self._saver.work
        sizing.tell(self._rank, self._ranks, size, slot_bytes, groups)
        return self._transports.export(self._arena, self._arena_name)

    def listen(self, *, introduces: bool) -> None:
        """Answer the scheduler half at this rank's socket, if it has anything to ask there. The
        caches are registered.

        Args:
            introduces: whether to say who this is, and which copies have ended.

        Raises:
            TransportError: another process has this rank's socket.
        """
        assert self._loader is not None
        assert self._handshake is not None
        answers: dict[type[msgspec.Struct], Callable[[Any], msgspec.Struct]] = {}
        if self._shares:
            answers |= attached_ahead(self._loader.attach_ahead)
        if introduces:
            answers |= introduction(self._handshake.encode())
            answers |= ended_copies(self.ended)
        if answers:
            self._end_answers = self._answer(answers)

    @property
    def handshake(self) -> OmniHandshakeMetadata | None:
        """What the scheduler half must know; None before the caches are registered."""
        return self._handshake

    def bind(self, metadata: OmniConnectorMetadata) -> None:
        """Take the work of a step."""
        if self._following:  # the forward pass before this one has not come to its end
            self._saves.cancel(set(self._following))
            self._following = {}
        self._metadata = metadata
        self._loads_started = self._saves_started = False
        self._forward = Forward() if metadata.saves else None

    def clear(self) -> None:
        """End of a step: whatever the runner did not start by itself starts now."""
        self.start_loads()
        self.start_saves()
        metadata, self._metadata = self._metadata, None
        if metadata is None:
            return
        self._last_started = max([self._last_started, *metadata.loads, *metadata.saves])
        if metadata.cancel:
            for thread in self._threads:
                thread.cancel(set(metadata.cancel))

    def start_loads(self) -> None:
        """Start the step's loads; returns at once. Once a step, before or after the forward."""
        metadata = self._metadata
        if metadata is None or self._loads_started:
            return
        self._loads_started = True
        if metadata.loads:
            self._start(metadata.loads)

    def layer_computed(self, layer: str) -> None:
        """The forward pass has computed the KV of a layer; returns at once.

        The first time in a step, its saves to slots start: never sooner, as blocks may be zeroed
        and copied before.
        """
        forward = self._forward
        if forward is None or self._copier is None or self._metadata is None:
            return
        forward.computed(layer, self._copier.fence())
        if self._following:
            self._saves.notify()
            return
        saves = self._metadata.saves.items()
        self._following = {job_id: spec for job_id, spec in saves if type(spec) is SaveSpec}
        if self._following:
            self._start_void(self._metadata)
            self._start(self._following, forward)
        else:
            self._forward = None

    def start_saves(self) -> None:
        """Start those of the step's saves that have not been; returns at once. Call it when the
        forward has been launched."""
        metadata = self._metadata
        if metadata is None or self._saves_started:
            return
        self._saves_started = True
        forward, self._forward = self._forward, None
        following, self._following = self._following, {}
        if not following:
            self._start_void(metadata)
        if not metadata.saves:
            return
        if following:
            assert forward is not None
            forward.end(self._copier.fence() if self._copier is not None else None)
            self._saves.notify()
        saves = metadata.saves.items()
        self._start({job_id: spec for job_id, spec in saves if job_id not in following})

    def _start_void(self, metadata: OmniConnectorMetadata) -> None:
        if metadata.void[0]:
            # After the copies under way, before any into the same slots.
            assert self._saver is not None
            self._saves.submit(NO_JOB_ID, self._saver.void_work(*metadata.void))

    def _start(self, jobs: Mapping[int, TransferSpec], fence: object = None) -> None:
        self._loads_left.update(spec.request_id for spec in jobs.values() if spec.request_id)
        for job_id, spec in jobs.items():
            if not self.transfer_async(job_id, spec, fence=fence):
                bad = frozenset(spec.blocks.held)
                self._end(spec, Outcome(job_id, "job_failed", bad_block_ids=bad))

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
        if self._closed or type(spec) not in self._bodies or self._copier is None:
            return False
        try:
            slots = 0 if self._arena is None else self._arena.n_slots
            spec.check(self._kv_cache_config.num_blocks, slots)
        except (IndexError, ValueError):
            logger.exception("Copy job %d was not started; please report it", job_id)
            return False
        thread, body = self._bodies[type(spec)]
        work = body(job_id, spec, self._copier.fence() if fence is None else fence)
        work = traced(self._trace, spec.span, job_id, work, spec.request_id)
        self._under_way[job_id] = spec
        thread.submit(job_id, work, spec.blocks.held if spec.request_id else ())
        return True

    def collect(self) -> None:
        """Look at what has ended; help with what has not if this step computes nothing."""
        metadata = self._metadata
        if metadata and metadata.idle and not metadata.cancel and self._surroundings.lingers:
            self._helpers.lend(lambda: none_ended(self._threads))
        for thread in self._threads:
            for outcome in thread.take_ended():
                self._end(self._under_way.pop(outcome.job_id), outcome)
        if self._store_jobs is not None:
            self._store_jobs.count_events()

    def _end(self, spec: TransferSpec, outcome: Outcome) -> None:
        self._report.done[outcome.job_id] = 1
        if spec.request_id:
            self._loads_left[spec.request_id] -= 1
            if self._loads_left[spec.request_id] <= 0:
                del self._loads_left[spec.request_id]
                self._finished_loads.add(spec.request_id)
        if not spec.timed_as:  # a save to the store fails at nothing
            return
        if outcome.failure is None:
            outcome.count_into(self._stats, spec.timed_as, spec.counted_as)
            return
        self._report.failed[outcome.job_id] = outcome.failure
        # What is late is computed here without vLLM's policy; see `OmniScheduler`.
        if type(spec) is LoadSpec and outcome.failure != LEASE_EXPIRED:
            if self._fails_by_block:
                self._bad_block_ids |= outcome.bad_block_ids
            else:
                self._failed_loads.add(spec.request_id)

    def ended(self, job_ids: Collection[int]) -> list[int]:
        """Those of these jobs that touch their blocks no more, reported or not. Any thread may ask.

        A job of a step that this rank has yet to make counts as one that has not ended.
        """
        last_started = self._last_started  # before the threads are asked
        under_way = set().union(*(thread.under_way() for thread in self._threads))
        return [each for each in job_ids if each <= last_started and each not in under_way]

    def saves_ended(self) -> Ended | None:
        """The jobs that have ended; None while there are loads, whose ends go with a step."""
        if self._loads_left or self._finished_loads:
            return None
        self.collect()
        report = self.take_report()
        return ({}, {}) if report is None else (report.done, report.failed)

    def take_finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended, and those of them that failed as a whole."""
        finished, self._finished_loads = self._finished_loads, set()
        failed, self._failed_loads = self._failed_loads, set()
        return finished, failed

    def take_bad_block_ids(self) -> set[int]:
        """Blocks that a load should have filled and did not."""
        bad, self._bad_block_ids = self._bad_block_ids, set()
        return bad

    def take_report(self) -> OmniWorkerMetadata | None:
        """What the scheduler half must know of; None when there is nothing."""
        if self._adapters is not None:
            self._report.adapters += self._adapters.take(self._rank)
        if not (self._report.done or self._report.adapters):
            return None
        report, self._report = self._report, OmniWorkerMetadata()
        return report

    def take_stats(self) -> OmniStats | None:
        """What was counted since the last call; None when nothing was."""
        for choice in self._transports.take_choices():
            self._stats.choose(choice.transport, choice.reason)
            logger.info(
                "Reading the arena at %s by %s (%s)", choice.address, choice.transport, choice.why
            )
        return self._stats.take()

    def close(self) -> None:
        """Stop the threads, then let go of the arenas. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._end_answers is not None:
            self._end_answers()
        self._saves.close()
        self._loads.close()
        self._helpers.close(CLOSE_S)
        if self._store_jobs is not None:
            self._store_jobs.close()
        elif self._store is not None:
            self._store.close()
        if self._loader is not None:
            self._loader.close()
        self._transports.close()
        if self._copier is not None:
            self._copier.close()  # it may have pinned the arena's memory
        if self._arena is not None:
            self._arena.close()
        if self._reservation is not None:
            self._reservation.close()
        self._trace.close()


def _default_copy_threads(cores: int, device: str) -> int:
    """Threads that one copy is shared by, where the configuration does not say.

    Args:
        cores: of this host, for each rank of the engine.
        device: type of the device of the KV cache.
    """
    computing = torch.get_num_threads() if device == "cpu" else 0
    return max(1, min(4, cores - computing))
