# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of a prefill engine: which blocks go to which slots, and when.

A request that asks for a hand-off takes all its slots before it is first scheduled; while the
arena has no room it waits in vLLM's queue. Blocks are copied as they fill, the last one with
the step that ends the prompt. Whatever happens to the request then, a copy that was decided is of
blocks that stay as they are (see `CopyLedger`), and is not made again.
"""

import itertools
from collections.abc import Callable, Iterable
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
from omni_connector.vllm_v1.ledger import CANCELLED, CopyLedger
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
    jobs: set[int] = field(default_factory=set)


class HandoffSender:
    """Hands finished prefills off.

    Args:
        directory: where slots come from.
        ledger: the copy jobs.
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
        ledger: CopyLedger,
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
        self._ledger = ledger
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
        if not self._sends:
            return
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            send = self._sends.get(request_id)
            if send is None or not self._open(send) or not send.todo:
                continue
            ready = self._filled_blocks(send, send.request.num_computed_tokens + tokens)
            if ready and (job := self._job(send, ready, block_ids_of(request_id))):
                meta.saves.append(job)

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
        tables = [block_ids[group_id] for group_id in self._group_ids]
        if any(i >= len(tables[g]) or tables[g][i] == NULL_BLOCK_ID for g, i in chosen):
            self._refuse(send, "not_computed", "vLLM has freed blocks that the next token reads")
            self._abandon(send)
            return None
        if not self._directory.copying(handoff, chosen):  # given up by its peer, or expired
            self._abandon(send)
            return None
        send.todo.difference_update(chosen)
        job_id = self._ledger.start(
            (tables[g][i] for g, i in chosen),
            lambda failure: self._job_ended(send, job_id, chosen, failure),
        )
        send.jobs.add(job_id)
        runs = []
        for g, members in itertools.groupby(chosen, key=lambda block: block[0]):
            indices = [i for _, i in members]
            runs.append(
                CopyRun(
                    group=g,
                    block_ids=[tables[g][i] for i in indices],
                    slots=[handoff.slot((g, i)) for i in indices],
                    generations=[handoff.generation((g, i)) for i in indices],
                    keys=[_key_bytes(send.keys[g][i - send.firsts[g]]) for i in indices],
                )
            )
        return SaveJob(job_id, runs)

    def _job_ended(
        self, send: _Send, job_id: int, blocks: list[Block], failure: str | None
    ) -> None:
        handoff = send.handoff
        assert handoff is not None
        send.jobs.discard(job_id)
        if failure is None:
            self._directory.filled(handoff, blocks)
        else:
            self._directory.unfilled(handoff, blocks)
            if failure != CANCELLED:
                self._refuse(send, failure, f"copying its blocks failed: {failure}")
            self._abandon(send)
        self._on_complete()

    def _abandon(self, send: _Send) -> str:
        send.refusal = send.refusal or "not_computed"
        send.todo.clear()
        if send.handoff is not None:
            self._directory.close(send.handoff.token)
        self._ledger.revoke(send.jobs)
        return send.refusal

    def finish(self, request: "Request", block_ids: BlockIds) -> dict[str, Any] | None:
        """The request is over; the answer for the router."""
        send = self._sends.pop(request.request_id, None)
        if send is None:
            return None
        handoff = send.handoff
        well = request.status in _FINISHED_WELL
        if handoff is None or not well or send.todo or send.refusal is not None:
            refusal = self._abandon(send)
            return no_handoff_answer(refusal) if well else None
        self._stats.count("handoffs_offered")
        self._directory.seal(handoff)
        self._on_complete()
        return handoff_answer(
            engine_id=self._engine_id,
            request_id=request.request_id,
            epoch=self._epoch,
            token=handoff.token,
            num_tokens=handoff.prompt.num_tokens,
            block_ids=[list(block_ids[g]) for g in self._group_ids],
            tp_size=self._ranks,
            address=self._address,
        )


def _keys(group: int, shape: GroupShape, prompt: Prompt) -> list[SlotKey | None]:
    """Keys of the blocks that the next token reads; those that can have one."""
    needed = shape.needed(prompt.num_tokens)
    if shape.keeps == "last" or prompt.hash_block_size != shape.block_size:
        return [None] * len(needed)
    full = min(prompt.num_tokens // shape.block_size, len(prompt.block_hashes))
    return [(group, bytes(prompt.block_hashes[i])) if i < full else None for i in needed]


def _key_bytes(key: SlotKey | None) -> bytes:
    return b"" if key is None else key[1][:32]
