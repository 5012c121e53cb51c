# SPDX-License-Identifier: Apache-2.0
"""Memory that Mooncake may touch, and to whom it belongs when a transfer does not end well."""

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.errors import TransportError
from omni_connector.transports.mooncake_client import TRANSFER_FAILED, StoreClient

_MAX_KEPT_BYTES: Final = 512 << 20


class Staging:
    """Registered memory for one call at a time, used again once that has ended well.

    What a call that failed, or was given up, had is given to nobody for `QUARANTINE_S` after it
    ended: parts of its transfer may still be on their way.

    Args:
        client: what the memory is registered with.
        size: bytes of a piece.
        spare_bytes: memory that is kept for the next calls.
        clock: seconds, monotonic.
    """

    # Mooncake ends a connection after 30 s without progress.
    QUARANTINE_S: Final = 300.0

    def __init__(
        self,
        client: StoreClient,
        size: int,
        spare_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self.size: Final = size
        self._spare_bytes = spare_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._spare: list[NDArray[np.uint8]] = []
        self._kept: deque[tuple[float, NDArray[np.uint8]]] = deque()
        self._kept_bytes = 0

    def take(self) -> NDArray[np.uint8]:
        """A piece, of any content; `settle` it.

        Raises:
            TransportError: as `sweep`; there is no memory, or Mooncake does not take it.
        """
        self.sweep()
        with self._lock:
            if self._spare:
                return self._spare.pop()
        memory = pages(self.size)
        self._client.register(memory)
        return memory

    def settle(self, memory: NDArray[np.uint8], future: "Future[list[int]]") -> None:
        """Give a piece back once this call has ended, whether or not anybody waits for that."""
        future.add_done_callback(lambda ended: self._settle(memory, ended))

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        """Give a piece back that no call has."""
        with self._lock:
            if (len(self._spare) + 1) * self.size <= self._spare_bytes:
                self._spare.append(memory)
                return
        self._client.unregister(memory)

    def keep(self, memory: NDArray[np.uint8]) -> None:
        """Give registered memory to nobody for a while, then unregister it."""
        with self._lock:
            self._kept.append((self._clock() + self.QUARANTINE_S, memory))
            self._kept_bytes += memory.nbytes

    def retire(self, memory: NDArray[np.uint8], futures: Sequence["Future[list[int]]"]) -> None:
        """Unregister memory once these calls have ended, later if one does not end well."""
        left = len(futures)
        lock = threading.Lock()

        def one(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if not last:
                return
            if all(map(_ended_well, futures)):
                self._client.unregister(memory)
            else:
                self.keep(memory)

        for future in futures:
            future.add_done_callback(one)
        if not futures:
            self._client.unregister(memory)

    def sweep(self) -> None:
        """Let go of memory that was kept long enough.

        Raises:
            TransportError: too much is kept still.
        """
        safe = []
        with self._lock:
            while self._kept and self._kept[0][0] <= self._clock():
                safe.append(self._kept.popleft()[1])
                self._kept_bytes -= safe[-1].nbytes
            kept = self._kept_bytes
        for memory in safe:
            self._client.unregister(memory)
        if kept >= _MAX_KEPT_BYTES:
            raise TransportError(
                f"transfers that failed may still write to {kept} bytes; Mooncake is not used "
                "until that is over"
            )

    def close(self) -> None:
        """Keep nothing for the next calls. Idempotent."""
        with self._lock:
            spare, self._spare = self._spare, []
            self._spare_bytes = 0
        for memory in spare:
            self._client.unregister(memory)

    def _settle(self, memory: NDArray[np.uint8], ended: "Future[list[int]]") -> None:
        if _ended_well(ended):
            self.give_back(memory)
        else:
            self.keep(memory)


def _ended_well(future: "Future[list[int]]") -> bool:
    return future.exception() is None and TRANSFER_FAILED not in future.result()


def pages(nbytes: int) -> NDArray[np.uint8]:
    """Memory on pages of its own: (nbytes,) uint8.

    Raises:
        TransportError: there is none.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"no memory for {nbytes} bytes: {error}") from error


def addresses(memory: NDArray[np.uint8], offsets: Sequence[int]) -> list[int]:
    """Where in memory these offsets are."""
    start = int(memory.ctypes.data)
    return [start + offset for offset in offsets]
