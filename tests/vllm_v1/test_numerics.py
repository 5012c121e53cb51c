# SPDX-License-Identifier: Apache-2.0
"""Engines that compute other numbers, or mean others by the same bytes, refuse each other."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from msgspec import UNSET
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.config import CacheConfig, DeviceConfig, LoRAConfig, ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import MambaSpec

from omni_connector.config import OmniConfig
from omni_connector.stores.shared_blocks import key_prefix
from omni_connector.vllm_v1 import worker
from omni_connector.vllm_v1.identity import (
    compatibility,
    overrides_id,
    quantization_id,
    scales_of_engine,
)
from omni_connector.vllm_v1.kernels import scales_id
from omni_connector.vllm_v1.metadata import OmniHandshakeMetadata
from omni_connector.vllm_v1.specs import group_shapes
from tests.toy import BLOCK, HEAD_SIZE, LAYERS, kv_cache_config, write_model

from . import harness
from .harness import HANDOFF, assert_clean, prompt
from .stores import landed

pytestmark = pytest.mark.vllm

TEXT = prompt(4 * BLOCK + 3)


class HfConfig(SimpleNamespace):
    """As much of a model's configuration as is read."""

    def to_dict(self) -> dict[str, object]:
        return copy.deepcopy(vars(self))


def model(**changes):
    return SimpleNamespace(
        **{
            "quantization": None,
            "quantization_config": None,
            "hf_overrides": {},
            "hf_config_path": None,
            "hf_config": HfConfig(),
            **changes,
        }
    )


def test_quantization_is_told_by_method_and_settings():
    settings = [
        {},
        {"quantization": "fp8"},
        {"quantization": "fp8", "hf_config": HfConfig(quantization_config={"bits": 8})},
        {"quantization": "fp8", "hf_config": HfConfig(quantization_config={"bits": 4})},
        {"quantization": "awq", "hf_config": HfConfig(quantization_config={"bits": 4})},
        {"quantization": "fp8", "quantization_config": {"linear": "mxfp8"}},
    ]
    assert quantization_id(model()) == ""
    assert len({quantization_id(model(**each)) for each in settings}) == len(settings)
    one, two = ({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    assert len({quantization_id(model(quantization_config=each)) for each in (one, two)}) == 1


def test_overrides_are_told_by_what_they_say_or_make():
    def override(config):
        return config

    said = [
        {},
        {"rope_theta": 1},
        {"rope_theta": 2},
        {"rope_scaling": {"type": "yarn", "factor": 2}},
    ]
    assert overrides_id(model()) == ""
    assert len({overrides_id(model(hf_overrides=each)) for each in said}) == len(said)
    made = [
        overrides_id(model(hf_overrides=override, hf_config=HfConfig(rope=r, _name_or_path=path)))
        for r, path in ((1, "/a"), (1, "/b"), (2, "/a"))
    ]
    assert made[0] == made[1] != made[2]
    paths = [
        overrides_id(model(hf_config_path="/c", hf_config=HfConfig(rope=r, _name_or_path=path)))
        for r, path in ((1, "/c"), (1, "/d"), (2, "/c"))
    ]
    assert "" != paths[0] == paths[1] != paths[2]


PHI = {
    "model_type": "phi3",
    "max_position_embeddings": 8192,
    "original_max_position_embeddings": 2048,
    "pad_token_id": 0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * HEAD_SIZE,
        "long_factor": [2.0] * HEAD_SIZE,
    },
}
LLAMA_4 = {
    "model_type": "llama4_text",
    "max_position_embeddings": 65536,
}


def key(folder, changes, lora=None, kv_dtype="auto", **options):
    """The compatibility key of an engine of a model of the toy's shape, by vLLM's own classes."""
    config = json.loads((write_model(folder) / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float16", **options
        ),
        cache_config=CacheConfig(cache_dtype=kv_dtype),
        device_config=DeviceConfig("cpu"),
        lora_config=lora,
    )
    pages = (tuple("N16.C64" for _ in range(LAYERS)),)
    groups = group_shapes(kv_cache_config(9, BLOCK), pages, ("FLASH_ATTN",))
    return compatibility(OmniConfig.load({}), vllm_config, [OmniHandshakeMetadata((), groups)])


@pytest.mark.parametrize(
    ("changes", "ours", "theirs", "told"),
    [
        ({}, {"max_model_len": 1024}, {"max_model_len": 4096}, None),
        (PHI, {"max_model_len": 1024}, {"max_model_len": 2048}, None),
        (PHI, {"max_model_len": 2048}, {"max_model_len": 4096}, "LongRoPE"),
        (PHI, {}, {"max_model_len": 2048}, None),
        (PHI, {"max_model_len": -1}, {"max_model_len": 8192}, "LongRoPE"),
        (LLAMA_4, {"max_model_len": 32768}, {"max_model_len": 40000}, "attn_temperature_tuning"),
        (
            LLAMA_4,
            {"max_model_len": 1000},
            {"override_generation_config": {"attn_temperature_tuning": False}},
            None,
        ),
        ({}, {}, {"lora": LoRAConfig()}, None),
        ({}, {}, {"lora": LoRAConfig(target_modules=["q_proj"])}, "target_modules"),
    ],
)
def test_what_vllm_makes_of_settings_is_compared(tmp_path, changes, ours, theirs, told):
    keys = [key(tmp_path, changes, **options) for options in (ours, theirs)]
    found = keys[0].difference(keys[1])
    if told is None:
        assert found is None
    else:
        assert found[0] == "numerics"
        assert told in f"{found[1]} {found[2]}"
    assert (key_prefix("n", keys[0], "h") == key_prefix("n", keys[1], "h")) == (told is None)


def tokenizer(folder, *words):
    """The folder of a tokenizer with these words."""
    known = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    PreTrainedTokenizerFast(tokenizer_object=known).save_pretrained(folder)
    return str(folder)


def test_the_tokenizer_of_engram_is_compared(tmp_path):
    """DeepSeek-V4.1 looks n-grams of texts up. Other models compute with ids alone."""
    same, again, other = (
        tokenizer(tmp_path / name, *words)
        for name, words in (("a", ("one", "two")), ("b", ("one", "two")), ("c", ("two", "one")))
    )
    of_engram = [
        key(tmp_path, {"engram_layer_ids": [1]}, tokenizer=each) for each in (same, again, other)
    ]
    assert of_engram[0].difference(of_engram[1]) is None
    found = of_engram[0].difference(of_engram[2])
    assert found[0] == "numerics"
    assert "tokenizer of engram" in found[1]
    usual = [key(tmp_path, {}, tokenizer=each) for each in (same, other)]
    assert usual[0].difference(usual[1]) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "differ"),
    [("auto", "float16", False), ("fp8", "fp8_e4m3", False), ("auto", "bfloat16", True)],
)
def test_a_type_of_kv_has_one_name(tmp_path, ours, theirs, differ):
    try:
        keys = [key(tmp_path, {}, kv_dtype=each) for each in (ours, theirs)]
    except ValueError as error:
        if "incompatible with dtype" not in str(error):
            raise
        pytest.skip("from vLLM 0.33 on KV has the type of the model")
    found = keys[0].difference(keys[1])
    assert (found is not None and found[0] == "kv_dtype") == differ
    assert (key_prefix("n", keys[0], "h") == key_prefix("n", keys[1], "h")) != differ


def test_a_usual_engine_tells_no_numerics(tmp_path):
    assert key(tmp_path, {}).numerics is UNSET


def test_scales_are_told_by_their_values(engine):
    config = engine("kv_producer").kv_config
    names = [name for group in config.kv_cache_groups for name in group.layer_names]

    def scaled(name=names[0], scale="_k_scale", value=1.0):
        layers = {
            each: SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
            for each in names
        }
        setattr(layers[name], scale, torch.tensor(value))
        return scales_id(config, layers)

    assert scaled() == scales_id(config, {}) == ""
    others = {
        scaled(value=0.5),
        scaled(value=0.25),
        scaled(value=[0.5, 1.0]),
        scaled(scale="_v_scale", value=0.5),
        scaled(name=names[-1], value=0.5),
        scaled(scale="_q_scale", value=0.5),
    }
    assert len(others) == 6
    assert "" not in others
    assert scaled(value=0.5) == scaled(value=0.5)


def test_scales_of_an_engine_are_those_of_all_its_ranks():
    assert scales_of_engine(["", ""]) == ""
    assert scales_of_engine(["x", "x"]) == "x"
    assert len({scales_of_engine([*ranks]) for ranks in ("xy", "yx", "xx")}) == 3


@pytest.mark.parametrize("stages", [(), (1,)], ids=["one stage", "in the later of two"])
def test_engines_of_other_scales_hand_nothing_off(engine, tokens, monkeypatch, log, stages):
    prefill = engine("kv_producer", stages=stages)
    alike = prefill.stage_configs[0].kv_cache_groups if stages else []

    def scales(config, _):
        return "" if config.kv_cache_groups == alike else "of the other checkpoint"

    monkeypatch.setattr(worker, "scales_id", scales)
    decode = engine("kv_consumer", stages=stages)
    answer = prefill.generate(TEXT, params=HANDOFF).params
    assert decode.generate(TEXT, 6, params=answer).tokens == tokens(TEXT, 6)
    assert decode.failures() == {"incompatible_peer": 1}
    assert any("scales" in line for line in log)
    prefill.directory.close(bytes.fromhex(answer["omni_token"]))


@pytest.fixture
def states_of_bfloat16(monkeypatch):
    """Call it, and engines made from then on keep states of another dtype, of as many bytes."""

    def change():
        made = harness.kv_cache_config

        def changed(*arguments, **options):
            config = made(*arguments, **options)
            for group in config.kv_cache_groups:
                if isinstance(group.kv_cache_spec, MambaSpec):
                    dtypes = (torch.bfloat16, torch.float32)
                    group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, dtypes=dtypes)
            return config

        monkeypatch.setattr(harness, "kv_cache_config", changed)

    return change


def test_engines_of_other_states_hand_nothing_off(engine, states_of_bfloat16, log):
    family = {"family": "state and full"}
    reference, prefill = engine(**family), engine("kv_producer", **family)
    states_of_bfloat16()
    decode = engine("kv_consumer", **family)
    answer = prefill.generate(TEXT, params=HANDOFF).params
    tokens = decode.generate(TEXT, 6, params=answer).tokens
    assert tokens == reference.generate(TEXT, 6).tokens
    assert decode.failures() == {"incompatible_peer": 1}
    assert any(" float16" in line and " bfloat16" in line for line in log)
    prefill.directory.close(bytes.fromhex(answer["omni_token"]))


def test_engines_of_other_states_share_nothing(engine, sharer, shelf, states_of_bfloat16):
    family = {"family": "state and full"}
    first, reference = sharer(**family), engine(**family).generate(TEXT, 6).tokens
    states_of_bfloat16()
    second = sharer(**family)
    for each in (first, second):
        assert each.generate(TEXT, 6).tokens == reference
        assert each.count("tokens_shared") == 0
        landed(each)
    assert_clean(first, second)


def test_engines_of_other_scales_share_nothing(sharer, shelf, tokens, monkeypatch):
    first = sharer()
    monkeypatch.setattr(worker, "scales_id", lambda *_: "of the other checkpoint")
    second = sharer()
    for each in (first, second):
        assert each.generate(TEXT, 6).tokens == tokens(TEXT, 6)
        assert each.count("tokens_shared") == 0
    assert_clean(first, second)
