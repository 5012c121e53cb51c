# SPDX-License-Identifier: Apache-2.0
"""Tails: blocks in which prompts and requests end, kept in arenas and stores beside full blocks.

A model with recurrent states has large blocks (784 tokens and more), and a kept state only where a
block ends. So the next turn of a conversation would compute up to a block of tokens again
that the turn before has computed. When a request ends, its last block is full in part, and the
state is that of its last computed token. Both are kept as a *tail*, under the name of its tokens
(see `kv.tails`), and a prompt that begins with all tokens of that request goes on there. So does
one that begins with its prompt alone, as that has left a tail when it was computed:

    the request      [ block ][ block ][ tail..
    the next turn    [ block ][ block ][ tail..][ new tokens
                       loaded   loaded   loaded   computed

A loaded tail is the request's own block: vLLM writes on in it, and names it when it is full.

In arenas the indexes of the host are asked for tails of all lengths at once. A store is asked by
whole keys, each of which costs something: see `kv.tails.cell_marks`.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from omni_connector.kv.shapes import leading_group
from omni_connector.kv.tails import (
    Tail,
    cell_marks,
    fingerprints,
    first_parent,
    tail_name,
    tail_names,
    tokens_of_a_cell,
)
from omni_connector.prefix.host_blocks import Found, FoundBlocks, HostBlocks
from omni_connector.prefix.lookups import Held, TailSearch, reach, tail_blocks, windows_held
from omni_connector.prefix.prompts import SharedGroups, SharedPrompt

_LEAST_PART: Final = 16
"""A tail has at least 1/16 of the tokens of a block: each takes as many slots as a block."""

_MOST_TRIED: Final = 4
"""Tails in one block that are tried at most, the longest first. Of most, all slots are there."""


def keeps_tails(groups: SharedGroups) -> bool:
    """Whether tails are worth their slots: there are states, which the arena has at the ends of
    blocks alone. And whether they are known to be right: blocks of all groups end together, and no
    group keeps what vLLM's prefix cache has not."""
    sizes = {shape.block_size for shape in groups.shapes}
    types = {shape.attention_type for shape in groups.shapes}
    cached = all(shape.is_cached for shape in groups.shapes)
    return len(sizes) == 1 and {"all", "last"} <= types and cached and not groups.tokens_ahead


class Tails:
    """Names the tails of requests, and finds those that prompts begin with.

    Args:
        groups: for which `keeps_tails`.
        host: the arenas of this host; None finds none there.
    """

    def __init__(self, groups: SharedGroups, host: HostBlocks | None) -> None:
        self._shapes = groups.shapes
        self._host = host
        self._unit = groups.unit
        self._least = max(1, self._unit // _LEAST_PART)
        self._cell = tokens_of_a_cell(self._unit)
        self._leading = leading_group(groups.shapes)
        # Each tail has one block here, and few blocks of other kinds are there to be looked up.
        types = [shape.attention_type for shape in groups.shapes]
        self.states: Final = types.index("last")

    def may_end(self, prompt: SharedPrompt, end: int) -> bool:
        """Whether a tail may be kept of the first `end` tokens of a request: not where a step under
        way computes a token that nobody will know."""
        begin = end // self._unit * self._unit
        return end - begin >= self._least and end <= self._plain_until(prompt, begin)

    def name(self, prompt: SharedPrompt, end: int) -> bytes | None:
        """The name of the tail of the first `end` tokens of a request; None if it is not kept."""
        begin = end // self._unit * self._unit
        if not self.may_end(prompt, end):
            return None
        parent = self._parent(prompt, begin // self._unit)
        return (
            None if parent is None else tail_name(parent, prompt.request.all_token_ids[begin:end])
        )

    def mark(self, prompt: SharedPrompt, end: int) -> bytes | None:
        """The name of the mark of a tail in a store; see `cell_marks`. For `end` see `name`."""
        begin = end // self._unit * self._unit
        parent = self._parent(prompt, begin // self._unit)
        if parent is None:
            return None
        before = (end - begin) // self._cell * self._cell
        tokens = prompt.request.all_token_ids[begin : begin + before]
        return cell_marks(parent, tokens, self._cell)[-1]

    def may_go_on(self, reach: int, last: int) -> bool:
        """Whether a tail may end behind the tokens that can be loaded.

        Args:
            reach: number of these tokens.
            last: the most tokens that a prefix may have.
        """
        return last >= max(reach + 1, reach // self._unit * self._unit + self._least)

    def find(
        self, prompt: SharedPrompt, start: int, reach: int, last: int
    ) -> tuple[Tail, Found] | None:
        """The longest prefix of a prompt that ends with a tail.

        Args:
            prompt: with what the arenas of the host have of it.
            start: tokens that vLLM has itself.
            reach: tokens up to which full blocks can be loaded; tails that end before are of no
                use.
            last: the most tokens that the prefix may have.

        Returns:
            The tail, and `prompt.found` with its blocks; None if there is none.
        """
        assert prompt.found is not None
        groups = list(zip(self._shapes, prompt.held(), strict=True))
        for block in tail_blocks(groups, self._unit, start, reach, last):
            begin = block * self._unit
            end = min(begin + self._unit - 1, last, self._plain_until(prompt, begin))
            parent = self._parent(prompt, block)
            if parent is None or end <= begin:
                continue
            tokens = list(prompt.request.all_token_ids[begin:end])
            beyond = max(start, reach) - begin
            if found := self._longest(prompt.found, parent, tokens, beyond):
                number, blocks = found
                if windows_held(groups, start, begin + number):
                    tail = Tail(begin + number, tail_name(parent, tokens[:number]))
                    return tail, prompt.found.with_blocks(block, blocks)
        return None

    def search(self, prompt: SharedPrompt, last: int, held: Sequence[Held]) -> TailSearch:
        """Search a store for the longest prefix of a prompt that ends with a tail.

        This runs on the thread of look-ups, and reads only tokens that stay as they are.

        Args:
            last: the most tokens that the prefix may have.
            held: the full blocks that the store holds, of each group.
        """
        groups = list(zip(self._shapes, held, strict=True))
        whole = reach(groups, self._unit, 0, last)
        for block in tail_blocks(groups, self._unit, 0, whole, last):
            begin = block * self._unit
            end = min(begin + self._unit - 1, last, self._plain_until(prompt, begin))
            parent = self._parent(prompt, block)
            least = max(self._least, whole + 1 - begin)
            if parent is None or end - begin < least:
                continue
            tokens = prompt.request.all_token_ids[begin:end]
            found = yield from self._search_block(parent, tokens, whole - begin)
            if found is not None and windows_held(groups, 0, begin + found.end):
                return Tail(begin + found.end, found.name)
        return None

    def _search_block(self, parent: bytes, tokens: Sequence[int], beyond: int) -> TailSearch:
        """Search a store for the longest tail with which a block begins; its end is counted from
        the beginning of the block. For the arguments see `_longest`."""
        least = max(self._least, beyond + 1)
        marks = cell_marks(parent, tokens, self._cell)
        marked = yield [(self.states, mark) for mark in marks]
        for number in np.flatnonzero(marked)[: -_MOST_TRIED - 1 : -1].tolist():
            first = max(least, number * self._cell)
            names = tail_names(parent, tokens[: (number + 1) * self._cell - 1], first)
            if not names:
                continue
            there = yield [(self.states, name) for name in names]
            for place in np.flatnonzero(there)[: -_MOST_TRIED - 1 : -1].tolist():
                others = range(len(self._shapes))
                parts = yield [(g, names[place]) for g in others if g != self.states]
                if all(parts):
                    return Tail(first + place, names[place])
        return None

    def _longest(
        self, found: Found, parent: bytes, tokens: Sequence[int], beyond: int
    ) -> tuple[int, list[FoundBlocks]] | None:
        """The longest tail with which a block begins, of those in the arenas of the host.

        Args:
            found: says which engines are searched.
            parent: key of the block before it, or `first_parent`.
            tokens: of the block, fewer than all.
            beyond: tokens that the tail must exceed.

        Returns:
            The number of its tokens, and its block in each group; None if there is none.
        """
        least = max(self._least, beyond + 1)
        if len(tokens) < least:
            return None
        words = fingerprints(parent, tokens)
        assert self._host is not None
        there = self._host.look(found, self.states, words[least - 1 :]).owners >= 0
        for place in np.flatnonzero(there)[: -_MOST_TRIED - 1 : -1].tolist():
            number = least + place
            word = words[number - 1 : number]
            blocks = [self._host.look(found, g, word) for g in range(len(self._shapes))]
            if all(of_group.there[0] for of_group in blocks):
                return number, blocks
        return None

    def _parent(self, prompt: SharedPrompt, block: int) -> bytes | None:
        """What the name of a tail in this block says of all tokens before it; None if not known."""
        if block == 0:
            return first_parent(prompt.request.cache_salt, prompt.adapter)
        before = prompt.full_hashes(self._leading, block - 1, block)
        return prompt.keys(before)[0] if before else None

    def _plain_until(self, prompt: SharedPrompt, begin: int) -> int:
        """The tokens of a request up to which those from `begin` on say by their ids what they
        are."""
        known = prompt.request.num_tokens if prompt.hashed_tokens is None else prompt.hashed_tokens
        return min([known, *(first for first, end in prompt.opaque if end > begin)])
