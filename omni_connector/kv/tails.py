# SPDX-License-Identifier: Apache-2.0
"""Names of tails: of the tokens of a request after its last full block.

vLLM hashes full blocks. A tail is named by the key of the block before it and by its own tokens. A
prompt may begin with a tail of any length, so a look-up tries all lengths at once: a name begins
with a fingerprint, and the fingerprints of all beginnings of a block cost one pass of numpy. The
index finds a block by the first bytes of its key (see `block_index.tags_of`). The rest of the name
is a cryptographic hash, which is made for lengths that the index has alone. The reader of a slot
compares the whole name.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import isqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

FINGERPRINT_BYTES: Final = 8
"""Bytes of a name that `fingerprints` gives."""

_HASH_BYTES: Final = 16
"""Bytes of a name after the fingerprint. The header of a slot has room for so many."""

_TOKEN_BYTES: Final = 8

# Odd constants, and shifts, of a mixing of 64 bits.
_TOKEN: Final = np.uint64(0x9E3779B97F4A7C15)
_PLACE: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)


class Tail(NamedTuple):
    """The end of a prefix that ends within a block.

    Attributes:
        end: tokens of the prefix.
        name: of the block with its last tokens, in each group.
    """

    end: int
    name: bytes


def first_parent(salt: str | None, adapter: str) -> bytes:
    """What stands for the key of the block before a tail of the first block: what vLLM's hash of
    any block says beside tokens.

    Args:
        salt: the request's `cache_salt`.
        adapter: digest of its LoRA adapter's content; "" without one.
    """
    told = b"" if salt is None else b"=" + salt.encode("utf-8", "surrogatepass")
    return blake2b(told, key=adapter.encode()[: blake2b.MAX_KEY_SIZE]).digest()


def fingerprints(parent: bytes, tokens: Sequence[int]) -> NDArray[np.uint64]:
    """The fingerprint of each tail that these tokens begin with: of one token, of two, and so on.

    Args:
        parent: key of the block before the first token.
        tokens: consecutive ones `(n,)`, not negative.

    Returns:
        `(n,)`. They tell tails from each other, and withstand nobody who looks for equal ones.
    """
    ids = np.asarray(tokens, np.int64).view(np.uint64)
    places = np.arange(1, len(ids) + 1, dtype=np.uint64)
    mixed = _mixed(ids * _TOKEN + places * _PLACE)
    seed = np.frombuffer(blake2b(parent, digest_size=8).digest(), np.uint64)
    return _mixed(np.cumsum(mixed, dtype=np.uint64) ^ seed)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ words >> _HALF) * _MIX
    words = (words ^ words >> _HALF) * _MIX
    return words ^ words >> _HALF


def tail_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the tail of these tokens, at least one; see `fingerprints`."""
    (name,) = tail_names(parent, tokens, len(tokens))
    return name


def tail_names(parent: bytes, tokens: Sequence[int], first: int) -> list[bytes]:
    """The names of the tails that these tokens begin with: of `first` tokens, at least one, of one
    more, and so on to all of them."""
    words = fingerprints(parent, tokens)
    known = blake2b(digest_size=_HASH_BYTES, key=parent[:64], person=b"omni-tail-1")
    content = array("q", tokens).tobytes()
    names = []
    begin = 0
    for number in range(first, len(tokens) + 1):
        known.update(content[begin * _TOKEN_BYTES : number * _TOKEN_BYTES])
        begin = number
        names.append(words[number - 1].tobytes() + known.digest())
    return names


def tokens_of_a_cell(block_size: int) -> int:
    """Tokens of a cell, of blocks of this size. A store is asked for few keys then: for as many
    marks as a block has cells, and for the tails that end in one cell."""
    return isqrt(block_size)


def cell_marks(parent: bytes, tokens: Sequence[int], cell: int) -> list[bytes]:
    """The names of the marks of all cells that these tokens begin, the first one first.

    A store finds nothing but whole names. So a block is divided into cells, and each tail in a
    store has a mark beside it: an entry without content, whose name is made of the tokens before
    the cell in which the tail ends. With cells of 4 tokens:

        tokens        0 1 2 3 | 4 5 6 7 | 8 9
        a tail of 6   ^ ^ ^ ^   ^ ^              is marked by the tokens 0 to 3

    Args:
        parent: as of `fingerprints`.
        cell: tokens of a cell.
    """
    known = blake2b(
        digest_size=FINGERPRINT_BYTES + _HASH_BYTES, key=parent[:64], person=b"omni-mark-1"
    )
    marks = []
    for begin in range(0, len(tokens) + 1, cell):
        marks.append(known.digest())
        known.update(array("q", tokens[begin : begin + cell]).tobytes())
    return marks
