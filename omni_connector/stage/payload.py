# SPDX-License-Identifier: Apache-2.0
"""`KVCacheTransferData`: the KV cache of a request, and the bytes it travels as.

    u32 big-endian header length | header, compact UTF-8 JSON | tensor bytes

The header is `{rid, bids, meta, nl, td}`: request id, block ids, metadata, number of key layers
and tensor descriptors, all keys and then all values. A descriptor is `{n, i, d, s, o, b}`: name,
layer, dtype, shape, first byte and number of bytes in the tensor bytes. The descriptor of a layer
that is absent is `{n, x: true}`. Where `i` is stated, the name may end in anything; else it ends in
the layer. A reader checks the whole header before it makes any tensor.
"""

import json
import math
import operator
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import torch

from omni_connector.objects.codec import ITEM_BYTES, MAX_DIMENSIONS
from omni_connector.stage import contract

MAX_HEADER_BYTES: Final = 1 << 26
"""Longest header of a payload, in bytes. It bounds what is decoded of a payload from outside."""

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

_CACHES: Final = ("key_cache", "value_cache")
_LENGTH: Final = struct.Struct(">I")
_NAME: Final = re.compile(r"(key_cache|value_cache)_(.*)", flags=re.DOTALL)
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,8}")


class _Descriptor(msgspec.Struct, frozen=True, gc=False):
    n: str
    i: int | None = None
    d: str | None = None
    s: list[int] | None = None
    o: int | None = None
    b: int | None = None
    x: bool = False


class _Header(msgspec.Struct, frozen=True):
    rid: str
    bids: list[int]
    meta: Any
    nl: int
    td: list[_Descriptor]


class _Span(NamedTuple):
    """A tensor in the tensor bytes; `start` and `nbytes` count from their beginning."""

    cache: str
    layer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


_header_decoder = msgspec.json.Decoder(_Header)


@dataclass
class KVCacheTransferData:
    """The KV cache of one request.

    Attributes:
        request_id: the request.
        layer_blocks: `key_cache` and `value_cache`, each a list with one tensor a layer, usually
            (tokens, heads, dim), or None where the layer has none; `value_cache` may be shorter.
        block_ids: the blocks that it lay in at the sender.
        metadata: anything that JSON can represent; a dict, as a rule.
    """

    request_id: str
    layer_blocks: dict[str, Any]
    block_ids: list[int]
    metadata: Any

    @staticmethod
    def validate_payload_contract(
        data: object, expected_request_id: str, *, require_contract: bool = False
    ) -> None:
        """Refuse a payload that breaks the contract that its metadata states (see `contract`).

        Args:
            data: what `from_bytes` returns. Without a contract it is accepted as it is.
            expected_request_id: the request that it must be of.
            require_contract: refuse a payload without a contract.

        Raises:
            ValueError: the message says what is missing, or does not fit.
        """
        contract.validate(data, expected_request_id, required=require_contract)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; the tensors are the same ones, not copies."""
        return {
            "request_id": self.request_id,
            "layer_blocks": {name: list(layers) for name, layers in self.layer_blocks.items()},
            "block_ids": list(self.block_ids),
            "metadata": dict(self.metadata) if isinstance(self.metadata, dict) else self.metadata,
        }

    def to_pieces(self) -> list[memoryview]:
        """The packed bytes in pieces; those of contiguous tensors in host memory are views.

        Raises:
            ValueError, TypeError: as `to_bytes`.
        """
        contents = [_content(tensor) for tensor in self._tensors()]
        return [memoryview(self._header()), *(content.cpu().numpy().data for content in contents)]

    def to_bytes(self) -> bytes:
        """The packed bytes, in one buffer.

        Raises:
            ValueError: a dtype that is not in `DTYPES`, metadata with NaN or infinity, more
                values than keys, or a header above 64 MiB.
            TypeError: a layer is no tensor, or JSON cannot represent the metadata.
        """
        return b"".join(self.to_pieces())

    def to_gpu_tensor(self) -> torch.Tensor:
        """The packed bytes as a uint8 tensor (bytes,) on the device of the tensors.

        If the tensors lie in several places, it is the first that is not host memory.

        Raises:
            ValueError, TypeError: as `to_bytes`.
        """
        tensors = list(self._tensors())
        header = self._header()
        device = next(
            (each.device for each in tensors if each.device.type != "cpu"), torch.device("cpu")
        )
        size = len(header) + sum(tensor.nbytes for tensor in tensors)
        packed = torch.empty(size, dtype=torch.uint8, device=device)
        packed[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        position = len(header)
        for tensor in tensors:
            # It is copied as bytes: a device writes larger items to aligned addresses only.
            content = _content(tensor)
            packed[position : position + content.numel()].copy_(content)
            position += content.numel()
        return packed

    @staticmethod
    def from_bytes(raw: bytes | bytearray | memoryview) -> dict[str, Any]:
        """Read packed bytes.

        Returns:
            request_id, layer_blocks, block_ids and metadata. Except for complex ones, the tensors
            are views of `raw`, aligned or not; they must not be written to if `raw` is read-only.

        Raises:
            ValueError: the bytes are not a whole payload; the message says what is wrong: the
                `header_len`, a tensor span, an unsupported dtype.
            TypeError: `raw` is no buffer.
        """
        view = memoryview(raw)
        if not view.c_contiguous:
            raise ValueError("KV payload: the buffer is not contiguous")
        view = view.cast("B")
        end = _header_end(view.nbytes, bytes(view[: _LENGTH.size]))
        header = _read_header(view[_LENGTH.size : end])

        def tensor_of(span: _Span) -> torch.Tensor:
            if not span.nbytes:
                return torch.empty(span.shape, dtype=span.dtype)
            if span.dtype.is_complex:
                # Compiled code takes complex numbers to be aligned, and crashes if they are not.
                content = bytearray(view[end + span.start : end + span.start + span.nbytes])
                return torch.frombuffer(content, dtype=span.dtype).view(span.shape)
            with warnings.catch_warnings() if view.readonly else nullcontext():
                if view.readonly:
                    # torch warns that the memory is read-only; our docstring says so, too.
                    warnings.simplefilter("ignore", UserWarning)
                flat = torch.frombuffer(
                    view,
                    dtype=span.dtype,
                    count=span.nbytes // span.dtype.itemsize,
                    offset=end + span.start,
                )
            return flat.view(span.shape)

        return _restore(header, view.nbytes - end, tensor_of)

    @staticmethod
    def from_bytes_device(tensor: torch.Tensor) -> dict[str, Any]:
        """Read a packed uint8 tensor (bytes,), on any device.

        Returns:
            As `from_bytes`; the tensors are copies, on the same device.

        Raises:
            ValueError: as `from_bytes`, or the tensor has another dtype or shape.
        """
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise ValueError(
                f"KV payload: expected a uint8 tensor of one dimension, not {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        total = tensor.numel()
        end = _header_end(total, tensor[: _LENGTH.size].cpu().numpy().tobytes())
        header = _read_header(tensor[_LENGTH.size : end].contiguous().cpu().numpy().data)

        def tensor_of(span: _Span) -> torch.Tensor:
            if not span.nbytes:
                return torch.empty(span.shape, dtype=span.dtype, device=tensor.device)
            content = tensor[end + span.start : end + span.start + span.nbytes]
            copy = content.clone(memory_format=torch.contiguous_format)
            return copy.view(span.dtype).view(span.shape)

        return _restore(header, total - end, tensor_of)

    @staticmethod
    def from_bytes_gpu(tensor: torch.Tensor) -> dict[str, Any]:
        """`from_bytes_device` by its older name."""
        return KVCacheTransferData.from_bytes_device(tensor)

    def _layers(self) -> Iterator[tuple[str, int, torch.Tensor | None]]:
        """Name, layer and tensor: all keys, then all values."""
        if not set(self.layer_blocks) <= set(_CACHES):
            raise ValueError(f"layer_blocks has {sorted(self.layer_blocks)}, not just {_CACHES}")
        keys, values = (self.layer_blocks.get(cache) or [] for cache in _CACHES)
        if len(values) > len(keys):
            raise ValueError(f"{len(values)} layers have values, but only {len(keys)} have keys")
        for cache, layers in zip(_CACHES, (keys, values), strict=True):
            for layer, tensor in enumerate(layers):
                if tensor is not None and not isinstance(tensor, torch.Tensor):
                    raise TypeError(f"{cache}_{layer} is a {type(tensor).__name__}, not a tensor")
                yield f"{cache}_{layer}", layer, tensor

    def _tensors(self) -> Iterator[torch.Tensor]:
        for name, _, tensor in self._layers():
            if tensor is None:
                continue
            if tensor.dtype not in DTYPE_NAMES:
                raise ValueError(f"Unsupported dtype of {name}: {tensor.dtype}")
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                raise ValueError(f"{name} has no plain memory: {tensor.layout}, {tensor.device}")
            yield tensor

    def _header(self) -> bytes:
        request_id: object = self.request_id
        if not isinstance(request_id, str):
            raise TypeError("the request id must be a string")
        descriptors: list[dict[str, Any]] = []
        offset = 0
        for name, layer, tensor in self._layers():
            if tensor is None:
                descriptors.append({"n": name, "x": True})
                continue
            descriptors.append(
                {
                    "n": name,
                    "i": layer,
                    "d": DTYPE_NAMES[tensor.dtype],
                    "s": list(tensor.shape),
                    "o": offset,
                    "b": tensor.nbytes,
                }
            )
            offset += tensor.nbytes
        header = {
            "rid": request_id,
            "bids": [operator.index(block_id) for block_id in self.block_ids],
            "meta": self.metadata,
            "nl": len(self.layer_blocks.get("key_cache") or []),
            "td": descriptors,
        }
        try:
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        except RecursionError as error:
            raise ValueError("the metadata is nested too deeply") from error
        encoded = text.encode("utf-8")
        if len(encoded) > MAX_HEADER_BYTES:
            raise ValueError(f"header_len {len(encoded)} exceeds {MAX_HEADER_BYTES}")
        return _LENGTH.pack(len(encoded)) + encoded


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 (bytes,): a view if the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `reshape` would keep the stride of a single element, which no view of bytes may have.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _header_end(total: int, prefix: bytes) -> int:
    """Where the tensor bytes begin."""
    if len(prefix) < _LENGTH.size:
        raise ValueError(f"KV payload: {total} bytes have no room for header_len")
    (header_len,) = _LENGTH.unpack(prefix)
    if header_len > total - _LENGTH.size:
        raise ValueError(f"KV payload: header_len {header_len} exceeds the {total} bytes there are")
    if header_len > MAX_HEADER_BYTES:
        raise ValueError(f"KV payload: header_len {header_len} exceeds {MAX_HEADER_BYTES}")
    return _LENGTH.size + int(header_len)


def _read_header(text: memoryview) -> _Header:
    try:
        return _header_decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"KV payload: malformed header: {error}") from error


def _restore(
    header: _Header, data_bytes: int, tensor_of: Callable[[_Span], torch.Tensor]
) -> dict[str, Any]:
    spans = _check(header, data_bytes)
    blocks: dict[str, list[torch.Tensor | None]] = {cache: [None] * header.nl for cache in _CACHES}
    for span in spans:
        tensor = tensor_of(span)
        if span.dtype is torch.bool and span.nbytes and int(tensor.view(torch.uint8).max()) > 1:
            raise ValueError(f"KV payload: {span.cache}_{span.layer} holds bytes that are no bool")
        blocks[span.cache][span.layer] = tensor
    return {
        "request_id": header.rid,
        "layer_blocks": blocks,
        "block_ids": header.bids,
        "metadata": header.meta,
    }


def _check(header: _Header, data_bytes: int) -> list[_Span]:
    """The spans of a header, once all its fields fit each other and the number of bytes."""
    spans: list[_Span] = []
    named: dict[str, set[int]] = {cache: set() for cache in _CACHES}
    for descriptor in header.td:
        cache, layer = _place(descriptor)
        if layer in named[cache]:
            raise ValueError(f"KV payload: {descriptor.n[:80]} is there twice, as layer {layer}")
        named[cache].add(layer)
        if not descriptor.x:
            spans.append(_span(cache, layer, descriptor, data_bytes))
        elif (descriptor.d, descriptor.s, descriptor.o, descriptor.b) != (None,) * 4:
            raise ValueError(f"KV payload: {descriptor.n} is said to be absent, and described")
    keys, values = (named[cache] for cache in _CACHES)
    if header.nl != len(keys) or keys != set(range(header.nl)) or not values <= keys:
        raise ValueError(
            f"KV payload: nl {header.nl}, but {len(keys)} key and {len(values)} value layers"
        )
    end = 0
    for span in sorted(spans, key=lambda span: (span.start, span.nbytes)):
        if span.nbytes:
            if span.start != end:
                raise ValueError(
                    f"KV payload: tensor span of {span.cache}_{span.layer} starts at byte "
                    f"{span.start}, not where the one before it ends, at {end}"
                )
            end += span.nbytes
    if end != data_bytes:
        raise ValueError(f"KV payload: {data_bytes - end} bytes follow the last tensor span")
    return spans


def _place(descriptor: _Descriptor) -> tuple[str, int]:
    """The cache and layer of a tensor; the layer that it states counts more than its name."""
    match = _NAME.fullmatch(descriptor.n)
    if match is not None and descriptor.i is not None:
        return match[1], descriptor.i
    if match is None or not _NUMBER.fullmatch(match[2]):
        raise ValueError(f"KV payload: {descriptor.n[:80]!r} is no name of a tensor")
    return match[1], int(match[2])


def _span(cache: str, layer: int, descriptor: _Descriptor, data_bytes: int) -> _Span:
    name, shape, start, nbytes = descriptor.n, descriptor.s, descriptor.o, descriptor.b
    if descriptor.d is None or shape is None or start is None or nbytes is None:
        raise ValueError(f"KV payload: {name} lacks dtype, shape or tensor span")
    dtype = DTYPES.get(descriptor.d)
    if dtype is None:
        raise ValueError(f"KV payload: Unsupported dtype of {name}: {descriptor.d[:80]!r}")
    if start < 0 or nbytes < 0 or start + nbytes > data_bytes:
        raise ValueError(
            f"KV payload: tensor span of {name}, {nbytes} bytes from {start}, is not in the "
            f"{data_bytes} bytes there are"
        )
    if len(shape) > MAX_DIMENSIONS or any(extent < 0 for extent in shape):
        raise ValueError(f"KV payload: {name} has an impossible shape")
    # The strides must not overflow, even if the tensor has no elements.
    if math.prod(extent or 1 for extent in shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"KV payload: the shape of {name} overflows")
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(
            f"KV payload: tensor span of {name} has {nbytes} bytes, its shape {shape} of "
            f"{descriptor.d} {math.prod(shape) * dtype.itemsize}"
        )
    return _Span(cache, layer, dtype, tuple(shape), start, nbytes)
