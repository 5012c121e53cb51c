# SPDX-License-Identifier: Apache-2.0
"""Copy jobs on threads of their own: saves in one, loads in another.

The engine's thread submits a job and later asks what has ended; it waits for nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CLOSE_S: Final = 5.0


@dataclass(slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        job_id: the job.
        failure: kind of failure; None when all went well, `cancelled` when told to stop.
        blocks: blocks copied.
        size: bytes copied.
        seconds: how long it took, waiting in the queue not included.
        bad_block_ids: blocks that do not hold what they should.
    """

    job_id: int
    failure: str | None = None
    blocks: int = 0
    size: int = 0
    seconds: float = 0.0
    bad_block_ids: frozenset[int] = frozenset()


Work = Callable[[Callable[[], bool]], Outcome | None]
"""A job's body: given a function that says whether to stop, it copies and tells how it went; or
it returns None for "not yet", and is called again after the other jobs had their turn. It looks
before it copies: a job that was cancelled in the queue is called to end, and copies nothing."""

_NOT_YET_S: Final = 0.0003


@dataclass(slots=True)
class _Job:
    job_id: int
    work: Work
    cancelled: bool = False
    seconds: float = 0.0


class CopyThread:
    """Runs jobs one after the other.

    Args:
        name: of the thread.
        affinity: cores it may run on; None leaves those of the creating thread.
    """

    def __init__(self, name: str, affinity: frozenset[int] | None = None) -> None:
        self._name = name
        self._affinity = affinity
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._ended: list[Outcome] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job_id: int, work: Work) -> None:
        """Queue a job; returns at once."""
        with self._changed:
            self._queue.append(_Job(job_id, work))
            self._changed.notify_all()

    def take_ended(self) -> list[Outcome]:
        """Outcomes since the last call, each once."""
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def cancel(self, job_ids: set[int]) -> None:
        """Tell these jobs to stop, without waiting for it; unknown and ended ones are ignored."""
        with self._changed:
            self._mark(job_ids)

    def _mark(self, job_ids: set[int]) -> None:
        for job in (*self._queue, self._running):
            if job is not None and job.job_id in job_ids:
                job.cancelled = True

    def close(self) -> None:
        """Cancel everything and stop the thread. Idempotent, within `CLOSE_S` seconds."""
        with self._changed:
            self._closing = True
            for job in (*self._queue, self._running):
                if job is not None:
                    job.cancelled = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        if self._affinity is not None:
            _set_affinity(self._affinity)
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._running = job
            outcome = self._perform(job)
            with self._changed:
                self._running = None
                if outcome is not None:
                    self._ended.append(outcome)
                else:
                    self._queue.append(job)
                self._changed.notify_all()
            if outcome is None:
                time.sleep(_NOT_YET_S)

    @staticmethod
    def _perform(job: _Job) -> Outcome | None:
        started = time.perf_counter()
        outcome = job.work(lambda: job.cancelled)
        job.seconds += time.perf_counter() - started
        if outcome is not None:
            outcome.seconds = job.seconds
        return outcome


def _set_affinity(cores: frozenset[int]) -> None:
    import os

    # Engines pin their compute threads; a copy that inherits the pin competes with them.
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # the cpuset shrank since: the inherited cores are still right
        return
