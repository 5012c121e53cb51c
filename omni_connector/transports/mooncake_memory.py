# SPDX-License-Identifier: Apache-2.0
"""Memory that a client of Mooncake Store puts from and gets into."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from omni_connector.errors import OmniError, TransportError
from omni_connector.memory.pool import Memory, Pool
from omni_connector.transports.mooncake_client import TRANSFER_FAILED, StoreClient

_STORE: Final = "Mooncake Store"


class Staging(Pool):
    """Registered memory, each buffer for one call at a time.

    Args:
        client: what the memory is registered with.
        spare_bytes, clock: as of `Pool`.
    """

    def __init__(
        self, client: StoreClient, spare_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(client.register, client.unregister, spare_bytes, clock)
        self._client = client

    def take(self, nbytes: int) -> Memory:
        """As `Pool.take`; `start` a call with it and `settle` it, or `give_back` it.

        Raises:
            TransportError: as `check`; there is no memory, or Mooncake does not take it.
        """
        self.check()
        return super().take(nbytes)

    def check(self) -> None:
        """Let go of memory that nothing writes to any more.

        Raises:
            TransportError: failed transfers may still write to too much.
        """
        self.tidy()
        if self.backed_off():
            raise TransportError(
                f"transfers that failed may still write to {self.quarantined_bytes} bytes; "
                "Mooncake is not used until that is over"
            )

    def start(self, memory: Memory, call: Callable[[Any], list[int]]) -> "Future[list[int]]":
        """`StoreClient.start` of a call that uses this memory, which is given back if that fails.

        Raises:
            PeerUnreachableError, TransportError: as `StoreClient.start`.
        """
        try:
            return self._client.start(call)
        except OmniError:
            self.give_back(memory)
            raise

    def settle(self, memory: Memory, future: "Future[list[int]]") -> None:
        """Give memory back once this call has ended, whether or not anybody waits for that."""
        self._once_ended([future], memory, self.give_back)

    def retire(self, memory: Memory, futures: Sequence["Future[list[int]]"]) -> None:
        """Unregister memory once these calls have ended, later if one does not end well."""
        self._once_ended(futures, memory, self._client.unregister)

    def _once_ended(
        self,
        futures: Sequence["Future[list[int]]"],
        memory: Memory,
        free: Callable[[Memory], None],
    ) -> None:
        lock, left = threading.Lock(), len(futures)

        def end(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last and all(map(_ended_well, futures)):
                free(memory)
            elif last:
                self.quarantine(_STORE, memory, memory.nbytes)

        for future in futures:
            future.add_done_callback(end)
        if not futures:
            free(memory)


def _ended_well(future: "Future[list[int]]") -> bool:
    return future.exception() is None and TRANSFER_FAILED not in future.result()


def addresses(memory: Memory, offsets: Sequence[int]) -> list[int]:
    """Where in memory these offsets are."""
    start = int(memory.ctypes.data)
    return [start + offset for offset in offsets]
