# SPDX-License-Identifier: Apache-2.0
"""Memory that a client of Mooncake Store puts from and gets into."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from omni_connector.arena.pool import Memory, Pool
from omni_connector.errors import OmniError, TransportError
from omni_connector.transports.mooncake.client import TRANSFER_FAILED, StoreClient

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
        if not (self._returned or self._kept):
            return
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

    def settle(self, memory: Memory, started: "Future[list[int]]") -> None:
        """Give memory back once this call has ended, whether or not anybody waits for that."""

        def end(_: object) -> None:
            if _ended_well(started):
                self.give_back(memory)
            else:
                self.quarantine(_STORE, memory, memory.nbytes)

        started.add_done_callback(end)

    def retire(self, memory: Memory, calls: Sequence["Future[list[int]]"]) -> None:
        """Unregister memory once these calls have ended, later if one does not end well."""
        lock = threading.Lock()
        left = len(calls)

        def end(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last and all(map(_ended_well, calls)):
                self._client.unregister(memory)
            elif last:
                self.quarantine(_STORE, memory, memory.nbytes)

        for started in calls:
            started.add_done_callback(end)
        if not calls:
            self._client.unregister(memory)


def _ended_well(started: "Future[list[int]]") -> bool:
    return started.exception() is None and TRANSFER_FAILED not in started.result()


def addresses(memory: Memory, offsets: Sequence[int]) -> list[int]:
    """Where in memory these offsets are."""
    start = int(memory.ctypes.data)
    return [start + offset for offset in offsets]
