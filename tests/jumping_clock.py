# SPDX-License-Identifier: Apache-2.0
"""A plugin for pytest with which each reading of a clock finds that 0.2 s have passed meanwhile.

So it is where a busy machine gives a process no time before each of them. What fails then hangs on
time: a deadline that is too short, a measured duration, an order of threads that is usual only.
Clocks that files and other processes are compared with stay as they are.
"""

import itertools
import time
from collections.abc import Callable
from typing import Final

JUMP_S: Final = 0.2


def _jumping(read: Callable[[], float]) -> Callable[[], float]:
    readings = itertools.count(1)
    return lambda: read() + JUMP_S * next(readings)


time.monotonic = _jumping(time.monotonic)
time.perf_counter = _jumping(time.perf_counter)
