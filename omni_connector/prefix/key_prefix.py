# SPDX-License-Identifier: Apache-2.0
"""The prefix that the keys of an engine's blocks have in common."""

from collections.abc import Callable


class KeyPrefix:
    """The prefix of an engine's keys. Engines that share have the same.

    Args:
        shared: the prefix of all engines with the same weights and settings.
        randbytes: returns a given number of bytes that nobody can guess.

    Attributes:
        current: the prefix now.
    """

    def __init__(self, shared: str, randbytes: Callable[[int], bytes]) -> None:
        self._shared = self.current = shared
        self._randbytes = randbytes

    @property
    def is_own(self) -> bool:
        """Whether no other engine has the prefix, so that nothing is shared."""
        return self.current != self._shared

    def renew(self) -> None:
        """Replace the prefix by one that no other engine has."""
        self.current = f"{self._shared}/{self._randbytes(8).hex()}"
