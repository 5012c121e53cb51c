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
    are groups of encoder-only layers, which have no cache at all. A pipeline stage may have
    groups without layers.

    Raises:
        LayoutError: a spec that is not known, or a layer without one.
    """
    own = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    specs = []
    for group in kv_cache_config.transfer_groups:
        kinds = {_kind(spec) for spec in _all_specs(group)}
        if kinds == {_ENCODER_ONLY}:
            continue
        # Configurations without tensors (a scheduler's, in tests) leave out no layer.
        names = [name for name in group.layer_names if not own or name in own]
        specs.append(
            GroupSpec(
                kind="+".join(sorted(kinds)),
                block_size=group.kv_cache_spec.block_size,
                layers=tuple(_layer_spec(name, _spec_of(group, name)) for name in names),
                sliding_window=_window(group),
            )
        )
    return tuple(specs)


def _all_specs(group: "KVCacheGroupSpec") -> list["KVCacheSpec"]:
    """The specs of a group's layers: one for all of them, or one each."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [group.kv_cache_spec] if per_layer is None else list(per_layer.values())


def _spec_of(group: "KVCacheGroupSpec", name: str) -> "KVCacheSpec":
    per_layer: dict[str, KVCacheSpec] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is None:
        return group.kv_cache_spec
    if name not in per_layer:
        raise LayoutError(f"vLLM gives no KV cache spec for layer {name}")
    spec = per_layer[name]
    if spec.block_size != group.kv_cache_spec.block_size:
        raise LayoutError(
            f"layer {name} has blocks of {spec.block_size} tokens in a group of blocks of "
            f"{group.kv_cache_spec.block_size}"
        )
    return spec


def _kind(spec: "KVCacheSpec") -> str:
    for base in type(spec).__mro__:
        if base.__name__ in _KINDS:
            return _KINDS[base.__name__]
    raise LayoutError(
        f"vLLM's KV cache spec {type(spec).__name__} is not known to this version of "
        f"omni-connector; known are {', '.join(sorted(_KINDS))}"
    )


def _layer_spec(name: str, spec: "KVCacheSpec") -> LayerSpec:
    content: int
    if _kind(spec) == "mamba":
        content = spec.state_content_size_bytes
    else:
        content = spec.unpadded_page_size_bytes  # type: ignore[attr-defined]
    return LayerSpec(name, content, spec.page_size_bytes)


def _window(group: "KVCacheGroupSpec") -> int | None:
    """Tokens whose blocks a sliding window keeps; the largest, where layers differ.

    Full attention may carry a window too: its blocks are kept for all tokens nevertheless.
    """
    windows: list[int] = [
        # Speculative decoding may compute the tokens just before the window again.
        spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)  # type: ignore[attr-defined]
        for spec in _all_specs(group)
        if _kind(spec).startswith("sliding_window")
    ]
    return max(windows, default=None)
