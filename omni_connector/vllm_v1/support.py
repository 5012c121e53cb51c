# SPDX-License-Identifier: Apache-2.0
"""What this version moves correctly; the rest is refused at start, by name."""

from typing import TYPE_CHECKING, Final

from omni_connector.errors import ConfigError, LayoutError
from omni_connector.vllm_v1.specs import group_specs, transferred_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SUPPORTED_KINDS: Final = frozenset(
    {
        "chunked_local_attention",
        "full_attention",
        "mamba",
        "mla_attention",
        "reference_sliding_window",
        "sink_full_attention",
        "sliding_window",
        "sliding_window_mla",
    }
)

_DRAFTERS_WITHOUT_KV: Final = frozenset(
    {"mlp_speculator", "medusa", "ngram", "ngram_gpu", "suffix"}
)


def require_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Refuse what would start and then answer with wrong tokens.

    Raises:
        LayoutError: a cache family that is not handed off correctly yet.
        ConfigError: a parallel layout or a decoding method that is not.
    """
    for group in group_specs(kv_cache_config):
        if not _SUPPORTED_KINDS.issuperset(group.kind.split("+")):
            raise LayoutError(
                f"this model keeps a {group.kind} cache (layer {group.layers[0].name}), which "
                f"OmniKVConnector does not move; supported: {', '.join(sorted(_SUPPORTED_KINDS))}"
            )
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name} is {size}; OmniKVConnector supports only 1")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTERS_WITHOUT_KV:
        raise ConfigError(
            f"speculative decoding by {speculative.method!r} keeps a KV cache of its own, which "
            f"OmniKVConnector does not hand off; it supports "
            f"{', '.join(sorted(_DRAFTERS_WITHOUT_KV))}"
        )
    for transferred in transferred_groups(kv_cache_config).values():
        if getattr(transferred.kv_cache_spec, "prefix_replay_tokens", 0):
            raise LayoutError(
                f"vLLM computes the last window of layer {transferred.layer_names[0]} again after "
                f"a prefix hit, which OmniKVConnector does not support"
            )
