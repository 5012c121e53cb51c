# SPDX-License-Identifier: Apache-2.0
"""A thread that looks after what peers may leave behind while nobody asks for anything."""

import logging
import threading
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

WATCH_S: Final = 1.0

_CLOSE_S: Final = 1.0


class Watch:
    """Looks again and again, on a thread of its own, while there is something to look at.

    Args:
        look: called every `period` seconds, must not block; False when there is nothing (more).
        period: seconds.
    """

    def __init__(self, look: Callable[[], bool], period: float = WATCH_S) -> None:
        self._look = look
        self._period = period
        self._lock = threading.Lock()
        self._wanted = False
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """There is something to look at (again). Cheap."""
        with self._lock:
            self._wanted = True
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="omni-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent; bounded."""
        self._stopped.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            with self._lock:
                self._wanted = False
            try:
                more = self._look()
            except Exception:  # the next look may do better
                logger.exception("Looking after what peers left behind failed")
                more = True
            with self._lock:
                if not more and not self._wanted:
                    self._thread = None
                    return
