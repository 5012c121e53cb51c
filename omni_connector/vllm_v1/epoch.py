# SPDX-License-Identifier: Apache-2.0
"""The epoch of the weights: until when KV that was computed means what it meant.

vLLM tells a connector of new weights at most by `reset_cache`, and not even that when the prefix
cache alone is reset. But whatever may change what KV means has to reset vLLM's own prefix cache,
and each reset that succeeds gives its block pool another table of hashes. So the table is the mark
of an epoch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class WeightsEpoch:
    """Tells when vLLM has reset its prefix cache.

    Args:
        pool: vLLM's blocks.
    """

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool
        self._table: object = pool.cached_block_hash_to_block
        self._number = 0

    @property
    def number(self) -> int:
        """Of this epoch, as far as the engine's thread has noticed."""
        return self._number

    def holds(self) -> bool:
        """Whether there was no reset since `begin`; from any thread."""
        return self._pool.cached_block_hash_to_block is self._table

    def begin(self) -> None:
        """A new epoch begins. What was computed before is void."""
        self._table = self._pool.cached_block_hash_to_block
        self._number += 1
