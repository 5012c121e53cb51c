# SPDX-License-Identifier: Apache-2.0
"""Memory that reads which failed may still write: given to nobody for a while, and bounded.

It counts for the peer that was read from. One whose reads fail often is set aside until its memory
is free again, and the others go on.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import PeerUnreachableError

# Mooncake ends a TCP session after 30 s without progress (MC_TCP_PROGRESS_TIMEOUT_SEC).
QUARANTINE_S: Final = 300.0
MAX_PEER_BYTES: Final = 512 << 20
MAX_BYTES: Final = 2 << 30
"""Beyond it every peer is set aside of whose reads one has failed."""


class _Kept(NamedTuple):
    until: float
    peer: str
    nbytes: int
    memory: NDArray[np.uint8]


class Quarantine:
    """The memory of one engine's failed reads. Methods may be called from any thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[_Kept] = deque()
        self._by_peer: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(self._by_peer.values())

    def keep(self, peer: str, memory: NDArray[np.uint8], nbytes: int) -> None:
        """Give memory to nobody, of which a failed read may still write so many bytes."""
        with self._lock:
            self._kept.append(_Kept(self._clock() + QUARANTINE_S, peer, nbytes, memory))
            self._by_peer[peer] = self._by_peer.get(peer, 0) + nbytes

    def release(self) -> list[NDArray[np.uint8]]:
        """The memory that nothing writes any more."""
        free = []
        with self._lock:
            while self._kept and self._kept[0].until <= self._clock():
                kept = self._kept.popleft()
                free.append(kept.memory)
                self._by_peer[kept.peer] -= kept.nbytes
                if not self._by_peer[kept.peer]:
                    del self._by_peer[kept.peer]
        return free

    def check(self, peer: str) -> None:
        """Raise where a peer is set aside.

        Raises:
            PeerUnreachableError: too much that was read from it failed.
        """
        if peer in self.set_aside():
            raise PeerUnreachableError(
                f"reads from {peer} have failed, and may still write to memory here; it is not "
                "read from until that is over"
            )

    def set_aside(self) -> list[str]:
        """The peers that are not read from now."""
        with self._lock:
            bound = MAX_PEER_BYTES if sum(self._by_peer.values()) < MAX_BYTES else 1
            return sorted(peer for peer, nbytes in self._by_peer.items() if nbytes >= bound)
