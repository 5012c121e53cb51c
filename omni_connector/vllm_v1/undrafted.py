# SPDX-License-Identifier: Apache-2.0
"""Blocks in vLLM's cache that lack the KV of this engine's drafter.

A prefill engine without a drafter hands off the model's KV alone. The drafter's pages are zero
then, and what the drafter computes for later tokens may depend on them. No answer does, because the
model verifies each draft. So vLLM's own cache keeps these blocks. Other engines must not get them:
they would take them for blocks with the drafter's KV, and keep them for as long as they are used.

The same is known of requests that go on with blocks which a connector beside this one failed to
load: what they compute from there on is no KV of any model, and stays in vLLM's cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

Tables = Sequence[Sequence["KVCacheBlock"]]
"""The blocks of a request, by vLLM's groups."""


@dataclass(frozen=True, slots=True)
class DraftedGroup:
    """A group whose blocks may lack KV.

    Attributes:
        number: among vLLM's groups.
        block_size: tokens of a block.
        hash_block_size: tokens that one of vLLM's hashes covers; 0 where it hashes no blocks.
        loses_blocks: whether a request loses blocks while it goes on: those behind a window, or
            with earlier states.
    """

    number: int
    block_size: int
    hash_block_size: int
    loses_blocks: bool = False


@dataclass(slots=True, eq=False)
class _Lacking:
    """A request some of whose blocks lack KV.

    Attributes:
        request: vLLM's.
        first: its first token without it.
        noted: blocks with tokens before this one are noted by their hashes.
    """

    request: "Request"
    first: int
    noted: int


class UndraftedBlocks:
    """Knows which requests have blocks that lack the drafter's KV, or all KV.

    A request has some from a token on: it has loaded them, or vLLM has found them in its cache, or
    it has computed them after such blocks.

    Args:
        groups: those that may lack it: with layers of the drafter, of which an engine without one
            has none; or all.
    """

    def __init__(self, groups: Sequence[DraftedGroup]) -> None:
        self._groups = groups
        # Tokens after which a request has filled a block that it may lose; 0 if it loses none.
        self._note_each = min((each.block_size for each in groups if each.loses_blocks), default=0)
        self._lacking: list[_Lacking] = []
        # The hash by which vLLM finds a block. One with another hash, or with none, is used anew.
        self._hashes: dict[int, bytes] = {}
        # The request that vLLM asked about last, and its tokens in vLLM's cache.
        self._asked = "", 0

    def asked(self, request_id: str, num_cached: int) -> None:
        """vLLM asks what can be loaded for a request, and has so many tokens of it in its cache."""
        self._asked = request_id, num_cached

    def loaded(self, request: "Request", tables: Tables, num_tokens: int) -> int:
        """So many tokens of the request that vLLM has just asked about are loaded without the
        drafter's KV, after those in its cache; returns the first of them."""
        request_id, first = self._asked
        assert request.request_id == request_id, "vLLM allocates right after it has asked"
        self._begin(request, first)
        for group in self._groups:
            whole = range(first // group.block_size, (first + num_tokens) // group.block_size)
            for index in whole:
                name = _hash_of(request, group, index)
                block = tables[group.number][index]
                if name is not None and not block.is_null:
                    self._hashes[block.block_id] = name
        return first

    def goes_on_without(self, request: "Request", first: int) -> None:
        """A request goes on although its blocks from token `first` on hold no KV."""
        known = self._of(request)
        if known is None or first < known.first:
            self._begin(request, first)

    def _of(self, request: "Request") -> _Lacking | None:
        return next((each for each in self._lacking if each.request is request), None)

    def _begin(self, request: "Request", first: int) -> None:
        self._lacking = [each for each in self._lacking if each.request is not request]
        self._lacking.append(_Lacking(request, first, first))

    def has(self, request: "Request", blocks_of: Callable[[str], Tables]) -> bool:
        """Whether a request that vLLM has just given blocks has found such blocks in the cache, or
        had some before.

        Args:
            blocks_of: returns the blocks of a request.
        """
        if not (self._lacking or self._hashes):
            return False  # most often
        if self._of(request) is not None:
            return True
        request_id = request.request_id
        asked, cached = self._asked
        if asked != request_id or not cached:
            return False
        tables = blocks_of(request_id)
        firsts = [
            first
            for group in self._groups
            for first in self._first_found(group, tables[group.number], cached)
        ]
        # What a running request has computed since is not noted yet.
        firsts += [
            each.first
            for each in self._lacking
            if each.first < cached and self._same_block(request, each.request, each.first)
        ]
        if firsts:
            self._begin(request, min(firsts))
        return bool(firsts)

    def _first_found(
        self, group: DraftedGroup, table: Sequence["KVCacheBlock"], cached: int
    ) -> Iterator[int]:
        """The first token of the first block that vLLM has found and that lacks the KV, if one
        does."""
        for index, block in enumerate(table[: cached // group.block_size]):
            name = self._hashes.get(block.block_id)
            if name is None:
                continue
            if block.block_hash == name:
                yield index * group.block_size
                return
            del self._hashes[block.block_id]

    def _same_block(self, request: "Request", other: "Request", token: int) -> bool:
        """Whether two requests have the same block at a token, as far as vLLM knows."""
        for group in self._groups:
            name = _hash_of(other, group, token // group.block_size)
            if name is not None and name == _hash_of(request, group, token // group.block_size):
                return True
        return False

    def finish(self, request: "Request", blocks_of: Callable[[str], Tables]) -> None:
        """A request is over; its blocks stay in vLLM's cache.

        Args:
            blocks_of: returns the blocks of a request.
        """
        if (lacking := self._of(request)) is not None:
            self._lacking.remove(lacking)
            self._note(lacking, blocks_of)

    def note(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Tables]) -> None:
        """vLLM has scheduled a step, and hashed the blocks that it fills. The window of a request
        loses some in a later step; they stay in vLLM's cache.

        Args:
            scheduled: tokens of the step, by request.
            blocks_of: returns the blocks of a request.
        """
        if not self._note_each:
            return
        for each in self._lacking:
            request_id = each.request.request_id
            computed = each.request.num_computed_tokens
            each.noted = min(each.noted, computed)  # it may have been preempted
            if (computed + scheduled.get(request_id, 0)) // self._note_each > (
                each.noted // self._note_each
            ):
                self._note(each, blocks_of)

    def _note(self, lacking: _Lacking, blocks_of: Callable[[str], Tables]) -> None:
        request = lacking.request
        tables = blocks_of(request.request_id)
        begin = max(lacking.first, min(lacking.noted, request.num_computed_tokens))
        lacking.noted = request.num_computed_tokens  # the step may not fill its last blocks
        for group in self._groups:
            for block in tables[group.number][begin // group.block_size :]:
                if block.block_hash is not None and not block.is_null:
                    self._hashes[block.block_id] = block.block_hash


def _hash_of(request: "Request", group: DraftedGroup, index: int) -> bytes | None:
    """The hash of a block of a request, with that of its group; None where it has none."""
    if not group.hash_block_size or group.block_size % group.hash_block_size:
        return None  # vLLM finds no such block by its hash
    last = (index + 1) * (group.block_size // group.hash_block_size) - 1  # it covers those before
    if last >= len(request.block_hashes):
        return None
    return make_block_hash_with_group_id(BlockHash(request.block_hashes[last]), group.number)
