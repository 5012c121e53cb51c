# SPDX-License-Identifier: Apache-2.0
"""What both halves take from the process and the host around them, memory for arenas included.

The simulation gives its own surroundings: a clock that it moves, randomness from its seed, and
turns and messages in the order that it draws.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from vllm.logger import init_logger

from omni_connector.config import OmniConfig, StoreSettings
from omni_connector.errors import ConfigError
from omni_connector.kv import BlockCopier, CanonicalKVCaches, SlotLayout, make_copier
from omni_connector.kv.copying import Sharing
from omni_connector.kv.shapes import GroupShape
from omni_connector.memory.arena_size import ArenaSize, arena_size, available_bytes
from omni_connector.memory.huge_pages import HugePages
from omni_connector.net.links import Sockets, ZmqSockets
from omni_connector.net.status import StatusFile
from omni_connector.prefix.block_store import BlockStore, MooncakeBlockStore
from omni_connector.prefix.neighbours import HostNeighbours, Household, Neighbours
from omni_connector.transports.choice import Transports, make_transports
from omni_connector.turns import StartTurns, TurnThread

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.omni_connector.worker")


@dataclass(frozen=True)
class Surroundings:
    """Clock, randomness, threads, and the ways to other processes.

    Attributes:
        clock: seconds, monotonic.
        randbytes: makes so many bytes that nobody can guess.
        start: starts a thread.
        sockets: opens the sockets of the control channel.
        transports: opens the transports that a configuration asks for.
        block_store: opens a client of the shared store that lends so many bytes of memory to it.
        neighbours: finds the engines of this host that share prefixes.
        copier: makes what copies between KV blocks and slots, with threads that share in it.
        status_file: makes the file, in a runtime folder, that `omni-connector top` reads.
        prefault: whether a thread prefaults the arena's memory.
    """

    clock: Callable[[], float] = time.monotonic
    randbytes: Callable[[int], bytes] = secrets.token_bytes
    start: StartTurns = TurnThread
    sockets: Callable[[], Sockets] = ZmqSockets
    transports: Callable[[OmniConfig], Transports] = make_transports
    block_store: Callable[[StoreSettings, int], BlockStore] = MooncakeBlockStore
    neighbours: Callable[[Household, Callable[[], float], StartTurns], Neighbours] = HostNeighbours
    copier: Callable[[CanonicalKVCaches, SlotLayout, Sharing], BlockCopier] = make_copier
    status_file: Callable[[Path], StatusFile] = StatusFile
    prefault: bool = True


SURROUNDINGS: Final = Surroundings()
"""Those of an engine in production."""


def copy_threads(cores: int, device: str) -> int:
    """Threads that one copy is shared by, where the configuration does not say.

    Args:
        cores: of this host, for each rank of the engine.
        device: type of the device of the KV cache.
    """
    computing = torch.get_num_threads() if device == "cpu" else 0
    return max(1, min(4, cores - computing))


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
    """

    given: int | None
    cache_blocks: int
    max_tokens: int
    sharers: int = 1
    reserved: int = 0
    huge_pages: HugePages = "auto"

    @classmethod
    def of(
        cls, config: OmniConfig, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
    ) -> "ArenaSizing":
        """Read them from the configuration of an engine."""
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        given = config.arena_bytes()
        sharers = ranks * max(1, parallel.data_parallel_size_local)
        caches = 0
        if vllm_config.device_config.device_type == "cpu":  # in the same memory, page by page
            caches = sharers * sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        return cls(
            given=None if given is None else given // ranks,
            cache_blocks=kv_cache_config.num_blocks,
            max_tokens=vllm_config.model_config.max_model_len,
            sharers=sharers,
            reserved=caches,
            huge_pages=config.huge_pages,
        )

    def size(self, slot_bytes: int, groups: tuple[GroupShape, ...]) -> ArenaSize:
        """How many slots the arena has, and why.

        Raises:
            ConfigError: there is no room for a single slot.
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
