# SPDX-License-Identifier: Apache-2.0
"""Saves of the blocks that a step fills, to the own arena and to the store.

Copies under way hold their blocks (see `CopyLedger`), at most a quarter of the engine's blocks.
Further blocks wait until copies have ended. A waiting block is not held: it is copied later if vLLM
still finds it by its hash. With EAGLE and MTP this hash does not cover all that a block was
computed from. So only blocks that a hint asks for wait then, and others are dropped.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import cycle
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.eviction import DEPTHS, TAILS, depth_of
from omni_connector.copy.held_blocks import (
    CANCELLED,
    CopyLedger,
    CopyWork,
    End,
    EngineBlock,
)
from omni_connector.copy.prefix_jobs import KeepSpec, StoreSaveSpec
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans, TransferSpec, whole_blocks
from omni_connector.prefix.block_changes import BlockChanges
from omni_connector.prefix.filled import FilledRuns
from omni_connector.prefix.hints import Candidate, FilledBlocks
from omni_connector.prefix.host_blocks import MAX_IN_ORDER, HostBlocks
from omni_connector.prefix.key_prefix import KeyPrefix
from omni_connector.prefix.prompts import SharedGroups, SharedPrompt
from omni_connector.prefix.tails import Tails
from omni_connector.runtime.bounded import ExpiringSet
from omni_connector.runtime.context import EngineContext
from omni_connector.stores.shared_blocks import BlockName

BlocksOf = Callable[[str], Sequence[Sequence[EngineBlock]]]
"""Returns the blocks of a request, by vLLM's groups."""

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

# Filled blocks are considered together: when there are so many of prompts, or so many in all, or as
# many as copies may hold at once, or when so many steps have been made since the first of them
# filled, or when the engine has nothing to compute. Many blocks cost the engine's thread little
# more than one. Blocks of prompts are more urgent, as the next request may begin with them.
_MANY_OF_PROMPTS: Final = 64
_MANY: Final = 64
_LATEST: Final = 64

# Filled blocks that a step considers: so many, which bounds what it takes, or this part of them if
# that is more, so that steps that fill hundreds leave no more behind than later ones consider.
_A_STEP: Final = 96
_PART_A_STEP: Final = 4

# Seconds after which fewer steps are enough, so that other engines find the blocks soon where a
# step takes long.
_LATEST_S: Final = 0.5
_FEWER_STEPS: Final = 16

# Steps after which vLLM knows whether a load by another connector has succeeded. With pipeline
# stages, the steps under way at once are added. If the load has failed, vLLM recomputes the blocks.
# Until then other requests find them in vLLM's own cache, so saves of prompts that vLLM admits
# meanwhile are delayed.
_LOADED: Final = 2

_IN_TABLES: Final[Mapping[int, int]] = {}

_TAILS_KEPT: Final = "tails_kept"
"""Counter of tails. One that goes to the arena and to the store counts once."""

# More tokens than any request has: no block fills any more that is kept.
_NEVER: Final = 1 << 62

# Blocks of answers are looked for in steps whose number is a multiple of this, so that blocks of
# many answers are considered in one step.
_TOGETHER: Final = 8

# Tokens by which an answer grows between two looks for its full blocks, at most. The last blocks
# are looked for when the answer ends. Nobody asks for them before, and a look costs little more for
# many blocks than for one.
_ANSWER_TOKENS: Final = 256

# A window in which blocks stay for fewer tokens is looked at in each step.
_LEAST_ANSWER_TOKENS: Final = 64


class _Run(NamedTuple):
    """Consecutive blocks of one group of a prompt that have filled and are not considered yet.

    Attributes:
        group: position among the transferred groups.
        prompt: whose blocks they are.
        of_prompt: whether they count as blocks of a prompt, and not of an answer.
        step: in which they were entered.
        keys, hashes, block_ids: of each block. The ids are null blocks for blocks not to be kept.
    """

    group: int
    prompt: SharedPrompt
    of_prompt: bool
    step: int
    keys: list[bytes]
    hashes: list[bytes]
    block_ids: list[int]

    def part(self, begin: int, end: int | None) -> "_Run":
        """Some of these blocks."""
        return self._replace(
            keys=self.keys[begin:end],
            hashes=self.hashes[begin:end],
            block_ids=self.block_ids[begin:end],
        )


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
        alone: whether no connector beside this one loads blocks.
        stages: pipeline stages, each of which may have a step under way.
        tails: names the ends of requests within blocks; None keeps none.
        finds: says of each block whether vLLM's own prefix cache finds it by its hash; given one
            of vLLM's groups, the ids of the blocks, and their hashes.
        context: clock and statistics.
        changes: collects changes for KV events; None where nobody asks for events.

    Attributes:
        alone: see there.
        stores: whether blocks are stored: not while no other engine could find them.
        waiting: blocks to copy in later steps, which may be steps without tokens. A finished prompt
            stands behind its last waiting block.
        num_filled: blocks that have filled and are not considered yet.
        queued: jobs that start with the next step, by number. `SharedPrefix.build` takes them.
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
        alone: bool,
        stages: int,
        tails: Tails | None,
        finds: Callable[[int, Sequence[int], Sequence[bytes]], list[bool]],
        context: EngineContext,
        changes: BlockChanges[Any] | None,
    ) -> None:
        self._tokens_a_step = tokens_a_step
        self._step = 0
        # Step up to which a load by another connector may turn out to have failed; see `_LOADED`.
        self._doubtful_until = 0
        self._loaded_after = _LOADED + stages
        # The prompts to look at, by step number: most steps fill no block of an answer.
        self._due: dict[int, dict[SharedPrompt, None]] = {}
        # Whether all blocks are still there a few steps after they have filled. Else a block may
        # have left its window, or hold a later state.
        cached = [shape for shape in groups.shapes if shape.is_cached]
        kept_for = _tokens_kept(cached) - _TOGETHER * tokens_a_step - groups.tokens_ahead
        self._lasting = kept_for > _LEAST_ANSWER_TOKENS
        self._together = _TOGETHER if self._lasting else 1
        # Whether filled blocks may be considered in later steps. A block is recognized then by
        # vLLM's hash, which with a drafter does not cover all that its KV was computed from.
        self._batches = self._lasting and not groups.tokens_ahead
        # A block is looked at fewer than so many tokens after it has filled; at once where it is 0.
        most = max(shape.block_size for shape in groups.shapes)
        self._answer_tokens = max(0, min(_ANSWER_TOKENS, kept_for - 1 - most))
        if stores or not self._batches:
            self._answer_tokens = 0
        self._first_looks = cycle(range(0, self._answer_tokens + 1, 5))
        self._prefix = prefix
        self._host = host
        self._has_store = stores
        self.stores = False
        self._ledger = ledger
        self._groups = groups.shapes
        self._group_ids = groups.ids
        self._unit = groups.unit
        self._tokens_ahead = groups.tokens_ahead
        self._num_blocks = num_blocks
        self._max_held = max(1, num_blocks // _HELD_PART)
        self._many_of_prompts = min(_MANY_OF_PROMPTS, self._max_held)
        self._many = min(_MANY, self._max_held)
        self.alone = alone
        self._tails = tails
        self._states = [g for g, each in enumerate(groups.shapes) if each.attention_type == "last"]
        self._drafts_states = tokens_a_step > 1 and bool(self._states)
        self._finds = finds
        self._clock = context.clock
        self._stats = context.stats
        self._changes = changes
        self.num_held = 0
        # The jobs under way, and whether what they copy is what their blocks are named after.
        self._under_way: dict[int, bool] = {}
        self.queued: dict[int, TransferSpec] = {}
        self.waiting: deque[Candidate | SharedPrompt] = deque()
        # For `Candidate.prompt`, so that waiting blocks of different prompts differ.
        self._prompt_numbers = cycle(range(256))
        self._sent = ExpiringSet[BlockName](_RECENT_S, context.clock)
        # Blocks that have filled and are not considered yet; how many of them are of prompts; when
        # they are considered at the latest if the steps take long; and whether steps are
        # considering them, as many a step as it has time for.
        self._filled: deque[_Run] = deque()
        self.num_filled = 0
        self._num_of_prompts = 0
        self._consider_at = 0.0
        self._considering = False
        # The prompts that have ended since, and the number of blocks to be considered before each
        # is over: counted from the start, as `_num_considered` is.
        self._over: deque[tuple[SharedPrompt, int]] = deque()
        self._num_considered = 0

    @property
    def has_work(self) -> bool:
        """Whether a step without tokens would start copies."""
        return bool(self.waiting or self.num_filled)

    def build(
        self,
        meta: CopyWork,
        scheduled: Mapping[str, int],
        blocks_of: BlocksOf,
        drafted: Container[str] = (),
    ) -> None:
        """Add this step's saves to `meta`.

        Args:
            scheduled: tokens that this step computes, by request.
            blocks_of: returns the blocks of a request.
            drafted: requests with drafts among these tokens. Of them the workers move the states of
                this step into place only after its copies have begun.
        """
        self._step += 1
        for prompt in self._due.pop(self._step, ()):
            request = prompt.request
            steps = 1
            # Until it is scheduled, its blocks may be those of a load under way.
            if tokens := scheduled.get(request.request_id):
                had = prompt.had
                prompt.had = None
                prompt.scheduled = True
                if had is not None:  # vLLM has just admitted it
                    # Alone, it has found the rest within a block itself (`--prefix-match-unit`).
                    if request.num_computed_tokens > had and not self.alone:
                        self._doubt(blocks_of(request.request_id), had)
                    if self._step <= self._doubtful_until:
                        self.look_at(prompt, self._loaded_after)
                        continue
                end = request.num_computed_tokens + tokens
                if end >= prompt.fills_at:
                    has_drafts = request.request_id in drafted
                    in_place = request.num_computed_tokens if has_drafts else end
                    self._save(meta, prompt, end, blocks_of, in_place)
                if self._drafts_states and end >= prompt.fills_at - self._tokens_ahead:
                    self._note_states(prompt, end, blocks_of)
                if self._tails is not None and had is None:
                    self._keep_prompt(meta, prompt, self._tails, blocks_of)
                lacks = prompt.fills_at - max(end, request.num_tokens)
                if self._drafts_states:
                    lacks -= self._tokens_ahead  # to note its states
                if lacks > 0:  # only tokens of its answer will fill the next block
                    # Answers that began together are looked at in different steps, first and later.
                    if prompt.answers and self._answer_tokens:
                        lacks += -lacks % self._answer_tokens
                    elif self._answer_tokens:
                        lacks += next(self._first_looks)
                    prompt.answers = True
                    steps = -(-lacks // self._tokens_a_step)
                    steps += -(self._step + steps) % self._together
                if self._tails is not None and end <= request.num_prompt_tokens:
                    steps = 1  # the step after the prompt's last one overwrites the state
            self.look_at(prompt, steps)
        if self._host is None:
            return
        if self.num_filled and (most := self._num_due(computes=bool(scheduled))):
            self._consider(meta, self._host, most)
        elif self.waiting:
            self._keep_waiting(meta, self._host)

    def _num_due(self, *, computes: bool) -> int:
        """How many of the filled blocks this step considers."""
        if not (computes and self._batches):
            return self.num_filled
        # Not in a step that looks at answers, which takes its time, too.
        at_leisure = self._step % self._together > 0
        if not self._considering:
            self._considering = self._num_of_prompts >= self._many_of_prompts or (
                at_leisure and (self.num_filled >= self._many or self._is_late())
            )
        if not self._considering or not (at_leisure or self._num_of_prompts):
            return 0
        return max(_A_STEP, self.num_filled // _PART_A_STEP)

    def _is_late(self) -> bool:
        steps = self._step - self._filled[0].step
        return steps >= _LATEST or (steps >= _FEWER_STEPS and self._clock() >= self._consider_at)

    def _room(self, host: HostBlocks) -> int:
        """How many filled blocks may be considered now. The others wait; considered blocks for
        which copies have no room are dropped."""
        if self._tokens_ahead:  # with EAGLE and MTP
            return self.num_filled
        # No more blocks wait than vLLM has, as its cache would lack some; nor more than the arena
        # has slots, as they would replace each other there.
        beyond = self.num_filled - min(self._num_blocks, host.num_slots)
        return max(beyond, host.room(self._max_held - self.num_held))

    def _take_filled(self, most: int, room: int) -> list[FilledRuns]:
        """The filled blocks to consider now, those first that filled first.

        Args:
            most: blocks that are considered at most.
            room: those of them at most that no hint asks for in the arena.
        """
        columns = [FilledRuns() for _ in self._groups]
        prompts = set[SharedPrompt]()
        left = most
        while left and self._filled:
            run = self._filled[0]
            count = min(len(run.keys), left)
            if not run.prompt.hints.keeps_here:
                count = min(count, room)
                room -= count
            if not count:
                break
            self._filled.popleft()
            if count < len(run.keys):
                self._filled.appendleft(run.part(count, None))
                run = run.part(0, count)
            left -= count
            self.num_filled -= count
            self._num_considered += count
            if run.of_prompt:
                self._num_of_prompts -= count
            prompt = run.prompt
            if prompt not in prompts:
                prompts.add(prompt)
                if not prompt.keeps:
                    found = (prompt.reached or 0) // self._unit
                    prompt.number = next(self._prompt_numbers) * DEPTHS + depth_of(found)
                prompt.keeps += 1 + prompt.hints.keeps_here  # waiting blocks make a second job
            columns[run.group].add(
                run.keys,
                run.hashes,
                run.block_ids,
                prompt=prompt.number,
                tenant=prompt.tenant,
                hints=prompt.hints,
            )
        return columns

    def _consider(self, meta: CopyWork, host: HostBlocks, most: int) -> None:
        """Keep blocks that have filled, `most` at most."""
        # Since an earlier step vLLM may have freed blocks, and given them to others.
        unsure = self._filled[0].step != self._step
        runs = self._take_filled(most, self._room(host))
        # Few blocks of answers are left to the next batch: a batch costs more than what it has.
        self._considering = self._num_of_prompts > 0 or self.num_filled >= self._many
        if self.waiting:
            self._keep_waiting(meta, host)
        if self.waiting or not self._keep_new(meta.saves, host, runs, unsure):
            self._choose(meta, host, [each.blocks() for each in runs], unsure)
        while self._over and self._over[0][1] <= self._num_considered:
            prompt, _ = self._over.popleft()
            self._leave(prompt)

    def _keep_new(
        self,
        saves: dict[int, TransferSpec],
        host: HostBlocks,
        runs: Sequence[FilledRuns],
        unsure: bool,
    ) -> bool:
        """Keep blocks of which none is found anywhere, and all are wanted; whether they are such.

        Args:
            unsure: whether vLLM may have evicted some of them.
        """
        if unsure:
            for group, each in enumerate(runs):
                if not all(self._still_there(group, each.block_ids, each.hashes)):
                    return False
        spec = host.keep_new(runs, self._max_held - self.num_held)
        if spec is None:
            return False
        self._start(saves, host, spec)
        return True

    def _choose(
        self, meta: CopyWork, host: HostBlocks, new: list[FilledBlocks], unsure: bool
    ) -> None:
        """Keep those of these blocks that are wanted, as far as there is room."""
        if self.waiting:  # new blocks that may wait queue up behind
            asked = [np.flatnonzero(each.mask(attrgetter("keeps_here"))) for each in new]
            pairs = list(zip(new, asked, strict=True))
            self._keep(meta.saves, host, [each.at(places) for each, places in pairs], 0, unsure)
            others = [np.setdiff1d(np.arange(len(each)), places) for each, places in pairs]
            new = [each.at(places) for each, places in zip(new, others, strict=True)]
        self._keep(meta.saves, host, new, self._max_held - self.num_held, unsure)

    def look_at(self, prompt: SharedPrompt, steps: int = 1) -> None:
        """Check after `steps` steps whether blocks of a prompt have filled."""
        self._forget(prompt)
        if prompt.hints.cache != "no":
            prompt.due = self._step + steps
            self._due.setdefault(prompt.due, {})[prompt] = None

    def finish(self, prompt: SharedPrompt, blocks_of: BlocksOf | None) -> None:
        """The prompt's request has ended; vLLM still has its blocks.

        Args:
            blocks_of: as for `build`; None where it is not known with which weights the last blocks
                were computed: they are not kept.
        """
        self._forget(prompt)
        if blocks_of is not None and self._tails is not None:
            self._keep_tail(prompt, self._tails, blocks_of)
        if self._host is None:
            return
        request = prompt.request
        # The last token of an answer is not computed.
        end = min(request.num_computed_tokens, request.num_tokens - 1)
        if (
            blocks_of is not None
            and self._batches
            and prompt.scheduled
            and prompt.had is None
            and not prompt.jobs
            and prompt.hints.cache != "no"
            and self._step > self._doubtful_until
            and end >= prompt.fills_at
        ):
            self._fill(prompt, end, blocks_of, end)
        if self.num_filled:
            self._over.append((prompt, self._num_considered + self.num_filled))
        else:
            self._leave(prompt)

    def _keep_tail(self, prompt: SharedPrompt, tails: Tails, blocks_of: BlocksOf) -> None:
        """Keep the blocks in which a request ends, and store them.

        They are held from now on, as vLLM frees them after this call. A step under way may still
        compute a token of the request. It ends before the copy begins, and vLLM counts the token as
        computed.
        """
        end = prompt.request.num_computed_tokens
        if block_ids := self._tail_blocks(prompt, tails, end, blocks_of):
            self._copy_tail(self.queued, prompt, tails, end, block_ids)

    def _keep_prompt(
        self, meta: CopyWork, prompt: SharedPrompt, tails: Tails, blocks_of: BlocksOf
    ) -> None:
        """Keep the blocks in which a prompt ends, where the step before has ended with it.

        This step overwrites its states, so vLLM copies them first.
        """
        end = prompt.request.num_prompt_tokens
        if prompt.request.num_computed_tokens != end or prompt.end_kept:
            return
        block_ids = self._tail_blocks(prompt, tails, end, blocks_of)
        if block_ids is None:
            return
        with self._ledger.copied([block_ids[g] for g in self._states]) as copies:
            if copies is not None:
                for g, block_id in zip(self._states, copies, strict=True):
                    block_ids[g] = block_id
                self._copy_tail(meta.saves, prompt, tails, end, block_ids)

    def keep_boundary(
        self,
        meta: CopyWork,
        prompt: SharedPrompt,
        states: Iterable[tuple[int, int, int]],
        blocks_of: BlocksOf,
    ) -> None:
        """Keep the blocks in which a prompt ends, at the last multiple of `--prefix-match-unit`.

        Args:
            states: that vLLM keeps of it, in blocks that later steps do not write to: for each
                vLLM's group, the block, and the tokens that the state has read.
        """
        if self._tails is None:
            return
        at: dict[int, dict[int, int]] = {}
        for whose, block_id, end in states:
            at.setdefault(end, {})[whose] = block_id
        for end, blocks in at.items():
            if end % self._unit == 0 or blocks.keys() != {self._group_ids[g] for g in self._states}:
                continue
            block_ids = self._tail_blocks(prompt, self._tails, end, blocks_of, blocks)
            if block_ids is not None:
                prompt.end_kept = True
                self._copy_tail(meta.saves, prompt, self._tails, end, block_ids)

    def _tail_blocks(
        self,
        prompt: SharedPrompt,
        tails: Tails,
        end: int,
        blocks_of: BlocksOf,
        elsewhere: Mapping[int, int] = _IN_TABLES,
    ) -> list[int] | None:
        """The block of each group in which the first `end` tokens of a request end; None if no tail
        is kept there.

        Args:
            elsewhere: blocks that are not in the request's table, by vLLM's group.
        """
        if (
            not prompt.scheduled
            or prompt.had is not None
            or prompt.jobs
            or prompt.hints.cache == "no"
            or max(prompt.sent) >= _NEVER
            or self._step <= self._doubtful_until
            or prompt.kept_tokens(end) < end
            or not tails.may_end(prompt, end)
        ):
            return None
        blocks = blocks_of(prompt.request.request_id)
        index = end // self._unit
        block_ids: list[int] = []
        for whose in self._group_ids:
            if whose in elsewhere:
                block_ids.append(elsewhere[whose])
                continue
            table = blocks[whose]
            if index >= len(table) or table[index].is_null:
                return None
            block_ids.append(table[index].block_id)
        return block_ids

    def _copy_tail(
        self,
        saves: dict[int, TransferSpec],
        prompt: SharedPrompt,
        tails: Tails,
        end: int,
        block_ids: list[int],
    ) -> None:
        """Keep these blocks, and store them, as the tail of the first `end` tokens of a request."""
        name = tails.name(prompt, end)
        if name is None:
            return
        if self._host is not None:
            self._keep_tail_here(saves, prompt, self._host, name, block_ids)
        if self._has_store and self.stores and (mark := tails.mark(prompt, end)) is not None:
            index = end // self._unit
            spec = StoreSaveSpec(
                blocks=BlockSpans.of([(index, [block_id]) for block_id in block_ids]),
                prefix=prompt.key_prefix(self._prefix.current),
                hashes=[name] * len(block_ids),
                mark=(tails.states, mark),
            )
            self._store_tail(saves, spec)

    def _keep_tail_here(
        self,
        saves: dict[int, TransferSpec],
        prompt: SharedPrompt,
        host: HostBlocks,
        name: bytes,
        block_ids: list[int],
    ) -> None:
        most = self._max_held - self.num_held
        if not host.has_room(most):
            self._stats.count("blocks_dropped", len(block_ids))
            return
        # Of its hints none is followed: the next turn, which asks for the same, leaves another.
        filled = [
            FilledBlocks.of([Candidate(g, name, block_id, TAILS, prompt.tenant)])
            for g, block_id in enumerate(block_ids)
        ]
        self._keep(saves, host, filled, most, unsure=False, counted_as=_TAILS_KEPT)

    def _store_tail(self, saves: dict[int, TransferSpec], spec: StoreSaveSpec) -> None:
        names = list(enumerate(spec.hashes))
        if self._max_held - self.num_held < len(names):
            self._stats.count("blocks_dropped", len(names))
            return
        if any(each in self._sent for each in names):
            return
        self._sent.add(names)
        counted_as = _TAILS_KEPT if self._host is None else None
        self._store(saves, spec, len(names), counted_as)

    def _leave(self, prompt: SharedPrompt) -> None:
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
                turn[name] = first
            else:
                break
            self.waiting.popleft()
        of_groups: list[list[Candidate]] = [[] for _ in self._groups]
        for each in turn.values():
            of_groups[each.group].append(each)
        self._keep(
            meta.saves, host, [FilledBlocks.of(each) for each in of_groups], room, unsure=True
        )
        for prompt in over:
            self._put_in_order(prompt)

    def _doubt(self, blocks: Sequence[Sequence[EngineBlock]], had: int) -> None:
        """A connector beside this one loads blocks of a request, from the token `had` on."""
        self._doubtful_until = self._step + self._loaded_after
        self.loads_over(blocks, had)

    def loads_over(self, blocks: Sequence[Sequence[EngineBlock]], first: int) -> None:
        """Blocks of a request are loaded from the token `first` on, and not to be kept.

        They may have had the same hashes before, and may be entered here with them.
        """
        self._leave_out(
            {
                each.block_id
                for shape, whose in zip(self._groups, self._group_ids, strict=True)
                for each in blocks[whose][first // shape.block_size :]
            }
        )

    def blocks_void(self, block_ids: Set[int]) -> None:
        """These KV blocks hold what no model has computed: keep and store none of them."""
        self._leave_out(block_ids)
        for job_id in self._under_way:
            if not block_ids.isdisjoint(self._ledger.blocks_of([job_id])):
                self._void(job_id)

    def distrust(self) -> None:
        """Blocks that have filled may hold other KV than that they are named after: keep none, nor
        what is being copied."""
        self.suspend()
        for job_id in self._under_way:
            self._void(job_id)

    def _void(self, job_id: int) -> None:
        self._under_way[job_id] = False  # it may end before it can be stopped
        self._ledger.revoke([job_id])

    def _leave_out(self, block_ids: Set[int]) -> None:
        """Keep none of these blocks of those that have filled."""
        for run in self._filled:
            run.block_ids[:] = [NULL_BLOCK_ID if i in block_ids else i for i in run.block_ids]
        for place, each in enumerate(self.waiting):
            if isinstance(each, Candidate) and each.block_id in block_ids:
                self.waiting[place] = replace(each, block_id=NULL_BLOCK_ID)

    def _there(self, group: int, blocks: FilledBlocks) -> NDArray[np.bool_]:
        """Which of these blocks vLLM's own prefix cache still finds."""
        there = self._still_there(group, blocks.block_ids.tolist(), blocks.cached_as)
        return np.array(there, bool)

    def _still_there(
        self, group: int, block_ids: Sequence[int], hashes: Sequence[bytes]
    ) -> list[bool]:
        """Which of some blocks still hold what an earlier step has filled them with."""
        there = self._finds(self._group_ids[group], block_ids, hashes)
        if self._drafts_states and group in self._states:
            # Another request may have taken one, and with drafts its state follows its hash.
            pairs = zip(there, block_ids, strict=True)
            there = [found and self._ledger.is_free(block_id) for found, block_id in pairs]
        return there

    def _keep(
        self,
        saves: dict[int, TransferSpec],
        host: HostBlocks,
        filled: Sequence[FilledBlocks],
        most: int,
        unsure: bool,
        counted_as: str | None = None,
    ) -> None:
        """Start a job that copies blocks to the arena, and enter it into `saves`.

        Args:
            unsure: whether vLLM may have evicted some of them.
            counted_as: counter of the jobs that succeed.
        """
        if not any(map(len, filled)):
            return
        # More waiting blocks than vLLM has blocks cannot all be in vLLM's cache.
        max_waiting = self._num_blocks - len(self.waiting)
        there = self._there if unsure else _all_there
        spec, dropped, waiting = host.keep(filled, most, max_waiting, there)
        self.waiting += waiting
        if dropped:
            self._stats.count("blocks_dropped", dropped)
        if spec is not None:
            self._start(saves, host, spec, counted_as)

    def _start(
        self,
        saves: dict[int, TransferSpec],
        host: HostBlocks,
        spec: KeepSpec,
        counted_as: str | None = None,
    ) -> None:
        """Start a job that copies blocks to the arena; see `_keep`."""
        # A block that is divided has several slots.
        number = len(set(spec.blocks.held)) if host.divides else len(spec.slots)

        def end(failure: str | None) -> None:
            host.kept(job_id, failure)
            if failure is None and counted_as is not None:
                self._stats.count(counted_as)
            if failure not in (None, CANCELLED):
                self._stats.fail(failure)

        job_id = self._begin(saves, spec, number, end)
        host.keeping[job_id] = spec

    def _begin(
        self, saves: dict[int, TransferSpec], spec: TransferSpec, number: int, end: End
    ) -> int:
        """Start a job that copies so many blocks, enter it into `saves`, and return its number."""
        self.num_held += number

        def ended(failure: str | None) -> None:
            self.num_held -= number
            end(failure if self._under_way.pop(job_id) else CANCELLED)

        job_id = self._ledger.start(spec.blocks, ended, soon=_COPY_S)
        self._under_way[job_id] = True
        saves[job_id] = spec
        return job_id

    def _fill(
        self, prompt: SharedPrompt, computed: int, blocks_of: BlocksOf, in_place: int
    ) -> list[tuple[int, list[bytes], list[int]]]:
        """Enter the blocks of a prompt that have filled since the last time.

        Args:
            computed: tokens of the prompt that are computed with this step.
            in_place: tokens up to which states are in their blocks when the copies begin.

        Returns:
            For each group the index of the first block, names, and ids of the blocks, null blocks
            in the place of blocks that vLLM's prefix cache does not find.
        """
        parts: list[tuple[int, list[bytes], list[int]]] = []
        blocks: Sequence[Sequence[EngineBlock]] | None = None
        fills_at: list[int] = []
        # Else of the blocks before a unit's end, which vLLM names together, some are missed.
        computed = min(computed, prompt.request.num_tokens - self._tokens_ahead)
        kept_tokens = prompt.kept_tokens(computed)
        for g, shape in enumerate(self._groups):
            first = prompt.sent[g]
            if not shape.is_cached:
                parts.append((first, [], []))
                continue
            # vLLM names the blocks of other groups once a prefix can end behind them.
            unit = shape.block_size if shape.attention_type == "all" else self._unit
            has_state = shape.attention_type == "last"
            there = min(kept_tokens, in_place) if has_state else kept_tokens
            end = there // unit * unit // shape.block_size
            filled = prompt.full_hashes(g, first, end) if end > first else []
            block_ids: list[int] = []
            names = prompt.names_of(g, first, filled)
            if filled:
                prompt.sent[g] = first + len(filled)
                if blocks is None:
                    blocks = blocks_of(prompt.request.request_id)
                table = blocks[self._group_ids[g]][first : first + len(filled)]
                block_ids = [each.block_id for each in table]
                if has_state and prompt.states:
                    block_ids = self._with_freed(prompt, g, first, block_ids)
                if shape.attention_type != "all":
                    finds = partial(self._finds, self._group_ids[g])
                    block_ids = whole_blocks(shape, block_ids, filled, finds)
                if self._host is not None:
                    self._note(prompt, g, first, filled, names, block_ids)
            fills_at.append((prompt.sent[g] * shape.block_size // unit + 1) * unit)
            parts.append((first, names, block_ids))
        filled_at = min(fills_at)
        if kept_tokens < min(computed, filled_at):
            filled_at = _NEVER
            if not prompt.cut:  # a reset may have come since
                prompt.cut = True
                self._stats.count("answers_cut")
        prompt.fills_at = filled_at + self._tokens_ahead
        return parts

    def _note_states(self, prompt: SharedPrompt, end: int, blocks_of: BlocksOf) -> None:
        """Note the blocks of states that may be in place after this step. The next step keeps them;
        vLLM may have freed some of them by then.

        Args:
            end: tokens of the prompt that are computed with this step, drafts included.
        """
        blocks = blocks_of(prompt.request.request_id)
        prompt.states = {}
        for g in self._states:
            first = prompt.sent[g]
            filling = blocks[self._group_ids[g]][first : end // self._groups[g].block_size]
            for index, block in enumerate(filling, first):
                if not block.is_null:
                    prompt.states[g, index] = block.block_id

    def _with_freed(
        self, prompt: SharedPrompt, group: int, first: int, block_ids: list[int]
    ) -> list[int]:
        """Consecutive blocks of states. Null blocks are replaced by the blocks that were noted for
        them, if these are free.

        A free block keeps its content and its hash until vLLM gives it to a request.
        """
        found = list(block_ids)
        for place, block_id in enumerate(block_ids):
            freed = prompt.states.get((group, first + place))
            if block_id == NULL_BLOCK_ID and freed is not None and self._ledger.is_free(freed):
                found[place] = freed
        return found

    def _note(
        self,
        prompt: SharedPrompt,
        group: int,
        first: int,
        hashes: list[bytes],
        names: list[bytes],
        block_ids: list[int],
    ) -> None:
        """Enter blocks of a group of a prompt that may be kept in the arena."""
        keys = prompt.keys(names)
        if self._changes is not None:
            blocks = zip(keys, hashes, block_ids, strict=True)
            told = [
                (index, key, block_hash)
                for index, (key, block_hash, block_id) in enumerate(blocks, first)
                if block_id != NULL_BLOCK_ID or self._changes.unreported(group, key)
            ]
            self._changes.filled(prompt.request, group, told)
        if NULL_BLOCK_ID in block_ids:
            whole = [i for i, block_id in enumerate(block_ids) if block_id != NULL_BLOCK_ID]
            keys = [keys[i] for i in whole]
            hashes = [hashes[i] for i in whole]
            block_ids = [block_ids[i] for i in whole]
        if not keys:
            return
        if not self.num_filled:
            self._consider_at = self._clock() + _LATEST_S
        of_prompt = not prompt.answers
        self._filled.append(_Run(group, prompt, of_prompt, self._step, keys, hashes, block_ids))
        self.num_filled += len(keys)
        if of_prompt:
            self._num_of_prompts += len(keys)

    def _save(
        self,
        meta: CopyWork,
        prompt: SharedPrompt,
        computed: int,
        blocks_of: BlocksOf,
        in_place: int,
    ) -> None:
        """Enter the blocks that have filled, and start their copies to the store."""
        parts = self._fill(prompt, computed, blocks_of, in_place)
        if not (self._has_store and self.stores):
            return
        groups: list[tuple[int, list[int]]] = []
        number = 0
        for g, (first, names, part) in enumerate(parts):
            most = self._max_held - self.num_held - number
            block_ids, stored = self._stored(prompt, g, first, names, part, most)
            number += stored
            groups.append((first, block_ids))
        if not number:
            return
        spec = StoreSaveSpec(
            blocks=BlockSpans.of(groups),
            prefix=prompt.key_prefix(self._prefix.current),
            hashes=[name for _, names, _ in parts for name in names],
        )
        self._store(meta.saves, spec, number)

    def _store(
        self,
        saves: dict[int, TransferSpec],
        spec: StoreSaveSpec,
        number: int,
        counted_as: str | None = None,
    ) -> None:
        """Start a job that stores so many blocks, and enter it into `saves`; see `_keep`."""

        def end(failure: str | None) -> None:
            if failure is None and counted_as is not None:
                self._stats.count(counted_as)

        self._begin(saves, spec, number, end)

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
        self.suspend()
        self._sent = ExpiringSet[BlockName](_RECENT_S, self._clock)

    def suspend(self) -> None:
        """Keep nothing of what has filled until now, except what is being copied."""
        self.waiting.clear()
        self.forget_filled()

    def forget_filled(self) -> None:
        """Consider nothing that has filled until now."""
        self._filled.clear()
        self.num_filled = 0
        self._num_of_prompts = 0
        self._considering = False
        self._over.clear()


def _tokens_kept(shapes: Sequence[GroupShape]) -> int:
    """Tokens for which a request keeps a block of each of these groups as it is after it has
    filled: 0 if a recurrent state is among them, which may be overwritten."""
    passing = [shape for shape in shapes if shape.attention_type != "all"]
    return min(
        (shape.window if shape.attention_type == "window" else 0 for shape in passing),
        default=_NEVER,
    )


def _all_there(group: int, blocks: FilledBlocks) -> NDArray[np.bool_]:
    return np.ones(len(blocks), bool)
