# SPDX-License-Identifier: Apache-2.0
"""What vLLM says of its KV cache groups, in this package's own terms, and which are supported."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import UNSET
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from omni_connector.errors import ConfigError, LayoutError
from omni_connector.kv.canonical import GroupSpec, LayerSpec
from omni_connector.kv.shapes import GroupShape, states_of
from omni_connector.kv.states import StateCut
from omni_connector.vllm_v1.compat import (
    may_load_replayed,
    replayed_tokens,
    says_replicated,
)
from omni_connector.vllm_v1.drafter import require_supported_drafter

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_ENCODER_ONLY = "encoder_only_attention"

# By the name of the class itself: its subclasses may mean other bytes, and none of these has to
# exist in every vLLM.
_KINDS = {
    "SlidingWindowMLASpec": "sliding_window_mla",
    "HiddenStateCacheSpec": "hidden_state",
    "MLAAttentionSpec": "mla_attention",
    "SinkFullAttentionSpec": "sink_full_attention",
    "RSWASpec": "reference_sliding_window",
    "FullAttentionSpec": "full_attention",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "SlidingWindowSpec": "sliding_window",
    "CircularBufferSpec": "circular_buffer",
    "CrossAttentionSpec": "cross_attention",
    "EncoderOnlyAttentionSpec": _ENCODER_ONLY,
    "MambaSpec": "mamba",
}

_SUPPORTED_KINDS: Final = frozenset(
    {
        "chunked_local_attention",
        "circular_buffer",
        "full_attention",
        "mamba",
        "mla_attention",
        "reference_sliding_window",
        "sink_full_attention",
        "sliding_window",
        "sliding_window_mla",
    }
)


_OMNI_DIFFUSION: Final = "vllm_omni.diffusion."


def require_vllm_engine(vllm_config: "VllmConfig") -> None:
    """Refuse an engine that drives a connector in another way than vLLM's scheduler does.

    Raises:
        ConfigError: it is a diffusion stage of vLLM-Omni.
    """
    if type(getattr(vllm_config, "model_config", None)).__module__.startswith(_OMNI_DIFFUSION):
        # Its scheduler calls neither `bind_kv_cache_manager` nor the handshake.
        raise ConfigError(
            "a diffusion stage of vLLM-Omni receives KV by kv_transfer_config from "
            "MooncakeConnector alone, and OmniKVConnector cannot take its place. Remove "
            "kv_transfer_config from both stages, and name one of our connectors for their edge "
            "instead: {name: OmniSharedMemoryConnector}, or between hosts {name: "
            "OmniMooncakeTransferEngineConnector}, with need_send_cache and need_recv_cache in "
            "omni_kv_config (docs/stage.md)"
        )


def require_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Refuse what would start and then answer with wrong tokens.

    Raises:
        LayoutError: a cache family is not handed off correctly yet.
        ConfigError: a parallel layout or a decoding method is not supported.
    """
    for group in group_specs(kv_cache_config):
        if not _SUPPORTED_KINDS.issuperset(group.kind.split("+")):
            where = f" (layer {group.layers[0].name})" if group.layers else ""
            raise LayoutError(
                f"this model keeps a {group.kind} cache{where}, which OmniKVConnector does not "
                f"move; supported: {', '.join(sorted(_SUPPORTED_KINDS))}"
            )
    if any(group.host_resident for group in kv_cache_config.kv_cache_groups):
        raise LayoutError(
            "vLLM keeps KV of this model in the memory of the host (HiSparse), and numbers blocks "
            "there by themselves, which OmniKVConnector does not support"
        )
    require_supported_engine(vllm_config)
    for group_id, transferred in transferred_groups(kv_cache_config).items():
        where = _example(group_id, transferred)
        spec = transferred.kv_cache_spec
        replayed = replayed_tokens(spec) > 0
        if replayed and not may_load_replayed():
            raise LayoutError(
                f"vLLM computes the last window of {where} again after every load, also where the "
                f"load brings it; set --no-swa-bounded-replay, or install vLLM 0.32 or later"
            )
        if not (spec.prefix_cacheable or replayed or _retention(transferred)[0] == "ring"):
            raise LayoutError(
                f"vLLM's prefix cache leaves out {where}, and what a prefix hit means there is not "
                f"known to OmniKVConnector"
            )


def require_supported_engine(vllm_config: "VllmConfig") -> None:
    """Refuse what is known before the model is loaded.

    Raises:
        ConfigError: a parallel layout or a decoding method is not supported.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise ConfigError(f"{name} is {size}; OmniKVConnector supports only 1")
    require_supported_drafter(vllm_config)


def transferred_groups(kv_cache_config: "KVCacheConfig") -> dict[int, "KVCacheGroupSpec"]:
    """The groups that vLLM lets a connector transfer, by their index among all its groups.

    Groups of encoder-only layers, which have no cache at all, are left out.

    Raises:
        LayoutError: a spec is not known.
    """
    return {
        group_id: group
        for group_id in kv_cache_config.transfer_group_ids
        for group in (kv_cache_config.kv_cache_groups[group_id],)
        if {_kind(spec) for spec in _all_specs(group)} != {_ENCODER_ONLY}
    }


def group_specs(kv_cache_config: "KVCacheConfig") -> tuple[GroupSpec, ...]:
    """The transferred groups in this package's own terms, in vLLM's order.

    Layers that read another layer's cache have no bytes of their own and are left out. A pipeline
    stage has its own layers only, and may have groups without layers.

    Raises:
        LayoutError: a spec is not known, or a layer has none.
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
            )
        )
    return tuple(specs)


def group_shapes(
    kv_cache_config: "KVCacheConfig",
    page_orders: Sequence[Sequence[str]],
    attention: Sequence[str],
    kept: Sequence[str] = (),
    cuts: Sequence[StateCut] = (),
) -> tuple[GroupShape, ...]:
    """The transferred groups in the terms that peers compare.

    Args:
        page_orders: byte orders of the pages, by group.
        attention: attention backends, by group.
        kept: what these keep of a token; see `kernels.kept_of`.
        cuts: how ranks share out states; see `states.cuts_of`.
    """
    groups = transferred_groups(kv_cache_config).values()
    shapes = []
    kept = kept or [""] * len(attention)
    cuts = cuts or [()] * len(attention)
    for group, pages, kernels, each, cut in zip(
        groups, page_orders, attention, kept, cuts, strict=True
    ):
        names = own_layers(kv_cache_config, group)
        attention_type, window = _retention(group)
        shapes.append(
            GroupShape(
                kind=_group_kind(group),
                block_size=group.kv_cache_spec.block_size,
                attention_type=attention_type,
                window=window,
                layers=hashlib.sha256("\0".join(names).encode()).hexdigest()[:16],
                # Of a group without layers in this pipeline stage vLLM tells the spec, too.
                replicated=all(
                    map(
                        _is_replicated,
                        [spec_of(group, each) for each in names] or _all_specs(group),
                    )
                ),
                attention=kernels,
                kept=each or UNSET,
                pages=tuple(pages),
                uncached=UNSET if group.kv_cache_spec.prefix_cacheable else True,
                states=states_of(spec for spec in _all_specs(group) if _kind(spec) == "mamba"),
                cut=cut or UNSET,
                # Fewer pages than names: some are several names for the same bytes.
                names=tuple(names) if len(names) == len(pages) else UNSET,
            )
        )
    return tuple(shapes)


def with_copies(
    shapes: Sequence[GroupShape],
    kv_cache_config: "KVCacheConfig",
    copies: Mapping[str, int],
    ranks: int,
) -> tuple[GroupShape, ...]:
    """The same groups, with the copies of KV heads that the ranks of an engine hold.

    Args:
        shapes: of `group_shapes`.
        copies: consecutive ranks that hold the same head, by layer; see
            `loaded_models.head_copies`.
        ranks: tensor-parallel size.
    """
    found = []
    groups = transferred_groups(kv_cache_config).values()
    for shape, group in zip(shapes, groups, strict=True):
        told: list[int] = []
        if not shape.replicated and shape.attention_type not in ("last", "ring"):
            for name, heads in zip(shape.names or (), shape.heads, strict=False):
                of_layer = ranks if _is_replicated(spec_of(group, name)) else copies.get(name, 1)
                told.append(of_layer if heads == 1 else 1)
        has_copies = max(told, default=1) > 1
        found.append(msgspec.structs.replace(shape, copies=tuple(told)) if has_copies else shape)
    return tuple(found)


def attends_to_all(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether every group keeps the blocks of all tokens."""
    return all(
        _retention(group)[0] == "all" for group in transferred_groups(kv_cache_config).values()
    )


def uncached_groups(kv_cache_config: "KVCacheConfig") -> frozenset[int]:
    """The transferred groups that vLLM's prefix cache has not, by their index among all groups."""
    return frozenset(
        group_id
        for group_id, group in transferred_groups(kv_cache_config).items()
        if not group.kv_cache_spec.prefix_cacheable
    )


def replay(kv_cache_config: "KVCacheConfig") -> int:
    """Tokens at the end of a prefix hit that vLLM computes again, with the windows of all groups;
    0 if it computes none again."""
    return max(
        (replayed_tokens(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups),
        default=0,
    )


def cached_block_sizes(kv_cache_config: "KVCacheConfig") -> list[int]:
    """Tokens of a block of each group that vLLM's prefix cache has."""
    return [
        group.kv_cache_spec.block_size
        for group in transferred_groups(kv_cache_config).values()
        if group.kv_cache_spec.prefix_cacheable
    ]


def state_refusal(kv_cache_config: "KVCacheConfig") -> str | None:
    """Why the recurrent states of a model cannot be shared; None if they can, or there are none."""
    for group_id, group in transferred_groups(kv_cache_config).items():
        states = [spec for spec in _all_specs(group) if _kind(spec) == "mamba"]
        if not states:
            continue
        where = f"the recurrent states of {_example(group_id, group)}"
        modes = {spec.mamba_cache_mode for spec in states}  # type: ignore[attr-defined]
        if modes != {"align"}:
            return (
                f"{where} are kept in mode {'+'.join(sorted(modes))!r}; only "
                "--mamba-cache-mode align keeps those at the ends of blocks"
            )
        if len(states) < len(_all_specs(group)):
            return f"{where} share a group with layers that attend to tokens"
    return None


def state_block_size(kv_cache_config: "KVCacheConfig") -> int:
    """Tokens of a block at whose end vLLM keeps a recurrent state; 0 where it keeps the last state
    alone, or there are none."""
    return max(
        (
            group.kv_cache_spec.block_size
            for group in transferred_groups(kv_cache_config).values()
            for spec in _all_specs(group)
            if getattr(spec, "mamba_cache_mode", "") == "align"
        ),
        default=0,
    )


def _example(group_id: int, group: "KVCacheGroupSpec") -> str:
    """How a message names a group. A pipeline stage may have none of its layers."""
    return f"layer {group.layer_names[0]}" if group.layer_names else f"KV cache group {group_id}"


def fails_by_block(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether a failed load is reported by its blocks, so that vLLM recomputes only these.

    vLLM can do so only where there is one group that keeps the blocks of all tokens. Elsewhere the
    request is reported, and recomputed from its first token.
    """
    return len(kv_cache_config.kv_cache_groups) == 1 and attends_to_all(kv_cache_config)


def own_layers(kv_cache_config: "KVCacheConfig", group: "KVCacheGroupSpec") -> list[str]:
    """The layers of a group that have bytes of their own, in order."""
    own = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    # Configurations without tensors (a scheduler's, in tests) leave out no layer.
    return [name for name in group.layer_names if not own or name in own]


def _group_kind(group: "KVCacheGroupSpec") -> str:
    return "+".join(sorted({_kind(spec) for spec in _all_specs(group)}))


def _is_replicated(spec: "KVCacheSpec") -> bool:
    """Whether every rank keeps the same bytes of a layer."""
    # Rings hold what an indexer or a compressor has not compressed yet, which no rank shares out.
    return says_replicated(spec) or "mla" in _kind(spec) or _kind(spec) == "circular_buffer"


def _retention(
    group: "KVCacheGroupSpec",
) -> tuple[Literal["all", "window", "chunk", "last", "ring"], int]:
    kinds = {_kind(spec) for spec in _all_specs(group)}
    if kinds == {"circular_buffer"}:
        return "ring", 0
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
    spec = group.kv_cache_spec
    return (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )


def spec_of(group: "KVCacheGroupSpec", name: str) -> "KVCacheSpec":
    """The spec of a layer of a group."""
    if not isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return group.kv_cache_spec
    spec = group.kv_cache_spec.kv_cache_specs.get(name)
    if spec is None:
        raise LayoutError(f"vLLM gives no KV cache spec for layer {name}")
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
