# SPDX-License-Identifier: Apache-2.0
"""A request that loses its KV blocks while its only token is in flight."""

import pytest

from tests.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, assert_clean, count_computed, prompt

pytestmark = pytest.mark.vllm

HANDED = prompt(8 * BLOCK, seed=2)


def preempt_now(engine: InProcessEngine, request_id: str) -> None:
    """Have vLLM preempt a running request as it does where it needs its blocks."""
    scheduler = engine.scheduler
    request = scheduler.requests[request_id]
    scheduler.running.remove(request)
    # What vLLM before 0.32 does not ask a connector, it does not drop.
    drops = getattr(scheduler, "requires_kv_delivery", False)
    scheduler._preempt_request(request, 0.0, **({"drop_stale_output": True} if drops else {}))
    scheduler.prev_step_scheduled_req_ids.discard(request_id)


@pytest.mark.parametrize("family", ["full", "window", "all three"])
def test_a_prefill_that_is_preempted_with_its_token_in_flight_is_not_computed_again(engine, family):
    options = {"family": family, "usable_blocks": 40}
    prefill = engine("kv_both", async_scheduling=True, prefix_caching=False, **options)
    decode, alone = engine("kv_consumer", **options), engine(**options)
    computed = count_computed(prefill)
    held = prefill.hold(saves=True)
    handed = prefill.submit(HANDED, params=HANDOFF)
    prefill.step()
    assert not prefill.done(handed)
    preempt_now(prefill, handed)
    # Others get the blocks that it has lost, but not those under its copies.
    others = [prefill.submit(prompt(4 * BLOCK, seed), max_tokens=2) for seed in range(5, 9)]
    prefill.run(lambda: prefill.done(handed))
    for _ in range(10):
        prefill.step()
    held.open()
    prefill.settle()
    computed_here = HANDED if family == "full" else HANDED[:-1]
    assert prefill.answers[handed].tokens == alone.generate(computed_here, 1).tokens
    most = len(HANDED) + len(others) * (4 * BLOCK + 2)
    assert sum(computed) <= most
    params = prefill.answers[handed].params
    right = alone.generate(HANDED, 6).tokens
    assert decode.generate(HANDED, 6, params=params).tokens == right
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)
