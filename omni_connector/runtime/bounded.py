# SPDX-License-Identifier: Apache-2.0
"""A map and a set of bounded size, for keys that peers and clients choose."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_MAX_NAMES: Final = 1 << 16
"""Default bound of an `ExpiringSet`, in names."""


class BoundedMap(OrderedDict[Key, Value]):
    """A map that drops its oldest entry when it is full. Setting an entry makes it the newest;
    reading one does not.

    Any thread may read it or add a key. Threads that set the same keys need a lock of their own.

    Args:
        most: most entries that it keeps; at least 1.

    >>> names = BoundedMap[str, int](2)
    >>> names["a"] = 1
    >>> names["b"] = 2
    >>> names["a"] = 3
    >>> names["c"] = 4
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
    """A set whose names expire. One thread adds names; any thread may ask for them.

    Args:
        seconds: how long a name is remembered. If there are too many, the oldest expire earlier.
        clock: seconds, monotonic.
        most: most names that it remembers.
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
