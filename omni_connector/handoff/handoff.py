# SPDX-License-Identifier: Apache-2.0
"""A hand-off, as the slot directory keeps it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.slot_index import Ints, SlotKey

Block = tuple[int, int]
"""(cache group, logical index)."""


@dataclass(slots=True, eq=False)
class Handoff:
    """One finished or running prefill whose KV a peer may claim.

    Attributes:
        token: unguessable name of the hand-off.
        prompt: what the slots will hold the KV of.
        keys: of each logical block, one list a cache group; see `SlotDirectory.open`.
        firsts: logical index of the first block that is held, one a cache group.
        slots: slot of each logical block from there, one array a cache group.
        generations: generation of each of these slots.
        deadline: seconds of the clock when the slots go if nobody claims or releases them.
        sealed: the prefill is finished; the hand-off can be granted once each block is at least
            being copied.
        leases: who has claimed it, and until when.
        identity: of the prompt.
        closed: it has ended.
    """

    token: bytes
    prompt: Prompt
    keys: Sequence[Sequence[SlotKey | None]]
    firsts: list[int]
    slots: list[Ints]
    generations: list[Ints]
    identity: Hashable
    deadline: float = float("inf")
    sealed: bool = False
    leases: dict[Hashable, float] = field(default_factory=dict)
    closed: bool = False

    def slot(self, block: Block) -> int:
        """Slot of a block."""
        return int(self.slots[block[0]][block[1] - self.firsts[block[0]]])

    def generation(self, block: Block) -> int:
        """Generation of the slot of a block."""
        return int(self.generations[block[0]][block[1] - self.firsts[block[0]]])

    def slots_of(self, blocks: Sequence[Block]) -> Ints:
        """Slots of several blocks."""
        parts = [np.empty(0, np.int64)]
        for g, members in groupby(blocks, key=lambda block: block[0]):
            at = np.array([i for _, i in members], np.int64) - self.firsts[g]
            parts.append(self.slots[g][at])
        return np.concatenate(parts)

    @property
    def held(self) -> Ints:
        """All its slots."""
        return np.concatenate([*self.slots, np.empty(0, np.int64)])
