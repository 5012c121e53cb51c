# SPDX-License-Identifier: Apache-2.0
"""One rank's copies between its KV blocks and the shared store.

Saves and loads of the store have three threads, so that a slow store blocks neither the engine nor
a hand-off. The thread of all saves copies blocks to a staging buffer; then the engine may use the
blocks again. A second thread sends the staging buffers. A third one asks the store for blocks and
copies them to the KV cache.
"""

import logging
import queue
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.copy.copier import BlockCopier, BlockCopy
from omni_connector.copy.prefix_jobs import StoreLoadSpec, StoreSaveSpec
from omni_connector.copy.threads import CLOSE_S, CopyThread, Outcome, Work
from omni_connector.errors import ChecksumError, DeviceMemoryError, OmniError
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

# Size of a staging buffer, and its most rows: what one call to the store moves at most. A row holds
# one block.
_STAGING_BYTES: Final = 8 << 20
_MAX_ROWS: Final = 256
# Staging buffers for saves, which bounds the bytes that wait to be sent.
_STAGING_BUFFERS: Final = 8

# Longest calls to the store, in seconds. Only a load makes a request wait, so it has less.
_PUT_S: Final = 5.0
_GET_S: Final = 2.0
_DISCARD_S: Final = 0.5
# Longest wait of a save for a staging buffer, in seconds. Then its blocks are dropped, as the store
# is slower than the engine computes.
_STAGING_WAIT_S: Final = 1.0

_NO_BYTES: Final = xxhash.xxh3_64_intdigest(b"")
"""Checksum of the content of a mark."""

# Events that are counters. All others are failures.
_COUNTERS: Final = frozenset({"blocks_stored", "blocks_dropped"})


@dataclass(frozen=True, slots=True)
class _Staged:
    """A staging buffer whose rows are ready to be sent, and how many of them are blocks."""

    staging: int
    keys: list[str]
    rows: NDArray[np.uint8]
    lengths: list[int]
    num_blocks: int


class StoreJobs:
    """Makes the work of jobs with the shared store.

    Args:
        store: closed with this.
        copier, layout: of this rank's KV caches.
        groups: the cache groups that this engine keeps.
        rank, ranks: of this worker, counted stage by stage, and how many a pipeline stage has.
        affinity: cores that its threads may run on.
        context: clock, statistics and threads.
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
        ranks: int,
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
        self._owning_ranks = [owning_rank(shape, rank, ranks) for shape in groups]
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
        # The threads append events; the engine's thread counts them, as statistics are its own.
        self._events: deque[tuple[str, int]] = deque()
        self.loads = CopyThread("omni-store-load", affinity, context.start, on_end, context.clock)
        self._sender = context.start("omni-store-put", self._send)

    def count_events(self) -> None:
        """Count the events of the threads since the last call. Called on the engine's thread."""
        while self._events:
            name, amount = self._events.popleft()
            if name in _COUNTERS:
                self._stats.count(name, amount)
            else:
                self._stats.fail(name, amount)
        self._failures.count_into(self._stats)

    def close(self) -> None:
        """Stop the threads, then close the store. No save may be under way. Idempotent."""
        self.loads.close()
        self._closing = True
        self._sender.wake()
        self._sender.join(CLOSE_S)
        self._store.close()

    def save_work(self, job_id: int, job: StoreSaveSpec, fence: object) -> Work:
        """The body of a save; see `Work`. It never fails: blocks that are not stored are
        counted."""
        outcome = Outcome(job_id)
        waiting = deque(
            _Batch(job, group, places)
            for group, places in job.blocks.batches(self._limits)
            if self._owning_ranks[group] == self._rank
        )
        marks: list[str] = []
        if job.mark is not None:
            group, name = job.mark
            if self._owning_ranks[group] == self._rank:
                marks.append(block_key(job.prefix, group, self._rank, name))

        def work(cancelled: Callable[[], bool]) -> Generator[bool, None, Outcome]:
            give_up_at: float | None = None
            try:
                while (waiting or marks) and not cancelled():
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
                    if waiting:
                        self._pack(staging, waiting[0], fence, cancelled)
                        waiting.popleft()
                    else:  # readers that find the mark look for the blocks
                        self._mark(staging, marks.pop())
                    yield True
            except DeviceMemoryError:  # of all jobs, and logged at the start
                self._events.append(("store_save_failed", 1))
            except Exception:  # the engine does not need the save
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
                staged = _Staged(staging, keys, rows, lengths, len(keys))
        finally:
            if staged is None:
                self._staging.put(staging)
        if staged is not None:
            self._staged.append(staged)
            self._sender.wake()

    def _mark(self, staging: int, key: str) -> None:
        rows = self._outgoing[staging * self._rows :][:1]
        length = add_trailer(rows[0], 0, _NO_BYTES, key)
        self._staged.append(_Staged(staging, [key], rows, [length], 0))
        self._sender.wake()

    def _send(self) -> float | None:
        try:
            staged = self._staged.popleft()
        except IndexError:
            return None if self._closing else WOKEN
        try:
            stored = self._store.put(staged.keys, staged.rows, staged.lengths, timeout=_PUT_S)
            if number := sum(stored[: staged.num_blocks]):
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
        """The body of a load; see `Work`. It zeroes the blocks that it could not fill."""
        deadline = self._clock() + job.timeout
        read = np.array([bool(each) for each in job.hashes], bool)
        batches = [
            (group, places)
            for group, places in job.blocks.batches(self._limits)
            if self._owning_ranks[group] is not None
        ]
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
                        raise _LateError(f"some blocks did not come within {job.timeout:g} s")
                    yield from self._unpack(waiting[0], min(left, _GET_S), fence)
                    outcome.blocks += len(waiting.popleft().places)
                    yield True
            except Exception as error:  # any, so that the request does not wait for ever
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
        size = self._sizes[batch.group]
        rows = self._incoming[: len(batch.places)]
        owner = self._owning_ranks[batch.group]
        assert owner is not None, "no bytes of the group are asked for"
        keys = batch.keys(owner)
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
        except Exception:  # the load still has to be reported as failed
            logger.exception("Blocks of a failed load could not be zeroed")

    def _zero(self, batch: "_Batch", fence: object) -> None:
        self._copier.zero(batch.group, batch.block_ids, fence=fence)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks of one group that are copied in one call.

    Attributes:
        places: positions in the job's `block_ids` and `hashes`.
    """

    job: StoreSaveSpec
    group: int
    places: NDArray[np.int64]

    @property
    def block_ids(self) -> NDArray[np.int64]:
        return self.job.blocks.block_ids[self.places]

    def beside(self, rows: NDArray[np.uint8], fence: object) -> BlockCopy:
        """The copy of the blocks to or from `rows`, one row a block."""
        row_ids = np.arange(len(rows), dtype=np.int64)
        return BlockCopy(self.group, self.block_ids, rows, row_ids, checksum=True, fence=fence)

    def keys(self, rank: int) -> list[str]:
        """The keys of the blocks in the store, for the shard of a rank."""
        hashes = [self.job.hashes[place] for place in self.places.tolist()]
        return [block_key(self.job.prefix, self.group, rank, each) for each in hashes]


class _GoneError(OmniError):
    """The store has not returned blocks that it held: they were evicted, or were late."""


class _LateError(OmniError):
    """The whole load took too long."""


def _failure_kind(error: Exception) -> str:
    if isinstance(error, ChecksumError):
        return CORRUPT
    if isinstance(error, _LateError):
        return "store_load_timeout"
    return "store_blocks_gone" if isinstance(error, _GoneError) else "store_load_failed"
