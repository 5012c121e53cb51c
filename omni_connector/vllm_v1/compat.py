# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's versions differ.

`plugin.SUPPORTED_VLLM` says which versions are supported, `vllm_names` which names have to be
there, and `patches` what is changed of vLLM. All else that differs between versions is decided
here, by feature and never by version number. Each function says which versions need it.

vLLM 0.30 to 0.33 agree on what matters most: KV caches come as `[B, H, N, C]` views, and a step is
bind, forward, loads, saves, `get_transfer_results`, worker metadata, clear. With a drafter, the V2
runner of 0.33 starts the saves after the worker metadata, before it clears. Some runners announce
preemptions late or not at all, which does no harm: a block that is being copied is given to nobody.

Others maintain model runners of the time before for these versions. Their
`KVConnectorModelRunnerMixin` loads before the forward pass, calls `wait_for_save` only after one,
calls `get_finished`, passes on neither loads that failed as a whole nor the workers' metadata, and
may allocate one tensor for all layers.
"""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from omni_connector.identity.epochs import WeightsSaid
from omni_connector.plugin import CONNECTOR_NAME
from omni_connector.prefix.thinking import ThinkingTokens
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.patches import watch_trainers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput


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


def fp8_format(kind: str) -> str:
    """How this platform encodes the FP8 numbers of a KV cache; "" for the usual way.

    Args:
        kind: of quantized KV, as vLLM names it.
    """
    from vllm.platforms import current_platform

    if current_platform.is_fp8_fnuz():
        return "fnuz"
    # As vLLM's kernels of TurboQuant decide it.
    ampere = current_platform.is_cuda() and not current_platform.has_device_capability(89)
    return "e4b15" if kind == "turboquant_k8v4" and ampere else ""


def interleaves_values(impl: Any) -> bool:
    """Whether a layer interleaves the values of several tokens.

    From 0.33 on ROCM_ATTN does, where vLLM fuses the writing of KV with what comes before it.
    """
    return bool(getattr(impl, "_use_interleaved_v_cache", False))


def thinking_tokens(vllm_config: "VllmConfig") -> ThinkingTokens | None:
    """The tokens with which a reasoning model thinks; None where vLLM does not tell them.

    It does where `--reasoning-parser` names a parser that knows them. Not every parser tells those
    that the model ends its thoughts with from those that end them when its budget is used up.
    """
    reasoning = vllm_config.reasoning_config
    if reasoning is None:
        return None
    start = reasoning.reasoning_start_token_ids
    end = reasoning.natural_reasoning_end_token_ids or reasoning.reasoning_end_token_ids
    return ThinkingTokens(tuple(start), tuple(end)) if start and end else None


def copy_blocks(step: "SchedulerOutput", pairs: Iterable[tuple[int, int]]) -> None:
    """Have the workers copy the first block of each pair to the second, before the forward pass of
    a step that is not sent yet. They do so for vLLM's own prefix cache, where a request goes on
    within a block that others may read.
    """
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    copies = [KVCacheBlockCopy(source, target) for source, target in pairs]
    step.kv_cache_block_copies = [*(step.kv_cache_block_copies or ()), *copies]


def replayed_tokens(spec: "KVCacheSpec") -> int:
    """Tokens at the end of a prefix hit that vLLM computes again, as its prefix cache has not the
    window of a group; 0 for most groups.

    From 0.31 on, for some models.
    """
    return int(getattr(spec, "prefix_replay_tokens", 0))


def may_load_replayed() -> bool:
    """Whether a connector can tell vLLM that a load brings what vLLM would compute again.

    From 0.32 on. 0.31 takes each load for a prefix hit, and cuts it to whole blocks.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")  # it came with that


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


def shutdown_timeout(vllm_config: "VllmConfig") -> float:
    """Seconds that vLLM gives requests to end at a shutdown (`--shutdown-timeout`); 0 for none."""
    return float(getattr(vllm_config, "shutdown_timeout", 0))


def weights_said(manager: "KVCacheManager") -> WeightsSaid:
    """What vLLM is told of the weights of an engine, and tells no connector.

    From now on it is noted in what this returns, which is the same for each caller.

    Trainers change weights by calls to all workers (`collective_rpc`), vLLM's own ways among them.
    vLLM also keeps a name that they give to weights (`/update_weight_version`). Both pass the
    `EngineCore`, beside the scheduler half. So its methods are patched, when this is first called.
    """
    watch_trainers(
        lambda engine_core: _said_of(engine_core).workers_called(),
        lambda engine_core, name: _said_of(engine_core).weights_named(name),
    )
    return _said.setdefault(manager, WeightsSaid())


_said: "weakref.WeakKeyDictionary[Any, WeightsSaid]" = weakref.WeakKeyDictionary()


def _said_of(engine_core: "EngineCore") -> WeightsSaid:
    # There is no scheduler while the engine core is being made.
    scheduler = getattr(engine_core, "scheduler", None)
    manager = getattr(scheduler, "kv_cache_manager", None)
    return WeightsSaid() if manager is None else _said.setdefault(manager, WeightsSaid())


def worker_stats(output: "KVConnectorOutput") -> OmniStats | None:
    """What the workers have counted; None where they have counted nothing."""
    stats = output.kv_connector_stats
    if stats is not None and not isinstance(stats, OmniStats):
        stats = stats.data.get(CONNECTOR_NAME)  # MultiConnector's: its children's by name
    return stats if isinstance(stats, OmniStats) else None


def take_worker_stats(output: "KVConnectorOutput") -> OmniStats | None:
    """Take what the workers have counted out of a step's output; None if they counted nothing.

    Else vLLM would carry it to the API server with this step. Some versions have looked at the
    output before, so it is emptied, too.
    """
    stats = worker_stats(output)
    if stats is None:
        return None
    if stats is output.kv_connector_stats:
        output.kv_connector_stats = None
    return stats.take()
