# SPDX-License-Identifier: Apache-2.0
"""Policies of eviction to compare the slot pool's with: each keeps so many blocks of a trace.

A block that is used is `put`, whether it is kept already or not. The blocks of a prompt are put
with its end first, so that the end goes first where the policy looks at recency alone.
"""

import heapq
from collections import OrderedDict

from traces import Trace

Blocks = OrderedDict[int, int]


class LRU:
    """The least recently used goes first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: Blocks = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._kept

    def put(self, block: int) -> None:
        if block not in self and len(self._kept) == self._size:
            self._kept.popitem(last=False)
        self._kept[block] = 0
        self._kept.move_to_end(block)


class SecondSight(LRU):
    """LRU, and a block is kept only when it is seen again; four times as many are remembered."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._seen = LRU(4 * size)

    def put(self, block: int) -> None:
        if block in self or block in self._seen:
            super().put(block)
        self._seen.put(block)


class ARC:
    """Adaptive replacement cache, Megiddo and Modha 2003."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._target = 0.0
        self._once: Blocks = OrderedDict()
        self._again: Blocks = OrderedDict()
        self._gone_once: Blocks = OrderedDict()
        self._gone_again: Blocks = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again

    def _replace(self, gone_again: bool = False) -> None:
        once = len(self._once)
        if once > self._target or (gone_again and once == self._target > 0) or not self._again:
            self._gone_once[self._once.popitem(last=False)[0]] = 0
        else:
            self._gone_again[self._again.popitem(last=False)[0]] = 0

    def put(self, block: int) -> None:
        ones, twos = len(self._gone_once), len(self._gone_again)
        if block in self._once:
            del self._once[block]
        elif block in self._gone_once:
            self._target = min(self._size, self._target + max(1.0, twos / ones))
            self._replace()
            del self._gone_once[block]
        elif block in self._gone_again:
            self._target = max(0.0, self._target - max(1.0, ones / twos))
            self._replace(gone_again=True)
            del self._gone_again[block]
        elif block not in self._again:
            self._put_new(block)
            return
        self._again[block] = 0
        self._again.move_to_end(block)

    def _put_new(self, block: int) -> None:
        seen_once = len(self._once) + len(self._gone_once)
        seen = seen_once + len(self._again) + len(self._gone_again)
        if seen_once >= self._size and len(self._once) == self._size:
            self._once.popitem(last=False)
        elif seen >= self._size:
            if seen_once >= self._size:
                self._gone_once.popitem(last=False)
            elif seen >= 2 * self._size:
                self._gone_again.popitem(last=False)
            self._replace()
        self._once[block] = 0


class S3FIFO:
    """Three queues, Yang and others 2023: a small one, a main one, and of what is gone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._small: Blocks = OrderedDict()
        self._main: Blocks = OrderedDict()
        self._gone = LRU(size)

    def __contains__(self, block: int) -> bool:
        return block in self._small or block in self._main

    def put(self, block: int) -> None:
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(3, queue[block] + 1)
                return
        while len(self._small) + len(self._main) >= self._size:
            self._evict()
        (self._main if block in self._gone else self._small)[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._size // 10 or not self._main:
            block, uses = self._small.popitem(last=False)
            if uses:
                self._main[block] = 0
            else:
                self._gone.put(block)
        else:
            block, uses = self._main.popitem(last=False)
            if uses:
                self._main[block] = uses - 1


def hits_of(policy: LRU | ARC | S3FIFO, trace: Trace) -> int:
    """How many blocks are found, of each prompt those before the first that is not."""
    hits = 0
    for prompt in trace:
        hits += next((i for i, block in enumerate(prompt) if block not in policy), len(prompt))
        for block in reversed(prompt):
            policy.put(block)
    return hits


def belady(size: int, trace: Trace) -> int:
    """The hits where always that block goes first that is used last, or never again."""
    never = len(trace)
    next_use: dict[int, int] = {}
    later: list[list[int]] = []  # of each block of each prompt, the last prompt first
    for at in range(len(trace) - 1, -1, -1):
        later.append([next_use.get(block, never) for block in trace[at]])
        next_use.update(dict.fromkeys(trace[at], at))
    kept: dict[int, int] = {}
    latest_first: list[tuple[int, int, int]] = []
    hits = 0
    for prompt in trace:
        hits += next((i for i, block in enumerate(prompt) if block not in kept), len(prompt))
        for i, (block, use) in enumerate(zip(prompt, later.pop(), strict=True)):
            kept[block] = use
            heapq.heappush(latest_first, (-use, -i, block))
        while len(kept) > size:
            use, _, block = heapq.heappop(latest_first)
            if kept.get(block) == -use:
                del kept[block]
    return hits
