# SPDX-License-Identifier: Apache-2.0
"""What vLLM says of its KV cache groups, in this package's own terms."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from omni_connector.errors import LayoutError
from omni_connector.kv.canonical import GroupSpec, LayerSpec
from omni_connector.kv.shapes import GroupShape

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_ENCODER_ONLY = "encoder_only_attention"

# By name, so that a class that another vLLM lacks need not be imported. By its own, not that of
# a base: vLLM 0.31 has a ring of scratch tokens that is a sliding window by its base only.
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


def transferred_groups(kv_cache_config: "KVCacheConfig") -> dict[int, "KVCacheGroupSpec"]:
    """The groups that vLLM lets a connector transfer, by their index among all its groups.

    Groups of encoder-only layers, which have no cache at all, are left out.

    Raises:
        LayoutError: a spec that is not known.
    """
    return {
        group_id: group
        for group_id in kv_cache_config.transfer_group_ids
        for group in (kv_cache_config.kv_cache_groups[group_id],)
        if {_kind(spec) for spec in _all_specs(group)} != {_ENCODER_ONLY}
    }


def group_specs(kv_cache_config: "KVCacheConfig") -> tuple[GroupSpec, ...]:
    """The transferred groups in this package's own terms, in vLLM's order.

    Layers that read another layer's cache are left out: they have no bytes of their own. A
    pipeline stage may have groups without layers.

    Raises:
        LayoutError: a spec that is not known, or a layer without one.
    """
    specs = []
    for group in transferred_groups(kv_cache_config).values():
        specs.append(
            GroupSpec(
                kind=_group_kind(group),
                block_size=group.kv_cache_spec.block_size,
                layers=tuple(
                    _layer_spec(name, spec_of(group, name))
                    for name in own_layers(kv_cache_config, group)
                ),
                sliding_window=_window(group),
            )
        )
    return tuple(specs)


def group_shapes(
    kv_cache_config: "KVCacheConfig",
    page_orders: Sequence[Sequence[str]],
    attention: Sequence[str],
) -> tuple[GroupShape, ...]:
    """The transferred groups in the terms that peers compare.

    Args:
        page_orders: byte orders of the pages, by group.
        attention: attention backends, by group.
    """
    groups = transferred_groups(kv_cache_config).values()
    shapes = []
    for group, pages, kernels in zip(groups, page_orders, attention, strict=True):
        names = own_layers(kv_cache_config, group)
        keeps, span = _retention(group)
        shapes.append(
            GroupShape(
                kind=_group_kind(group),
                block_size=group.kv_cache_spec.block_size,
                keeps=keeps,
                span=span,
                layers=hashlib.sha256("\0".join(names).encode()).hexdigest()[:16],
                replicated=all(_is_replicated(spec_of(group, name)) for name in names),
                attention=kernels,
                pages=tuple(pages),
            )
        )
    return tuple(shapes)


def keeps_all(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether every group keeps the blocks of all tokens."""
    return all(
        _retention(group)[0] == "all" for group in transferred_groups(kv_cache_config).values()
    )


def fails_by_block(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether a failed load is reported by its blocks, so that only they are recomputed.

    vLLM can do that only where there is one group, and all blocks before them are there to
    recompute them from; else the request is reported, and recomputed from its first token.
    """
    return len(kv_cache_config.kv_cache_groups) == 1 and keeps_all(kv_cache_config)


def own_layers(kv_cache_config: "KVCacheConfig", group: "KVCacheGroupSpec") -> list[str]:
    """The layers of a group that have bytes of their own, in order."""
    own = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    # Configurations without tensors (a scheduler's, in tests) leave out no layer.
    return [name for name in group.layer_names if not own or name in own]


def _group_kind(group: "KVCacheGroupSpec") -> str:
    return "+".join(sorted({_kind(spec) for spec in _all_specs(group)}))


def _is_replicated(spec: "KVCacheSpec") -> bool:
    # vLLM before 0.31 has only the family to go by.
    return getattr(spec, "max_tp_shards", None) == 1 or "mla" in _kind(spec)


def _retention(group: "KVCacheGroupSpec") -> tuple[Literal["all", "window", "chunk", "last"], int]:
    kinds = {_kind(spec) for spec in _all_specs(group)}
    if kinds == {"mamba"}:
        return "last", 0
    if kinds == {"chunked_local_attention"}:
        return "chunk", min(spec.attention_chunk_size for spec in _all_specs(group))  # type: ignore[attr-defined]
    if kinds <= {"sliding_window", "sliding_window_mla"}:
        # Without the tokens that speculative decoding retains besides: no later token reads them.
        return "window", max(spec.sliding_window for spec in _all_specs(group))  # type: ignore[attr-defined]
    return "all", 0


def _all_specs(group: "KVCacheGroupSpec") -> list["KVCacheSpec"]:
    """The specs of a group's layers: one for all of them, or one each."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [group.kv_cache_spec] if per_layer is None else list(per_layer.values())


def spec_of(group: "KVCacheGroupSpec", name: str) -> "KVCacheSpec":
    """The spec of a layer of a group."""
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
    kind = _KINDS.get(type(spec).__name__)
    if kind is not None:
        return kind
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
