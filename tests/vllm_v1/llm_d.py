# SPDX-License-Identifier: Apache-2.0
"""How llm-d's index of KV events (llm-d-kv-cache, `pkg/kvevents` and `pkg/kvcache`) reads them.

It is written in Go, so its rules are written down here.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

WEIGHTS: Final = {"GPU": 1.0, "CPU": 0.8, "STORAGE": 0.3}

_Key = tuple[object, ...]  # of a block: its tokens, after the key of the block before it


class LlmD:
    """What llm-d scores one pod with.

    A block whose parent is not known is left out. Stores are counted, and a block is there until as
    many removals have come. `AllBlocksCleared` drops all of the pod, in every tier. Blocks of the
    main group count from the first one on; blocks of windows only as far as a window of each is
    there.
    """

    def __init__(self) -> None:
        self._keys: dict[object, _Key] = {}  # by the engine's hash
        self._stores: Counter[tuple[str, int, object]] = Counter()
        self._there: defaultdict[_Key, set[tuple[str, int]]] = defaultdict(set)
        self._windows: dict[int, int] = {}  # blocks of each group's window
        self._main = 0

    def hears(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._stores.clear()
                self._there.clear()
            elif isinstance(event, BlockStored):
                self._stored(event)
            else:
                self._removed(event)

    def _stored(self, event: BlockStored) -> None:
        group = event.group_idx or 0
        if event.kv_cache_spec_kind == "sliding_window":
            assert event.kv_cache_spec_sliding_window is not None
            self._windows[group] = -(-event.kv_cache_spec_sliding_window // event.block_size)
        elif event.kv_cache_spec_kind == "full_attention":
            self._main = group
        key: _Key = ()
        if event.parent_block_hash is not None:
            if event.parent_block_hash not in self._keys:
                return
            key = self._keys[event.parent_block_hash]
        assert event.medium is not None
        for i, block_hash in enumerate(event.block_hashes):
            key = (key, *event.token_ids[i * event.block_size :][: event.block_size])
            self._keys[block_hash] = key
            self._stores[event.medium, group, block_hash] += 1
            self._there[key].add((event.medium, group))

    def _removed(self, event: BlockRemoved) -> None:
        assert event.medium is not None
        for block_hash in event.block_hashes:
            place = event.medium, event.group_idx or 0
            self._stores[*place, block_hash] -= 1
            if self._stores[*place, block_hash] <= 0 and block_hash in self._keys:
                self._there[self._keys[block_hash]].discard(place)

    def score(self, tokens: Sequence[int], block_size: int) -> float:
        """The sum of the weights of the blocks at the beginning of a prompt."""
        key: _Key = ()
        total, best = 0.0, 0.0
        runs = dict.fromkeys(self._windows, 0)
        for end in range(block_size, len(tokens) + 1, block_size):
            key = (key, *tokens[end - block_size : end])
            there = self._there.get(key, set())
            main = [WEIGHTS[medium] for medium, group in there if group == self._main]
            if not main:
                break
            total += max(main)
            for group in runs:
                present = any(group == each for _, each in there)
                runs[group] = runs[group] + 1 if present else 0
            if all(runs[group] >= self._windows[group] for group in runs):
                best = total
        return best
