# SPDX-License-Identifier: Apache-2.0
"""The drafter of an engine that decodes speculatively, and the KV cache that it may have.

A drafter with a KV cache (EAGLE, MTP, a draft model) has layers of its own in vLLM's cache groups,
so that its KV is saved and loaded with the target's. If both engines of a hand-off have a drafter,
it must be the same. An engine without one has none of these layers.
"""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET, UnsetType

from omni_connector.errors import ConfigError
from omni_connector.kv.numerics import digest, stored_as

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_WITHOUT_KV: Final = frozenset({"mlp_speculator", "medusa", "ngram", "ngram_gpu", "suffix"})

# What they write to the KV cache of a position depends on tokens up to that position, or on
# `tokens_ahead` tokens after it. Of other drafters (DFlash, DSpark) this is not known here.
_WITH_KV: Final = frozenset({"draft_model", "eagle", "eagle3", "mtp"})


# vLLM's names of a drafter's layers: of a draft model, and of MTP in models that count its layers
# from 0. EAGLE and the other models with MTP count on behind the target's last layer.
_OF_DRAFTER: Final = re.compile(r"draft_model\.|(?:.*\.)?mtp(?:_layers)?\.")
_NUMBER: Final = re.compile(r"\blayers\.([0-9]+)\.")


def layers_of_drafter(vllm_config: "VllmConfig", names: Iterable[str]) -> tuple[str, ...]:
    """The layers of a drafter among layers with a KV cache, sorted; none where there is no drafter
    with KV, or if its layers have other names than are known.

    Args:
        names: of vLLM's layers.
    """
    if not drafts_with_kv(vllm_config):
        return ()
    behind = vllm_config.model_config.get_total_num_hidden_layers()

    def is_drafters(name: str) -> bool:
        number = _NUMBER.search(name)
        return bool(_OF_DRAFTER.match(name)) or (number is not None and int(number[1]) >= behind)

    return tuple(sorted(filter(is_drafters, names)))


def require_supported_drafter(vllm_config: "VllmConfig") -> None:
    """Refuse a drafter whose KV cannot be handed off.

    Raises:
        ConfigError: the method is not supported.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_KV | _WITH_KV:
        return
    raise ConfigError(
        f"speculative decoding by {speculative.method!r} keeps a KV cache of its own, which "
        f"OmniKVConnector does not hand off; it supports "
        f"{', '.join(sorted(_WITHOUT_KV | _WITH_KV))}"
    )


def drafts_with_kv(vllm_config: "VllmConfig") -> bool:
    """Whether a drafter has layers of its own in the KV cache."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in _WITH_KV


def tokens_ahead(vllm_config: "VllmConfig") -> int:
    """Tokens after a position that the drafter's KV of this position depends on: 1 with EAGLE and
    MTP, k with MTP of k modules, 0 with a draft model or without a drafter.

    vLLM 0.30 does not say so, and has no MTP of several modules.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1))


def tokens_written_ahead(vllm_config: "VllmConfig") -> int:
    """Tokens after those of a step for which vLLM allocates blocks, as the drafter writes there."""
    if not drafts_with_kv(vllm_config):
        return 0
    return int(vllm_config.num_lookahead_tokens)


def drafter_id(
    vllm_config: "VllmConfig", files_id: "Callable[[ModelConfig], str | None]"
) -> str | UnsetType:
    """Which drafter computes the KV of its layers; UNSET where none does.

    Args:
        files_id: digest of a model's files; None where they are unknown, and the model's name has
            to say which they are.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not drafts_with_kv(vllm_config):
        return UNSET
    model: Any = speculative.draft_model_config
    files = files_id(model)
    whose = f"{model.model}@{model.revision or 'default'}" if files is None else files
    told = {
        "method": speculative.method,
        "model": whose,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_dtype": stored_as(
            speculative.kv_cache_dtype or vllm_config.cache_config.cache_dtype, model.dtype
        ),
        "auxiliary_layers": _auxiliary_layers(model.hf_config),
        "tokens_ahead": tokens_ahead(vllm_config),
        "parallel_drafting": speculative.parallel_drafting,
    }
    return f"{speculative.method} {digest(told)}"


def _auxiliary_layers(config: Any) -> list[int] | None:
    """Layers of the target whose hidden states the drafter reads, as vLLM finds them."""
    found = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    if found is None:
        settings = getattr(config, "eagle_config", None)
        found = settings.get("eagle_aux_hidden_state_layer_ids") if settings else None
    return None if found is None else [int(each) for each in found]
