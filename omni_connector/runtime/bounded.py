# SPDX-License-Identifier: Apache-2.0
"""What is remembered of things that others name, as many as they like: no more than so much."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_MAX_NAMES: Final = 1 << 16


class BoundedMap(OrderedDict[Key, Value]):
    """A map of the entries that were set last. Reading one does not move it.

    Any thread may read it, and set what nobody has set. Where several set the same keys, they take
    turns.

    Args:
        most: how many entries it keeps, at least one.

    >>> names = BoundedMap[str, int](2)
    >>> names["a"], names["b"], names["a"], names["c"] = 1, 2, 3, 4
    >>> dict(names)
    {'a': 3, 'c': 4}
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class ExpiringSet(Generic[Key]):
    """Names that are remembered for some time. One thread adds them, any thread may ask.

    Args:
        seconds: how long a name is remembered. The oldest are forgotten earlier if there are too
            many.
        clock: seconds, monotonic.
        most: how many there may be.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], most: int = _MAX_NAMES) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: BoundedMap[Key, float] = BoundedMap(most)

    def add(self, names: Iterable[Key]) -> None:
        """Remember these names from now on."""
        until = self._clock() + self._seconds
        for name in names:
            self._until[name] = until

    def __contains__(self, name: Key) -> bool:
        return self._until.get(name, -math.inf) > self._clock()
