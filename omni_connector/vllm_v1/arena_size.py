# SPDX-License-Identifier: Apache-2.0
"""How large the arena of one rank is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_connector.config import OmniConfig
from omni_connector.errors import ConfigError
from omni_connector.kv.shapes import GroupShape
from omni_connector.memory.arena_size import ArenaSize, arena_size, available_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class ArenaSizing:
    """What the size of a rank's arena depends on, but its slots.

    Attributes:
        given: bytes that the configuration gives it; None: as the memory allows.
        cache_blocks: of the rank's KV cache.
        max_tokens: of the longest prompt.
        sharers: arenas of this deployment on this host.
        reserved: bytes of memory that are taken, but perhaps not in use yet.
    """

    given: int | None
    cache_blocks: int
    max_tokens: int
    sharers: int = 1
    reserved: int = 0

    @classmethod
    def of(
        cls, config: OmniConfig, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
    ) -> "ArenaSizing":
        """Of one rank of an engine."""
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        given = config.arena_bytes()
        sharers = ranks * max(1, parallel.data_parallel_size_local)
        caches = 0
        if vllm_config.device_config.device_type == "cpu":  # and allocated as they are used
            caches = sharers * sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        return cls(
            given=None if given is None else given // ranks,
            cache_blocks=kv_cache_config.num_blocks,
            max_tokens=vllm_config.model_config.max_model_len,
            sharers=sharers,
            reserved=caches,
        )

    def size(self, slot_bytes: int, groups: tuple[GroupShape, ...]) -> ArenaSize:
        """How many slots, and why.

        Raises:
            ConfigError: not a single one.
        """
        if self.given is not None:
            size = ArenaSize(self.given // slot_bytes, "arena_gib")
        else:
            available = available_bytes()
            size = arena_size(
                available=max(available - self.reserved, available // 2),
                slot_bytes=slot_bytes,
                cache_blocks=self.cache_blocks,
                prompt_blocks=self.prompt_blocks(groups),
                sharers=self.sharers,
            )
        if size.slots < 1:
            raise ConfigError(
                f"the arena has no room for a single KV block of {slot_bytes} bytes "
                f"({size.why}); set arena_gib"
            )
        return size

    def prompt_blocks(self, groups: tuple[GroupShape, ...]) -> int:
        """Slots that the longest prompt takes."""
        return sum(len(group.needed(self.max_tokens)) for group in groups)
