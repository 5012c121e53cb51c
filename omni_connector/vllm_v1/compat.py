# SPDX-License-Identifier: Apache-2.0
"""Where the supported vLLM versions differ, and the model runners that drive a connector.

What differs is asked for by feature, never by version number.

vLLM 0.30 to 0.32 agree on what matters most: caches come as `[B, H, N, C]` views, and a step is
bind, forward, loads, saves, `get_transfer_results`, worker metadata, clear. Runners that others
maintain may be older. They load before the forward pass, call `wait_for_save` only after one,
call `get_finished` instead of `get_transfer_results`, and pass on neither loads that failed as a
whole nor the worker's metadata; some announce preemptions late or not at all. The worker half
serves all of them: it learns from what is called (see `OmniKVConnector`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.request import RequestStatus

from omni_connector.errors import LayoutError
from omni_connector.plugin import CONNECTOR_NAME
from omni_connector.vllm_v1.metadata import OmniWorkerMetadata
from omni_connector.vllm_v1.metrics import OmniStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def cache_hit_source() -> Any:
    """The tier that vLLM books our tokens under; None where it keeps no such books (0.31)."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def hash_block_size(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Tokens that each of a request's block hashes stands for."""
    resolved: int | None = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is None:  # 0.31 tells only the scheduler, which works it out like this
        _, resolved = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return resolved


def cross_layer_dims(attn_backend: Any) -> str:
    """The dimensions of the tensor of all layers that an older runner allocates for a backend.

    A letter each, in the order of the tensor: L layers, B blocks, N tokens, H heads, C content,
    to which the pair of K and V belongs; such as `BLCNHC`.

    Raises:
        LayoutError: the backend folds what must be told apart.
    """
    sizes = {"B": 7, "N": 64, "H": 8, "C": 128}

    def shape(**changed: int) -> tuple[int, ...]:
        blocks, tokens, heads, content = (sizes | changed).values()
        return tuple(attn_backend.get_kv_cache_shape(blocks, tokens, heads, content))

    usual = shape()
    # The same arguments twice as large: what grows with them is theirs.
    grown = {letter: shape(**{letter: 2 * size}) for letter, size in sizes.items()}
    names = ["L"]
    for i, size in enumerate(usual):
        letters = [letter for letter in sizes if grown[letter][i] != size]
        if "C" in letters:
            letters = [letter for letter in letters if letter != "H"]  # heads within the content
        if len(letters) > 1:
            raise LayoutError(
                f"{attn_backend.__name__}: dimension {i} of its KV cache {usual} holds several "
                f"things: {letters}"
            )
        names += letters or ["C"]
    try:
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    except (AttributeError, NotImplementedError):  # the runner then allocates it unchanged
        order = range(len(names))
    return "".join(names[i] for i in order)


@dataclass
class ReportingStats(OmniStats):
    """Statistics of a worker that carry its report too, where nothing else does."""

    report: OmniWorkerMetadata | None = None

    def aggregate(self, other: "KVConnectorStats") -> "ReportingStats":
        """Add up the statistics and the reports of two ranks."""
        super().aggregate(other)
        if isinstance(other, ReportingStats) and other.report is not None:
            self.report = (
                other.report if self.report is None else self.report.aggregate(other.report)
            )
        return self


def carried_report(output: "KVConnectorOutput") -> OmniWorkerMetadata | None:
    """The workers' report, if it came with the statistics."""
    stats = output.kv_connector_stats
    if stats is not None and not isinstance(stats, OmniStats):
        stats = stats.data.get(CONNECTOR_NAME)  # MultiConnector's: its children's by name
    return stats.report if isinstance(stats, ReportingStats) else None


def recompute(request: "Request", manager: "KVCacheManager") -> None:
    """Have a request computed from its first token although its load is about to be called good.

    It is what vLLM itself does for `failed_recving`, where that is told. Call it from
    `update_connector_output`, before vLLM looks at `finished_recving`. The request is
    recomputed under `kv_load_failure_policy` "fail" too: no connector can end a request.
    """
    if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        return  # aborted meanwhile
    request.num_computed_tokens = 0
    manager.free(request)
