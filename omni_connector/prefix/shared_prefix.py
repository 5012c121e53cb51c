# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the shared prefix cache.

It looks a prompt's blocks up in the arenas of this host first, and then in the store. One prompt
may be loaded from several of them.

All of it is best effort: vLLM computes the tokens if a look-up is late, if a block is evicted
before it is fetched, or if there is no room for a copy. A failed load is not reported to vLLM,
because its policy could end the request. The request goes back to vLLM's queue before vLLM learns
that the load has ended.

Blocks are copied when they have filled, and held until the copy has ended (see `CopyLedger`).

`share` starts three things beside this: the own index, the thread that meets neighbours
(`neighbours.HostNeighbours`), and in each rank the socket at which it is asked to attach arenas
(`attaching`). `vllm_v1.assembly` makes them.
"""

import logging
from collections.abc import Container, Iterable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from omni_connector.config import HintName
from omni_connector.copy.held_blocks import EngineBlock, RequestBlocks
from omni_connector.errors import OmniError
from omni_connector.kv.tails import Tail
from omni_connector.prefix.block_changes import BlockChanges
from omni_connector.prefix.explainer import ExplainedEngine, Explainer
from omni_connector.prefix.hints import NO_HINTS, Hints
from omni_connector.prefix.host_blocks import Found, HostBlocks
from omni_connector.prefix.kept_prompts import KeptPrompts
from omni_connector.prefix.key_prefix import KeyPrefix
from omni_connector.prefix.loads import PrefixLoads
from omni_connector.prefix.lookups import Lookup, StoreLookups
from omni_connector.prefix.misses import Misses
from omni_connector.prefix.prompts import SharedGroups, SharedPrompt
from omni_connector.prefix.saves import PrefixSaves
from omni_connector.prefix.sessions import Sessions
from omni_connector.prefix.tails import Tails
from omni_connector.prefix.thinking import ThinkingTokens, Thoughts
from omni_connector.requests.phases import Phase
from omni_connector.requests.product import BlocksOf, Product, Step
from omni_connector.runtime.context import EngineContext

if TYPE_CHECKING:
    from omni_connector.requests.state import RequestState

logger = logging.getLogger("vllm.omni_connector.shared_prefix")

# Seconds for which a look-up in the arenas is used again, if vLLM asks again because it had no room
# for the request. Later, found blocks may be evicted.
_FRESH_S: Final = 1.0

# More blocks than any prompt has: as the number of blocks sent, it ends a prompt's saves.
_NEVER: Final = 1 << 62


class SharedPrefix(Product):
    """Finds, loads and keeps full blocks of prompts that other engines use, too.

    Args:
        host: the arenas of this host, closed with this; None uses none.
        lookups: asks the store, closed with this; None uses none.
        loads: starts the copies of blocks that were found.
        saves: starts the copies of blocks that have filled.
        groups: the cache groups that this engine keeps.
        tails: finds the ends of earlier requests within blocks; None finds none.
        prefix: of this engine's keys.
        followed_hints: which hints of requests are followed.
        thinking: the tokens with which a reasoning model thinks; None where they are not known.
        lookup_timeout: seconds that a request waits for the store's answer.
        replay: tokens at a prompt's beginning that vLLM computes again wherever a hit ends.
        context: clock and statistics.
        changes: collects changes for KV events; None where nobody asks for events.

    Attributes:
        kept: the prompts whose blocks the arena has; None without an arena.
    """

    waits_in = Phase.LOOKUP

    def __init__(
        self,
        *,
        host: HostBlocks | None,
        lookups: StoreLookups | None,
        loads: PrefixLoads,
        saves: PrefixSaves,
        groups: SharedGroups,
        tails: Tails | None,
        prefix: KeyPrefix,
        followed_hints: frozenset[HintName],
        thinking: ThinkingTokens | None,
        lookup_timeout: float,
        context: EngineContext,
        changes: BlockChanges[Any] | None = None,
        replay: int = 0,
    ) -> None:
        self._replay = replay
        self._changes = changes
        self._host = host
        self._lookups = lookups
        self.loads = loads
        self.saves = saves
        self._groups = groups.shapes
        self._block_sizes = groups.block_sizes
        self._unit = groups.unit
        self._tokens_ahead = groups.tokens_ahead
        self._tails = tails
        self._prefix = prefix
        self._followed_hints = followed_hints
        self._thinking = thinking
        self._lookup_timeout = lookup_timeout
        self._clock = context.clock
        self._stats = context.stats
        self._prompts: dict[SharedPrompt, None] = {}
        self._sessions = None if host is None else Sessions(host, context.stats)
        evicted = host.evicted if host is not None else (lambda group, key: False)
        self._misses = Misses(self._groups, self._unit, evicted, context.stats)
        # Prompts of this step for which we load nothing, with the tokens in vLLM's own cache.
        self._not_loaded: list[tuple[SharedPrompt, int]] = []
        self._explainer: Explainer | None = None
        self.kept: Final = None if host is None else KeptPrompts(host, self._groups, context.clock)

    def explain(self, engine: ExplainedEngine) -> None:
        """Answer `omni-connector explain` from now on, until this is closed."""
        try:
            self._explainer = Explainer(
                engine, self, self._misses, self._host, self._prefix, self.kept
            )
        except OmniError as error:
            logger.warning("`omni-connector explain` does not know this engine: %s", error)

    def followed(self, asked: Hints) -> Hints:
        """Those of the hints of a request that are followed."""
        hints, refused = asked.allowed(self._followed_hints)
        if refused:
            self._stats.count("hints_refused", refused)
        if hints.over:  # nothing is kept of the session
            hints = msgspec.structs.replace(hints, cache="no")
        if self._host is None and (hints.keeps_here or hints.session):
            self._stats.count("bad_hints")
            hints = Hints("no") if hints.cache == "no" else NO_HINTS
        return hints

    def arrives(self, state: "RequestState", adapter: str) -> None:
        request = state.request
        if request.resumable:  # a session's tokens may change
            return
        if request.prompt_embeds is not None and self._tokens_ahead:
            return  # the tokens in the place of embeddings name no drafter's KV
        state.prefix = prompt = SharedPrompt(
            request=request,
            # vLLM sets this where it has to compute every token: for log-probabilities of the
            # prompt, say.
            loads=not request.skip_reading_prefix_cache,
            hashed_tokens=request.num_prompt_tokens if state.shortened else None,
            adapter=adapter,
            block_sizes=self._block_sizes,
            tokens_ahead=self._tokens_ahead,
            sent=[0] * len(self._groups),
            hints=state.hints,
            thoughts=self._thoughts(state.hints),
            opaque=_opaque_parts(request),
        )
        self._prompts[prompt] = None
        self.look_up(prompt)
        if state.hints.session and self._sessions is not None:
            pins = state.hints.pin_s > 0 and not state.hints.over
            pinned = [prompt.keys(each) for each in prompt.names] if pins else []
            prompt.session_state = self._sessions.arrives(pinned)

    def _thoughts(self, hints: Hints) -> Thoughts | None:
        """What finds the thoughts in an answer that is kept up to these; None if it is kept."""
        keeps = hints.thinking == "keep" or (hints.thinking is None and hints.keeps_here)
        return None if keeps or self._thinking is None else Thoughts(self._thinking)

    def look_up(self, prompt: SharedPrompt) -> None:
        """Begin to look a prompt up, in the store. Any thread may call this, of its own request."""
        prompt.admitted = False
        prompt.local = None
        prompt.found = None
        prompt.waits = False
        prompt.hashes = [prompt.full_hashes(g, 0, None) for g in range(len(self._groups))]
        prompt.names = [prompt.names_of(g, 0, each) for g, each in enumerate(prompt.hashes)]
        prompt.lookup = None
        if self._lookups is None or self._prefix.is_own:
            return
        tails = None
        if self._tails is not None:
            last = prompt.last_reachable(prompt.request.num_tokens, 1)
            if self._tails.may_go_on(0, last):
                tails = partial(self._tails.search, prompt, last)
        if any(prompt.hashes) or tails is not None:
            deadline = self._clock() + self._lookup_timeout
            prefix = prompt.key_prefix(self._prefix.current)
            prompt.lookup = Lookup(prefix, prompt.names, deadline, tails)
            self._lookups.ask(prompt.lookup)

    def offer(self, state: "RequestState", num_computed: int) -> int | None:
        # Any thread may call this, of its own request.
        if state.prefix is None:
            return 0
        found = self.matched_tokens(state.prefix, num_computed)
        # Of less than the replay vLLM would compute all again.
        return 0 if found and num_computed + found <= self._replay else found

    def matched_tokens(self, prompt: SharedPrompt, num_computed: int) -> int | None:
        """Tokens that can be loaded after the first `num_computed`; None while the store is
        asked."""
        request = prompt.request
        if not prompt.loads:
            prompt.local = num_computed
            return 0
        if prompt.admitted:  # and preempted since then
            self.look_up(prompt)
        now = self._clock()
        if prompt.local == num_computed:  # vLLM asks again because it had no room
            if now < prompt.looked_at + _FRESH_S:
                return prompt.offered
            prompt.found = None
        elif prompt.tail is not None:
            prompt.found = None  # the tail stands there in the place of a full block
        last = prompt.last_reachable(request.num_tokens, self._unit)
        asked = prompt.lookup
        if asked is not None and asked.held is not None:
            asked = None
        if asked is not None and prompt.waits and now < asked.deadline:
            return None
        prompt.looked_at = now
        if self._host is not None and prompt.found is None:
            # Beyond what the arenas have, the store's answer may continue a prefix.
            alone = prompt.lookup is None
            prompt.found = self._host.find(prompt.names, prompt.keys, alone=alone)
        if prompt.lookup is None and (prompt.found is None or prompt.found.is_empty):
            reach = num_computed
        else:
            reach = prompt.reach(self._groups, self._unit, num_computed, last)
        if asked is not None and reach < last and now < asked.deadline:
            prompt.waits = True
            return None
        in_arenas: tuple[Tail, Found] | None = None
        may_go_on = reach < last
        if self._tails is not None:
            most = prompt.last_reachable(request.num_tokens, 1)
            if prompt.found is not None:
                in_arenas = self._tails.find(prompt, num_computed, reach, most)
            may_go_on |= in_arenas is None and self._tails.may_go_on(reach, most)
        if asked is not None and may_go_on:
            prompt.waits = now < asked.deadline
            if prompt.waits:
                return None
            if prompt in self._prompts:  # else nobody but `omni-connector explain` asks
                self._stats.fail("store_lookup_timeout")
            prompt.lookup = None
            prompt.late = True
        prompt.tail = None
        if in_arenas is not None:
            prompt.tail, prompt.found = in_arenas
            reach = prompt.tail.end
        stored = prompt.lookup.tail if prompt.lookup is not None else None
        if stored is not None and stored.end > max(reach, num_computed):
            prompt.tail = stored
            reach = stored.end
            if prompt.found is not None:
                prompt.found = prompt.found.without(reach // self._unit)
        prompt.local = num_computed
        prompt.offered = max(0, reach - num_computed)
        prompt.missed = not prompt.offered and num_computed < last and bool(prompt.lookup)
        return prompt.offered

    def allocated(self, state: "RequestState", blocks: RequestBlocks, num_tokens: int) -> bool:
        prompt, offer = state.prefix, state.offer
        if prompt is None:
            return False
        num_external = num_tokens
        if offer is not None and offer.whose is not self:
            # A connector beside this one may load these tokens instead. Then their blocks are saved
            # only after vLLM has learned whether that load succeeded.
            prompt.had = None if num_tokens > 0 else offer.begin
            num_external = 0
        self.saves.begin(prompt)
        prompt.scheduled = False
        local = prompt.local
        prompt.local = None
        prompt.offered = 0
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
            prompt.missed = False
            prompt.found = None
            return False
        assert local is not None, "tokens are matched only by a lookup"
        self.loads.start(prompt, blocks.get_block_ids(), local, local + num_external)
        prompt.found = None
        return False

    def lacks_drafter(self, blocks: Sequence[Sequence[EngineBlock]], first: int) -> None:
        self.saves.loads_over(blocks, first)

    def has_work(self) -> bool:
        return self.saves.has_work

    def step(self, step: Step) -> None:
        work = step.work
        for prompt, local in self._not_loaded:
            # Only now, after scheduling, `num_computed_tokens` includes the tokens that a connector
            # beside this one loads, or vLLM has found within a block (`--prefix-match-unit`).
            known = prompt.request.num_computed_tokens
            if self.saves.alone:
                local = max(local, known)
            self._misses.admitted(prompt, local, local, known)
        self._not_loaded.clear()
        self.saves.step_begins()
        if self.loads.queued:
            work.loads |= self.loads.queued
            self.loads.queued.clear()
        if self.saves.queued:  # what requests that have ended left
            work.saves |= self.saves.queued
            self.saves.queued.clear()
        if not step.known:
            return  # nobody may have what is computed
        output = step.output
        drafted = output.scheduled_spec_decode_tokens
        self.saves.build(work, output.num_scheduled_tokens, step.blocks_of, drafted)
        told = output.kv_connector_block_state
        # States in blocks to which no later step writes: group, block, and the tokens it has read.
        if told is not None and (states := told.boundary_state_offloads):
            for request_id, of_request in states.items():
                state = step.requests.get(request_id)
                if state is not None and state.prefix is not None:
                    self.saves.keep_boundary(work, state.prefix, of_request, step.blocks_of)

    def step_ended(self) -> None:
        self.saves.step_ended()

    def failed_loads(self, told: Container[str]) -> Iterable[tuple[Any, bool]]:
        # Told to vLLM, a failed load could end the request: its policy is for hand-offs.
        return [(each, False) for each in self.loads.take_failed()]

    def blocks_void(self, block_ids: Set[int]) -> None:
        self.saves.blocks_void(block_ids)

    def distrust(self) -> None:
        self.saves.distrust()

    def ends(self, state: "RequestState", blocks_of: BlocksOf | None) -> None:
        prompt = state.prefix
        if prompt is None:
            return
        del self._prompts[prompt]
        self.loads.revoke(prompt)
        self.saves.finish(prompt, blocks_of)
        if self.kept is not None:
            self.kept.note(prompt)
        if prompt.session_state is not None:
            self._session_ended(prompt, known=blocks_of is not None)
        if self._changes is not None and prompt.lookup is not None:
            for g, held in enumerate(prompt.lookup.held or ()):
                blocks = list(zip(prompt.names[g], prompt.hashes[g], strict=True))
                self._changes.looked_up(prompt.request, g, blocks, held.blocks)

    def _session_ended(self, prompt: SharedPrompt, *, known: bool) -> None:
        """A request that names a session has ended; `known`: it is known with which weights."""
        assert self._sessions is not None
        assert prompt.session_state is not None
        if not known:
            self._sessions.leaves(prompt.session_state)
            return
        session = prompt.request.cache_salt, prompt.hints.session
        found = prompt.reached or 0
        names = [
            prompt.names_of(g, 0, prompt.full_hashes(g, 0, None)) for g in range(len(self._groups))
        ]
        self._sessions.ended(
            session,
            prompt.session_state,
            [prompt.keys(each) for each in names],
            [found // shape.block_size for shape in self._groups],
            pins=prompt.hints.pin_s > 0,
            over=prompt.hints.over,
        )

    def takes_nothing(self, state: "RequestState", reason: str, text: str) -> None:
        # vLLM goes on reserving the blocks that a failed load was to fill. With a second load, a
        # few such requests would wait for each other's reserved blocks for ever.
        if state.prefix is not None:
            state.prefix.loads = False
            state.prefix.offered = 0
            state.prefix.found = None

    def gives_nothing(self, state: "RequestState", reason: str, text: str) -> None:
        if state.prefix is not None:
            state.prefix.sent = [_NEVER] * len(self._groups)

    def follow(self, weights: str | None) -> None:
        # Blocks that are computed get their key prefix.
        self._prefix.follow(weights)
        self.saves.stores = weights is not None
        if self._host is not None:
            self._host.rename(self._prefix.in_arenas)
        for prompt in self._prompts:
            if prompt.loads and not prompt.admitted and not prompt.jobs:
                self.look_up(prompt)

    def suspend(self, states: Iterable["RequestState"]) -> None:
        # Nothing is found or loaded before it is known. Blocks that have filled and are not being
        # copied yet are not kept.
        self.saves.suspend()
        for prompt in self._prompts:
            prompt.found = None
            prompt.local = None
            prompt.offered = 0
            if prompt.jobs:
                prompt.void = True
                self.loads.revoke(prompt)

    def clear(self) -> None:
        if self._changes is not None:
            self._changes.void()
        self.saves.void()
        if self._host is not None:
            self._host.rename(self._prefix.in_arenas)
        if self._sessions is not None:
            self._sessions.clear()
        for prompt in self._prompts:
            prompt.found = None

    def void(self, states: Iterable["RequestState"]) -> None:
        self.clear()
        for prompt in self._prompts:
            # A request that vLLM computes anew saves its blocks anew. One that goes on with blocks
            # from before the reset saves nothing.
            goes_on = prompt.request.num_computed_tokens and not prompt.jobs
            prompt.sent = [_NEVER if goes_on else 0] * len(self._groups)
            prompt.found = None
            prompt.fills_at = 0
            prompt.keeps = 0
            if not prompt.jobs:
                prompt.lookup = None
                prompt.offered = 0
            else:
                prompt.void = True
                self.loads.revoke(prompt)

    def count_failures(self) -> None:
        if self._lookups is not None:
            self._lookups.count_failures()

    def close(self) -> None:
        if self._explainer is not None:
            self._explainer.close()
        if self._lookups is not None:
            self._lookups.close()
        for prompt in self._prompts:  # of requests that have not ended
            prompt.found = None  # it keeps the indexes of neighbours mapped
        if self._host is not None:
            self._host.close()


def _opaque_parts(request: Any) -> tuple[tuple[int, int], ...]:
    """The parts of a prompt, each by its first token and end, whose token ids do not say what they
    are: images and the like, or all of a prompt with embeddings."""
    if request.prompt_embeds is not None:
        return ((0, request.num_prompt_tokens),)
    places = (feature.mm_position for feature in request.mm_features)
    return tuple((each.offset, each.offset + each.length) for each in places)
