# SPDX-License-Identifier: Apache-2.0
"""Filling this rank's KV blocks with the slots of a peer's ranks."""

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.copy.jobs import LoadSpec, batch_blocks
from omni_connector.copy.threads import Outcome, Work
from omni_connector.errors import (
    ChecksumError,
    OmniError,
    PeerUnreachableError,
    SlotPendingError,
    StaleSlotError,
)
from omni_connector.kv.canonical import SlotLayout
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.convert import SlotConverter
from omni_connector.kv.heads import HeadSlice, head_sources
from omni_connector.kv.shapes import GroupShape, converter, same_bytes
from omni_connector.kv.spans import NULL_BLOCK_ID
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.stats import LEASE_EXPIRED, failure_kind
from omni_connector.transports import Endpoint, RemoteArena
from omni_connector.transports.choice import Transports
from omni_connector.transports.peer_arenas import OpenArenas, OwnArena, PeerArenas
from omni_connector.transports.reading import (
    PENDING_S,
    FetchAhead,
    FetchedSlots,
    MappedSlots,
    PeerThreads,
    Slots,
)

logger = logging.getLogger("vllm.omni_connector.worker")

_MAX_PLANS: Final = 64

_NOT_THERE: Final = "what an index lists is there, or was"

Blocks = NDArray[np.int64]

_Remotes = dict[tuple[Endpoint, ...], RemoteArena]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the slots of one group of a peer become ours.

    Attributes:
        block_size: tokens of one of the peer's blocks.
        length: bytes of each of its slots.
        sources: ranks of the peer that are read, and which heads of each.
        converter: None where the slots hold the bytes of our blocks.
    """

    block_size: int
    length: int
    sources: tuple[tuple[int, tuple[HeadSlice, ...]], ...]
    converter: SlotConverter | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Blocks of one group that are filled at once, and the slots that they are filled with.

    Attributes:
        group, plan: which group, and how its blocks are filled.
        block_size: tokens of one of our blocks.
        block_ids, indices: the blocks, and their logical indices `(n,)`.
        numbers: logical indices of the slots, in blocks of the peer `(m,)`.
        slots, generations: the peer's `(m,)`.
        keys: as in `LoadSpec`.
    """

    group: int
    plan: _Plan
    block_size: int
    block_ids: Blocks
    indices: Blocks
    numbers: Blocks
    slots: Blocks
    generations: Blocks
    keys: NDArray[np.object_] | None

    def parts(self, sizes: Sequence[int]) -> Iterator["_Step"]:
        """The same in steps of so many blocks, by group."""
        ours, theirs, size = self.block_size, self.plan.block_size, sizes[self.group]
        for at in range(0, len(self.block_ids), size):
            indices = self.indices[at : at + size]
            tokens = int(indices[0]) * ours, int(indices[-1] + 1) * ours
            first, end = np.searchsorted(
                self.numbers, (tokens[0] // theirs, -(-tokens[1] // theirs))
            ).tolist()
            yield replace(
                self,
                block_ids=self.block_ids[at : at + size],
                indices=indices,
                numbers=self.numbers[first:end],
                slots=self.slots[first:end],
                generations=self.generations[first:end],
                keys=None if self.keys is None else self.keys[first:end],
            )


class _LeaseEndedError(OmniError):
    """The peer may use the slots of a hand-off for others: nothing more is read of them."""


class Loader:
    """Makes the work of load jobs, and keeps the arenas that they read.

    Args:
        transports: read the peers' arenas.
        copier, layout: of this rank's KV caches.
        groups: what this engine keeps.
        rank, ranks: of this worker, and how many its engine has.
        checksum: whether slots carry checksums.
        context: clock, trace, and how the threads start that fetch.
        notify: has the works that wait go on; called on any thread.
        queued: seconds in which the work that asks could have gone on, but others did.
        threads: that share one copy.
        own: the arena of this rank and its endpoints; None where it has none.
    """

    def __init__(
        self,
        *,
        transports: Transports,
        copier: BlockCopier,
        layout: SlotLayout,
        groups: tuple[GroupShape, ...],
        rank: int,
        ranks: int,
        checksum: bool,
        context: EngineContext,
        notify: Callable[[], object],
        queued: Callable[[], float] = lambda: 0.0,
        threads: int = 1,
        own: tuple[Arena, tuple[Endpoint, ...]] | None = None,
    ) -> None:
        self._clock = context.clock
        self._queued = queued
        sizes = batch_blocks(layout)
        # Of fetched and of mapped slots: those have a part for each thread.
        self._batches = sizes, [-(-size // threads) * threads for size in sizes]
        self._threads = PeerThreads(context.start, notify)
        self._arenas = PeerArenas(
            transports,
            self._threads,
            context,
            own=None if own is None else {own[1]: OwnArena(own[1][0], own[0])},
        )
        self._copier = copier
        self._layout = layout
        self._groups = groups
        self._rank = rank
        self._ranks = ranks
        self._checksum = checksum
        self._plans: dict[tuple[CompatibilityKey | None, int], _Plan] = {}

    def work(self, job_id: int, job: LoadSpec, fence: object) -> Work:
        """The body of a job; see `Work`. Blocks that it could not fill are zero when it ends."""
        lease_ends = math.inf if job.lease is None else self._clock() + job.lease
        deadline = lease_ends
        outcome = Outcome(job_id)
        waiting: deque[_Step] = deque()
        # What is not leased can be computed as well: it waits for no peer.
        arenas = self._arenas.open(waits=job.keys is None)
        remotes: _Remotes = {}
        attach_anew = False
        ahead: FetchAhead[_Step] = FetchAhead(
            self._threads,
            str(job.arenas[:1]),
            lambda step: self._fetched(job, step, remotes, deadline),
            self._clock,
        )

        def work(cancelled: Callable[[], bool]) -> Generator[bool | float, None, Outcome]:
            nonlocal attach_anew, deadline
            give_up_at = self._clock() + job.timeout - self._queued()
            try:
                steps, zeros = self._steps(job)
                waiting.extend(steps)
                for group, block_ids in zeros:
                    self._copier.zero(group, block_ids, fence=fence)
                    yield True
                while waiting:
                    if cancelled():
                        outcome.failure = "cancelled"
                        break
                    if self._clock() >= lease_ends:
                        raise _LeaseEndedError("the lease ended before all was loaded")
                    deadline = min(lease_ends, give_up_at + self._queued())
                    step = waiting[0]
                    if not self._attached(job, arenas, remotes):
                        yield self._left(deadline)
                        continue
                    if steps:
                        sizes = self._batches[arenas.mapped]
                        waiting.clear()
                        waiting.extend(part for each in steps for part in each.parts(sizes))
                        steps.clear()
                        continue
                    try:
                        slots = self._slots(job, step, list(waiting), ahead, arenas, remotes)
                        if isinstance(slots, float):
                            yield min(slots, self._left(deadline))
                            continue
                        try:
                            if step.plan.converter is None:
                                yield from self._copy(step, slots[0], fence)
                            else:
                                yield from self._convert(step, step.plan.converter, slots, fence)
                        finally:
                            for each in slots:
                                each.release()
                    except (StaleSlotError, ChecksumError):
                        if len(step.block_ids) == 1:
                            raise
                        # The blocks before the bad one are good: they are loaded one by one.
                        ahead.close()
                        waiting.popleft()
                        waiting.extendleft(reversed(list(step.parts([1] * len(self._groups)))))
                        continue
                    waiting.popleft()
                    outcome.blocks += len(step.block_ids)
                    outcome.size += len(step.block_ids) * self._layout.group_bytes[step.group]
                    yield True
            except Exception as error:  # whatever it is, the request must not wait for ever
                expired = isinstance(error, _LeaseEndedError)
                outcome.failure = LEASE_EXPIRED if expired else failure_kind(error, "load_failed")
                # A slot that nobody has leased may hold another block by now: the arena is as good.
                of_a_slot = isinstance(error, StaleSlotError | ChecksumError)
                attach_anew = not expired and (job.keys is None or not of_a_slot)
                logger.warning(
                    "Loading KV of request %s from %s failed (%s): %s",
                    job.request_id,
                    ", ".join(arenas.addresses) or "a peer",
                    outcome.failure,
                    error,
                )
                if not isinstance(error, OmniError):
                    logger.exception("This should not happen; please report it")
            finally:
                ahead.close()
                arenas.close(failed=attach_anew)
            if outcome.failure is not None:
                outcome.bad_block_ids = frozenset(
                    block_id for step in waiting for block_id in step.block_ids.tolist()
                )
                self._wipe(waiting, fence)
            return outcome

        return work

    def attach_ahead(self, endpoints: tuple[Endpoint, ...]) -> bool:
        """See `PeerArenas.attach_ahead`. Any thread may call this."""
        return self._arenas.attach_ahead(endpoints)

    def close(self) -> None:
        """Let go of the peers' arenas. No work may be under way."""
        self._threads.close()
        self._arenas.close()

    def _left(self, deadline: float) -> float:
        """For how many seconds a load may wait. What is there is loaded after the deadline too."""
        left = deadline - self._clock()
        if left <= 0:
            raise PeerUnreachableError("the bytes were not there in time")
        return left

    def _steps(self, spec: LoadSpec) -> tuple[list[_Step], list[tuple[int, Blocks]]]:
        """The steps of a job, and group and blocks of what no slot holds a part of."""
        steps: list[_Step] = []
        zeros: list[tuple[int, Blocks]] = []
        spans = zip(self._groups, spec.blocks.groups(), spec.slots.groups(), strict=True)
        for g, (group, (index, blocks), (first, own)) in enumerate(spans):
            plan = self._plan(spec.source, g)
            block_ids = spec.blocks.block_ids[blocks]
            indices = index + np.arange(len(block_ids))
            # A slot of the peer may hold several of our blocks, or a block of ours take several.
            per_slot = max(1, plan.block_size // group.block_size)
            per_block = max(1, group.block_size // plan.block_size)
            begins = indices // per_slot * per_block
            end = first + own.stop - own.start
            there = block_ids != NULL_BLOCK_ID
            filled = there & (begins + per_block > first) & (begins < end) & (end > first)
            if (unread := block_ids[there & ~filled]).size:
                zeros.append((g, unread))
            numbers = np.unique(begins[filled, None] + np.arange(per_block))
            numbers = numbers[(numbers >= first) & (numbers < end)]
            whole = _Step(
                g,
                plan,
                group.block_size,
                block_ids[filled],
                indices[filled],
                numbers,
                spec.slots.block_ids[own][numbers - first],
                spec.generations[own][numbers - first],
                None if spec.keys is None else spec.keys[own][numbers - first],
            )
            if whole.block_ids.size:
                steps.append(whole)
        return steps, zeros

    def _attached(self, job: LoadSpec, arenas: OpenArenas, remotes: _Remotes) -> bool:
        """Whether all arenas that a job reads are there; begins to attach those that are not."""
        wanted = dict.fromkeys(
            endpoints
            for group, size in enumerate(job.slots.group_sizes)
            if size
            for endpoints in _endpoints(job, self._plan(job.source, group))
        )
        for endpoints in wanted:
            if endpoints not in remotes and (found := arenas.get(endpoints)) is not None:
                remotes[endpoints] = found
        return len(remotes) == len(wanted)

    def _slots(
        self,
        job: LoadSpec,
        step: _Step,
        steps: list[_Step],
        ahead: FetchAhead[_Step],
        arenas: OpenArenas,
        remotes: _Remotes,
    ) -> Sequence[Slots] | float:
        """What a step reads, of each rank that it reads; else the seconds after which to look again
        if there is no notification."""
        sources = [remotes[each] for each in _endpoints(job, step.plan)]
        if not arenas.mapped:
            return ahead.take(steps)
        slots, generations = step.slots, step.generations
        try:
            return [MappedSlots(each, slots, generations, step.plan.length) for each in sources]
        except SlotPendingError as pending:
            if step.keys is not None:
                raise StaleSlotError(_NOT_THERE) from pending
            if not all(remote.alive for remote in sources):
                raise PeerUnreachableError("the peer died while copying") from pending
            return PENDING_S

    def _fetched(
        self, job: LoadSpec, step: _Step, remotes: _Remotes, deadline: float
    ) -> list[FetchedSlots]:
        """The same, fetched; on another thread."""
        slots, generations = step.slots, step.generations
        fetched: list[FetchedSlots] = []
        try:
            for each in _endpoints(job, step.plan):
                left = deadline - self._clock()
                fetched.append(
                    FetchedSlots(remotes[each], slots, generations, step.plan.length, timeout=left)
                )
        except BaseException as error:
            for each_fetched in fetched:
                each_fetched.release()
            if isinstance(error, SlotPendingError) and step.keys is not None:
                raise StaleSlotError(_NOT_THERE) from error
            raise
        return fetched

    def _plan(self, source: CompatibilityKey | None, group: int) -> _Plan:
        plan = self._plans.get((source, group))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[source, group] = self._make_plan(source, group)
        return plan

    def _make_plan(self, source: CompatibilityKey | None, group: int) -> _Plan:
        ours = self._groups[group]
        theirs = ours if source is None else source.groups[group]
        if source is None or (source.ranks == self._ranks and same_bytes(theirs, ours)):
            return _Plan(ours.block_size, self._layout.group_bytes[group], ((self._rank, ()),))
        by_rank: dict[int, list[HeadSlice]] = {}
        for layer in range(len(ours.pages)):
            parts = head_sources(
                total=1 if ours.replicated else source.kv_heads or None,
                source_heads=theirs.heads[layer],
                source_ranks=source.ranks,
                target_heads=ours.heads[layer],
                target_rank=self._rank,
                target_ranks=self._ranks,
            )
            for rank, heads in parts:
                by_rank.setdefault(rank, [HeadSlice(0, 0, 0)] * len(ours.pages))[layer] = heads
        converts = converter(theirs, ours)
        sources = tuple((rank, tuple(heads)) for rank, heads in sorted(by_rank.items()))
        return _Plan(theirs.block_size, converts.source_bytes, sources, converts)

    def _copy(self, step: _Step, slots: Slots, fence: object) -> Generator[bool, None, None]:
        checked = self._checksum or not slots.in_place
        checksums = self._copier.load(
            BlockCopy(step.group, step.block_ids, slots.rows, slots.index, checked, fence)
        )
        yield True
        self._compare(step, checksums.tolist(), slots)

    def _convert(
        self, step: _Step, converter: SlotConverter, sources: Sequence[Slots], fence: object
    ) -> Generator[bool, None, None]:
        ours, theirs = step.block_size, step.plan.block_size
        made = np.zeros((len(step.block_ids), self._layout.slot_bytes), np.uint8)
        for (_, heads), slots in zip(step.plan.sources, sources, strict=True):
            checksums = []
            for number, row_index in zip(step.numbers.tolist(), slots.index.tolist(), strict=True):
                content: NDArray[np.uint8] = slots.rows[row_index, : step.plan.length]
                first, end = np.searchsorted(
                    step.indices, (number * theirs // ours, -(-(number + 1) * theirs // ours))
                )
                for at in range(first, end):
                    index = int(step.indices[at])
                    # Whole blocks, as between like engines: where keys are kept in tiles, the last
                    # token cannot be cut off.
                    converter.copy(
                        content, number, made[at], index, heads, end_token=(index + 1) * ours
                    )
                checked = self._checksum or not slots.in_place
                checksums.append(xxhash.xxh3_64_intdigest(content.data) if checked else 0)
            yield True
            self._compare(step, checksums, slots)
        rows = np.arange(len(made), dtype=np.int64)
        self._copier.load(BlockCopy(step.group, step.block_ids, made, rows, False, fence))

    def _compare(self, step: _Step, checksums: list[int], slots: Slots) -> None:
        headers = slots.headers()
        for slot, checksum, header in zip(step.slots, checksums, headers, strict=True):
            published = header.checksum
            if checksum != published and (self._checksum or not slots.in_place):
                raise ChecksumError(
                    f"slot {slot}: checksum {checksum:#x}, published {published:#x}"
                )
        if step.keys is not None and [header.key for header in headers] != step.keys.tolist():
            raise StaleSlotError("a slot holds another block than the index says")

    def _wipe(self, steps: deque[_Step], fence: object) -> None:
        try:
            for step in steps:
                self._copier.zero(step.group, step.block_ids, fence=fence)
        except Exception:  # the request is reported as failed in any case, and must be
            logger.exception("Blocks of a failed load could not be zeroed")


def _endpoints(job: LoadSpec, plan: _Plan) -> list[tuple[Endpoint, ...]]:
    """Where the ranks are that a plan reads."""
    return [job.arenas[rank] for rank, _ in plan.sources]
