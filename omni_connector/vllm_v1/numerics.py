# SPDX-License-Identifier: Apache-2.0
"""What changes the numbers that a model computes, or what bytes of KV mean, beside its weights."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from omni_connector.vllm_v1.specs import own_layers, transferred_groups

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SCALES: Final = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")

# What a configuration says of where it lies and what wrote it.
_NOT_THE_MODEL: Final = ("_name_or_path", "transformers_version", "_commit_hash")


def quantization_id(model: "ModelConfig") -> str:
    """Method and settings of quantization; "" where there is none."""
    method = model.quantization
    settings = [
        getattr(model, "quantization_config", None),
        getattr(model.hf_config, "quantization_config", None),
    ]
    if method is None and not any(settings):
        return ""
    return f"{method} {_digest(settings)}"


def overrides_id(model: "ModelConfig") -> str:
    """What was changed of the model's configuration; "" where nothing was."""
    overrides = model.hf_overrides
    if callable(overrides):  # what it does shows in what it has made
        made = model.hf_config.to_dict()
        overrides = {name: made[name] for name in made if name not in _NOT_THE_MODEL}
    return _digest(overrides) if overrides else ""


def scales_id(kv_cache_config: "KVCacheConfig", layers: Mapping[str, Any]) -> str:
    """The scales of a rank's attention layers, as a checkpoint or its user gave them; "" where
    all are one.

    Args:
        layers: the model's layers by name.
    """
    hasher = hashlib.blake2b(digest_size=16)
    told = False
    for group in transferred_groups(kv_cache_config).values():
        for name in own_layers(kv_cache_config, group):
            for scale in _SCALES:
                value = getattr(layers.get(name), scale, None)
                if not isinstance(value, torch.Tensor):
                    continue
                numbers = value.detach().to("cpu", torch.float32).flatten()
                told = told or bool((numbers != 1).any())
                hasher.update(f"{name}\0{scale}\0".encode())
                hasher.update(numbers.numpy().tobytes())
    return hasher.hexdigest() if told else ""


def scales_of_engine(ranks: list[str], cache: "CacheConfig", engine: str) -> str:
    """The scales of all ranks.

    Args:
        ranks: `scales_id` of each.
        cache: vLLM's settings of the KV cache.
        engine: what no other engine has: scales that each of them measures with its first requests
            are its own.
    """
    if getattr(cache, "calculate_kv_scales", False) and str(cache.cache_dtype) != "auto":
        return f"measured by {engine}"
    return ranks[0] if len(set(ranks)) == 1 else _digest(ranks)


def _digest(what: object) -> str:
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
