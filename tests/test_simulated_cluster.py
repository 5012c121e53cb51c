# SPDX-License-Identifier: Apache-2.0
"""Engines in simulated time say as much to each other as docs/internals/scale.md has it."""

import sys
from pathlib import Path

import pytest

from omni_connector.handoff import channel

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def cluster_of(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = pytest.importorskip("many_engines")
    yield module.cluster_of
    for name in ("many_engines", "simulated_cluster", "cluster"):
        sys.modules.pop(name, None)


def said(engines, direction, kind):
    return sum(each.messages[direction, kind] for each in engines)


def test_each_pair_meets_once_and_a_hand_off_is_three_messages(cluster_of):
    cluster = cluster_of(4, 3)
    cluster.run(1000.0, 0.5)
    cluster.agenda.run(cluster.agenda.now + 1.0)  # the last leases end
    done = len(cluster.outcome.waits)
    assert done > 300
    assert not cluster.outcome.failures
    assert said(cluster.decode, "out", "Handshake") == 4 * 3
    assert said(cluster.prefill, "out", "HandshakeReply") == 4 * 3
    for kind, side in (
        ("LeaseRequest", cluster.prefill),
        ("LeaseGranted", cluster.decode),
        ("Release", cluster.prefill),
    ):
        assert said(side, "in", kind) == done
    assert [each.connections for each in cluster.prefill] == [3] * 4
    assert [each.directory.usage()[2] for each in cluster.prefill] == [0] * 4


def test_a_run_is_the_same_each_time(cluster_of):
    waits = []
    for _ in range(2):
        cluster = cluster_of(3, 3)
        cluster.run(500.0, 0.5)
        waits.append(cluster.outcome.waits)
    assert waits[0] == waits[1]


def test_beyond_the_limit_of_peers_hand_offs_connect_anew(cluster_of, monkeypatch):
    monkeypatch.setattr(channel, "MAX_PEERS", 2)
    cluster = cluster_of(4, 1)
    cluster.run(20.0, 20.0)  # leases end before the next request, mostly
    done = len(cluster.outcome.waits)
    assert cluster.decode[0].links_made > done // 4
    assert sum(each.connections for each in cluster.prefill) == 2


def test_a_prefill_engine_that_starts_anew_is_met_anew(cluster_of):
    cluster = cluster_of(2, 3)
    cluster.run(500.0, 0.5)
    cluster.restart(0, 0.5)
    cluster.run(500.0, 1.0)
    assert [each.links_made for each in cluster.decode] == [3, 3, 3]
    assert cluster.prefill[0].connections == 3
    assert "no prefill engine" in cluster.outcome.failures
