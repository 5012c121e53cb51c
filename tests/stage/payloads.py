# SPDX-License-Identifier: Apache-2.0
"""Payloads for tests, and packed bytes written by hand after the format's description."""

import json
import struct
from typing import Any

import torch
from hypothesis import strategies as st

from omni_connector.stage.payload import DTYPES, KVCacheTransferData

META = {"block_size": 4, "num_layers": 1, "dtype": "float32", "seq_len": 2}


def pack(header: Any, data: bytes = b"") -> bytes:
    """The bytes of a header, a JSON value or its text, and tensor bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">I", len(text)) + text + data


def header(*descriptors: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A header of one key layer for each descriptor, with changes."""
    return {
        "rid": "r",
        "bids": [1],
        "meta": {},
        "nl": len(descriptors),
        "td": list(descriptors),
    } | (changes)


def key(layer: int, shape: list[int], offset: int, nbytes: int, dtype: str = "uint8") -> dict:
    """The descriptor of a key tensor."""
    return {"n": f"key_cache_{layer}", "i": layer, "d": dtype, "s": shape, "o": offset, "b": nbytes}


def same(found: dict[str, Any], sent: KVCacheTransferData) -> bool:
    """Whether what was read is, bit for bit, what was packed."""
    fields = (found["request_id"], found["block_ids"], found["metadata"])
    if fields != (sent.request_id, sent.block_ids, sent.metadata):
        return False
    layers = len(sent.layer_blocks["key_cache"])
    for cache in ("key_cache", "value_cache"):
        packed = sent.layer_blocks.get(cache) or []
        packed = packed + [None] * (layers - len(packed))
        if len(packed) != len(found["layer_blocks"][cache]):
            return False
        for a, b in zip(packed, found["layer_blocks"][cache], strict=True):
            if not equal(a, b):
                return False
    return True


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal in dtype, shape and bits."""
    if a is None or b is None:
        return a is b
    return (a.dtype, a.shape) == (b.dtype, b.shape) and raw(a) == raw(b)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every dtype and of shapes down to none, some of them strided views."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    limit = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, limit, (count,), dtype=torch.uint8, generator=generator)
    tensor = content.view(dtype).view(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if shape and shape[0] and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor


_plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
metadata = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    st.recursive(_plain, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    max_size=4,
)


@st.composite
def payloads(draw: st.DrawFn, max_layers: int = 4) -> KVCacheTransferData:
    """Payloads of any form."""
    layers = draw(st.integers(0, max_layers))
    blocks = {
        "key_cache": [draw(st.none() | tensors()) for _ in range(layers)],
        "value_cache": [draw(st.none() | tensors()) for _ in range(draw(st.integers(0, layers)))],
    }
    return KVCacheTransferData(
        request_id=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=30)),
        layer_blocks=blocks,
        block_ids=draw(st.lists(st.integers(0, 2**40), max_size=5)),
        metadata=draw(metadata),
    )
