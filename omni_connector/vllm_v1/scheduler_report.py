# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half tells of an engine: counts and gauges to vLLM, all of them to `top`."""

from collections.abc import Callable, Mapping
from typing import Final

from omni_connector.copy.pinning import PinnedBytes
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.periodic_tasks import PeriodicTasks
from omni_connector.handoff.serving import ServingState
from omni_connector.net.status import StatusReport
from omni_connector.requests.state import RequestState
from omni_connector.runtime.metric_names import COUNTERS
from omni_connector.vllm_v1.metrics import OmniStats

_REPORT_S: Final = 0.25
"""Seconds between two reports to vLLM while requests are under way. Each costs the engine core and
the API server a few hundred microseconds."""


class SchedulerReport:
    """Collects what the scheduler half counts, until vLLM asks for it. For the engine's thread.

    Args:
        stats: where all parts of the half count.
        events: of other threads.
        directory: of the slots that the gauges tell of; None where there is no arena.
        status: takes the counts of both halves, closed with this.
        serving: role and phase, which gauges tell too.
        clock: seconds, monotonic.

    Attributes:
        next_at: seconds of the clock from which on vLLM is told what was counted, although another
            step will follow.
    """

    def __init__(
        self,
        stats: OmniStats,
        events: PeriodicTasks,
        directory: SlotDirectory | None,
        status: StatusReport,
        serving: ServingState,
        clock: Callable[[], float],
    ) -> None:
        self._stats = stats
        self._events = events
        self._directory = directory
        self._status = status
        self._serving = serving
        self._slot_counts: object = None  # those of the gauges
        self._service: object = None
        self._of_workers = OmniStats()
        self._pinned: dict[int, PinnedBytes] = {}  # by rank
        self._clock = clock
        self.next_at = 0.0

    def workers(self, counted: OmniStats) -> None:
        """The workers have counted this."""
        self._status.add(counted.data)
        self._of_workers.aggregate(counted)

    def pinned(self, by_rank: Mapping[int, PinnedBytes]) -> None:
        """The devices of some ranks have pinned this of arenas."""
        self._pinned.update(by_rank)
        total = PinnedBytes(*map(sum, zip(*self._pinned.values(), strict=True)))
        self._status.pinned(*total)
        self._stats.gauge("pinned_bytes", total.pinned)
        self._stats.gauge("unpinned_bytes", total.unpinned)

    def prompt(self, state: RequestState, tokens: int, cached: int) -> None:
        """A step begins to compute a prompt; see `StatusReport.prompt`.

        A prompt is counted once. For its V2 model runner vLLM names a request that it resumes after
        a preemption among the new ones. The next prompt of a streaming session is longer.
        """
        if state.counted_tokens != tokens:
            state.counted_tokens = tokens
            self._status.prompt(tokens, cached)

    def take(self) -> OmniStats | None:
        """What was counted since the last call; None when nothing changed."""
        stats = self._stats
        if self._events.events:
            for event, number in self._events.take().items():
                if event in COUNTERS:
                    stats.count(event, number)
                else:
                    stats.fail(event, number)
        stats.fail_ended_threads()
        if self._directory is not None:
            self._set_gauges(self._directory)
        self._set_service()
        self.next_at = self._clock() + _REPORT_S
        taken = stats.take()
        if taken is not None:
            self._status.add(taken.data)
        of_workers = self._of_workers.take()
        if taken is None or of_workers is None:
            return taken or of_workers
        return of_workers.aggregate(taken)

    def _set_gauges(self, directory: SlotDirectory) -> None:
        if (counts := directory.counts()) == self._slot_counts:
            return
        self._slot_counts = counts
        held, cached, leases = directory.usage()
        pinned = directory.pool.num_pinned
        total = directory.num_slots
        self._stats.gauge("slots_in_use", held)
        self._stats.gauge("slots_cached", cached)
        self._stats.gauge("slots_pinned", pinned)
        self._stats.gauge("slots_total", total)
        self._stats.gauge("leases", leases)

    def _set_service(self) -> None:
        serving = self._serving
        service = serving.draining, serving.role
        if service == self._service:
            return
        self._service = service
        for name, value in serving.service().gauges.items():
            self._stats.gauge(name, value)

    def close(self) -> None:
        """Remove the status file. Idempotent."""
        self._status.close()
