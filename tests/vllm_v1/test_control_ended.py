# SPDX-License-Identifier: Apache-2.0
"""The control channel's thread has ended, whatever ended it: nobody waits, and leases still end."""

import time

import pytest

from omni_connector.runtime.turns import ended_threads
from tests import inspection
from tests.toy import BLOCK

from .harness import DEADLINE, HANDOFF, assert_clean, prompt, slots, wait

pytestmark = pytest.mark.vllm

PROMPT = prompt(3 * BLOCK + 5)


def end_control(engine) -> None:
    inspection.end_channel(inspection.channel(engine.half))
    wait(lambda: "omni-control" in ended_threads())


def test_handoffs_are_refused_at_once(engine, tokens, log):
    prefill = engine("kv_producer", extra={**slots(4), "arena_wait_s": 600.0})
    assert prefill.generate(PROMPT, params=HANDOFF).params["omni_token"]  # and the arena is full
    waiting = prefill.submit(PROMPT[::-1], params=HANDOFF)
    prefill.step()
    assert not prefill.done(waiting)
    end_control(prefill)
    late = prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: prefill.done(waiting, late))
    for each in waiting, late:
        assert prefill.answers[each].params["omni_no_handoff"] == "control_ended"
    assert prefill.answers[late].tokens == tokens(PROMPT, 1)
    assert prefill.failures()["control_ended"] == 2
    assert prefill.failures()["thread_ended:omni-control"] == 1


def test_leases_end_without_it(engine):
    prefill = engine("kv_producer", extra={"handoff_ttl_s": 1.0})
    end_control(prefill)
    inspection.periodic_tasks(prefill.half).channel = None  # as one that ends only now
    prefill.generate(PROMPT, params=HANDOFF)
    assert prefill.usage[0] == 4
    inspection.periodic_tasks(prefill.half).channel = inspection.channel(prefill.half)
    end = time.monotonic() + DEADLINE
    while prefill.usage[0]:
        assert time.monotonic() < end
        prefill.generate(PROMPT[::-1])
    assert prefill.count("handoffs_expired") == 1
    assert_clean(prefill)


def test_a_decode_engine_computes_its_prompts(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    end_control(decode)
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.failures() == {"peer_unreachable": 1, "thread_ended:omni-control": 1}
