# SPDX-License-Identifier: Apache-2.0
"""What the keys of an engine's blocks begin with."""

from collections.abc import Callable


class KeyPrefix:
    """The prefix of an engine's keys. Engines that share have the same.

    Args:
        shared: that of all engines with the same weights and settings.
        randbytes: makes so many bytes that nobody can guess.

    Attributes:
        current: the prefix now.
    """

    def __init__(self, shared: str, randbytes: Callable[[int], bytes]) -> None:
        self._shared = self.current = shared
        self._randbytes = randbytes

    @property
    def is_own(self) -> bool:
        """Whether no other engine has it, so that nobody stores anything under it."""
        return self.current != self._shared

    def renew(self) -> None:
        """From now on have one that no other engine has."""
        self.current = f"{self._shared}/{self._randbytes(8).hex()}"
