# SPDX-License-Identifier: Apache-2.0
"""Asks the shared store which blocks of a prompt it holds, on a thread of its own."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.tails import Tail
from omni_connector.runtime.bounded import ExpiringSet
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import WOKEN
from omni_connector.stores.block_store import BlockStore
from omni_connector.stores.shared_blocks import BlockName, FailuresOf, block_key, owning_ranks

logger = logging.getLogger("vllm.omni_connector.lookups")

CLOSE_S: Final = 5.0
"""Longest wait for the thread to end, in seconds."""

_MAX_KEYS: Final = 2048
"""Keys in one call to the store at most. A longer prompt takes several calls, and the look-up stops
at the first missing block."""

# Part of the remaining time that a call to the store may take, so that an answer which comes last
# of all can still be used before the deadline.
_ANSWER_PART: Final = 0.8

_MOST_TOKENS: Final = 1 << 14
"""Tokens of a prompt whose tails are looked up at most, in whole blocks: 1 ms of the engine's
thread, where no tail is found. A prompt whose full blocks have states has few."""

# Seconds for which a block with a corrupt entry counts as missing, so that it is stored anew and
# not loaded again and again.
_DISTRUST_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Held:
    """Which blocks of one group the store holds, on all ranks.

    Attributes:
        blocks: whether each block is held, from the first on; nothing is known of later ones.
        runs: for each block, how many held blocks end with it without a gap.
        misses: indices of the blocks that are not held, in order. Both int64.

    >>> held = Held.of([True, True, False, True])
    >>> held.runs.tolist(), held.misses.tolist()
    ([1, 2, 0, 1], [2])
    >>> held.has(np.array([0, 1]), np.array([2, 4])).tolist(), held.reach(0)
    ([True, False], 2)
    """

    blocks: list[bool]
    runs: NDArray[np.int64]
    misses: NDArray[np.int64]

    @classmethod
    def of(cls, blocks: list[bool]) -> "Held":
        """Compute `runs` and `misses`."""
        held = np.array(blocks, bool)
        places = np.arange(len(held))
        runs = places - np.maximum.accumulate(np.where(held, -1, places))
        return cls(blocks, runs, np.flatnonzero(~held))

    def has(self, first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each pair whether all blocks from `first` to `end` are held; True if none are."""
        count = end - first
        known = end <= len(self.runs)
        has: NDArray[np.bool_] = count <= 0
        if len(self.runs):
            has |= known & (self.runs[np.where(known, end - 1, 0)] >= count)
        return has

    def reach(self, start: int) -> int:
        """The first block from `start` on that is not held."""
        at = int(np.searchsorted(self.misses, start))
        return int(self.misses[at]) if at < len(self.misses) else max(start, len(self.blocks))


def reach(groups: Sequence[tuple[GroupShape, Held]], unit: int, start: int, end: int) -> int:
    """The end of the longest prefix, in tokens, whose part after `start` can be loaded.

    Every block that the tokens after the prefix read has to be held. `start` if none can be loaded.

    Args:
        groups: each with the blocks that are held.
        unit: tokens; prefixes end at multiples of it.
        start: tokens that vLLM has itself.
        end: the most tokens that the prefix may have.
    """
    for shape, held in groups:
        if shape.attention_type == "all":
            end = min(end, held.reach(start // shape.block_size) * shape.block_size)
    tokens = np.arange(end // unit * unit, start, -unit)
    held_by_all = np.ones(len(tokens), bool)
    for shape, held in groups:
        if shape.attention_type != "all" and shape.is_cached:
            held_by_all &= held.has(*shape.needed_by_each(tokens, start))
    return int(tokens[held_by_all.argmax()]) if held_by_all.any() else start


def tail_blocks(
    groups: Sequence[tuple[GroupShape, Held]], unit: int, start: int, reach: int, last: int
) -> range:
    """The blocks in which a tail may end a prefix (see `kv.tails`), the last one first.

    A tail needs all tokens before it, but no state.

    Args:
        groups: each with the blocks that are held.
        unit: tokens of a block, of each group.
        start: tokens that vLLM has itself.
        reach: tokens up to which full blocks can be loaded; tails that end before are of no use.
        last: the most tokens that the prefix may have.
    """
    end = last // unit
    for shape, held in groups:
        if shape.attention_type == "all":
            end = min(end, held.reach(start // unit))
    first = max(reach // unit, end + 1 - -(-_MOST_TOKENS // unit))
    return range(end, first - 1, -1)


def windows_held(groups: Sequence[tuple[GroupShape, Held]], start: int, end: int) -> bool:
    """Whether the full blocks that windows need before a tail are held.

    Args:
        groups: each with the blocks that are held, the tail as one of them.
        start: tokens that vLLM has itself.
        end: tokens of the prefix that ends with the tail.
    """
    for shape, held in groups:
        if shape.attention_type not in ("all", "last"):
            read = shape.needed(end, start)
            if not held.has(np.array([read.start]), np.array([end // shape.block_size]))[0]:
                return False
    return True


TailSearch = Generator[list[BlockName], list[bool], Tail | None]
"""A search for a tail in a store: yields names, is sent which of them the store holds, and returns
the tail. A tail has the same name in each group."""


@dataclass(slots=True, eq=False)
class Lookup:
    """A look-up of one prompt.

    Attributes:
        prefix: of the keys.
        hashes: block hashes, one list for each group.
        deadline: until when its request waits for the answer, in seconds of the clock.
        tails: given the answer, begins the search for a tail; None looks for none, or has begun.
        held: the answer, one entry for each group; None until it has come.
        tail: with the answer, the tail that the store holds; None if there is none.
    """

    prefix: str
    hashes: list[list[bytes]]
    deadline: float
    tails: Callable[[Sequence[Held]], TailSearch] | None = None
    held: list[Held] | None = field(default=None)
    tail: Tail | None = None


class StoreLookups:
    """Answers lookups one after the other, on a thread of its own.

    Args:
        store: the store that is asked; closed with this.
        stages: the cache groups that this engine keeps, of each pipeline stage.
        ranks: of a stage. A block counts as held when the store holds it for all ranks.
        context: clock, statistics and threads.
    """

    def __init__(
        self,
        store: BlockStore,
        stages: Sequence[Sequence[GroupShape]],
        ranks: int,
        context: EngineContext,
    ) -> None:
        self._store = store
        self._failures = FailuresOf(store)
        self._clock = context.clock
        self._stats = context.stats
        self._distrusted = ExpiringSet[BlockName](_DISTRUST_S, context.clock)
        # Where a group keeps all tokens, a prefix ends at the first block that is missing.
        self._whole = [shape.attention_type == "all" for shape in stages[0]]
        self._owning_ranks = [owning_ranks(shapes, ranks) for shapes in zip(*stages, strict=True)]
        self._queue: deque[Lookup] = deque()
        self._closing = False
        self._thread = context.start("omni-lookup", self._turn)

    def ask(self, lookup: Lookup) -> None:
        """Queue a lookup; returns at once."""
        self._queue.append(lookup)
        self._thread.wake()

    def distrust(self, names: Iterable[BlockName]) -> None:
        """Count these blocks as missing for `_DISTRUST_S` seconds, because an entry is corrupt."""
        self._distrusted.add(names)

    def count_failures(self) -> None:
        """Count the store's failures since the last call."""
        self._failures.count_into(self._stats)

    def close(self) -> None:
        """Stop the thread, within `CLOSE_S` seconds, and close the store. Idempotent."""
        self._closing = True
        self._thread.wake()
        self._thread.join(CLOSE_S)
        self._store.close()

    def _turn(self) -> float | None:
        try:
            lookup = self._queue.popleft()
        except IndexError:
            return None if self._closing else WOKEN
        begin_search = lookup.tails
        lookup.tails = None  # it has the prompt, which has the look-up
        if self._clock() >= lookup.deadline:
            return 0.0  # its request has gone on without an answer
        try:
            held = self._answer(lookup)
            tail = None
            if held is not None and begin_search is not None:
                tail = self._tail(lookup, begin_search(held))
            if self._clock() < lookup.deadline:
                lookup.tail = tail
                lookup.held = held
        except Exception:  # the request goes on at its deadline; the next look-up may succeed
            logger.exception("A lookup in the shared store failed; please report it")
        return 0.0

    def _tail(self, lookup: Lookup, search: TailSearch) -> Tail | None:
        """The tail that a search finds; None if it finds none in time."""
        try:
            names = next(search)
            while True:
                there, late = self._holds(lookup, names)
                if late:
                    return None
                names = search.send(there)
        except StopIteration as found:
            tail: Tail | None = found.value
            return tail

    def _holds(self, lookup: Lookup, names: Sequence[BlockName]) -> tuple[list[bool], bool]:
        """Whether the store holds each of these blocks for all ranks; and whether its answer came
        so late that blocks may be there which it does not name."""
        keys = [
            block_key(lookup.prefix, g, rank, name)
            for g, name in names
            for rank in self._owning_ranks[g]
        ]
        asked_at = self._clock()
        timeout = _ANSWER_PART * max(0.0, lookup.deadline - asked_at)
        answers = iter(self._store.exists(keys, timeout=timeout))
        late = self._clock() >= asked_at + timeout
        there = []
        for name in names:
            ranks = list(islice(answers, len(self._owning_ranks[name[0]])))
            there.append(all(ranks) and name not in self._distrusted)
        return there, late

    def _answer(self, lookup: Lookup) -> list[Held] | None:
        """The blocks that the store says it holds; None if it has not answered in time."""
        late = False
        found: list[list[bool]] = [[] for _ in lookup.hashes]
        total = max(map(len, lookup.hashes))
        pairs = zip(self._owning_ranks, lookup.hashes, strict=True)
        step = max(1, _MAX_KEYS // max(1, sum(len(ranks) for ranks, of in pairs if of)))
        for first in range(0, total, step):
            asked = [(g, h) for g, of in enumerate(lookup.hashes) for h in of[first : first + step]]
            there, late = self._holds(lookup, asked)
            for (g, _), held in zip(asked, there, strict=True):
                found[g].append(held)
            if any(w and not all(found[g][first:]) for g, w in enumerate(self._whole)):
                break  # blocks after a missing one are of no use
        # The store's client answers a timeout by saying that no block is held. So a late answer in
        # which no block is held is no answer.
        if late and not any(map(any, found)):
            return None
        return [Held.of(blocks) for blocks in found]
