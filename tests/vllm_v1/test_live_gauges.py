# SPDX-License-Identifier: Apache-2.0
"""Gauges of an engine that makes no step, as the API server shows them."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # noqa: E402

from omni_connector.net import status  # noqa: E402
from omni_connector.net.runtime import runtime_dir  # noqa: E402
from omni_connector.net.status import (  # noqa: E402
    SIGN_OF_LIFE_S,
    EngineStatus,
    StatusFile,
    Usage,
)
from omni_connector.vllm_v1 import live_gauges  # noqa: E402
from omni_connector.vllm_v1.live_gauges import LiveGauges  # noqa: E402
from omni_connector.vllm_v1.metrics import OmniPromMetrics  # noqa: E402

TYPES = {kind: kind for kind in (Counter, Gauge, Histogram)}


class Told:
    """A gauge that has only a value."""

    value: float = -1

    def set(self, value: float) -> None:
        self.value = value


@pytest.fixture
def engine(runtime: Path) -> Iterator[Callable[..., None]]:
    """Writes what an engine says of its arena."""
    files: dict[str, StatusFile] = {}

    def write(engine_id: str = "a", written: float | None = None, **usage: int) -> None:
        file = files.setdefault(engine_id, StatusFile(runtime_dir("default")))
        status = EngineStatus(
            engine_id=engine_id,
            role="kv_both",
            model="m",
            written=time.time() if written is None else written,
            usage=Usage(**usage),
        )
        file.write(msgspec.json.encode(status))

    yield write
    for file in files.values():
        file.close()


def test_gauges_follow_what_the_engine_has_written(engine: Callable[..., None]) -> None:
    a, b = Told(), Told()
    gauges = LiveGauges("default", {"a": {"leases": a}, "b": {"leases": b}})
    gauges.refresh()
    assert a.value == -1, "no engine has said anything"
    engine(leases=3)
    gauges.refresh()
    assert (a.value, b.value) == (3, -1)
    engine("b", leases=1)
    engine(leases=0)
    gauges.refresh()
    assert (a.value, b.value) == (0, 1)


def test_what_a_step_has_set_is_set_again(engine: Callable[..., None]) -> None:
    told = Told()
    gauges = LiveGauges("default", {"a": {"leases": told}})
    engine(leases=0)
    gauges.refresh()
    told.set(1)  # by the step that ended before the lease did
    gauges.step("a", taken=0.0)
    gauges.refresh()
    assert told.value == 0


@pytest.mark.parametrize(
    ("written", "shown"),
    [(0.0, 1), (0.4, 1), (1.0, 0), (1.5, 0), (1.0 - SIGN_OF_LIFE_S, 0)],
    ids=["before", "just-before", "same-moment", "after", "clock-set-back"],
)
def test_a_file_from_before_the_step_changes_nothing(
    engine: Callable[..., None], written: float, shown: int
) -> None:
    told = Told()
    gauges = LiveGauges("default", {"a": {"leases": told}})
    begin = 1_700_000_000.0
    told.set(1)  # the step's, in which the lease began
    gauges.step("a", taken=begin + 1.0)
    engine(written=begin + written, leases=0)
    gauges.refresh()
    assert told.value == shown
    engine(written=begin + 2.0, leases=2)
    gauges.refresh()
    assert told.value == 2


def test_a_server_reads_no_files_of_others_once_its_own_is_found(
    engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path) -> status.EngineStatus | None:
        read.append(path)
        return read_file(path)

    read_file = status.read_file
    monkeypatch.setattr(status, "read_file", counted)
    monkeypatch.setattr(live_gauges, "read_file", counted)
    for name in ("a", "other", "third"):
        engine(name, leases=3)
    told = Told()
    gauges = LiveGauges("default", {"a": {"leases": told}})
    gauges.refresh()
    assert told.value == 3
    read.clear()
    engine(leases=4)
    gauges.refresh()
    assert (told.value, len(read)) == (4, 1)


def test_an_engine_that_starts_anew_is_found(engine: Callable[..., None]) -> None:
    told = Told()
    gauges = LiveGauges("default", {"a": {"leases": told}})
    former = StatusFile(runtime_dir("default"))
    status = EngineStatus(engine_id="a", role="kv_both", model="m", usage=Usage(leases=7))
    former.write(msgspec.json.encode(status))
    gauges.refresh()
    former.close()
    gauges.refresh()
    engine(leases=1)
    gauges.refresh()
    assert told.value == 1


@pytest.fixture
def unregistered() -> Iterator[None]:
    """Metrics of one test, which Prometheus' client would keep for the process."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_metrics_of_an_idle_server_are_right(
    engine: Callable[..., None], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_gauges, "_SLOW_POLL_S", 0.05)
    transfer = SimpleNamespace(engine_id="a", kv_role="kv_both", kv_connector_extra_config={})
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=SimpleNamespace(data_parallel_size=ranks)
    )
    values: dict[int, list[object]] = {rank: ["m", str(rank)] for rank in range(ranks)}
    metrics = OmniPromMetrics(config, TYPES, ["model_name", "engine"], values)
    last = ranks - 1
    metrics.observe({"gauges": {"leases": 1, "slots_in_use": 10}}, last)
    engine("a" if ranks == 1 else f"a_dp{last}", leases=0, slots_in_use=0, slots_pinned=2)
    deadline = time.monotonic() + 60

    def shown(name: str) -> float | None:
        labels = {"model_name": "m", "engine": str(last)}
        return REGISTRY.get_sample_value(f"vllm:omni_connector_{name}", labels)

    while shown("leases") != 0 or shown("slots_pinned") != 2:
        assert time.monotonic() < deadline, "the gauges are those of the last step"
        time.sleep(0.01)
    assert shown("slots_in_use") == 0


def test_the_thread_ends_with_the_metrics(
    engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_gauges, "_SLOW_POLL_S", 0.01)
    gauges = LiveGauges("default", {"a": {}})
    thread = gauges.start()
    del gauges
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
