# SPDX-License-Identifier: Apache-2.0
"""What the two halves tell each other.

vLLM carries it. But MultiConnector passes on the handshake metadata of one of its children only, to
all of them. So beside other connectors the workers introduce themselves at their ranks' sockets.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from omni_connector.config import OmniConfig
from omni_connector.copy.pinning import PinnedBytes
from omni_connector.errors import ConfigError, OmniError
from omni_connector.identity.adapters import AdapterLoad
from omni_connector.identity.epochs import RankWeights
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import TransferSpec
from omni_connector.net.introductions import introduced
from omni_connector.net.runtime import runtime_dir
from omni_connector.transports.base import Endpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(slots=True)
class OmniConnectorMetadata(KVConnectorMetadata):
    """Work for the workers, sent with each step.

    Attributes:
        saves: jobs that start when the step's forward pass has written its KV, by number.
        loads: jobs that start at once.
        cancel: jobs of whatever kind that nobody wants any more.
        idle: whether the step computes nothing.
        weights_asked: number of the question which weights the ranks have; 0 asks nothing.
        void: slots, and a generation for each, so that who reads them learns that they are void.
    """

    saves: dict[int, TransferSpec] = field(default_factory=dict)
    loads: dict[int, TransferSpec] = field(default_factory=dict)
    cancel: list[int] = field(default_factory=list)
    idle: bool = False
    weights_asked: int = 0
    void: tuple[list[int], list[int]] = ([], [])

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # Each step is pickled, and most steps have no work: then half the bytes in half the time.
        cls = type(self)
        if not (self.saves or self.loads or self.cancel or self.weights_asked or self.void[0]):
            return cls, ({}, {}, [], True) if self.idle else ()
        fields = self.saves, self.loads, self.cancel, self.idle, self.weights_asked, self.void
        return cls, fields


@dataclass(slots=True)
class WorkerReport:
    """Jobs that have ended since the last step, loaded adapters, weights, and pinned memory.

    It goes with a worker's statistics (`OmniStats.report`), which all model runners pass on: those
    before vLLM 0.30 pass on no worker metadata.

    Attributes:
        done: number of ranks that have finished each job, by job id.
        failed: why a job failed or was cancelled, on any rank, by job id.
        adapters: that ranks have loaded.
        weights: answers to the question which they have.
        pinned: what the device of a rank has pinned of arenas, by rank.
    """

    done: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    adapters: list[AdapterLoad] = field(default_factory=list)
    weights: list[RankWeights] = field(default_factory=list)
    pinned: dict[int, PinnedBytes] = field(default_factory=dict)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """Add up the reports of two ranks."""
        done = dict(self.done)
        for job_id, ranks in other.done.items():
            done[job_id] = done.get(job_id, 0) + ranks
        failed = {**other.failed, **self.failed}
        return WorkerReport(
            done,
            failed,
            [*self.adapters, *other.adapters],
            [*self.weights, *other.weights],
            {**self.pinned, **other.pinned},
        )


@dataclass(frozen=True, slots=True)
class OmniHandshakeMetadata(KVConnectorHandshakeMetadata):
    """What a worker tells its scheduler half once the KV caches are registered.

    Attributes:
        endpoints: where peers find this rank's arena, one for each transport; none on an engine
            that hands nothing off.
        groups: the transferred groups. Only workers know the specs of all layers: vLLM tells the
            scheduler half one spec for a group of several.
        scales: digest of the layers' scales; see `kernels.scales_id`.
        stripes: ranks over which the slots of the pipeline stage are spread; see `kv.stripes`.
        shards: into how many a block is divided, in the groups of which blocks are.
    """

    endpoints: tuple[Endpoint, ...]
    groups: tuple[GroupShape, ...]
    scales: str = ""
    stripes: int = 1
    shards: int = 1

    def encode(self) -> bytes:
        """The bytes that `decode` reads."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> "OmniHandshakeMetadata":
        """Read what `encode` made.

        Raises:
            ValueError: it is malformed.
        """
        return msgspec.msgpack.decode(content, type=cls)


def introduced_workers(
    config: OmniConfig, vllm_config: "VllmConfig"
) -> dict[tuple[int, int], OmniHandshakeMetadata]:
    """What the workers of this engine tell at their sockets, by (pipeline rank, tensor rank).

    Raises:
        ConfigError: a worker tells nothing.
    """
    folder, engine_id, ranks = ranks_of(config, vllm_config)
    tensor_ranks = vllm_config.parallel_config.tensor_parallel_size
    found = {}
    for rank in range(ranks):
        try:
            content = introduced(folder, engine_id, rank)
            found[divmod(rank, tensor_ranks)] = OmniHandshakeMetadata.decode(content)
        except (OmniError, ValueError) as error:
            raise ConfigError(
                f"worker {rank} of OmniKVConnector has not introduced itself: {error}; beside "
                "other connectors all workers must be on the host of the scheduler"
            ) from error
    return found


def ranks_of(config: OmniConfig, vllm_config: "VllmConfig") -> tuple[Path, str, int]:
    """The folder with the sockets of an engine's ranks, its id, and how many they are, those of all
    pipeline stages."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.engine_id is not None
    ranks = num_workers(vllm_config)
    return runtime_dir(config.namespace), transfer.engine_id, ranks


def num_workers(vllm_config: "VllmConfig") -> int:
    """Ranks of an engine: those of all its pipeline stages. vLLM counts them stage by stage."""
    parallel = vllm_config.parallel_config
    return parallel.tensor_parallel_size * parallel.pipeline_parallel_size


def runner_ends_steps(vllm_config: "VllmConfig") -> bool:
    """Whether vLLM's runner ends each step of this rank, by `wait_for_save` and
    `clear_connector_metadata`.

    With drafts, the V1 runner does so where it drafts: in the last pipeline stage.
    """
    parallel = vllm_config.parallel_config
    ranks = num_workers(vllm_config)
    drafts_here = parallel.rank % ranks >= ranks - parallel.tensor_parallel_size
    return drafts_here or vllm_config.speculative_config is None


def num_local_workers(vllm_config: "VllmConfig") -> int:
    """Those of the ranks that a host has, where the engine spans several hosts."""
    hosts = vllm_config.parallel_config.nnodes_within_dp
    return max(1, num_workers(vllm_config) // max(1, hosts))


def num_near_ranks(vllm_config: "VllmConfig") -> int:
    """Tensor-parallel ranks, if those of a pipeline stage are known to be on one host; else 1."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    # Other executors, such as Ray's, place workers on whatever hosts they have.
    if parallel.distributed_executor_backend not in ("mp", "uni"):
        return 1
    return 1 if num_local_workers(vllm_config) % ranks else ranks
