# SPDX-License-Identifier: Apache-2.0
"""Whether an engine shares prefixes with others, and what it takes: opens both halves of it."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from omni_connector.config import OmniConfig
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.ledger import CopyLedger
from omni_connector.prefix.block_store import BlockStore
from omni_connector.prefix.lookups import StoreLookups
from omni_connector.prefix.shared_blocks import key_prefix
from omni_connector.prefix.shared_prefix import SharedPrefix
from omni_connector.vllm_v1.compat import hash_block_size
from omni_connector.vllm_v1.identity import hash_id
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.specs import group_specs
from omni_connector.vllm_v1.surroundings import Surroundings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.omni_connector.sharing")


def open_shared_prefix(
    config: OmniConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    *,
    ledger: CopyLedger,
    fingerprint: CompatibilityKey,
    group_ids: tuple[int, ...],
    surroundings: Surroundings,
    stats: OmniStats,
) -> SharedPrefix | None:
    """The scheduler half of sharing; None where it is not asked for, or cannot be.

    Args:
        ledger: the copy jobs.
        fingerprint: of this engine.
        group_ids: index of each transferred group among vLLM's groups.
        surroundings: clock, randomness and threads.
        stats: where to count.

    Raises:
        MissingDependencyError: Mooncake is not installed.
    """
    if config.store is None:
        return None
    refusal = sharing_refusal(vllm_config, kv_cache_config)
    if refusal is not None:
        logger.warning("No prefix is shared through the store: %s", refusal)
        return None
    hash_size = hash_block_size(vllm_config, kv_cache_config)
    return SharedPrefix(
        lookups=StoreLookups(
            surroundings.block_store(config.store, 0),
            fingerprint.groups,
            fingerprint.ranks,
            surroundings.clock,
            surroundings.start,
        ),
        ledger=ledger,
        prefix=key_prefix(config.namespace, fingerprint, hash_id(vllm_config, hash_size)),
        groups=fingerprint.groups,
        group_ids=group_ids,
        hash_block_size=hash_size,
        num_blocks=kv_cache_config.num_blocks,
        weights_fixed=config.weights == "fixed",
        lookup_timeout=config.store.lookup_timeout_s,
        load_timeout=config.load_timeout_s,
        clock=surroundings.clock,
        randbytes=surroundings.randbytes,
        stats=stats,
    )


def open_lending_store(
    config: OmniConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    surroundings: Surroundings,
) -> BlockStore | None:
    """The store of a worker, which lends it memory; None where nothing is shared.

    Raises:
        MissingDependencyError: Mooncake is not installed.
    """
    if config.store is None or sharing_refusal(vllm_config, kv_cache_config) is not None:
        return None
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return surroundings.block_store(config.store, config.store.segment_bytes() // ranks)


def sharing_refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """Why this engine cannot share prefixes; None if it can."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return "prefix caching is off; remove --no-enable-prefix-caching"
    for group in group_specs(kv_cache_config):
        if "mamba" in group.kind.split("+"):
            return (
                f"this model keeps recurrent states (layer {group.layers[0].name}), which are not "
                "shared yet"
            )
    hash_size = hash_block_size(vllm_config, kv_cache_config)
    if not hash_id(vllm_config, hash_size):
        return (
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} hashes differently in "
            "each process; take sha256_cbor, or set PYTHONHASHSEED to the same number everywhere"
        )
    for group in group_specs(kv_cache_config):
        if group.block_size % hash_size:
            return f"blocks of {group.block_size} tokens are hashed by {hash_size}"
    return None
