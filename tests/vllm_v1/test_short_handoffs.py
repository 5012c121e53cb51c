# SPDX-License-Identifier: Apache-2.0
"""Prompts that are shorter than `min_handoff_tokens`: the decode engine computes them."""

import pytest

from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, prompt

pytestmark = pytest.mark.vllm

LENGTH = 3 * BLOCK + 5


@pytest.mark.parametrize("least", [LENGTH - 1, LENGTH])
def test_a_short_prompt_is_computed_and_its_hand_off_is_released_at_once(
    engine, tokens, log, least
):
    prefill = engine("kv_producer")
    decode = engine("kv_consumer", extra={"handoff": True, "min_handoff_tokens": least})
    asked = prompt(LENGTH)
    answer = prefill.generate(asked, params=HANDOFF).params
    assert prefill.handoffs
    children = [decode.submit(asked, max_tokens=6, params=answer) for _ in range(2)]
    decode.run(lambda: decode.done(*children))
    assert all(decode.answers[each].tokens == tokens(asked, 6) for each in children)
    short = least == LENGTH  # the last token is computed in any case
    assert decode.failures() == ({"short_prompt": 2} if short else {})
    assert decode.count("handoffs_received") == (0 if short else 2)
    assert_clean(prefill, decode)
    assert not prefill.handoffs
    assert prefill.count("handoffs_expired") == 0
    assert log == []
