# SPDX-License-Identifier: Apache-2.0
"""What this engine is, in the terms that peers compare: model, layout, hashes, prompt."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_connector.config import OmniConfig
from omni_connector.handoff.prompt import Prompt
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.vllm_v1.metadata import OmniHandshakeMetadata
from omni_connector.vllm_v1.numerics import overrides_id, quantization_id, scales_of_engine
from omni_connector.vllm_v1.specs import group_shapes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


def fingerprint(
    config: OmniConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    workers: Sequence[OmniHandshakeMetadata],
    epoch: bytes,
) -> CompatibilityKey:
    """What this engine keeps in its slots.

    Args:
        workers: what each rank says of its caches.
        epoch: what no other engine has.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return CompatibilityKey(
        model=config.model_id or f"{model.model}@{model.revision or 'default'}",
        dtype=str(model.dtype),
        quantization=quantization_id(model),
        overrides=overrides_id(model),
        kv_dtype=str(cache.cache_dtype),
        scales=scales_of_engine([each.scales for each in workers], cache, epoch.hex()),
        integrity=config.integrity,
        kv_heads=model.get_total_num_kv_heads(),
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        groups=group_shapes(kv_cache_config, workers[0].page_orders, workers[0].attention),
    )


def hash_id(vllm_config: "VllmConfig", hash_block_size: int) -> str:
    """How this engine hashes blocks. Equal ids mean equal hashes; "" where it does not hash, or
    as nobody else does."""
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


def prompt_of(
    request: "Request", num_tokens: int, hash_block_size: int, adapter: str = ""
) -> Prompt | None:
    """The first `num_tokens` tokens of a request's prompt; None where it has no token ids
    (prompt embeddings)."""
    tokens = request.prompt_token_ids
    if tokens is None or request.prompt_embeds is not None:
        return None
    extra = [f"salt={request.cache_salt}"] if request.cache_salt is not None else []
    if adapter:
        extra.append(f"lora={adapter}")
    for feature in request.mm_features:
        place = feature.mm_position
        extra.append(f"mm={feature.identifier}@{place.offset}+{place.length}")
    return Prompt(
        token_ids=tokens,
        num_tokens=num_tokens,
        block_hashes=request.block_hashes,
        hash_block_size=hash_block_size if request.block_hashes else 0,
        extra=tuple(extra),
        by_tokens=bool(adapter),  # vLLM's hashes name it by where it lies
    )
