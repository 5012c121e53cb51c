# SPDX-License-Identifier: Apache-2.0
"""One rank's copies between its KV blocks and the shared store.

A save is copied on the thread of all saves, into rows of memory that the store can send, and the
engine may have its blocks back; the rows are sent on a thread of their own. A load asks the store
and copies on another. So a store that is slow holds up neither the engine nor a hand-off.
"""

import logging
import queue
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.copy.prefix_jobs import StoreLoadSpec, StoreSaveSpec
from omni_connector.copy.threads import CLOSE_S, CopyThread, Outcome, Work
from omni_connector.errors import ChecksumError, OmniError
from omni_connector.kv.canonical import SlotLayout
from omni_connector.kv.shapes import GroupShape
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import WOKEN
from omni_connector.stores.block_store import BlockStore
from omni_connector.stores.shared_blocks import (
    CORRUPT,
    TRAILER_BYTES,
    FailuresOf,
    add_trailer,
    block_key,
    owning_rank,
    verify,
)

logger = logging.getLogger("vllm.omni_connector.store")

# What goes to the store, or comes from it, in one call; and how many such buffers wait to be sent.
_STAGING_BYTES: Final = 8 << 20
_MAX_ROWS: Final = 256
_STAGING_BUFFERS: Final = 8

_PUT_S: Final = 5.0
_GET_S: Final = 2.0
_DISCARD_S: Final = 0.5
# A copy that finds no staging buffer for so long is given up: the store is slower than the engine
# computes.
_STAGING_WAIT_S: Final = 1.0


# Events that are no failures.
_COUNTERS: Final = frozenset({"blocks_stored", "blocks_dropped"})


@dataclass(frozen=True, slots=True)
class _Staged:
    """Entries that are ready to be sent, in the rows of one staging buffer."""

    staging: int
    keys: list[str]
    rows: NDArray[np.uint8]
    lengths: list[int]


class StoreJobs:
    """Makes the work of jobs with the shared store.

    Args:
        store: closed with this.
        copier, layout: of this rank's KV caches.
        groups: what this engine keeps.
        rank: of this worker.
        affinity: cores that its threads may run on.
        context: clock, statistics, and how its threads start.
        on_end: called on a thread when a load has ended.
    """

    def __init__(
        self,
        *,
        store: BlockStore,
        copier: BlockCopier,
        layout: SlotLayout,
        groups: tuple[GroupShape, ...],
        rank: int,
        affinity: frozenset[int],
        context: EngineContext,
        on_end: Callable[[], object],
    ) -> None:
        self._store = store
        self._clock = context.clock
        self._stats = context.stats
        self._failures = FailuresOf(store)
        self._copier = copier
        self._sizes = layout.group_bytes
        self._owning_ranks = [owning_rank(shape, rank) for shape in groups]
        self._rank = rank
        row_bytes = max(self._sizes) + TRAILER_BYTES
        self._rows = max(1, min(_MAX_ROWS, _STAGING_BYTES // row_bytes))
        self._limits = [self._rows] * len(self._sizes)
        self._outgoing = store.buffer(_STAGING_BUFFERS * self._rows, row_bytes)
        self._incoming = store.buffer(self._rows, row_bytes)
        self._staging: queue.SimpleQueue[int] = queue.SimpleQueue()
        for staging in range(_STAGING_BUFFERS):
            self._staging.put(staging)
        self._staged: deque[_Staged] = deque()
        self._closing = False
        # From the threads; statistics are for the engine's.
        self._events: deque[tuple[str, int]] = deque()
        self.loads = CopyThread("omni-store-load", affinity, context.start, on_end, context.clock)
        self._sender = context.start("omni-store-put", self._send)

    def count_events(self) -> None:
        """Count what the threads have told of since the last call. The engine's thread calls it."""
        while self._events:
            name, amount = self._events.popleft()
            if name in _COUNTERS:
                self._stats.count(name, amount)
            else:
                self._stats.fail(name, amount)
        self._failures.count_into(self._stats)

    def close(self) -> None:
        """Stop the threads, then let go of the store. No save may be under way. Idempotent."""
        self.loads.close()
        self._closing = True
        self._sender.wake()
        self._sender.join(CLOSE_S)
        self._store.close()

    def save_work(self, job_id: int, job: StoreSaveSpec, fence: object) -> Work:
        """The body of a save; see `Work`. It fails at nothing: what is not stored is counted."""
        outcome = Outcome(job_id)
        waiting = deque(
            _Batch(job, group, places)
            for group, places in job.blocks.batches(self._limits)
            if self._owning_ranks[group] == self._rank
        )

        def work(cancelled: Callable[[], bool]) -> Generator[bool, None, Outcome]:
            give_up_at: float | None = None
            try:
                while waiting and not cancelled():
                    try:
                        staging = self._staging.get_nowait()
                    except queue.Empty:
                        now = self._clock()
                        give_up_at = give_up_at or now + _STAGING_WAIT_S
                        if now < give_up_at:
                            yield False
                            continue
                        break
                    give_up_at = None
                    self._pack(staging, waiting[0], fence, cancelled)
                    waiting.popleft()
                    yield True
            except Exception:  # whatever it is, the engine goes on without
                logger.exception("Copying KV blocks for the shared store failed")
                self._events.append(("store_save_failed", 1))
            if waiting:
                self._events.append(("blocks_dropped", sum(len(batch.places) for batch in waiting)))
            return outcome

        return work

    def _pack(
        self, staging: int, batch: "_Batch", fence: object, cancelled: Callable[[], bool]
    ) -> None:
        rows = self._outgoing[staging * self._rows :][: len(batch.places)]
        staged = None
        try:
            checksums = self._copier.save(batch.beside(rows, fence), cancelled=cancelled)
            if checksums is not None:
                keys = batch.keys(self._rank)
                size = self._sizes[batch.group]
                lengths = [
                    add_trailer(row, size, checksum, key)
                    for row, checksum, key in zip(rows, checksums.tolist(), keys, strict=True)
                ]
                staged = _Staged(staging, keys, rows, lengths)
        finally:
            if staged is None:
                self._staging.put(staging)
        if staged is not None:
            self._staged.append(staged)
            self._sender.wake()

    def _send(self) -> float | None:
        try:
            staged = self._staged.popleft()
        except IndexError:
            return None if self._closing else WOKEN
        try:
            stored = self._store.put(staged.keys, staged.rows, staged.lengths, timeout=_PUT_S)
            if number := sum(stored):
                self._events.append(("blocks_stored", number))
            if not all(stored):
                self._events.append(("store_put_failed", 1))
        except Exception:  # the next blocks may fare better
            logger.exception("Sending KV blocks to the shared store failed")
            self._events.append(("store_put_failed", 1))
        finally:
            self._staging.put(staged.staging)
        return 0.0

    def load_work(self, job_id: int, job: StoreLoadSpec, fence: object) -> Work:
        """The body of a load; see `Work`. Blocks that it could not fill are zero when it ends."""
        deadline = self._clock() + job.timeout
        read = np.array([bool(each) for each in job.hashes], bool)
        batches = list(job.blocks.batches(self._limits))
        waiting = deque(
            _Batch(job, g, places[read[places]]) for g, places in batches if read[places].any()
        )

        def work(cancelled: Callable[[], bool]) -> Generator[bool, None, Outcome]:
            outcome = Outcome(job_id)
            try:
                for group, places in batches:
                    if not read[places].all():
                        self._zero(_Batch(job, group, places[~read[places]]), fence)
                        yield True
                while waiting:
                    if cancelled():
                        outcome.failure = "cancelled"
                        break
                    left = deadline - self._clock()
                    if left <= 0:
                        raise _LateError(f"not all was there within {job.timeout:g} s")
                    yield from self._unpack(waiting[0], min(left, _GET_S), fence)
                    outcome.blocks += len(waiting.popleft().places)
                    yield True
            except Exception as error:  # whatever it is, the request must not wait for ever
                outcome.failure = _failure_kind(error)
                logger.warning(
                    "Request %s computes its prompt here: its prefix in the shared store was not "
                    "used (%s: %s)",
                    job.request_id,
                    outcome.failure,
                    error,
                )
                if not isinstance(error, OmniError):
                    logger.exception("This should not happen; please report it")
            if outcome.failure is not None:
                self._wipe(waiting, fence)
            return outcome

        return work

    def _unpack(
        self, batch: "_Batch", timeout: float, fence: object
    ) -> Generator[bool, None, None]:
        size, rows = self._sizes[batch.group], self._incoming[: len(batch.places)]
        keys = batch.keys(self._owning_ranks[batch.group])
        there = self._store.get(keys, rows, [size + TRAILER_BYTES] * len(keys), timeout=timeout)
        if not all(there):
            raise _GoneError(f"{len(there) - sum(there)} of {len(there)} blocks did not come")
        yield True
        checksums = self._copier.load(batch.beside(rows, fence))
        wrong: dict[str, ChecksumError] = {}
        for row, checksum, key in zip(rows, checksums.tolist(), keys, strict=True):
            try:
                verify(row, size, checksum, key)
            except ChecksumError as error:
                wrong[key] = error
        if wrong:
            self._store.discard(list(wrong), timeout=_DISCARD_S)
            raise next(iter(wrong.values()))

    def _wipe(self, batches: "deque[_Batch]", fence: object) -> None:
        try:
            for batch in batches:
                self._zero(batch, fence)
        except Exception:  # the request is reported as failed in any case, and must be
            logger.exception("Blocks of a failed load could not be zeroed")

    def _zero(self, batch: "_Batch", fence: object) -> None:
        self._copier.zero(batch.group, batch.block_ids, fence=fence)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks of one group that are copied at once: their places among those of the job."""

    job: StoreSaveSpec
    group: int
    places: NDArray[np.int64]

    @property
    def block_ids(self) -> NDArray[np.int64]:
        return self.job.blocks.block_ids[self.places]

    def beside(self, rows: NDArray[np.uint8], fence: object) -> BlockCopy:
        """Their copy to or from as many rows."""
        row_ids = np.arange(len(rows), dtype=np.int64)
        return BlockCopy(self.group, self.block_ids, rows, row_ids, checksum=True, fence=fence)

    def keys(self, rank: int) -> list[str]:
        """Their keys, for the shard of a rank."""
        hashes = [self.job.hashes[place] for place in self.places.tolist()]
        return [block_key(self.job.prefix, self.group, rank, each) for each in hashes]


class _GoneError(OmniError):
    """Blocks that were found are not there any more, or did not come in time."""


class _LateError(OmniError):
    """The whole load took too long."""


def _failure_kind(error: Exception) -> str:
    if isinstance(error, ChecksumError):
        return CORRUPT
    if isinstance(error, _LateError):
        return "store_load_timeout"
    return "store_blocks_gone" if isinstance(error, _GoneError) else "store_load_failed"
