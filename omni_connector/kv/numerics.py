# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM that change the KV of a model whose weights and configuration stay the same.

Peers compare them as a text. It is left out where all of them are usual. Settings that change
only the rounding, such as kernels of the experts or the number of ranks, are not among them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import UNSET, UnsetType

_TUNED_BEYOND: Final = 32768  # tokens
_LONGEST: Final = 1024


def digest(what: object) -> str:
    """32 hex digits that tell one value that JSON can hold from another."""
    return hashlib.blake2b(_text(what).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def stored_as(kv_dtype: str, dtype: object) -> str:
    """The type of numbers that a `--kv-cache-dtype` stands for, by one name.

    Args:
        dtype: the model's `torch.dtype`.
    """
    if kv_dtype == "auto":
        return str(dtype).removeprefix("torch.")
    return "fp8_e4m3" if kv_dtype == "fp8" else kv_dtype


def numerics_of(vllm_config: Any, engram_tokens: str | None = None) -> str | UnsetType:
    """The settings of an engine that change its KV, as a `CompatibilityKey` has them.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        engram_tokens: digest of the tokenizer that the model itself computes with; None where it
            computes with none.
    """
    told = [*_by_length(vllm_config.model_config)]
    if engram_tokens is not None:
        told.append(f"tokenizer of engram={engram_tokens}")
    for name, value in _settings(vllm_config).items():
        if value not in (None, False, {}):  # as they usually are
            told.append(f"{name}={value if isinstance(value, str) else _text(value)}")
    text = "; ".join(told)
    return (text if len(text) <= _LONGEST else digest(text)) or UNSET


def _by_length(model: Any) -> Iterator[str]:
    """What vLLM chooses by `max_model_len` when it builds the model, or its processor."""
    config = model.hf_text_config
    long = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    if long:  # see `Phi3LongRoPEScaledRotaryEmbedding`
        trained = long[0].get("original_max_position_embeddings") or 0
        yield f"LongRoPE factors={'long' if _built_for(model) > trained else 'short'}"
    if str(getattr(config, "model_type", "")).startswith("llama4"):  # see `Llama4ForCausalLM`
        said = {**model.try_get_generation_config(), **model.override_generation_config}
        tuned = said.get("attn_temperature_tuning", _built_for(model) > _TUNED_BEYOND)
        yield f"attn_temperature_tuning={bool(tuned)}"
    if model.multimodal_config is not None and _scales_media(model.hf_config):
        yield f"media scaled for max_model_len={model.max_model_len}"


def _scales_media(config: Any) -> bool:
    """Whether vLLM's processor scales images or videos down to what `max_model_len` leaves."""
    names = getattr(config, "architectures", None) or ()
    if any(name.startswith("Dots3Note") for name in names):  # see `Dots3NoteProcessor`
        return True
    # See `DynamicResolutionImageTiler`, of NemotronH_Nano_VL_V2 and others.
    arguments = getattr(getattr(config, "vision_config", None), "args", None)
    return isinstance(arguments, Mapping) and "min_num_patches" in arguments


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The RoPE parameters: of all layers, or of each type of them."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return []
    return [each for each in (parameters, *parameters.values()) if isinstance(each, Mapping)]


def _built_for(model: Any) -> int:
    """The longest request that the model was built for, in tokens."""
    if model.original_max_model_len == -1:
        # Fitted to the memory since then; the model was built for what its configuration says.
        return int(model.get_and_verify_max_len(-1))
    return int(model.max_model_len)


def _settings(vllm_config: Any) -> dict[str, object]:
    """Settings by name, as vLLM's command line has them."""
    model, lora = vllm_config.model_config, vllm_config.lora_config
    media = model.multimodal_config
    found: dict[str, object] = {
        "model_class_overrides": model.model_class_overrides,
        "use_non_causal": vllm_config.attention_config.use_non_causal,
    }
    if vllm_config.load_config.load_format == "dummy":  # weights at random, for benchmarks
        found["load_format"] = "dummy"
    if lora is not None:
        found |= {
            "lora_dtype": None if lora.lora_dtype == model.dtype else str(lora.lora_dtype),
            "target_modules": lora.target_modules and sorted(lora.target_modules),
            "enable_tower_connector_lora": lora.enable_tower_connector_lora,
            "enable_moe_shared_loras": lora.enable_moe_shared_loras,
        }
    if media is not None:  # hashes of images contain what a request says of these, no more
        pruned = media.video_pruning_rate
        found |= {
            "mm_processor_kwargs": media.mm_processor_kwargs,
            "media_io_kwargs": media.media_io_kwargs,
            "mm_encoder_attn_dtype": media.mm_encoder_attn_dtype,
            "video_pruning_rate": pruned,
            "video_pruning_method": media.video_pruning_method if pruned else None,
        }
    return found


def _text(what: object) -> str:
    return json.dumps(what, sort_keys=True, default=str)
