# SPDX-License-Identifier: Apache-2.0
"""Memory for the transfers of a library.

Memory is used again after a transfer that ended well. A failed transfer may still write to its
memory, which is then quarantined.
"""

import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import TransportError

# Mooncake ends a TCP session after 30 s without progress (MC_TCP_PROGRESS_TIMEOUT_SEC).
QUARANTINE_S: Final = 300.0
MAX_PEER_BYTES: Final = 512 << 20
MAX_BYTES: Final = 2 << 30
"""When more is quarantined in all, no peer with quarantined memory is asked."""

Memory = NDArray[np.uint8]


class _Kept(NamedTuple):
    until: float
    peer: str
    nbytes: int
    memory: Memory


class Pool:
    """Memory for transfers. All methods may be called from any thread.

    Args:
        register: called with new memory, before anybody gets it.
        unregister: called with memory that the pool lets go of.
        spare_bytes: how much memory is kept for the next transfers.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        register: Callable[[Memory], None],
        unregister: Callable[[Memory], None],
        spare_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._spare_limit = spare_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._spare: dict[int, list[Memory]] = {}
        self._spare_bytes = 0
        # Filled by finalizers, which run in the middle of anything: they must take no lock.
        self._returned: deque[Memory] = deque()
        self._kept: deque[_Kept] = deque()
        self._kept_of: dict[str, int] = {}

    @property
    def quarantined_bytes(self) -> int:
        """How many bytes failed transfers may still write to."""
        with self._lock:
            return sum(self._kept_of.values())

    def take(self, nbytes: int) -> Memory:
        """Memory on pages of its own, of any content: (nbytes,) uint8.

        Raises:
            TransportError: there is none.
            Whatever `register` raises.
        """
        with self._lock:
            spare = self._spare.get(nbytes)
            if spare:
                self._spare_bytes -= nbytes
                return spare.pop()
        memory = pages(nbytes)
        self._register(memory)
        return memory

    def give_back(self, memory: Memory) -> None:
        """Let the next `take` of this size have this memory, to which no transfer writes."""
        with self._lock:
            if self._spare_bytes + memory.nbytes <= self._spare_limit:
                self._spare_bytes += memory.nbytes
                self._spare.setdefault(memory.nbytes, []).append(memory)
                return
        self._unregister(memory)

    def give_back_later(self, memory: Memory) -> None:
        """As `give_back`, with the next `tidy`; takes no lock, so that a finalizer may call it."""
        if self._spare_limit:
            self._returned.append(memory)

    def quarantine(self, peer: str, memory: Memory, nbytes: int) -> None:
        """Give memory to nobody for `QUARANTINE_S`, then unregister it.

        Args:
            peer: with whom a transfer failed.
            memory: what the transfer had.
            nbytes: how much of it the transfer may still write to.
        """
        with self._lock:
            self._kept.append(_Kept(self._clock() + QUARANTINE_S, peer, nbytes, memory))
            self._kept_of[peer] = self._kept_of.get(peer, 0) + nbytes

    def backed_off(self) -> list[str]:
        """The peers that are not to be used now, as too much of their memory is quarantined."""
        with self._lock:
            bound = MAX_PEER_BYTES if sum(self._kept_of.values()) < MAX_BYTES else 1
            return sorted(peer for peer, nbytes in self._kept_of.items() if nbytes >= bound)

    def tidy(self) -> None:
        """Take what was given back later, and let go of memory whose quarantine is over."""
        with contextlib.suppress(IndexError):
            while True:
                self.give_back(self._returned.popleft())
        free = []
        with self._lock:
            while self._kept and self._kept[0].until <= self._clock():
                _, peer, nbytes, memory = self._kept.popleft()
                free.append(memory)
                self._kept_of[peer] -= nbytes
                if not self._kept_of[peer]:
                    del self._kept_of[peer]
        for memory in free:
            self._unregister(memory)

    def keep_spare(self, nbytes: int) -> None:
        """Keep so many bytes for the next transfers from now on; what was kept so far goes."""
        with self._lock:
            spare, self._spare = self._spare, {}
            self._spare_bytes, self._spare_limit = 0, nbytes
            self._returned.clear()
        for memories in spare.values():
            for memory in memories:
                self._unregister(memory)


def pages(nbytes: int) -> Memory:
    """Memory on pages of its own: (nbytes,) uint8.

    Raises:
        TransportError: there is none.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"no memory for {nbytes} bytes: {error}") from error
