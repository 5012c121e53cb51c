# SPDX-License-Identifier: Apache-2.0
"""Which loads may begin, so that requests whose KV has been loaded find blocks to go on.

vLLM gives a load its blocks before it gives any to the tokens after it, and takes none of them
back. If loads hold all blocks, none of their requests can go on, and nothing ever ends. vLLM keeps
blocks free for that from 0.32 on, but too few where a group keeps a window: it takes the blocks in
front of the window for blocks that the request has. So a load waits while blocks are short, until
the requests of the loads before it have been scheduled.

A load that fails gives its blocks back, and its request is to be computed. vLLM asks for the blocks
of its whole prompt then, and lets no other request pass it, not even those whose KV was loaded.
Where a group keeps a window, that is more than the load had. So a load also leaves enough blocks
free for the prompt of each load under way.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omni_connector.kv.shapes import GroupShape
from omni_connector.requests.state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


class LoadRoom:
    """Knows what the requests of loads under way need to go on.

    Args:
        pool: vLLM's blocks.
        groups: the cache groups.
        most_blocks: of each group, the most blocks that vLLM asks for to compute one prompt,
            however long it is; None: it asks for those of all tokens.
        drafts: speculative tokens that vLLM may schedule with a request's next token.
        written_ahead: tokens after these for which it allocates blocks, too.

    Attributes:
        under_way: the requests of loads under way; see `RequestState.room`.
    """

    def __init__(
        self,
        pool: "BlockPool",
        groups: tuple[GroupShape, ...],
        most_blocks: Sequence[int | None],
        drafts: int,
        written_ahead: int = 0,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._most_blocks = most_blocks
        self._drafts = drafts
        self._written_ahead = written_ahead
        # Whether vLLM may keep the end of what was loaded within a block (`--prefix-match-unit`).
        # Then it copies that block before the request writes to it.
        self._within_blocks = any(
            pool.hash_block_size < group.block_size for group in groups if group.is_cached
        )
        self.under_way: list[RequestState] = []
        self._next: RequestState | None = None  # it waits; no later one overtakes it
        # The last load that was admitted: its request, and the token at which it ends.
        self._admitted: tuple[RequestState | None, int] = None, 0

    def admits(self, state: RequestState, local: int, end: int) -> bool:
        """Whether the tokens of a request from `local` to `end` may be loaded now."""
        if self.under_way and not self._has_room(state, local, end):
            return False
        self._admitted = state, end
        return True

    def _has_room(self, state: RequestState, local: int, end: int) -> bool:
        if self._next not in (None, state):
            return False
        # Blocks of the prompt in vLLM's own cache count as free until the request holds them.
        held = sum(group.num_blocks(local) for group in self._groups if group.is_cached)
        loaded = sum(len(group.needed(end, local)) for group in self._groups)
        free = self._pool.get_num_free_blocks() - held - loaded
        after_load, after_failure = self._needs(state.request, end)
        needs = [each.room for each in self.under_way if each.room is not None]
        # Where several loads fail, their requests are computed one after the other.
        if free < max(
            sum(load for load, _ in needs) + after_load,
            max(failure for _, failure in needs),
            after_failure,
        ):
            self._next = state
            return False
        return True

    def begins(self, state: RequestState) -> None:
        """The load that was admitted last has its blocks."""
        admitted, end = self._admitted
        assert admitted is state, "vLLM allocates right after it has asked"
        self.ends(state)
        state.room = self._needs(state.request, end)
        self.under_way.append(state)

    def scheduled(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """vLLM has scheduled requests, and from now on can preempt them."""
        for state in self.under_way.copy():
            if state.request.request_id in num_scheduled_tokens:
                self.ends(state)

    def ends(self, state: RequestState) -> None:
        """A request needs nothing, or nothing more: it was scheduled, computes its prompt here, or
        is over."""
        if state.room is not None:
            state.room = None
            self.under_way.remove(state)
        if self._next is state:
            self._next = None
        if self._admitted[0] is state:
            self._admitted = None, 0

    def _needs(self, request: "Request", end: int) -> tuple[int, int]:
        tokens = request.num_tokens + self._drafts + self._written_ahead
        after_load = after_failure = 0
        for group, most in zip(self._groups, self._most_blocks, strict=True):
            blocks = group.num_blocks(tokens)
            after_load += blocks - group.num_blocks(end)
            if group.is_cached and end % group.block_size and self._within_blocks:
                after_load += 1
            after_failure += blocks if most is None else min(blocks, most)
            after_failure -= len(group.needed(end))
            if group.attention_type == "last":
                after_load += self._drafts
                after_failure += self._drafts
        return after_load, after_failure
