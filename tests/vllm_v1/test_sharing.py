# SPDX-License-Identifier: Apache-2.0
"""With whom an engine shares prefixes: what refuses it, and what keeps prompts apart."""

from dataclasses import replace

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from omni_connector.errors import ConfigError
from omni_connector.plugin import require_supported_vllm
from omni_connector.vllm_v1 import assembly, specs
from tests import inspection, toy
from tests.toy import BLOCK

from .harness import InProcessEngine, assert_clean
from .stores import PREFIX, QUESTION, publish

pytestmark = pytest.mark.vllm


def hashes(engine: InProcessEngine, **fields) -> list[bytes]:
    """What vLLM hashes the full blocks of a prompt to."""
    request = Request(
        request_id="r",
        prompt_token_ids=list(PREFIX),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=engine.hasher,
        **fields,
    )
    return [bytes(each) for each in request.block_hashes]


def image(identifier: str, offset: int = 4) -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=offset, length=8)
    return [MultiModalFeatureSpec(None, "image", identifier, place)]


def test_all_that_changes_kv_changes_the_hashes(engine):
    one = engine()
    variants = [
        hashes(one),
        hashes(one, cache_salt="a"),
        hashes(one, cache_salt="b"),
        hashes(one, lora_request=LoRARequest("first", 1, "/lora")),
        hashes(one, lora_request=LoRARequest("second", 2, "/lora")),
        hashes(one, mm_features=image("cat")),
        hashes(one, mm_features=image("dog")),
        hashes(one, mm_features=image("cat", offset=6)),
    ]
    for place in range(6):
        assert len({variant[place] for variant in variants}) == len(variants)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_of_one_process_only_are_not_shared(
    sharer, shelf, tokens, log, monkeypatch, algorithm
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    engine = sharer(hash_algorithm=algorithm)
    assert engine.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert shelf.open == 0
    (line,) = log
    assert f"--prefix-caching-hash-algo {algorithm}" in line
    assert "PYTHONHASHSEED" in line
    assert_clean(engine)


def test_with_a_seed_for_all_they_are(sharer, shelf, tokens, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    first, second = sharer(hash_algorithm="xxhash_cbor"), sharer(hash_algorithm="xxhash_cbor")
    publish(first, shelf)
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_shared") == 6 * BLOCK


def test_engines_of_another_seed_are_strangers(sharer, shelf, tokens, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    publish(sharer(), shelf)
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    second = sharer()
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_shared") == 0


def test_in_a_store_the_blocks_of_each_version_of_vllm_are_apart(
    sharer, shelf, tokens, monkeypatch
):
    publish(sharer(), shelf)
    before = require_supported_vllm()
    after = before._replace(version=f"{before.version}.1")
    with monkeypatch.context() as upgrade:
        upgrade.setattr(assembly, "require_supported_vllm", lambda: after)
        second = sharer()
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_shared") == 0
    again = sharer()
    assert again.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert again.count("tokens_shared") == 6 * BLOCK


def test_recurrent_states_that_cannot_be_shared_are_refused_by_name(
    sharer, shelf, engine, log, monkeypatch
):
    states = toy.kv_cache_config(9, BLOCK, "state and full")
    states.kv_cache_groups[0].kv_cache_spec = replace(
        states.kv_cache_groups[0].kv_cache_spec, mamba_cache_mode="none"
    )
    monkeypatch.setattr(assembly, "state_refusal", lambda _: specs.state_refusal(states))
    one, alone = sharer(family="state and full"), engine(family="state and full")
    assert one.generate(QUESTION, 6).tokens == alone.generate(QUESTION, 6).tokens
    assert shelf.open == 0
    (line,) = log
    assert "the recurrent states of layer model.layers.0" in line
    assert "mode 'none'; only --mamba-cache-mode align keeps" in line


def test_without_prefix_caching_nothing_is_shared(sharer, shelf, tokens, log):
    engine = sharer(prefix_caching=False)
    assert engine.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert shelf.open == 0
    (line,) = log
    assert "prefix caching is off" in line


def test_without_a_store_nothing_is_asked_of_one(engine, shelf, tokens):
    one = engine("kv_both")
    assert one.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert not inspection.shares_prefixes(one.half)
    assert shelf.asked == []


def test_a_key_that_is_not_known_stops_the_engine(engine):
    with pytest.raises(ConfigError, match="store: unknown key 'mster'; did you mean 'master'"):
        engine("kv_both", extra={"store": {"mster": "127.0.0.1:1"}})


def test_what_fails_in_the_store_is_counted_by_kind_and_once(sharer, shelf):
    engine = sharer()
    shelf.failures.update({"unreachable": 3, "TRANSFER_FAIL (-800)": 1})
    engine.generate(QUESTION, 2)
    shelf.failures["unreachable"] += 2
    engine.generate(QUESTION, 2)
    # Both halves have a client, and these two count the same.
    assert engine.failures() == {"store:unreachable": 10, "store:TRANSFER_FAIL (-800)": 2}
