# SPDX-License-Identifier: Apache-2.0
"""Pauses between retries of a call that fails."""

import math
import time
from collections.abc import Callable


class Backoff:
    """Pauses between tries, each twice as long as the one before, up to a limit.

    Args:
        first: seconds of the first pause.
        longest: seconds that no pause exceeds.
        clock: seconds, monotonic.

    >>> backoff = Backoff(0.5, 3.0)
    >>> [backoff.failed() for _ in range(5)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """

    def __init__(
        self, first: float, longest: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first = first
        self._longest = longest
        self._clock = clock
        self._pause = 0.0
        self._until = -math.inf

    @property
    def failing(self) -> bool:
        """Whether the last try has failed."""
        return self._pause > 0

    @property
    def active(self) -> bool:
        """Whether a pause is running."""
        return self._clock() < self._until

    def failed(self) -> float:
        """Begin the next pause, as a try has failed; return its seconds."""
        self._pause = min(2 * self._pause or self._first, self._longest)
        self._until = self._clock() + self._pause
        return self._pause

    def worked(self) -> None:
        """End the pause, as a try has worked; the next pause is as long as the first again."""
        self._pause = 0.0
        self._until = -math.inf
