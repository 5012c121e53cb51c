# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens of prompts that no cache had, by cause."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from omni_connector.kv.shapes import GroupShape, leading_group
from omni_connector.prefix.prompts import SharedPrompt
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.runtime.stats import Stats

# Prompts whose first block is remembered, the latest; it bounds memory.
_MAX_BEGINNINGS: Final = 1 << 14


class Misses:
    """Counts tokens of prompts that vLLM's own cache has, and tokens that nobody has, by cause.

    All missed tokens of a prompt have the cause of the first missing block, because blocks after a
    gap cannot be used. The last token of a prompt and an incomplete last block are no misses.

    Args:
        groups: the cache groups that this engine keeps.
        unit: tokens; prefixes end at multiples of it.
        evicted: says whether a block, by its group and key, was evicted lately from the own arena.
        stats: where to count.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        unit: int,
        evicted: Callable[[int, bytes], bool],
        stats: Stats,
    ) -> None:
        self._group = leading_group(groups)
        self._block_size = groups[self._group].block_size
        self._unit = unit
        self._evicted = evicted
        self._stats = stats
        # For the tokens of a prompt's first block (their hash): its last key. The key differs from
        # the next one if the prompt comes with another salt or adapter.
        self._beginnings: BoundedMap[int, bytes] = BoundedMap(_MAX_BEGINNINGS)
        self._lock = threading.Lock()  # of `_beginnings`, which `explained` reads on another thread

    def admitted(self, prompt: SharedPrompt, start: int, end: int, known: int = 0) -> None:
        """vLLM has admitted a prompt: its own cache has the tokens before `start`, and we load
        those from `start` to `end`.

        Args:
            known: token at which vLLM begins to compute, if a connector beside this one loads more.
        """
        if prompt.request.skip_reading_prefix_cache:
            return
        if prompt.reached is not None:
            # It was admitted before, and was counted then. Only the tokens of a failed load are
            # new.
            if prompt.failure is not None and end < prompt.reached:
                self._stats.miss("failed", prompt.reached - end)
                prompt.reached = 0
            return
        if known > end:
            self._stats.count("tokens_from_others", known - end)
            end = known
        prompt.reached = end
        if start:
            self._stats.count("tokens_cached", start)
        if not prompt.hashes[self._group]:
            return
        seen_as_other = self._begins(prompt)
        last = prompt.last_reachable(prompt.request.num_prompt_tokens, self._unit)
        if end < last:
            cause = self._cause(prompt, end // self._block_size, seen_as_other)
            self._stats.miss(cause, last - end)

    def _begins(self, prompt: SharedPrompt) -> bool:
        """Remember the first block; returns whether its tokens had another key before."""
        tokens = hash(tuple(prompt.request.all_token_ids[: self._block_size]))
        key = prompt.keys(prompt.names[self._group][:1])[0]
        with self._lock:
            seen_as = self._beginnings.get(tokens, key)
            self._beginnings[tokens] = key
        return seen_as != key

    def _cause(self, prompt: SharedPrompt, block: int, seen_as_other: bool) -> str:
        """Why this block of a prompt, the first missing one, is missing."""
        if not prompt.loads:
            return "failed"
        if prompt.late:
            return "too_late"
        key = prompt.keys(prompt.names[self._group][block : block + 1])
        return self._why(block, key, seen_as_other)

    def _why(self, block: int, key: Sequence[bytes], seen_as_other: bool) -> str:
        if key and self._evicted(self._group, key[0]):
            return "evicted"
        return "other_salt" if block == 0 and seen_as_other else "never_seen"

    def explained(self, *, block: int, key: bytes, beginning: Sequence[int], first: bytes) -> str:
        """The cause if a prompt missed this block. Changes nothing; any thread may call this.

        Args:
            block: index of the missing block.
            key: of the missing block.
            beginning: tokens of the prompt's first block.
            first: key of the prompt's first block.
        """
        with self._lock:
            seen_as = self._beginnings.get(hash(tuple(beginning)), first)
        return self._why(block, [key], seen_as != first)
