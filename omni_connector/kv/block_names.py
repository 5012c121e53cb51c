# SPDX-License-Identifier: Apache-2.0
"""Names of blocks whose KV depends on more than vLLM's hash of them says.

A drafter that reads the target's hidden states (EAGLE, MTP) computes the KV of a position from the
next token, and MTP of k modules from the next k. vLLM's hash of a block covers the tokens up to the
block's end. So the drafter's KV of its last positions may differ between blocks of equal hashes.
The name of such a block is a hash of vLLM's hash and of the tokens after the block.

vLLM's hash names a LoRA adapter by its name and path, whose content may change.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def block_names(
    hashes: Sequence[bytes],
    tokens: Sequence[int],
    *,
    first: int,
    block_size: int,
    tokens_ahead: int,
) -> list[bytes]:
    """Names of consecutive blocks, as long as vLLM's hashes; without `tokens_ahead` these hashes.

    Blocks of which the tokens after them are not known yet have no name, and are left out. With
    blocks of 4 tokens and one token ahead:

        tokens   0 1 2 3 | 4 5 6 7
        hashes     h0    |   h1
        names    H(h0,4) |  (token 8 is not known)

    Args:
        hashes: vLLM's, one a block.
        tokens: of the request, from its first token on.
        first: index of the first of these blocks in the request.
        block_size: tokens of a block.
        tokens_ahead: tokens after a block that its KV depends on.
    """
    if not tokens_ahead:
        return list(hashes)
    known = max(0, (len(tokens) - tokens_ahead) // block_size - first)
    names = []
    for number, block_hash in enumerate(hashes[:known], first + 1):
        end = number * block_size
        following = array("q", tokens[end : end + tokens_ahead]).tobytes()
        name = blake2b(block_hash + following, digest_size=len(block_hash), person=b"omni-ahead-1")
        names.append(name.digest())
    return names


def names_with_adapter(names: list[bytes], adapter: str) -> list[bytes]:
    """Names of blocks that say the content of the LoRA adapter, too; without one these names.

    Args:
        names: as of `block_names`.
        adapter: digest of its content; "" without one.
    """
    if not adapter:
        return names
    whose = adapter.encode()[: blake2b.MAX_KEY_SIZE]
    return [blake2b(each, digest_size=len(each), key=whose).digest() for each in names]
