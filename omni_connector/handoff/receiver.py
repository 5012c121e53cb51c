# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of a decode engine: leases at prefill engines, and the loads that they allow.

The lease request is sent when the request arrives, and the control thread takes the answer;
meanwhile the request waits in vLLM's queue. If anything fails before the load starts, this engine
computes the prompt. If the load fails, the worker reports it, and vLLM recomputes or fails the
request as `kv_load_failure_policy` says.
"""

import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omni_connector.copy.held_blocks import (
    CANCELLED,
    CopyLedger,
    EngineRequest,
    RequestBlocks,
)
from omni_connector.copy.jobs import Deadline, LoadSpec
from omni_connector.errors import IncompatiblePeerError, PeerUnreachableError, ProtocolError
from omni_connector.handoff.channel import MAX_PEERS, ControlChannel
from omni_connector.handoff.client import Lease, LeaseDeniedError, PendingLease
from omni_connector.handoff.params import (
    BadParamsError,
    RemotePrefill,
    parse_remote_prefill,
    refused_there,
    wants_remote_kv,
)
from omni_connector.handoff.parts import Fetch
from omni_connector.handoff.prompt import Prompt, PromptRules
from omni_connector.handoff.server import OTHER_WEIGHTS
from omni_connector.handoff.truncation import NO_TOKENS, computes_all, goes_on_after
from omni_connector.identity.epochs import WeightsName
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.requests.phases import Phase
from omni_connector.requests.product import BlocksOf, Product, Step
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.stats import LEASE_EXPIRED

if TYPE_CHECKING:
    from omni_connector.requests.state import RequestState

logger = logging.getLogger("vllm.omni_connector.receiver")

SHORT_PROMPT: Final = "short_prompt"
"""Kind of failure: a hand-off is not fetched, as its prompt has too few tokens."""

# The words with which a peer refuses a lease, and what they mean.
_DENIALS: Final[Mapping[str, str]] = {
    "unknown_token": "it has no such hand-off: it was used, aborted or expired",
    "other_prompt": "the hand-off is of another prompt",
    "other_epoch": "it has been started again since",
    OTHER_WEIGHTS: "it has other weights",
    "not_ready": "it did not copy the KV in time",
    "not_introduced": "it has too many peers to know this engine",
    "overloaded": "too many lease requests wait there",
}

_KINDS: Final[dict[type[Exception], str]] = {
    IncompatiblePeerError: "incompatible_peer",
    PeerUnreachableError: "peer_unreachable",
    ProtocolError: "malformed_answer",
}

_STATE_BOUNDARY: Final = "a block with a state ends within the last tokens, before which vLLM stops"
_COMPUTES_ALL: Final = "the request has its whole prompt computed"

# No load starts when a lease is this close to its end: in seconds, or as a part of a short lease.
_LEASE_MARGIN_S: Final = 1.0
_LEASE_MARGIN: Final = 0.25

# A prefill engine that gets other weights voids its leases, and tells nobody. A decode engine asks
# again for a lease that it asked for longer ago than this, so that its loads seldom find void
# slots. Seconds in which it computes do not count: a single step may take longer, and the engine
# would ask for ever.
_FRESH_S: Final = 0.5

# Answers that took longer than `_FRESH_S` after which a request gives up. Else it would ask a slow
# peer for ever.
_SLOW_ANSWERS: Final = 10


class HandoffReceiver(Product):
    """Fetches the KV of prompts that were prefilled elsewhere.

    Args:
        rules: which part of a prompt is fetched.
        fails_by_block: whether vLLM computes single blocks anew whose load has failed.
        channel, ledger: reaches prefill engines; starts copy jobs.
        address_of: returns the control address of the engine that the params name.
        compatibility: this engine's compatibility key.
        group_ids: index of each transferred group among vLLM's groups.
        hash_id: how this engine hashes blocks.
        weights: returns the name of this engine's weights.
        load_timeout: seconds for an answer, and again for the bytes.
        min_tokens: tokens from which on a prompt is fetched; shorter ones are computed here.
        context: clock and statistics.

    Attributes:
        incomplete: loads with blocks of a window that are not loaded from their first token on, as
            the peer's blocks begin elsewhere. The request does not read those tokens. Others might,
            if vLLM found the block by its hash. All values are None.
    """

    waits_in = Phase.LEASE
    brings_all = True

    def __init__(
        self,
        *,
        rules: PromptRules,
        fails_by_block: bool = True,
        channel: ControlChannel,
        ledger: CopyLedger,
        address_of: Callable[[RemotePrefill], str],
        compatibility: CompatibilityKey,
        group_ids: tuple[int, ...],
        hash_id: str,
        weights: Callable[[], WeightsName] = WeightsName,
        load_timeout: float,
        min_tokens: int = 0,
        context: EngineContext,
    ) -> None:
        self.incomplete: dict[Fetch, None] = {}
        self._rules = rules
        self._fails_by_block = fails_by_block
        self._channel = channel
        self._ledger = ledger
        self._address_of = address_of
        self._compatibility = compatibility
        self._group_ids = group_ids
        self._hash_id = hash_id
        self._weights = weights
        self._timeout = load_timeout
        self._min_tokens = min_tokens
        self._clock = context.clock
        self._stats = context.stats
        self._trace = context.trace
        self._queued: dict[int, LoadSpec] = {}
        self._failed: list[EngineRequest] = []
        self._void: list[EngineRequest] = []
        self._late: list[EngineRequest] = []
        self._idle = 0.0
        self._idle_since: float | None = context.clock()
        # Engines without a drafter that the log has told of.
        self._without_drafter: BoundedMap[str, None] = BoundedMap(MAX_PEERS)

    def arrives(self, state: "RequestState", adapter: str) -> None:
        params = state.request.kv_transfer_params or {}
        if not wants_remote_kv(params):
            if (reason := refused_there(params)) is not None:
                logger.warning(
                    "Request %s computes its prompt here: the prefill engine hands nothing off "
                    "(%s)",
                    state.request.request_id,
                    reason,
                )
            return
        try:
            self._take(state, params, adapter)
        except BadParamsError as error:
            self._stats.fail(error.reason)
            logger.warning(
                "Request %s computes its prompt here: kv_transfer_params not used (%s: %s)",
                state.request.request_id,
                error.reason,
                error,
            )

    def _take(self, state: "RequestState", params: Mapping[str, Any], adapter: str) -> None:
        request, rules = state.request, self._rules
        remote = parse_remote_prefill(params)
        if (refusal := state.refusals.fetch) is not None:
            self.reject(remote)  # the prefill engine need not keep it
            raise BadParamsError(refusal, "the role of this engine is prefill")
        if (reason := computes_all(request)) is not None:
            self.reject(remote)
            raise BadParamsError(reason, _COMPUTES_ALL)
        # What the KV there depends on, whether or not this engine has the same drafter.
        ahead = remote.omni_tokens_ahead
        ahead = rules.tokens_ahead if ahead is None else ahead
        num_tokens = max(0, request.num_prompt_tokens - max(1, ahead))
        if not goes_on_after(
            num_tokens,
            request.num_prompt_tokens,
            ahead=rules.tokens_ahead,
            state_block=rules.state_block,
        ):
            self.reject(remote)
            raise BadParamsError("state_boundary", _STATE_BOUNDARY)
        prompt = rules.prompt_of(request, num_tokens, adapter, ahead)
        if prompt is None:
            self.reject(remote)
            raise BadParamsError("prompt_embeds", NO_TOKENS)
        if prompt.num_tokens == 0:
            # No prompt of one token is handed off. vLLM puts one in the place of a prompt that its
            # server has refused.
            self.reject(remote)
        elif not self.is_short(remote, prompt.num_tokens):
            state.fetch = self.add(request, remote, prompt)
            state.enter(Phase.LEASE, self._trace)

    def is_short(self, remote: RemotePrefill, num_tokens: int) -> bool:
        """Whether a request that arrives is computed here, as it has fewer tokens than
        `min_handoff_tokens`. If so, the prefill engine is told that nobody will ask for it."""
        if num_tokens >= self._min_tokens:
            return False
        self._stats.fail(SHORT_PROMPT)
        self.reject(remote)
        return True

    def add(self, request: EngineRequest, remote: RemotePrefill, prompt: Prompt) -> Fetch:
        """A request has arrived whose prompt was prefilled elsewhere: ask for a lease on its KV."""
        address = self._address_of(remote)
        now = self._clock()
        load = Fetch(request, prompt, remote, address, now)
        self._ask(load)
        return load

    def _ask(self, load: Fetch) -> None:
        deadline = self._clock() + self._timeout
        load.answer_by = deadline + 1.0  # by then the channel has answered, if it still runs
        load.idle_before = self._idle_time()
        remote = load.remote
        pending = PendingLease(
            remote.token, load.prompt, remote.epoch, self._hash_id, deadline, self._weights()
        )
        self._channel.request_lease(load.address, pending)
        load.future = pending.future

    def reject(self, remote: RemotePrefill) -> None:
        """A request was refused before it reached this engine: nobody will ask for its hand-off."""
        self._channel.drop(self._address_of(remote), remote.token)

    def declines(self, state: "RequestState", reason: str) -> None:
        params = state.request.kv_transfer_params or {}
        if wants_remote_kv(params):
            with contextlib.suppress(BadParamsError):  # then nobody knows of it
                self.reject(parse_remote_prefill(params))

    def offer(self, state: "RequestState", num_computed: int) -> int | None:
        return 0 if state.fetch is None else self.matched_tokens(state.fetch, num_computed)

    def matched_tokens(self, load: Fetch, num_computed: int) -> int | None:
        """Tokens that can be loaded beyond `num_computed`; None while a lease is asked for."""
        if not load.waits:
            return 0
        if load.future is not None and not self._answered(load, load.future):
            return None
        if load.lease is None:
            return 0
        margin = min(_LEASE_MARGIN_S, _LEASE_MARGIN * load.lease.granted.lease_s)
        if self._clock() > load.lease.expires - margin:
            self._give_up(load, LEASE_EXPIRED, "the lease ended before there was room to load")
            return 0
        if self._is_old(load):
            return self._ask_again(load, load.lease)
        return max(0, load.lease.granted.num_tokens - num_computed)

    def _is_old(self, load: Fetch) -> bool:
        return self._idle_time() - load.idle_before > _FRESH_S

    def _idle_time(self) -> float:
        """Seconds in which this engine has not been computing, since its start."""
        since = self._idle_since
        return self._idle + (0.0 if since is None else self._clock() - since)

    def _ask_again(self, load: Fetch, lease: Lease) -> int | None:
        slow = lease.received - load.asked_at > _FRESH_S
        load.slow_answers = load.slow_answers + 1 if slow else 0
        # With data parallelism, other ranks may keep an engine from its next step again and again.
        if load.idle_at_first is None:
            load.idle_at_first = self._idle_time()
        idle = self._idle_time() - load.idle_at_first
        if load.slow_answers >= _SLOW_ANSWERS or idle > self._timeout:
            self._give_up(load, "peer_unreachable", "its answers come too late to be used")
            return 0
        load.former, load.lease = load.lease, None
        load.asked_at = self._clock()
        self._ask(load)
        return None

    def _answered(self, load: Fetch, future: "Future[Lease]") -> bool:
        if not future.done():
            if self._clock() < load.answer_by:
                return False
            self._give_up(load, "peer_unreachable", "no answer in time")
            return True
        load.future = None
        error = future.exception()
        if error is None:
            lease = future.result()
            problem = self._check(lease, load.prompt)
            load.lease = lease
            differs = lease.granted.weights.difference(self._weights())
            if differs is not None:  # of a peer that does not compare them itself
                self._give_up(load, OTHER_WEIGHTS, differs)
            elif problem is not None:
                self._give_up(load, "malformed_answer", problem)
            elif load.former is not None:
                self._channel.release(load.former)
                load.former = None
            else:
                self._stats.time("claim", self._clock() - load.asked_at)
            return True
        if isinstance(error, LeaseDeniedError):
            # Kinds become metric labels, so only known words of the peer do.
            kind = error.reason if error.reason in _DENIALS else "denied"
            text = _DENIALS.get(error.reason, str(error))
        else:
            kind = next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), "")
            if not kind:
                raise error
            text = str(error)
        self._give_up(load, kind, text)
        return True

    def _check(self, lease: Lease, prompt: Prompt) -> str | None:
        granted = lease.granted
        if granted.num_tokens != prompt.num_tokens:
            return f"{granted.num_tokens} tokens granted, {prompt.num_tokens} asked for"
        peer = lease.handshake_reply.compatibility
        needed = [group.needed(prompt.num_tokens) for group in peer.groups]
        expected = [needed[each.group] for each in peer.slot_groups]
        found = [
            range(first, first + len(refs))
            for first, refs in zip(granted.first_blocks, granted.groups, strict=True)
        ]
        if found != expected:
            return f"blocks {found} of the groups granted, {expected} asked for"
        return None

    def _give_up(self, load: Fetch, kind: str, text: str) -> None:
        self._stats.fail(kind)
        logger.warning(
            "Request %s computes its prompt here: the KV of engine %r cannot be used (%s: %s)",
            load.request.request_id,
            load.remote.remote_engine_id,
            kind,
            text,
        )
        self._release(load)

    def _release(self, load: Fetch) -> None:
        if load.future is not None:
            if not load.future.cancel() and load.future.exception() is None:
                load.lease = load.future.result()
            load.future = None
        for lease in (load.lease, load.former):
            if lease is not None:
                self._channel.release(lease)
        load.lease = load.former = None

    def allocated(self, state: "RequestState", blocks: RequestBlocks, num_tokens: int) -> bool:
        load, offer = state.fetch, state.offer
        if load is None:
            return False
        taken = offer is not None and offer.whose is self
        return self.load(load, blocks, num_tokens if taken else 0)

    def load(self, load: Fetch, blocks: RequestBlocks, num_external: int) -> bool:
        """vLLM has allocated blocks for `num_external` tokens of a hand-off; 0: it wants none.

        Returns:
            Whether they are loaded without the KV of this engine's drafter.
        """
        if not load.waits:
            return False
        if num_external <= 0:
            self._release(load)
            return False
        lease = load.lease
        assert lease is not None, "tokens are matched only with a lease"
        spec = self._spec(load, lease, blocks.get_block_ids(), num_external)
        load.job_id = self._ledger.start(
            spec.blocks, lambda failure: self._job_ended(load, num_external, failure)
        )
        self._queued[load.job_id] = spec
        lacks = lease.handshake_reply.compatibility.lacks_drafter_of(self._compatibility)
        if lacks:
            self._tell_of_drafter(load.remote.remote_engine_id)
        return lacks

    def _tell_of_drafter(self, engine_id: str) -> None:
        if engine_id not in self._without_drafter:
            self._without_drafter[engine_id] = None
            logger.info(
                "Engine %r has no drafter: prompts that it has prefilled begin here without the "
                "drafter's KV, so that at first fewer drafts may be accepted. Their blocks are "
                "shared with no other engine",
                engine_id,
            )

    def _spec(
        self, load: Fetch, lease: Lease, tables: Sequence[Sequence[int]], num_external: int
    ) -> LoadSpec:
        request_id = load.request.request_id
        peer = lease.handshake_reply.compatibility
        end = lease.granted.num_tokens
        blocks: list[tuple[int, Sequence[int]]] = []
        slots: list[tuple[int, Sequence[int]]] = []
        generations: list[int] = []
        shards: list[int] = []
        numbers_of = peer.slot_group_ranges
        read_from = peer.groups_read_by(self._compatibility)
        for g, (source, ours) in enumerate(zip(read_from, self._compatibility.groups, strict=True)):
            table = tables[self._group_ids[g]]
            written = _written(ours, end - num_external, end)
            read = ours.needed(end, end - num_external)
            block_ids = table[written.start : written.stop]
            if len(block_ids) < len(written) or NULL_BLOCK_ID in table[read.start : read.stop]:
                raise RuntimeError(f"request {request_id}: vLLM allocated no block of group {g}")
            lead = next((i for i, each in enumerate(block_ids) if each != NULL_BLOCK_ID), 0)
            index = written.start + lead
            if source is None:  # the peer has none of its layers: its blocks are zeroed
                blocks.append((index, block_ids[lead:]))
                slots.append((0, []))
                shards.append(1)
                continue
            theirs = peer.groups[source]
            numbers = numbers_of[source]
            first = lease.granted.first_blocks[numbers.start]
            skipped = 0
            if ours.attention_type == "last":  # by whatever block size each side counts
                first = index
            else:
                skipped = max(0, index * ours.block_size // theirs.block_size - first)
                first += skipped
                cut = -(-first * theirs.block_size // ours.block_size) - index
                self._note_incomplete(load, block_ids[lead : lead + max(0, cut)])
            blocks.append((index, block_ids[lead:]))
            shards.append(len(numbers))
            for number in numbers:
                refs = lease.granted.groups[number][skipped:]
                slots.append((first, [slot for slot, _ in refs]))
                generations += [generation for _, generation in refs]
        return LoadSpec(
            request_id=request_id,
            blocks=BlockSpans.of(blocks),
            slots=BlockSpans.of(slots),
            shards=tuple(shards),
            generations=np.array(generations, np.int64),
            arenas=lease.handshake_reply.arenas,
            timeout=self._timeout,
            lease=Deadline.of(lease.expires, self._clock),
            source=None if peer.has_bytes_of(self._compatibility) else peer,
        )

    def _note_incomplete(self, load: Fetch, block_ids: Sequence[int]) -> None:
        if noted := set(block_ids) - {NULL_BLOCK_ID}:
            load.incomplete |= noted
            self.incomplete[load] = None

    def step(self, step: Step) -> None:
        if step.busy and self._idle_since is not None:
            self._idle = self._idle_time()
            self._idle_since = None
        if self._queued:
            step.work.loads |= self._queued
            self._queued.clear()

    def step_ended(self) -> None:
        # The engine computes nothing until the next.
        if self._idle_since is None:
            self._idle_since = self._clock()

    def _job_ended(self, load: Fetch, num_tokens: int, failure: str | None) -> None:
        load.job_id = None
        load.ended = True
        self._release(load)
        if load.void:
            self._void.append(load.request)
            return
        if failure == LEASE_EXPIRED:  # no fault: there was more to load than the lease's time
            self.incomplete.pop(load, None)
            self._stats.fail(failure)
            self._late.append(load.request)
            return
        if failure is not None:
            self.incomplete.pop(load, None)
        if failure is None:
            self._stats.count("handoffs_received")
            self._stats.count("tokens_loaded", num_tokens)
            return
        if failure != CANCELLED:  # the worker has logged why, and vLLM logs what follows
            self._stats.fail(failure)
        self._failed.append(load.request)

    def takes_nothing(self, state: "RequestState", reason: str, text: str) -> None:
        load = state.fetch
        if load is None or not load.waits:
            return
        load.ended = True
        if load.lease is not None or load.future is not None:
            self._give_up(load, reason, text)

    def suspend(self, states: Iterable["RequestState"]) -> None:
        # It would come before it is known whether they have.
        for load in _fetches(states):
            if load.job_id is not None:
                load.void = True

    def void(self, states: Iterable["RequestState"]) -> None:
        for load in _fetches(states):
            if load.ended or load.void:
                continue
            load.void = True
            if load.job_id is None:  # else its job ends first, and what it loads is not used
                load.ended = True
                self._give_up(load, "weights_changed", "the engine has other weights now")

    def failed_loads(self, told: Container[str]) -> Iterable[tuple[Any, bool]]:
        # KV has come, but of other weights than it would be read with; and late loads, of which the
        # workers do not tell vLLM, so that its policy ends no request for them.
        ended = [(each, False) for each in (*self._void, *self._late)]
        # Runners before vLLM 0.30 do not pass on which loads have failed as a whole.
        for request in self._failed:
            learns = self._fails_by_block or request.request_id in told
            if not learns:
                logger.warning(
                    "Request %s computes its prompt here: its load failed, and the model "
                    "runner does not pass on failed loads",
                    request.request_id,
                )
            ended.append((request, learns))
        self._void, self._late, self._failed = [], [], []
        return ended

    def ends(self, state: "RequestState", blocks_of: BlocksOf | None) -> None:
        if not state.begun:
            self.declines(state, "")  # nothing was asked for yet
        if state.fetch is not None:
            self.finish(state.fetch)

    def finish(self, load: Fetch) -> None:
        """The request is over, maybe before its KV came: end its lease, or stop its load."""
        self.incomplete.pop(load, None)
        if load.job_id is None:
            self._release(load)
        else:
            self._ledger.revoke([load.job_id])


def _fetches(states: Iterable["RequestState"]) -> Iterator[Fetch]:
    return (each.fetch for each in states if each.fetch is not None)


def _written(group: GroupShape, start: int, end: int) -> range:
    """Blocks of the tokens from `start` to `end`, which vLLM may have allocated."""
    if group.attention_type == "last":
        return group.needed(end)
    if not group.is_cached:
        start = 0  # what is here of the tokens before has no blocks of this group
    return range(start // group.block_size, group.num_blocks(end))
