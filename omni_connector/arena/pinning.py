# SPDX-License-Identifier: Apache-2.0
"""Memory of an arena that a device reads and writes itself: it is pinned, and let go in time."""

import threading
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Pins(Protocol):
    """Has a device copy to and from slots itself. `BlockCopier` does."""

    def pin(self, slots: NDArray[np.uint8]) -> bool:
        """Pin slots; returns whether the device has taken them."""

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        """Let go of slots that were pinned in one call."""


class PinnedPieces:
    """What a device has pinned of one mapping. All methods may be called from any thread.

    Args:
        pins: pins it, and lets go of it.
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        # Held while a piece is pinned, so that none is pinned after `close`.
        self._lock = threading.Lock()
        self._pieces: list[NDArray[np.uint8]] = []
        self._ended = False

    def pin(self, slots: NDArray[np.uint8]) -> None:
        """Pin one more piece, until the device refuses one, or `close`."""
        with self._lock:
            if self._ended:
                return
            if self._pins.pin(slots):
                self._pieces.append(slots)
            else:
                self._ended = True

    def close(self) -> None:
        """Let go of all pieces; no copy may be under way. Idempotent."""
        with self._lock:
            self._ended = True
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                self._pins.unpin(piece)
