# SPDX-License-Identifier: Apache-2.0
"""Hand-offs to an engine that speculates on what comes next, and is unlike its peer besides."""

import pytest

from omni_connector.testing.reference import ROUNDING

from . import vllm_itself
from .harness import Pair
from .pool import Pool
from .prompts import new_salt, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("unlike")]


@pytest.mark.skipif(bool(vllm_itself.DRAFTS), reason=vllm_itself.DRAFTS)
@pytest.mark.supports("speculative decoding by n-grams", "Llama")
def test_drafts_from_the_prompt(pool: Pool) -> None:
    # It has blocks of another size, too, and no prefix cache.
    pair = Pair.of(*pool.take(("both", "llama", "a"), ("unlike", "llama", "")))
    drafted = pair.decode_engine.metric("vllm:spec_decode_num_draft_tokens_total")
    received = pair.received()
    lengths = (57, 129, 300, 700)
    for length in lengths:
        prompt = (random_prompt(length, 11) * length)[:length]
        own = pair.decode(prompt, new_salt(), max_tokens=24)
        params = pair.prefill(prompt, salt := new_salt())
        answer = pair.decode(prompt, salt, params, max_tokens=24)
        answer.require_same(own, tolerance=ROUNDING)
    assert pair.decode_engine.metric("vllm:spec_decode_num_draft_tokens_total") > drafted
    assert pair.received() == received + len(lengths)
    pair.wait_until_idle()
