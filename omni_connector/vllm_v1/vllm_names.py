# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that the connector uses, and the signatures that it expects of them.

`misfits` compares this table with the vLLM that is installed, before the connector imports anything
else of it. So a vLLM that renames, removes or changes one of them is refused by that name, whatever
its version is, and a newer one in which all names fit may start. This module imports vLLM only
while it compares.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, Final, Protocol

from omni_connector.errors import UnsupportedVersionError
from omni_connector.plugin import InstalledVllm, is_newer, require_supported_vllm

_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS: Final = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
_KV_CACHE: Final = "vllm.v1.core.kv_cache_utils"
_SPECS: Final = "vllm.v1.kv_cache_interface"

# Most names that an error lists; the rest is counted.
_NAMED: Final = 5

_MISSING: Final = " is missing"


class UsedName(Protocol):
    """One entry of the table."""

    def misfit(self) -> str | None:
        """What of it differs from what the connector expects; None if nothing does."""


@dataclass(frozen=True, slots=True)
class Called:
    """A function or class that the connector calls.

    Attributes:
        name: `module:name`, with dots for what belongs to a class.
        positional: the number of arguments passed by position, without `self`.
        keywords: names of those passed by name.
    """

    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()

    def misfit(self) -> str | None:
        """See `UsedName`."""
        found = _find(self.name)
        if found is None:
            return _missing(self.name)
        given = [None] * (self.positional + _takes_self(self.name))
        try:
            signature = inspect.signature(found)
        except (TypeError, ValueError):  # compiled code has none
            return None
        try:
            signature.bind(*given, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{_short(self.name)}{signature} is called otherwise ({error})"
        return None


@dataclass(frozen=True, slots=True)
class Hook:
    """A method that vLLM calls of a connector.

    Attributes:
        name: of the method of `KVConnectorBase_V1` or `SupportsHMA`.
        parameters: those that the connector's own method takes, without `self`.
        of: the class.
    """

    name: str
    parameters: tuple[str, ...] = ()
    of: str = "KVConnectorBase_V1"

    def misfit(self) -> str | None:
        """See `UsedName`."""
        found = _find(f"{_BASE}:{self.of}.{self.name}")
        if found is None:
            return f"{self.of}.{self.name}{_MISSING}"
        if isinstance(found, property):
            return None
        parameters = list(inspect.signature(found).parameters.values())
        named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        passed = [each for each in named if each not in ("self", "cls")]
        if tuple(passed) != self.parameters:
            said, expected = ", ".join(passed), ", ".join(self.parameters)
            return f"{self.of}.{self.name} takes ({said}), expected ({expected})"
        return None


@dataclass(frozen=True, slots=True)
class Attributes:
    """A class, and what the connector reads of its instances or of itself; or a module."""

    name: str
    attributes: tuple[str, ...] = ()

    def misfit(self) -> str | None:
        """See `UsedName`."""
        found = _find(self.name)
        if found is None:
            return _missing(self.name)
        known = _attributes(found)
        missing = [] if known is None else [each for each in self.attributes if each not in known]
        return f"{_short(self.name)} has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Calls:
    """A function of vLLM that has to call something itself.

    Attributes:
        name: as in `Called`.
        called: what it calls.
    """

    name: str
    called: str

    def misfit(self) -> str | None:
        """See `UsedName`."""
        found = _find(self.name)
        if found is None:
            return _missing(self.name)
        code = getattr(inspect.unwrap(found), "__code__", None)
        if code is None or self.called in code.co_names:
            return None
        return f"{_short(self.name)} does not call {self.called}"


@dataclass(frozen=True, slots=True)
class IfThere:
    """A name that not every supported vLLM has, or that is used only where vLLM has it."""

    name: Called | Hook | Attributes

    def misfit(self) -> str | None:
        """See `UsedName`."""
        problem = None if isinstance(self.name, Attributes) else self.name.misfit()
        return None if problem is None or _MISSING in problem else problem


@dataclass(frozen=True, slots=True)
class NoOtherDuties:
    """Whether vLLM wants methods of a connector that this one has not.

    Attributes:
        hooks: those that it has.
    """

    hooks: tuple[Hook, ...]

    def misfit(self) -> str | None:
        """See `UsedName`."""
        wanted: set[str] = set()
        for name in ("KVConnectorBase_V1", "SupportsHMA"):
            wanted |= set(getattr(_find(f"{_BASE}:{name}"), "__abstractmethods__", ()))
        wanted -= {each.name for each in self.hooks}
        return f"it wants a connector to have {', '.join(sorted(wanted))}" if wanted else None


HOOKS: Final = (
    Hook("bind_kv_cache_manager", ("kv_cache_manager",)),
    Hook("bind_connector_metadata", ("connector_metadata",)),
    Hook("build_connector_meta", ("scheduler_output",)),
    Hook("build_kv_connector_stats", ("data",)),
    Hook(
        "build_prom_metrics",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Hook("clear_connector_metadata"),
    Hook("get_block_ids_with_load_errors"),
    Hook("get_handshake_metadata"),
    Hook("get_kv_connector_stats"),
    Hook("get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    Hook("get_transfer_results", ("finished_req_ids",)),
    Hook("has_connector_metadata"),
    Hook("has_pending_block_frees"),
    Hook("has_pending_push_work"),
    Hook("on_new_request", ("request",)),
    Hook("register_kv_caches", ("kv_caches",)),
    Hook("request_finished", ("request", "block_ids")),
    Hook("request_finished_all_groups", ("request", "block_ids"), of="SupportsHMA"),
    Hook("requires_kv_delivery"),
    Hook("reset_cache"),
    Hook("save_kv_layer", ("layer_name", "kv_layer", "attn_metadata")),
    Hook("set_xfer_handshake_metadata_pp_aware", ("metadata",)),
    Hook("shutdown"),
    Hook("start_load_kv", ("forward_context",)),
    Hook("take_events"),
    Hook("update_connector_output", ("connector_output",)),
    Hook("update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    Hook("wait_for_layer_load", ("layer_name",)),
    Hook("wait_for_save"),
)
"""What vLLM calls of the connector. A test compares it with the connector's methods."""

TABLE: Final[tuple[UsedName, ...]] = (
    *HOOKS,
    NoOtherDuties(HOOKS),
    IfThere(Hook("get_finished", ("finished_req_ids",))),
    IfThere(Hook("get_loaded_kv_cache_group_ids", ("request",))),
    IfThere(Hook("get_external_cache_hit_sources", ("request", "num_external_tokens"))),
    Called(f"{_FACTORY}.register_connector", 3),
    Called("vllm.engine.arg_utils:EngineArgs.create_engine_config"),
    Attributes("vllm.engine.arg_utils:EngineArgs", ("kv_transfer_config",)),
    Called(f"{_BASE}:KVConnectorBase_V1.__init__", 3),
    Attributes(
        f"{_BASE}:KVConnectorBase_V1", ("_kv_cache_config", "_kv_transfer_config", "_vllm_config")
    ),
    Attributes(f"{_BASE}:SupportsHMA"),
    Called(
        f"{_BASE}:KVConnectorTransferResults",
        keywords=("finished_sending", "finished_recving", "failed_recving"),
    ),
    Attributes(f"{_BASE}:KVConnectorRole", ("WORKER", "SCHEDULER")),
    Attributes(f"{_BASE}:KVConnectorMetadata"),
    Attributes(f"{_BASE}:KVConnectorHandshakeMetadata"),
    Attributes(f"{_METRICS}:KVConnectorStats", ("data",)),
    Called(f"{_METRICS}:KVConnectorPromMetrics.__init__", 4),
    Attributes(f"{_METRICS}:KVConnectorPromMetrics", ("per_engine_labelvalues",)),
    IfThere(
        Attributes(
            "vllm.v1.metrics.cache_hit_source:CacheHitSource",
            ("EXTERNAL_UNSPECIFIED", "HOST", "P2P"),
        )
    ),
    Called("vllm.distributed.kv_transfer:has_kv_transfer_group"),
    Called("vllm.distributed.kv_transfer:get_kv_transfer_group"),
    Called(f"{_KV_CACHE}:resolve_kv_cache_block_sizes", 2),
    Called(f"{_KV_CACHE}:resolve_none_hash_seed", 1),
    Called(f"{_KV_CACHE}:get_request_block_hasher", 2),
    Called(f"{_KV_CACHE}:generate_block_hash_extra_keys", 4),
    Called(f"{_KV_CACHE}:maybe_convert_block_hash", 1),
    Called(f"{_KV_CACHE}:make_block_hash_with_group_id", 2),
    Called(f"{_KV_CACHE}:BlockHash", 1),
    Called(f"{_KV_CACHE}:KVCacheBlockCopy", 2),
    IfThere(Called(f"{_KV_CACHE}:to_event_extra_keys", 1)),
    Called("vllm.utils.hashing:get_hash_fn_by_name", 1),
    Called("vllm.sampling_params:SamplingParams", keywords=("max_tokens",)),
    Attributes(
        "vllm.sampling_params:SamplingParams",
        (
            "allowed_token_ids",
            "bad_words",
            "clone",
            "extra_args",
            "logit_bias",
            "max_tokens",
            "min_tokens",
            "prompt_logprobs",
        ),
    ),
    Called("vllm.v1.request:Request", 4, ("cache_salt",)),
    Attributes(
        "vllm.v1.request:Request",
        (
            "_all_token_ids",
            "all_token_ids",
            "block_hashes",
            "cache_salt",
            "kv_transfer_params",
            "lora_request",
            "max_tokens",
            "mm_features",
            "num_computed_tokens",
            "num_prompt_tokens",
            "num_tokens",
            "prompt_embeds",
            "prompt_is_token_ids",
            "prompt_token_ids",
            "request_id",
            "resumable",
            "sampling_params",
            "session_id",
            "skip_reading_prefix_cache",
            "status",
            "structured_output_request",
            "update_block_hashes",
        ),
    ),
    Attributes("vllm.v1.request:RequestStatus", ("WAITING", "WAITING_FOR_REMOTE_KVS")),
    Attributes(
        "vllm.lora.request:LoRARequest",
        (
            "adapter_id",
            "is_3d_lora_weight",
            "load_inplace",
            "lora_int_id",
            "lora_name",
            "lora_path",
            "name",
        ),
    ),
    Called(
        "vllm.distributed.kv_events:BlockStored",
        keywords=(
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "lora_name",
            "medium",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        ),
    ),
    Called(
        "vllm.distributed.kv_events:BlockRemoved", keywords=("block_hashes", "medium", "group_idx")
    ),
    Attributes("vllm.distributed.kv_events:KVCacheEvent"),
    *(
        IfThere(Attributes(f"{_SPECS}:{name}"))
        for name in ("CrossAttentionSpec", "EncoderOnlyAttentionSpec", "HiddenStateCacheSpec")
    ),
    Attributes(f"{_SPECS}:FullAttentionSpec", ("non_causal",)),
    Attributes(f"{_SPECS}:MLAAttentionSpec"),
    Attributes(
        f"{_SPECS}:AttentionSpec",
        (
            "block_size",
            "dtype",
            "kv_quant_mode",
            "num_head_slots",
            "page_size_bytes",
            "prefix_cacheable",
            "state_content_size_bytes",
            "unpadded_page_size_bytes",
        ),
    ),
    IfThere(Attributes(f"{_SPECS}:AttentionSpec", ("max_tp_shards",))),
    IfThere(Attributes(f"{_SPECS}:AttentionSpec", ("prefix_replay_tokens",))),
    Attributes(f"{_SPECS}:KVQuantMode", ("NONE",)),
    Attributes(f"{_SPECS}:UniformTypeKVCacheSpecs", ("kv_cache_specs",)),
    Attributes(f"{_SPECS}:KVCacheGroupSpec", ("host_resident", "layer_names", "kv_cache_spec")),
    Attributes(
        f"{_SPECS}:KVCacheConfig",
        ("kv_cache_groups", "kv_cache_tensors", "num_blocks", "transfer_group_ids"),
    ),
    IfThere(Attributes(f"{_SPECS}:KVCacheConfig", ("hash_block_size",))),
    Attributes(f"{_SPECS}:KVCacheTensor", ("size", "layers")),
    Attributes(
        "vllm.v1.core.block_pool:BlockPool",
        ("blocks", "cached_block_hash_to_block", "hash_block_size"),
    ),
    Called("vllm.v1.core.block_pool:BlockPool.get_new_blocks", 1),
    Called("vllm.v1.core.block_pool:BlockPool.touch", 1),
    Called("vllm.v1.core.block_pool:BlockPool.free_blocks", 1),
    Called("vllm.v1.core.block_pool:BlockPool.get_num_free_blocks"),
    Called("vllm.v1.core.block_pool:BlockPool.get_cached_block", 2),
    Attributes(f"{_KV_CACHE}:KVCacheBlock", ("block_hash", "block_id", "is_null", "ref_cnt")),
    Attributes(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        ("block_pool", "coordinator", "kv_cache_event_metadata"),
    ),
    Called("vllm.v1.core.kv_cache_manager:KVCacheManager.get_blocks", 1),
    Called("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_blocks", 1),
    Called("vllm.v1.core.kv_cache_manager:KVCacheManager.free", 1),
    Called("vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks", 1),
    Called("vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache"),
    Attributes("vllm.v1.core.kv_cache_manager:KVCacheBlocks", ("blocks",)),
    Called("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids"),
    Attributes(
        "vllm.v1.core.sched.output:SchedulerOutput",
        (
            "kv_cache_block_copies",
            "kv_connector_block_state",
            "num_scheduled_tokens",
            "scheduled_cached_reqs",
            "scheduled_new_reqs",
            "scheduled_spec_decode_tokens",
            "total_num_scheduled_tokens",
        ),
    ),
    Attributes("vllm.v1.core.sched.output:CachedRequestData", ("resumed_req_ids",)),
    Attributes("vllm.v1.core.sched.output:KVConnectorBlockState", ("boundary_state_offloads",)),
    Attributes(
        "vllm.v1.core.sched.output:NewRequestData",
        ("num_computed_tokens", "prompt_token_ids", "req_id"),
    ),
    Attributes(
        "vllm.v1.outputs:KVConnectorOutput",
        (
            "failed_recving",
            "finished_recving",
            "invalid_block_ids",
            "kv_connector_stats",
        ),
    ),
    Attributes(
        "vllm.config:VllmConfig",
        (
            "cache_config",
            "compilation_config",
            "device_config",
            "ec_transfer_config",
            "kv_events_config",
            "kv_transfer_config",
            "load_config",
            "lora_config",
            "model_config",
            "num_lookahead_tokens",
            "num_speculative_tokens",
            "parallel_config",
            "reasoning_config",
            "speculative_config",
        ),
    ),
    IfThere(Attributes("vllm.config:VllmConfig", ("num_prefill_lookahead_tokens",))),
    Attributes(
        "vllm.config:KVTransferConfig",
        (
            "engine_id",
            "is_kv_consumer",
            "is_kv_producer",
            "kv_connector",
            "kv_connector_extra_config",
            "kv_role",
        ),
    ),
    Attributes(
        "vllm.config:ModelConfig",
        (
            "dtype",
            "get_total_num_hidden_layers",
            "get_total_num_kv_heads",
            "hf_config",
            "hf_config_path",
            "hf_overrides",
            "hf_text_config",
            "max_model_len",
            "model",
            "model_weights",
            "multimodal_config",
            "quantization",
            "quantization_config",
            "revision",
            "tokenizer",
            "tokenizer_revision",
            "trust_remote_code",
        ),
    ),
    Attributes(
        "vllm.config:CacheConfig",
        ("cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"),
    ),
    Attributes("vllm.config:CompilationConfig", ("static_forward_context",)),
    Attributes("vllm.config:DeviceConfig", ("device_type",)),
    Attributes("vllm.config:KVEventsConfig", ("enable_kv_cache_events",)),
    Attributes(
        "vllm.config:ParallelConfig",
        (
            "data_parallel_index",
            "data_parallel_rank",
            "data_parallel_size",
            "data_parallel_size_local",
            "decode_context_parallel_size",
            "distributed_executor_backend",
            "enable_eplb",
            "enable_expert_parallel",
            "nnodes_within_dp",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "rank",
            "tensor_parallel_size",
        ),
    ),
    Attributes(
        "vllm.config:SpeculativeConfig",
        (
            "draft_load_config",
            "draft_model_config",
            "kv_cache_dtype",
            "method",
            "parallel_drafting",
            "use_eagle",
        ),
    ),
    Attributes(
        "vllm.config.reasoning:ReasoningConfig",
        (
            "natural_reasoning_end_token_ids",
            "reasoning_end_token_ids",
            "reasoning_start_token_ids",
        ),
    ),
    Attributes(
        "vllm.config:LoadConfig", ("download_dir", "load_format", "model_loader_extra_config")
    ),
    Attributes("vllm.platforms:current_platform"),
    Attributes(
        "vllm.platforms.interface:Platform",
        (
            "device_name",
            "get_device_capability",
            "has_device_capability",
            "is_cpu",
            "is_cuda",
            "is_fp8_fnuz",
        ),
    ),
    Attributes("vllm.envs:VLLM_USE_MODELSCOPE"),
    Attributes("vllm._custom_ops"),
    IfThere(Called("vllm._custom_ops:cpu_has_amx_fp8")),
    Called("vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first"),
    Called("vllm.logger:init_logger", 1),
)
"""The names without which the connector cannot work. A test compares it with all that the source
uses of vLLM (`tests/vllm_v1/names_used.py`)."""

LOSSES: Final[tuple[tuple[UsedName, str], ...]] = (
    (
        Called("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter", 1),
        "requests with a LoRA adapter share no KV",
    ),
    (
        Attributes(
            "vllm.v1.worker.worker_base:WorkerBase",
            ("__init__", "get_model", "model_runner", "vllm_config"),
        ),
        "weights in memory are not known, so that nothing is shared without model_id and weights: "
        "fixed",
    ),
    (
        Attributes("vllm.v1.request:Request", ("_prompt_embeds_per_block_hashes",)),
        "prompts of tokens among embeddings are neither handed off nor shared",
    ),
    (
        Attributes("vllm.multimodal.processing:BaseProcessingInfo", ("ctx", "model_id")),
        "engines whose model lies at other paths share no KV of prompts with images",
    ),
    (
        Attributes("vllm.multimodal.processing:InputProcessingContext", ("model_config",)),
        "engines whose model lies at other paths share no KV of prompts with images",
    ),
    (
        Attributes("vllm.v1.worker.gpu_worker:Worker", ("sleep", "wake_up")),
        "an engine may end when its weights sleep; set model_id and weights: fixed",
    ),
    (
        Attributes("vllm.model_executor.layers.linear:QKVParallelLinear"),
        "each rank keeps a copy of a KV head that several ranks hold",
    ),
    (
        Called("vllm.v1.engine.core:EngineCore.collective_rpc", 1),
        "weights that are changed by a call to the workers are not noticed before the next reset",
    ),
    (
        Attributes("vllm.v1.engine.core:EngineCore", ("scheduler",)),
        "what trainers do to weights is not noticed before the next reset",
    ),
    (
        Called("vllm.v1.engine.core:EngineCore.set_weight_version", 1),
        "engines whose weights cannot be compared refuse each other, whatever a trainer names them",
    ),
    (
        Calls("vllm.v1.engine.core:EngineCoreProc.run_engine_core", "signal"),
        "an engine that is told to end does not wait for peers that read its KV",
    ),
    (
        Attributes("vllm.config:VllmConfig", ("shutdown_timeout",)),
        "an engine that is told to end waits for nobody, and DrainMiddleware does nothing",
    ),
    (
        Called(
            "vllm.model_executor.layers.quantization.base_config:"
            "QuantizeMethodBase.process_weights_after_loading",
            1,
        ),
        "on CPUs weights in memory are not known, so that nothing is shared without model_id and "
        "weights: fixed",
    ),
    (
        Attributes(
            "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
            ("restore_metadata",),
        ),
        "a layer whose kernel deletes its weights is known by the parameters that are left",
    ),
    (
        Called("vllm.model_executor.offloader:get_offloader"),
        "weights in memory are not known, so that nothing is shared without model_id and weights: "
        "fixed",
    ),
    *(
        (Attributes(f"{_SPECS}:{name}"), f"models with a {name} are refused")
        for name in (
            "ChunkedLocalAttentionSpec",
            "CircularBufferSpec",
            "MambaSpec",
            "RSWASpec",
            "SinkFullAttentionSpec",
            "SlidingWindowMLASpec",
            "SlidingWindowSpec",
        )
    ),
)
"""Names without which it works, and what is lost then."""


def losses(table: Iterable[tuple[UsedName, str]] = LOSSES) -> list[str]:
    """What is lost with the installed vLLM, and for lack of which name; one line each."""
    return [f"{loss} ({found})" for each, loss in table if (found := each.misfit()) is not None]


def misfits(table: Iterable[UsedName] = TABLE) -> list[str]:
    """What the installed vLLM lacks or has otherwise; one line each."""
    return [found for each in table if (found := each.misfit()) is not None]


@functools.cache
def require_fitting_vllm() -> InstalledVllm:
    """The installed vLLM, in which all names fit.

    Raises:
        UnsupportedVersionError: it is missing or too old, or a name does not fit.
    """
    installed = require_supported_vllm()
    problems = misfits()
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise UnsupportedVersionError(
            f"omni-connector does not fit {installed}: {'; '.join(problems[:_NAMED])}{more}. "
            "Install a tested vLLM, or another release of omni-connector"
        )
    return installed


def untested(installed: InstalledVllm) -> str | None:
    """What to warn of a vLLM that is newer than the tested ones; None for a tested one."""
    if not is_newer(installed.version):
        return None
    return (
        f"{installed} is newer than the versions that omni-connector is tested with. All "
        f"{len(TABLE)} names of it that the connector uses are as expected, so it starts. Answers "
        "may be wrong all the same if vLLM has changed what a name means"
    )


def loss_of(target: str) -> tuple[str, str | None]:
    """What is lost without a name of `LOSSES`, and why it does not fit; None if it does."""
    for each, loss in LOSSES:
        names = {getattr(each, "name", "")}
        if isinstance(each, Attributes):
            names = {f"{each.name}.{attribute}" for attribute in each.attributes}
        if target in names:
            return loss, each.misfit()
    raise KeyError(target)


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception:  # noqa: BLE001 - said by `_missing`
        return None
    for part in path.split(".") if path else ():
        # A module may make a name when it is asked for.
        find = getattr if isinstance(found, ModuleType) else inspect.getattr_static
        found = find(found, part, None)
        if isinstance(found, classmethod | staticmethod):
            found = found.__func__
    return found


def _missing(name: str) -> str:
    module = name.partition(":")[0]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        why = "" if error.name is None or module.startswith(error.name) else f" ({error})"
    except Exception as error:  # noqa: BLE001 - it may be another name that the module wants
        why = f" ({error})"
    else:
        why = ""
    return _short(name) + _MISSING + why


def _short(name: str) -> str:
    return name.replace(":", ".")


def _takes_self(name: str) -> bool:
    """Whether a name is that of a method."""
    return "." in name.partition(":")[2]


def _attributes(found: Any) -> set[str] | None:
    """What instances of a class have, or a class itself; None if that cannot be told."""
    if not isinstance(found, type):
        return None
    known = set(dir(found))
    for cls in found.__mro__:
        known |= set(getattr(cls, "__annotations__", ()))
        known |= {field.name for field in getattr(cls, "__dataclass_fields__", {}).values()}
        made: Callable[..., Any] | None = cls.__dict__.get("__init__")
        code = getattr(made and inspect.unwrap(made), "__code__", None)  # `patches` may wrap it
        if isinstance(code, CodeType):
            known |= set(code.co_names)  # what `__init__` sets, and some that it only reads
        elif made is not None and not (cls is object or dataclasses.is_dataclass(cls)):
            return None  # compiled code, which does not tell what it sets
    return known
