# SPDX-License-Identifier: Apache-2.0
"""What this version moves correctly; the rest is refused at start, by name."""

from typing import TYPE_CHECKING, Final

from omni_connector.errors import ConfigError, LayoutError
from omni_connector.vllm_v1.specs import group_specs

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
    if vllm_config.speculative_config is not None:
        raise ConfigError("OmniKVConnector does not support speculative decoding yet")
