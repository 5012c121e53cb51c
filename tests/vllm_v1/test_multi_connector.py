# SPDX-License-Identifier: Apache-2.0
"""Under vLLM's MultiConnector, which keys its children by class name and adds up what they say."""

import pytest

from .harness import assert_clean, hand_off, prompt

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", ["full", "all three"])
def test_a_child_of_multi_connector_hands_off(engine, family):
    options = {"connector": "MultiConnector", "family": family}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    for length in (17, 100):
        asked = prompt(length)
        assert hand_off(prefill, decode, asked) == engine(family=family).generate(asked, 6).tokens
    assert decode.stats.data["counts"]["handoffs_received"] == 2
    assert_clean(prefill, decode)
