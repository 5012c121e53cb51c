# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of a prefill engine: which blocks go to which slots, and when.

A request that asks for a hand-off gets all its slots before it is first scheduled; while the
arena has no room it waits in vLLM's queue. Blocks are copied as they fill, the last one with
the step that ends the prompt. `CopyLedger` holds the blocks of a copy until it has ended, whatever
happens to the request; then vLLM may free them. So no copy is made twice.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from omni_connector.arena.slot_index import SlotKey
from omni_connector.copy.held_blocks import (
    CANCELLED,
    Block,
    CopyLedger,
    EngineBlock,
    EngineRequest,
)
from omni_connector.copy.jobs import SaveSpec
from omni_connector.errors import ArenaFullError
from omni_connector.handoff.leases import Handoff, SlotDirectory
from omni_connector.handoff.params import handoff_answer, no_handoff_answer, wants_handoff
from omni_connector.handoff.parts import Send
from omni_connector.handoff.prompt import Prompt, PromptRules
from omni_connector.handoff.serving import UNSERVED
from omni_connector.handoff.truncation import (
    NO_TOKENS,
    TRUNCATED,
    cut,
    may_be_cut,
    truncate,
    truncation_refusal,
)
from omni_connector.kv.block_names import block_names, names_with_adapter
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.net.peers import HostPort
from omni_connector.requests.phases import Phase
from omni_connector.requests.product import BlocksOf, Product, Step
from omni_connector.runtime.context import EngineContext

if TYPE_CHECKING:
    from omni_connector.requests.state import RequestState

logger = logging.getLogger("vllm.omni_connector.sender")

# Names of vLLM's `RequestStatus`.
_FINISHED_WELL: Final = frozenset(
    {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_REPETITION"}
)


_NO_PROMPT: Final = Prompt(token_ids=(), num_tokens=0)


class HandoffSender(Product):
    """Hands finished prefills off.

    Args:
        rules: which part of a prompt is handed off.
        alone: whether no other connector beside this one sees the requests.
        ended: whether the control channel has ended: nobody can ask for a hand-off then.
        directory, ledger: keeps the slots; starts copy jobs.
        compatibility: this engine's compatibility key.
        group_ids: index of each transferred group among vLLM's groups. Below, a group is a slot
            group; see `kv.stripes`.
        engine_id, epoch, address: for the answer to the router.
        arena_wait: seconds that a request may wait for room.
        context: clock and statistics.
        weights_known: whether the engine's weights are those of the directory's slots, for all that
            is known. Until they are, nothing that is copied can be leased.
        on_complete: called when a hand-off may have become ready, or void.

    Attributes:
        waiting: what waits for room, in the order in which it is given some. All values are None.
        admitted: what has slots. All values are None.
    """

    waits_in = Phase.QUEUED

    def __init__(
        self,
        *,
        rules: PromptRules,
        alone: bool,
        ended: Callable[[], bool],
        directory: SlotDirectory,
        ledger: CopyLedger,
        compatibility: CompatibilityKey,
        group_ids: tuple[int, ...],
        engine_id: str,
        epoch: bytes,
        address: HostPort | None,
        arena_wait: float,
        context: EngineContext,
        on_complete: Callable[[], None],
        weights_known: Callable[[], bool] = lambda: True,
    ) -> None:
        self._rules = rules
        self._alone = alone
        self._ended = ended
        self._weights_known = weights_known
        self._unsettled: list[tuple[Handoff, list[Block]]] = []  # copied while they were not known
        self._directory = directory
        self._pool = directory.pool
        self._ledger = ledger
        slot_groups = compatibility.slot_groups
        self._groups = [compatibility.groups[each.group] for each in slot_groups]
        self._ranks = compatibility.ranks
        self._group_ids = [group_ids[each.group] for each in slot_groups]
        self._engine_id = engine_id
        self._epoch = epoch
        self._address = address
        self._arena_wait = arena_wait
        self._clock = context.clock
        self._stats = context.stats
        self._trace = context.trace
        self._on_complete = on_complete
        self.admitted: dict[Send, None] = {}
        self._copying: dict[int, Send] = {}  # by job, also for requests that are over
        self._spoiled: set[int] = set()  # jobs whose blocks hold what no model has computed
        self.waiting: OrderedDict[Send, None] = OrderedDict()
        # The pool's count of releases when the first of them found no room.
        self._tried: int | None = None

    def declines(self, state: "RequestState", reason: str) -> None:
        if wants_handoff(state.request.kv_transfer_params or {}):
            state.send = self.add(state.request, _NO_PROMPT, reason)

    def arrives(self, state: "RequestState", adapter: str) -> None:
        params = state.request.kv_transfer_params or {}
        if not wants_handoff(params):
            return
        state.send = self._take(state.request, params, adapter, state.refusals.offer)
        if state.send.refusal is None:
            state.enter(Phase.QUEUED, self._trace)

    def _take(
        self, request: Any, params: Mapping[str, Any], adapter: str, refusal: str | None
    ) -> Send:
        rules = self._rules
        # A connector beside this one has truncated it, and lets it answer one token.
        truncated = params.get(TRUNCATED) is True and request.max_tokens == 1
        num_tokens = request.num_prompt_tokens - (0 if truncated else rules.tokens_left)
        num_tokens = max(0, num_tokens)
        prompt = rules.prompt_of(request, num_tokens, adapter, rules.tokens_ahead)
        if prompt is None:
            self._stats.fail("prompt_embeds")
            logger.warning(
                "Request %s is not handed off (prompt_embeds: %s)", request.request_id, NO_TOKENS
            )
            return self.add(request, _NO_PROMPT, "prompt_embeds")
        if num_tokens < 1:
            return self.add(request, prompt, "nothing_to_hand_off")
        if refusal is not None:
            if self._alone and may_be_cut(request):
                cut(request)
        elif self._ended():
            refusal = "control_ended"
        if refusal is None and request.resumable:
            refusal = "resumable"  # it goes on writing, and a state is overwritten in place
        elif refusal is None and truncated and rules.tokens_ahead:
            refusal = "truncated_elsewhere"  # the drafter's KV depends on the missing token
        elif refusal is None and rules.stops_early and not truncated:
            refusal = truncation_refusal(request, num_tokens)
            if refusal is None:
                truncate(request, params, rules.tokens_left, drafts=rules.tokens_ahead > 0)
                # MTP of several modules reads beyond the token that it is answered with.
                read_beyond = max(0, rules.tokens_ahead - 1)
                prompt = msgspec.structs.replace(prompt, named_tokens=num_tokens - read_beyond)
        if refusal is not None:
            self._stats.fail(refusal)
            if refusal not in UNSERVED:  # of which the log says so once
                logger.warning("Request %s is not handed off (%s)", request.request_id, refusal)
        return self.add(request, prompt, refusal)

    def add(self, request: EngineRequest, prompt: Prompt, refusal: str | None = None) -> Send:
        """A request that asks for a hand-off has arrived.

        Args:
            prompt: the prompt that the decode engine will ask for.
            refusal: why it is not handed off, if that is known already.
        """
        first_blocks = [group.needed(prompt.num_tokens).start for group in self._groups]
        keys = [_keys(group, prompt) for group in self._groups]
        return Send(request, prompt, first_blocks, keys, copied=list(first_blocks), refusal=refusal)

    def offer(self, state: "RequestState", num_computed: int) -> int | None:
        return 0 if state.send is None or self.may_schedule(state.send) else None

    def may_schedule(self, send: Send) -> bool:
        """False while the request must wait for room in the arena."""
        if send.handoff is not None or send.refusal is not None:
            return True
        if send.wait_until is None:
            send.wait_until = self._clock() + self._arena_wait
            self.waiting[send] = None
            send.waits = True
        self.admit()
        return not send.waits

    def admit(self) -> None:
        """Give room to the waiting requests in their order, so that smaller ones cannot overtake a
        large one for ever. Only the first is tried, and only when slots were released."""
        while self.waiting:
            send = next(iter(self.waiting))
            if self._ended():
                self._refuse(send, "control_ended", "the control channel has ended")
            elif self._tried != self._pool.releases:
                self._tried = self._pool.releases
                try:
                    send.handoff = self._directory.open(send.prompt, send.keys, send.first_blocks)
                except ArenaFullError as error:
                    self._refuse(send, "prompt_too_long", str(error))
            if send.handoff is not None:
                self.admitted[send] = None
            elif send.refusal is None:
                if self._clock() < (send.wait_until or 0.0):
                    return
                text = f"no room in the arena for {self._arena_wait:g} s"
                self._refuse(send, "arena_full", text)
            self._waits_no_more(send)

    def _refuse(self, send: Send, reason: str, text: str) -> None:
        send.refusal = reason
        self._stats.fail(reason)
        logger.warning("Request %s is not handed off: %s", send.request.request_id, text)

    def step(self, step: Step) -> None:
        if self.waiting:
            self.admit()
        scheduled = step.output.num_scheduled_tokens
        for send in self.admitted:  # fewer than those that decode
            request_id = send.request.request_id
            tokens = scheduled.get(request_id)
            if tokens is None or send.handoff is None or send.refusal is not None:
                continue
            ready = self._filled_blocks(send, send.request.num_computed_tokens + tokens)
            if ready:
                blocks = step.blocks_of(request_id)
                step.work.saves |= self._start(send, send.handoff, ready, blocks)

    def step_ended(self) -> None:
        if self.waiting:
            self.admit()

    def _filled_blocks(self, send: Send, computed: int) -> list[Block]:
        """Blocks that this step fills and that no job copies yet."""
        ends = computed >= send.prompt.num_tokens
        filled: list[Block] = []
        for g, group in enumerate(self._groups):
            end = send.first_blocks[g] + len(send.keys[g])
            if not ends:
                # A recurrent state is that of the last token, and a ring is written all the time.
                moves_on = group.attention_type in ("last", "ring")
                whole = 0 if moves_on else computed // group.block_size
                end = min(end, whole)
            filled += [(g, i) for i in range(send.copied[g], end)]
            send.copied[g] = max(send.copied[g], end)
        return filled

    def _start(
        self,
        send: Send,
        handoff: Handoff,
        filled: list[Block],
        blocks: Sequence[Sequence[EngineBlock]],
    ) -> dict[int, SaveSpec]:
        """Start the job that copies these blocks, unless other hand-offs have them copied."""
        chosen = self._directory.copying(handoff, filled)
        if chosen is None:  # its peer has released it, or it has expired, or it is void
            self._abandon(send)
            return {}
        tables = [blocks[group_id] for group_id in self._group_ids]
        if any(i >= len(tables[g]) or tables[g][i].is_null for g, i in filled):
            self._directory.unfilled(handoff, chosen)
            self._refuse(send, "not_computed", "vLLM has freed blocks that the next token reads")
            self._abandon(send)
            return {}
        send.block_ids.update(tables[g][i].block_id for g, i in filled)
        if not chosen:  # another hand-off has, or had, all of them copied
            return {}
        spec = _spec(send, handoff, chosen, tables, self._directory.pool.header_keys)
        known = self._weights_known()  # those that this step computes with
        job_id = self._ledger.start(
            spec.blocks,
            lambda failure: self._job_ended(send, handoff, job_id, chosen, failure, known=known),
        )
        send.jobs[job_id] = chosen
        self._copying[job_id] = send
        return {job_id: spec}

    def _job_ended(
        self,
        send: Send,
        handoff: Handoff,
        job_id: int,
        blocks: list[Block],
        failure: str | None,
        *,
        known: bool,
    ) -> None:
        send.jobs.pop(job_id, None)
        del self._copying[job_id]
        if job_id in self._spoiled:  # it may have ended before it could be stopped
            self._spoiled.discard(job_id)
            failure = failure or CANCELLED
        if failure is None and (known or self._weights_known()):
            self._directory.filled(handoff, blocks)
            self._on_complete()
            return
        if failure is None:
            self._unsettled.append((handoff, blocks))
            return
        if handoff is not send.handoff:  # it is void, and its prompt is copied anew
            self._directory.unfilled(handoff, blocks)
        else:
            if failure != CANCELLED:
                self._refuse(send, failure, f"copying its blocks failed: {failure}")
            self._directory.unfilled(handoff, blocks)
            self._abandon(send)
        self._on_complete()

    def unsettled(self) -> bool:
        return bool(self._unsettled)

    def settle(self) -> None:
        # What was copied meanwhile can be leased.
        for handoff, blocks in self._unsettled:
            self._directory.filled(handoff, blocks)
        self._unsettled.clear()
        self._on_complete()

    def void(self, states: Iterable["RequestState"]) -> None:
        # `SlotDirectory.void` was called. Requests that vLLM computes anew from their first token
        # are copied anew.
        for handoff, blocks in self._unsettled:
            self._directory.unfilled(handoff, blocks)
        self._unsettled.clear()
        for send in list(self.admitted):
            self._ledger.revoke(send.jobs)
            if send.request.num_computed_tokens:
                self._refuse(send, "weights_changed", "the prefix cache was reset meanwhile")
                continue
            send.handoff = None
            send.wait_until = None
            send.jobs = {}
            send.block_ids.clear()
            del self.admitted[send]
            send.copied = list(send.first_blocks)
        self._on_complete()

    def gives_nothing(self, state: "RequestState", reason: str, text: str) -> None:
        if state.send is not None:
            self.refuse(state.send, reason, text)

    def refuse(self, send: Send, reason: str, text: str) -> None:
        """Do not hand a request off after all."""
        if send.refusal is not None:
            return
        self._refuse(send, reason, text)
        self._waits_no_more(send)
        self._abandon(send)

    def _waits_no_more(self, send: Send) -> None:
        if send.waits:
            send.waits = False
            del self.waiting[send]
            self._tried = None

    def blocks_void(self, block_ids: Set[int]) -> None:
        # Copies of them must not be handed off, nor may hand-offs of the same prompt that share the
        # slots.
        for send in self.admitted:
            if send.refusal is None and not send.block_ids.isdisjoint(block_ids):
                self._refuse(send, "load_failed", "a load of another connector has failed")
        for job_id, send in self._copying.items():
            if send.block_ids.isdisjoint(block_ids):
                continue
            self._spoiled.add(job_id)
            self._ledger.revoke([job_id])
            if send.handoff is not None and job_id in send.jobs:
                self._directory.close_holders(send.handoff, send.jobs[job_id])

    def _abandon(self, send: Send) -> None:
        if send.handoff is not None:
            self._directory.close(send.handoff.token)
            # Copies that other hand-offs wait for go on.
            for job_id, blocks in send.jobs.items():
                if not self._directory.wanted(send.handoff, blocks):
                    self._ledger.revoke([job_id])

    def ends(self, state: "RequestState", blocks_of: BlocksOf | None) -> dict[str, Any] | None:
        return None if state.send is None else self.finish(state.send)

    def finish(self, send: Send) -> dict[str, Any] | None:
        """The request is over; returns the answer for the router, None where there is none."""
        request = send.request
        self.admitted.pop(send, None)
        self._waits_no_more(send)
        handoff = send.handoff
        well = request.status.name in _FINISHED_WELL
        ends = [first + len(keys) for first, keys in zip(send.first_blocks, send.keys, strict=True)]
        if send.copied != ends or not well or handoff is None or handoff.closed or send.refusal:
            self._abandon(send)
            if well and send.refusal is None:
                self._refuse(send, "not_computed", "some of its KV was not copied, or is void")
            return no_handoff_answer(send.refusal or "") if well else None
        self._stats.count("handoffs_offered")
        self._directory.commit(handoff)
        self._on_complete()
        return handoff_answer(
            engine_id=self._engine_id,
            request_id=request.request_id,
            epoch=self._epoch,
            token=handoff.token,
            num_tokens=handoff.prompt.num_tokens,
            tokens_ahead=handoff.prompt.tokens_ahead,
            tp_size=self._ranks,
            address=self._address,
        )


def _spec(
    send: Send,
    handoff: Handoff,
    chosen: list[Block],
    tables: list[Sequence[EngineBlock]],
    listed_keys: Callable[[int, Sequence[SlotKey | None]], list[bytes]],
) -> SaveSpec:
    """The copies of these blocks. Those between them that are not copied become null blocks."""
    indices_of: dict[int, list[int]] = {}
    for g, i in chosen:
        indices_of.setdefault(g, []).append(i)
    groups: list[tuple[int, list[int]]] = [(first, []) for first in send.first_blocks]
    slots, generations, keys = [], [], []
    for g, indices in indices_of.items():
        first = indices[0]
        end = indices[-1] + 1
        block_ids = [block.block_id for block in tables[g][first:end]]
        for i in set(range(first, end)).difference(indices):
            block_ids[i - first] = NULL_BLOCK_ID
        groups[g] = first, block_ids
        held = slice(first - send.first_blocks[g], end - send.first_blocks[g])
        slots.append(handoff.slots[g][held])
        generations.append(handoff.generations[g][held])
        keys += listed_keys(g, send.keys[g][held])
    return SaveSpec(
        blocks=BlockSpans.of(groups),
        slots=np.concatenate(slots),
        generations=np.concatenate(generations),
        keys=keys,
    )


def _keys(shape: GroupShape, prompt: Prompt) -> list[SlotKey | None]:
    """The key of each block that the next token reads; None for a block without a name."""
    needed = shape.needed(prompt.num_tokens)
    if shape.attention_type == "last" or not shape.is_cached:
        return [None] * len(needed)
    if prompt.hash_block_size != shape.block_size:
        return [None] * len(needed)
    named = prompt.num_tokens if prompt.named_tokens is None else prompt.named_tokens
    full = min(needed.stop, len(prompt.block_hashes), max(0, named) // shape.block_size)
    names = block_names(
        prompt.block_hashes[needed.start : full],
        prompt.token_ids,
        first=needed.start,
        block_size=shape.block_size,
        tokens_ahead=prompt.tokens_ahead,
    )
    keys = names_with_adapter(names, prompt.adapter)
    return [*keys, *[None] * (len(needed) - len(keys))]
