# SPDX-License-Identifier: Apache-2.0
"""A rank whose node has not all cores of the process: where its threads and its arena are."""

import os
import threading

import pytest

from omni_connector.vllm_v1 import rank_arena
from omni_connector.vllm_v1 import worker as worker_half

from .harness import hand_off, prompt, wait

pytestmark = pytest.mark.vllm

CORES = sorted(os.sched_getaffinity(0))
PROMPT = prompt(80)


def threads_of(name):
    return [each.native_id for each in threading.enumerate() if each.name == name]


def test_copies_and_arena_are_near_to_the_rank(engine, monkeypatch, tokens):
    if len(CORES) < 2:
        pytest.skip("a process of one core")
    near, asked = frozenset(CORES[1:]), []
    create = rank_arena.Arena.create
    monkeypatch.setattr(worker_half, "near_cores", lambda *of: near)
    monkeypatch.setattr(
        rank_arena.Arena,
        "create",
        lambda *size, cores, **how: asked.append(cores) or create(*size, cores=cores, **how),
    )
    before = {name: threads_of(name) for name in ("omni-save", "omni-load")}
    prefill = engine("kv_producer")
    assert asked == [near]
    for name, old in before.items():
        (made,) = set(threads_of(name)) - set(old)
        wait(lambda made=made: os.sched_getaffinity(made) == near)
    decode = engine("kv_consumer")
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
