# SPDX-License-Identifier: Apache-2.0
"""Registered memory for transfers by a library such as Mooncake.

Memory is reused after a successful transfer. After a failed one it is quarantined, because the
transfer may still write to it.
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

QUARANTINE_S: Final = 300.0
"""Seconds for which a failed transfer may still write to its memory. Ten times Mooncake's limit: it
ends a TCP session after 30 s without progress (MC_TCP_PROGRESS_TIMEOUT_SEC)."""

MAX_PEER_BYTES: Final = 512 << 20
"""Quarantined bytes from which on a peer is backed off."""

MAX_BYTES: Final = 2 << 30
"""Quarantined bytes of all peers from which on each peer with quarantined memory is backed off."""

Memory = NDArray[np.uint8]


class _Kept(NamedTuple):
    until: float
    peer: str
    nbytes: int
    memory: Memory


class Pool:
    """Memory for transfers. All methods may be called from any thread.

    Args:
        register: called with new memory before `take` returns it.
        unregister: called with memory that leaves the pool.
        spare_bytes: most bytes kept for the next transfers.
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
        # Filled by finalizers, which may run while this thread holds the lock: they take none.
        self._returned: deque[Memory] = deque()
        self._kept: deque[_Kept] = deque()
        self._kept_of: dict[str, int] = {}

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that failed transfers may still write to."""
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
        """Keep memory for the next `take` of this size. No transfer may write to it any more."""
        with self._lock:
            if self._spare_bytes + memory.nbytes <= self._spare_limit:
                self._spare_bytes += memory.nbytes
                self._spare.setdefault(memory.nbytes, []).append(memory)
                return
        self._unregister(memory)

    def give_back_later(self, memory: Memory) -> None:
        """As `give_back`, at the next `tidy`. Takes no lock, so that a finalizer may call it."""
        if self._spare_limit:
            self._returned.append(memory)

    def quarantine(self, peer: str, memory: Memory, nbytes: int) -> None:
        """Keep memory unused for `QUARANTINE_S` seconds, then unregister it.

        Args:
            peer: of the failed transfer.
            memory: of the failed transfer.
            nbytes: bytes of it that the transfer may still write to.
        """
        with self._lock:
            self._kept.append(_Kept(self._clock() + QUARANTINE_S, peer, nbytes, memory))
            self._kept_of[peer] = self._kept_of.get(peer, 0) + nbytes

    def backed_off(self) -> list[str]:
        """The peers to leave alone for now, because too much of their memory is quarantined."""
        with self._lock:
            bound = MAX_PEER_BYTES if sum(self._kept_of.values()) < MAX_BYTES else 1
            return sorted(peer for peer, nbytes in self._kept_of.items() if nbytes >= bound)

    def tidy(self) -> None:
        """Take back what `give_back_later` left, and unregister memory whose quarantine is over."""
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
        """Set the bytes kept for the next transfers; memory kept so far is unregistered."""
        with self._lock:
            spare, self._spare = self._spare, {}
            self._spare_bytes = 0
            self._spare_limit = nbytes
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
