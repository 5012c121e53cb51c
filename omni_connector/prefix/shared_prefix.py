# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the shared prefix cache: what is loaded from arenas and store, and saved.

Blocks are looked up in the arenas of this host first, and then in the store beyond it. One prompt
may be loaded from several of them.

All of it is best effort. A lookup may be late, a block may be gone when it is fetched, or there may
be no room for a copy: then tokens are computed here, and nothing else follows. So a failed load is
never reported to vLLM, because its policy could end the request for it. The request is sent back to
its queue before vLLM hears that the load is over.

Blocks are copied when they have filled, and held until the copy has ended (see `CopyLedger`).
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from omni_connector.config import HintName
from omni_connector.copy.ledger import CANCELLED, CopyLedger, CopyWork, EngineRequest
from omni_connector.copy.prefix_jobs import HostLoadSpec, StoreLoadSpec
from omni_connector.errors import OmniError
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans, TransferSpec, shares
from omni_connector.prefix.block_changes import BlockChanges
from omni_connector.prefix.explain import ExplainedEngine, Explainer
from omni_connector.prefix.hints import NO_HINTS, Hints, tenant_of
from omni_connector.prefix.host_blocks import HostBlocks, Wanted
from omni_connector.prefix.lookups import Lookup, StoreLookups
from omni_connector.prefix.misses import Misses
from omni_connector.prefix.prompts import SharedPrompt
from omni_connector.prefix.saves import PrefixSaves
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.stats import UNREACHABLE
from omni_connector.stores.expiring_set import BlockName
from omni_connector.stores.shared_blocks import CORRUPT

logger = logging.getLogger("vllm.omni_connector.shared_prefix")

BlockTables = Sequence[Sequence[int]]
"""The block ids of one request, for each of vLLM's groups."""

# Blocks that were found so many seconds ago, while their request waited for room, may have gone.
_FRESH_S: Final = 1.0

_NEVER: Final = 1 << 62


class SharedPrefix:
    """Finds, loads and keeps the full blocks of prompts where other engines find them too.

    Args:
        host: the arenas of this host, closed with this; None uses none.
        lookups: asks the store, closed with this; None uses none.
        ledger: the copy jobs.
        prefix: of this engine's keys.
        groups: what this engine keeps.
        group_ids: index of each transferred group among vLLM's groups.
        hash_block_size: tokens of one of a request's hashes; divides every group's block size.
        num_blocks: KV blocks of this engine.
        tokens_a_step: by so many at most an answer grows in a step.
        hash_of: says by which hash vLLM's own prefix cache finds a block in one of vLLM's groups;
            None where it does not.
        weights_fixed: a reset changes no weights, so that what is stored stays true.
        lookup_timeout: seconds a request waits for the store's answer.
        load_timeout: seconds for the bytes.
        allowed_hints: which hints of requests are followed.
        tenants: as for `tenant_of`.
        context: clock, randomness and statistics.
        changes: is told which blocks arena and store may have; None where nobody asks.

    Attributes:
        saves: starts the copies of blocks that have filled.
    """

    def __init__(
        self,
        *,
        host: HostBlocks | None,
        lookups: StoreLookups | None,
        ledger: CopyLedger,
        prefix: str,
        groups: tuple[GroupShape, ...],
        group_ids: tuple[int, ...],
        hash_block_size: int,
        num_blocks: int,
        tokens_a_step: int,
        hash_of: Callable[[int, int], bytes | None],
        weights_fixed: bool,
        lookup_timeout: float,
        load_timeout: float,
        allowed_hints: Collection[HintName],
        tenants: Collection[str],
        context: EngineContext,
        changes: BlockChanges[Any] | None = None,
    ) -> None:
        self._changes = changes
        self._randbytes = context.randbytes
        self._host = host
        self._lookups = lookups
        self._ledger = ledger
        self._engines_prefix = self._prefix = prefix
        self._weights_fixed = weights_fixed
        self._groups = groups
        self._group_ids = group_ids
        self._block_sizes = [
            (each.block_size, each.block_size // hash_block_size) for each in groups
        ]
        self._unit = math.lcm(*(shape.block_size for shape in groups))
        self._lookup_timeout = lookup_timeout
        self._load_timeout = load_timeout
        self._clock = context.clock
        self._stats = context.stats
        self._allowed_hints = frozenset(allowed_hints)
        self._tenants = frozenset(tenants)
        self._hints: dict[str, Hints] = {}  # of requests that are not added yet
        self._prompts: dict[str, SharedPrompt] = {}
        self._queued: dict[int, TransferSpec] = {}
        evicted = host.evicted if host is not None else (lambda group, key: False)
        self._misses = Misses(groups, self._unit, evicted, context.stats)
        # Prompts of this step for which we load nothing, and what vLLM's own cache has of them.
        self._not_loaded: list[tuple[SharedPrompt, int]] = []
        self._failed: list[EngineRequest] = []
        self._explainer: Explainer | None = None
        self.saves = PrefixSaves(
            tokens_a_step=tokens_a_step,
            prefix=prefix,
            host=host,
            stores=lookups is not None,
            ledger=ledger,
            groups=groups,
            group_ids=group_ids,
            num_blocks=num_blocks,
            hash_of=hash_of,
            context=context,
            changes=changes,
        )

    def explain(self, engine: ExplainedEngine) -> None:
        """From now on `omni-connector explain` is answered, until this is closed."""
        try:
            self._explainer = Explainer(
                engine,
                host=self._host,
                lookups=self._lookups,
                misses=self._misses,
                prefix=lambda: self._prefix,
                alone=lambda: self._prefix != self._engines_prefix,
                clock=self._clock,
            )
        except OmniError as error:
            logger.warning("`omni-connector explain` does not know this engine: %s", error)

    def hint(self, request_id: str, asked: Hints) -> Hints:
        """What a request asks, before it is added; returns what of that is followed."""
        hints, refused = asked.allowed(self._allowed_hints)
        if refused:
            self._stats.count("hints_refused", refused)
        if self._host is None and hints.asks_arena:
            self._stats.count("bad_hints")
            hints = NO_HINTS
        self._hints[request_id] = hints
        return hints

    def add(self, request: EngineRequest, *, stops_early: bool = False, adapter: str = "") -> None:
        """A request has arrived: ask what is held of its prompt.

        Args:
            stops_early: its prompt was shortened, but not its hashes.
            adapter: digest of what its LoRA adapter contains.
        """
        prompt = SharedPrompt(
            request=request,
            # For prompt log-probabilities, for one, every token has to be computed.
            loads=not request.skip_reading_prefix_cache,
            hashed_tokens=request.num_prompt_tokens if stops_early else None,
            adapter=adapter,
            block_sizes=self._block_sizes,
            sent=[0] * len(self._groups),
            tenant=tenant_of(request.cache_salt, self._tenants),
            hints=self._hints.pop(request.request_id, NO_HINTS),
        )
        self._prompts[request.request_id] = prompt
        self._look_up(prompt)

    def _look_up(self, prompt: SharedPrompt) -> None:
        prompt.admitted, prompt.local, prompt.found, prompt.waits = False, None, None, False
        prompt.hashes = [prompt.full_hashes(g, 0, None) for g in range(len(self._groups))]
        prompt.lookup = None
        alone = self._prefix != self._engines_prefix  # nobody stores anything under this prefix
        if self._lookups is not None and not alone and any(prompt.hashes):
            deadline = self._clock() + self._lookup_timeout
            prompt.lookup = Lookup(prompt.key_prefix(self._prefix), prompt.hashes, deadline)
            self._lookups.ask(prompt.lookup)

    def matched_tokens(self, request: EngineRequest, num_computed: int) -> int | None:
        """Tokens that can be loaded beyond `num_computed`; None while the store is asked."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return 0
        if not prompt.loads:
            prompt.local = num_computed
            return 0
        if prompt.admitted:  # and preempted since then
            self._look_up(prompt)
        now = self._clock()
        if prompt.local == num_computed:  # vLLM asks again because it had no room
            if now < prompt.looked_at + _FRESH_S:
                return prompt.offered
            prompt.found = None
        # The last token is computed here, for its logits.
        last = (request.num_tokens - 1) // self._unit * self._unit
        asked = prompt.lookup
        if asked is not None and asked.held is not None:
            asked = None
        if asked is not None and prompt.waits and now < asked.deadline:
            return None
        prompt.looked_at = now
        if self._host is not None and prompt.found is None:
            prompt.found = self._host.find([prompt.keys(each) for each in prompt.hashes])
        reach = prompt.reach(self._groups, self._unit, num_computed, last)
        if asked is not None and reach < last:
            prompt.waits = now < asked.deadline
            if prompt.waits:
                return None
            self._stats.fail("store_lookup_timeout")
            prompt.lookup, prompt.late = None, True
        prompt.local = num_computed
        prompt.offered = max(0, reach - num_computed)
        prompt.missed = not prompt.offered and num_computed < last and bool(prompt.lookup)
        return prompt.offered

    def not_asked(self, request_id: str, num_computed: int | None) -> None:
        """Nothing is looked up for a request, as its tokens beyond these can be loaded from a peer.

        If another connector beside this one loads them instead, they are not kept before vLLM has
        heard whether that worked.

        Args:
            num_computed: None once it is known that the peer's are loaded.
        """
        if prompt := self._prompts.get(request_id):
            prompt.had = num_computed

    def offers(self, request_id: str) -> bool:
        """Whether tokens that vLLM now allocates blocks for are to be loaded by us."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and prompt.offered > 0

    def allocated(
        self,
        request: EngineRequest,
        tables: Callable[[], BlockTables],
        num_external: int,
    ) -> None:
        """vLLM has allocated blocks for `num_external` tokens of ours, or for none.

        Args:
            tables: says which blocks the request has.
        """
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return
        self.saves.look_at(prompt)
        local, prompt.local, prompt.offered = prompt.local, None, 0
        prompt.sources.clear()
        if local is not None:
            prompt.had = local + num_external
            if num_external > 0 or prompt.reached is not None:
                self._misses.admitted(prompt, local, local + num_external)
            else:
                self._not_loaded.append((prompt, local))
        if num_external <= 0:
            prompt.admitted = True
            self._stats.count("store_misses", prompt.missed)
            prompt.missed, prompt.found = False, None
            return
        assert local is not None, "tokens are matched only by a lookup"
        self._load(prompt, tables(), local, local + num_external)
        prompt.found = None

    def _load(self, prompt: SharedPrompt, tables: BlockTables, start: int, end: int) -> None:
        request_id = prompt.request.request_id
        wanted: list[Wanted] = []
        for g, shape in enumerate(self._groups):
            table, read = tables[self._group_ids[g]], shape.needed(end, start)
            if len(table) < read.stop or NULL_BLOCK_ID in table[read.start : read.stop]:
                raise RuntimeError(f"request {request_id}: vLLM allocated no block of group {g}")
            first = start // shape.block_size
            block_ids = np.array(table[first : read.stop], np.int64)
            hashes = prompt.hashes[g][read.start : read.stop]
            wanted.append(Wanted(first, block_ids, read, hashes))
        prompt.failure = None
        loads: list[tuple[TransferSpec, str]] = []
        if self._host is not None and prompt.found is not None:
            keyed = [replace(each, hashes=prompt.keys(each.hashes)) for each in wanted]
            specs, left = self._host.loads(request_id, prompt.found, keyed)
            loads += [(spec, "tokens_kept" if own else "tokens_from_host") for spec, own in specs]
            wanted = [
                replace(each, block_ids=rest.block_ids)
                for each, rest in zip(wanted, left, strict=True)
            ]
        names: list[BlockName] = []
        if any(each.block_ids.any() for each in wanted):
            names = [(g, key) for g, each in enumerate(wanted) for key in each.hashes]
            store_load = StoreLoadSpec(
                request_id=request_id,
                blocks=BlockSpans.of([(each.first, each.block_ids) for each in wanted]),
                prefix=prompt.key_prefix(self._prefix),
                hashes=[key for each in wanted for key in [b""] * each.begin + each.hashes],
                timeout=self._load_timeout,
            )
            loads.append((store_load, "tokens_shared"))
        by_load = shares(end - start, [spec.blocks for spec, _ in loads])
        for (spec, counter), tokens in zip(loads, by_load, strict=True):
            prompt.sources[counter] = prompt.sources.get(counter, 0) + tokens
            self._start(prompt, spec, counter, tokens, names)

    def _start(
        self,
        prompt: SharedPrompt,
        spec: TransferSpec,
        counter: str,
        tokens: int,
        names: list[BlockName],
    ) -> None:
        def end(failure: str | None) -> None:
            prompt.jobs.discard(job_id)
            if failure is None:
                self._stats.count(counter, 0 if prompt.void else tokens)
            else:
                self._load_failed(prompt, failure, names if counter == "tokens_shared" else None)
                if isinstance(spec, HostLoadSpec) and self._host and failure == UNREACHABLE:
                    self._host.avoid(spec)
            if not prompt.jobs:
                self._loaded(prompt)

        job_id = self._ledger.start(spec.blocks, end)
        prompt.jobs.add(job_id)
        self._queued[job_id] = spec

    def build(self, meta: CopyWork) -> None:
        """Add this step's loads to `meta`; `saves` adds the rest."""
        for prompt, local in self._not_loaded:
            # vLLM tells what a connector beside this one loads only once all is scheduled.
            self._misses.admitted(prompt, local, local, prompt.request.num_computed_tokens)
        self._not_loaded.clear()
        meta.loads |= self._queued
        self._queued.clear()

    def _load_failed(
        self, prompt: SharedPrompt, failure: str, names: list[BlockName] | None
    ) -> None:
        """A part of what a request waits for has not come: the other parts are not wanted either.

        Args:
            names: of the part, where it was to come from the store.
        """
        self._ledger.revoke(prompt.jobs)
        if prompt.failure is not None:
            return
        prompt.failure = failure
        if prompt.void:
            return
        if failure != CANCELLED:
            self._stats.fail(failure)
        if names is not None:
            prompt.lookup = None  # its answer was wrong, so what is computed now is stored again
            if failure == CORRUPT and self._lookups is not None:
                self._lookups.distrust(names)

    def _loaded(self, prompt: SharedPrompt) -> None:
        """All parts have ended. What has failed is not tried again; see `load_nothing`."""
        if prompt.void:
            prompt.void, prompt.lookup = False, None
        elif prompt.failure is None:
            return
        prompt.loads, prompt.found = False, None
        self._failed.append(prompt.request)

    def take_failed(self) -> list[Any]:
        """vLLM's requests whose loads have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def finish(self, request_id: str) -> None:
        """The request is over. A load under way is told to stop."""
        self._hints.pop(request_id, None)
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        self._ledger.revoke(prompt.jobs)
        self.saves.finish(prompt)
        if self._changes is not None and prompt.lookup is not None:
            for g, held in enumerate(prompt.lookup.held or ()):
                self._changes.looked_up(prompt.request, g, prompt.hashes[g], held.blocks)

    def sources(self, request_id: str) -> Mapping[str, int]:
        """Tokens that are being loaded for a request, by the counter of where they come from."""
        prompt = self._prompts.get(request_id)
        return prompt.sources if prompt is not None else {}

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
            if self._host is not None:
                self._host.rename(self._prefix.encode())
        if self._changes is not None:
            self._changes.void()
        self.saves.void(self._prefix, stores=self._weights_fixed)
        for prompt in self._prompts.values():
            # What vLLM computes anew is stored anew. A request that goes on with blocks from before
            # the reset stores nothing.
            goes_on = prompt.request.num_computed_tokens and not prompt.jobs
            prompt.sent = [_NEVER if goes_on else 0] * len(self._groups)
            prompt.found, prompt.fills_at, prompt.keeps = None, 0, 0
            if prompt.due:
                self.saves.look_at(prompt)
            if not prompt.jobs:
                prompt.lookup, prompt.offered = None, 0
            else:
                prompt.void = True
                self._ledger.revoke(prompt.jobs)

    def count_failures(self) -> None:
        """Count what failed in the store since the last call."""
        if self._lookups is not None:
            self._lookups.count_failures()

    def close(self) -> None:
        """Stop asking the store, and let go of the arenas' indexes. Idempotent."""
        if self._explainer is not None:
            self._explainer.close()
        if self._lookups is not None:
            self._lookups.close()
        if self._host is not None:
            self._host.close()
