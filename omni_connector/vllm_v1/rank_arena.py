# SPDX-License-Identifier: Apache-2.0
"""The arena of one rank: its memory, the claim on it, and the endpoints at which peers read it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.memory_claims import Reservation
from omni_connector.arena.pinning import PinnedMemory, Pins
from omni_connector.arena.size import ArenaSizing
from omni_connector.kv.compatibility import most_shards, most_stripes
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.stripes import SlotGroup, slot_groups_of
from omni_connector.runtime.context import EngineContext
from omni_connector.transports import Arena, Endpoint
from omni_connector.transports.choice import Transports


@dataclass(frozen=True)
class RankArena:
    """An arena that is open.

    Attributes:
        arena: the slots.
        stripes: ranks over which the slots of the pipeline stage are spread; see `kv.stripes`.
        shards: into how many a block is divided, in the groups of which blocks are; else 1.
        slot_groups: of these arenas; see `kv.stripes`.
        endpoints: at which peers read them.
        reservation: what other engines see of the memory before it is populated; None where it
            was populated at once.
    """

    arena: Arena
    stripes: int
    shards: int
    slot_groups: tuple[SlotGroup, ...]
    endpoints: tuple[Endpoint, ...]
    reservation: Reservation | None

    def close(self) -> None:
        """Let go of the memory, after what may have pinned it. Idempotent."""
        self.arena.close()
        if self.reservation is not None:
            self.reservation.close()


@dataclass(frozen=True)
class ArenaPlan:
    """How a rank's arena is opened once its KV caches are known.

    Attributes:
        sizing: how large it is.
        name: under which peers find it, unique on this host; it need not be secret.
        transports: export it.
        rank, ranks: of this worker, and how many its engine has.
        near_ranks: of a pipeline stage, if they are all on this host, else 1: as many may spread
            their slots over their arenas.
        divides: whether blocks may be divided into shards.
        context: randomness.
        prefault: whether a thread populates the memory.
    """

    sizing: ArenaSizing
    name: str
    transports: Transports
    rank: int
    ranks: int
    near_ranks: int
    divides: bool
    context: EngineContext
    prefault: bool

    def open(
        self,
        slot_bytes: int,
        groups: tuple[GroupShape, ...],
        pins: Pins,
        cores: frozenset[int],
    ) -> RankArena:
        """Open the arena of caches with these groups and slots of `slot_bytes`.

        Args:
            pins: pins the memory as it is populated, but not before this returns.
            cores: of the process that allocates its memory; see `Arena.create`.

        Raises:
            ConfigError: it would not hold a single slot.
        """
        shards = 1
        # Not with pipeline stages, as a rank knows the groups of its own stage alone.
        if self.divides and self.near_ranks == self.ranks:
            shards = most_shards(groups, self.ranks)
        stripes = max(most_stripes(groups, self.near_ranks), shards)
        slot_groups = slot_groups_of([group.num_copies(self.ranks) for group in groups], shards)
        reservation: Reservation | None = None
        if self.prefault:
            size, reservation = self.sizing.reserve(slot_bytes, groups, stripes, slot_groups)
        else:
            size = self.sizing.size(slot_bytes, groups, stripes, slot_groups)

        pinned: PinnedMemory | None = None
        done = 0

        def populated(slots: NDArray[np.uint8], end: int) -> None:
            nonlocal done, pinned
            if reservation is not None:
                reservation.populated((end - done) * slot_bytes)
            done = end
            if pinned is None:
                pinned = pins.follow(slots)
            pinned.populated(end)

        try:
            arena = Arena.create(
                size.slots,
                slot_bytes,
                prefault=self.prefault,
                randbytes=self.context.randbytes,
                populated=populated,
                cores=cores,
            )
        except BaseException:
            if reservation is not None:
                reservation.close()
            raise
        try:
            if not self.prefault:
                populated(arena.slots, arena.n_slots)  # else as far as there is memory
            self.sizing.tell(self.rank, self.ranks, size, slot_bytes, groups, stripes, slot_groups)
            endpoints = self.transports.export(arena, self.name)
        except BaseException:
            RankArena(arena, stripes, shards, slot_groups, (), reservation).close()
            raise
        return RankArena(arena, stripes, shards, slot_groups, endpoints, reservation)
