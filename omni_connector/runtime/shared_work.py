# SPDX-License-Identifier: Apache-2.0
"""Work on a list of items that several threads share, such as copies of memory."""

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
"""Longest that an idle engine's thread helps with copies, in seconds, before it looks for requests
again."""

_NO_CALL_S: Final = 0.002
"""Longest wait of the lending thread for the next call, in seconds."""

_LATE_S: Final = 0.001
"""A thread is late if it is still at its last item this many seconds after the lending thread found
no item left. Where the lending thread worked longer than this on the call, that time counts."""

_CROWDED_S: Final = 1.0
"""How long copies keep to the lending thread's cores after a thread was late, in seconds: vLLM's
processes spin for one second after their last message, and a spinning one may be what kept the
thread off its core."""

_MAX_THREADS: Final = 4
"""Most threads of one `share_out`."""

_BYTES_PER_THREAD: Final = 16 << 20
"""Fewest bytes for each thread of `share_out`."""

_THREAD_NAME: Final = "omni-connector-copy"

_Item = TypeVar("_Item")


class _Call(Generic[_Item]):
    """Work on several items. Any number of threads take part; each takes the next item."""

    def __init__(self, work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
        self._work = work
        # The threads share a list's iterator, so that the quicker ones take more items.
        self._left = iter(list(items))
        self.errors: list[BaseException] = []
        self.helping = 0
        # When threads that still work on it are late; set once the lending thread finds no item.
        self.late_at = math.inf

    def take_part(self) -> BaseException | None:
        """Work until no item is left or a thread has failed. Return the error of this thread, if
        any; the caller's thread raises it."""
        try:
            for item in self._left:
                self._work(item)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self.fail(error)
            return error
        return None

    def fail(self, error: BaseException) -> None:
        """Note an error, and drop the items that no thread has begun."""
        self.errors.append(error)
        collections.deque(self._left, maxlen=0)


def share_out(work: Callable[[_Item], None], items: Iterable[_Item], nbytes: int) -> None:
    """Call `work` with each item, on several threads if there are enough bytes.

    Args:
        work: should spend its time without the GIL.
        items: its arguments, one for each call.
        nbytes: bytes that are copied in all.

    Raises:
        The first error that `work` raises. Items that no thread has begun by then are dropped.
    """
    threads = min(_MAX_THREADS, nbytes // _BYTES_PER_THREAD)
    if threads > 1:
        threads = min(threads, len(os.sched_getaffinity(0)))
    if threads <= 1:
        for item in items:
            work(item)
        return
    call = _Call(work, items)
    # These threads make no turns: this call waits for their end.
    others = [
        threading.Thread(target=call.take_part, name=_THREAD_NAME, daemon=True)
        for _ in range(threads - 1)
    ]
    with contextlib.suppress(RuntimeError):  # the system has no more threads: fewer do the work
        for thread in others:
            thread.start()
    call.take_part()
    # No thread may outlive this call, even if a signal handler raises here: the caller may reuse
    # the memory that the thread copies.
    while working := [each for each in others if each.is_alive()]:
        try:
            for thread in working:
                thread.join()
        except BaseException as error:  # noqa: BLE001 - raised below
            call.fail(error)
    if call.errors:
        raise call.errors[0]


class Helpers:
    """Threads that wait for calls to help with. They are for calls too short to start threads, as
    `share_out` does. They start with the first call. Any thread may call `share`.

    Args:
        cores: CPU cores that the helpers may run on; None for those of the creating thread.

    Attributes:
        threads: most threads that work on one call: its caller, a lending thread (see `lend`), and
            the helpers. Set it before the first call.
    """

    def __init__(self, cores: frozenset[int] | None = None) -> None:
        self.threads = 1
        self._cores = cores
        # The native id of the lending thread.
        self._lender: int | None = None
        # The native ids of the threads that have worked here.
        self._threads: dict[threading.Thread, int] = {}
        # By native id, the call that a thread works on now; None for a call without helpers.
        self._working: dict[int, _Call[Any] | None] = {}
        # While a thread lends itself: the cores for threads at a call with helpers, and for all
        # others.
        self._cores_with_others = cores
        self._cores_alone = cores
        self._crowded_until = -math.inf
        self._changed = threading.Condition()
        self._helpers: list[Turns] = []
        # One entry for each helper that is still wanted.
        self._wanted: collections.deque[_Call[Any]] = collections.deque()
        self._closed = False

    def share(self, work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
        """Call `work` with each item; return once no thread works on any of them.

        Raises:
            The first error that `work` raises. Items that no thread has begun by then are dropped.
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
            except BaseException as error:  # noqa: BLE001 - `share` raises it, once no helper works
                call.fail(error)

    def lend(self, needed: Callable[[], bool], seconds: float = LEND_S) -> None:
        """Have the calling thread, the *lending thread*, help with calls of other threads as long
        as they come. One thread may lend itself at a time.

        Threads at a call with helpers leave the cores to which the lending thread is pinned: Linux
        would need a few milliseconds to move them away, which is as long as a call lasts. For
        `_CROWDED_S` after a thread was late they use only these cores: on some kernels an engine
        that spins on a core keeps all other threads off that core (docs/troubleshooting.md). If
        cores are few, threads at a call without helpers use the lending thread's cores.

        Args:
            needed: whether calls may still come. Whoever changes that calls `tell_lender`.
            seconds: how long it begins new work.

        Raises:
            BaseException: what a signal handler raises here.
        """
        if not needed():
            return
        start = time.monotonic()
        end = start + seconds
        until = start + _NO_CALL_S
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
        """Have the lending thread ask again whether it is needed."""
        if self._lender is not None:
            with self._changed:
                self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """End the helpers; wait for them for at most `timeout` seconds. Later calls run on their
        callers' threads alone."""
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

    # The methods below are called with the lock held.

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
            with contextlib.suppress(OSError):  # the cpuset has shrunk: its cores stay as they are
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
