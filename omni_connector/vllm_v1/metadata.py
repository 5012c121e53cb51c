# SPDX-License-Identifier: Apache-2.0
"""What the two halves tell each other; vLLM carries it."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from omni_connector.kv.spans import TransferSpec
from omni_connector.transports.base import Endpoint


@dataclass(slots=True)
class OmniConnectorMetadata(KVConnectorMetadata):
    """Work for the workers, sent with each step.

    Attributes:
        saves: jobs that start when the step's forward pass has written its KV, by number.
        loads: jobs that start at once.
        cancel: jobs of whatever kind that nobody wants any more.
        void: slots, and a generation for each, so that who reads them learns that they are void.
    """

    saves: dict[int, TransferSpec] = field(default_factory=dict)
    loads: dict[int, TransferSpec] = field(default_factory=dict)
    cancel: list[int] = field(default_factory=list)
    void: tuple[list[int], list[int]] = ([], [])


@dataclass(slots=True)
class OmniWorkerMetadata(KVConnectorWorkerMetadata):
    """Jobs that have ended since the last step.

    Attributes:
        done: number of ranks that have finished each job, by job id.
        failed: why a job failed or was cancelled, on any rank, by job id.
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
        endpoints: where peers find this rank's arena, one for each transport; none on an engine
            that hands nothing off.
        page_orders: byte order of each layer's page, by transferred group.
        attention: attention backends, by transferred group.
        scales: digest of the layers' scales; see `kernels.scales_id`.
    """

    endpoints: tuple[Endpoint, ...]
    page_orders: tuple[tuple[str, ...], ...]
    attention: tuple[str, ...]
    scales: str = ""
