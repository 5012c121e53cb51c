# SPDX-License-Identifier: Apache-2.0
"""What a model's attention layers say: their kernels, where these put a token, and their scales.

A page of `[heads, tokens, content]` holds one token after the other for every kernel but those of
vLLM on CPUs, which keep all keys of a head, transposed or in tiles, and then all its values.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from omni_connector.vllm_v1.specs import own_layers, spec_of, transferred_groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SCALES: Final = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
_CPU: Final = "CPU_ATTN"
_ROWS: Final = re.compile(r"(?:H(?P<heads>\d+)\.)?N(?P<tokens>\d+)\.C(?P<content>\d+)")


def attention_of(kv_cache_config: "KVCacheConfig", layers: Mapping[str, Any]) -> tuple[str, ...]:
    """The attention backends of each transferred group, with the instruction set on CPUs.

    Args:
        layers: the model's layers by name. Layers without an entry, as in tests, are left out.
    """
    return tuple(
        "+".join(
            sorted(
                {
                    _kernel(layers[name])
                    for name in own_layers(kv_cache_config, group)
                    if name in layers
                }
            )
        )
        for group in transferred_groups(kv_cache_config).values()
    )


def kernel_orders(
    kv_cache_config: "KVCacheConfig", layers: Mapping[str, Any], orders: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """The byte orders of pages as the kernels use these; see `SlotConverter`.

    An order that is not known in detail gets a name of its own. Blocks of such an order are copied
    whole, and never converted.

    Args:
        orders: what vLLM's views say, as `CanonicalKVCaches` has it.
    """
    found = []
    for group, pages in zip(transferred_groups(kv_cache_config).values(), orders, strict=True):
        names = own_layers(kv_cache_config, group)
        if len(names) != len(pages):  # several names for the same bytes
            kernels = {_kernel(layers[name]) for name in names if name in layers}
            opaque = any(kernel.startswith(_CPU) for kernel in kernels)
            found.append(tuple(f"{page}?" if opaque else page for page in pages))
            continue
        found.append(
            tuple(
                _cpu_order(page, layers[name], spec_of(group, name).dtype.itemsize)  # type: ignore[attr-defined]
                if name in layers and _kernel(layers[name]).startswith(_CPU)
                else page
                for name, page in zip(names, pages, strict=True)
            )
        )
    return tuple(found)


def scales_id(kv_cache_config: "KVCacheConfig", layers: Mapping[str, Any]) -> str:
    """A digest of the scales of a rank's attention layers, as the checkpoint or the user gave them.

    "" where all scales are 1.

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


def _kernel(layer: Any) -> str:
    name = str(layer.get_attn_backend().get_name())
    return f"{name}.{getattr(layer, 'isa', 'unknown')}" if name == _CPU else name


def _cpu_order(page: str, layer: Any, item: int) -> str:
    """How vLLM's `cpu_attn_reshape_and_cache` fills a page, found out by writing with it."""
    isa = getattr(layer, "isa", None)
    rows = _ROWS.fullmatch(page)
    if rows is None or isa not in ("vec", "vec16", "amx"):
        return f"{page}?"
    heads, tokens, content = int(rows["heads"] or 1), int(rows["tokens"]), int(rows["content"])
    dim = content // (2 * item)
    if isa != "amx":
        return f"H{heads}.(C{dim}.N{tokens}.C{item}|N{tokens}.C{dim * item})"
    row = 4 // item  # a row of a tile has 4 bytes
    if not row or tokens % 16 or dim % 16:
        return f"{page}?"
    return (
        f"H{heads}.(N{tokens // 16}.C{dim // row}.N16.C4"
        f"|C{dim // 16}.N{tokens // row}.C16.N{row}.C{item})"
    )
