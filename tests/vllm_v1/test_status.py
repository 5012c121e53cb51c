# SPDX-License-Identifier: Apache-2.0
"""What engines tell of themselves in the runtime folder is what they did, and goes with them."""

import os

import pytest

from omni_connector.errors import ConfigError
from omni_connector.net import status
from omni_connector.net.runtime import LOOPBACK_KEY, of_kernel
from omni_connector.net.status import EngineStatus
from omni_connector.runtime.metric_names import COUNTERS
from tests.toy import BLOCK, LAYERS, PAGE

from .harness import HANDOFF, assert_clean, hand_off, prompt, slots, wait
from .test_preemption import preempt_now

pytestmark = pytest.mark.vllm

PROMPT = prompt(5 * BLOCK)
SIZE = 5 * LAYERS * PAGE


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "WRITE_S", 0.0)


def told(runtime) -> dict[str, EngineStatus]:
    found, remarks = status.read(of_kernel(runtime / "default"))
    assert not remarks
    return {each.engine_id: each for each in found}


def files(runtime) -> list[str]:
    return [path.name for path in runtime.rglob("*.status")]


def test_both_sides_of_a_hand_off_tell_their_part(engine, runtime):
    prefill = engine("kv_producer", engine_id="prefill")
    decode = engine("kv_consumer", engine_id="decode")
    wait(lambda: set(told(runtime)) == {"prefill", "decode"})
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    wait(lambda: told(runtime)["prefill"].usage.handoffs_open == 1)
    assert told(runtime)["prefill"].usage.slots_in_use == 5
    decode.generate(PROMPT, 3, params=answer)
    decode.generate(PROMPT, 3)
    assert_clean(prefill, decode)
    wait(lambda: told(runtime)["decode"].prompt_tokens == 2 * len(PROMPT))
    wait(lambda: told(runtime)["prefill"].usage.handoffs_open == 0)
    p, d = told(runtime)["prefill"], told(runtime)["decode"]
    assert (p.role, d.role) == ("kv_producer", "kv_consumer")
    assert p.pid == os.getpid()
    assert p.model == d.model
    assert p.arena_bytes > 0
    assert d.arena_bytes == d.usage.slots_total == 0
    assert set(p.counts) == set(d.counts) == set(COUNTERS)
    # What the workers have counted, and what the scheduler half has.
    assert (p.counts["bytes_saved"], p.counts["handoffs_offered"]) == (SIZE, 1)
    assert (d.counts["bytes_loaded"], d.counts["handoffs_received"]) == (SIZE, 1)
    assert d.peers == {"shm:nearest": 1}
    assert p.seconds["save"].count == d.seconds["load"].count == 1
    assert p.usage.slots_cached == 4
    assert p.cached_tokens == 0
    assert d.cached_tokens == len(PROMPT) - 1 + 4 * BLOCK


def test_engines_tell_whether_they_have_the_key_of_loopback(engine, runtime):
    engine("kv_consumer", engine_id="near")
    engine("kv_producer", engine_id="listens", extra={"listen": "127.0.0.1:0"})
    engine("kv_consumer", engine_id="asks", extra={"peers": ["127.0.0.1"]})
    wait(lambda: len(told(runtime)) == 3)
    has_key = {name: said.loopback_key for name, said in told(runtime).items()}
    assert has_key == {"near": False, "listens": True, "asks": True}
    assert status.check_loopback_key()
    (runtime / LOOPBACK_KEY).unlink()
    with pytest.raises(ConfigError, match=r"was removed while .*(asks, listens|listens, asks)"):
        status.check_loopback_key()


def test_counts_add_up_over_steps_and_ranks(engine, runtime):
    prefill = engine("kv_producer", engine_id="prefill", ranks=2, extra=slots(60))
    for seed in range(3):
        prefill.generate(prompt(5 * BLOCK, seed), params=HANDOFF)
    prefill.generate(prompt(40 * BLOCK), params=HANDOFF)
    wait(lambda: "prefill" in told(runtime) and told(runtime)["prefill"].failures)
    found = told(runtime)["prefill"]
    assert found.ranks == 2
    assert found.counts["handoffs_offered"] == 3
    assert found.counts["blocks_saved"] == 2 * 15
    assert set(found.failures) == {"prompt_too_long"}


@pytest.mark.parametrize("newer", [False, True], ids=["v1", "v2"])
def test_a_prompt_that_is_resumed_counts_once(engine, runtime, newer):
    """For its V2 model runner vLLM names resumed requests among the new ones."""
    both = engine("kv_both", engine_id="both")
    both.scheduler.use_v2_model_runner = newer
    request_id = both.submit(PROMPT, max_tokens=6)
    both.run(lambda: len(both.answers[request_id].tokens) == 2)
    preempt_now(both, request_id)
    both.run(lambda: both.done(request_id))
    assert request_id in both.preempted
    both.generate(PROMPT, 1)
    assert_clean(both)
    wait(lambda: told(runtime)["both"].prompt_tokens >= 2 * len(PROMPT))
    found = told(runtime)["both"]
    assert found.prompt_tokens == 2 * len(PROMPT)
    assert found.cached_tokens == 4 * BLOCK


def test_the_file_goes_with_the_engine(engine, runtime):
    both = engine("kv_both")
    wait(lambda: len(told(runtime)) == 1)
    both.shutdown()
    assert files(runtime) == []
    both.shutdown()


def test_an_engine_that_cannot_start_leaves_no_file(engine, runtime):
    first = engine("kv_both", engine_id="same")
    wait(lambda: len(told(runtime)) == 1)
    with pytest.raises(Exception, match="already"):
        engine("kv_both", engine_id="same")
    assert len(files(runtime)) == 1
    first.shutdown()
    assert files(runtime) == []


def test_beside_other_connectors_it_tells_of_ours(engine, runtime):
    prefill = engine("kv_both", connector="MultiConnector", engine_id="prefill")
    decode = engine("kv_consumer")
    hand_off(prefill, decode, PROMPT)
    wait(lambda: told(runtime)["prefill"].counts["bytes_saved"] == SIZE)
    assert told(runtime)["prefill"].counts["handoffs_offered"] == 1
