# SPDX-License-Identifier: Apache-2.0
"""How many slots the arena of one rank has, and what is said of it."""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from omni_connector.arena.huge_pages import HugePages
from omni_connector.arena.reservations import (
    Reservation,
    deployment_id,
    sizing_lock,
    unclaimed_bytes,
)
from omni_connector.arena.size import ArenaSize, arena_size
from omni_connector.config import OmniConfig
from omni_connector.errors import ConfigError
from omni_connector.kv.shapes import GroupShape

logger = logging.getLogger("vllm.omni_connector.worker")


@dataclass(frozen=True)
class ArenaSizing:
    """What the size of one rank's arena depends on, beside the size of a slot.

    Attributes:
        given: bytes that the configuration sets; None takes what the memory of the host allows.
        cache_blocks: blocks of the rank's KV cache.
        max_tokens: tokens of the longest prompt.
        sharers: arenas of this deployment on this host.
        reserved: bytes of memory that are taken but perhaps not in use yet.
        huge_pages: which pages the arena has, as the configuration says.
        deployment: names the deployment among all on the host; see `reservations`.
    """

    given: int | None
    cache_blocks: int
    max_tokens: int
    sharers: int = 1
    reserved: int = 0
    huge_pages: HugePages = "auto"
    deployment: str = ""

    def reserve(
        self, slot_bytes: int, groups: tuple[GroupShape, ...]
    ) -> tuple[ArenaSize, Reservation]:
        """The size of the arena, and the claim on its memory that other engines see from now on.

        Raises:
            ConfigError: as `size`.
        """
        with sizing_lock():
            size = self.size(slot_bytes, groups)
            return size, Reservation(self.deployment, size.slots * slot_bytes)

    def size(self, slot_bytes: int, groups: tuple[GroupShape, ...]) -> ArenaSize:
        """How many slots the arena has, and why.

        Raises:
            ConfigError: there is no room for a single slot.
        """
        if self.given is not None:
            size = ArenaSize(self.given // slot_bytes, "arena_gib")
        else:
            unclaimed = unclaimed_bytes(self.deployment)
            # The engine's own cache may be in memory already, at least in part.
            size = arena_size(
                available=max(unclaimed - self.reserved, unclaimed // 2),
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

    def tell(
        self,
        rank: int,
        ranks: int,
        size: ArenaSize,
        slot_bytes: int,
        groups: tuple[GroupShape, ...],
    ) -> None:
        """Log the size of a rank's arena, and whether the longest prompts have room in it."""
        logger.info(
            "Arena of rank %d: %.2f GiB, %d slots of %.1f MiB (%s)",
            rank,
            size.slots * slot_bytes / 2**30,
            size.slots,
            slot_bytes / 2**20,
            size.why,
        )
        longest = self.prompt_blocks(groups)
        if longest > size.slots and self.given is None:  # else the user has set the size
            logger.warning(
                "The longest prompts take %d slots, the arena has %d (%s): they are not handed "
                "off; set arena_gib to %.1f",
                longest,
                size.slots,
                size.why,
                (longest * slot_bytes * ranks + 2**26) / 2**30,
            )

    def prompt_blocks(self, groups: tuple[GroupShape, ...]) -> int:
        """Slots that the longest prompt needs."""
        return sum(len(group.needed(self.max_tokens)) for group in groups)


def copy_threads(cores: int, device: str) -> int:
    """Threads that one copy is shared by, where the configuration does not say.

    Args:
        cores: of this host, for each rank of the engine.
        device: type of the device of the KV cache.
    """
    computing = torch.get_num_threads() if device == "cpu" else 0
    return max(1, min(4, cores - computing))


def arena_sizing(config: OmniConfig, vllm_config: Any, kv_cache_config: Any) -> ArenaSizing:
    """What the configuration of an engine says of the arena of one rank.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`.
    """
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    given = config.arena_bytes()
    sharers = ranks * max(1, parallel.data_parallel_size_local)
    caches = 0
    if vllm_config.device_config.device_type == "cpu":  # in the same memory, page by page
        caches = sharers * sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    return ArenaSizing(
        given=None if given is None else given // ranks,
        cache_blocks=kv_cache_config.num_blocks,
        max_tokens=vllm_config.model_config.max_model_len,
        sharers=sharers,
        reserved=caches,
        huge_pages=config.huge_pages,
        deployment=deployment_id(f"{config.namespace}/{vllm_config.kv_transfer_config.engine_id}"),
    )
