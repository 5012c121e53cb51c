# SPDX-License-Identifier: Apache-2.0
"""Warnings of what others can cause as often as they like: they must not fill the log."""

import logging
import time
from collections.abc import Callable
from typing import Final

WARN_EVERY_S: Final = 60.0
"""Shortest time between two warnings of one kind, in seconds: strangers may cause them."""


class Warnings:
    """Logs one warning in `WARN_EVERY_S` seconds; the others are dropped.

    Args:
        logger: where to.
        clock: seconds, monotonic.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._next = clock()

    def warn(self, text: str, *arguments: object) -> None:
        """Log a warning, as `Logger.warning` does, unless there was one a while ago."""
        now = self._clock()
        if now >= self._next:
            self._next = now + WARN_EVERY_S
            self._logger.warning(text, *arguments)
