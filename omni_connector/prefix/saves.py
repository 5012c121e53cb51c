# SPDX-License-Identifier: Apache-2.0
"""Saves of the blocks that a step fills, to the own arena and to the store.

Copies under way hold their blocks (see `CopyLedger`), at most a quarter of the engine's blocks.
Further blocks are dropped. If a hint asks for them in the arena, they wait. A waiting block is not
held: it is copied later if vLLM still finds it by its hash.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, Final

import numpy as np

from omni_connector.copy.ledger import CANCELLED, CopyLedger, CopyWork, RequestBlocks
from omni_connector.copy.prefix_jobs import StoreSaveSpec
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans, whole_blocks
from omni_connector.prefix.block_changes import BlockChanges
from omni_connector.prefix.hints import Candidate
from omni_connector.prefix.host_blocks import MAX_IN_ORDER, HostBlocks
from omni_connector.prefix.key_prefix import KeyPrefix
from omni_connector.prefix.prompts import SharedGroups, SharedPrompt
from omni_connector.runtime.bounded import ExpiringSet
from omni_connector.runtime.context import EngineContext
from omni_connector.stores.shared_blocks import BlockName

# Copies under way hold at most 1/4 of the KV blocks, so that requests have room.
_HELD_PART: Final = 4

# Waiting blocks that a step considers at most, so that they do not delay the step.
_AT_ONCE: Final = 256

# Seconds for which a block that was sent to the store is not sent again. After that, look-ups tell
# whether the store has it.
_RECENT_S: Final = 30.0

# Seconds in which a copy is expected to end, so that vLLM rather waits for its blocks than preempts
# a request. One that takes longer waits for the store.
_COPY_S: Final = 0.1

# If a prompt has more new blocks than this, the indexes are asked before a `Candidate` is made of
# each. Most blocks of a long prompt that vLLM's own cache had are in an arena already.
_MANY: Final = 64

# Steps after which vLLM knows whether a load by another connector has succeeded; if it has not,
# vLLM recomputes the blocks. Until then other requests find the blocks in vLLM's own cache, so
# saves of prompts that vLLM admits meanwhile are delayed.
_LOADED: Final = 3

# More tokens than any request has: no block fills any more that is kept.
_NEVER: Final = 1 << 62

# Steps from one look for blocks of answers to the next: to copy a few blocks costs the scheduler
# hardly more than to copy one. The last block of an answer that ends before is not kept.
_TOGETHER: Final = 4


class PrefixSaves:
    """Starts the copies of blocks that have filled.

    Args:
        tokens_a_step: tokens by which an answer grows in a step at most.
        prefix: of the store's keys.
        host: the arenas of this host; None keeps nothing there.
        stores: whether there is a store that others find blocks in.
        ledger: the copy jobs.
        groups: the cache groups that this engine keeps.
        num_blocks: KV blocks of this engine.
        hash_of: returns the hash by which vLLM's own prefix cache finds a block, given one of
            vLLM's groups and the block's id; None where it does not find it.
        context: clock and statistics.
        changes: collects changes for KV events; None where nobody asks for events.

    Attributes:
        stores: whether blocks are stored: not while no other engine could find them.
        waiting: blocks to copy in later steps, which may be steps without tokens. A finished prompt
            stands behind its last waiting block.
    """

    def __init__(
        self,
        *,
        tokens_a_step: int,
        prefix: KeyPrefix,
        host: HostBlocks | None,
        stores: bool,
        ledger: CopyLedger,
        groups: SharedGroups,
        num_blocks: int,
        hash_of: Callable[[int, int], bytes | None],
        context: EngineContext,
        changes: BlockChanges[Any] | None,
    ) -> None:
        self._tokens_a_step = tokens_a_step
        self._step = 0
        # Step up to which a load by another connector may turn out to have failed; see `_LOADED`.
        self._doubtful_until = 0
        # The prompts to look at, by step number: most steps fill no block of an answer.
        self._due: dict[int, dict[SharedPrompt, None]] = {}
        # Whether all blocks are still there a few steps after they have filled. Else a block may
        # have left its window, or hold a later state.
        lasting = all(
            shape.attention_type == "all"
            or (
                shape.attention_type == "window"
                and shape.window > _TOGETHER * tokens_a_step + groups.tokens_ahead
            )
            for shape in groups.shapes
        )
        self._together = _TOGETHER if lasting else 1
        self._prefix = prefix
        self._host = host
        self._has_store = stores
        self.stores = False
        self._ledger = ledger
        self._groups = groups.shapes
        self._group_ids = groups.ids
        self._tokens_ahead = groups.tokens_ahead
        self._num_blocks = num_blocks
        self._max_held = max(1, num_blocks // _HELD_PART)
        self._hash_of = hash_of
        self._clock = context.clock
        self._stats = context.stats
        self._changes = changes
        self.num_held = 0
        self.waiting: deque[Candidate | SharedPrompt] = deque()
        # Values of `Candidate.prompt`, so that waiting blocks of different prompts differ.
        self._prompt_numbers = cycle(range(1024))
        self._sent = ExpiringSet[BlockName](_RECENT_S, context.clock)

    def build(
        self,
        meta: CopyWork,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], RequestBlocks],
    ) -> None:
        """Add this step's saves to `meta`.

        Args:
            scheduled: tokens that this step computes, by request.
            blocks_of: returns the blocks of a request.
        """
        filled: dict[tuple[int, bytes], Candidate] = {}
        self._step += 1
        for prompt in self._due.pop(self._step, ()):
            request, steps = prompt.request, 1
            # Until it is scheduled, its blocks may be those of a load under way.
            if tokens := scheduled.get(request.request_id):
                had, prompt.had = prompt.had, None
                if had is not None:  # vLLM has just admitted it
                    if request.num_computed_tokens > had:
                        self._doubtful_until = self._step + _LOADED
                    if self._step <= self._doubtful_until:
                        self.look_at(prompt, _LOADED)
                        continue
                end = request.num_computed_tokens + tokens
                if end >= prompt.fills_at:
                    self._save(meta, next(self._prompt_numbers), prompt, end, blocks_of, filled)
                lacks = prompt.fills_at - max(end, request.num_tokens)
                if lacks > 0:  # only tokens of its answer will fill the next block
                    steps = -(-lacks // self._tokens_a_step)
                    if not prompt.hints.asks_arena:
                        steps += -(self._step + steps) % self._together
            self.look_at(prompt, steps)
        if self._host is None:
            return
        if self.waiting:
            self._keep_waiting(meta, self._host)
        new = list(filled.values())
        if self.waiting:  # new blocks that may wait queue up behind
            self._keep(meta, self._host, [each for each in new if each.hints.keeps_here], 0)
            new = [each for each in new if not each.hints.keeps_here]
        self._keep(meta, self._host, new, self._max_held - self.num_held)

    def look_at(self, prompt: SharedPrompt, steps: int = 1) -> None:
        """Check after `steps` steps whether blocks of a prompt have filled."""
        self._forget(prompt)
        if prompt.hints.cache != "no":
            prompt.due = self._step + steps
            self._due.setdefault(prompt.due, {})[prompt] = None

    def finish(self, prompt: SharedPrompt) -> None:
        """The prompt's request has ended."""
        self._forget(prompt)
        if self.waiting and prompt.hints.keeps_here:
            self.waiting.append(prompt)
        else:
            self._put_in_order(prompt)

    def _put_in_order(self, prompt: SharedPrompt) -> None:
        # A single job of a single group leaves its slots in the right order.
        if self._host is not None and prompt.keeps * len(self._groups) > 1:
            ends = [min(sent, MAX_IN_ORDER) for sent in prompt.sent]
            hashes = [prompt.full_hashes(g, 0, end) for g, end in enumerate(ends)]
            names = [prompt.names_of(g, 0, of_group) for g, of_group in enumerate(hashes)]
            self._host.finished([prompt.keys(of_group) for of_group in names])

    def _forget(self, prompt: SharedPrompt) -> None:
        if due := self._due.get(prompt.due):
            due.pop(prompt, None)
            if not due:
                del self._due[prompt.due]

    def _keep_waiting(self, meta: CopyWork, host: HostBlocks) -> None:
        """Copy waiting blocks, as many as there is room for."""
        room = min(_AT_ONCE, host.room(self._max_held - self.num_held))
        turn: dict[tuple[int, bytes], Candidate] = {}
        over: list[SharedPrompt] = []
        while self.waiting:
            first = self.waiting[0]
            if isinstance(first, SharedPrompt):
                over.append(first)
            elif len(turn) < room and (name := (first.group, first.block_hash)) not in turn:
                whose = self._group_ids[first.group]
                there = self._hash_of(whose, first.block_id) == first.cached_as
                turn[name] = first if there else replace(first, block_id=NULL_BLOCK_ID)
            else:
                break
            self.waiting.popleft()
        self._keep(meta, host, list(turn.values()), room)
        for prompt in over:
            self._put_in_order(prompt)

    def _keep(self, meta: CopyWork, host: HostBlocks, filled: list[Candidate], most: int) -> None:
        if not filled:
            return
        # More waiting blocks than vLLM has blocks cannot all be in vLLM's cache.
        max_waiting = self._num_blocks - len(self.waiting)
        spec, dropped, waiting = host.keep(filled, most, max_waiting)
        self.waiting += waiting
        if dropped:
            self._stats.count("blocks_dropped", dropped)
        if spec is None:
            return
        number = len(spec.slots)
        self.num_held += number

        def end(failure: str | None) -> None:
            self.num_held -= number
            host.kept(job_id, failure)
            if failure not in (None, CANCELLED):
                self._stats.fail(failure)

        job_id = self._ledger.start(spec.blocks, end, soon=_COPY_S)
        host.keeping[job_id] = spec
        meta.saves[job_id] = spec

    def _save(
        self,
        meta: CopyWork,
        prompt_number: int,
        prompt: SharedPrompt,
        computed: int,
        blocks_of: Callable[[str], RequestBlocks],
        kept: dict[tuple[int, bytes], Candidate],
    ) -> None:
        groups: list[tuple[int, list[int]]] = []
        hashes: list[bytes] = []
        number, blocks = 0, None
        tenant, hints = prompt.tenant, prompt.hints
        kept_tokens = prompt.kept_tokens(computed)
        for g, shape in enumerate(self._groups):
            first = prompt.sent[g]
            end = kept_tokens // shape.block_size
            filled = prompt.full_hashes(g, first, end) if end > first else []
            block_ids: list[int] = []
            names = prompt.names_of(g, first, filled)
            if filled:
                prompt.sent[g] = first + len(filled)
                if blocks is None:
                    blocks = blocks_of(prompt.request.request_id).blocks
                table = blocks[self._group_ids[g]][first : first + len(filled)]
                part = [each.block_id for each in table]
                hash_of = partial(self._hash_of, self._group_ids[g])
                part = whole_blocks(shape, part, filled, hash_of)
                if self._host is not None:
                    keys, lacking = prompt.keys(names), range(len(filled))
                    if len(filled) > _MANY and not hints.asks_arena:
                        lacking = np.flatnonzero(self._host.lacks(g, keys, here=False)).tolist()
                    new: list[tuple[int, bytes, bytes]] = []
                    for i in lacking:
                        key, block_id = keys[i], part[i]
                        if block_id != NULL_BLOCK_ID:
                            one = Candidate(
                                g, key, block_id, prompt_number, tenant, hints, filled[i]
                            )
                            if (other := kept.get((g, key))) is not None:
                                joined = hints.joined(other.hints)
                                one = replace(one, prompt=other.prompt, hints=joined)
                            kept[g, key] = one
                            new.append((first + i, key, filled[i]))
                    if self._changes is not None:
                        told = {index for index, _, _ in new}
                        new += [
                            (i, key, filled[i - first])
                            for i, key in enumerate(keys, first)
                            if i not in told and self._changes.unreported(g, key)
                        ]
                        self._changes.filled(prompt.request, g, sorted(new))
                if self._has_store and self.stores:
                    most = self._max_held - self.num_held - number
                    block_ids, stored = self._stored(prompt, g, first, names, part, most)
                    number += stored
            groups.append((first, block_ids))
            hashes += names
        if hashes and self._host is not None:
            prompt.keeps += 1 + hints.keeps_here  # waiting blocks make a second job
        filled_at = min(
            (sent + 1) * shape.block_size
            for sent, shape in zip(prompt.sent, self._groups, strict=True)
        )
        if kept_tokens < min(computed, filled_at):
            filled_at = _NEVER
            self._stats.count("answers_cut")
        prompt.fills_at = filled_at + self._tokens_ahead
        if not number:
            return
        self.num_held += number
        spec = StoreSaveSpec(
            blocks=BlockSpans.of(groups),
            prefix=prompt.key_prefix(self._prefix.current),
            hashes=hashes,
        )

        def ended(failure: str | None) -> None:
            self.num_held -= number

        meta.saves[self._ledger.start(spec.blocks, ended, soon=_COPY_S)] = spec

    def _stored(
        self,
        prompt: SharedPrompt,
        group: int,
        first: int,
        hashes: list[bytes],
        filled: list[int],
        most: int,
    ) -> tuple[list[int], int]:
        """The block ids, with null blocks for blocks that are not stored; and the number stored."""
        lookup = prompt.lookup
        held = lookup.held[group].blocks if lookup is not None and lookup.held else []
        block_ids = []
        stored = 0
        for i, (block_hash, block_id) in enumerate(zip(hashes, filled, strict=True), first):
            name = (group, block_hash)
            if (i < len(held) and held[i]) or name in self._sent:
                block_id = NULL_BLOCK_ID
            if block_id != NULL_BLOCK_ID and stored >= most:
                self._stats.count("blocks_dropped")
                block_id = NULL_BLOCK_ID
            if block_id != NULL_BLOCK_ID:
                self._sent.add([name])
                stored += 1
            block_ids.append(block_id)
        return block_ids, stored

    def void(self) -> None:
        """Revoke the saves to the arena, and store blocks anew."""
        if self._host is not None:
            self._ledger.revoke(self._host.keeping)
        self.waiting.clear()
        self._sent = ExpiringSet[BlockName](_RECENT_S, self._clock)
