# SPDX-License-Identifier: Apache-2.0
"""Threads that do their work in turns.

Work beside an engine's thread is written as a turn: a function that does one piece of work and
returns the seconds until the next turn. `TurnThread` calls it on a thread of its own. The
simulation calls the turns of all threads in an order that it draws. A call that may never return is
no turn: see `omni_connector.runtime.blocking_calls`.

To end a thread, its owner sets a flag that makes the next turn return None, wakes the thread, and
joins it with a timeout. In a forked child the thread is not alive, and joining it does not block.
"""

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, Self

logger = logging.getLogger("vllm.omni_connector.threads")

Turn = Callable[[], float | None]
"""Does one piece of work. Returns the seconds until the next turn, `WOKEN` to wait for `wake`, or
None to end the thread."""

WOKEN: Final = math.inf

WATCH_S: Final = 1.0
"""Seconds between two looks of a `Watch`: a peer's death is noticed within this time."""

_WATCH_CLOSE_S: Final = 1.0
"""Longest wait of `Watch.close` for a look that runs, in seconds."""

_MAX_NAMES: Final = 64
"""Most threads whose end waits to be reported."""

_ended: Final = deque[str]([], _MAX_NAMES)
"""Names of the threads of this process that an exception has ended, until they are reported."""

os.register_at_fork(after_in_child=_ended.clear)

MakeLock = Callable[[], contextlib.AbstractContextManager[object]]
"""Makes a lock that threads of an engine share: `threading.Lock`, or the simulation's."""


class Sleep(Protocol):
    """How a thread waits between turns."""

    def wait(self, seconds: float) -> None:
        """Block for `seconds`, or until `wake` is called. Return at once if it was called since the
        last wait."""

    def wake(self) -> None:
        """End the current wait; if there is none, the next one. Any thread may call it."""


class Turns(Protocol):
    """A thread that makes turns, or the simulation's stand-in for one."""

    def wake(self) -> None:
        """Make the next turn due now; returns at once."""

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, for `timeout` seconds at most."""

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""


class StartTurns(Protocol):
    """Starts a thread that makes turns.

    Args:
        name: the thread's name.
        turn: called until it returns None. If it raises, the error is logged, the thread ends, and
            its engine reports that (see `ended_threads`).
        sleep: waits between turns; None for a plain wait that `wake` ends.
        cores: CPU cores that the thread may run on; None for those of the creating thread.
        end: called last on the thread, also after a turn has raised.
    """

    def __call__(
        self,
        name: str,
        turn: Turn,
        *,
        sleep: Sleep | None = None,
        cores: frozenset[int] | None = None,
        end: Callable[[], object] = lambda: None,
    ) -> Turns: ...


class TurnThread:
    """Makes turns on a daemon thread; see `StartTurns`."""

    def __init__(
        self,
        name: str,
        turn: Turn,
        *,
        sleep: Sleep | None = None,
        cores: frozenset[int] | None = None,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        self._turn = turn
        self._end = end
        self._sleep = sleep or _Bell()
        self._cores = cores
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._sleep.wake()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        if self._cores is not None:
            # vLLM pins its compute threads. A thread that inherited the pin would compete with
            # them. If the cpuset has shrunk meanwhile, the thread keeps the cores it inherited.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cores)
        try:
            try:
                while (seconds := self._turn()) is not None:
                    if seconds > 0:
                        self._sleep.wait(seconds)
            finally:
                self._end()
        except BaseException:
            name = self._thread.name
            logger.exception("The thread %s failed and has ended; please report it", name)
            _ended.append(name)


def ended_threads() -> list[str]:
    """Names of the threads of this process that an exception has ended, and that are not taken."""
    return list(_ended.copy())


def take_ended_threads() -> list[str]:
    """The same, each name once. An engine counts them as failures."""
    return [_ended.popleft() for _ in range(len(_ended))]


class _Bell:
    def __init__(self) -> None:
        self._rung = threading.Event()

    def wait(self, seconds: float) -> None:
        self._rung.wait(None if seconds == WOKEN else seconds)
        self._rung.clear()

    def wake(self) -> None:
        self._rung.set()


class Copies:
    """Counts the copies that run in this process. Background work, such as prefault, pauses while
    one runs.

    It is a context manager around a copy. Any thread may call any method.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._flags: list[memoryview] = []

    @property
    def running(self) -> bool:
        """Whether a copy runs."""
        return self._count > 0

    def show(self, flag: memoryview) -> None:
        """Keep the first byte of this memory at 1 while a copy runs, else at 0."""
        with self._lock:
            self._flags.append(flag)
            flag[0] = self._count > 0

    def hide(self, flag: memoryview) -> None:
        """Stop writing to this memory."""
        with self._lock:
            self._flags = [each for each in self._flags if each is not flag]

    def __enter__(self) -> Self:
        self._add(1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._add(-1)

    def _add(self, change: int) -> None:
        with self._lock:
            self._count += change
            for flag in self._flags:
                flag[0] = self._count > 0


COPIES: Final = Copies()
"""The copies of this process."""

os.register_at_fork(after_in_child=COPIES._begin)


class Watch:
    """Frees what peers that are gone held, on a thread of its own. The thread lives only while
    there is something to look after.

    Args:
        look: called every `period` seconds; must not block. It returns False if nothing is left to
            look after, which ends the thread.
        period: seconds.
        start: starts the thread.
    """

    def __init__(
        self,
        look: Callable[[], bool],
        period: float = WATCH_S,
        start: StartTurns = TurnThread,
    ) -> None:
        self._look = look
        self._period = period
        self._start = start
        self._lock = threading.Lock()
        self._wanted = False
        self._fresh = False
        self._thread: Turns | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread unless it runs. Cheap."""
        with self._lock:
            self._wanted = True
            if self._thread is None and not self._closed:
                self._fresh = True
                self._thread = self._start("omni-watch", self._turn)

    def close(self) -> None:
        """End the thread; block for at most one second. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.wake()
            thread.join(_WATCH_CLOSE_S)

    def _turn(self) -> float | None:
        with self._lock:
            if self._closed:
                return None
            if self._fresh:
                self._fresh = False
                return self._period
            self._wanted = False
        try:
            more = self._look()
        except Exception:  # the next look may succeed
            logger.exception("Letting go of peers that have gone failed; it is tried again")
            more = True
        with self._lock:
            if not more and not self._wanted:
                self._thread = None
                return None
        return self._period
