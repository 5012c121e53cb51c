# SPDX-License-Identifier: Apache-2.0
"""How long to wait between tries of what fails, or is not there yet."""

import math
import time
from collections.abc import Callable


class Backoff:
    """Pauses between tries, each twice as long as the one before.

    Args:
        first, longest: seconds of the first pause, and of all from some time on.
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
        """Whether a try has failed, and none has worked since."""
        return self._pause > 0

    @property
    def active(self) -> bool:
        """Whether the pause after a try that has failed is not over."""
        return self._clock() < self._until

    def failed(self) -> float:
        """A try has failed. Begins the next pause; returns its seconds."""
        self._pause = min(2 * self._pause or self._first, self._longest)
        self._until = self._clock() + self._pause
        return self._pause

    def worked(self) -> None:
        """A try has worked: the next one need not wait, and the next pause is the first again."""
        self._pause = 0.0
        self._until = -math.inf
