# SPDX-License-Identifier: Apache-2.0
"""Hand-offs to an engine that speculates on what comes next."""

import json
from collections.abc import Iterator

import pytest

from omni_connector.testing.engines import EngineError
from omni_connector.testing.models import make_model

from .families import FAMILIES
from .harness import Pair, connector_config, new_engine, new_salt, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LLAMA = next(family for family in FAMILIES if family.recipe == "llama")
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill engine, and a decode engine that looks drafts up in the prompt."""
    model = make_model("llama", tmp_path_factory.getbasetemp() / "llama")
    folder, runtime = tmp_path_factory.mktemp("speculative"), tmp_path_factory.mktemp("run")
    extra = {"kv_producer": [], "kv_consumer": ["--speculative-config", json.dumps(NGRAM)]}
    engines = [
        new_engine(
            model,
            folder / f"{role}.log",
            connector_config(role, handoff_ttl_s=30.0),
            runtime,
            arguments=[*LLAMA.arguments, *arguments],
            core=core,
        )
        for core, (role, arguments) in enumerate(extra.items())
    ]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield Pair(*engines, runtime)
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.supports("speculative decoding by n-grams", "Llama")
def test_drafts_from_the_prompt(pair: Pair) -> None:
    drafted = pair.decode_engine.metric("vllm:spec_decode_num_draft_tokens_total")
    received = pair.count(pair.decode_engine, "handoffs_received")
    lengths = (57, 129, 300, 700)
    for length in lengths:
        prompt = (random_prompt(length, 11) * length)[:length]
        own = pair.decode(prompt, new_salt(), max_tokens=24)
        params = pair.prefill(prompt, salt := new_salt())
        answer = pair.decode(prompt, salt, params, max_tokens=24)
        answer.require_same(own, tolerance=LLAMA.rounding)
    assert pair.decode_engine.metric("vllm:spec_decode_num_draft_tokens_total") > drafted
    assert pair.count(pair.decode_engine, "handoffs_received") == received + len(lengths)
    pair.wait_until_idle()


@pytest.mark.supports(
    "speculative decoding by a draft model",
    *(family.name for family in FAMILIES),
    refused="the KV cache of a draft model or EAGLE head would be missing on the decode engine; "
    "such an engine does not start, and says so",
)
def test_a_draft_model_is_refused_at_start(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = pair.decode_engine.model
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    engine = new_engine(
        model,
        tmp_path_factory.mktemp("refused") / "engine.log",
        connector_config("kv_consumer"),
        pair.runtime,
        arguments=[*LLAMA.arguments, "--speculative-config", json.dumps(draft)],
    )
    try:
        engine.start()
        with pytest.raises(EngineError, match="died"):
            engine.wait_ready()
        assert "speculative decoding by 'draft_model'" in engine.log.read_text()
    finally:
        engine.stop()
