# SPDX-License-Identifier: Apache-2.0
"""Filling this rank's KV blocks with the slots of a peer's ranks."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.errors import (
    ChecksumError,
    OmniError,
    PeerRefusedError,
    PeerUnreachableError,
    SlotPendingError,
    StaleSlotError,
)
from omni_connector.handoff.jobs import Conversion, CopyRun, LoadJob
from omni_connector.kv import BlockCopier, HeadSlice, SlotConverter, SlotLayout, head_sources
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.copy_threads import Outcome, Work
from omni_connector.kv.shapes import GroupShape, converter
from omni_connector.transports import Endpoint, RemoteArena
from omni_connector.transports.choice import Transports
from omni_connector.transports.peer_arenas import OpenArenas, PeerArenas
from omni_connector.transports.reading import (
    FetchAhead,
    FetchedSlots,
    MappedSlots,
    PeerThreads,
    Slots,
)
from omni_connector.turns import StartTurns

logger = logging.getLogger("vllm.omni_connector.worker")

BATCH_BYTES: Final = 8 << 20
"""Bytes of blocks that are copied, published and read in one go."""

_MAX_PLANS: Final = 64

Step = CopyRun | Conversion

_Remotes = dict[tuple[Endpoint, ...], RemoteArena]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the slots of one group of a peer become ours: from which ranks, which heads."""

    converter: SlotConverter
    block_size: int
    sources: tuple[tuple[int, tuple[HeadSlice, ...]], ...]


class Loader:
    """Makes the work of load jobs, and keeps the arenas that they read.

    Args:
        transports: read the peers' arenas.
        copier, layout: of this rank's KV caches.
        groups: what this engine keeps.
        rank, ranks: of this worker, and how many its engine has.
        checksum: whether slots carry checksums.
        clock: seconds, monotonic.
        start: starts the threads that fetch.
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
        clock: Callable[[], float],
        start: StartTurns,
    ) -> None:
        self._clock = clock
        self._threads = PeerThreads(start)
        self._arenas = PeerArenas(transports, self._threads, clock, start=start)
        self._copier = copier
        self._layout = layout
        self._groups = groups
        self._rank = rank
        self._ranks = ranks
        self._checksum = checksum
        self._plans: dict[tuple[CompatibilityKey, int], _Plan] = {}

    def work(self, job: LoadJob, fence: object) -> Work:
        """The body of a job; see `Work`. Blocks that it could not fill are zero when it ends."""
        deadline = self._clock() + job.timeout
        outcome = Outcome(job.job_id)
        waiting: deque[Step] = deque()
        zeros = deque(job.zeros)
        arenas = self._arenas.open()
        remotes: _Remotes = {}
        ahead: FetchAhead[Step] = FetchAhead(
            self._threads,
            str(job.arenas[:1]),
            lambda step: self._fetched(job, step, remotes, deadline),
            self._clock,
        )

        def work(cancelled: Callable[[], bool]) -> Generator[bool, None, Outcome]:
            try:
                waiting.extend(self._steps(job))
                while zeros:
                    self._zero(*zeros.popleft(), fence)
                    yield True
                while waiting:
                    if cancelled():
                        outcome.failure = "cancelled"
                        break
                    if self._clock() >= deadline:
                        raise PeerUnreachableError("the bytes were not there in time")
                    step = waiting[0]
                    if not self._attached(job, arenas, remotes):
                        yield False
                        continue
                    try:
                        slots = self._slots(job, step, list(waiting), ahead, arenas, remotes)
                        if slots is None:
                            yield False
                            continue
                        try:
                            if isinstance(step, CopyRun):
                                yield from self._copy(step, slots[0], fence)
                            else:
                                yield from self._convert(step, job, slots, fence)
                        finally:
                            for each in slots:
                                each.release()
                    except (StaleSlotError, ChecksumError):
                        if len(step.block_ids) == 1:
                            raise
                        # The blocks before the bad one are good: they are loaded one by one.
                        ahead.close()
                        waiting.popleft()
                        waiting.extendleft(reversed(list(self._parts(job, step, 1))))
                        continue
                    waiting.popleft()
                    outcome.blocks += len(step.block_ids)
                    outcome.size += len(step.block_ids) * self._layout.group_bytes[step.group]
                    yield True
            except Exception as error:  # whatever it is, the request must not wait for ever
                outcome.failure = failure_kind(error, "load_failed")
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
                arenas.close(failed=outcome.failure not in (None, "cancelled"))
            if outcome.failure is not None:
                outcome.bad_block_ids = frozenset(
                    block_id for step in waiting for block_id in step.block_ids
                )
                self._wipe(waiting, fence)
            return outcome

        return work

    def close(self) -> None:
        """Let go of the peers' arenas. No work may be under way."""
        self._threads.close()
        self._arenas.close()

    def _steps(self, job: LoadJob) -> Iterator[Step]:
        for run, _ in batches(job.runs, self._layout):
            yield run
        for conversion in job.conversions:
            size = max(1, BATCH_BYTES // self._layout.group_bytes[conversion.group])
            yield from self._parts(job, conversion, size)

    def _parts(self, job: LoadJob, step: Step, size: int) -> Iterator[Step]:
        """A step in parts of so many blocks."""
        for at in range(0, len(step.block_ids), size):
            part = slice(at, at + size)
            if isinstance(step, CopyRun):
                yield step.part(part)
                continue
            assert job.source is not None
            ours = self._groups[step.group].block_size
            theirs = job.source.groups[step.group].block_size
            indices = step.indices[part]
            first = max(step.first, indices[0] * ours // theirs)
            end = -(-(indices[-1] + 1) * ours // theirs)
            held = slice(first - step.first, max(0, end - step.first))
            yield replace(
                step,
                block_ids=step.block_ids[part],
                indices=indices,
                first=first,
                slots=step.slots[held],
                generations=step.generations[held],
            )

    def _attached(self, job: LoadJob, arenas: OpenArenas, remotes: _Remotes) -> bool:
        """Whether all arenas that a job reads are there; begins to attach those that are not."""
        steps: list[Step] = [*job.runs, *job.conversions]
        for step in steps:
            for endpoints in self._endpoints(job, step):
                if endpoints not in remotes and (found := arenas.get(endpoints)) is not None:
                    remotes[endpoints] = found
        return len(remotes) == len(arenas.addresses)

    def _slots(
        self,
        job: LoadJob,
        step: Step,
        steps: list[Step],
        ahead: FetchAhead[Step],
        arenas: OpenArenas,
        remotes: _Remotes,
    ) -> Sequence[Slots] | None:
        """What a step reads, of each rank that it reads; None: not there yet."""
        sources = [remotes[each] for each in self._endpoints(job, step)]
        if not arenas.mapped:
            return ahead.take(steps)
        length = self._length(job, step)
        try:
            return [MappedSlots(remote, step.slots, step.generations, length) for remote in sources]
        except SlotPendingError as pending:
            if not all(remote.alive for remote in sources):
                raise PeerUnreachableError("the peer died while copying") from pending
            return None

    def _fetched(
        self, job: LoadJob, step: Step, remotes: _Remotes, deadline: float
    ) -> list[FetchedSlots]:
        """The same, fetched; on another thread."""
        length = self._length(job, step)
        fetched: list[FetchedSlots] = []
        try:
            for each in self._endpoints(job, step):
                left = deadline - self._clock()
                fetched.append(
                    FetchedSlots(remotes[each], step.slots, step.generations, length, timeout=left)
                )
        except BaseException:
            for slots in fetched:
                slots.release()
            raise
        return fetched

    def _endpoints(self, job: LoadJob, step: Step) -> list[tuple[Endpoint, ...]]:
        """Where the ranks are that a step reads."""
        if isinstance(step, CopyRun):
            return [job.arenas[self._rank]]
        assert job.source is not None
        return [job.arenas[rank] for rank, _ in self._plan(job.source, step.group).sources]

    def _length(self, job: LoadJob, step: Step) -> int:
        """Bytes of each slot that a step reads."""
        if isinstance(step, CopyRun):
            return self._layout.group_bytes[step.group]
        assert job.source is not None
        return self._plan(job.source, step.group).converter.source_bytes

    def _plan(self, source: CompatibilityKey, group: int) -> _Plan:
        plan = self._plans.get((source, group))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[source, group] = self._make_plan(source, group)
        return plan

    def _make_plan(self, source: CompatibilityKey, group: int) -> _Plan:
        theirs, ours = source.groups[group], self._groups[group]
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
                nothing = HeadSlice(0, 0, 0)
                by_rank.setdefault(rank, [nothing] * len(ours.pages))[layer] = heads
        return _Plan(
            converter=converter(theirs, ours),
            block_size=theirs.block_size,
            sources=tuple((rank, tuple(heads)) for rank, heads in sorted(by_rank.items())),
        )

    def _copy(self, run: CopyRun, slots: Slots, fence: object) -> Generator[bool, None, None]:
        checksums = self._copier.load(
            run.group,
            np.asarray(run.block_ids, dtype=np.int64),
            slots.rows,
            slots.index,
            checksum=self._checksum or not slots.in_place,
            fence=fence,
        )
        yield True
        self._compare(run, checksums.tolist(), slots)

    def _convert(
        self, step: Conversion, job: LoadJob, sources: Sequence[Slots], fence: object
    ) -> Generator[bool, None, None]:
        assert job.source is not None
        plan = self._plan(job.source, step.group)
        ours, theirs = self._groups[step.group].block_size, plan.block_size
        size = plan.converter.source_bytes
        made = np.zeros((len(step.block_ids), self._layout.slot_bytes), np.uint8)
        for (_, heads), slots in zip(plan.sources, sources, strict=True):
            checksums = []
            for number, row_index in enumerate(slots.index.tolist(), start=step.first):
                content: NDArray[np.uint8] = slots.rows[row_index, :size]
                for row, index in zip(made, step.indices, strict=True):
                    if (
                        index * ours < (number + 1) * theirs
                        and number * theirs < (index + 1) * ours
                    ):
                        # Whole blocks, as between like engines: where keys are kept in tiles,
                        # the last token cannot be cut off.
                        plan.converter.copy(
                            content, number, row, index, heads, end_token=(index + 1) * ours
                        )
                checked = self._checksum or not slots.in_place
                checksums.append(xxhash.xxh3_64_intdigest(content.data) if checked else 0)
            yield True
            self._compare(step, checksums, slots)
        self._copier.load(
            step.group,
            np.asarray(step.block_ids, dtype=np.int64),
            made,
            np.arange(len(made), dtype=np.int64),
            checksum=False,
            fence=fence,
        )

    def _compare(self, step: Step, checksums: list[int], slots: Slots) -> None:
        for slot, checksum, published in zip(step.slots, checksums, slots.published(), strict=True):
            if checksum != published and (self._checksum or not slots.in_place):
                raise ChecksumError(
                    f"slot {slot}: checksum {checksum:#x}, published {published:#x}"
                )

    def _wipe(self, steps: deque[Step], fence: object) -> None:
        try:
            for step in steps:
                self._zero(step.group, step.block_ids, fence)
        except Exception:  # the request is reported as failed in any case, and must be
            logger.exception("Blocks of a failed load could not be zeroed")

    def _zero(self, group: int, block_ids: list[int], fence: object) -> None:
        self._copier.zero(group, np.asarray(block_ids, dtype=np.int64), fence=fence)


def batches(runs: list[CopyRun], layout: SlotLayout) -> Iterator[tuple[CopyRun, int]]:
    """Parts of runs that are published one by one, so that a peer can read the first while the
    last is still being copied; with each the bytes of one of its blocks."""
    for run in runs:
        size = layout.group_bytes[run.group]
        step = max(1, BATCH_BYTES // size)
        for first in range(0, len(run.block_ids), step):
            yield run.part(slice(first, first + step)), size


def failure_kind(error: Exception, other: str) -> str:
    """The metrics' name of what went wrong."""
    kinds: dict[type[Any], str] = {
        StaleSlotError: "stale_slot",
        ChecksumError: "checksum_mismatch",
        PeerUnreachableError: "peer_unreachable",
        PeerRefusedError: "peer_refused",
    }
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), other)
