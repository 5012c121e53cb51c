# SPDX-License-Identifier: Apache-2.0
"""Which loads may begin, so that requests whose KV has been loaded find blocks to go on.

vLLM gives a load its blocks before it gives any to the tokens after it, and takes none of them
back. If loads hold all blocks, none of their requests can go on, and nothing ever ends. vLLM keeps
blocks free for that from 0.32 on, but too few where a group keeps a window: it takes the blocks in
front of the window for blocks that the request has. So a load waits while blocks are short, until
the requests of the loads before it have been scheduled.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omni_connector.kv.shapes import GroupShape

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


class LoadRoom:
    """Knows what the requests of loads under way need to go on.

    Args:
        pool: vLLM's blocks.
        groups: the cache groups.
        drafts: speculative tokens that vLLM may schedule with a request's next token.
    """

    def __init__(self, pool: "BlockPool", groups: tuple[GroupShape, ...], drafts: int) -> None:
        self._pool = pool
        self._groups = groups
        self._drafts = drafts
        self._needs: dict[str, int] = {}  # blocks beyond the loaded ones, by request
        self._reserved = 0  # their sum
        self._next: str | None = None  # the request that waits; no later one overtakes it
        self._admitted: tuple[str, int] = "", 0  # the last one that did not, and how much it loads

    def admits(self, request: "Request", local: int, end: int) -> bool:
        """Whether the tokens of a request from `local` to `end` may be loaded now."""
        request_id = request.request_id
        if self._needs and not self._has_room(request, local, end):
            return False
        self._next, self._admitted = None, (request_id, end)
        return True

    def _has_room(self, request: "Request", local: int, end: int) -> bool:
        if self._next not in (None, request.request_id):
            return False
        # Blocks that vLLM has of it may be free, too, until the request holds them.
        held = sum(-(-local // group.block_size) for group in self._groups)
        loaded = sum(len(group.needed(end, local)) for group in self._groups)
        free = self._pool.get_num_free_blocks() - held - loaded
        if free < self._reserved + self._need(request, end):
            self._next = request.request_id
            return False
        return True

    def begins(self, request: "Request") -> None:
        """The load that was admitted last has its blocks."""
        request_id, end = self._admitted
        assert request.request_id == request_id, "vLLM allocates right after it has asked"
        self.ends(request_id)
        need = self._needs[request_id] = self._need(request, end)
        self._reserved += need

    def scheduled(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """vLLM has scheduled requests, and from now on can preempt them."""
        for request_id in [each for each in self._needs if each in num_scheduled_tokens]:
            self.ends(request_id)

    def ends(self, request_id: str) -> None:
        """A request needs nothing, or nothing more: it was scheduled, computes its prompt here, or
        is over."""
        self._reserved -= self._needs.pop(request_id, 0)
        if self._next == request_id:
            self._next = None

    def _need(self, request: "Request", end: int) -> int:
        tokens = request.num_tokens + self._drafts
        blocks = 0
        for group in self._groups:
            blocks += -(-tokens // group.block_size) - -(-end // group.block_size)
            if group.attention_type == "last":
                blocks += self._drafts
        return blocks
