# SPDX-License-Identifier: Apache-2.0
"""What older CPU builds of vLLM do not compute, whatever the connector, or without one."""

import re
from typing import Final

import torch

from omni_connector.plugin import installed_vllm

_INSTALLED = installed_vllm()
_VERSION: Final = _INSTALLED.version if _INSTALLED else ""
_RELEASE: Final = tuple(map(int, re.findall(r"\d+", _VERSION)[:2]))

_MODELS: Final[dict[str, tuple[tuple[int, ...], str]]] = {
    "gptoss": ((0, 31), "expected scalar type BFloat16 but found Float"),
    "lfm2": ((0, 32), "causal_conv1d_weight_pack: support only width of 4"),
}

DRAFTS: Final = "" if _RELEASE >= (0, 31) else "drafts: Cannot inspect kernel parameters"
"""Why there is no speculative decoding; "" where there is."""

FP8_KV: Final = (
    ""
    if torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    else "FP8 KV cache on CPU requires x86 with AVX-512 or AMX"
)
"""Why there is no KV cache of FP8; "" where there is."""


def obstacle(recipe: str) -> str:
    """Why a model of `omni_connector.testing.models` is not computed; "" where it is."""
    since, why = _MODELS.get(recipe, ((), ""))
    return "" if since <= _RELEASE else f"{recipe} with vLLM {_VERSION}: {why}"
