# SPDX-License-Identifier: Apache-2.0
"""A connector that accepts every hand-off and moves nothing.

It is the negative control of every correctness test: a test that it passes cannot see the KV
cache. And as it completes every load at once, it measures what a hand-off costs in vLLM alone.

Load it by `kv_connector="NoOpConnector"` and `kv_connector_module_path=MODULE`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MODULE = "omni_connector.testing.no_op"


@dataclass
class NoOpMetadata(KVConnectorMetadata):
    """Requests whose loads are to be reported done."""

    accepted: set[str] = field(default_factory=set)


class NoOpConnector(KVConnectorBase_V1, SupportsHMA):
    """Answers every prefill with parameters, and accepts every load that has them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._accepted: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        missing = request.num_prompt_tokens - 1 - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            self._accepted.add(request.request_id)
            request.kv_transfer_params = None

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        accepted, self._accepted = self._accepted, set()
        return NoOpMetadata(accepted)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        return False, {"do_remote_prefill": True, "do_remote_decode": False}

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return ()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take no note of the caches: nothing will be copied."""

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NoOpMetadata)
        self._accepted |= metadata.accepted

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: nothing is loaded."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Return at once: nothing is saved."""

    def wait_for_save(self) -> None:
        """Return at once: nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done, self._accepted = self._accepted, set()
        return None, done
