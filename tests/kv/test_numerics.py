# SPDX-License-Identifier: Apache-2.0
"""Settings that change the KV of a model are told; what is usual is left out."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from omni_connector.kv.numerics import numerics_of

# Of NemotronH_Nano_VL_V2: images are scaled to what the longest request has room for.
DYNAMIC = {"vision_config": SimpleNamespace(args={"min_num_patches": 4})}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def settings(
    *,
    text: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    media: dict[str, Any] | None = None,
    load_format: str = "auto",
    use_non_causal: bool = False,
) -> SimpleNamespace:
    """As much of a `VllmConfig` as is read; by default that of a usual text model."""
    usual_lora = {
        "lora_dtype": "bfloat16",
        "target_modules": None,
        "enable_tower_connector_lora": False,
        "enable_moe_shared_loras": False,
    }
    usual_media: dict[str, Any] = {
        "mm_processor_kwargs": None,
        "media_io_kwargs": {},
        "mm_encoder_attn_dtype": None,
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
    }
    usual_model = {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "original_max_model_len": 4096,
        "model_class_overrides": {},
        "override_generation_config": {},
        "try_get_generation_config": dict,
        "hf_config": SimpleNamespace(**(config or {})),
        "hf_text_config": SimpleNamespace(**{"model_type": "llama", **(text or {})}),
        "multimodal_config": None if media is None else SimpleNamespace(**(usual_media | media)),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**(usual_model | (model or {}))),
        lora_config=None if lora is None else SimpleNamespace(**(usual_lora | lora)),
        attention_config=SimpleNamespace(use_non_causal=use_non_causal),
        load_config=SimpleNamespace(load_format=load_format),
    )


@pytest.mark.parametrize(
    "usual",
    [
        settings(),
        settings(model={"max_model_len": 100_000}),
        settings(text={"rope_parameters": None}),
        settings(text={"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        settings(lora={}),
        settings(media={}),
        settings(media={"mm_processor_kwargs": {}, "video_pruning_rate": 0.0}),
        settings(media={}, config={"architectures": ["NemotronH_Nano_VL_V2"]}),
        settings(config=DYNAMIC),
        settings(load_format="runai_streamer"),
        settings(model={"override_generation_config": {"attn_temperature_tuning": True}}),
    ],
)
def test_what_is_usual_is_left_out(usual: SimpleNamespace) -> None:
    assert numerics_of(usual) is UNSET


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (settings(load_format="dummy"), "load_format=dummy"),
        (settings(use_non_causal=True), "use_non_causal=true"),
        (settings(model={"model_class_overrides": {"A": "b:C"}}), '{"A": "b:C"}'),
        (settings(lora={"lora_dtype": "float16"}), "lora_dtype=float16"),
        (settings(lora={"target_modules": ["v", "q"]}), 'target_modules=["q", "v"]'),
        (settings(lora={"target_modules": []}), "target_modules=[]"),
        (settings(lora={"enable_tower_connector_lora": True}), "enable_tower_connector_lora=true"),
        (settings(lora={"enable_moe_shared_loras": True}), "enable_moe_shared_loras=true"),
        (settings(media={"mm_processor_kwargs": {"num_crops": 4}}), '{"num_crops": 4}'),
        (settings(media={"media_io_kwargs": {"video": {"fps": 1}}}), '{"video": {"fps": 1}}'),
        (settings(media={}, config=DYNAMIC), "max_model_len=4096"),
        (settings(media={}, config={"architectures": ["Dots3NoteForCausalLM"]}), "=4096"),
        (settings(media={"mm_encoder_attn_dtype": "fp8"}), "mm_encoder_attn_dtype=fp8"),
        (
            settings(media={"video_pruning_rate": 0.5}),
            "video_pruning_rate=0.5; video_pruning_method=evs",
        ),
    ],
)
def test_what_changes_the_kv_is_named(changed: SimpleNamespace, told: str) -> None:
    assert told in str(numerics_of(changed))


@pytest.mark.parametrize("rope", [LONG, {"full_attention": LONG, "sliding_attention": {}}])
def test_longrope_goes_by_the_longest_request(rope: dict[str, Any]) -> None:
    def told(length: int) -> object:
        return numerics_of(
            settings(text={"rope_parameters": rope}, model={"max_model_len": length})
        )

    assert told(100) == told(4096) == "LongRoPE factors=short"
    assert told(4097) == told(131_072) == "LongRoPE factors=long"


def test_llama_4_tunes_by_the_longest_request_or_as_it_is_told() -> None:
    def told(length: int, checkpoint: dict[str, Any], override: dict[str, Any]) -> object:
        return numerics_of(
            settings(
                text={"model_type": "llama4_text"},
                model={
                    "max_model_len": length,
                    "try_get_generation_config": lambda: dict(checkpoint),
                    "override_generation_config": override,
                },
            )
        )

    on, off = ({"attn_temperature_tuning": each} for each in (True, False))
    tuned, plain = "attn_temperature_tuning=True", "attn_temperature_tuning=False"
    assert told(32_768, {}, {}) == told(100_000, off, {}) == told(100_000, on, off) == plain
    assert told(32_769, {}, {}) == told(1000, on, {}) == told(1000, off, on) == tuned


def test_a_length_that_was_fitted_to_the_memory_is_not_what_the_model_was_built_for() -> None:
    fitted = {
        "max_model_len": 3000,
        "original_max_model_len": -1,
        "get_and_verify_max_len": lambda asked: 131_072 if asked == -1 else 0,
    }
    found = numerics_of(settings(text={"rope_parameters": LONG}, model=fitted))
    assert found == "LongRoPE factors=long"


def test_a_text_that_is_too_long_for_a_message_is_told_by_its_digest() -> None:
    many = [f"layers.{i}.q_proj" for i in range(200)]
    first, again, other = (
        numerics_of(settings(lora={"target_modules": modules}))
        for modules in (many, many[::-1], many[1:])
    )
    assert first == again != other
    assert len(str(first)) <= 1024
