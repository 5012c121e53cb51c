# SPDX-License-Identifier: Apache-2.0
"""Where the answer of a reasoning model begins to think.

Chat templates leave the thoughts of earlier turns out of the next prompt. A block's hash covers all
tokens before the block, so that no later prompt finds the first block with a thought in it, nor any
block after it. vLLM tells the tokens that open and close thoughts (`--reasoning-parser`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Tokens at the end of a prompt in which a template may have opened the thoughts of the answer. They
# follow the last message: a role, a line or two.
_OPENED_WITHIN: Final = 32


@dataclass(frozen=True)
class ThinkingTokens:
    """The token ids that open and close thoughts, each one or more."""

    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(slots=True)
class Thoughts:
    """Looks for the first thought in the answer to a prompt.

    Attributes:
        tokens: those to look for.
        begin: position of the first token that is thought, or opens thoughts; None while none is
            known.
    """

    tokens: ThinkingTokens
    begin: int | None = None
    _looked: int = 0  # tokens that have been looked through

    def find(self, token_ids: Sequence[int], num_prompt: int, end: int) -> int | None:
        """Look through the tokens before `end` that are new; returns `begin`.

        >>> Thoughts(ThinkingTokens((7,), (8,))).find([1, 2, 3, 4, 7, 5], num_prompt=3, end=6)
        4
        >>> Thoughts(ThinkingTokens((7,), (8,))).find([1, 2, 7, 4, 5], num_prompt=3, end=5)
        3

        Args:
            token_ids: of the prompt, and of the answer as far as it is known.
            num_prompt: tokens of the prompt.
        """
        if self.begin is not None or end <= num_prompt:
            return self.begin
        start = self.tokens.start
        if not self._looked:
            tail = token_ids[max(0, num_prompt - _OPENED_WITHIN) : num_prompt]
            opened = _last(tail, start)
            closed = _last(tail, self.tokens.end)
            if opened is not None and (closed is None or closed < opened):
                self.begin = num_prompt
                return self.begin
            self._looked = num_prompt
        first = max(num_prompt, self._looked - len(start) + 1)
        found = _first(token_ids[first:end], start)
        self.begin = None if found is None else first + found
        self._looked = max(self._looked, min(end, len(token_ids)))
        return self.begin


def _first(token_ids: Sequence[int], wanted: tuple[int, ...]) -> int | None:
    places = range(len(token_ids) - len(wanted) + 1)
    return next((i for i in places if _at(token_ids, i, wanted)), None)


def _last(token_ids: Sequence[int], wanted: tuple[int, ...]) -> int | None:
    places = range(len(token_ids) - len(wanted), -1, -1)
    return next((i for i in places if _at(token_ids, i, wanted)), None)


def _at(token_ids: Sequence[int], place: int, wanted: tuple[int, ...]) -> bool:
    return tuple(token_ids[place : place + len(wanted)]) == wanted
