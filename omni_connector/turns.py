# SPDX-License-Identifier: Apache-2.0
"""Threads that do their work in turns.

Whatever runs beside an engine's thread is written as a turn: one piece of work, which ends by
saying when the next is due. `TurnThread` makes the turns on a thread of its own. The simulation
makes them in an order that it draws.
"""

import math
import os
import threading
from collections.abc import Callable
from typing import Final, Protocol

Turn = Callable[[], float | None]
"""Does one piece of work. Returns seconds until the next turn: 0 for at once, `WOKEN` for when it
is woken, None for never, which ends the thread."""

WOKEN: Final = math.inf


class Sleep(Protocol):
    """How a thread waits between turns."""

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, or when `wake` is called, or was since the last wait."""

    def wake(self) -> None:
        """End the wait that is under way, else the next one; from any thread."""


class Turns(Protocol):
    """A thread that makes turns, or what stands in for one."""

    def wake(self) -> None:
        """Have a turn made soon; returns at once."""

    def join(self, timeout: float) -> None:
        """Wait for the end, for so many seconds."""

    def is_alive(self) -> bool:
        """Whether it makes turns yet."""


class StartTurns(Protocol):
    """Starts a thread that makes turns.

    Args:
        name: of the thread.
        turn: what it does.
        sleep: how it waits; None: until it is woken.
        cores: those that it may run on; None leaves those of the creating thread.
    """

    def __call__(
        self,
        name: str,
        turn: Turn,
        *,
        sleep: Sleep | None = None,
        cores: frozenset[int] | None = None,
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
    ) -> None:
        self._turn = turn
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
            _set_affinity(self._cores)
        while (seconds := self._turn()) is not None:
            if seconds > 0:
                self._sleep.wait(seconds)


class _Bell:
    def __init__(self) -> None:
        self._rung = threading.Event()

    def wait(self, seconds: float) -> None:
        self._rung.wait(None if seconds == WOKEN else seconds)
        self._rung.clear()

    def wake(self) -> None:
        self._rung.set()


def _set_affinity(cores: frozenset[int]) -> None:
    # Engines pin their compute threads; a copy that inherits the pin competes with them.
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # the cpuset shrank since: the inherited cores are still right
        return
