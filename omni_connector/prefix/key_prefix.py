# SPDX-License-Identifier: Apache-2.0
"""The prefixes that the keys of an engine's blocks have in common."""

from collections.abc import Callable


class KeyPrefix:
    """The prefixes of an engine's keys. Engines that share have the same.

    Args:
        named: returns the prefixes, in a store and in arenas, of all engines with the same settings
            and weights, given what the latter have in common.
        randbytes: returns a given number of bytes that nobody can guess.

    Attributes:
        current: of keys in a store, now.
        in_arenas: of keys in arenas, now; as bytes.
        is_own: whether no other engine has these prefixes, so that nothing is shared.
    """

    def __init__(
        self, named: Callable[[str], tuple[str, str]], randbytes: Callable[[int], bytes]
    ) -> None:
        self._named = named
        self._randbytes = randbytes
        self.follow(None)

    def follow(self, weights: str | None) -> None:
        """Take the prefixes of these weights; None takes some that no other engine has."""
        self.is_own = weights is None
        # No weights are named like this.
        prefixes = self._named(f"own {self._randbytes(8).hex()}" if weights is None else weights)
        self.current = prefixes[0]
        self.in_arenas = prefixes[1].encode()
