# SPDX-License-Identifier: Apache-2.0
"""A rank on a host of two nodes, which the test makes up: where its threads and its arena are."""

import os
import threading

import pytest

from omni_connector.arena import memory_nodes
from omni_connector.arena.arena import Arena
from omni_connector.vllm_v1 import worker as worker_half

from .harness import hand_off, prompt, wait

pytestmark = pytest.mark.vllm

CORES = sorted(os.sched_getaffinity(0))
PROMPT = prompt(80)


class TwoNodes(memory_nodes.MemoryNodes):
    """One node has the first core of this process, the other all others; the rank's is `node`."""

    node: int | None = 1
    preferred: "list[int]" = []  # noqa: RUF012 - a test sets it anew

    def cores(self):
        return {0: frozenset(CORES[:1]), 1: frozenset(CORES[1:])}

    def of_rank(self, pinned, pci=None):
        return self.node

    def prefer(self, memory, node):
        self.preferred.append(node)
        return True


@pytest.fixture
def two_nodes(monkeypatch):
    if len(CORES) < 2:
        pytest.skip("a process of one core")
    monkeypatch.setattr(TwoNodes, "preferred", [])
    monkeypatch.setattr(worker_half, "MemoryNodes", TwoNodes)
    monkeypatch.setattr("omni_connector.arena.arena.MemoryNodes", TwoNodes)
    return TwoNodes


def threads_of(name):
    return [each.native_id for each in threading.enumerate() if each.name == name]


def test_copies_and_arena_are_on_the_node_of_the_rank(engine, two_nodes, tokens):
    before = {name: threads_of(name) for name in ("omni-save", "omni-load")}
    prefill = engine("kv_producer")
    assert two_nodes.preferred == [1]
    for name, old in before.items():
        (made,) = set(threads_of(name)) - set(old)
        wait(lambda made=made: os.sched_getaffinity(made) == set(CORES[1:]))
    decode = engine("kv_consumer")
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert two_nodes.preferred == [1]  # never by a reader, whose mapping is another's memory


def test_where_nothing_is_to_be_placed_the_kernel_is_not_asked(engine, two_nodes, monkeypatch):
    monkeypatch.setattr(two_nodes, "node", None)
    engine("kv_producer")
    assert two_nodes.preferred == []


def test_a_mapping_that_the_kernel_refuses_to_place_is_an_arena_like_any(monkeypatch, two_nodes):
    monkeypatch.setattr(two_nodes, "prefer", lambda self, memory, node: False)
    with Arena.create(1, 4096, node=1) as arena:
        arena.begin_write(0, 1)
        arena.publish(0, 1, b"", 0, 0)
        assert arena.verify(0, 1)
