# SPDX-License-Identifier: Apache-2.0
"""Model runners of the time before vLLM 0.30, which others still maintain for newer versions.

An example is a runner with the `KVConnectorModelRunnerMixin` of that time. Such a runner loads
before the forward pass, calls `wait_for_save` only after one, and calls `get_finished` instead of
`get_transfer_results`. It may allocate one tensor for all layers. It passes on neither loads that
failed as a whole nor the workers' metadata. All that only such runners need is in this module.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_connector.errors import LayoutError
from omni_connector.vllm_v1.compat import worker_stats
from omni_connector.vllm_v1.metadata import OmniWorkerMetadata
from omni_connector.vllm_v1.metrics import OmniStats

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.outputs import KVConnectorOutput

    from omni_connector.vllm_v1.worker import OmniWorker


class OlderRunnerCalls(ABC):
    """What only older model runners call of a connector's worker half."""

    @property
    @abstractmethod
    def _worker(self) -> "OmniWorker": ...

    @abstractmethod
    def _listen(self) -> None: ...

    @abstractmethod
    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """What newer model runners call instead of `get_finished`."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """In one tensor of all layers a block is one segment of bytes, not one a layer, and is
        copied faster."""
        return True

    def register_cross_layers_kv_cache(
        self, kv_cache: "torch.Tensor", attn_backend: "type[AttentionBackend]"
    ) -> None:
        """Register that tensor instead of one for each layer."""
        self._worker.register_cross_layers(kv_cache, cross_layer_dims(attn_backend))
        self._listen()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose saves and whose loads have ended."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None


class ReportPath:
    """Learns how the workers' reports reach the scheduler half, from what the model runner calls.

    Runners of 0.30 and later ask for the report in each step (`build_connector_worker_meta`).
    Older ones do not, so the report goes with the statistics (`ReportingStats`). A load must not be
    called finished before the report that says how it ended, so no load is called finished before
    the end of the first step, when the path is known.

    Attributes:
        known: whether a step has ended.
        by_stats: whether the runner does not ask for the report.
        by_metadata: whether it has asked for the report of a step. Then it does so in each, and
            nothing more is to be learnt.
    """

    def __init__(self) -> None:
        self.known = False
        self.by_stats = False
        self.by_metadata = False
        self._asked = False

    def step_begins(self) -> None:
        """The runner has bound the metadata of a step."""
        self._asked = False

    def asked(self) -> None:
        """The runner asks for the report."""
        self._asked = True

    def step_ends(self) -> bool:
        """The runner has cleared the metadata of a step; returns `by_metadata`."""
        self.known = True
        self.by_stats = not self._asked
        self.by_metadata = self._asked
        return self.by_metadata

    def add_report(self, stats: OmniStats | None, worker: "OmniWorker") -> OmniStats | None:
        """Add a worker's report to what it has counted."""
        report = worker.take_report()
        if stats is None and report is None:
            return None
        return ReportingStats(stats.data if stats is not None else {}, report)


@dataclass
class ReportingStats(OmniStats):
    """Statistics of a worker that carry its report, for runners before 0.30; see `ReportPath`."""

    report: OmniWorkerMetadata | None = None

    def aggregate(self, other: "KVConnectorStats") -> "ReportingStats":
        """Add up the statistics and the reports of two ranks."""
        super().aggregate(other)
        if isinstance(other, ReportingStats) and other.report is not None:
            self.report = (
                other.report if self.report is None else self.report.aggregate(other.report)
            )
        return self


def carried_report(output: "KVConnectorOutput") -> OmniWorkerMetadata | None:
    """The workers' report, if it came with the statistics, as with runners before 0.30."""
    stats = worker_stats(output)
    return stats.report if isinstance(stats, ReportingStats) else None


def tells_failure(output: "KVConnectorOutput", request_id: str) -> bool:
    """Whether vLLM hears from the runner that the load of this request has failed as a whole.

    Runners before 0.30 do not pass that on.
    """
    return request_id in output.failed_recving


def cross_layer_dims(attn_backend: Any) -> str:
    """The dimensions of the one tensor of all layers that older runners allocate.

    One letter for each, in the order of the tensor: L layers, B blocks, N tokens, H heads, C
    content, to which the pair of K and V belongs. An example is `BLCNHC`.

    Raises:
        LayoutError: the backend puts into one dimension what must be told apart.
    """
    sizes = {"B": 7, "N": 64, "H": 8, "C": 128}

    def shape(**changed: int) -> tuple[int, ...]:
        blocks, tokens, heads, content = (sizes | changed).values()
        return tuple(attn_backend.get_kv_cache_shape(blocks, tokens, heads, content))

    usual = shape()
    # A dimension belongs to the argument that it grows with.
    grown = {letter: shape(**{letter: 2 * size}) for letter, size in sizes.items()}
    names = ["L"]
    for i, size in enumerate(usual):
        letters = [letter for letter in sizes if grown[letter][i] != size]
        if "C" in letters:
            letters = [letter for letter in letters if letter != "H"]  # heads within the content
        if len(letters) > 1:
            raise LayoutError(
                f"{attn_backend.__name__}: dimension {i} of its KV cache {usual} holds several "
                f"things: {letters}"
            )
        names += letters or ["C"]
    try:
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    except (AttributeError, NotImplementedError):  # the runner then allocates it unchanged
        order = range(len(names))
    return "".join(names[i] for i in order)
