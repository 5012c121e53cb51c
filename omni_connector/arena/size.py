# SPDX-License-Identifier: Apache-2.0
"""How many slots the arena of one rank has, and why."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from omni_connector.arena.available import spared_bytes
from omni_connector.arena.memory_claims import Reservation, sizing_lock, unclaimed_bytes
from omni_connector.errors import ConfigError
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.stripes import SlotGroup

logger = logging.getLogger("vllm.omni_connector.worker")

GIB: Final = 1 << 30

ORDINARY_PART: Final = 10
"""All arenas of a deployment on one host together take 1/10 of the available memory."""

LARGEST_PART: Final = 4
"""If the longest prompt needs more, they take up to 1/4 of it."""

USEFUL_CACHES: Final = 2
"""An arena has at most as many slots as 2 KV caches have blocks: the KV of one cache waits for
decode engines while the next is computed."""


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """How many slots an arena has, and why."""

    slots: int
    why: str


def arena_size(
    *,
    available: int,
    slot_bytes: int,
    cache_blocks: int,
    prompt_blocks: int,
    sharers: int,
) -> ArenaSize:
    """The size of one rank's arena where none is configured.

    Args:
        available: bytes of unused memory of the host.
        slot_bytes: bytes of a slot, which holds one block.
        cache_blocks: blocks of this rank's KV cache.
        prompt_blocks: blocks of the longest prompt that the engine takes.
        sharers: arenas of this deployment on this host, this one included.
    """
    share = max(0, available) // sharers
    among = "" if sharers == 1 else f", which {sharers} ranks share"
    useful = USEFUL_CACHES * cache_blocks
    ordinary = share // ORDINARY_PART // slot_bytes
    largest = share // LARGEST_PART // slot_bytes
    wanted = max(ordinary, min(prompt_blocks, largest))
    if useful <= wanted:
        return ArenaSize(useful, f"{USEFUL_CACHES} times the KV cache")
    there = f"the {available / GIB:.1f} GiB of memory available{among}"
    if wanted == ordinary:
        return ArenaSize(ordinary, f"1/{ORDINARY_PART} of {there}")
    if wanted == prompt_blocks:
        return ArenaSize(
            wanted, f"one prompt of the longest, more than 1/{ORDINARY_PART} of {there}"
        )
    return ArenaSize(wanted, f"1/{LARGEST_PART} of {there}")


@dataclass(frozen=True)
class ArenaSizing:
    """What the size of one rank's arena depends on, beside the size of a slot.

    Attributes:
        given: configured bytes, at most; None sizes the arena by the host's memory.
        cache_blocks: blocks of the rank's KV cache.
        max_tokens: tokens of the longest prompt.
        sharers: arenas of this deployment on this host.
        reserved: bytes that the engine's KV caches on this host will take, perhaps not touched yet.
        deployment: identifies the deployment on the host; see `memory_claims`.
    """

    given: int | None
    cache_blocks: int
    max_tokens: int
    sharers: int = 1
    reserved: int = 0
    deployment: str = ""

    def reserve(
        self,
        slot_bytes: int,
        groups: tuple[GroupShape, ...],
        stripes: int = 1,
        slot_groups: Sequence[SlotGroup] = (),
    ) -> tuple[ArenaSize, Reservation]:
        """The size of the arena, and the claim on its memory that other engines see from now on.

        Args:
            stripes, slot_groups: as for `size`.

        Raises:
            ConfigError: as `size`.
        """
        with sizing_lock():
            size = self.size(slot_bytes, groups, stripes, slot_groups)
            return size, Reservation(self.deployment, size.slots * slot_bytes)

    def size(
        self,
        slot_bytes: int,
        groups: tuple[GroupShape, ...],
        stripes: int = 1,
        slot_groups: Sequence[SlotGroup] = (),
    ) -> ArenaSize:
        """How many slots the arena has, and why.

        Args:
            stripes: ranks over which slots are spread, each with an arena of this size.
            slot_groups: the slot groups; none where each cache group has one.

        Raises:
            ConfigError: there is no room for a single slot.
        """
        if self.given is not None:
            size = self._given_size(self.given, slot_bytes)
        else:
            # Any part of the cache may be blocks that take a slot in each stripe.
            divides = any(each.stripe is not None for each in slot_groups)
            cache_rows = self.cache_blocks if divides else -(-self.cache_blocks // stripes)
            unclaimed = unclaimed_bytes(self.deployment)
            # Pages of the KV cache that are in use already are subtracted twice here. So at least
            # half of the unclaimed memory counts as available.
            size = arena_size(
                available=max(unclaimed - self.reserved, unclaimed // 2),
                slot_bytes=slot_bytes,
                cache_blocks=cache_rows,
                prompt_blocks=self.prompt_rows(groups, stripes, slot_groups),
                sharers=self.sharers,
            )
        if size.slots < 1:
            remedy = "" if self._short_of(size, slot_bytes) else "; set arena_gib"
            raise ConfigError(
                f"the arena has no room for a single KV block of {slot_bytes} bytes "
                f"({size.why}){remedy}"
            )
        return size

    def _given_size(self, given: int, slot_bytes: int) -> ArenaSize:
        """The configured size, or as much of it as there is memory for: beyond that the kernel
        kills the engine while it fills the arena."""
        wanted = given // slot_bytes
        unclaimed = unclaimed_bytes(self.deployment)
        # This rank's KV cache is in use by now. Those of the others may be, too, as above.
        others = self.reserved // self.sharers * (self.sharers - 1)
        left = max(unclaimed - others, unclaimed // 2) - spared_bytes()
        room = max(0, left // self.sharers // slot_bytes)
        if wanted <= room:
            return ArenaSize(wanted, "arena_gib")
        return ArenaSize(
            room,
            f"arena_gib wants {given / GIB:.2f}, and the machine and its cgroups have "
            f"{unclaimed / GIB:.2f} GiB left, for {self.sharers} such arenas and all else: lower "
            "arena_gib, or raise the memory limit",
        )

    def _short_of(self, size: ArenaSize, slot_bytes: int) -> bool:
        return self.given is not None and size.slots < self.given // slot_bytes

    def tell(
        self,
        rank: int,
        ranks: int,
        size: ArenaSize,
        slot_bytes: int,
        groups: tuple[GroupShape, ...],
        stripes: int = 1,
        slot_groups: Sequence[SlotGroup] = (),
    ) -> None:
        """Log the size of a rank's arena, as a warning if it is less than the configured one, and
        warn if the longest prompts do not fit.

        Args:
            rank, ranks: of this worker, and how many its engine has.
            size: of the arena.
            slot_bytes, groups, stripes, slot_groups: as for `size`.
        """
        logger.log(
            logging.WARNING if self._short_of(size, slot_bytes) else logging.INFO,
            "Arena of rank %d: %.2f GiB, %d slots of %.1f MiB (%s)",
            rank,
            size.slots * slot_bytes / 2**30,
            size.slots,
            slot_bytes / 2**20,
            size.why,
        )
        if stripes > 1:
            logger.info(
                "%d ranks each hold the same KV: one copy of it is kept, in the arenas of these",
                stripes,
            )
        longest = self.prompt_rows(groups, stripes, slot_groups)
        if longest > size.slots and self.given is None:  # else the user has set the size
            logger.warning(
                "The longest prompts take %d slots, the arena has %d (%s): they are not handed "
                "off; set arena_gib to %.1f",
                longest,
                size.slots,
                size.why,
                (longest * slot_bytes * ranks + 2**26) / 2**30,
            )

    def prompt_rows(
        self, groups: tuple[GroupShape, ...], stripes: int, slot_groups: Sequence[SlotGroup]
    ) -> int:
        """Slots that the longest prompt needs in the arena of one rank. The arguments are as for
        `size`."""
        blocks = [len(group.needed(self.max_tokens)) for group in groups]
        of_groups = [each.group for each in slot_groups] or range(len(groups))
        return -(-sum(blocks[group] for group in of_groups) // stripes)
