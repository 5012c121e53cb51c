# SPDX-License-Identifier: Apache-2.0
"""Copy jobs on threads of their own: saves in one, loads in another.

The engine's thread submits a job and later asks what has ended. Where it has nothing
to compute it helps with the copies (`shared_work.Helpers.lend`); else it waits for nothing.

Copies share the bandwidth of memory, or that of a device's bus. So *background jobs*, for which
nobody waits, step back while other jobs copy; see `CopyThread`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Final

from omni_connector.runtime.stats import Stats
from omni_connector.runtime.trace import Trace, now
from omni_connector.runtime.turns import COPIES, WOKEN, StartTurns, TurnThread

logger = logging.getLogger("vllm.omni_connector.worker")

CLOSE_S: Final = 5.0
"""Longest wait of `close` for the thread to end, in seconds."""

THREAD_DIED: Final = "copy_thread_died"

NO_JOB_ID: Final = 0
"""Of work that no ledger has started, and whose outcome nobody takes."""


@dataclass(slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        job_id: the job.
        failure: kind of failure; None when all went well, `cancelled` when told to stop.
        blocks: blocks copied.
        size: bytes copied.
        early: bytes of them copied while the forward pass still computed others.
        seconds: how long it took, waiting in the queue not included.
        bad_block_ids: blocks that do not hold what they should.
    """

    job_id: int
    failure: str | None = None
    blocks: int = 0
    size: int = 0
    early: int = 0
    seconds: float = 0.0
    bad_block_ids: frozenset[int] = frozenset()

    def count_into(self, stats: Stats, timed_as: str, counted_as: str) -> None:
        """Count a job that went well, by these names; "" counts no bytes and blocks."""
        stats.time(timed_as, self.seconds)
        if counted_as:
            stats.count(f"bytes_{counted_as}", self.size)
            stats.count(f"blocks_{counted_as}", self.blocks)
        if self.early:
            stats.count("bytes_saved_early", self.early)


UNTIL_NOTIFIED: Final = WOKEN

Work = Callable[[Callable[[], bool]], Generator[bool | float, None, Outcome]]
"""A job's body: given a function that says whether to stop, it copies piece by piece and tells how
it went. After each piece it yields True to go on at once, or else the seconds that it waits: False
stands for a few hundred microseconds, `UNTIL_NOTIFIED` for as long as it takes. Meanwhile the other
jobs have their turn. The next `CopyThread.notify` ends the wait, so does its cancellation, and it
may end early. It looks before each piece: a job that was cancelled copies nothing any more."""

# Seconds that `False` in a `Work` stands for. A slot that is not published yet comes about as soon.
_NOT_YET_S: Final = 0.0003

STEP_BACK: Final = 9.0
"""How long background jobs step back, in durations of their last piece: they have a tenth of the
time. A load beside them then takes a twentieth longer where both halve each other's bandwidth."""

STEP_BACK_S: Final = 0.1
"""Longest time that background jobs step back between two pieces, in seconds. They hold KV blocks
that vLLM may want to allocate."""


def traced(trace: Trace, name: str, job_id: int, work: Work, request_id: str = "") -> Work:
    """The same work, which tells a trace when it begins and ends, and the job of its parts.

    Args:
        name: of the span.
        request_id: whose job it is, where that is known.
    """

    def body(cancelled: Callable[[], bool]) -> Generator[bool | float, None, Outcome]:
        pieces = work(cancelled)
        began = now()
        outcome = Outcome(job_id, "job_failed")
        try:
            while True:
                trace.works_on(job_id)
                try:
                    goes_on = next(pieces)
                except StopIteration as end:
                    given: Outcome = end.value
                    outcome = given
                    break
                finally:
                    trace.works_on(None)
                yield goes_on
        finally:
            pieces.close()
            trace.span(
                name,
                began,
                f"{name} {job_id}",
                job=job_id,
                request=request_id or None,
                blocks=outcome.blocks,
                bytes=outcome.size,
                failure=outcome.failure,
            )
        return outcome

    return body


class _Job:
    """A job of a thread.

    Attributes:
        due_at: seconds of the clock when it goes on; `UNTIL_NOTIFIED` where only a notification or
            its cancellation ends the wait.
        looks: whether it goes on then only to look whether what it waits for has come.
        queued: seconds in which it could have gone on, but other jobs did.
    """

    def __init__(
        self,
        job_id: int,
        work: Work,
        writes: frozenset[int],
        now: float,
        *,
        background: bool,
        in_order: bool,
    ) -> None:
        self.job_id = job_id
        self.writes = writes
        self.background = background
        self.in_order = in_order
        self.cancelled = False
        self.due_at = now
        self.looks = False
        self.queued = 0.0
        self.seconds = 0.0
        self.pieces = work(lambda: self.cancelled)

    @property
    def steps_back(self) -> bool:
        """Whether it lets others go first. Where it was cancelled it has nothing left to copy."""
        return self.background and not self.cancelled

    def is_due(self, now: float) -> bool:
        return self.cancelled or self.due_at <= now


class CopyThread:
    """Runs jobs one after the other. Whatever a job raises is that job's failure.

    A background job makes no piece while a job of this thread that is none could make one, or
    `first` copies. It steps back so for `STEP_BACK` durations of the last background piece, and for
    `STEP_BACK_S` at most. Then one piece is made all the same, so that it ends at some time.

    Args:
        name: of the thread.
        affinity: cores it may run on; None leaves those of the creating thread.
        start: starts it.
        on_end: called on the thread when a job has ended.
        clock: seconds, monotonic.
        first: another thread, whose jobs go before the background jobs of this one.
    """

    def __init__(
        self,
        name: str,
        affinity: frozenset[int] | None = None,
        start: StartTurns = TurnThread,
        on_end: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        first: "CopyThread | None" = None,
    ) -> None:
        self._on_end = on_end
        self._first = first
        self._behind: CopyThread | None = None
        # How long background jobs step back, and until when they do; None while they do not.
        self._step_back = STEP_BACK_S
        self._steps_back_until: float | None = None
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._ended: list[Outcome] = []
        self._closing = False
        self._notified = 0
        if first is not None:
            first._behind = self
        self._thread = start(name, self._turn, cores=affinity)

    def submit(
        self,
        job_id: int,
        work: Work,
        writes: Iterable[int] = (),
        *,
        background: bool = False,
        in_order: bool = False,
    ) -> None:
        """Queue a job; returns at once.

        Args:
            writes: the KV blocks that it fills; none of them is good if it raises.
            background: whether nobody waits for its end.
            in_order: whether no job that is queued later may overtake those before this one. Until
                it has ended, no job steps back.
        """
        written = frozenset(writes)
        with self._changed:
            now = self._clock()
            job = _Job(job_id, work, written, now, background=background, in_order=in_order)
            self._queue.append(job)
        self._thread.wake()

    @property
    def copies(self) -> bool:
        """Whether a job copies, or could at once. Any thread may ask."""
        with self._changed:
            if self._running is not None and not self._running.looks:
                return True
            now = self._clock()
            return any(each.is_due(now) and not each.looks for each in self._queue)

    def queued(self) -> float:
        """Seconds in which the job that asks could have gone on, but other jobs did. A job asks
        while it makes a piece."""
        running = self._running
        return 0.0 if running is None else running.queued

    @property
    def works(self) -> bool:
        """Whether jobs are under way."""
        return bool(self._queue) or self._running is not None

    def under_way(self) -> set[int]:
        """The jobs that have not ended. Any thread may ask."""
        with self._changed:
            running = () if self._running is None else (self._running,)
            return {job.job_id for job in (*self._queue, *running)}

    @property
    def has_ended(self) -> bool:
        """Whether a job has ended whose outcome nobody has taken."""
        return bool(self._ended)

    def take_ended(self) -> list[Outcome]:
        """Outcomes since the last call, each once. Without its thread all jobs have failed."""
        under_way = self._queue or self._running is not None
        if under_way and not self._closing and not self._thread.is_alive():
            self._fail_all()
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def _fail_all(self) -> None:
        with self._changed:
            jobs = [*self._queue, *([] if self._running is None else [self._running])]
            self._queue.clear()
            self._running = None
            asked = [job for job in jobs if job.job_id != NO_JOB_ID]
            self._ended += [_failed(job, THREAD_DIED) for job in asked]
        for job in jobs:
            job.pieces.close()  # what they hold is let go of

    def cancel(self, job_ids: set[int]) -> None:
        """Tell these jobs to stop, without waiting for it; unknown and ended ones are ignored."""
        with self._changed:
            for job in (*self._queue, self._running):
                if job is not None and job.job_id in job_ids:
                    job.cancelled = True
        self._thread.wake()

    def notify(self) -> None:
        """Let the jobs go on that wait for this; returns at once."""
        with self._changed:
            self._notified += 1  # for one that looks just now, and is about to wait
            now = self._clock()
            waiting = [job for job in self._queue if job.due_at > now]
            for job in waiting:
                job.due_at = now
                job.looks = False
        if waiting:
            self._thread.wake()

    def close(self) -> None:
        """Cancel everything and stop the thread. Idempotent, within `CLOSE_S` seconds.

        No job goes on after that, but for a piece that takes longer: what jobs hold and write to
        may be taken from them.
        """
        with self._changed:
            self._closing = True
            for job in (*self._queue, self._running):
                if job is not None:
                    job.cancelled = True
        self._thread.wake()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._fail_all()  # there are none, unless it had died
        with self._changed:
            left, self._queue = self._queue, deque()
        for job in left:  # of a thread that is slow
            job.pieces.close()

    def _turn(self) -> float | None:
        with self._changed:
            began = self._clock()
            place = self._next(began)
            if place is None:
                return None if self._closing else self._pause(began)
            job = self._running = self._queue[place]
            del self._queue[place]
            notified = self._notified
        outcome: Outcome | None = None
        goes_on: bool | float = False
        started = time.perf_counter()
        try:
            with COPIES:
                goes_on = next(job.pieces)
        except StopIteration as end:
            outcome = end.value
        except BaseException:  # it is this job's, and the others go on
            logger.exception("Copy job %d failed; please report it", job.job_id)
            outcome = _failed(job, "job_failed")
        job.seconds += time.perf_counter() - started
        with self._changed:
            self._running = None
            now = self._clock()
            if job.background:
                self._steps_back_until = None
                self._step_back = min(max(STEP_BACK * (now - began), _NOT_YET_S), STEP_BACK_S)
            for each in self._queue:
                if not each.looks:
                    each.queued += max(0.0, now - max(began, each.due_at))
            if outcome is not None:
                outcome.seconds = job.seconds
                if job.job_id != NO_JOB_ID:
                    self._ended.append(outcome)
            else:
                waits = goes_on is not True and notified == self._notified
                job.due_at = now + (max(0.0, goes_on or _NOT_YET_S) if waits else 0.0)
                job.looks = waits
                self._queue.insert(place, job)
            waits = outcome is None and job.due_at > now and self._steps_back_until is None
            pause = self._pause(now) if waits else 0.0
        if outcome is not None:
            self._on_end()
        if self._behind is not None and not self.copies:
            self._behind._go_on()
        return pause

    def _next(self, now: float) -> int | None:
        """The place of the job that makes the next piece; None where none does. Holds the lock."""
        due = [place for place, each in enumerate(self._queue) if each.is_due(now)]
        back = [place for place in due if self._queue[place].steps_back]
        if not back or any(each.in_order for each in self._queue):
            return due[0] if due else None
        waited_for = [place for place in due if not self._queue[place].steps_back]
        if not waited_for and not (self._first is not None and self._first.copies):
            return back[0]
        if self._steps_back_until is None:
            self._steps_back_until = now + self._step_back
        if now >= self._steps_back_until:
            return back[0]
        return waited_for[0] if waited_for else None

    def _go_on(self) -> None:
        """Have background jobs look again whether they step back. Any thread may call it."""
        with self._changed:
            steps_back = self._steps_back_until is not None
        if steps_back:
            self._thread.wake()

    def _pause(self, now: float) -> float:
        """Seconds until a job is due. Holds the lock."""
        back_until = self._steps_back_until or now
        due_at = (
            now if each.cancelled else max(each.due_at, back_until if each.steps_back else now)
            for each in self._queue
        )
        return max(0.0, min(due_at, default=WOKEN) - now)


def none_ended(threads: Iterable[CopyThread]) -> bool:
    """Whether jobs are under way, and none has ended whose outcome nobody has taken."""
    return any(each.works for each in threads) and not any(each.has_ended for each in threads)


def _failed(job: _Job, kind: str) -> Outcome:
    return Outcome(job.job_id, kind, bad_block_ids=job.writes)
