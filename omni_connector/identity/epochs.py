# SPDX-License-Identifier: Apache-2.0
"""How long KV that was computed means what it meant."""

from typing import Protocol


class BlockHashes(Protocol):
    """vLLM's `BlockPool`, as far as its table of hashes tells of resets."""

    @property
    def cached_block_hash_to_block(self) -> object: ...


class WeightsEpoch:
    """The epoch of the weights: as long as it lasts, KV that was computed means what it meant.

    vLLM tells a connector of new weights at most by `reset_cache`, and not even that when the
    prefix cache alone is reset. But whatever may change what KV means has to reset vLLM's own
    prefix cache, and each reset that succeeds gives its block pool another table of hashes. So this
    table is the mark of an epoch.

    Args:
        pool: vLLM's blocks.
    """

    def __init__(self, pool: BlockHashes) -> None:
        self._pool = pool
        self._table: object = pool.cached_block_hash_to_block
        self._number = 0

    @property
    def number(self) -> int:
        """The number of the epoch, as far as the engine's thread has noticed."""
        return self._number

    def holds(self) -> bool:
        """Whether vLLM has reset nothing since `begin`. Any thread may ask."""
        return self._pool.cached_block_hash_to_block is self._table

    def begin(self) -> None:
        """A new epoch begins, and all KV that was computed before is void."""
        self._table = self._pool.cached_block_hash_to_block
        self._number += 1
