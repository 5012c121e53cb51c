# SPDX-License-Identifier: Apache-2.0
"""Saves of full blocks, to the own arena and to the store.

Blocks of a prompt are considered when a step has computed them, and those of its answer when the
request ends. Where blocks leave a window, or hold a state that later steps overwrite, those of an
answer are considered when they have filled, too.

Copies under way hold their blocks (see `CopyLedger`), at most a quarter of the engine's blocks.
Further blocks wait in one queue until copies have ended. A waiting block is not held: it is copied
later if vLLM still finds it by its hash. With EAGLE and MTP this hash does not cover all that a
block was computed from, so blocks are dropped then.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import cycle
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
from omni_connector.copy.prefix_jobs import StoreSaveSpec
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans, TransferSpec, whole_blocks
from omni_connector.prefix.block_changes import BlockChanges
from omni_connector.prefix.filled import FilledRuns
from omni_connector.prefix.hints import Candidate, FilledBlocks, Hints
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


class _Run(NamedTuple):
    """Consecutive full blocks of one group of a prompt.

    Attributes:
        group: position among the transferred groups.
        prompt: whose blocks they are.
        keys, hashes, block_ids: of each block. The ids are null blocks for blocks not to be kept.
        hints: which the blocks have.
    """

    group: int
    prompt: SharedPrompt
    keys: list[bytes]
    hashes: list[bytes]
    block_ids: list[int]
    hints: Hints


class PrefixSaves:
    """Starts the copies of full blocks.

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
        num_waiting: blocks to copy in later steps, which may be steps without tokens.
        queued: jobs that start with the next step, by number. `SharedPrefix.step` takes them.
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
        self._step = 0
        # Step up to which a load by another connector may turn out to have failed; see `_LOADED`.
        self._doubtful_until = 0
        self._loaded_after = _LOADED + stages
        # The prompts of which steps may fill blocks that are to be considered at once.
        self._filling: dict[SharedPrompt, None] = {}
        # Tokens for which a request keeps each block of its answer as it has filled.
        self._keeps = _tokens_kept(groups.shapes) - 2 * tokens_a_step - groups.tokens_ahead
        # Whether its last blocks are kept as they filled when it ends: not those of states.
        self._lasting = tails is None and all(
            shape.attention_type != "last" for shape in groups.shapes if shape.is_cached
        )
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
        self.alone = alone
        self._tails = tails
        self._states = [g for g, each in enumerate(groups.shapes) if each.attention_type == "last"]
        self._drafts_states = tokens_a_step > 1 and bool(self._states)
        self._finds = finds
        self._stats = context.stats
        self._clock = context.clock
        self._changes = changes
        self.num_held = 0
        # The jobs under way, and whether what they copy is what their blocks are named after.
        self._under_way: dict[int, bool] = {}
        self.queued: dict[int, TransferSpec] = {}
        # Steps that have begun and not ended; and jobs for the store that wait until so many of
        # them have ended.
        self._steps = 0
        self._unsure: deque[tuple[int, dict[int, TransferSpec]]] = deque()
        # Blocks of groups for which copies had no room; their number. A request that has ended
        # stands behind its last ones.
        self._waiting: deque[tuple[int, FilledBlocks] | SharedPrompt] = deque()
        self.num_waiting = 0
        # For `Candidate.prompt`, so that waiting blocks of different prompts differ.
        self._prompt_numbers = cycle(range(256))
        self._sent = ExpiringSet[BlockName](_RECENT_S, context.clock)

    @property
    def has_work(self) -> bool:
        """Whether a step without tokens would start copies."""
        return bool(self._waiting)

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
        runs: list[_Run] = []
        for prompt in list(self._filling):
            request = prompt.request
            # Until it is scheduled, its blocks may be those of a load under way.
            if tokens := scheduled.get(request.request_id):
                fills = request.num_computed_tokens + tokens >= prompt.fills_at
                if fills or not self._lasting:
                    has_drafts = request.request_id in drafted
                    runs += self._look_at(meta, prompt, tokens, blocks_of, has_drafts)
        if self._host is None:
            return
        if self._waiting:
            self._keep_waiting(meta.saves, self._host)
        if runs:
            self._keep(meta.saves, self._host, runs)

    def _look_at(
        self,
        meta: CopyWork,
        prompt: SharedPrompt,
        tokens: int,
        blocks_of: BlocksOf,
        has_drafts: bool,
    ) -> list[_Run]:
        """Store the blocks that fill with the next tokens of a prompt; return those to keep."""
        request = prompt.request
        had, prompt.had = prompt.had, None
        prompt.scheduled = True
        if had is not None:  # vLLM has just admitted it
            # Alone, it has found the rest within a block itself (`--prefix-match-unit`).
            if request.num_computed_tokens > had and not self.alone:
                self._doubt(blocks_of(request.request_id), had)
            if self._step <= self._doubtful_until:
                prompt.doubtful_until = self._step + self._loaded_after
        if self._step < prompt.doubtful_until:
            return []
        runs: list[_Run] = []
        end = request.num_computed_tokens + tokens
        if end >= prompt.fills_at:
            in_place = request.num_computed_tokens if has_drafts else end
            runs = self._save(meta.saves, prompt, end, blocks_of, in_place)
            if self._lasting and prompt.fills_at - self._tokens_ahead > request.num_tokens:
                self._await_answer(prompt)
        if self._drafts_states and end >= prompt.fills_at - self._tokens_ahead:
            self._note_states(prompt, end, blocks_of)
        if self._tails is not None and had is None:
            self._keep_prompt(meta, prompt, self._tails, blocks_of)
        return runs

    def _await_answer(self, prompt: SharedPrompt) -> None:
        """Only the answer fills further blocks: look at them before one leaves its window, or when
        the request ends."""
        if self._keeps >= _NEVER // 2:
            del self._filling[prompt]
        else:
            prompt.fills_at += max(0, self._keeps)

    def begin(self, prompt: SharedPrompt) -> None:
        """vLLM has allocated blocks for a prompt, which steps fill from now on."""
        prompt.fills_at = 0
        if prompt.hints.cache != "no":
            self._filling[prompt] = None

    def finish(self, prompt: SharedPrompt, blocks_of: BlocksOf | None) -> None:
        """The prompt's request has ended; vLLM still has its blocks.

        Args:
            blocks_of: as for `build`; None where it is not known with which weights the last blocks
                were computed: they are not kept.
        """
        self._filling.pop(prompt, None)
        if blocks_of is not None:
            if self._tails is not None:
                self._keep_tail(prompt, self._tails, blocks_of)
            # The last token of an answer is not computed. The KV of a drafter is right once the
            # tokens are computed that it depends on.
            end = min(prompt.request.num_computed_tokens, prompt.request.num_tokens - 1)
            end = max(0, end - self._tokens_ahead)
            if self._lasting and self._may_keep(prompt):
                runs = self._save(self.queued, prompt, end, blocks_of, end)
                if self._host is not None and runs:
                    self._keep(self.queued, self._host, runs)
        if self._host is not None:
            if self._waiting:
                self._waiting.append(prompt)
            # A single job of a single group leaves its slots in the right order.
            elif prompt.keeps * len(self._groups) > 1:
                self._put_in_order(self._host, prompt)

    def _may_keep(self, prompt: SharedPrompt) -> bool:
        """Whether a request's last blocks hold what vLLM has computed for it, and are wanted."""
        return (
            prompt.scheduled
            and prompt.had is None
            and not prompt.jobs
            and prompt.hints.cache != "no"
            and self._step >= prompt.doubtful_until
        )

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
            not self._may_keep(prompt)
            or max(prompt.sent) >= _NEVER
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
            self._store_tail(saves, prompt, spec)

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
            FilledBlocks.of([Candidate(g, name, block_id, TAILS)])
            for g, block_id in enumerate(block_ids)
        ]
        self._copy(saves, host, filled, most, _all_there, counted_as=_TAILS_KEPT)

    def _store_tail(
        self, saves: dict[int, TransferSpec], prompt: SharedPrompt, spec: StoreSaveSpec
    ) -> None:
        names = list(enumerate(spec.hashes))
        if self._max_held - self.num_held < len(names):
            self._stats.count("blocks_dropped", len(names))
            return
        if any(each in self._sent for each in names):
            return
        self._sent.add(names)
        counted_as = _TAILS_KEPT if self._host is None else None
        self._store(saves, prompt, spec, len(names), counted_as)

    def _put_in_order(self, host: HostBlocks, prompt: SharedPrompt) -> None:
        ends = [min(sent, MAX_IN_ORDER) for sent in prompt.sent]
        hashes = [prompt.full_hashes(g, 0, end) for g, end in enumerate(ends)]
        names = [prompt.names_of(g, 0, of_group) for g, of_group in enumerate(hashes)]
        host.finished([prompt.keys(of_group) for of_group in names])

    def _room(self, host: HostBlocks) -> int:
        return host.room(self._max_held - self.num_held)

    def _keep(self, saves: dict[int, TransferSpec], host: HostBlocks, runs: Sequence[_Run]) -> None:
        """Copy blocks to the arena, as many as there is room for; the others wait."""
        self._copy(saves, host, self._columns(runs), self._room(host), _all_there)

    def _keep_waiting(self, saves: dict[int, TransferSpec], host: HostBlocks) -> None:
        """Copy waiting blocks, as many as there is room for."""
        left = room = min(_AT_ONCE, self._room(host))
        if not room and not isinstance(self._waiting[0], SharedPrompt):
            return  # in most steps while copies are under way
        now: list[list[FilledBlocks]] = [[] for _ in self._groups]
        over: list[SharedPrompt] = []
        while self._waiting and (left or isinstance(self._waiting[0], SharedPrompt)):
            first = self._waiting.popleft()
            if isinstance(first, SharedPrompt):
                over.append(first)
                continue
            group, blocks = first
            count = min(len(blocks), left)
            left -= count
            now[group].append(blocks.at(np.arange(count)))
            if count < len(blocks):
                self._waiting.appendleft((group, blocks.at(np.arange(count, len(blocks)))))
        self.num_waiting -= room - left
        # Meanwhile vLLM may have freed blocks, and given them to others.
        self._copy(saves, host, [*map(FilledBlocks.joined, now)], room, self._there)
        for prompt in over:
            self._put_in_order(host, prompt)

    def _columns(self, runs: Iterable[_Run]) -> list[FilledBlocks]:
        """The blocks of these runs, by group."""
        columns = [FilledRuns() for _ in self._groups]
        prompts = set[SharedPrompt]()
        for run in runs:
            prompt = run.prompt
            if prompt not in prompts:
                prompts.add(prompt)
                if not prompt.keeps:
                    found = (prompt.reached or 0) // self._unit
                    prompt.number = next(self._prompt_numbers) * DEPTHS + depth_of(found)
                prompt.keeps += 1
            columns[run.group].add(
                run.keys,
                run.hashes,
                run.block_ids,
                prompt=prompt.number,
                hints=run.hints,
            )
        return [each.blocks() for each in columns]

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
        for job_id in list(self._under_way):
            if not block_ids.isdisjoint(self._ledger.blocks_of([job_id])):
                self._void(job_id)

    def distrust(self) -> None:
        """Full blocks may hold other KV than that they are named after: keep none that waits or is
        being copied."""
        self.suspend()
        for job_id in list(self._under_way):
            self._void(job_id)

    def withdraw(self) -> None:
        """Give up the copies that no worker was told of: a step would start them, and none comes
        while somebody waits for the engine's copies to end."""
        for jobs in (self.queued, *(each for _, each in self._unsure)):
            for job_id in list(jobs):
                self._void(job_id)

    def _void(self, job_id: int) -> None:
        self._under_way[job_id] = False  # it may end before it can be stopped
        for jobs in (self.queued, *(each for _, each in self._unsure)):
            if jobs.pop(job_id, None) is not None:  # others find at once what a store has
                self._ledger.withdraw(job_id)
                return
        self._ledger.revoke([job_id])

    def _leave_out(self, block_ids: Set[int]) -> None:
        """Keep none of these blocks of those that wait."""
        void = np.fromiter(block_ids, np.int64, len(block_ids))
        for each in self._waiting:
            if not isinstance(each, SharedPrompt):
                _, blocks = each
                blocks.block_ids[np.isin(blocks.block_ids, void)] = NULL_BLOCK_ID

    def _there(self, group: int, blocks: FilledBlocks) -> NDArray[np.bool_]:
        """Which of these blocks vLLM's own prefix cache still finds."""
        block_ids = blocks.block_ids.tolist()
        there = self._finds(self._group_ids[group], block_ids, blocks.cached_as)
        if self._drafts_states and group in self._states:
            # Another request may have taken one, and with drafts its state follows its hash.
            pairs = zip(there, block_ids, strict=True)
            there = [found and self._ledger.is_free(block_id) for found, block_id in pairs]
        return np.array(there, bool)

    def _copy(
        self,
        saves: dict[int, TransferSpec],
        host: HostBlocks,
        filled: Sequence[FilledBlocks],
        most: int,
        there: Callable[[int, FilledBlocks], NDArray[np.bool_]],
        counted_as: str | None = None,
    ) -> None:
        """Start a job that copies blocks to the arena, and enter it into `saves`.

        Args:
            most: blocks that are copied at most; others wait.
            there: see `HostBlocks.keep`.
            counted_as: counter of the jobs that succeed.
        """
        if not any(map(len, filled)):
            return
        # No more blocks wait than vLLM has, as its cache would lack some; and with EAGLE and MTP
        # none.
        max_waiting = 0 if self._tokens_ahead else max(0, self._num_blocks - self.num_waiting)
        spec, dropped, waiting = host.keep(filled, most, max_waiting, there)
        self._waiting += waiting
        self.num_waiting += sum(len(blocks) for _, blocks in waiting)
        if dropped:
            self._stats.count("blocks_dropped", dropped)
        if spec is None:
            return
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
    ) -> tuple[list[tuple[int, list[bytes], list[int]]], list[_Run]]:
        """The blocks of a prompt that have filled since the last time.

        Args:
            computed: tokens of the prompt that are computed with this step.
            in_place: tokens up to which states are in their blocks when the copies begin.

        Returns:
            For each group the index of the first block, names, and ids of the blocks, null blocks
            in the place of blocks that vLLM's prefix cache does not find. And those that may be
            kept in the arena.
        """
        parts: list[tuple[int, list[bytes], list[int]]] = []
        runs: list[_Run] = []
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
                    runs += self._runs(prompt, g, first, filled, names, block_ids)
            fills_at.append((prompt.sent[g] * shape.block_size // unit + 1) * unit)
            parts.append((first, names, block_ids))
        filled_at = min(fills_at)
        if kept_tokens < min(computed, filled_at):
            filled_at = _NEVER
            if not prompt.cut:  # a reset may have come since
                prompt.cut = True
                self._stats.count("answers_cut")
        prompt.fills_at = filled_at + self._tokens_ahead
        return parts, runs

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

    def _runs(
        self,
        prompt: SharedPrompt,
        group: int,
        first: int,
        hashes: list[bytes],
        names: list[bytes],
        block_ids: list[int],
    ) -> list[_Run]:
        """Those of some full blocks of a group that may be kept in the arena; for events, tell of
        them."""
        keys = prompt.keys(names)
        if self._changes is not None:
            blocks = zip(keys, hashes, block_ids, strict=True)
            told = [
                (index, key, block_hash)
                for index, (key, block_hash, block_id) in enumerate(blocks, first)
                if block_id != NULL_BLOCK_ID or self._changes.unreported(group, key)
            ]
            self._changes.filled(prompt.request, group, told)
        size = self._groups[group].block_size
        runs = []
        for part, hints in prompt.hints.parts(first, len(keys), size):
            whole = [i for i in part if block_ids[i] != NULL_BLOCK_ID]
            if len(whole) == len(keys):  # most often
                runs.append(_Run(group, prompt, keys, hashes, block_ids, hints))
            elif whole:
                ids = [block_ids[i] for i in whole]
                named = [keys[i] for i in whole], [hashes[i] for i in whole]
                runs.append(_Run(group, prompt, *named, ids, hints))
        return runs

    def _save(
        self,
        saves: dict[int, TransferSpec],
        prompt: SharedPrompt,
        computed: int,
        blocks_of: BlocksOf,
        in_place: int,
    ) -> list[_Run]:
        """Start the copies to the store of blocks that have filled; return those to keep."""
        parts, runs = self._fill(prompt, computed, blocks_of, in_place)
        if not (self._has_store and self.stores):
            return runs
        groups: list[tuple[int, list[int]]] = []
        number = 0
        for g, (first, names, part) in enumerate(parts):
            most = self._max_held - self.num_held - number
            block_ids, stored = self._stored(prompt, g, first, names, part, most)
            number += stored
            groups.append((first, block_ids))
        if number:
            spec = StoreSaveSpec(
                blocks=BlockSpans.of(groups),
                prefix=prompt.key_prefix(self._prefix.current),
                hashes=[name for _, names, _ in parts for name in names],
            )
            self._store(saves, prompt, spec, number)
        return runs

    def _store(
        self,
        saves: dict[int, TransferSpec],
        prompt: SharedPrompt,
        spec: StoreSaveSpec,
        number: int,
        counted_as: str | None = None,
    ) -> None:
        """Start a job that stores so many blocks, and enter it into `saves`; see `_keep`.

        Others find at once what a store has. So blocks of a prompt with an adapter wait until the
        workers have told which adapters they loaded in the steps under way: it may be another
        version of this one.
        """

        def end(failure: str | None) -> None:
            if failure is None and counted_as is not None:
                self._stats.count(counted_as)

        if prompt.adapter and self._steps:
            self._unsure.append((self._steps, saves := {}))
        self._begin(saves, spec, number, end)

    def step_begins(self) -> None:
        """A step is being built."""
        self._steps += 1

    def step_ended(self) -> None:
        """A step has ended, and what the workers had to tell of it is told."""
        self._steps = max(0, self._steps - 1)
        for _ in range(len(self._unsure)):
            steps, jobs = self._unsure.popleft()
            if steps > 1:
                self._unsure.append((steps - 1, jobs))
                continue
            self.queued |= jobs

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
        """Keep nothing of what waits."""
        self._waiting.clear()
        self.num_waiting = 0


def _tokens_kept(shapes: Sequence[GroupShape]) -> int:
    """Tokens for which a request keeps a block of each of these groups after it has filled."""
    passing = [shape for shape in shapes if shape.is_cached and shape.attention_type != "all"]
    return min(
        (shape.window if shape.attention_type == "window" else 0 for shape in passing),
        default=_NEVER,
    )


def _all_there(group: int, blocks: FilledBlocks) -> NDArray[np.bool_]:
    return np.ones(len(blocks), bool)
