# SPDX-License-Identifier: Apache-2.0
"""What the connector counts, for vLLM's log line and for Prometheus.

Each half counts in an `OmniStats`. vLLM carries these to the API server with each step, and adds up
what the ranks and the halves report. Durations are in seconds, sizes in bytes. The names of what is
counted are in `runtime.metric_names`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from omni_connector.config import OmniConfig
from omni_connector.net.status import label
from omni_connector.runtime.metric_names import COUNTERS, FAILURE, GAUGES, MISSED, PEER, SECONDS
from omni_connector.runtime.stats import THREAD_ENDED
from omni_connector.runtime.turns import take_ended_threads
from omni_connector.vllm_v1.live_gauges import LiveGauges
from omni_connector.vllm_v1.metadata import WorkerReport

_SECONDS_BUCKETS: Final = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30]


@dataclass
class OmniStats(KVConnectorStats):
    """What was counted since the last report.

    `data` consists of plain dicts: `counts` by name (of failures as `failure:<kind>`, of missed
    tokens as `missed:<cause>`, of peers as `peer:<transport>:<reason>`), lists of `seconds` by
    name, and `gauges` by name. `taken` says when the gauges were, in seconds of Unix time. `report`
    is what a worker tells the scheduler half, which takes it out.
    """

    report: WorkerReport | None = None

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, dict[str, Any]] = {"counts": {}, "seconds": {}, "gauges": {}}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of `COUNTERS`."""
        counts = self.data["counts"]
        counts[name] = counts.get(name, 0) + amount

    def fail(self, kind: str, number: int = 1) -> None:
        """Count failures of this kind."""
        self.count(FAILURE + kind, number)

    def fail_ended_threads(self) -> None:
        """Count the threads of this process that an exception has ended since the last call."""
        for name in take_ended_threads():
            self.fail(THREAD_ENDED + name)

    def miss(self, cause: str, tokens: int) -> None:
        """Count tokens of prompts that are computed because no cache had them."""
        self.count(MISSED + cause, tokens)

    def choose(self, transport: str, reason: str) -> None:
        """Count an arena of a peer that this transport reads."""
        self.count(f"{PEER}{transport}:{reason}")

    def time(self, name: str, seconds: float) -> None:
        """Record one of `SECONDS`."""
        self.data["seconds"].setdefault(name, []).append(seconds)

    def gauge(self, name: str, value: int) -> None:
        """Set one of `GAUGES`."""
        self.data["gauges"][name] = value

    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return self.report is None and not any(self.data.values())

    def take(self) -> "OmniStats | None":
        """What was recorded since the last call; None where nothing was."""
        data, report = self.data, self.report
        if not (data["counts"] or data["seconds"] or data["gauges"] or report):
            return None
        if data["gauges"]:
            data["taken"] = {"gauges": time.time()}
        taken = OmniStats(data, report)
        self.report = None
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> "OmniStats":
        """Add what `other` recorded to this one."""
        for name, amount in other.data.get("counts", {}).items():
            self.count(name, amount)
        for name, values in other.data.get("seconds", {}).items():
            self.data["seconds"].setdefault(name, []).extend(values)
        self.data["gauges"].update(other.data.get("gauges", {}))
        if taken := other.data.get("taken"):
            self.data["taken"] = taken
        if isinstance(other, OmniStats) and other.report is not None:
            self.report = (
                other.report if self.report is None else self.report.aggregate(other.report)
            )
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's log: totals but zeros, mean milliseconds, failures by kind."""
        counts = self.data["counts"]
        out: dict[str, int | float] = {}
        for name in COUNTERS:
            if not (number := counts.get(name)):
                continue
            if name.startswith("bytes_"):
                out["MB " + name.removeprefix("bytes_").replace("_", " ")] = round(number / 1e6, 1)
            else:
                out[name.replace("_", " ")] = number
        for name, values in self.data["seconds"].items():
            out[f"mean {name} ms"] = round(1e3 * sum(values) / len(values), 2)
        for name, number in counts.items():
            if name.startswith(FAILURE):
                out[f"failed: {name.removeprefix(FAILURE)}"] = number
            elif name.startswith(MISSED):
                out[f"tokens missed: {name.removeprefix(MISSED)}"] = number
            elif name.startswith(PEER):
                out[f"peers by {name.removeprefix(PEER).split(':')[0]}"] = number
        for name, value in self.data["gauges"].items():
            out[name.replace("_", " ")] = value
        return out


class OmniPromMetrics(KVConnectorPromMetrics):
    """The same for Prometheus, as `vllm:omni_connector_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram, gauge = (metric_types[t] for t in (Counter, Histogram, Gauge))

        def each(
            make: Callable[..., Any], texts: dict[str, str], suffix: str, **more: Any
        ) -> dict[str, Any]:
            return {
                name: make(
                    name=f"vllm:omni_connector_{name}{suffix}",
                    documentation=text,
                    labelnames=labelnames,
                    **more,
                )
                for name, text in texts.items()
            }

        self._counters = each(counter, COUNTERS, "")
        self._seconds = each(histogram, SECONDS, "_seconds", buckets=_SECONDS_BUCKETS)
        self._gauges = each(gauge, GAUGES, "", multiprocess_mode="mostrecent")
        self._failures = counter(
            name="vllm:omni_connector_failures",
            documentation="Hand-offs and loads that did not happen, and other failures, by kind.",
            labelnames=[*labelnames, "kind"],
        )
        self._missed = counter(
            name="vllm:omni_connector_tokens_missed",
            documentation="Prompt tokens that no cache had, by cause.",
            labelnames=[*labelnames, "cause"],
        )
        self._peers = counter(
            name="vllm:omni_connector_peers",
            documentation="Arenas of peers that are read, by transport and why it was taken.",
            labelnames=[*labelnames, "transport", "reason"],
        )
        info = gauge(
            name="vllm:omni_connector_engine_info",
            documentation="1; the labels are those of `omni-connector top`.",
            labelnames=[*labelnames, "engine_id", "name", "role"],
            multiprocess_mode="mostrecent",
        )
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        ids = {index: _engine_id(vllm_config, index) for index in per_engine_labelvalues}
        for index, values in per_engine_labelvalues.items():
            for metric in (*self._counters.values(), *self._gauges.values()):
                metric.labels(*values)  # so that an unused counter reads 0
            info.labels(*values, ids[index], label(ids[index]), str(transfer.kv_role)).set(1)
        namespace = OmniConfig.load(transfer.kv_connector_extra_config).namespace
        self._ids = ids
        self._live = LiveGauges(
            namespace,
            {
                ids[index]: {name: each.labels(*values) for name, each in self._gauges.items()}
                for index, values in per_engine_labelvalues.items()
            },
        )
        self._live.start()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one engine reported."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.get("counts", {}).items():
            if name.startswith(FAILURE):
                self._failures.labels(*values, name.removeprefix(FAILURE)).inc(amount)
            elif name.startswith(MISSED):
                self._missed.labels(*values, name.removeprefix(MISSED)).inc(amount)
            elif name.startswith(PEER):
                self._peers.labels(*values, *name.removeprefix(PEER).split(":")).inc(amount)
            else:
                self._counters[name].labels(*values).inc(amount)
        for name, durations in transfer_stats_data.get("seconds", {}).items():
            for duration in durations:
                self._seconds[name].labels(*values).observe(duration)
        gauges = transfer_stats_data.get("gauges", {})
        for name, value in gauges.items():
            self._gauges[name].labels(*values).set(value)
        if gauges:
            taken = transfer_stats_data.get("taken", {})
            self._live.step(self._ids[engine_idx], taken.get("gauges", 0.0))


def _engine_id(vllm_config: VllmConfig, index: int) -> str:
    """The id of an engine of this server, as vLLM makes it for data-parallel ranks."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    several = vllm_config.parallel_config.data_parallel_size > 1
    return f"{transfer.engine_id}_dp{index}" if several else str(transfer.engine_id)
