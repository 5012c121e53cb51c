# SPDX-License-Identifier: Apache-2.0
"""A thread that regularly cleans up after peers that may have gone."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from omni_connector.turns import StartTurns, Turns, TurnThread

logger = logging.getLogger("vllm.omni_connector.net")

WATCH_S: Final = 1.0

_CLOSE_S: Final = 1.0


class Watch:
    """Calls a function regularly, on a thread of its own, while there is something to look after.

    Args:
        look: called every `period` seconds; must not block. It returns False when there is nothing
            left to look after, which ends the thread.
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
        """Start looking, if that has ended or not begun. Cheap."""
        with self._lock:
            self._wanted = True
            if self._thread is None and not self._closed:
                self._fresh = True
                self._thread = self._start("omni-watch", self._turn)

    def close(self) -> None:
        """End the thread. Idempotent; waits a second at most."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.wake()
            thread.join(_CLOSE_S)

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
        except Exception:  # the next look may do better
            logger.exception("Looking after what peers left behind failed")
            more = True
        with self._lock:
            if not more and not self._wanted:
                self._thread = None
                return None
        return self._period
