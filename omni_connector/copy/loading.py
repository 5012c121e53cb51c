# SPDX-License-Identifier: Apache-2.0
"""Loads: this rank's KV blocks are filled with the slots of a peer's ranks, within a deadline."""

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.arena.pinning import Pins
from omni_connector.copy.arena_copies import ArenaCopies
from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.copy.jobs import LoadSpec, batch_blocks
from omni_connector.copy.load_plans import LoadPlans, LoadStep, SlotPart
from omni_connector.copy.threads import Outcome, Work
from omni_connector.errors import (
    ChecksumError,
    OmniError,
    PeerUnreachableError,
    SlotPendingError,
    StaleSlotError,
)
from omni_connector.kv.canonical import SlotLayout
from omni_connector.kv.shapes import GroupShape
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.stats import LEASE_EXPIRED, failure_kind
from omni_connector.transports import Endpoint, RemoteArena
from omni_connector.transports.choice import Transports
from omni_connector.transports.peer_arenas import OwnArena, PeerArenas
from omni_connector.transports.reading import (
    PENDING_S,
    FetchAhead,
    FetchedSlots,
    MappedSlots,
    PeerThreads,
    Slots,
)

logger = logging.getLogger("vllm.omni_connector.worker")

_NOT_COMMITTED: Final = "an index lists a slot that is not committed"


class _LeaseEndedError(OmniError):
    """The peer may use the slots of a hand-off for others: nothing more is read of them."""


class _CancelledError(Exception):
    """Nobody wants the load any more."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """What all loads of this rank share; see `Loader`.

    Attributes:
        batches: blocks of a step, by group: of fetched slots, and of mapped ones, which have a part
            for each thread.
        threads: fetch what is not mapped.
    """

    copier: BlockCopier
    layout: SlotLayout
    checksum: bool
    clock: Callable[[], float]
    queued: Callable[[], float]
    plans: LoadPlans
    batches: tuple[list[int], list[int]]
    threads: PeerThreads
    arenas: PeerArenas


class Loader:
    """Makes the work of load jobs, and keeps the arenas that they read.

    Args:
        transports: read the peers' arenas.
        copier, layout: of this rank's KV caches; the copier is closed after this.
        groups: what this engine keeps.
        rank, ranks: of this worker, counted stage by stage, and how many a pipeline stage has.
        stripes: ranks over which the slots of this pipeline stage are spread.
        shards: into how many a block is divided, in the groups of which blocks are.
        checksum: whether slots carry checksums.
        context: clock, trace, and how the threads start that fetch.
        notify: has the works that wait go on; called on any thread.
        queued: seconds in which the work that asks could have gone on, but others did.
        threads: that share one copy.
        own: the arena of this rank and its endpoints; None where it has none.
        pins: has the device read mapped arenas itself; used until `close`.

    Attributes:
        arenas: those of peers.
        copies: copies slots of peers' arenas to the own one; None where it has none.
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
        stripes: int = 1,
        shards: int = 1,
        checksum: bool,
        context: EngineContext,
        notify: Callable[[], object],
        queued: Callable[[], float] = lambda: 0.0,
        threads: int = 1,
        own: tuple[Arena, tuple[Endpoint, ...]] | None = None,
        pins: Pins | None = None,
    ) -> None:
        self._threads = PeerThreads(context.start, notify)
        self.arenas: Final = PeerArenas(
            transports,
            self._threads,
            context,
            own=None if own is None else {own[1]: OwnArena(own[1][0], own[0])},
            pins=pins,
        )
        self.copies: ArenaCopies | None = None
        if own is not None:
            self.copies = ArenaCopies(own[0], self.arenas, self._threads, checksum=checksum)
        mapped = batch_blocks(layout, copier.speed)
        self._rank = _Rank(
            copier=copier,
            layout=layout,
            checksum=checksum,
            clock=context.clock,
            queued=queued,
            plans=LoadPlans(layout, groups, rank, ranks, stripes, shards),
            batches=(batch_blocks(layout), [-(-size // threads) * threads for size in mapped]),
            threads=self._threads,
            arenas=self.arenas,
        )

    def work(self, job_id: int, spec: LoadSpec, fence: object) -> Work:
        """The body of a job; see `Work`. Blocks that it could not fill are zero when it ends."""
        return _Load(self._rank, job_id, spec, fence).work

    def close(self) -> None:
        """Let go of the peers' arenas. No work may be under way."""
        self._threads.close()
        self.arenas.close()


class _Sources:
    """The arenas that one load reads, and their slots.

    Attributes:
        arenas: the arenas that the load has asked for.
        deadline: until when the load waits; by the clock.
    """

    def __init__(self, rank: _Rank, spec: LoadSpec, deadline: float) -> None:
        self._rank = rank
        self._spec = spec
        self.deadline = deadline
        # Blocks without a lease can be computed as well: their load waits for no peer.
        self.arenas = rank.arenas.open(waits=spec.own or spec.keys is None)
        self._remotes: dict[tuple[Endpoint, ...], RemoteArena] = {}

    def seconds_left(self) -> float:
        """Seconds for which the load may wait. It still loads what it need not wait for."""
        left = self.deadline - self._rank.clock()
        if left <= 0:
            raise PeerUnreachableError("the peer's bytes did not come in time")
        return left

    def attached(self) -> bool:
        """Whether all arenas are attached; begins to attach the missing ones."""
        wanted = self._rank.plans.arenas(self._spec)
        for endpoints in wanted:
            if endpoints not in self._remotes:
                found = self.arenas.get(endpoints)
                if found is not None:
                    self._remotes[endpoints] = found
        return len(self._remotes) == len(wanted)

    def mapped(self, step: LoadStep) -> list[MappedSlots] | float:
        """The slots of each part of a step in place (see `LoadStep.by_arena`); else the seconds
        after which to look again."""
        parts = step.by_arena()
        try:
            return [
                MappedSlots(self._remote(part), part.rows, part.generations, part.source.length)
                for part in parts
            ]
        except SlotPendingError as pending:
            if step.keys is not None:
                raise StaleSlotError(_NOT_COMMITTED) from pending
            if not all(self._remote(part).alive for part in parts):
                raise PeerUnreachableError("the peer died while copying") from pending
            return PENDING_S

    def fetched(self, step: LoadStep) -> list[FetchedSlots]:
        """The same, fetched. Runs on another thread."""
        fetched: list[FetchedSlots] = []
        try:
            for part in step.by_arena():
                left = self.deadline - self._rank.clock()
                fetched.append(
                    FetchedSlots(
                        self._remote(part),
                        part.rows,
                        part.generations,
                        part.source.length,
                        timeout=left,
                    )
                )
        except BaseException as error:
            for each_fetched in fetched:
                each_fetched.release()
            if isinstance(error, SlotPendingError) and step.keys is not None:
                raise StaleSlotError(_NOT_COMMITTED) from error
            raise
        return fetched

    def _remote(self, part: SlotPart) -> RemoteArena:
        return self._remotes[self._spec.arenas[part.arena]]


class _Load:
    """One load, from its arrival on.

    Args:
        rank: that loads.
        job_id, spec: of its job.
        fence: the copier's, behind which blocks may be written.
    """

    def __init__(self, rank: _Rank, job_id: int, spec: LoadSpec, fence: object) -> None:
        self._rank = rank
        self._spec = spec
        self._fence = fence
        self._outcome = Outcome(job_id)
        self._steps: deque[LoadStep] = deque()  # not done yet
        self._lease_ends = math.inf if spec.lease is None else spec.lease.on(rank.clock)
        self._give_up_at = math.inf
        self._sources = _Sources(rank, spec, self._lease_ends)
        self._attach_anew = False
        self._ahead: FetchAhead[LoadStep] = FetchAhead(
            rank.threads, str(spec.arenas[:1]), self._sources.fetched, rank.clock
        )

    def work(self, cancelled: Callable[[], bool]) -> Generator[bool | float, None, Outcome]:
        """Fill the blocks; see `Work`."""
        rank = self._rank
        self._give_up_at = rank.clock() + self._spec.timeout - rank.queued()
        try:
            yield from self._fill(cancelled)
        except _CancelledError:
            self._outcome.failure = "cancelled"
        except Exception as error:  # noqa: BLE001 - the request must not wait for ever
            self._failed(error)
        finally:
            self._ahead.close()
            self._sources.arenas.close(failed=self._attach_anew)
        if self._outcome.failure is not None:
            self._wipe()
        return self._outcome

    def _fill(self, cancelled: Callable[[], bool]) -> Generator[bool | float, None, None]:
        """Fill all blocks, batch by batch."""
        rank = self._rank
        steps, unread = rank.plans.steps(self._spec)
        self._steps.extend(steps)
        for group, block_ids in unread:
            rank.copier.zero(group, block_ids, fence=self._fence)
            yield True
        if not steps:
            return
        self._check(cancelled)
        while not self._sources.attached():
            yield self._sources.seconds_left()
            self._check(cancelled)
        mapped = self._sources.arenas.mapped
        sizes = rank.batches[mapped]
        self._steps = deque(
            part
            for step in steps
            # What is copied at once lies in one arena.
            for part in step.parts([(step.plan.stripes if mapped else 1) * n for n in sizes])
        )
        while self._steps:
            self._check(cancelled)
            step = self._steps[0]
            try:
                yield from self._fill_step(step)
            except (StaleSlotError, ChecksumError):
                if len(step.block_ids) == 1:
                    raise
                # The blocks before the bad one are good: they are loaded one by one.
                self._ahead.close()
                self._steps.popleft()
                self._steps.extendleft(reversed(list(step.parts([1] * len(sizes)))))

    def _check(self, cancelled: Callable[[], bool]) -> None:
        """Set until when the load waits; raises where it is to end."""
        if cancelled():
            raise _CancelledError
        if self._rank.clock() >= self._lease_ends:
            raise _LeaseEndedError("the lease ended before all was loaded")
        give_up_at = self._give_up_at + self._rank.queued()
        self._sources.deadline = min(self._lease_ends, give_up_at)

    def _fill_step(self, step: LoadStep) -> Generator[bool | float, None, None]:
        """Fill the blocks of the first step, or wait for its slots."""
        slots: Sequence[Slots] | float
        if self._sources.arenas.mapped:
            slots = self._sources.mapped(step)
        else:
            slots = self._ahead.take(list(self._steps))
        if isinstance(slots, float):
            yield min(slots, self._sources.seconds_left())
            return
        try:
            if step.plan.sources[0].converter is None:
                yield from self._copy(step, slots)
            elif not step.plan.copies_pages or not (yield from self._copy_pages(step, slots)):
                yield from self._convert(step, slots)
        finally:
            for each in slots:
                each.release()
        self._steps.popleft()
        self._outcome.blocks += len(step.block_ids)
        self._outcome.size += len(step.block_ids) * self._rank.layout.group_bytes[step.group]
        yield True

    def _copy(self, step: LoadStep, found: Sequence[Slots]) -> Generator[bool, None, None]:
        for part, slots in zip(step.by_arena(), found, strict=True):
            block_ids = step.block_ids[part.at]  # each block has one slot
            checked = self._checks(slots)
            checksums = self._rank.copier.load(
                BlockCopy(step.group, block_ids, slots.rows, slots.index, checked, self._fence)
            )
            yield True
            self._compare(part, checksums, slots)

    def _copy_pages(self, step: LoadStep, found: Sequence[Slots]) -> Generator[bool, None, bool]:
        """Fill blocks with whole pages of slots that hold other layers, if the copier can. Pages
        that no slot has, a drafter's, are zeroed."""
        copier = self._rank.copier
        if step.plan.page_bytes < self._rank.layout.group_bytes[step.group]:
            copier.zero(step.group, step.block_ids, fence=self._fence)
        for part, slots in zip(step.by_arena(), found, strict=True):
            checked = self._checks(slots)
            block_ids = step.block_ids[part.at]  # each block has one slot of each source
            copy = BlockCopy(step.group, block_ids, slots.rows, slots.index, checked, self._fence)
            checksums = copier.load_pages(copy, part.source.runs, part.source.length)
            if checksums is None:
                return False
            yield True
            self._compare(part, checksums, slots)
        return True

    def _convert(self, step: LoadStep, found: Sequence[Slots]) -> Generator[bool, None, None]:
        ours, theirs = step.block_size, step.plan.block_size
        made = np.zeros((len(step.block_ids), self._rank.layout.slot_bytes), np.uint8)
        for part, slots in zip(step.by_arena(), found, strict=True):
            source = part.source
            sums: list[int] = []
            assert source.converter is not None
            checked = self._checks(slots)
            numbers = step.numbers[part.at].tolist()
            for number, row_index in zip(numbers, slots.index.tolist(), strict=True):
                content: NDArray[np.uint8] = slots.rows[row_index, : source.length]
                first, end = np.searchsorted(
                    step.indices, (number * theirs // ours, -(-(number + 1) * theirs // ours))
                )
                for at in range(first, end):
                    index = int(step.indices[at])
                    # Whole blocks, as between like engines: where keys are kept in tiles, the last
                    # token cannot be cut off.
                    source.converter.copy(
                        content, number, made[at], index, source.heads, end_token=(index + 1) * ours
                    )
                sums.append(xxhash.xxh3_64_intdigest(content.data) if checked else 0)
            yield True
            self._compare(part, np.array(sums, np.uint64), slots)
        rows = np.arange(len(made), dtype=np.int64)
        self._rank.copier.load(
            BlockCopy(step.group, step.block_ids, made, rows, False, self._fence)
        )

    def _checks(self, slots: Slots) -> bool:
        """Whether checksums are compared. Of what travelled they are, in any case."""
        return self._rank.checksum or not slots.in_place

    def _compare(self, part: SlotPart, checksums: NDArray[np.uint64], slots: Slots) -> None:
        """Raise unless the slots are as they were, with these checksums if these are compared, and
        hold the blocks that are wanted."""
        headers = slots.headers()
        if self._checks(slots):
            for at in np.flatnonzero(checksums != headers.checksums)[:1].tolist():
                raise ChecksumError(
                    f"slot {part.slots[at]}: checksum {checksums[at]:#x}, published "
                    f"{headers.checksums[at]:#x}"
                )
        if part.keys is not None and headers.keys != part.keys.tolist():
            raise StaleSlotError("a slot holds another block than the index says")

    def _failed(self, error: Exception) -> None:
        expired = isinstance(error, _LeaseEndedError)
        self._outcome.failure = LEASE_EXPIRED if expired else failure_kind(error, "load_failed")
        # A slot that nobody has leased may hold another block by now: the arena is as good.
        of_a_slot = isinstance(error, StaleSlotError | ChecksumError)
        self._attach_anew = not expired and (self._spec.keys is None or not of_a_slot)
        logger.warning(
            "Loading KV of request %s from %s failed (%s): %s",
            self._spec.request_id,
            ", ".join(self._sources.arenas.addresses) or "a peer",
            self._outcome.failure,
            error,
        )
        if not isinstance(error, OmniError):
            logger.exception("This should not happen; please report it")

    def _wipe(self) -> None:
        """Zero the blocks that were not filled."""
        self._outcome.bad_block_ids = frozenset(
            block_id for step in self._steps for block_id in step.block_ids.tolist()
        )
        try:
            for step in self._steps:
                self._rank.copier.zero(step.group, step.block_ids, fence=self._fence)
        except Exception:  # the request is reported as failed in any case, and must be
            logger.exception(
                "Request %s: the blocks of its failed load could not be zeroed",
                self._spec.request_id,
            )
