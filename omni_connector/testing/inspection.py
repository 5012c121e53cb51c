# SPDX-License-Identifier: Apache-2.0
"""Looks inside running connectors, for tests.

Harnesses and tests that have to see, or change, what no public name tells ask here, so that the
connector's private names stand in one place. Nothing here is needed to use the connector.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omni_connector.handoff.directory import Handoff, SlotDirectory
from omni_connector.kv.copy_threads import CopyThread
from omni_connector.memory.arena import Arena
from omni_connector.memory.arena_format import SlotState, state_of
from omni_connector.prefix import store_jobs
from omni_connector.prefix.block_store import BlockStore

if TYPE_CHECKING:
    from omni_connector.vllm_v1.connector import OmniKVConnector
    from omni_connector.vllm_v1.scheduler import OmniScheduler
    from omni_connector.vllm_v1.worker import OmniWorker


def scheduler_half(connector: "OmniKVConnector") -> "OmniScheduler":
    """Return the half of a connector that vLLM's scheduler made."""
    return connector._scheduler


def worker_half(connector: "OmniKVConnector") -> "OmniWorker":
    """Return the half of a connector that a worker made."""
    return connector._worker


def halves(scheduler: Any, workers: Sequence[Any]) -> list[Any]:
    """Return the scheduler half, then the worker halves; none of connectors that are not ours."""
    from omni_connector.vllm_v1.connector import OmniKVConnector

    if not isinstance(scheduler, OmniKVConnector):
        return []
    ours = [each for each in workers if isinstance(each, OmniKVConnector)]
    return [scheduler_half(scheduler), *map(worker_half, ours)]


def directory(half: "OmniScheduler") -> SlotDirectory | None:
    """Return what an engine keeps of its slots; None where it hands nothing off."""
    return half._directory


def handoffs(half: "OmniScheduler") -> list[Handoff]:
    """Return the hand-offs that are open, oldest first."""
    found = directory(half)
    return [] if found is None else list(found._handoffs.values())


def lease_answer(half: "OmniScheduler", request_id: str, timeout: float) -> object:
    """Wait for the peer's answer to a request's lease request. Raises what it failed with."""
    assert half._receiver is not None
    future = half._receiver._loads[request_id].future
    assert future is not None
    return future.result(timeout)


def arena(half: "OmniWorker") -> Arena:
    """Return the arena of a rank."""
    assert half._arena is not None
    return half._arena


def loads_under_way(half: "OmniWorker") -> int:
    """Return of how many requests a rank loads KV."""
    return sum(bool(spec.request_id) for spec in half._under_way.values())


def copies_ended(half: "OmniWorker") -> bool:
    """Whether all copies to and from KV blocks have ended that a rank has started."""
    threads = [half._saves, half._loads]
    if half._store_jobs is not None:
        threads.append(half._store_jobs.loads)
    return all(map(_has_no_job, threads))


def follows(half: "OmniWorker") -> bool:
    """Whether a rank's saves have copied all layers that the forward pass has told of."""
    thread = half._saves
    with thread._changed:
        return thread._running is None and all(job.waits for job in thread._queue)


def is_published(arena: Arena, slot: int) -> bool:
    """Whether readers may read a slot."""
    words, first = arena._locate(slot)
    return state_of(words[first + 1]) == SlotState.PUBLISHED


def stored(half: "OmniWorker") -> bool:
    """Whether nothing is on its way from a rank to the shared store."""
    # A save that waits has yet to take its memory, and a put has that still.
    jobs = half._store_jobs
    assert jobs is not None
    return _has_no_job(half._saves) and jobs._staging.qsize() == store_jobs._STAGING_BUFFERS


def _has_no_job(thread: CopyThread) -> bool:
    with thread._changed:  # a job is moved from the queue in two steps
        return not (thread._queue or thread._running)


def store(half: "OmniWorker") -> BlockStore:
    """Return a rank's client of the shared store."""
    assert half._store_jobs is not None
    return half._store_jobs._store


def hold_no_blocks(half: "OmniScheduler") -> None:
    """Have copies hold no KV block any more: the negative control of what their references do."""
    ledger = half._ledger
    assert ledger is not None
    block = SimpleNamespace(ref_cnt=2)
    pool: Any = SimpleNamespace(
        blocks=[block] * len(ledger._pool.blocks),
        touch=lambda blocks: None,
        free_blocks=lambda blocks: None,
    )
    ledger._pool = pool
