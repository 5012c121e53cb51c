# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's versions differ, and the model runners that drive a connector.

`plugin.SUPPORTED_VLLM` says which versions are supported; all else that differs between them is
decided here, by feature and never by version number. Each function says which versions need it.

vLLM 0.30 to 0.33 agree on what matters most: KV caches come as `[B, H, N, C]` views, and a step is
bind, forward, loads, saves, `get_transfer_results`, worker metadata, clear. With a drafter, the V2
runner of 0.33 starts the saves after the worker metadata, before it clears. Model runners that
others maintain may be older. These load before the forward pass, call `wait_for_save` only after
one, call `get_finished` instead of `get_transfer_results`, and pass on neither loads that failed as
a whole nor the workers' metadata. Some announce preemptions late or not at all, which does no harm:
a block that is being copied is given to nobody. The worker half serves all of them.
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
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def cache_hit_source(counter: str = "tokens_loaded") -> Any:
    """The tier under which vLLM counts tokens that we load and count by this name.

    From 0.32 on. None with 0.30 and 0.31, which do not count by tier.
    """
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    tiers = {
        "tokens_kept": CacheHitSource.HOST,
        "tokens_shared": CacheHitSource.EXTERNAL_UNSPECIFIED,  # vLLM's name for remote stores
    }
    return tiers.get(counter, CacheHitSource.P2P)


def hash_block_size(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Tokens that each of a request's block hashes stands for; 0 where a block's KV also depends on
    tokens after it, so that no hash names it.

    From 0.32 on the configuration says so. 0.30 and 0.31 tell only the scheduler, which works it
    out as is done here.
    """
    if any(
        getattr(each.kv_cache_spec, "non_causal", False) for each in kv_cache_config.kv_cache_groups
    ):
        return 0
    resolved: int | None = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is None:
        _, resolved = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return resolved


def tell_hash_block_size(kv_cache_config: "KVCacheConfig", tokens: int) -> None:
    """Set it as vLLM's `EngineCore` does from 0.32 on; for tests that take its place."""
    if hasattr(kv_cache_config, "hash_block_size"):
        kv_cache_config.hash_block_size = tokens


def says_replicated(spec: "KVCacheSpec") -> bool:
    """Whether a spec says that every rank keeps the same bytes.

    From 0.31 on specs of attention say so. Those of 0.30 do not: go by the family there.
    """
    return getattr(spec, "max_tp_shards", None) == 1


def has_amx_fp8() -> bool:
    """Whether this CPU multiplies FP8 in tiles: vLLM then keeps FP8 caches in others.

    From 0.31 on vLLM tells. 0.30 does not, and is taken to run on CPUs that cannot.
    """
    from vllm import _custom_ops as ops

    return bool(getattr(ops, "cpu_has_amx_fp8", bool)())


def interleaves_values(impl: Any) -> bool:
    """Whether a layer keeps pieces of the values of several tokens in turns.

    From 0.33 on ROCM_ATTN does, where vLLM fuses the writing of KV with what comes before it.
    """
    return bool(getattr(impl, "_use_interleaved_v_cache", False))


def replays_prefix(spec: "KVCacheSpec") -> bool:
    """Whether vLLM computes the last window of a prefix again after it was found in a cache.

    From 0.31 on, for some models.
    """
    return bool(getattr(spec, "prefix_replay_tokens", 0))


def keeps_kv_on_host(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether a group has its blocks in a pool of the host's memory, as with HiSparse.

    From 0.32 on groups say so.
    """
    return any(getattr(group, "host_resident", False) for group in kv_cache_config.kv_cache_groups)


def pauses_wait_for_loads(scheduler: Any) -> bool:
    """Whether vLLM's pause (`mode=wait`) ends requests whose KV is being loaded: from 0.32 on.

    Else they keep their KV blocks, and no cache can be reset until the engine goes on."""
    return hasattr(scheduler, "prefix_replay_group_ids")  # it came with that


def loaded_and_waiting(scheduler: Any) -> list["Request"]:
    """Requests that vLLM's scheduler lets wait, with KV blocks, after their KV was loaded."""
    waiting = getattr(scheduler, "kv_holding_waiting", None)  # from 0.31 on
    if waiting is not None:
        return [each for each in waiting if each.status == RequestStatus.WAITING]
    return [scheduler.requests[each] for each in scheduler.finished_recving_kv_req_ids]


def most_blocks_of_a_prompt(
    manager: "KVCacheManager", group_ids: tuple[int, ...]
) -> list[int | None]:
    """The most blocks of each group that vLLM asks for to compute one prompt, however long it is.

    None where it asks for those of all tokens. Where it keeps only the last state of each request,
    it asks for two: that state and the one at a boundary within the step.
    """
    managers = [manager.coordinator.single_type_managers[each] for each in group_ids]
    return [
        2
        if getattr(each, "mamba_cache_mode", "") == "align"
        else getattr(each, "max_admission_blocks_per_request", None)
        for each in managers
    ]


def cross_layer_dims(attn_backend: Any) -> str:
    """The dimensions of the one tensor of all layers that runners before 0.30 allocate.

    One letter for each, in the order of the tensor: L layers, B blocks, N tokens, H heads, C
    content, to which the pair of K and V belongs. An example is `BLCNHC`.

    Raises:
        LayoutError: the backend puts into one dimension what must be told apart.
    """
    sizes = {"B": 7, "N": 64, "H": 8, "C": 128}

    def shape(**changed: int) -> tuple[int, ...]:
        blocks, tokens, heads, content = (sizes | changed).values()
        return tuple(attn_backend.get_kv_cache_shape(blocks, tokens, heads, content))

    usual = shape()
    # A dimension belongs to the argument that it grows with.
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


class ReportPath:
    """Learns how the workers' reports reach the scheduler half, from what the model runner calls.

    Runners of 0.30 and later ask for the report in each step (`build_connector_worker_meta`).
    Older ones do not, so the report goes with the statistics (`ReportingStats`). A load must not be
    called finished before the report that says how it ended, so no load is called finished before
    the end of the first step, when the path is known.

    Attributes:
        known: whether a step has ended.
        by_stats: whether the report goes with the statistics.
    """

    def __init__(self) -> None:
        self.known = False
        self.by_stats = False
        self._asked = False

    def step_begins(self) -> None:
        """The runner has bound the metadata of a step."""
        self._asked = False

    def asked(self) -> None:
        """The runner asks for the report."""
        self._asked = True

    def step_ends(self) -> None:
        """The runner has cleared the metadata of a step."""
        self.known, self.by_stats = True, not self._asked


@dataclass
class ReportingStats(OmniStats):
    """Statistics of a worker that carry its report, for runners before 0.30; see `ReportPath`."""

    report: OmniWorkerMetadata | None = None

    def aggregate(self, other: "KVConnectorStats") -> "ReportingStats":
        """Add up the statistics and the reports of two ranks."""
        super().aggregate(other)
        if isinstance(other, ReportingStats) and other.report is not None:
            self.report = (
                other.report if self.report is None else self.report.aggregate(other.report)
            )
        return self


def worker_stats(output: "KVConnectorOutput") -> OmniStats | None:
    """What the workers have counted; None where they have counted nothing."""
    stats = output.kv_connector_stats
    if stats is not None and not isinstance(stats, OmniStats):
        stats = stats.data.get(CONNECTOR_NAME)  # MultiConnector's: its children's by name
    return stats if isinstance(stats, OmniStats) else None


def carried_report(output: "KVConnectorOutput") -> OmniWorkerMetadata | None:
    """The workers' report, if it came with the statistics, as with runners before 0.30."""
    stats = worker_stats(output)
    return stats.report if isinstance(stats, ReportingStats) else None


def tells_failure(output: "KVConnectorOutput", request_id: str) -> bool:
    """Whether vLLM hears from the runner that the load of this request has failed as a whole.

    Runners before 0.30 do not pass that on.
    """
    return request_id in output.failed_recving
