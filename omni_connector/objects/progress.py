# SPDX-License-Identifier: Apache-2.0
"""How far the copy of a large object has come, in the log at debug."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

LARGE_BYTES: Final = 64 << 20
"""Fewest bytes of an object whose progress is logged; smaller ones take some milliseconds."""

STEPS: Final = 8
"""Most lines about one copy."""


def progress_of(
    logger: logging.Logger,
    verb: str,
    subject: object,
    total: int,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[int], None]:
    """What a copy calls, from any thread, with the number of bytes that it has just copied.

    It logs each eighth of the bytes at debug. Where that is not logged, or the object is small, it
    does nothing.

    Args:
        logger: gets the lines.
        verb: what is done to the object.
        subject: which object; it is only turned into text where it is logged.
        total: bytes of the object.
        clock: seconds, monotonic.
    """
    if total < LARGE_BYTES or not logger.isEnabledFor(logging.DEBUG):
        return _ignore
    lock = threading.Lock()
    began, done = clock(), 0

    def copied(nbytes: int) -> None:
        nonlocal done
        with lock:
            before, done = done, done + nbytes
            now = done
        if now * STEPS // total > before * STEPS // total:
            logger.debug(
                "%s %s: %d of %d MiB after %.3f s",
                *(verb, subject, now >> 20, total >> 20, clock() - began),
            )

    return copied


def _ignore(nbytes: int) -> None:
    """Nobody wants to know."""
