# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens of prompts that no cache had, by cause."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from omni_connector.kv.shapes import GroupShape, leading_group
from omni_connector.prefix.explain import Miss
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
        self._lock = threading.Lock()  # of `_beginnings`, which `missing` reads on another thread

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
        tokens, key = self._beginning(prompt)
        with self._lock:
            seen_as = self._beginnings.get(tokens, key)
            self._beginnings[tokens] = key
        last = prompt.last_reachable(prompt.request.num_prompt_tokens, self._unit)
        if end < last:
            cause = self._cause(prompt, end // self._block_size, seen_as != key)
            self._stats.miss(cause, last - end)

    def _beginning(self, prompt: SharedPrompt) -> tuple[int, bytes]:
        """The first block of a prompt: its tokens (their hash), and its key."""
        tokens = hash(tuple(prompt.request.all_token_ids[: self._block_size]))
        return tokens, prompt.keys(prompt.names[self._group][:1])[0]

    def _cause(self, prompt: SharedPrompt, block: int, seen_as_other: bool) -> str:
        """Why this block of a prompt, the first missing one, is missing."""
        if not prompt.loads:
            return "failed"
        if prompt.late:
            return "too_late"
        key = prompt.keys(prompt.names[self._group][block : block + 1])
        if key and self.evicted(key[0]):
            return "evicted"
        return "other_salt" if block == 0 and seen_as_other else "never_seen"

    def evicted(self, key: bytes) -> bool:
        """Whether the block with this key, of the group by which misses are counted, was evicted
        lately. Any thread may ask."""
        return self._evicted(self._group, key)

    def missing(self, prompt: SharedPrompt, end: int) -> tuple[Miss, bytes] | None:
        """What a prompt misses of which vLLM has, or loads, the tokens before `end`, and the key of
        its block; None if it misses nothing. Changes nothing; any thread may ask."""
        last = prompt.last_reachable(prompt.request.num_prompt_tokens, self._unit)
        if end >= last or not prompt.hashes[self._group]:
            return None
        block = end // self._block_size
        tokens, first = self._beginning(prompt)
        with self._lock:
            seen_as = self._beginnings.get(tokens, first)
        cause = self._cause(prompt, block, seen_as != first)
        (key,) = prompt.keys(prompt.names[self._group][block : block + 1])
        return Miss(block, end, last - end, cause), key
