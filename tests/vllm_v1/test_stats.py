# SPDX-License-Identifier: Apache-2.0
"""What engines count on the way, as vLLM logs it and as Prometheus sees it."""

import time
from copy import copy
from dataclasses import replace
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.stats import SchedulerStats

from omni_connector.copy.host import CpuCopier
from omni_connector.copy.pinning import Pinning
from omni_connector.runtime.metric_names import COUNTERS, GAUGES, SECONDS
from omni_connector.vllm_v1 import scheduler_report
from omni_connector.vllm_v1.connector import OmniKVConnector
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.worker import OmniWorker
from tests import inspection
from tests.toy import BLOCK, LAYERS, PAGE

from .harness import HANDOFF, assert_clean, hand_off, prompt, wait

pytestmark = pytest.mark.vllm

PROMPT = prompt(5 * BLOCK)
SIZE = 5 * LAYERS * PAGE


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prometheus(engine, registry):
    """The metrics of one engine, in a registry of the test's own.

    The engine's id is one that writes no status file: gauges show what a test gives them, and not
    what a living engine has written meanwhile.
    """
    metric_types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = copy(engine("kv_both").config)
    config.kv_transfer_config = replace(config.kv_transfer_config, engine_id="writes-no-file")
    return OmniKVConnector.build_prom_metrics(
        config, metric_types, ["model_name", "engine"], {0: ["toy", "0"]}
    )


@pytest.fixture
def reported(engine):
    """Stats of a prefill and a decode engine after a hand-off, a failure and an expiry."""
    prefill = engine("kv_producer", extra={"arena_gib": 0.0001})
    decode = engine("kv_consumer")
    hand_off(prefill, decode, PROMPT)
    prefill.generate(prompt(40 * BLOCK, seed=1), params=HANDOFF)
    decode.generate(prompt(40), params={"do_remote_prefill": True})
    assert_clean(prefill, decode)
    inspection.periodic_tasks(prefill.half).count("handoffs_expired")
    for each in (prefill, decode):
        each.count("")
    return prefill.stats, decode.stats


def test_each_side_counts_its_part(reported):
    prefill, decode = reported
    assert prefill.data["counts"] == {
        "handoffs_offered": 1,
        "blocks_saved": 5,
        "bytes_saved": SIZE,
        "failure:prompt_too_long": 1,
        "handoffs_expired": 1,
    }
    assert decode.data["counts"] == {
        "handoffs_received": 1,
        "tokens_loaded": 5 * BLOCK - 1,
        "blocks_loaded": 5,
        "bytes_loaded": SIZE,
        "failure:foreign_params": 1,
        "peer:shm:nearest": 1,
    }
    assert set(prefill.data["seconds"]) == {"save"}
    assert set(decode.data["seconds"]) == {"load", "claim"}
    gauges = prefill.data["gauges"]
    assert gauges == {
        "slots_in_use": 0,
        "slots_cached": 4,
        "slots_pinned": 0,
        "slots_total": 26,
        "leases": 0,
        "draining": 0,
        "offers_handoffs": 1,
        "fetches_handoffs": 0,
    }


def test_every_name_that_is_counted_is_registered(reported):
    for stats in reported:
        names = {name for name in stats.data["counts"] if ":" not in name}
        assert names <= set(COUNTERS)
        assert set(stats.data["seconds"]) <= set(SECONDS)
        assert set(stats.data["gauges"]) <= set(GAUGES)


def test_prometheus_shows_what_was_counted(reported, prometheus, registry):
    for stats in reported:
        prometheus.observe(stats.data)
    labels = {"model_name": "toy", "engine": "0"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"vllm:omni_connector_{name}", {**labels, **more})

    assert value("bytes_saved_total") == value("bytes_loaded_total") == SIZE
    assert value("handoffs_received_total") == 1
    assert value("handoffs_expired_total") == 1
    assert value("failures_total", kind="prompt_too_long") == 1
    assert value("failures_total", kind="foreign_params") == 1
    assert value("save_seconds_count") == 1
    assert value("slots_total") == 26
    assert value("slots_cached") == 4


def test_counters_of_a_fresh_engine_read_zero(prometheus, registry):
    labels = {"model_name": "toy", "engine": "0"}
    for name in COUNTERS:
        assert registry.get_sample_value(f"vllm:omni_connector_{name}_total", labels) == 0


@pytest.mark.parametrize("code", [0, 2])
def test_what_devices_have_pinned_is_told_from_the_first_step_on(engine, tokens, monkeypatch, code):
    """Of two ranks. While vLLM captures graphs, which it does before it asks for the handshake, no
    thread of ours may pin."""
    monkeypatch.setattr(CpuCopier, "pinned_at_once", 1 << 30)
    monkeypatch.setattr(CpuCopier, "pin", lambda *_: code)
    begun: list[int] = []
    begin = Pinning.begin
    monkeypatch.setattr(Pinning, "begin", lambda self: begun.append(1) or begin(self))
    registered = []
    register = OmniWorker.register_kv_caches
    monkeypatch.setattr(
        OmniWorker,
        "register_kv_caches",
        lambda *caches: register(*caches) or registered.append(len(begun)),
    )
    both = engine("kv_both", ranks=2)
    assert registered == [0, 0]
    assert len(begun) == 2  # with the handshake
    arenas = [inspection.arena(half) for half in both.halves[1:]]
    nbytes = sum(arena.slots.nbytes for arena in arenas)

    def told() -> tuple[int, int]:
        both.generate(PROMPT)
        both.count("")
        gauges = both.stats.data["gauges"]
        return gauges.get("pinned_bytes"), gauges.get("unpinned_bytes")

    wait(lambda: told() == ((nbytes, 0) if code == 0 else (0, nbytes)))
    assert_clean(both)


def test_stats_travel_as_plain_data(reported):
    for stats in reported:
        restored = OmniKVConnector.build_kv_connector_stats(stats.data)
        assert isinstance(restored, OmniStats)
        assert restored.data == stats.data
        assert not restored.is_empty()


def test_the_sides_of_an_engine_add_up(reported):
    prefill, decode = reported
    total = OmniKVConnector.build_kv_connector_stats().aggregate(prefill).aggregate(decode)
    assert total.data["counts"]["bytes_saved"] == total.data["counts"]["bytes_loaded"] == SIZE
    assert set(total.data["seconds"]) == {"save", "load", "claim"}
    line = total.reduce()
    assert line["MB saved"] == line["MB loaded"] == round(SIZE / 1e6, 1)
    assert line["handoffs offered"] == line["handoffs received"] == 1
    assert line["failed: prompt_too_long"] == 1
    assert all(isinstance(value, int | float) for value in line.values())


def test_the_line_says_each_counter_that_is_not_zero():
    stats = OmniStats()
    for name in COUNTERS:
        stats.count(name, 2_500_000)
    stats.count("bad_hints", -2_500_000)
    line = stats.reduce()
    assert len(line) == len(COUNTERS) - 1
    assert line["tokens from host"] == line["tokens kept"] == 2_500_000
    assert line["MB saved early"] == line["MB loaded"] == 2.5


def test_nothing_counted_is_empty_and_says_nothing(engine):
    empty = OmniKVConnector.build_kv_connector_stats()
    assert empty.is_empty()
    assert empty.reduce() == {}
    both = engine("kv_both")
    both.generate(prompt(40), 3)
    assert not both.stats.data["counts"]
    assert both.worker.get_kv_connector_stats() is None


def test_vllm_itself_carries_the_stats(engine):
    prefill = engine("kv_producer")
    prefill.submit(PROMPT, params=HANDOFF)
    seen: list[SchedulerStats] = []
    make_stats = prefill.scheduler.make_stats
    prefill.scheduler.make_stats = lambda *args, **kwargs: (
        seen.append(made := make_stats(*args, **kwargs)) or made
    )
    began = time.time()
    prefill.settle()
    totals = OmniStats()
    for stats in seen:
        if stats.kv_connector_stats:
            totals.aggregate(OmniKVConnector.build_kv_connector_stats(stats.kv_connector_stats))
    assert totals.data["counts"]["bytes_saved"] == SIZE
    assert totals.data["counts"]["handoffs_offered"] == 1
    assert totals.data["gauges"]["slots_in_use"] == 5
    assert totals.data["taken"]["gauges"] >= began


def test_counts_are_told_now_and_then_while_requests_run_and_at_once_at_their_end(
    engine, monkeypatch
):
    monkeypatch.setattr(scheduler_report, "_REPORT_S", 1e9)
    sharer = engine("kv_both", extra={"share": True})
    sharer.submit(PROMPT, max_tokens=3 * BLOCK)
    told: list[tuple[bool, bool]] = []
    number = 0
    make_stats = sharer.scheduler.make_stats

    def noted(*args, **kwargs):
        nonlocal number
        made = make_stats(*args, **kwargs)
        stats = made.kv_connector_stats if made is not None else None
        told.append((bool(sharer.scheduler.requests), stats is not None))
        number += (stats or {}).get("counts", {}).get("blocks_saved", 0)
        return made

    sharer.scheduler.make_stats = noted
    sharer.settle()
    # The first step tells the gauges. Blocks are saved a few steps later.
    assert [stats for running, stats in told if running] == [True, *[False] * (3 * BLOCK - 2)]
    assert number == (len(PROMPT) + 3 * BLOCK - 1) // BLOCK


@pytest.mark.parametrize("part", ["counts", "seconds", "gauges"])
def test_statistics_of_which_a_part_is_missing_are_added(part):
    """As vLLM passes them on between processes, they are what the sender knew of."""
    other = OmniStats()
    other.count("blocks_saved", 2)
    other.time("save", 0.5)
    other.gauge("slots_total", 7)
    expected = {**other.data, part: {}}
    del other.data[part]
    total = OmniStats()
    total.aggregate(other)
    assert total.data == expected
