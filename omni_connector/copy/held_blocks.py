# SPDX-License-Identifier: Apache-2.0
"""The copy jobs of an engine, and the KV blocks that they hold: vLLM may free a block when its job
has ended.

All saves and loads are jobs, of hand-offs, arenas and stores alike. A job has one start and one
end: done, failed or cancelled, once every rank has said so. From its start until no rank touches
its blocks any more, each block has a reference of ours in vLLM's block pool. Nothing else keeps it:
whatever happens to its request (preemption, abort, its end, a window that moves on), vLLM gives the
block to nobody, so that nobody zeroes it or writes to it. A request that goes on writes to no token
that it has computed; only a recurrent state is written in place, until its block is full. So a
request whose state is handed off ends with the step that computes it. Shared are the states of full
blocks, those of requests that have ended, and copies of a state that vLLM makes before it writes on
(`CopyLedger.copied`).
"""

import enum
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from omni_connector.kv.spans import BlockSpans, TransferSpec

Block = tuple[int, int]
"""(position of the group among the transferred ones, logical index in the request)."""

CANCELLED: Final = "cancelled"
"""How a job ends that was told to stop."""

SETTLE_S: Final = 0.5
"""Longest wait, in seconds, for jobs that block a reset of vLLM's prefix cache."""

_SPARE_PART: Final = 8
"""A block of a running request is copied while at least 1/8 of all blocks stay free."""

_LOOK_S: Final = 0.001
"""Seconds between two looks at whether they have ended."""

End = Callable[[str | None], None]
"""Called once with the kind of failure, `CANCELLED`, or None when all ranks have copied."""


class EngineBlock(Protocol):
    """A KV block, as far as this package reads vLLM's `KVCacheBlock`."""

    @property
    def block_id(self) -> int: ...
    @property
    def is_null(self) -> bool: ...
    @property
    def ref_cnt(self) -> int: ...


class EnginePool(Protocol):
    """All KV blocks of an engine: vLLM's `BlockPool`, which takes its own blocks only."""

    @property
    def blocks(self) -> Sequence[EngineBlock]: ...
    def get_new_blocks(self, num_blocks: int, /) -> Sequence[EngineBlock]: ...
    def touch(self, blocks: Sequence[Any], /) -> None: ...
    def free_blocks(self, blocks: Iterable[Any], /) -> None: ...
    def get_num_free_blocks(self) -> int: ...


class RequestBlocks(Protocol):
    """The blocks of one request, for each of vLLM's groups: its `KVCacheBlocks`."""

    @property
    def blocks(self) -> Sequence[Sequence[EngineBlock]]: ...
    def get_block_ids(self) -> Sequence[Sequence[int]]: ...


class EngineRequest(Protocol):
    """A request, as far as this package reads vLLM's `Request`."""

    @property
    def request_id(self) -> str: ...
    @property
    def status(self) -> enum.Enum: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...
    @property
    def cache_salt(self) -> str | None: ...


class EngineStep(Protocol):
    """A step, as far as this package reads vLLM's `SchedulerOutput`."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
    @property
    def scheduled_spec_decode_tokens(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def kv_connector_block_state(self) -> Any: ...


class CopyWork(Protocol):
    """The jobs that a step starts, by number, as the halves of the products add to it.

    Attributes:
        saves: started when the step's forward pass has written its KV.
        loads: started at once.
    """

    saves: dict[int, TransferSpec]
    loads: dict[int, TransferSpec]


@dataclass(slots=True, eq=False)
class _Job:
    block_ids: list[int]
    ranks_left: int
    end: End
    soon_until: float
    failure: str | None = None


class CopyLedger:
    """Starts and ends jobs, and holds their blocks meanwhile.

    Args:
        pool: vLLM's blocks.
        ranks: workers that report each job.
        clock: seconds, monotonic.

    Attributes:
        revoked: jobs that were revoked since the last `take_revoked`, and have not ended.
        block_copies: pairs of blocks. vLLM copies the first of each to the second in the step that
            is being built, before its forward pass; whoever builds the step takes them.
    """

    def __init__(self, pool: EnginePool, ranks: int, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._ranks = ranks
        self._clock = clock
        self._ids = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self.revoked: set[int] = set()
        self.block_copies: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        """Whether a job is under way, whose blocks come free without any request's doing."""
        return bool(self._jobs)

    def start(self, blocks: BlockSpans, end: End, *, soon: float = math.inf) -> int:
        """Start a job; returns its number. The workers are told of it with this step.

        Args:
            blocks: what it copies, to or from.
            end: see `End`.
            soon: seconds in which it is expected to end, whatever the network does.
        """
        job_id = next(self._ids)
        # A block that is divided has an entry for each shard, and one reference serves all of them.
        block_ids = list(dict.fromkeys(blocks.held))
        self._pool.touch([self._pool.blocks[each] for each in block_ids])
        self._jobs[job_id] = _Job(block_ids, self._ranks, end, self._clock() + soon)
        return job_id

    @contextmanager
    def copied(self, block_ids: Sequence[int]) -> Iterator[list[int] | None]:
        """Have vLLM copy blocks that the step overwrites, before its forward pass.

        Within the context, jobs are started that hold the copies. Copies that none holds are not
        made.

        Args:
            block_ids: of a step that is being built.

        Yields:
            The ids of the copies; None if so few blocks are free that requests may need them.
        """
        pool = self._pool
        number = len(block_ids)
        if pool.get_num_free_blocks() - number < len(pool.blocks) // _SPARE_PART:
            yield None
            return
        copies = pool.get_new_blocks(number)
        try:
            yield [each.block_id for each in copies]
        finally:
            pool.free_blocks(copies)
            pairs = zip(block_ids, copies, strict=True)
            self.block_copies += [(source, each.block_id) for source, each in pairs if each.ref_cnt]

    def is_free(self, block_id: int) -> bool:
        """Whether neither a request nor a job holds a block."""
        return self._pool.blocks[block_id].ref_cnt == 0

    def blocks_of(self, job_ids: Iterable[int]) -> set[int]:
        """The blocks of these jobs, without the jobs that have ended."""
        jobs = (self._jobs.get(each) for each in job_ids)
        return {block_id for job in jobs if job is not None for block_id in job.block_ids}

    def revoke(self, job_ids: Iterable[int]) -> None:
        """Tell the workers to stop jobs that nobody wants any more; they end all the same."""
        self.revoked.update(job_id for job_id in job_ids if job_id in self._jobs)

    def withdraw(self, job_id: int) -> None:
        """End a job of which no worker was told, as cancelled. It copies nothing: one that is
        revoked may end well before the workers hear of that."""
        job = self._jobs.pop(job_id)
        self.revoked.discard(job_id)
        self._let_go(job)
        job.end(CANCELLED)

    def take_revoked(self) -> list[int]:
        """Jobs that were revoked since the last call, and have not ended."""
        revoked = sorted(self.revoked)
        self.revoked = set()
        return revoked

    def report(self, done: Mapping[int, int], failed: Mapping[int, str]) -> None:
        """What the workers say: how many ranks ended each job, and on which it failed."""
        for job_id, ranks in done.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.ranks_left -= ranks
            job.failure = job.failure or failed.get(job_id)
            if job.ranks_left <= 0:
                del self._jobs[job_id]
                self.revoked.discard(job_id)
                self._let_go(job)
                job.end(job.failure)

    def _let_go(self, job: _Job) -> None:
        block_ids, job.block_ids = job.block_ids, []
        # In this order, so that vLLM evicts the end of a prefix before its beginning.
        self._pool.free_blocks([self._pool.blocks[each] for each in reversed(block_ids)])

    @property
    def holds_alone(self) -> bool:
        """Whether jobs hold blocks, and nothing else holds any."""
        held = Counter(each for job in self._jobs.values() for each in job.block_ids)
        blocks = self._pool.blocks
        used = len(blocks) - self._pool.get_num_free_blocks() - 1  # vLLM's null block is never free
        return (
            bool(held)
            and used == len(held)
            and all(blocks[each].ref_cnt == count for each, count in held.items())
        )

    def settle(self, ended: Callable[[Collection[int]], Collection[int] | None]) -> None:
        """Wait `SETTLE_S` seconds at most until no job touches its blocks, and let go of them. The
        jobs end later, with the reports of the workers.

        Args:
            ended: given jobs, returns those of them that have ended on every rank; None if the
                ranks cannot be asked.
        """
        deadline = self._clock() + SETTLE_S
        while waiting := [job_id for job_id, job in self._jobs.items() if job.block_ids]:
            over = ended(waiting)
            if over is None:
                return
            for job_id in over:
                self._let_go(self._jobs[job_id])
            if not over:
                if self._clock() >= deadline:
                    return
                time.sleep(_LOOK_S)

    def frees_soon(self) -> bool:
        """Whether blocks that nothing but a copy holds come free sooner than a preemption pays."""
        now = self._clock()
        blocks = self._pool.blocks
        return any(
            now < job.soon_until and any(blocks[each].ref_cnt == 1 for each in job.block_ids)
            for job in self._jobs.values()
        )
