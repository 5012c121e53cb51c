# SPDX-License-Identifier: Apache-2.0
"""Copies that take as long as a test wants."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from omni_connector.copy.copier import BlockCopy

TIMEOUT: Final = 60.0  # seconds; stops a hang


def no_such_page(*_: object, **__: object) -> Any:
    """A copy that fails."""
    raise OSError("no such page")


class Exchangeable:
    """A copier that others can take the place of while an engine runs.

    Attributes:
        inner: the copier that copies now.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class HeldCopier:
    """A copier whose copies wait until it is opened.

    Args:
        inner: the copier that does the copying.
        saves, loads: which copies wait.
        deaf: whether a save that waits goes on when it is cancelled, like one within a block.
    """

    pinned_at_once = 0  # nothing is pinned

    def __init__(self, inner: Any, *, saves: bool, loads: bool, deaf: bool) -> None:
        self._inner = inner
        self._saves = saves
        self._loads = loads
        self._deaf = deaf
        self._opened = threading.Event()
        self.waiting = threading.Event()
        self.saved_blocks: list[int] = []
        self.before_load: Callable[[], object] = lambda: None

    @property
    def speed(self) -> int:
        """As the inner copier's."""
        speed: int = self._inner.speed
        return speed

    @property
    def opened(self) -> bool:
        """Whether the copies go on."""
        return self._opened.is_set()

    def open(self) -> None:
        """Let the copies go on."""
        self._opened.set()

    def fence(self) -> object:
        return self._inner.fence()

    def reached(self, fence: object) -> bool:
        return bool(self._inner.reached(fence))

    def save(self, copy: BlockCopy, *, cancelled: Any, landed: Any = None) -> Any:
        if self._saves and not self._wait(lambda: cancelled() and not self._deaf):
            return None
        self.saved_blocks += copy.block_ids.tolist()
        return self._inner.save(copy, cancelled=cancelled, landed=landed)

    def load(self, copy: BlockCopy) -> Any:
        if self._loads:
            self._wait(lambda: False)
        self.before_load()
        return self._inner.load(copy)

    def zero(self, *args: Any, **kwargs: Any) -> None:
        self._inner.zero(*args, **kwargs)

    def pin(self, slots: Any) -> int:
        code: int = self._inner.pin(slots)
        return code

    def unpin(self, slots: Any) -> None:
        self._inner.unpin(slots)

    def close(self) -> None:
        self._inner.close()

    def _wait(self, give_up: Callable[[], bool]) -> bool:
        self.waiting.set()
        end = time.monotonic() + TIMEOUT
        while not self._opened.wait(0.001):
            if give_up() or time.monotonic() > end:
                return False
        return True
