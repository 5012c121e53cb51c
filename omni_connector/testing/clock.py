# SPDX-License-Identifier: Apache-2.0
"""A clock that only moves when a test moves it."""

import threading


class FakeClock:
    """Stands in for `time.monotonic`, and its `sleep` for `time.sleep`.

    Args:
        start: the first reading, in seconds.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Seconds; the same until the clock is advanced."""
        with self._lock:
            return self._now

    def ns(self) -> int:
        """The same in nanoseconds, for `time.monotonic_ns`."""
        return round(self() * 1e9)

    def advance(self, seconds: float) -> None:
        """Move on.

        Raises:
            ValueError: `seconds` is negative; a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back {-seconds} s")
        with self._lock:
            self._now += seconds

    def sleep(self, seconds: float) -> None:
        """Advance instead of waiting."""
        self.advance(seconds)
