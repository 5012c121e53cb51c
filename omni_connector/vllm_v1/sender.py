# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of a prefill engine: which blocks go to which slots, and when.

A request that asks for a hand-off takes all its slots before it is first scheduled; while the
arena has no room it waits in vLLM's queue. Blocks are copied as they fill, the last one with
the step that ends the prompt. When the request finishes its blocks stay only until the copies
already started are done.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from omni_connector.control.directory import Handoff, SlotDirectory, SlotKey
from omni_connector.control.messages import Fingerprint
from omni_connector.control.prompt import Prompt
from omni_connector.control.shapes import GroupShape
from omni_connector.errors import ArenaFullError
from omni_connector.network.peers import HostPort
from omni_connector.vllm_v1.metadata import (
    NULL_BLOCK_ID,
    Block,
    CopyRun,
    OmniConnectorMetadata,
    SaveJob,
)
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.params import handoff_answer, no_handoff_answer

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.omni_connector.sender")

BlockIds = tuple[list[int], ...]

_FINISHED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True, eq=False)
class _Send:
    request: "Request"
    prompt: Prompt
    firsts: list[int]
    keys: list[list[SlotKey | None]]
    wait_until: float | None = None
    handoff: Handoff | None = None
    refusal: str | None = None
    todo: set[Block] = field(default_factory=set)
    jobs: dict[int, list[Block]] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)  # jobs told to stop that have not yet ended
    finished_block_ids: BlockIds | None = None
    abandoned: bool = False


class HandoffSender:
    """Hands finished prefills off.

    Args:
        directory: where slots come from.
        fingerprint: of this engine.
        group_ids: index of each transferred group among vLLM's groups.
        engine_id, epoch, address: what the answer says of this engine.
        arena_wait: seconds a request may wait for room.
        clock: seconds, monotonic.
        stats: where to count.
        on_complete: called when a hand-off may have become claimable, or void.
    """

    def __init__(
        self,
        *,
        directory: SlotDirectory,
        fingerprint: Fingerprint,
        group_ids: tuple[int, ...],
        engine_id: str,
        epoch: bytes,
        address: HostPort | None,
        arena_wait: float,
        clock: Callable[[], float],
        stats: OmniStats,
        on_complete: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._groups = fingerprint.groups
        self._ranks = fingerprint.ranks
        self._group_ids = group_ids
        self._engine_id = engine_id
        self._epoch = epoch
        self._address = address
        self._arena_wait = arena_wait
        self._clock = clock
        self._stats = stats
        self._on_complete = on_complete
        self._sends: dict[str, _Send] = {}
        self._jobs: dict[int, tuple[str, int, str | None]] = {}
        self._finishing: list[_Send] = []
        self._job_ids = itertools.count(1)

    def __bool__(self) -> bool:
        # A request whose copies ended with the step that finished it waits in `_finishing` only.
        return bool(self._sends or self._finishing)

    def add(self, request: "Request", prompt: Prompt, refusal: str | None = None) -> None:
        """A request that asks for a hand-off has arrived.

        Args:
            prompt: what the decode engine will ask for.
            refusal: why it is not handed off, known already.
        """
        needed = [group.needed(prompt.num_tokens) for group in self._groups]
        self._sends[request.request_id] = _Send(
            request=request,
            prompt=prompt,
            firsts=[blocks.start for blocks in needed],
            keys=[_keys(g, group, prompt) for g, group in enumerate(self._groups)],
            refusal=refusal,
        )

    def may_schedule(self, request_id: str) -> bool:
        """False while the request should wait for room in the arena."""
        send = self._sends.get(request_id)
        return send is None or self._open(send)

    def _open(self, send: _Send) -> bool:
        if send.handoff is not None or send.refusal is not None:
            return True
        try:
            send.handoff = self._directory.open(send.prompt, send.keys, send.firsts)
        except ArenaFullError as error:
            self._refuse(send, "prompt_too_long", str(error))
            return True
        if send.handoff is not None:
            send.todo = set(send.handoff.missing)
            return True
        now = self._clock()
        if send.wait_until is None:
            send.wait_until = now + self._arena_wait
        if now < send.wait_until:
            return False
        self._refuse(send, "arena_full", f"no room in the arena for {self._arena_wait:g} s")
        return True

    def _refuse(self, send: _Send, reason: str, text: str) -> None:
        send.refusal = reason
        self._stats.fail(reason)
        logger.warning("Request %s is not handed off: %s", send.request.request_id, text)

    def build(
        self,
        meta: OmniConnectorMetadata,
        scheduler_output: "SchedulerOutput",
        block_ids_of: Callable[[str], BlockIds],
    ) -> None:
        """Add this step's copies to `meta`."""
        for request_id in scheduler_output.preempted_req_ids or ():
            send = self._sends.get(request_id)
            if send is not None:
                meta.fence.extend(send.jobs)
                send.fenced.update(send.jobs)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id, send in self._sends.items():
            if send.finished_block_ids is not None:
                continue
            tokens = scheduled.get(request_id)
            if tokens is None or not self._open(send) or not send.todo:
                continue
            computed = send.request.num_computed_tokens + tokens
            ready = self._filled_blocks(send, computed)
            if ready and (job := self._job(send, ready, block_ids_of(request_id))):
                meta.saves.append(job)
        for send in self._finishing:
            if send.todo and send.finished_block_ids is not None:
                if job := self._job(send, send.todo, send.finished_block_ids):
                    meta.saves.append(job)
                self._settle(send)
            meta.finish_after.append((send.request.request_id, list(send.jobs)))
            if send.abandoned:
                meta.fence.extend(send.jobs)
        self._finishing.clear()

    def _filled_blocks(self, send: _Send, computed: int) -> list[Block]:
        total = send.prompt.num_tokens
        if computed >= total:
            return list(send.todo)
        # A recurrent state is that of the last token, so it is not ready before.
        return [
            (g, i)
            for g, i in send.todo
            if self._groups[g].keeps != "last" and (i + 1) * self._groups[g].block_size <= computed
        ]

    def _job(self, send: _Send, blocks: Iterable[Block], block_ids: BlockIds) -> SaveJob | None:
        handoff = send.handoff
        assert handoff is not None
        chosen = sorted(blocks)
        if not self._all_there(chosen, block_ids):
            self._refuse(send, "not_computed", "vLLM has freed blocks that the next token reads")
            self._abandon(send)
            return None
        if not self._directory.copying(handoff, chosen):  # given up by its peer, or expired
            self._abandon(send)
            return None
        send.todo.difference_update(chosen)
        job_id = next(self._job_ids)
        send.jobs[job_id] = chosen
        self._jobs[job_id] = (send.request.request_id, self._ranks, None)
        runs = []
        for g, members in itertools.groupby(chosen, key=lambda block: block[0]):
            indices = [i for _, i in members]
            ids = block_ids[self._group_ids[g]]
            runs.append(
                CopyRun(
                    group=g,
                    block_ids=[ids[i] for i in indices],
                    slots=[handoff.slot((g, i)) for i in indices],
                    generations=[handoff.generation((g, i)) for i in indices],
                    keys=[_key_bytes(send.keys[g][i - send.firsts[g]]) for i in indices],
                )
            )
        return SaveJob(job_id, runs)

    def _all_there(self, blocks: Iterable[Block], block_ids: BlockIds) -> bool:
        tables = [block_ids[group_id] for group_id in self._group_ids]
        return all(i < len(tables[g]) and tables[g][i] != NULL_BLOCK_ID for g, i in blocks)

    def jobs_done(self, done: Mapping[int, int], failed: Mapping[int, str]) -> None:
        """The workers' reports: how many ranks ended each job, and which failed."""
        completed = False
        for job_id, ranks in done.items():
            entry = self._jobs.get(job_id)
            if entry is None:
                continue
            request_id, left, failure = entry
            left, failure = left - ranks, failure or failed.get(job_id)
            if left > 0:
                self._jobs[job_id] = (request_id, left, failure)
                continue
            del self._jobs[job_id]
            self._job_ended(self._sends[request_id], job_id, failure)
            completed = True
        if completed:
            self._on_complete()

    def _job_ended(self, send: _Send, job_id: int, failure: str | None) -> None:
        handoff = send.handoff
        assert handoff is not None
        blocks = send.jobs.pop(job_id)
        send.fenced.discard(job_id)
        if failure is None:
            self._directory.filled(handoff, blocks)
        else:
            self._directory.unfilled(handoff, blocks)
            if failure != "cancelled":
                self._refuse(send, failure, f"copying its blocks failed: {failure}")
                self._abandon(send)
            elif not send.abandoned:
                send.todo.update(blocks)  # preempted: copied again when it is computed again
                if send.finished_block_ids is not None and send not in self._finishing:
                    self._finishing.append(send)  # it has been, before this was known
        self._settle(send)

    def _settle(self, send: _Send) -> None:
        """After its end: let the peer have it once nothing stands back, and forget it when all
        is copied."""
        if send.finished_block_ids is None:
            return
        handoff = send.handoff
        if handoff is not None and not (send.fenced or handoff.sealed or send.abandoned):
            self._directory.seal(handoff)
            self._on_complete()
        if not send.jobs and not send.todo:
            self._sends.pop(send.request.request_id, None)

    def still_sending(self) -> set[str]:
        """Ended requests whose blocks must stay although the copies started so far are over."""
        return {send.request.request_id for send in self._finishing if send.todo}

    def _abandon(self, send: _Send) -> None:
        send.abandoned = True
        send.todo.clear()
        if send.handoff is not None:
            self._directory.close(send.handoff.token)

    def finish(self, request: "Request", block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; (whether its blocks must stay, the answer for the router)."""
        send = self._sends.get(request.request_id)
        if send is None:
            return False, None
        send.finished_block_ids = block_ids
        handoff = send.handoff
        well = request.status in _FINISHED_WELL
        answer: dict[str, Any] | None = None
        missing = send.todo.union(*(send.jobs[job_id] for job_id in send.fenced))
        computed = self._all_there(missing, block_ids)
        if handoff is None or not well or not computed or send.abandoned:
            self._abandon(send)
            if well:
                answer = no_handoff_answer(send.refusal or "not_computed")
        else:
            self._stats.count("handoffs_offered")
            answer = handoff_answer(
                engine_id=self._engine_id,
                request_id=request.request_id,
                epoch=self._epoch,
                token=handoff.token,
                num_tokens=handoff.prompt.num_tokens,
                tp_size=self._ranks,
                address=self._address,
            )
        must_stay = bool(send.jobs or send.todo)
        if must_stay:
            self._finishing.append(send)
        self._settle(send)
        return must_stay, answer


def _keys(group: int, shape: GroupShape, prompt: Prompt) -> list[SlotKey | None]:
    """Keys of the blocks that the next token reads; those that can have one."""
    needed = shape.needed(prompt.num_tokens)
    if shape.keeps == "last" or prompt.hash_block_size != shape.block_size:
        return [None] * len(needed)
    full = min(prompt.num_tokens // shape.block_size, len(prompt.block_hashes))
    return [(group, bytes(prompt.block_hashes[i])) if i < full else None for i in needed]


def _key_bytes(key: SlotKey | None) -> bytes:
    return b"" if key is None else key[1][:32]
