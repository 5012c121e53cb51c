# SPDX-License-Identifier: Apache-2.0
"""What vLLM says of its KV cache groups, in this package's own terms."""

from typing import TYPE_CHECKING

from omni_connector.errors import LayoutError
from omni_connector.kv.canonical import GroupSpec, LayerSpec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_ENCODER_ONLY = "encoder_only_attention"

# By name, so that a class that another vLLM lacks need not be imported; looked up along the
# class's bases, as vLLM takes a subclass of a spec to be cached like the spec itself.
_KINDS = {
    "SlidingWindowMLASpec": "sliding_window_mla",
    "HiddenStateCacheSpec": "hidden_state",
    "MLAAttentionSpec": "mla_attention",
    "SinkFullAttentionSpec": "sink_full_attention",
    "RSWASpec": "reference_sliding_window",
    "FullAttentionSpec": "full_attention",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "SlidingWindowSpec": "sliding_window",
    "CrossAttentionSpec": "cross_attention",
    "EncoderOnlyAttentionSpec": _ENCODER_ONLY,
    "MambaSpec": "mamba",
}


def group_specs(kv_cache_config: "KVCacheConfig") -> tuple[GroupSpec, ...]:
    """The groups that vLLM lets a connector transfer, in its order.

    Layers that read another layer's cache are left out: they have no bytes of their own. So
    are groups of encoder-only layers, which have no cache at all.

    Raises:
        LayoutError: a spec that is not known, or a layer without one.
    """
    own = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    specs = []
    for group in kv_cache_config.transfer_groups:
        # Scheduler-side configurations of tests and old versions place no tensors.
        names = [name for name in group.layer_names if not own or name in own]
        layer_specs = _layer_specs(group, names)
        kinds = {_kind(spec) for spec in layer_specs}
        if kinds == {_ENCODER_ONLY}:
            continue
        specs.append(_group_spec(names, layer_specs, kinds))
    return tuple(specs)


def _layer_specs(group: "KVCacheGroupSpec", names: list[str]) -> list["KVCacheSpec"]:
    per_layer: dict[str, KVCacheSpec] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is None:
        return [group.kv_cache_spec] * len(names)
    missing = [name for name in names if name not in per_layer]
    if missing:
        raise LayoutError(f"vLLM gives no KV cache spec for layer {missing[0]}")
    return [per_layer[name] for name in names]


def _group_spec(names: list[str], layer_specs: list["KVCacheSpec"], kinds: set[str]) -> GroupSpec:
    windows = {_window(spec) for spec in layer_specs}
    block_sizes = {spec.block_size for spec in layer_specs}
    if len(block_sizes) != 1:
        raise LayoutError(f"a KV cache group of block sizes {sorted(block_sizes)}: {names}")
    return GroupSpec(
        kind="+".join(sorted(kinds)),
        block_size=block_sizes.pop(),
        layers=tuple(
            LayerSpec(name, _content_bytes(spec), spec.page_size_bytes)
            for name, spec in zip(names, layer_specs, strict=True)
        ),
        sliding_window=windows.pop() if len(windows) == 1 else None,
    )


def _kind(spec: "KVCacheSpec") -> str:
    for base in type(spec).__mro__:
        if base.__name__ in _KINDS:
            return _KINDS[base.__name__]
    raise LayoutError(
        f"vLLM's KV cache spec {type(spec).__name__} is not known to this version of "
        f"omni-connector; known are {', '.join(sorted(_KINDS))}"
    )


def _content_bytes(spec: "KVCacheSpec") -> int:
    """Bytes of one block of one layer, without the padding of its page."""
    if _kind(spec) == "mamba":
        return spec.state_content_size_bytes
    content: int = spec.unpadded_page_size_bytes  # type: ignore[attr-defined]
    return content


def _window(spec: "KVCacheSpec") -> int | None:
    """Tokens whose blocks a sliding window keeps.

    Full attention may carry a window too: its blocks are kept for all tokens nevertheless.
    """
    if not _kind(spec).startswith("sliding_window"):
        return None
    window: int = spec.sliding_window  # type: ignore[attr-defined]
    # Speculative decoding may prefill the window's last tokens again.
    return window + int(getattr(spec, "extra_retained_tokens", 0))
