# SPDX-License-Identifier: Apache-2.0
"""The first block of a window may be loaded in part: nobody but its request may find it."""

import pytest

from .harness import assert_clean, hand_off, prompt

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", ["window", "window and full"])
@pytest.mark.parametrize(("small", "large"), [(4, 16), (8, 16), (8, 32)])
@pytest.mark.parametrize("share", [False, True])
def test_prompts_that_part_within_a_window_read_no_part_that_was_not_loaded(
    engine, family, small, large, share
):
    reference = engine(family=family, block_size=large, prefix_caching=False)
    prefill = engine("kv_producer", family=family, block_size=small, usable_blocks=256)
    extra = {"share": share}
    decode = engine("kv_consumer", family=family, block_size=large, usable_blocks=128, extra=extra)
    for length in range(3 * large - 3, 5 * large, 5):
        question = prompt(length)
        answer = reference.generate(question, 6).tokens
        assert hand_off(prefill, decode, question) == answer
        for cut in range(large, length, large):
            other = question[:cut] + prompt(7, seed=99)
            assert decode.generate(other, 6).tokens == reference.generate(other, 6).tokens
    assert decode.count("handoffs_received") > 5
    assert_clean(prefill, decode)
