# SPDX-License-Identifier: Apache-2.0
"""What the two halves tell each other, through vLLM's own channels."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from omni_connector.transports.base import Endpoint

Block = tuple[int, int]
"""(position of the group among the transferred ones, logical index in the request)."""


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Blocks of one group and the slots they are copied to or from, pairwise."""

    group: int
    block_ids: list[int]
    slots: list[int]
    generations: list[int]
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy blocks to this engine's own slots."""

    job_id: int
    runs: list[CopyRun]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy a peer's slots to blocks.

    Attributes:
        job_id: names the job in the worker's report.
        request_id: the request that waits for it.
        arenas: the peer's arenas, one a rank.
        runs: what to copy.
        timeout: seconds from its arrival until the job is given up.
    """

    job_id: int
    request_id: str
    arenas: tuple[Endpoint, ...]
    runs: list[CopyRun]
    timeout: float


@dataclass(slots=True)
class OmniConnectorMetadata(KVConnectorMetadata):
    """Work for the workers, sent with each step.

    Attributes:
        saves: started when the step's forward pass has written its KV.
        loads: started at once.
        fence: save jobs whose blocks this step may overwrite: cancelled or waited for first.
        finish_after: request id and the save jobs after which its blocks may be freed.
    """

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)
    finish_after: list[tuple[str, list[int]]] = field(default_factory=list)


@dataclass(slots=True)
class OmniWorkerMetadata(KVConnectorWorkerMetadata):
    """Jobs that ended since the last step.

    Attributes:
        done: ranks that have finished each job.
        failed: why a job failed or was cancelled, on any rank.
    """

    done: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "OmniWorkerMetadata":
        """Add up the reports of two ranks."""
        assert isinstance(other, OmniWorkerMetadata)
        done = dict(self.done)
        for job_id, ranks in other.done.items():
            done[job_id] = done.get(job_id, 0) + ranks
        return OmniWorkerMetadata(done, {**other.failed, **self.failed})


@dataclass(frozen=True, slots=True)
class OmniHandshakeMetadata(KVConnectorHandshakeMetadata):
    """What a worker tells its scheduler half once the KV caches are registered.

    Attributes:
        endpoint: where peers find this rank's arena; None on an engine that hands nothing off.
        group_bytes: bytes of one block, one entry a transferred group.
        page_order: order of heads, tokens and content in a layer's page.
    """

    endpoint: Endpoint | None
    group_bytes: tuple[int, ...]
    page_order: str
