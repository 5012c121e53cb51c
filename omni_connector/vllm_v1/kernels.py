# SPDX-License-Identifier: Apache-2.0
"""What a model's attention layers say: their kernels, where these put a token, and their scales."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from omni_connector.kv.numerics import stored_as
from omni_connector.kv.page_orders import CPU, UNKNOWN, kept_by, kernel_order
from omni_connector.vllm_v1.compat import fp8_format, has_amx_fp8, interleaves_values
from omni_connector.vllm_v1.specs import own_layers, spec_of, transferred_groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_PLAIN: Final = (torch.bfloat16, torch.float16, torch.float32)
# vLLM's `--kv-cache-dtype` for numbers as they are.
_UNQUANTIZED: Final = frozenset({"auto", "bfloat16", "float16", "float32", "half", "float"})
# Kinds of quantized KV without FP8 numbers, whose bytes mean the same on all platforms.
_WITHOUT_FP8: Final = frozenset(
    {
        "int4_per_token_head",
        "int8_per_token_head",
        "turboquant_3bit_nc",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "ultraquant_4bit",
    }
)
_SCALES: Final = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")


def attention_of(kv_cache_config: "KVCacheConfig", layers: Mapping[str, Any]) -> tuple[str, ...]:
    """The attention backends of each transferred group, with what else tells their kernels apart.

    Args:
        layers: the model's layers by name. Layers without an entry, as in tests, are left out.
    """
    return tuple(
        "+".join(
            sorted(
                {
                    _attention(spec_of(group, name), layers[name])
                    for name in own_layers(kv_cache_config, group)
                    if name in layers
                }
            )
        )
        for group in transferred_groups(kv_cache_config).values()
    )


def kept_of(kv_cache_config: "KVCacheConfig", layers: Mapping[str, Any]) -> tuple[str, ...]:
    """What the kernels of each transferred group keep of a token, as in `keys and values,
    bfloat16`; "" where only like kernels may read it.

    That is so of quantized numbers, too: what they stand for may depend on the platform.

    Args:
        layers: the model's layers by name.
    """
    found = []
    for group in transferred_groups(kv_cache_config).values():
        names = own_layers(kv_cache_config, group)
        kept = {_kept(spec_of(group, name), layers.get(name)) for name in names}
        found.append(kept.pop() if len(kept) == 1 else "")
    return tuple(found)


def _kept(spec: "KVCacheSpec", layer: Any) -> str:
    if layer is None or not isinstance(spec, AttentionSpec):
        return ""
    kept = kept_by(_kernel(layer))
    plain = not _quantized(spec, layer)
    return f"{kept}, {str(spec.dtype).removeprefix('torch.')}" if kept and plain else ""


def kernel_orders(
    kv_cache_config: "KVCacheConfig", layers: Mapping[str, Any], orders: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """The byte orders of pages as the kernels fill these; see `kernel_order`.

    Args:
        layers: the model's layers by name. Of those without an entry the view is believed.
        orders: what vLLM's views say, as `CanonicalKVCaches` has it.
    """
    found = []
    for group, pages in zip(transferred_groups(kv_cache_config).values(), orders, strict=True):
        names = own_layers(kv_cache_config, group)
        # Fewer pages than names: some are several names for the same bytes.
        writers = [[name] for name in names] if len(names) == len(pages) else [names] * len(pages)
        page_orders = []
        for page, each in zip(pages, writers, strict=True):
            said = {_order(page, spec_of(group, name), layers.get(name)) for name in each}
            page_orders.append(said.pop() if len(said) == 1 else page + UNKNOWN)
        found.append(tuple(page_orders))
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


def _order(page: str, spec: "KVCacheSpec", layer: Any) -> str:
    if layer is None or not isinstance(spec, AttentionSpec):  # a state is one piece
        return page
    item = spec.dtype.itemsize
    own_heads = spec.num_head_slots is None
    kind = _quantized(spec, layer)
    return kernel_order(page, _kernel(layer), item=item, own_heads=own_heads, quantized=kind)


def _attention(spec: "KVCacheSpec", layer: Any) -> str:
    """The name of a layer's kernels, with the kind of quantized KV that they keep."""
    kernel = _kernel(layer)
    kind = _quantized(spec, layer)
    if not kind:
        return kernel
    number = "" if kind in _WITHOUT_FP8 else fp8_format(kind)
    return ".".join(filter(None, (kernel, kind, number)))


def _quantized(spec: "KVCacheSpec", layer: Any) -> str:
    """The kind of quantized KV of a layer, as vLLM names it; "" for numbers as they are."""
    if not isinstance(spec, AttentionSpec):
        return ""
    said = str(getattr(layer, "kv_cache_dtype", "auto"))
    if said not in _UNQUANTIZED:
        return stored_as(said, spec.dtype)
    if spec.kv_quant_mode != KVQuantMode.NONE:  # of a layer that does not say it itself
        return spec.kv_quant_mode.name.lower()
    return "" if spec.dtype in _PLAIN else stored_as("auto", spec.dtype)


def _kernel(layer: Any) -> str:
    """The name of a layer's kernels, with what else decides where these put a token."""
    name = str(layer.get_attn_backend().get_name())
    if name == CPU:
        isa = str(getattr(layer, "isa", "unknown"))
        fp8 = str(getattr(layer, "kv_cache_dtype", "")).startswith("fp8")
        return f"{name}.{isa}_fp8" if isa == "amx" and fp8 and has_amx_fp8() else f"{name}.{isa}"
    impl = getattr(layer, "impl", None)
    if getattr(impl, "is_kvcache_nvfp4", False):
        name += ".fa2" if getattr(impl, "nvfp4_fa2", False) else ".trtllm"
    if interleaves_values(impl):
        name += ".interleaved"
    if getattr(impl, "_soa_store", False):  # TurboQuant with FlyDSL
        name += ".soa"
    return name
