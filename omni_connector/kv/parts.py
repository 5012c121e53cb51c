# SPDX-License-Identifier: Apache-2.0
"""Parts of a slot: consecutive pages whose bytes can be checked without those of the others."""

from collections.abc import Sequence
from typing import Final

PART_BYTES: Final = 8192
"""Fewest bytes of a part, except for the last. The sums at its end take 64."""

_STRIPE: Final = 64


def inner_ends(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where the parts of a slot end, without the end of the last.

    Args:
        sizes: bytes of the slot's pages.

    >>> inner_ends([4096, 4096, 16384, 16384])
    (8192, 24576)
    """
    if any(size % _STRIPE for size in sizes):  # a checksum takes as many bytes at once
        return ()
    ends: list[int] = []
    begun = at = 0
    for size in sizes[:-1]:
        at += size
        if at - begun >= PART_BYTES:
            ends.append(at)
            begun = at
    return tuple(ends)
