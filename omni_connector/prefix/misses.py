# SPDX-License-Identifier: Apache-2.0
"""Why tokens of a prompt are computed that a cache might have had."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from omni_connector.kv.shapes import GroupShape
from omni_connector.prefix.prompts import SharedPrompt
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.runtime.stats import Stats

_MAX_BEGINNINGS: Final = 1 << 14


class Misses:
    """Counts the tokens of prompts that vLLM's own cache has, and those that nobody has, by cause.

    What is missed has the cause of the first block that is missing, as blocks after it are of no
    use. The last token of a prompt, and what is no full block, are not missed.

    Args:
        groups: what this engine keeps.
        unit: prefixes end at multiples of so many tokens.
        evicted: whether a block of a group was evicted lately from the own arena, by its key.
        stats: where to count.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        unit: int,
        evicted: Callable[[int, bytes], bool],
        stats: Stats,
    ) -> None:
        kinds = [shape.attention_type for shape in groups]
        self._group = kinds.index("all") if "all" in kinds else 0
        self._block_size = groups[self._group].block_size
        self._unit = unit
        self._evicted = evicted
        self._stats = stats
        # Of first blocks of prompts: the key under which their tokens were last seen.
        self._beginnings: BoundedMap[int, bytes] = BoundedMap(_MAX_BEGINNINGS)
        self._lock = threading.Lock()  # of these, which `explained` reads

    def admitted(self, prompt: SharedPrompt, start: int, end: int, known: int = 0) -> None:
        """vLLM's own cache has what comes before `start` of a prompt, and we load it up to `end`.

        Args:
            known: where vLLM begins to compute, if a connector beside this one loads more.
        """
        if prompt.request.skip_reading_prefix_cache:
            return
        if prompt.reached is not None:
            # It was admitted before. Only a load that has failed makes a difference.
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
        last = (prompt.request.num_prompt_tokens - 1) // self._unit * self._unit
        if end < last:
            cause = self._cause(prompt, end // self._block_size, seen_as_other)
            self._stats.miss(cause, last - end)

    def _begins(self, prompt: SharedPrompt) -> bool:
        """Remember the first block; whether its tokens were last seen under another key."""
        tokens = hash(tuple(prompt.request.all_token_ids[: self._block_size]))
        key = prompt.keys(prompt.hashes[self._group][:1])[0]
        with self._lock:
            seen_as = self._beginnings.get(tokens, key)
            self._beginnings[tokens] = key
        return seen_as != key

    def _cause(self, prompt: SharedPrompt, block: int, seen_as_other: bool) -> str:
        """Why this block of a prompt, and what comes after it, is missing."""
        if not prompt.loads:
            return "failed"
        if prompt.late:
            return "too_late"
        key = prompt.keys(prompt.hashes[self._group][block : block + 1])
        return self._why(block, key, seen_as_other)

    def _why(self, block: int, key: Sequence[bytes], seen_as_other: bool) -> str:
        if key and self._evicted(self._group, key[0]):
            return "evicted"
        return "other_salt" if block == 0 and seen_as_other else "never_seen"

    def explained(self, *, block: int, key: bytes, beginning: Sequence[int], first: bytes) -> str:
        """The cause of a miss of a prompt that no request has. Any thread may call this.

        Args:
            block: index of the block that is missing.
            key: of this block.
            beginning: tokens of the prompt's first block.
            first: key of that block.
        """
        with self._lock:
            seen_as = self._beginnings.get(hash(tuple(beginning)), first)
        return self._why(block, [key], seen_as != first)
