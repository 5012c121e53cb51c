# SPDX-License-Identifier: Apache-2.0
"""How the tensor-parallel ranks of vLLM share out the recurrent states of its layers.

vLLM's specs have the shapes of one rank's state. Which of the whole model's numbers these are
follows from how a layer cuts its weights, and its class alone tells that. Layers of other classes
are handed off between equally many ranks only.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

from omni_connector.kv.states import StateCut, StatePart, StateTensor, cut_bytes, state_units
from omni_connector.vllm_v1.specs import own_layers, spec_of, transferred_groups

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

Shape = tuple[int, ...]


def cuts_of(
    kv_cache_config: "KVCacheConfig", layers: Mapping[str, Any], ranks: int
) -> tuple[StateCut, ...]:
    """How ranks share out the states of each transferred group; empty where there are none, or
    where the rule of a layer is not known, or layers of the group differ.

    Args:
        layers: the model's layers by name.
        ranks: tensor-parallel size.
    """
    found = []
    for group in transferred_groups(kv_cache_config).values():
        names = own_layers(kv_cache_config, group)
        cuts = {_cut(spec_of(group, name), layers.get(name), ranks) for name in names}
        found.append(cuts.pop() if len(cuts) == 1 else ())
    return tuple(found)


def _cut(spec: Any, layer: Any, ranks: int) -> StateCut:
    shapes, dtypes = getattr(spec, "shapes", ()), getattr(spec, "dtypes", ())
    rule = _RULES.get(type(layer).__name__)
    if getattr(spec, "tp_replicated", False):  # in vLLM's specs from 0.31 on
        rule = _replicated
    if rule is None or not shapes or len(shapes) != len(dtypes):
        return ()
    cut = rule(layer, shapes, dtypes, ranks)
    if cut_bytes(cut) != spec.state_content_size_bytes:
        # It keeps more than the rule knows, such as the latest inputs with `--use-replayssm`.
        return ()
    fits = all(state_units(part, ranks) == part.units for each in cut for part in each.parts)
    return cut if fits else ()


_Rule = Callable[[Any, tuple[Shape, ...], tuple["torch.dtype", ...], int], StateCut]


def _channels(layer: Any, shapes: Any, dtypes: Any, ranks: int) -> StateCut:
    """Mamba 1 and short convolutions: ranks share out the channels of all tensors."""
    first, *others = zip(shapes, dtypes, strict=True)
    channels = first[0][1 - _conv_dim_first()]
    parts = [("channel", channels * ranks, channels, 1)]
    return (_convolution(*first, parts), *(_of_heads(*each, ranks) for each in others))


def _groups(layer: Any, shapes: Any, dtypes: Any, ranks: int) -> StateCut:
    """Mamba 2: a convolution of x, B and C. B and C of one group are on every rank."""
    heads, head_dim, state_size = shapes[1]
    # The layer's own `n_groups` counts copies of one group, too.
    total = int(layer.norm.n_groups)
    inner, groups = heads * head_dim, max(1, total // ranks)
    of_groups = total, groups, state_size
    parts = [("x", inner * ranks, inner, 1), ("B", *of_groups), ("C", *of_groups)]
    return _convolution(shapes[0], dtypes[0], parts), _of_heads(shapes[1], dtypes[1], ranks)


def _delta(layer: Any, shapes: Any, dtypes: Any, ranks: int) -> StateCut:
    """Gated delta nets: a convolution of query, key and value, and a matrix for each value head."""
    heads, value_dim, _ = shapes[1]
    values = heads * value_dim
    keys = (shapes[0][1 - _conv_dim_first()] - values) // 2
    parts = [(name, keys * ranks, keys, 1) for name in ("query", "key")]
    parts.append(("value", values * ranks, values, 1))
    return _convolution(shapes[0], dtypes[0], parts), _of_heads(shapes[1], dtypes[1], ranks)


def _heads(layer: Any, shapes: Any, dtypes: Any, ranks: int) -> StateCut:
    """Linear attention: a matrix for each head."""
    return tuple(
        _of_heads(shape, dtype, ranks) for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def _replicated(layer: Any, shapes: Any, dtypes: Any, ranks: int) -> StateCut:
    """Every rank has the whole state."""
    return tuple(
        StateTensor(_named(dtype), 1, (StatePart("all", 1, 1, prod(shape) * dtype.itemsize),))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def _convolution(
    shape: Shape, dtype: "torch.dtype", parts: list[tuple[str, int, int, int]]
) -> StateTensor:
    """The last inputs of a convolution: a row for each, or with `dim first` a row of each channel.

    Args:
        parts: of its channels: name, units in the whole model, units on a rank, and channels of a
            unit.
    """
    length = shape[_conv_dim_first()]
    rows, size = (1, length * dtype.itemsize) if _conv_dim_first() else (length, dtype.itemsize)
    units = (StatePart(name, total, own, width * size) for name, total, own, width in parts)
    return StateTensor(_named(dtype), rows, tuple(units))


def _of_heads(shape: Shape, dtype: "torch.dtype", ranks: int) -> StateTensor:
    """A tensor whose first dimension ranks share out."""
    heads = StatePart("head", shape[0] * ranks, shape[0], prod(shape[1:]) * dtype.itemsize)
    return StateTensor(_named(dtype), 1, (heads,))


def _named(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


# By the name of the class itself: its subclasses may cut otherwise, and none of these has to exist
# in every vLLM.
_RULES: Final[Mapping[str, _Rule]] = {
    "MambaMixer": _channels,
    "ShortConv": _channels,
    "MambaMixer2": _groups,
    "QwenGatedDeltaNetAttention": _delta,
    "OlmoHybridGatedDeltaNetAttention": _delta,
    "KimiGatedDeltaNetAttention": _delta,
    "KimiK3DeltaAttention": _delta,
    "Glm5NextLinearAttention": _delta,
    "BailingMoeV3KimiDeltaAttention": _delta,
    "MiniMaxText01LinearAttention": _heads,
    "BailingMoELinearAttention": _heads,
}


def _conv_dim_first() -> bool:
    """Whether the states of convolutions have a row for each channel, and not for each input:
    `VLLM_SSM_CONV_STATE_LAYOUT`."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())
