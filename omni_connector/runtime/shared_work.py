# SPDX-License-Identifier: Apache-2.0
"""Work that several threads share, as copies of memory are."""

import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

from omni_connector.runtime.turns import WOKEN, Turns, TurnThread

LEND_S: Final = 0.01
"""An engine that has nothing to compute helps with copies for so many seconds, and then looks
whether it has."""

# Who lends itself and is not called for so many seconds goes.
_NO_CALL_S: Final = 0.002

# A thread is late that works so many seconds longer on its last item than who lends itself worked.
_LATE_S: Final = 0.001

# Where a thread was late, all stay out of the way of whoever was in theirs for so many seconds:
# vLLM's processes spin for a second after their last message.
_CROWDED_S: Final = 1.0

_MAX_THREADS: Final = 4
_BYTES_PER_THREAD: Final = 16 << 20
_THREAD_NAME: Final = "omni-connector-copy"

_Item = TypeVar("_Item")


class _Call(Generic[_Item]):
    """Work on several items that any number of threads take part in; each takes the next item."""

    def __init__(self, work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
        self._work = work
        # The threads share a list's iterator, so that the quicker ones take more items.
        self._left = iter(list(items))
        self.errors: list[BaseException] = []
        self.helping = 0
        # When who still works on it is late: once there was nothing left for who lends itself.
        self.late_at = math.inf

    def take_part(self) -> BaseException | None:
        """Work until no item is left, or until one of the threads has failed; returns what was
        raised here, which the caller's thread raises."""
        try:
            for item in self._left:
                self._work(item)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self.fail(error)
            return error
        return None

    def fail(self, error: BaseException) -> None:
        """Leave out the items that are not begun."""
        self.errors.append(error)
        collections.deque(self._left, maxlen=0)


def share_out(work: Callable[[_Item], None], items: Iterable[_Item], nbytes: int) -> None:
    """Call `work` with each item, on several threads where that is worth it.

    Args:
        work: should spend its time without the GIL.
        items: what it is called with.
        nbytes: bytes that are copied in all.

    Raises:
        The first error that `work` raises. Items that are not begun by then are left out.
    """
    threads = min(_MAX_THREADS, nbytes // _BYTES_PER_THREAD)
    if threads > 1:
        threads = min(threads, len(os.sched_getaffinity(0)))
    call = _Call(work, items)
    # These threads make no turns, as they live within this one call, which waits for their end.
    others = [
        threading.Thread(target=call.take_part, name=_THREAD_NAME, daemon=True)
        for _ in range(threads - 1)
    ]
    with contextlib.suppress(RuntimeError):  # the system has no more threads: fewer do the work
        for thread in others:
            thread.start()
    call.take_part()
    # Even if something is raised here, no thread may go on: its memory could be used again.
    while working := [each for each in others if each.is_alive()]:
        try:
            for thread in working:
                thread.join()
        except BaseException as error:  # noqa: BLE001 - raised below, as what a signal handler raises
            call.fail(error)
    if call.errors:
        raise call.errors[0]


class Helpers:
    """Threads that wait for work to take part in, as `share_out` has it, for calls that are too
    short to start threads. They start with the first call. Any thread may call.

    Args:
        cores: CPU cores that the helpers may run on; None for those of the creating thread.

    Attributes:
        threads: that work on one call at the most: its caller, one that lends itself, and helpers.
            To be set before the first call.
    """

    def __init__(self, cores: frozenset[int] | None = None) -> None:
        self.threads = 1
        self._cores = cores
        # The thread that lends itself.
        self._lender: int | None = None
        # Threads that have worked here, with their ids, and those that do now: on a call that
        # others take part in, or on one alone (None).
        self._threads: dict[threading.Thread, int] = {}
        self._working: dict[int, _Call[Any] | None] = {}
        # While a thread lends itself: the cores of those who work with others, and of the others.
        self._cores_with_others = self._cores_alone = cores
        self._crowded_until = -math.inf
        self._changed = threading.Condition()
        self._helpers: list[Turns] = []
        # One entry for each helper that is still wanted.
        self._wanted: collections.deque[_Call[Any]] = collections.deque()
        self._closed = False

    def share(self, work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
        """Call `work` with each item; returns once no thread works on any of them.

        Raises:
            The first error that `work` raises. Items that are not begun by then are left out.
        """
        call = _Call(work, items)
        if self.threads > 1:
            self._add(call, min(self.threads, len(items)) - 1)
        call.take_part()
        if self.threads > 1:
            self._end(call)
        if call.errors:
            raise call.errors[0]

    def _add(self, call: _Call[Any], wanted: int) -> None:
        with self._changed:
            self._enter(call if wanted > 0 else None)
            if wanted > 0:
                self._start()
                self._wanted.extend([call] * wanted)
            self._changed.notify_all()
        if wanted > 0:
            for helper in self._helpers:
                helper.wake()

    def _end(self, call: _Call[Any]) -> None:
        while True:
            try:
                with self._changed:
                    self._wanted = collections.deque(c for c in self._wanted if c is not call)
                    while call.helping:
                        self._changed.wait()
                    self._leave()
                return
            except BaseException as error:  # noqa: BLE001 - raised when no helper works any more
                call.fail(error)

    def lend(self, needed: Callable[[], bool], seconds: float = LEND_S) -> None:
        """Have the calling thread take part in the calls of others, as long as they come. One
        thread may lend itself at a time.

        Those who call leave it the cores to which it is pinned: the kernel would take a few
        milliseconds to see that they are in its way, as long as a call lasts. But where it has
        nothing to take part in, and cores are few, they use its own. So does who is late: on some
        kernels an engine that spins on a core keeps all others off it (docs/troubleshooting.md).

        Args:
            needed: whether calls may still come. Whoever changes that calls `tell_lender`.
            seconds: after which it begins nothing new.

        Raises:
            BaseException: what a signal handler raises here.
        """
        if not needed():
            return
        start = time.monotonic()
        end, until = start + seconds, start + _NO_CALL_S
        own = frozenset(os.sched_getaffinity(0))
        try:
            with self._changed:
                self._lender = threading.get_native_id()
                self._place_all(own)
            while (left := min(end, until) - (now := time.monotonic())) > 0:
                with self._changed:
                    if not needed():
                        return
                    if not self._wanted:
                        if busy := bool(self._working):
                            left = min(end, max(self._late_at(), now + _LATE_S)) - now
                        self._changed.wait(left)
                        now = time.monotonic()
                        if now >= self._late_at():
                            self._crowded_until = now + _CROWDED_S
                            self._place_all(own)
                        if busy:
                            until = end if self._working else now + _NO_CALL_S
                        continue
                    call = self._begin()
                begun = time.monotonic()
                try:
                    raised = call.take_part()
                finally:
                    with self._changed:
                        self._finish(call)
                        now = time.monotonic()
                        call.late_at = now + max(now - begun, _LATE_S)
                if raised is not None and not isinstance(raised, Exception):
                    raise raised
                until = time.monotonic() + _NO_CALL_S
        finally:
            with self._changed:
                self._place_all(None)
                self._lender = None

    def tell_lender(self) -> None:
        """Have the thread that lends itself look whether it is still needed."""
        if self._lender is not None:
            with self._changed:
                self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """End the threads, within so many seconds. Later calls are worked on by their callers."""
        with self._changed:
            self._closed = True
            helpers, self._helpers = self._helpers, []
        for helper in helpers:
            helper.wake()
        deadline = time.monotonic() + timeout
        for helper in helpers:
            helper.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        if self._helpers or self._closed:
            return
        with contextlib.suppress(RuntimeError):  # the system has no more threads: fewer help
            for _ in range(self.threads - 2):
                self._helpers.append(TurnThread(_THREAD_NAME, self._turn, cores=self._cores))

    def _turn(self) -> float | None:
        with self._changed:
            if self._closed:
                return None
            if not self._wanted:
                return WOKEN
            call = self._begin()
            self._enter(call)
        call.take_part()
        with self._changed:
            self._leave()
            self._finish(call)
        return 0.0

    # All of these are called with the lock held.

    def _place_all(self, lender: frozenset[int] | None) -> None:
        self._cores_with_others = self._cores_alone = self._cores
        if self._cores is not None and lender is not None:
            elsewhere = self._cores - lender or self._cores
            crowded = time.monotonic() < self._crowded_until
            self._cores_with_others = lender if crowded else elsewhere
            if len(elsewhere) < self.threads:
                self._cores_alone = lender
        self._threads = {each: tid for each, tid in self._threads.items() if each.is_alive()}
        for thread in self._threads.values():
            self._place(thread)

    def _place(self, thread: int) -> None:
        cores = self._cores_with_others if self._working.get(thread) else self._cores_alone
        if cores is not None and thread != self._lender:
            with contextlib.suppress(OSError):  # the cpuset has shrunk: it runs where it may
                os.sched_setaffinity(thread, cores)

    def _enter(self, call: _Call[Any] | None) -> None:
        thread = threading.get_native_id()
        self._threads[threading.current_thread()] = thread
        self._working[thread] = call
        if self._lender is not None:
            self._place(thread)

    def _leave(self) -> None:
        thread = threading.get_native_id()
        self._working.pop(thread, None)
        if self._lender is not None:
            self._place(thread)
        self._changed.notify_all()

    def _late_at(self) -> float:
        return min((call.late_at for call in self._working.values() if call), default=math.inf)

    def _begin(self) -> _Call[Any]:
        call = self._wanted.popleft()
        call.helping += 1
        return call

    def _finish(self, call: _Call[Any]) -> None:
        call.helping -= 1
        self._changed.notify_all()
