# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of the copy jobs that have ended: vLLM of loads, the scheduler half of all."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from omni_connector.copy.jobs import LoadSpec
from omni_connector.copy.pinning import PinnedBytes
from omni_connector.copy.threads import Outcome
from omni_connector.identity.adapters import AdapterLoad
from omni_connector.identity.epochs import RankWeights
from omni_connector.kv.spans import TransferSpec
from omni_connector.runtime.stats import LEASE_EXPIRED, Stats
from omni_connector.vllm_v1.metadata import WorkerReport


class JobOutcomes:
    """Collects outcomes until vLLM asks for them. For the engine's thread.

    Args:
        stats: counts bytes, blocks and seconds.
        fails_by_block: whether vLLM hears of a failed load by its blocks, or else by its request.

    Attributes:
        has_ended: whether jobs have ended since the last `take_report`.
    """

    def __init__(self, stats: Stats, *, fails_by_block: bool) -> None:
        self._stats = stats
        self._fails_by_block = fails_by_block
        self._loads_left: Counter[str] = Counter()  # of each request that waits for several
        self._finished_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._bad_block_ids: set[int] = set()
        self._report = WorkerReport()
        self.has_ended = False

    def expect(self, jobs: Iterable[TransferSpec]) -> None:
        """These jobs start with a step; each will be given to `add`."""
        self._loads_left.update(spec.request_id for spec in jobs if spec.request_id)

    def add(self, spec: TransferSpec, outcome: Outcome) -> None:
        """A job has ended, or could not start."""
        self._report.done[outcome.job_id] = 1
        self.has_ended = True
        if spec.request_id:
            self._loads_left[spec.request_id] -= 1
            if self._loads_left[spec.request_id] <= 0:
                del self._loads_left[spec.request_id]
                self._finished_loads.add(spec.request_id)
        if not spec.timed_as:  # a save to the store never fails
            return
        if outcome.failure is None:
            outcome.count_into(self._stats, spec.timed_as, spec.counted_as)
            return
        self._report.failed[outcome.job_id] = outcome.failure
        # What is late is computed here without vLLM's policy; see `OmniScheduler`.
        if type(spec) is LoadSpec and outcome.failure != LEASE_EXPIRED:
            if self._fails_by_block:
                self._bad_block_ids |= outcome.bad_block_ids
            else:
                self._failed_loads.add(spec.request_id)

    def take_finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended, and those of them that failed as a whole."""
        if not self._finished_loads:
            return set(), set()
        finished, self._finished_loads = self._finished_loads, set()
        failed, self._failed_loads = self._failed_loads, set()
        return finished, failed

    def take_bad_block_ids(self) -> set[int]:
        """Blocks that a load should have filled and did not."""
        if not self._bad_block_ids:
            return set()
        bad, self._bad_block_ids = self._bad_block_ids, set()
        return bad

    def take_report(
        self,
        adapters: Sequence[AdapterLoad],
        weights: Sequence[RankWeights],
        pinned: Mapping[int, PinnedBytes],
    ) -> WorkerReport:
        """What the scheduler half must know of.

        Args:
            adapters: that vLLM has loaded since the last call.
            weights: what the rank has answered since then.
            pinned: what the rank's device has pinned, by rank.
        """
        report = self._report
        report.adapters += adapters
        report.weights += weights
        report.pinned.update(pinned)
        self._report = WorkerReport()
        self.has_ended = False
        return report
