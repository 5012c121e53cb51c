# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the shared prefix cache: what is fetched from the store, what goes there.

All of it is best effort. A lookup that is late, a block that is gone when it is fetched, a copy
for which there is no room: each means that tokens are computed here, and nothing else. So a
failed load is never reported to vLLM, whose policy could end the request for it: the request is
sent back to its queue before vLLM hears that the load is over.

Blocks are copied as they fill, and held meanwhile (see `CopyLedger`).
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from omni_connector.kv.ledger import CANCELLED, CopyLedger, CopyWork
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.prefix.jobs import StoreLoadSpec, StoreSaveSpec
from omni_connector.prefix.lookups import BlockName, Lookup, Recently, StoreLookups
from omni_connector.prefix.shared_blocks import CORRUPT
from omni_connector.stats import Stats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.omni_connector.shared_prefix")

# Copies under way hold this part of all KV blocks at most; what is beyond it is not stored.
_HELD_PART: Final = 4

# For so long a block that was sent to the store is not sent again.
_RECENT_S: Final = 30.0

_NEVER: Final = 1 << 62

# A copy that began this long ago is one that waits for the store.
_COPY_S: Final = 0.1


@dataclass(slots=True, eq=False)
class _Prompt:
    request: "Request"
    loads: bool
    hashed_tokens: int | None  # where hashes cease to be those of its tokens
    adapter: str  # its content
    sent: list[int]  # for each group, the blocks already considered for the store
    lookup: Lookup | None = None
    local: int | None = None  # tokens that vLLM has itself; None until it asks
    offered: int = 0  # tokens beyond them that can be loaded
    missed: bool = False
    admitted: bool = False  # since the lookup
    job_id: int | None = None
    void: bool = False  # what is loaded for it is of other weights


class SharedPrefix:
    """Finds, loads and stores the full blocks of prompts in a store that engines share.

    Args:
        lookups: asks the store; closed with this.
        ledger: the copy jobs.
        prefix: of this engine's keys.
        groups: what this engine keeps, none of it recurrent.
        group_ids: index of each transferred group among vLLM's groups.
        hash_block_size: tokens of one of a request's hashes; divides every group's block size.
        num_blocks: KV blocks of this engine.
        weights_fixed: a reset changes no weights, so that what is stored stays true.
        lookup_timeout: seconds a request waits for the store's answer.
        load_timeout: seconds for the bytes.
        clock: seconds, monotonic.
        randbytes: so many bytes that nobody can guess.
        stats: where to count.
    """

    def __init__(
        self,
        *,
        lookups: StoreLookups,
        ledger: CopyLedger,
        prefix: str,
        groups: tuple[GroupShape, ...],
        group_ids: tuple[int, ...],
        hash_block_size: int,
        num_blocks: int,
        weights_fixed: bool,
        lookup_timeout: float,
        load_timeout: float,
        clock: Callable[[], float],
        randbytes: Callable[[int], bytes],
        stats: Stats,
    ) -> None:
        self._randbytes = randbytes
        self._lookups = lookups
        self._ledger = ledger
        self._engines_prefix = self._prefix = prefix
        self._weights_fixed = weights_fixed
        self._groups = groups
        self._group_ids = group_ids
        self._hashes_a_block = [shape.block_size // hash_block_size for shape in groups]
        self._unit = math.lcm(*(shape.block_size for shape in groups))
        self._max_held = max(1, num_blocks // _HELD_PART)
        self._lookup_timeout = lookup_timeout
        self._load_timeout = load_timeout
        self._clock = clock
        self._stats = stats
        self._prompts: dict[str, _Prompt] = {}
        self._num_held = 0
        self._queued: dict[int, StoreLoadSpec] = {}
        self._failed: list[Request] = []
        self._sent = Recently(_RECENT_S, clock)

    def add(self, request: "Request", *, stops_early: bool = False, adapter: str = "") -> None:
        """A request has arrived: ask what the store holds of its prompt.

        Args:
            stops_early: its prompt was shortened, and its hashes were not.
            adapter: digest of what its LoRA adapter contains.
        """
        prompt = _Prompt(
            request=request,
            # As for prompt log-probabilities: every token is computed.
            loads=not request.skip_reading_prefix_cache,
            hashed_tokens=request.num_prompt_tokens if stops_early else None,
            adapter=adapter,
            sent=[0] * len(self._groups),
        )
        self._prompts[request.request_id] = prompt
        self._look_up(prompt)

    def _look_up(self, prompt: _Prompt) -> None:
        prompt.admitted, prompt.local = False, None
        hashes = [self._hashes(prompt, g, 0, None) for g in range(len(self._groups))]
        if any(hashes):
            deadline = self._clock() + self._lookup_timeout
            prompt.lookup = Lookup(self._keys_of(prompt), hashes, deadline)
            self._lookups.ask(prompt.lookup)

    def _keys_of(self, prompt: _Prompt) -> str:
        return f"{self._prefix}/{prompt.adapter}" if prompt.adapter else self._prefix

    def _hashes(self, prompt: _Prompt, group: int, first: int, end: int | None) -> list[bytes]:
        """Hashes of these blocks of a group, as far as they are known."""
        step = self._hashes_a_block[group]
        if prompt.hashed_tokens is not None:
            known = prompt.hashed_tokens // self._groups[group].block_size
            end = known if end is None else min(end, known)
        stop = None if end is None else end * step
        return [
            bytes(h) for h in prompt.request.block_hashes[first * step + step - 1 : stop : step]
        ]

    def matched_tokens(self, request: "Request", num_computed: int) -> int | None:
        """Tokens that can be loaded beyond `num_computed`; None while the store is asked."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.loads:
            return 0
        if prompt.admitted:  # and preempted since
            self._look_up(prompt)
        lookup = prompt.lookup
        if lookup is None:
            return 0
        if lookup.held is None:
            if self._clock() < lookup.deadline:
                return None
            self._stats.fail("store_lookup_timeout")
            prompt.lookup = None
            return 0
        if prompt.local == num_computed:  # asked again, as there was no room
            return prompt.offered
        prompt.local = num_computed
        last = (request.num_tokens - 1) // self._unit * self._unit  # one is computed for its logits
        prompt.offered = max(0, self._reach(lookup, num_computed, last) - num_computed)
        prompt.missed = not prompt.offered and num_computed < last
        return prompt.offered

    def _reach(self, lookup: Lookup, start: int, end: int) -> int:
        """Where the longest prefix ends that can be had by loading from token `start` on."""
        assert lookup.held is not None
        pairs = list(zip(self._groups, lookup.held, strict=True))
        for shape, held in pairs:
            if shape.keeps == "all":
                end = min(end, held.reach(start // shape.block_size) * shape.block_size)
        for tokens in range(end // self._unit * self._unit, start, -self._unit):
            if all(held.has(_read(shape, start, tokens)) for shape, held in pairs):
                return tokens
        return start

    def offers(self, request_id: str) -> bool:
        """Whether tokens that vLLM now allocates blocks for are to be loaded by us."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and prompt.offered > 0

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", num_external: int) -> None:
        """vLLM has allocated blocks for `num_external` tokens of ours, or decided against it."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return
        local, prompt.local, prompt.offered = prompt.local, None, 0
        if num_external <= 0:
            prompt.admitted = True
            self._stats.count("store_misses", prompt.missed)
            prompt.missed = False
            return
        lookup = prompt.lookup
        assert lookup is not None, "tokens are matched only by a lookup"
        assert local is not None
        self._load(prompt, lookup, blocks, local, local + num_external)

    def _load(
        self, prompt: _Prompt, lookup: Lookup, blocks: "KVCacheBlocks", start: int, end: int
    ) -> None:
        request_id = prompt.request.request_id
        tables = blocks.get_block_ids()
        names: list[BlockName] = []
        groups: list[tuple[int, list[int]]] = []
        hashes: list[bytes] = []
        for g, shape in enumerate(self._groups):
            table, read = tables[self._group_ids[g]], _read(shape, start, end)
            if len(table) < read.stop or NULL_BLOCK_ID in table[read.start : read.stop]:
                raise RuntimeError(f"request {request_id}: vLLM allocated no block of group {g}")
            first = start // shape.block_size
            groups.append((first, table[first : read.stop]))
            wanted = lookup.hashes[g][read.start : read.stop]
            hashes += [b""] * (read.stop - first - len(wanted)) + wanted
            names += [(g, each) for each in wanted]
        spec = StoreLoadSpec(
            request_id=request_id,
            blocks=BlockSpans.of(groups),
            prefix=lookup.prefix,
            hashes=hashes,
            timeout=self._load_timeout,
        )
        prompt.job_id = self._ledger.start(
            spec.blocks, lambda failure: self._loaded(prompt, end - start, names, failure)
        )
        self._queued[prompt.job_id] = spec

    def build(
        self,
        meta: CopyWork,
        scheduler_output: "SchedulerOutput",
        manager: "KVCacheManager",
    ) -> None:
        """Add this step's loads and saves to `meta`."""
        meta.loads |= self._queued
        self._queued.clear()
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            computed = prompt.request.num_computed_tokens + tokens
            self._save(meta, prompt, computed, manager)

    def _save(
        self, meta: CopyWork, prompt: _Prompt, computed: int, manager: "KVCacheManager"
    ) -> None:
        groups: list[tuple[int, list[int]]] = []
        hashes: list[bytes] = []
        number = 0
        tables = None
        for g, shape in enumerate(self._groups):
            first, end = prompt.sent[g], computed // shape.block_size
            filled = self._hashes(prompt, g, first, end) if end > first else []
            block_ids: list[int] = []
            if filled:
                prompt.sent[g] = first + len(filled)
                if tables is None:
                    tables = manager.get_block_ids(prompt.request.request_id)
                table = tables[self._group_ids[g]]
                block_ids, stored = self._stored(prompt, g, first, filled, table)
                number += stored
            groups.append((first, block_ids))
            hashes += filled
        if not number:
            return
        self._num_held += number
        spec = StoreSaveSpec(
            blocks=BlockSpans.of(groups), prefix=self._keys_of(prompt), hashes=hashes
        )
        job_id = self._ledger.start(spec.blocks, lambda failure: self._let_go(number), soon=_COPY_S)
        meta.saves[job_id] = spec

    def _stored(
        self, prompt: _Prompt, group: int, first: int, hashes: list[bytes], table: list[int]
    ) -> tuple[list[int], int]:
        """Blocks with null blocks for those that are not to be stored; how many are."""
        lookup = prompt.lookup
        held = lookup.held[group].blocks if lookup is not None and lookup.held else []
        block_ids = []
        stored = 0
        for i, block_hash in enumerate(hashes, first):
            name = (group, block_hash)
            block_id = table[i]
            if (i < len(held) and held[i]) or name in self._sent:
                block_id = NULL_BLOCK_ID
            if block_id != NULL_BLOCK_ID and self._num_held + stored >= self._max_held:
                self._stats.count("blocks_dropped")
                block_id = NULL_BLOCK_ID
            if block_id != NULL_BLOCK_ID:
                self._sent.add([name])
                stored += 1
            block_ids.append(block_id)
        return block_ids, stored

    def _let_go(self, num_blocks: int) -> None:
        self._num_held -= num_blocks

    def _loaded(
        self, prompt: _Prompt, num_tokens: int, names: list[BlockName], failure: str | None
    ) -> None:
        prompt.job_id = None
        if prompt.void:
            prompt.void, prompt.lookup = False, None
            self._failed.append(prompt.request)
            return
        if failure is None:
            self._stats.count("tokens_shared", num_tokens)
            return
        prompt.loads = False
        prompt.lookup = None  # it is not as it said: what is computed now is stored again
        if failure != CANCELLED:
            self._stats.fail(failure)
        if failure == CORRUPT:
            self._lookups.distrust(names)
        self._failed.append(prompt.request)

    def take_failed(self) -> "list[Request]":
        """Requests whose loads have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def finish(self, request_id: str) -> None:
        """The request is over; a load under way is told to stop."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None and prompt.job_id is not None:
            self._ledger.revoke([prompt.job_id])

    def load_nothing(self, request_id: str) -> None:
        """A load of this request has failed: all of it is computed here.

        vLLM goes on counting the blocks that it still wanted among those that loads will need.
        Several such requests that are offered a second load would wait for each other for ever.
        """
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            prompt.loads, prompt.offered = False, 0

    def void(self) -> None:
        """The prefix cache was reset: use nothing that was asked for or loaded before.

        The model may have other weights from here on, so that nothing is shared with what is stored
        now, nor with other engines, of which nobody knows whether they have the same ones; unless
        the operator has declared that they stay.
        """
        if not self._weights_fixed:
            self._prefix = f"{self._engines_prefix}/{self._randbytes(8).hex()}"
        self._sent = Recently(_RECENT_S, self._clock)
        for prompt in self._prompts.values():
            # What vLLM computes anew is stored anew; what goes on upon old blocks is not stored.
            goes_on = prompt.request.num_computed_tokens and prompt.job_id is None
            prompt.sent = [_NEVER if goes_on else 0] * len(self._groups)
            if prompt.job_id is None:
                prompt.lookup, prompt.offered = None, 0
            else:
                prompt.void = True
                self._ledger.revoke([prompt.job_id])

    def count_failures(self) -> None:
        """Count what failed in the store since the last call."""
        self._lookups.count_into(self._stats)

    def close(self) -> None:
        """Stop asking the store. Idempotent."""
        self._lookups.close()


def _read(shape: GroupShape, start: int, end: int) -> range:
    """Blocks of the tokens from `start` to `end` that a later token reads."""
    needed = shape.needed(end)
    return range(max(needed.start, start // shape.block_size), needed.stop)
