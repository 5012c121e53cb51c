# SPDX-License-Identifier: Apache-2.0
"""The KV of the next request, received while the pipeline computes the one before."""

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from omni_connector.arena.available import available_bytes, memory_limit_bytes
from omni_connector.errors import TransportError
from omni_connector.runtime.blocking_calls import CallThreads
from omni_connector.stage.link import Sender

logger = logging.getLogger(__name__)


class Received(NamedTuple):
    """The KV of one request.

    Attributes:
        data: the payload.
        size: its bytes.
        sendings: as of `link.Parts`.
    """

    data: dict[str, Any]
    size: int
    sendings: Mapping[str, str]


# (request id, sender, device, set when nobody wants it any more) -> what has come, or None.
Receive = Callable[[str, Sender, torch.device | None, threading.Event], Received | None]

_THREADS: Final = 2
"""One prefetch runs at a time. Beside it one that was dropped may wait for its last answer."""


class KVPrefetchConsumeError(RuntimeError):
    """The KV of a request came in the background, and cannot be used."""


@dataclass(frozen=True, slots=True)
class _Prefetch:
    sender: Sender
    future: "Future[Received | None]"
    dropped: threading.Event = field(default_factory=threading.Event)


class Prefetcher:
    """Receives the KV of at most one request in the background.

    All methods may be called from any thread; a request's result goes to one of them.

    Args:
        receive: receives the KV of a request, on the thread that calls it.
        min_free: least part of the device's memory, or without a device of the host's, that must
            be free; below it nothing is prefetched.
        free: tells the free part of a device's memory.
    """

    def __init__(
        self,
        receive: Receive,
        min_free: float,
        free: "Callable[[torch.device | None], float] | None" = None,
    ) -> None:
        self._receive = receive
        self._min_free = min_free
        self._free = free or free_memory
        self._lock = threading.Lock()
        self._running: dict[str, _Prefetch] = {}
        self._threads = CallThreads("omni-connector-prefetch", _THREADS)

    def start(self, request_id: str, sender: Sender, device: torch.device | None) -> bool:
        """Begin to receive; any other request's prefetch is dropped. So is what has come for an
        earlier request of the same id, or is to come from another sender.

        Returns:
            Whether the request is being prefetched now. If it is not, it is received when it is
            needed.
        """
        with self._lock:
            running = self._running.get(request_id)
            if running is not None and running.sender == sender and not running.future.done():
                return True
            if self._min_free > 0 and self._free(device) < self._min_free:
                logger.warning(
                    "KV of request %s is not prefetched: less than %.0f %% of memory is free",
                    *(request_id, 100 * self._min_free),
                )
                return False
            self._drop_all()
            dropped = threading.Event()
            try:
                future = self._threads.start(
                    lambda: self._receive(request_id, sender, device, dropped)
                )
            except TransportError as error:
                logger.debug("KV of request %s is not prefetched: %s", request_id, error)
                return False
            self._running[request_id] = _Prefetch(sender, future, dropped)
        return True

    def consume(self, request_id: str, timeout: float) -> Received | None:
        """What was prefetched for a request; waits for it. Other requests' prefetches are dropped.

        Returns:
            None if it was not prefetched, did not come, or does not come in `timeout` seconds.

        Raises:
            KVPrefetchConsumeError: it came, and cannot be used.
        """
        with self._lock:
            prefetch = self._running.pop(request_id, None)
            self._drop_all()
        if prefetch is None:
            return None
        try:
            found = prefetch.future.result(timeout)
        except concurrent.futures.TimeoutError:
            prefetch.dropped.set()
            logger.warning("The prefetch of request %s takes more than %.1f s", request_id, timeout)
            return None
        except Exception as error:
            raise KVPrefetchConsumeError(
                f"KV of request {request_id} was prefetched and cannot be used: {error}"
            ) from error
        if found is not None:
            _hand_over(found.data)
        return found

    def wait(self, timeout: float | None) -> bool:
        """Wait until no prefetch runs; what has come can still be consumed.

        Returns:
            Whether none runs; False after `timeout` seconds.
        """
        with self._lock:
            futures = [each.future for each in self._running.values()]
        return not concurrent.futures.wait(futures, timeout).not_done

    def close(self) -> None:
        """Drop all, and begin none any more. Idempotent."""
        with self._lock:
            self._drop_all()
        self._threads.close()

    def _drop_all(self) -> None:
        # Holds the lock. A dropped prefetch ends before it asks again.
        for prefetch in self._running.values():
            prefetch.dropped.set()
        self._running.clear()


@contextmanager
def stream_of_its_own(device: torch.device | None) -> Iterator[None]:
    """While inside, copies to a device do not wait for what the pipeline computes there.

    At the end they are done.
    """
    if device is None or device.type == "cpu":
        yield
        return
    module: Any = torch.get_device_module(device)
    stream = module.Stream(device)
    with module.stream(stream):
        yield
        stream.synchronize()


def free_memory(device: torch.device | None) -> float:
    """Free part of a device's memory, 1 where that cannot be told; without a device the host's."""
    if device is not None and device.type != "cpu":
        tell = getattr(torch.get_device_module(device), "mem_get_info", None)
        if tell is None:
            return 1.0
        free, total = tell(device)
        return float(free / total)
    return available_bytes() / memory_limit_bytes()


def _hand_over(payload: dict[str, Any]) -> None:
    # The allocator would else give the memory away once the thread that made the tensors frees it.
    for tensors in payload["layer_blocks"].values():
        for tensor in tensors:
            if tensor is not None and tensor.device.type != "cpu":
                tensor.record_stream(torch.get_device_module(tensor.device).current_stream())
