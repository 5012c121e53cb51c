# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of a decode engine: claims at prefill engines, and the loads they grant.

The claim leaves when the request arrives and is answered on the control thread; the request
waits in vLLM's queue meanwhile. Whatever goes wrong before a load has started means that the
prompt is computed here. What goes wrong later is the worker's to report, and vLLM recomputes
or fails the request by `kv_load_failure_policy`.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from omni_connector.errors import (
    IncompatiblePeerError,
    PeerUnreachableError,
    ProtocolError,
)
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.client import ClaimDeniedError, Grant
from omni_connector.handoff.jobs import LoadSpec
from omni_connector.handoff.params import RemotePrefill
from omni_connector.handoff.prompt import Prompt
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.ledger import CANCELLED, CopyLedger, CopyWork
from omni_connector.kv.shapes import GroupShape, same_bytes
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans
from omni_connector.stats import Stats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.omni_connector.receiver")

_DENIALS: Final = frozenset(
    {"unknown_token", "other_prompt", "other_epoch", "not_ready", "not_introduced", "overloaded"}
)

# A lease this close to its end is not worth starting on: seconds, and the part of a short one.
_LEASE_MARGIN_S: Final = 1.0
_LEASE_MARGIN: Final = 0.25

# A prefill engine that is reset voids its leases, and while it is idle it tells nobody. Engines
# that get new weights stand still, and go on a second after the last of them was reset
# (docs/guarantees.md). So what was granted before a reset, this engine has had for longer than
# this without computing, and asks for again. Time in which it computes does not count, as one step
# may take longer: it would ask again for ever.
_FRESH_S: Final = 0.5


@dataclass(slots=True)
class _Load:
    request: "Request"
    prompt: Prompt
    engine_id: str
    asked_at: float
    answer_by: float
    idle_before: float  # as `_idle_time` was when it was asked
    ask: "Callable[[], Future[Grant]]"
    future: "Future[Grant] | None"
    grant: Grant | None = None
    former: Grant | None = None  # held until it was asked for again
    job_id: int | None = None
    ended: bool = False
    void: bool = False  # of other weights than the engine has by now


class HandoffReceiver:
    """Fetches the KV of prompts that were prefilled elsewhere.

    Args:
        channel: reaches the prefill engines.
        ledger: the copy jobs.
        address_of: control address of the engine that the params name.
        fingerprint: of this engine.
        group_ids: index of each transferred group among vLLM's groups.
        hash_id: how this engine hashes blocks.
        load_timeout: seconds for an answer, and again for the bytes.
        clock: seconds, monotonic.
        stats: where to count.
    """

    def __init__(
        self,
        *,
        channel: ControlChannel,
        ledger: CopyLedger,
        address_of: Callable[[RemotePrefill], str],
        fingerprint: CompatibilityKey,
        group_ids: tuple[int, ...],
        hash_id: str,
        load_timeout: float,
        clock: Callable[[], float],
        stats: Stats,
    ) -> None:
        self._channel = channel
        self._ledger = ledger
        self._address_of = address_of
        self._fingerprint = fingerprint
        self._group_ids = group_ids
        self._hash_id = hash_id
        self._timeout = load_timeout
        self._clock = clock
        self._stats = stats
        self._loads: dict[str, _Load] = {}
        self._queued: dict[int, LoadSpec] = {}
        self._failed: list[Request] = []
        self._void: list[Request] = []
        self._idle = 0.0
        self._idle_since: float | None = clock()

    def add(self, request: "Request", remote: RemotePrefill, prompt: Prompt) -> None:
        """A request whose prompt was prefilled elsewhere has arrived: ask there."""
        now = self._clock()
        address = self._address_of(remote)

        def ask() -> "Future[Grant]":
            return self._channel.claim(
                address,
                remote.token,
                prompt,
                epoch=remote.epoch,
                hash_id=self._hash_id,
                timeout=self._timeout,
            )

        self._loads[request.request_id] = _Load(
            request=request,
            prompt=prompt,
            engine_id=remote.remote_engine_id,
            asked_at=now,
            answer_by=now + self._timeout + 1.0,
            idle_before=self._idle_time(),
            ask=ask,
            future=ask(),
        )

    def reject(self, remote: RemotePrefill) -> None:
        """A request was refused before it reached this engine: nobody will claim its KV."""
        self._channel.drop(self._address_of(remote), remote.token)

    def matched_tokens(self, request_id: str, num_computed: int) -> int | None:
        """Tokens that can be loaded beyond `num_computed`; None while the peer is asked."""
        load = self._loads.get(request_id)
        if load is None or load.ended or load.job_id is not None:
            return 0
        if load.future is not None and not self._answered(load, load.future):
            return None
        if load.grant is None:
            return 0
        margin = min(_LEASE_MARGIN_S, _LEASE_MARGIN * load.grant.granted.lease_s)
        if self._clock() > load.grant.expires - margin:
            self._give_up(load, "lease_expired", "the lease ended before there was room to load")
            return 0
        if self._is_old(load, load.grant):
            self._ask_again(load)
            return None
        return max(0, load.grant.granted.num_tokens - num_computed)

    def _is_old(self, load: _Load, grant: Grant) -> bool:
        idle = self._idle_time() - load.idle_before
        return min(idle, self._clock() - grant.received) > _FRESH_S

    def _idle_time(self) -> float:
        """Seconds that this engine has not been computing, in all."""
        since = self._idle_since
        return self._idle + (0.0 if since is None else self._clock() - since)

    def _ask_again(self, load: _Load) -> None:
        load.former, load.grant = load.grant, None
        load.answer_by = self._clock() + self._timeout + 1.0
        load.idle_before = self._idle_time()
        load.future = load.ask()

    def _answered(self, load: _Load, future: "Future[Grant]") -> bool:
        if not future.done():
            if self._clock() < load.answer_by:
                return False
            self._give_up(load, "peer_unreachable", "no answer in time")
            return True
        load.future = None
        error = future.exception()
        if error is None:
            grant = future.result()
            problem = self._check(grant, load.prompt)
            load.grant = grant
            if problem is not None:
                self._give_up(load, "malformed_answer", problem)
            elif load.former is not None:
                self._channel.release(load.former)
                load.former = None
            else:
                self._stats.time("claim", self._clock() - load.asked_at)
            return True
        if isinstance(error, ClaimDeniedError):
            # The word is the peer's, and kinds become metric labels: only known ones.
            kind = error.reason if error.reason in _DENIALS else "denied"
        elif isinstance(error, IncompatiblePeerError):
            kind = "incompatible_peer"
        elif isinstance(error, PeerUnreachableError):
            kind = "peer_unreachable"
        elif isinstance(error, ProtocolError):
            kind = "malformed_answer"
        else:
            raise error
        self._give_up(load, kind, str(error))
        return True

    def _check(self, grant: Grant, prompt: Prompt) -> str | None:
        granted = grant.granted
        if granted.num_tokens != prompt.num_tokens:
            return f"{granted.num_tokens} tokens granted, {prompt.num_tokens} asked for"
        peer = grant.welcome.fingerprint
        if len(grant.welcome.arenas) != peer.ranks:
            return f"{len(grant.welcome.arenas)} arenas for {peer.ranks} ranks"
        expected = [group.needed(prompt.num_tokens) for group in peer.groups]
        try:
            found = [
                range(first, first + len(refs))
                for first, refs in zip(granted.firsts, granted.groups, strict=True)
            ]
        except ValueError as error:
            return str(error)
        if found != expected:
            return f"blocks {found} granted by group, {expected} expected"
        return None

    def _give_up(self, load: _Load, kind: str, text: str) -> None:
        self._stats.fail(kind)
        logger.warning(
            "Request %s computes its prompt here: KV of engine %r not used (%s: %s)",
            load.request.request_id,
            load.engine_id,
            kind,
            text,
        )
        self._release(load)

    def _release(self, load: _Load) -> None:
        if load.future is not None:
            if not load.future.cancel() and load.future.exception() is None:
                load.grant = load.future.result()
            load.future = None
        for grant in (load.grant, load.former):
            if grant is not None:
                self._channel.release(grant)
        load.grant = load.former = None

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", num_external: int) -> None:
        """vLLM has allocated blocks for `num_external` tokens of ours, or decided against it."""
        load = self._loads.get(request.request_id)
        if load is None or load.ended or load.job_id is not None:
            return
        if num_external <= 0:
            self._release(load)
            return
        grant = load.grant
        assert grant is not None, "tokens are matched only with a grant"
        spec = self._spec(request.request_id, grant, blocks.get_block_ids(), num_external)
        load.job_id = self._ledger.start(
            spec.blocks, lambda failure: self._job_ended(load, num_external, failure)
        )
        self._queued[load.job_id] = spec

    def _spec(
        self, request_id: str, grant: Grant, tables: Sequence[Sequence[int]], num_external: int
    ) -> LoadSpec:
        peer = grant.welcome.fingerprint
        end = grant.granted.num_tokens
        blocks: list[tuple[int, Sequence[int]]] = []
        slots: list[tuple[int, Sequence[int]]] = []
        generations: list[int] = []
        source = None
        for g, (theirs, ours) in enumerate(zip(peer.groups, self._fingerprint.groups, strict=True)):
            table = tables[self._group_ids[g]]
            written = _written(ours, end - num_external, end)
            read = _read(ours, end - num_external, end)
            block_ids = table[written.start : written.stop]
            if len(block_ids) < len(written) or NULL_BLOCK_ID in table[read.start : read.stop]:
                raise RuntimeError(f"request {request_id}: vLLM allocated no block of group {g}")
            lead = next((i for i, each in enumerate(block_ids) if each != NULL_BLOCK_ID), 0)
            index = written.start + lead
            first, refs = grant.granted.firsts[g], grant.granted.groups[g]
            if peer.ranks != self._fingerprint.ranks or not same_bytes(theirs, ours):
                source = peer
            if ours.keeps == "last":  # by whatever block size each side counts
                first = index
            else:
                skipped = max(0, index * ours.block_size // theirs.block_size - first)
                first, refs = first + skipped, refs[skipped:]
            blocks.append((index, block_ids[lead:]))
            slots.append((first, [slot for slot, _ in refs]))
            generations += [generation for _, generation in refs]
        return LoadSpec(
            request_id=request_id,
            blocks=BlockSpans.of(blocks),
            slots=BlockSpans.of(slots),
            generations=np.array(generations, np.int64),
            arenas=grant.welcome.arenas,
            timeout=min(self._timeout, grant.expires - self._clock()),
            source=source,
        )

    def build(self, meta: CopyWork, *, computes: bool) -> None:
        """Add this step's loads to `meta`.

        Args:
            computes: whether the step computes anything.
        """
        if computes:
            self._idle, self._idle_since = self._idle_time(), None
        else:
            self.step_ended()
        meta.loads |= self._queued
        self._queued.clear()

    def step_ended(self) -> None:
        """What a step computes is there."""
        if self._idle_since is None:
            self._idle_since = self._clock()

    def _job_ended(self, load: _Load, num_tokens: int, failure: str | None) -> None:
        load.job_id, load.ended = None, True
        self._release(load)
        if load.void:
            self._void.append(load.request)
            return
        if failure is None:
            self._stats.count("handoffs_received")
            self._stats.count("tokens_loaded", num_tokens)
            return
        if failure != CANCELLED:  # the worker has said why, vLLM says what follows
            self._stats.fail(failure)
        self._failed.append(load.request)

    def void(self) -> None:
        """What was asked for, granted or is being loaded is of other weights than it would be
        read with: the prompts are computed here."""
        for load in self._loads.values():
            if load.ended or load.void:
                continue
            load.void = True
            if load.job_id is None:  # else it comes to its end, and to nothing
                load.ended = True
                self._give_up(load, "weights_changed", "the prefix cache was reset meanwhile")

    def take_void(self) -> "list[Request]":
        """Requests whose loads have ended since the last call, and are void."""
        void, self._void = self._void, []
        return void

    def take_failed(self) -> "list[Request]":
        """Requests whose loads have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def finish(self, request_id: str) -> None:
        """The request is over, maybe before its KV came; a load under way is told to stop."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        if load.job_id is None:
            self._release(load)
        else:
            self._ledger.revoke([load.job_id])


def _written(group: GroupShape, start: int, end: int) -> range:
    """Blocks of the tokens from `start` to `end` that vLLM may have allocated for us to fill."""
    if group.keeps == "last":
        return group.needed(end)
    return range(start // group.block_size, -(-end // group.block_size))


def _read(group: GroupShape, start: int, end: int) -> range:
    """Those of them that a later token reads."""
    written, needed = _written(group, start, end), group.needed(end)
    return range(max(written.start, needed.start), needed.stop)
