# SPDX-License-Identifier: Apache-2.0
"""Which blocks were met not long ago."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

BlockName = tuple[int, bytes]
"""(position of the group among the transferred ones, block hash)."""

_MAX_REMEMBERED: Final = 1 << 16


class ExpiringSet:
    """Names of blocks, each remembered for some time. One thread adds them, any thread may ask.

    Args:
        seconds: how long a name is remembered. The oldest are forgotten earlier if there are too
            many.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[BlockName, float] = OrderedDict()

    def add(self, names: Iterable[BlockName]) -> None:
        """Remember these names from now on."""
        until = self._clock() + self._seconds
        for name in names:
            self._until[name] = until
            self._until.move_to_end(name)
        while len(self._until) > _MAX_REMEMBERED:
            self._until.popitem(last=False)

    def __contains__(self, name: BlockName) -> bool:
        return self._until.get(name, -math.inf) > self._clock()
