# SPDX-License-Identifier: Apache-2.0
"""Where the layers of a model keep what a forward pass computes with.

Most of it is in parameters and in buffers of the model's state. Some of vLLM's kernels keep it
elsewhere once it is loaded:

    kernel                      where its weights are              what is hashed
    oneDNN and others of CPUs   memory that Python cannot read     what was loaded
    MXFP4 experts of Triton     wrapped tensors in attributes      these
    b12x                        packed objects in attributes       these
    MegaMoE, Kimi-K3            attributes and temporary buffers   these
    MLA                         parameters, and what is absorbed   both
    prefetch offloading         memory that layers share in turn   the CPU's copy

`weights_of` finds all of it by name. It compares a layer with what vLLM made it with: a layer that
has lost its weights is searched to the end, and one whose weights are not found is an error that
names it.
"""

import bisect
import dataclasses
import enum
import functools
import itertools
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from omni_connector.identity.loaded_weights import (
    TensorDigest,
    UnreadableWeightsError,
    digest_of_tensor,
)

Weights = dict[str, torch.Tensor | TensorDigest]

# Of a module: digests of its parameters before vLLM processed them, by name.
_LOADED: Final = "_omni_connector_loaded_weights"
# Of a module: vLLM processes its weights just now.
_PROCESSED_NOW: Final = "_omni_connector_processed_now"

_RELOADING: Final = "vllm.model_executor.model_loader.reload.layerwise"
_OFFLOADING: Final = "vllm.model_executor.offloader"
_WITHOUT_COPIES: Final = frozenset({"NoopOffloader", "UVAOffloader"})

# Attributes that hold weights, or what vLLM makes of them, like `W_UK_T` of MLA. Others are counted
# only in layers that have lost their weights: most are scratch memory, and change with each step.
_WEIGHTS: Final = re.compile(
    r"weight|scale|bias|sinks|packed|transformed|prepared|precision|(?:^|_)w(?:\d|_)", re.IGNORECASE
)

# What changes with each step, or with the settings, wherever it is: KV caches, tables of rotary
# embeddings, room to compute in, addresses of memory, adapters.
_SCRATCH: Final = re.compile(
    r"cache|buf|workspace|scratch|dummy|topk|pending|counter|indices|handle|lora|finalize|stream"
    r"|event|(?:^|_)(?:locks?|plans?)(?:_|$)",
    re.IGNORECASE,
)

# Scales of an encoder that computes in FP8 with those of the last images that it has seen.
_OF_IMAGES: Final = re.compile(r"_fp8_[qkv]_scale")

# With `--enable-lora` vLLM puts a layer into another one, under this name.
_LORA_BASE: Final = re.compile(r"(?:^|\.)base_layer(?=\.|$)")

# Objects of a layer of which weights' attributes are looked at.
_HOLDERS: Final = ("quant_method", "scheme", "impl")

# Objects without parts, and those that are of no layer or are layers themselves.
_PLAIN: Final = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, FunctionType})
_OPAQUE: Final = (enum.Enum, type, torch.nn.Module, FunctionType, MethodType, BuiltinFunctionType)
_OPAQUE_MODULES: Final = ("builtins", "vllm.config", "vllm.distributed", "torch.")

# Attributes between a layer and its packed tensors: with experts of Triton, ten.
_DEPTH: Final = 12

# If less than this part of the bytes of lost parameters is found, weights are missing: kernels that
# quantize what they are given leave a quarter. A loss of less than this part of a layer is none:
# kernels drop zero points and orders of rows that they need not.
_SHARE_LEFT: Final = 8

_NO_ATTRIBUTES: Final = frozenset({*vars(torch.nn.Module()), _LOADED})


def weights_of(model: torch.nn.Module) -> Mapping[str, torch.Tensor | TensorDigest]:
    """What a model's forward pass computes with, by name: parameters, buffers that belong to its
    state, and what vLLM's kernels keep elsewhere. A cache of rotary embeddings, which settings
    size, does not count, nor do scales that follow the images of requests. Names are those that a
    model has without `--enable-lora`.

    Raises:
        UnreadableWeightsError: the weights of some layers are not found; the message names one.
    """
    offloaded = _offloaded()
    found: Weights = {}
    registered: list[torch.Tensor] = []
    for prefix, module in _modules(model, every_name=True):
        for name, tensor in _registered(module).items():
            registered.append(tensor)
            found[_joined(prefix, name)] = offloaded.get(id(tensor), tensor)
    memory = _Memory(registered)
    modules = list(_modules(model))
    seen: set[int] = set()
    unknown: list[str] = []
    for prefix, module in modules:
        digests: dict[str, TensorDigest] = vars(module).get(_LOADED, {})
        lost = _lost(module, digests)
        for name in lost.keys() & digests.keys():
            found[_joined(prefix, name)] = digests[name]
        hidden = {name: nbytes for name, nbytes in lost.items() if name not in digests}
        everything = not _suffices(module, hidden, {})
        elsewhere = dict(_found_in(module, seen, everything=everything))
        if everything and not _suffices(module, hidden, elsewhere):
            unknown.append(f"vLLM has packed {_joined(prefix, min(hidden))} out of sight")
        for name, tensor in elsewhere.items():
            if not memory.has(tensor):
                found[_joined(prefix, name)] = tensor
    owners = {owner for name in found for owner in _owners(name)}
    unknown += [
        f"{prefix or 'the model'} has a {type(module.quant_method).__name__} and no tensor"
        for prefix, module in modules
        if getattr(module, "quant_method", None) is not None and prefix not in owners
    ]
    if unknown:
        others = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UnreadableWeightsError(f"{unknown[0]}{others}")
    return found


def _modules(
    model: torch.nn.Module, *, every_name: bool = False
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model by name, as `named_modules` has them without `--enable-lora`."""
    for prefix, module in model.named_modules(remove_duplicate=not every_name):
        yield _LORA_BASE.sub("", prefix), module


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _owners(name: str) -> Iterator[str]:
    """The names of the modules that a tensor of this name is in."""
    yield ""
    for i, character in enumerate(name):
        if character == ".":
            yield name[:i]


def _registered(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of one module, and its buffers that count."""
    tensors: dict[str, torch.Tensor] = {
        name: each for name, each in module._parameters.items() if each is not None
    }
    for name, buffer in module._buffers.items():
        temporary = name in module._non_persistent_buffers_set and not _tells_weights(name)
        if getattr(module, "_fp8_dynamic_scale", False) and _OF_IMAGES.fullmatch(name):
            temporary = True
        if buffer is not None and not temporary:
            tensors[name] = buffer
    return tensors


@functools.cache  # layers are alike, and so are their attributes
def _tells_weights(name: str) -> bool:
    return bool(_WEIGHTS.search(name)) and _no_scratch(name)


@functools.cache
def _no_scratch(name: str) -> bool:
    return not _SCRATCH.search(name)


# Layers that have lost parameters


def _lost(module: torch.nn.Module, digests: Iterable[str]) -> dict[str, int]:
    """Parameters that a module was made or loaded with, and that have no bytes now; with the number
    of bytes that they had, or 0 if that is not known.

    Args:
        digests: names of those of which digests were made when they were loaded.
    """
    registered = module._parameters
    made = _made_with(module)
    if made is None:  # not by vLLM's loader
        made = {
            name: 0 for name, each in registered.items() if each is not None or "weight" in name
        }
    return {
        name: nbytes
        for name, nbytes in (dict.fromkeys(digests, 0) | made).items()
        if (each := registered.get(name)) is None or not each.numel()
    }


def _made_with(module: torch.nn.Module) -> dict[str, int] | None:
    """The parameters that vLLM made a module with, and their bytes; None where it has not told.

    vLLM notes them to load weights anew (`record_metadata_for_reloading`).
    """
    noted = getattr(sys.modules.get(_RELOADING), "LAYERWISE_INFO", {}).get(module)
    if noted is None:
        return None
    parameters, _ = noted.restore_metadata
    return {
        name: each.numel() * each.element_size()
        for name, each in parameters.items()
        if not is_lazy(each) and each.numel()
    }


def _suffices(
    module: torch.nn.Module, hidden: Mapping[str, int], elsewhere: Mapping[str, torch.Tensor]
) -> bool:
    """Whether what is found of a layer can be all of its weights.

    Args:
        hidden: parameters that it has lost, and their bytes.
        elsewhere: tensors in its attributes.
    """
    if not hidden:
        return True
    made = _made_with(module)
    if made is None:
        return any(each.numel() > 1 for each in elsewhere.values())
    # Parameters that it still has stand for themselves alone: biases are no weights.
    others = [each for name, each in _registered(module).items() if name not in made]
    others += elsewhere.values()
    replaced = sum(each.numel() * each.element_size() for each in others)
    lost = sum(hidden.values())
    return replaced * _SHARE_LEFT >= lost or lost * _SHARE_LEFT <= sum(made.values())


@contextmanager
def keep_digests(layer: torch.nn.Module) -> Iterator[None]:
    """Keep digests of the parameters that vLLM packs away while it processes a layer's weights."""
    own = vars(layer)
    if "_parameters" not in own or _PROCESSED_NOW in own:  # called by the method of a subclass
        yield
        return
    # Of all: what is left now may be released later (`kv_b_proj` of MLA, by its attention).
    own[_LOADED] = own.get(_LOADED, {}) | _digests(layer)
    own[_PROCESSED_NOW] = True
    try:
        yield
    finally:
        del own[_PROCESSED_NOW]


def _digests(layer: torch.nn.Module) -> dict[str, TensorDigest]:
    """The digests of a layer's parameters; of those that cannot be read, none."""
    found: dict[str, TensorDigest] = {}
    parameters: Mapping[str, Any] = layer._parameters
    for name, each in parameters.items():
        if each is None or is_lazy(each) or not each.numel():
            continue
        try:
            found[name] = digest_of_tensor(name, each)
        except UnreadableWeightsError:
            continue  # if vLLM packs it, the layer is not known
    return found


# Tensors in attributes


def _found_in(
    module: torch.nn.Module, seen: set[int], *, everything: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a module keeps in attributes, by name, the shortest names first.

    Args:
        seen: objects that were looked into; more are entered.
        everything: of whatever name, but room to compute in; else those that tell weights.
    """
    own = vars(module)
    counts = _no_scratch if everything else _tells_weights
    parts = [
        (name, each)
        for name, each in own.items()
        if type(each) not in _PLAIN and name not in _NO_ATTRIBUTES and counts(name)
    ]
    if not everything:
        for holder in _HOLDERS:
            held = _parts(own.get(holder))
            parts += [(f"{holder}.{name}", each) for name, each in held if _tells_weights(name)]
    waiting = deque((name, each, _DEPTH) for name, each in sorted(parts, key=itemgetter(0)))
    while waiting:
        name, value, depth = waiting.popleft()
        if isinstance(value, torch.Tensor):
            if not value.is_meta and value.numel():
                yield name, value
        elif depth and id(value) not in seen and (inner := _parts(value)):
            seen.add(id(value))
            waiting.extend((f"{name}.{part}", each, depth - 1) for part, each in inner)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What an object consists of, by name; nothing if it is none that may hold weights."""
    if type(value) in _PLAIN:
        return []
    if isinstance(value, dict):
        # Keys may be devices, whose numbers differ between engines.
        named = all(isinstance(key, str) for key in value)
        parts = [(key if named else str(i), each) for i, (key, each) in enumerate(value.items())]
    elif isinstance(value, list | tuple):
        parts = [(str(i), each) for i, each in enumerate(value)]
    elif isinstance(value, _OPAQUE) or type(value).__module__.startswith(_OPAQUE_MODULES):
        return []
    else:
        names = set(getattr(value, "__dict__", ()))
        if dataclasses.is_dataclass(value):
            names |= {field.name for field in dataclasses.fields(value)}  # those in slots, too
        parts = [(name, getattr(value, name, None)) for name in sorted(names)]
    return [(name, each) for name, each in parts if type(each) not in _PLAIN and _no_scratch(name)]


class _Memory:
    """The memory of tensors that are hashed, so that a view of them is not hashed again."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = sorted(filter(None, map(_span, tensors)))
        self._starts = [start for start, _ in spans]
        self._ends = list(itertools.accumulate((end for _, end in spans), max))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor lies within one of them."""
        span = _span(tensor)
        if span is None:
            return False
        start, end = span
        before = bisect.bisect_right(self._starts, start)
        return before > 0 and end <= self._ends[before - 1]


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses of a tensor's first byte, and of that behind its last; None if it has none."""
    if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return None
    number = tensor.numel()
    if not number:
        return None
    start = tensor.data_ptr()
    if not tensor.is_contiguous():
        number = 1 + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + number * tensor.element_size()


# Offloading


def _offloaded() -> dict[int, torch.Tensor]:
    """By identity of a parameter, the memory that it is copied from before its layer computes.

    Raises:
        UnreadableWeightsError: vLLM offloads weights in a way that is not known here.
    """
    module = sys.modules.get(_OFFLOADING)
    if module is None:  # in a process without models
        return {}
    offloader = module.get_offloader()
    layers = getattr(offloader, "module_offloaders", None)
    if layers is None:
        if type(offloader).__name__ not in _WITHOUT_COPIES:
            raise UnreadableWeightsError(f"a {type(offloader).__name__} has the weights")
        return {}
    found: dict[int, torch.Tensor] = {}
    for layer in layers:
        for each in layer._param_offloaders.values():
            if each._gpu_buffer is not None:
                found[id(each._param)] = each._cpu_storage
    return found
