# SPDX-License-Identifier: Apache-2.0
"""What the two halves tell each other, through vLLM's own channels."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from omni_connector.control.messages import Fingerprint
from omni_connector.transports.base import Endpoint

NULL_BLOCK_ID: Final = 0
"""The block that vLLM puts in a table where there is none: never read, never written."""

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

    def part(self, which: slice) -> "CopyRun":
        """Some of the blocks, and their slots."""
        return CopyRun(
            self.group,
            self.block_ids[which],
            self.slots[which],
            self.generations[which],
            self.keys[which],
        )


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy blocks to this engine's own slots."""

    job_id: int
    runs: list[CopyRun]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Blocks of one group, and the slots of a peer that keeps the same bytes in another shape.

    Attributes:
        group: position of the group among the transferred ones.
        block_ids: blocks to be filled.
        indices: logical index of each of them, in blocks of this engine.
        first: logical index of the first slot, in blocks of the peer.
        slots, generations: the peer's slots from there, one a block of the peer.
    """

    group: int
    block_ids: list[int]
    indices: list[int]
    first: int
    slots: list[int]
    generations: list[int]


@dataclass(slots=True)
class LoadJob:
    """Fill blocks with a peer's slots.

    Attributes:
        request_id: the request that waits for it.
        arenas: the peer's arenas, one a rank, each in all ways that it can be read.
        timeout: seconds from its arrival until the job is given up.
        job_id: names the job in the worker's report.
        runs: blocks to be copied from slots of the same shape.
        conversions: blocks to be filled from slots of another one.
        zeros: group and blocks that vLLM has allocated and no token reads.
        source: what the peer keeps; None without conversions.
    """

    request_id: str
    arenas: tuple[tuple[Endpoint, ...], ...]
    timeout: float
    job_id: int = 0
    runs: list[CopyRun] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    zeros: list[tuple[int, list[int]]] = field(default_factory=list)
    source: Fingerprint | None = None

    def block_ids(self) -> Iterator[int]:
        """Every block that the job writes to."""
        for run in self.runs:
            yield from run.block_ids
        for conversion in self.conversions:
            yield from conversion.block_ids
        for _, block_ids in self.zeros:
            yield from block_ids


@dataclass(frozen=True, slots=True)
class StoreRun:
    """Blocks of one group and the hashes that name them in the shared store, pairwise."""

    group: int
    block_ids: list[int]
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class StoreSave:
    """Copy blocks to the shared store.

    Attributes:
        prefix: of the keys; see `key_prefix`.
    """

    job_id: int
    prefix: str
    runs: list[StoreRun]


@dataclass(frozen=True, slots=True)
class StoreLoad:
    """Fill blocks from the shared store; the attributes are as in `LoadJob`."""

    job_id: int
    request_id: str
    prefix: str
    timeout: float
    runs: list[StoreRun]
    zeros: list[tuple[int, list[int]]]


@dataclass(slots=True)
class OmniConnectorMetadata(KVConnectorMetadata):
    """Work for the workers, sent with each step.

    Attributes:
        saves: started when the step's forward pass has written its KV.
        loads: started at once.
        store_saves, store_loads: the same with the shared store.
        cancel: jobs of whatever kind that nobody wants any more.
        void: slots, and a generation for each, so that who reads them learns that they are void.
    """

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    store_saves: list[StoreSave] = field(default_factory=list)
    store_loads: list[StoreLoad] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    void: tuple[list[int], list[int]] = ([], [])


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
        endpoints: where peers find this rank's arena, for each transport; none on an engine that
            hands nothing off.
        page_orders: byte order of each layer's page, by transferred group.
        attention: attention backends, by transferred group.
        scales: of the layers; see `numerics.scales_id`.
    """

    endpoints: tuple[Endpoint, ...]
    page_orders: tuple[tuple[str, ...], ...]
    attention: tuple[str, ...]
    scales: str = ""
