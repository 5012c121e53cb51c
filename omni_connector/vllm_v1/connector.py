# SPDX-License-Identifier: Apache-2.0
"""`OmniKVConnector`: what vLLM loads. It forwards to the half that its role asks for."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from omni_connector.vllm_v1 import patches
from omni_connector.vllm_v1.vllm_names import losses, require_fitting_vllm, untested

INSTALLED_VLLM = require_fitting_vllm()

patches.watch_workers()  # in the process of vLLM's `LLM`, which loads the plugin before its engine

from vllm.distributed.kv_transfer import (  # noqa: E402
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger  # noqa: E402

from omni_connector.config import OmniConfig  # noqa: E402
from omni_connector.copy.ended import CopiesOfRanks, OwnCopies  # noqa: E402
from omni_connector.copy.held_blocks import SETTLE_S  # noqa: E402
from omni_connector.vllm_v1.assembly import make_scheduler, make_worker  # noqa: E402
from omni_connector.vllm_v1.compat import (  # noqa: E402
    cache_hit_source,
    shutdown_timeout,
)
from omni_connector.vllm_v1.cross_layers import cross_layer_dims  # noqa: E402
from omni_connector.vllm_v1.metadata import (  # noqa: E402
    OmniConnectorMetadata,
    OmniHandshakeMetadata,
    introduced_workers,
    ranks_of,
    runner_ends_steps,
)
from omni_connector.vllm_v1.metrics import OmniPromMetrics, OmniStats  # noqa: E402
from omni_connector.vllm_v1.scheduler import OmniScheduler  # noqa: E402
from omni_connector.vllm_v1.specs import require_supported, require_vllm_engine  # noqa: E402
from omni_connector.vllm_v1.surroundings import SURROUNDINGS, Surroundings  # noqa: E402
from omni_connector.vllm_v1.worker import OmniWorker  # noqa: E402

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.omni_connector.plugin")


class OmniKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV cache from a prefill engine to a decode engine.

    Raises:
        ConfigError: `kv_connector_extra_config` holds an unknown or ill-typed key, or the
            parallel layout or the decoding method is not supported.
        LayoutError: a cache family that is not supported.
    """

    _cache_hit_source = cache_hit_source()

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_vllm_engine(vllm_config)
        self._config = OmniConfig.load(self._kv_transfer_config.kv_connector_extra_config)
        require_supported(vllm_config, kv_cache_config)
        self._manager: KVCacheManager | None = None
        # The scheduler half is made when the workers have registered their KV caches.
        self._scheduler_half: OmniScheduler | None = None
        self._worker_half: OmniWorker | None = None
        self._runner_ends_steps = runner_ends_steps(vllm_config)
        self._beside_others = False
        if role == KVConnectorRole.SCHEDULER:
            _warn_of_vllm()
        if role == KVConnectorRole.WORKER:
            self._worker_half = make_worker(
                self._config, vllm_config, kv_cache_config, self._surroundings()
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM drops the tokens in flight of a request that it preempts, and computes them
        again: never. A hand-off that ends with such a token is whole: its copies were decided with
        the step that computes the token, and hold the blocks that the request has lost."""
        return False

    def _surroundings(self) -> Surroundings:
        # Data-parallel ranks wait for each other, also for a rank that has nothing to compute.
        parallel = self._vllm_config.parallel_config
        return replace(SURROUNDINGS, lingers=parallel.data_parallel_size == 1)

    @cached_property
    def _scheduler(self) -> OmniScheduler:
        assert self._scheduler_half is not None, "the workers have not registered yet"
        return self._scheduler_half

    @cached_property
    def _worker(self) -> OmniWorker:
        assert self._worker_half is not None, "this is the scheduler half"
        return self._worker_half

    def shutdown(self) -> None:
        """Stop every thread and let go of sockets and memory. Idempotent."""
        if self._scheduler_half is not None:
            self._scheduler_half.close()
        if self._worker_half is not None:
            self._worker_half.close()

    def get_kv_connector_stats(self) -> OmniStats | None:
        """What this half has counted since the last call."""
        if self._scheduler_half is not None:
            return self._scheduler_half.take_stats()
        stats = self._worker.take_stats()
        if not self._runner_ends_steps:  # this is the last that vLLM asks in a step
            self.clear_connector_metadata()
        return stats

    # The scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager

        def settle() -> None:
            if self._scheduler_half is not None:
                self._scheduler_half.reset_attempted()
            # It does nothing while copies hold blocks, and no step comes meanwhile in which the
            # scheduler half would hear of their end.
            worker = get_kv_transfer_group() if has_kv_transfer_group() else None
            if self._scheduler_half is not None:
                copies: Callable[[], CopiesOfRanks]
                if isinstance(worker, OmniKVConnector):
                    copies = partial(OwnCopies, worker._worker.ended)
                else:
                    ranks = ranks_of(self._config, self._vllm_config)
                    copies = partial(self._surroundings().rank_copies, *ranks, SETTLE_S)
                self._scheduler_half.settle(copies)

        def tell() -> None:
            if self._scheduler_half is not None:
                self._scheduler_half.tell_of_reset()

        patches.watch_resets(kv_cache_manager, settle, tell)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._scheduler_half is not None:
            return  # vLLM 0.33 tells it again after sleep, in which workers keep their arenas
        workers = {
            key: meta for key, meta in metadata.items() if isinstance(meta, OmniHandshakeMetadata)
        }
        assert self._manager is not None, "vLLM binds it before"
        alone = bool(workers)
        if not alone:  # so this is one of several connectors: see `get_handshake_metadata`
            workers = introduced_workers(self._config, self._vllm_config)
        self._scheduler_half = make_scheduler(
            self._config,
            self._vllm_config,
            self._kv_cache_config,
            workers=workers,
            manager=self._manager,
            surroundings=self._surroundings(),
            alone=alone,
        )
        leave = partial(self._scheduler_half.leave, shutdown_timeout(self._vllm_config))
        patches.notice_shutdown(leave)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return self._scheduler.loaded_groups(request)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[Any, int]:
        return self._scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if (  # most steps have no news
            connector_output.kv_connector_stats
            or connector_output.invalid_block_ids
            or connector_output.finished_recving
        ):
            self._scheduler.update_output(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.frees_soon()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self._scheduler.step_ended()  # vLLM asks at the end of each

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    # The worker half

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self._worker.register_kv_caches(kv_caches)
        self._listen()

    def _listen(self) -> None:
        self._beside_others = has_kv_transfer_group() and get_kv_transfer_group() is not self
        alone = self._vllm_config.parallel_config.distributed_executor_backend == "uni"
        # Alone in one process, the scheduler half calls this half.
        self._worker.listen(introduces=self._beside_others or not alone)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        self._worker.captured()
        # MultiConnector gives the first metadata that a child returns to all its children, and some
        # refuse metadata of another connector.
        return None if self._beside_others else self._worker.handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, OmniConnectorMetadata)
        super().bind_connector_metadata(connector_metadata)
        self._worker.bind(connector_metadata)

    def has_connector_metadata(self) -> bool:
        """Whether vLLM's attention layers have to call `save_kv_layer` in this step.

        They ask this first, and call neither hook of a layer if not."""
        return self._worker.follows_layers()

    def clear_connector_metadata(self) -> None:
        self._worker.clear()
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self._worker.loads_left:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request whose load is under way is not in the batch."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        self._worker.start_saves()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if not self._runner_ends_steps:
            self._worker.start_saves()
        self._worker.collect()
        finished, failed = self._worker.take_finished_loads()
        if not finished:  # most often
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(
            finished_sending=set(),
            finished_recving=finished,
            failed_recving=failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_block_ids()

    # What only model runners before vLLM 0.30 call, which others maintain for newer versions

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """In one tensor of all layers a block is one segment of bytes, not one a layer, and is
        copied faster."""
        return True

    def register_cross_layers_kv_cache(
        self, kv_cache: "torch.Tensor", attn_backend: "type[AttentionBackend]"
    ) -> None:
        """Register that tensor instead of one for each layer."""
        self._worker.register_cross_layers(kv_cache, cross_layer_dims(attn_backend))
        self._listen()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads have ended, in place of `get_transfer_results`."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    # For the API server

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OmniStats:
        return OmniStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OmniPromMetrics:
        return OmniPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _warn_of_vllm() -> None:
    """Log what is lost with this vLLM; once for each engine, as it has one scheduler half."""
    warning = untested(INSTALLED_VLLM)
    if warning is not None:
        logger.warning("%s", warning)
    for loss in losses():
        logger.warning("With %s, %s", INSTALLED_VLLM, loss)
