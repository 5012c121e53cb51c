# SPDX-License-Identifier: Apache-2.0
"""Hand-offs that take longer than computing: the decode engine makes few of them."""

import pytest

from omni_connector.handoff.costs import EXPLORED, SAMPLES
from tests import inspection
from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, prompt

pytestmark = pytest.mark.vllm

LENGTH = 3 * BLOCK + 5


def learn(decode, prefill, load_s, compute_s):
    """As if the engine had loaded and computed many prompts of this length."""
    costs = inspection.handoff_costs(decode.half)
    for _ in range(SAMPLES):
        costs.loaded(prefill.engine_id, LENGTH - 1, load_s)
        costs.step_begins(0.0, LENGTH - 1)
        costs.step_ends(compute_s)


@pytest.mark.parametrize("family", ["full", "window", "all three"])
def test_a_slow_hand_off_is_computed_and_released_at_once(engine, log, family):
    prefill = engine("kv_producer", family=family)
    decode = engine("kv_consumer", family=family)
    reference = engine(None, family=family)
    learn(decode, prefill, load_s=1e6, compute_s=1e-6)
    for number in range(EXPLORED):
        asked = prompt(LENGTH, seed=number)
        answer = prefill.generate(asked, params=HANDOFF).params
        assert prefill.handoffs
        expected = reference.generate(asked, 6).tokens
        assert decode.generate(asked, 6, params=answer).tokens == expected
        assert_clean(prefill, decode)
        assert not prefill.handoffs
    assert decode.failures() == {"slower_than_computing": EXPLORED - 1}
    assert decode.count("handoffs_received") == 1  # the last, so that loads go on to be timed
    assert prefill.count("handoffs_expired") == 0
    assert log == []


@pytest.mark.parametrize(("load_s", "compute_s"), [(1e-6, 1e6), (0.012, 0.01)])
def test_a_hand_off_that_is_hardly_slower_is_made(engine, tokens, load_s, compute_s):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    learn(decode, prefill, load_s, compute_s)
    for number in range(4):
        asked = prompt(LENGTH, seed=number)
        answer = prefill.generate(asked, params=HANDOFF).params
        assert decode.generate(asked, 6, params=answer).tokens == tokens(asked, 6)
    assert decode.failures() == {}
    assert decode.count("handoffs_received") == 4
    assert_clean(prefill, decode)


def test_all_requests_of_a_slow_hand_off_are_computed(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    learn(decode, prefill, load_s=1e6, compute_s=1e-6)
    asked = prompt(LENGTH)
    answer = prefill.generate(asked, params=HANDOFF).params
    children = [decode.submit(asked, max_tokens=6, params=answer) for _ in range(EXPLORED + 1)]
    decode.run(lambda: decode.done(*children))
    assert all(decode.answers[each].tokens == tokens(asked, 6) for each in children)
    assert decode.failures() == {"slower_than_computing": len(children)}
    assert_clean(prefill, decode)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "async scheduling"])
def test_loads_and_steps_are_timed_by_their_lengths(engine, overlap):
    """The tokens of a hand-off are those of its load, and those that begin with a step are new."""
    prefill = engine("kv_producer", prefix_caching=False)
    decode = engine("kv_consumer", prefix_caching=False, async_scheduling=overlap)
    for length in (40, 70):
        asked = prompt(length)
        answer = prefill.generate(asked, params=HANDOFF).params
        decode.generate(asked, 6, params=answer)
        decode.generate(asked, 6)
    costs = inspection.handoff_costs(decode.half)
    loads, computed = inspection.timed(costs, prefill.engine_id)
    assert loads == {6: 1, 7: 1}  # 39 and 69 tokens
    assert computed == {0: 2, 6: 1, 7: 1}  # the last token of each hand-off, and 40 and 70
    assert inspection.timed(costs, "nobody")[0] == {}


def test_what_is_loaded_beside_what_vllm_has_is_timed_by_its_own_length(engine):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    asked = prompt(6 * BLOCK)
    decode.generate(asked[: 4 * BLOCK])
    answer = prefill.generate(asked, params=HANDOFF).params
    decode.generate(asked, 6, params=answer)
    loads, _ = inspection.timed(inspection.handoff_costs(decode.half), prefill.engine_id)
    assert loads == {(2 * BLOCK - 2).bit_length(): 1}
