# SPDX-License-Identifier: Apache-2.0
"""What an arena tells of its memory to who pins it for a device."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class PinnedMemory(Protocol):
    """One mapping whose slots a device reads, or also writes. Any thread may call any method."""

    def populated(self, end: int) -> None:
        """All slots before `end` have memory, so that pinning allocates none. Returns at once."""

    def close(self) -> None:
        """Let go of the mapping, which nothing uses any more. Idempotent; waits while a piece is
        being pinned."""


class Pins(Protocol):
    """Has a device copy to and from slots itself."""

    def follow(self, slots: NDArray[np.uint8]) -> PinnedMemory:
        """Pin these slots `(n_slots, slot_bytes)` as they are populated. Returns at once."""
