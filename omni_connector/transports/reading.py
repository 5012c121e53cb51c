# SPDX-License-Identifier: Apache-2.0
"""Slots of peers, read in place or fetched, for the copies into KV blocks.

Slots of a mapped arena are read in place. Others are fetched by threads that run a few steps ahead
of the copies. So the network and the copies work at the same time, and a peer that does not answer
delays only what needs it.
"""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.format import PublishedSlots
from omni_connector.errors import PeerRefusedError, SlotPendingError
from omni_connector.runtime.turns import WOKEN, StartTurns, Turns, TurnThread
from omni_connector.transports import RemoteArena

logger = logging.getLogger("vllm.omni_connector.worker")

THREADS_A_PEER: Final = 4
"""Most threads that fetch from one peer at a time, so that a slow peer leaves some to others."""

MAX_THREADS: Final = 64
"""Most threads that fetch, from all peers."""

PENDING_S: Final = 0.0003
"""Seconds after which to look at a mapped slot again that is not published. Its owner publishes it
in its header, which readers can only read: to notify them, it would have to send each of them a
message for each slot."""

# Most steps of a load that are fetched ahead of the copy, which bounds the memory of fetched bytes.
_AHEAD: Final = 3

# Seconds after which to fetch a slot again that is not published.
_FETCH_AGAIN_S: Final = 0.002

# Longest wait of `close` for the threads, in seconds.
_CLOSE_S: Final = 1.0

_Step = TypeVar("_Step")
_Ids = NDArray[np.int64]


class MappedSlots:
    """Published slots of one peer's rank, read in place.

    Attributes:
        rows: (slots of the arena, bytes) uint8.
        index: the row of each slot.
        in_place: whether the bytes are read in the arena itself. Of a copy that was sent, only the
            checksum tells that it is a copy of these slots.

    Raises:
        SlotPendingError, StaleSlotError, PeerRefusedError: a slot is not published, or not with
            `length` bytes.
        ProtocolError: the peer has no such slot.
    """

    in_place: Final = True

    def __init__(self, remote: RemoteArena, slots: _Ids, generations: _Ids, length: int) -> None:
        self._remote = remote
        self._generations = generations
        self._length = length
        self.index = slots
        self.headers()
        self.rows: NDArray[np.uint8] = remote.slots

    def headers(self) -> PublishedSlots:
        """The headers of the slots. Read after the copy, they show that no slot has changed.

        Raises:
            StaleSlotError: a slot was reused meanwhile, so that the copy is a mixture.
        """
        found = self._remote.verify_all(self.index, self._generations)
        return _whole(found, self.index, self._length)

    def release(self) -> None:
        """Nothing is held."""


class FetchedSlots:
    """Copies of published slots, where the arena is not mapped; attributes as `MappedSlots`."""

    in_place: Final = False

    def __init__(
        self, remote: RemoteArena, slots: _Ids, generations: _Ids, length: int, *, timeout: float
    ) -> None:
        self._fetched = remote.fetch(slots.tolist(), generations.tolist(), length, timeout=timeout)
        self._slots = slots
        self._length = length
        self.rows: NDArray[np.uint8] = self._fetched.rows
        self.index: _Ids = np.arange(len(slots), dtype=np.int64)

    def headers(self) -> PublishedSlots:
        """The headers of the slots."""
        return _whole(PublishedSlots.of(self._fetched.headers), self._slots, self._length)

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        self._fetched.release()


Slots = MappedSlots | FetchedSlots


class PeerThreads:
    """Threads that wait for peers. A peer that does not answer delays only its own calls.

    Args:
        start: starts a thread.
        notify: is called on such a thread when a call has ended.
    """

    def __init__(
        self, start: StartTurns = TurnThread, notify: Callable[[], object] = lambda: None
    ) -> None:
        self.notify = notify
        self._start = start
        self._lock = threading.Lock()
        self._calls: dict[str, deque[Callable[[], None]]] = {}
        self._running: Counter[str] = Counter()
        self._threads: list[Turns] = []
        self._idle: list[int] = []  # numbers of the threads that wait for a call
        self._closed = False

    def submit(self, peer: str, call: Callable[[], None]) -> None:
        """Have a thread make this call. What it raises is logged."""
        with self._lock:
            self._calls.setdefault(peer, deque()).append(call)
            wanted = sum(self._running.values()) + sum(
                min(len(calls), THREADS_A_PEER - self._running[p])
                for p, calls in self._calls.items()
            )
            if wanted > len(self._threads) < MAX_THREADS:
                turn = partial(self._turn, len(self._threads))
                self._threads.append(self._start("omni-fetch", turn))
            # A thread that ends a call looks for another one by itself.
            idle = self._threads[self._idle.pop()] if self._idle else None
        if idle is not None:
            idle.wake()

    def close(self) -> None:
        """End the threads. A thread that waits for a peer ends after that. Idempotent."""
        with self._lock:
            self._closed = True
        for thread in self._threads:
            thread.wake()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _turn(self, number: int) -> float | None:
        with self._lock:
            if self._closed:
                return None
            peer = self._next()
            if peer is None:
                if number not in self._idle:
                    self._idle.append(number)
                return WOKEN
            call = self._calls[peer].popleft()
            self._running[peer] += 1
        try:
            call()
        except Exception:  # the other calls are made all the same
            logger.exception("A call to the peer at %s failed; please report it", peer)
        finally:
            with self._lock:
                self._ended(peer)
            self.notify()
        return 0.0

    def _next(self) -> str | None:
        """A peer with a call that may begin."""
        return next(
            (p for p, calls in self._calls.items() if calls and self._running[p] < THREADS_A_PEER),
            None,
        )

    def _ended(self, peer: str) -> None:
        self._running[peer] -= 1
        if not self._running[peer]:
            del self._running[peer]
            if not self._calls[peer]:
                del self._calls[peer]


class FetchAhead(Generic[_Step]):
    """The fetches of one load, one after the other, a few steps ahead of its copies.

    Several fetches from one peer at a time would only share its network, and cost both hosts more.

    Args:
        threads: make the fetches.
        peer: whose slots are fetched.
        fetch: fetches the slots of one step, from each rank that it reads.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        threads: PeerThreads,
        peer: str,
        fetch: Callable[[_Step], list[FetchedSlots]],
        clock: Callable[[], float],
    ) -> None:
        self._threads = threads
        self._peer = peer
        self._clock = clock
        self._fetch = fetch
        self._under_way: deque[Future[list[FetchedSlots]]] = deque()
        self._not_before = -math.inf
        self._lock = threading.Lock()
        self._waiting: deque[tuple[_Step, Future[list[FetchedSlots]]]] = deque()
        self._running = False

    def take(self, steps: Sequence[_Step]) -> list[FetchedSlots] | float:
        """The slots of the first of these steps, which are to be copied. Or, while they are not
        fetched, the seconds after which to ask again if the threads do not notify before.

        Raises:
            Whatever `fetch` has raised; after a `SlotPendingError` the step is fetched again.
        """
        if (seconds := self._not_before - self._clock()) > 0:
            return seconds
        for step in steps[len(self._under_way) : _AHEAD]:
            self._under_way.append(self._submit(step))
        if not self._under_way[0].done():
            return WOKEN
        first = self._under_way.popleft()
        try:
            return first.result()
        except SlotPendingError:
            self._not_before = self._clock() + _FETCH_AGAIN_S
            self._under_way.appendleft(self._submit(steps[0]))
            return _FETCH_AGAIN_S

    def close(self) -> None:
        """Let go of slots that were not taken, also when they arrive later. Idempotent."""
        while self._under_way:
            future = self._under_way.popleft()
            if not future.cancel():
                future.add_done_callback(_release)

    def _submit(self, step: _Step) -> "Future[list[FetchedSlots]]":
        future: Future[list[FetchedSlots]] = Future()
        future.add_done_callback(lambda _: self._threads.notify())
        with self._lock:
            self._waiting.append((step, future))
            idle, self._running = not self._running, True
        if idle:
            self._threads.submit(self._peer, self._run)
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                step, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._fetch(step))
                except BaseException as error:  # noqa: BLE001 - it is raised where it is taken
                    future.set_exception(error)


def _release(future: "Future[list[FetchedSlots]]") -> None:
    if future.exception() is None:
        for slots in future.result():
            slots.release()


def _whole(found: PublishedSlots, slots: _Ids, length: int) -> PublishedSlots:
    for at in np.flatnonzero(found.lengths != length)[:1].tolist():
        raise PeerRefusedError(f"slot {slots[at]} holds {found.lengths[at]} bytes, not {length}")
    return found
