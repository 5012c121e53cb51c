# SPDX-License-Identifier: Apache-2.0
"""What peers compare of an engine: its model, what changes the model's numbers, and its hashes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from omni_connector.config import OmniConfig
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.numerics import digest, numerics_of
from omni_connector.vllm_v1.metadata import OmniHandshakeMetadata
from omni_connector.vllm_v1.specs import group_shapes

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# What a model's configuration says of where it lies and what wrote it.
_NOT_THE_MODEL: Final = ("_name_or_path", "transformers_version", "_commit_hash")


def compatibility(
    config: OmniConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    workers: Sequence[OmniHandshakeMetadata],
) -> CompatibilityKey:
    """The compatibility key of this engine.

    Args:
        workers: what each rank says of its caches.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return CompatibilityKey(
        model=config.model_id or f"{model.model}@{model.revision or 'default'}",
        dtype=str(model.dtype),
        quantization=quantization_id(model),
        overrides=overrides_id(model),
        kv_dtype=str(cache.cache_dtype),
        scales=scales_of_engine([each.scales for each in workers]),
        numerics=numerics_of(vllm_config),
        integrity=config.integrity,
        kv_heads=model.get_total_num_kv_heads(),
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        groups=group_shapes(kv_cache_config, workers[0].page_orders, workers[0].attention),
    )


def hash_id(vllm_config: "VllmConfig", hash_block_size: int) -> str:
    """How this engine hashes blocks; engines of equal ids give equal tokens equal hashes.

    "" where it does not hash blocks, or where no other process gets the same hashes.
    """
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching or not hash_block_size:
        return ""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    # vLLM seeds its hashes only after the connectors have started.
    algorithm = cache.prefix_caching_hash_algo
    hash_fn = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(hash_fn)
    if seed != resolve_none_hash_seed(hash_fn):  # drawn at random in each process
        return ""
    return f"{algorithm}:{hash_block_size}:{seed}"


def quantization_id(model: "ModelConfig") -> str:
    """Method and settings of quantization; "" where there is none."""
    method = model.quantization
    settings = [
        model.quantization_config,
        getattr(model.hf_config, "quantization_config", None),
    ]
    if method is None and not any(settings):
        return ""
    return f"{method} {digest(settings)}"


def overrides_id(model: "ModelConfig") -> str:
    """What was changed of the model's configuration; "" where nothing was."""
    overrides = model.hf_overrides
    if callable(overrides) or model.hf_config_path:  # what they do shows in what they have made
        made = model.hf_config.to_dict()
        overrides = {name: made[name] for name in made if name not in _NOT_THE_MODEL}
    return digest(overrides) if overrides else ""


def scales_of_engine(ranks: list[str]) -> str:
    """The scales of quantized KV on all ranks, of which `kernels.scales_id` gives each."""
    return ranks[0] if len(set(ranks)) == 1 else digest(ranks)
