# SPDX-License-Identifier: Apache-2.0
"""Hand-offs to an engine that speculates on what comes next, and is unlike its peer besides."""

import json

import pytest

from omni_connector.testing.engines import EngineError
from omni_connector.testing.reference import ROUNDING

from . import vllm_itself
from .families import FAMILIES
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


@pytest.mark.supports(
    "speculative decoding by a draft model",
    *(family.name for family in FAMILIES),
    refused="the KV cache of a draft model or EAGLE head would be missing on the decode engine; "
    "such an engine does not start, and says so",
)
def test_a_draft_model_is_refused_at_start(pool: Pool) -> None:
    draft = {"method": "draft_model", "model": str(pool.model("llama"))}
    arguments = ["--speculative-config", json.dumps({**draft, "num_speculative_tokens": 3})]
    engine = pool.new("both", arguments=arguments)
    try:
        engine.start()
        with pytest.raises(EngineError, match="died"):
            engine.wait_ready()
        assert "speculative decoding by 'draft_model'" in engine.log.read_text()
    finally:
        engine.stop()
