# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes: plain values in msgpack, tensors and arrays as raw bytes beside it.

The bytes of an object are

    tensors | leaves (msgpack) | tree (msgpack) | trailer

Each tensor starts at a multiple of 64 bytes, so that it can be read in place. A leaf says whether
a tensor is one of torch or of numpy, its dtype and its shape; its place follows from those before
it. The tree is the object, with an extension value in place of each tensor. Bytes that are sent as
they are have no tree.

Nothing is unpickled, dtypes are from a fixed list, and every size is checked against the bytes that
are there before it is used. torch is imported only where an object contains a tensor of it.
"""

import functools
import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.buffers import ALIGNMENT, aligned
from omni_connector.errors import MissingDependencyError, ProtocolError

MAX_DEPTH: Final = 100
"""Most containers within each other, well below Python's own limit of calls."""

MAX_DIMENSIONS: Final = 64
"""Most dimensions of a tensor: those that numpy allows."""

# dtype -> bytes of an item. torch knows all of these names, numpy all but the last ones.
ITEM_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
_TORCH_ONLY: Final = frozenset(name for name in ITEM_BYTES if "bfloat" in name or "_e" in name)

# Kinds of objects, the last field of the trailer.
_BYTES, _PIECES, _TREE, _TENSOR = range(4)
_TRAILER: Final = struct.Struct("<QQB")
_EXTENSION: Final = 1
_INDEX: Final = struct.Struct("<I")
_PADDING: Final = bytes(ALIGNMENT)

_BUFFERS: Final = (bytes, bytearray, memoryview)
_PLAIN: Final = frozenset({type(None), bool, int, float, str, *_BUFFERS})
_KEYS: Final = frozenset({type(None), bool, int, float, str, bytes})

# What msgspec, numpy and torch raise for impossible values. RecursionError is a RuntimeError.
_DECODE_ERRORS: Final = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    OverflowError,
    RuntimeError,
)

# What msgspec raises for numbers beyond 64 bits, text that is no UTF-8, and strided memory.
_ENCODE_ERRORS: Final = (ValueError, OverflowError, BufferError, RecursionError)

# Where a value is in an object: where its container is, and the value's key or index there.
_Where = tuple[Any, Any] | None


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes in several segments, which arrive as one memoryview, or as one tensor.

    Attributes:
        parts: contiguous buffers (bytes, numpy arrays of bytes, ...). They must not change until
            `put` returns.
        as_tensor: whether they arrive as a torch tensor, uint8 (bytes,). Receivers that take no
            memoryview, as vLLM-Omni's manager, take that.
    """

    parts: tuple[memoryview, ...]
    as_tensor: bool

    def __init__(self, parts: Iterable[Any], *, as_tensor: bool = False) -> None:
        object.__setattr__(self, "parts", tuple(_flat(part) for part in parts))
        object.__setattr__(self, "as_tensor", as_tensor)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(part.nbytes for part in self.parts)


class _Leaf(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor or array: how to read its bytes."""

    torch: bool
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        # Zeros are left out of the product, so that no view of the shape can overflow either.
        item = ITEM_BYTES.get(self.dtype)
        if item is None or (self.dtype in _TORCH_ONLY and not self.torch):
            raise ValueError(f"dtype {self.dtype[:40]!r} is not one of {', '.join(ITEM_BYTES)}")
        if len(self.shape) > MAX_DIMENSIONS or any(extent < 0 for extent in self.shape):
            raise ValueError(f"shape {self.shape[:MAX_DIMENSIONS]} is impossible")
        largest = item * math.prod(extent for extent in self.shape if extent)
        if largest >= 1 << 63:
            raise ValueError(f"shape {self.shape} is too large")
        return largest if all(self.shape) else 0


_leaves_decoder = msgspec.msgpack.Decoder(list[_Leaf])


def encode(data: object) -> list[memoryview]:
    """The bytes of an object, in segments that view the object's own memory where possible.

    The last segment is the trailer, which does not count for the object's size (`size_of`).

    Args:
        data: bytes, bytearray, memoryview, or `Pieces`; or a value made of None, bool, int,
            float, str, bytes, numpy scalars, torch tensors, numpy arrays, and lists, tuples and
            dicts of these. Tensors of a device are copied to the host, once.

    Raises:
        TypeError: the object contains something else, at the place that the message names.
    """
    if isinstance(data, _BUFFERS):
        return [_flat(data), _trailer(_BYTES)]
    if isinstance(data, Pieces):
        return [*data.parts, _trailer(_TENSOR if data.as_tensor else _PIECES)]
    return _Encoding().parts(data)


def misfit(value: object, refuses: Callable[[object], bool]) -> str:
    """Where in a value that an encoder refuses the innermost part is that it refuses.

    >>> misfit({"a": 1, "b": [2, "three"]}, lambda each: "three" in str(each))
    "object['b'][1]"

    Args:
        value: keys and items are looked at of dicts, lists, tuples and sets, fields of dataclasses
            and of msgspec's structs.
        refuses: whether the encoder refuses a part.
    """
    where: _Where = None
    for _ in range(MAX_DEPTH):
        refused = next((each for each in _parts_of(value) if refuses(each[1])), None)
        if refused is None:
            break
        key, value = refused
        where = where, key
    return _path(where)


def _parts_of(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, dict):
        yield from ((key, key) for key in value)
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif isinstance(value, msgspec.Struct):
        yield from ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif is_dataclass(value):
        yield from ((each.name, getattr(value, each.name)) for each in fields(value))


def checksum_of(length: int, checksums: NDArray[np.uint64]) -> int:
    """The checksum of an object of `length` bytes, from the checksums of its slots or fragments."""
    return xxhash.xxh3_64_intdigest(length.to_bytes(8, "little") + checksums.tobytes())


def cut(parts: Sequence[memoryview], sizes: Iterable[int]) -> Iterator[list[NDArray[np.uint8]]]:
    """For each of these sizes, the segments of the parts that have so many bytes, in order."""
    left = iter(parts)
    rest: NDArray[np.uint8] = np.empty(0, np.uint8)
    for size in sizes:
        segments: list[NDArray[np.uint8]] = []
        while size:
            if not rest.size:
                rest = np.frombuffer(next(left), np.uint8)
            segments.append(rest[:size])
            rest = rest[size:]
            size -= segments[-1].size
        yield [each for each in segments if each.size]


def size_of(parts: list[memoryview]) -> int:
    """Bytes of an encoded object, without the trailer."""
    return sum(part.nbytes for part in parts) - _TRAILER.size


def decode(content: memoryview) -> tuple[Any, int]:
    """The object that `encode` turned into these bytes, and its size.

    Bytes arrive as bytes (a copy), `Pieces` as a memoryview or tensor, tuples as lists, numpy
    scalars as Python numbers. Tensors and arrays arrive on the CPU, contiguous and in the byte
    order of this machine; they, and the memoryview, are views of `content`, which lives as long as
    any of them.

    Args:
        content: contiguous bytes; nobody else may write them. Aligned to 16 bytes or more.

    Raises:
        ProtocolError: these bytes are not from `encode`.
        MissingDependencyError: the object contains a torch tensor, and torch is not installed.
    """
    size = content.nbytes - _TRAILER.size
    if size < 0:
        raise ProtocolError(f"{content.nbytes} bytes are no object")
    leaves_bytes, tree_bytes, kind = _TRAILER.unpack_from(content, size)
    data_bytes = size - leaves_bytes - tree_bytes
    if data_bytes < 0 or (kind != _TREE and data_bytes != size):
        raise ProtocolError(f"a tree of {leaves_bytes} + {tree_bytes} bytes in {size} bytes")
    if kind == _BYTES:
        return bytes(content[:size]), size
    if kind == _PIECES:
        return content[:size], size
    if kind == _TENSOR:
        (tensor,) = _views(content[:size], [_Leaf(True, "uint8", (size,))], padded=False)
        return tensor, size
    if kind != _TREE:
        raise ProtocolError(f"an object of unknown kind {kind}")
    tree_at = data_bytes + leaves_bytes
    try:
        leaves = _leaves_decoder.decode(content[data_bytes:tree_at])
        found = _views(content[:data_bytes], leaves)
        tree = msgspec.msgpack.decode(content[tree_at:size], ext_hook=_picker(found))
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"an object that cannot be decoded: {error}") from error
    return tree, size


class _Encoding:
    """One object that is encoded."""

    def __init__(self) -> None:
        self._leaves: list[_Leaf] = []
        self._data: list[memoryview] = []
        # id of each value that msgpack does not know -> what stands for it in the tree.
        self._stand_ins: dict[int, object] = {}
        # Where torch is not loaded, no object contains a tensor.
        self._torch: Any = sys.modules.get("torch")

    def parts(self, data: object) -> list[memoryview]:
        self._look_at(data, None, 0)
        try:
            tree = msgspec.msgpack.encode(data, enc_hook=self._stand_in)
            leaves = msgspec.msgpack.encode(self._leaves)
        except _ENCODE_ERRORS as error:
            raise TypeError(f"{misfit(data, self._refuses)} cannot be sent: {error}") from error
        trailer = _trailer(_TREE, len(leaves), len(tree))
        return [*self._data, memoryview(leaves), memoryview(tree), trailer]

    def _look_at(self, value: object, where: _Where, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN or id(value) in self._stand_ins:
            return
        if depth > MAX_DEPTH:
            raise TypeError(f"the object is nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            for key, each in value.items():
                if type(key) not in _KEYS:
                    raise TypeError(
                        f"{_path(where)} has a key of type {type(key).__name__}, which cannot be "
                        "sent; keys are str, int, float, bool, bytes or None"
                    )
                if type(each) not in _PLAIN:
                    self._look_at(each, (where, key), depth + 1)
        elif isinstance(value, list | tuple):
            if not _PLAIN.issuperset(map(type, value)):
                for index, each in enumerate(value):
                    self._look_at(each, (where, index), depth + 1)
        elif isinstance(value, np.generic) and value.dtype.kind in "biuf":
            self._stand_ins[id(value)] = value.item()
        else:
            try:
                self._add(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"{_path(where)} cannot be sent: {error}") from error

    def _add(self, value: object) -> None:
        if isinstance(value, np.ndarray) and type(value) in (np.ndarray, np.memmap):
            leaf, content = _of_array(value)
        elif self._torch is not None and isinstance(value, self._torch.Tensor):
            leaf, content = _of_tensor(value, self._torch)
        else:
            raise TypeError(
                f"it is of type {type(value).__qualname__}; an object is bytes, numbers, strings, "
                "tensors, numpy arrays, and lists and dicts of these"
            )
        if leaf.nbytes != content.nbytes:
            raise TypeError(f"{content.nbytes} bytes of {leaf.dtype} {leaf.shape}")
        self._stand_ins[id(value)] = msgspec.msgpack.Ext(_EXTENSION, _INDEX.pack(len(self._leaves)))
        self._leaves.append(leaf)
        if content.nbytes:
            self._data.append(content)
            padding = -content.nbytes % ALIGNMENT
            if padding:
                self._data.append(memoryview(_PADDING)[:padding])

    def _refuses(self, value: object) -> bool:
        try:
            msgspec.msgpack.encode(value, enc_hook=self._stand_in)
        except _ENCODE_ERRORS:
            return True
        return False

    def _stand_in(self, value: object) -> object:
        try:
            return self._stand_ins[id(value)]
        except KeyError:
            raise TypeError("the object was changed while it was sent") from None


@functools.cache
def _name_of(dtype: "np.dtype[Any]") -> str:
    return dtype.name  # numpy puts it together anew each time


def _of_array(array: NDArray[Any]) -> tuple[_Leaf, memoryview]:
    if array.dtype.kind not in "biufc":
        raise TypeError(f"a numpy array of {array.dtype}")
    native = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    leaf = _Leaf(False, _name_of(native.dtype), array.shape)
    return leaf, native.reshape(-1).view(np.uint8).data


def _of_tensor(tensor: Any, torch: Any) -> tuple[_Leaf, memoryview]:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(f"a tensor of layout {tensor.layout}, quantized or nested")
    if tensor.device.type == "meta":
        raise TypeError("a tensor of device meta has no content")
    leaf = _Leaf(True, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if not leaf.nbytes:
        return leaf, memoryview(b"")
    # It is made contiguous on its device, so that one copy brings it to the host.
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return leaf, memoryview(plain.reshape(-1).view(torch.uint8).numpy())


def _views(data: memoryview, leaves: list[_Leaf], *, padded: bool = True) -> list[Any]:
    """A tensor or array for each leaf; behind each is padding to `ALIGNMENT`, if any is."""
    spans = []
    at = 0
    for leaf in leaves:
        end = at + leaf.nbytes
        spans.append(slice(at, end))
        at = end + (-end % ALIGNMENT if padded else 0)
    if at != data.nbytes:
        raise ValueError(f"leaves of {at} bytes in {data.nbytes} bytes")
    whole: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    if data.readonly:  # torch has no read-only tensors
        copy = aligned(whole.size)
        copy[:] = whole
        whole = copy
    dtypes, tensors = _torch_side(whole) if any(leaf.torch for leaf in leaves) else ({}, None)
    return [
        tensors[span].view(dtypes[leaf.dtype]).view(leaf.shape)
        if tensors is not None and leaf.torch
        else whole[span].view(leaf.dtype).reshape(leaf.shape)
        for leaf, span in zip(leaves, spans, strict=True)
    ]


def _torch_side(whole: NDArray[np.uint8]) -> tuple[dict[str, Any], Any]:
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise MissingDependencyError(
            f"the object has torch tensors, and torch cannot be imported: {error}"
        ) from error
    return {name: getattr(torch, name) for name in ITEM_BYTES}, torch.from_numpy(whole)


def _picker(found: list[Any]) -> Callable[[int, memoryview], Any]:
    def pick(code: int, index: memoryview) -> Any:
        if code != _EXTENSION or index.nbytes != _INDEX.size:
            raise ValueError(f"an extension of type {code} and {index.nbytes} bytes")
        (which,) = _INDEX.unpack(index)
        if which >= len(found):
            raise ValueError(f"tensor {which} of {len(found)}")
        return found[which]

    return pick


def _flat(buffer: Any) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        return memoryview(view.tobytes())
    return view if view.nbytes == 0 else view.cast("B")


def _trailer(kind: int, leaves_bytes: int = 0, tree_bytes: int = 0) -> memoryview:
    return memoryview(_TRAILER.pack(leaves_bytes, tree_bytes, kind))


def _path(where: _Where) -> str:
    keys: list[str] = []
    while where is not None:
        where, key = where
        keys.append(f"[{key!r:.80}]" if len(keys) < 20 else "[...]")
    return "object" + "".join(reversed(keys))
