# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the shared prefix cache: what is loaded from the store, and saved to it.

All of it is best effort. A lookup may be late, a block may be gone when it is fetched, or there may
be no room for a copy: then tokens are computed here, and nothing else follows. So a failed load is
never reported to vLLM, because its policy could end the request for it. The request is sent back to
its queue before vLLM hears that the load is over.

Blocks are copied when they have filled, and held until the copy has ended (see `CopyLedger`).
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_connector.kv.ledger import CANCELLED, CopyLedger, CopyWork, EngineRequest
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.prefix.jobs import StoreLoadSpec, StoreSaveSpec
from omni_connector.prefix.lookups import BlockName, Lookup, Recently, StoreLookups
from omni_connector.prefix.shared_blocks import CORRUPT
from omni_connector.stats import Stats

logger = logging.getLogger("vllm.omni_connector.shared_prefix")

BlockTables = tuple[list[int], ...]
"""The block ids of one request, for each of vLLM's groups."""

# Copies under way hold at most one in so many KV blocks. Blocks beyond that are not stored.
_HELD_PART: Final = 4

# A block that was sent to the store is not sent again for so many seconds.
_RECENT_S: Final = 30.0

_NEVER: Final = 1 << 62

# A copy that began more seconds ago than this waits for the store.
_COPY_S: Final = 0.1


@dataclass(slots=True, eq=False)
class _Prompt:
    request: EngineRequest
    loads: bool
    hashed_tokens: int | None  # where its hashes end to be those of its tokens; None: nowhere
    adapter: str  # digest of the LoRA adapter's content; "" without one
    sent: list[int]  # for each group, the blocks already considered for the store
    lookup: Lookup | None = None
    local: int | None = None  # tokens that vLLM has itself; None until it asks
    offered: int = 0  # tokens beyond them that can be loaded
    missed: bool = False
    admitted: bool = False  # vLLM has scheduled it since the lookup
    job_id: int | None = None
    void: bool = False  # what is being loaded for it belongs to other weights


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
        randbytes: makes so many bytes that nobody can guess.
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
        self._failed: list[EngineRequest] = []
        self._sent = Recently(_RECENT_S, clock)

    def add(self, request: EngineRequest, *, stops_early: bool = False, adapter: str = "") -> None:
        """A request has arrived: ask what the store holds of its prompt.

        Args:
            stops_early: its prompt was shortened, but not its hashes.
            adapter: digest of what its LoRA adapter contains.
        """
        prompt = _Prompt(
            request=request,
            # For prompt log-probabilities, for one, every token has to be computed.
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

    def matched_tokens(self, request: EngineRequest, num_computed: int) -> int | None:
        """Tokens that can be loaded beyond `num_computed`; None while the store is asked."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.loads:
            return 0
        if prompt.admitted:  # and preempted since then
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
        if prompt.local == num_computed:  # vLLM asks again because it had no room
            return prompt.offered
        prompt.local = num_computed
        # The last token is computed here, for its logits.
        last = (request.num_tokens - 1) // self._unit * self._unit
        prompt.offered = max(0, self._reach(lookup, num_computed, last) - num_computed)
        prompt.missed = not prompt.offered and num_computed < last
        return prompt.offered

    def _reach(self, lookup: Lookup, start: int, end: int) -> int:
        """The token at which the longest prefix ends that can be completed from `start` on."""
        assert lookup.held is not None
        pairs = list(zip(self._groups, lookup.held, strict=True))
        for shape, held in pairs:
            if shape.attention_type == "all":
                end = min(end, held.reach(start // shape.block_size) * shape.block_size)
        for tokens in range(end // self._unit * self._unit, start, -self._unit):
            if all(held.has(_read(shape, start, tokens)) for shape, held in pairs):
                return tokens
        return start

    def offers(self, request_id: str) -> bool:
        """Whether tokens that vLLM now allocates blocks for are to be loaded by us."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and prompt.offered > 0

    def allocated(
        self, request: EngineRequest, tables: Callable[[], BlockTables], num_external: int
    ) -> None:
        """vLLM has allocated blocks for `num_external` tokens of ours, or for none.

        Args:
            tables: says which blocks the request has.
        """
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
        self._load(prompt, lookup, tables(), local, local + num_external)

    def _load(
        self, prompt: _Prompt, lookup: Lookup, tables: BlockTables, start: int, end: int
    ) -> None:
        request_id = prompt.request.request_id
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
        scheduled: Mapping[str, int],
        tables_of: Callable[[str], BlockTables],
    ) -> None:
        """Add this step's loads and saves to `meta`.

        Args:
            scheduled: tokens that this step computes, by request.
            tables_of: says which blocks a request has.
        """
        meta.loads |= self._queued
        self._queued.clear()
        for request_id, tokens in scheduled.items():
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            computed = prompt.request.num_computed_tokens + tokens
            self._save(meta, prompt, computed, tables_of)

    def _save(
        self,
        meta: CopyWork,
        prompt: _Prompt,
        computed: int,
        tables_of: Callable[[str], BlockTables],
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
                    tables = tables_of(prompt.request.request_id)
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
        prompt.lookup = None  # its answer was wrong, so what is computed now is stored again
        if failure != CANCELLED:
            self._stats.fail(failure)
        if failure == CORRUPT:
            self._lookups.distrust(names)
        self._failed.append(prompt.request)

    def take_failed(self) -> list[Any]:
        """vLLM's requests whose loads have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def finish(self, request_id: str) -> None:
        """The request is over. A load under way is told to stop."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None and prompt.job_id is not None:
            self._ledger.revoke([prompt.job_id])

    def load_nothing(self, request_id: str) -> None:
        """A load of this request has failed: all of it is computed here.

        vLLM goes on to count the blocks that the request still wanted among those that loads will
        need. So several such requests with a second load would wait for each other for ever.
        """
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            prompt.loads, prompt.offered = False, 0

    def void(self) -> None:
        """vLLM's prefix cache was reset: use nothing that was looked up or loaded before.

        The model may have other weights from now on. So nothing is shared with what is stored, nor
        with other engines, because nobody knows whether they have the same weights. If the operator
        has declared that the weights stay, sharing goes on.
        """
        if not self._weights_fixed:
            self._prefix = f"{self._engines_prefix}/{self._randbytes(8).hex()}"
        self._sent = Recently(_RECENT_S, self._clock)
        for prompt in self._prompts.values():
            # What vLLM computes anew is stored anew. A request that goes on with blocks from before
            # the reset stores nothing.
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
    """The blocks of the tokens from `start` to `end` that later tokens read."""
    needed = shape.needed(end)
    return range(max(needed.start, start // shape.block_size), needed.stop)
