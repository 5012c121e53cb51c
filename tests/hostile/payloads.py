# SPDX-License-Identifier: Apache-2.0
"""Objects and packed KV, as bytes of others; they need torch."""

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from omni_connector.errors import OmniError
from omni_connector.objects import codec
from omni_connector.stage.payload import DTYPES, KVCacheTransferData
from omni_connector.stage.receiving import check_tokens, place, read_payload
from omni_connector.stage.tp import Topology, merge_shards, own_heads
from tests.hostile.mutation import damage, distort_json, distort_msgpack
from tests.hostile.trial import Parser

_TRAILER: Final = struct.Struct("<QQB")
_LENGTH: Final = struct.Struct(">I")


def _objects() -> list[bytes]:
    tensors = [torch.ones(2, 3).to(dtype) for dtype in DTYPES.values()]
    arrays = [np.ones((2, 3), name) for name in ("bool", "int8", "uint8", "float16", "complex128")]
    values: list[Any] = [
        b"bytes",
        codec.Pieces([b"a", b"bc"]),
        None,
        {"a": [1, -1, 1.5, None, True, "text", b"bytes"], "b": {"c": {"d": []}}},
        {"hidden": tensors, 7: arrays, "empty": [torch.empty(0, 4), torch.ones(()), np.ones(())]},
        torch.arange(40),
        [np.arange(9), {"x": np.zeros((0, 2, 0))}],
    ]
    return [b"".join(codec.encode(value)) for value in values]


def _distort_object(raw: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return damage(raw, rng)
    leaves_bytes, tree_bytes, kind = _TRAILER.unpack(raw[-_TRAILER.size :])
    body = raw[: -_TRAILER.size]
    if kind != 2:
        return body + _TRAILER.pack(
            rng.choice((0, 1, 1 << 63)), tree_bytes, rng.choice((0, 1, 2, 9))
        )
    tree_at = len(body) - tree_bytes
    leaves_at = tree_at - leaves_bytes
    data, leaves, tree = body[:leaves_at], body[leaves_at:tree_at], body[tree_at:]
    which = rng.random()
    if which < 0.5:
        leaves = distort_msgpack(leaves, rng)
    elif which < 0.9:
        tree = distort_msgpack(tree, rng)
    else:
        data = damage(data, rng) if data else b"x"
    return data + leaves + tree + _TRAILER.pack(len(leaves), len(tree), kind)


@contextmanager
def objects() -> Iterator[Parser]:
    """Objects that were put by others."""
    corpus = _objects()

    def make(rng: random.Random) -> tuple[bytes, bool]:
        return _distort_object(rng.choice(corpus), rng), rng.random() < 0.5

    def parse(hostile: tuple[bytes, bool]) -> bool:
        raw, writable = hostile
        # What arrives is aligned to pages or, as here, to what numpy takes.
        content = np.frombuffer(raw, np.uint8).copy().data if writable else memoryview(raw)
        found, size = codec.decode(content)
        assert size <= len(raw)
        try:
            again = codec.size_of(codec.encode(found))
        except TypeError:  # msgpack says more than may be sent: keys of other types, extensions
            return True
        assert again <= 2 * size + 1024, "it is larger than its bytes"
        return True

    yield Parser("objects", make, parse, (OmniError,))


def payloads() -> list[bytes]:
    """Packed KV of all dtypes, of no layers, absent layers and shapes down to none."""
    made = [KVCacheTransferData("", {}, [], {})]
    for number, dtype in enumerate(DTYPES.values()):
        keys = [torch.ones(2, 1, 3).to(dtype), None, torch.ones(()).to(dtype)]
        values = [torch.ones(0, 4).to(dtype), torch.ones(5).to(dtype)]
        blocks = {"key_cache": keys, "value_cache": values[: number % 3]}
        metadata = {"block_size": 16, "seq_len": 2, "dtype": "auto", "extra": [1.5, None, {"ä": 1}]}
        made.append(KVCacheTransferData(f"req/{number}", blocks, [3, 1, 2], metadata))
    for heads, total in ((1, 1), (2, 2), (4, 4)):
        blocks = {name: [torch.ones(3, heads, 8)] * 2 for name in ("key_cache", "value_cache")}
        metadata = {
            "block_size": 16,
            "seq_len": 3,
            "num_layers": 2,
            "dtype": "auto",
            "tp_kv_heads": {"total": total, "source_rank": 0, "from_tp": 2},
            "tp_head_slice": {"applied": heads == 2, "target_rank": 0, "from_tp": 1, "to_tp": 2},
        }
        made.append(KVCacheTransferData("r", blocks, [0], metadata))
    return [each.to_bytes() for each in made]


def distort_payload(raw: bytes, rng: random.Random) -> bytes:
    """Packed KV, damaged as bytes or with a header that says other things."""
    if rng.random() < 0.4:
        return damage(raw, rng)
    (length,) = _LENGTH.unpack(raw[: _LENGTH.size])
    header = distort_json(raw[_LENGTH.size : _LENGTH.size + length], rng)
    return _LENGTH.pack(len(header)) + header + raw[_LENGTH.size + length :]


@contextmanager
def packed_kv() -> Iterator[Parser]:
    """Packed KV as the manager reads it, and what it makes of the parts of several ranks."""
    corpus = payloads()
    one, two = Topology(1, 1), Topology(1, 2, 0)
    joined = Topology(2, 1, 0)
    intact = read_payload(corpus[-2])

    def make(rng: random.Random) -> tuple[bytes, int]:
        return distort_payload(rng.choice((*corpus, *corpus[-3:])), rng), rng.randrange(8)

    def parse(hostile: tuple[bytes, int]) -> bool:
        raw, way = hostile
        if way == 0 and raw:
            read = read_payload(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        else:
            read = read_payload(memoryview(raw))
        check_tokens(read)
        again = KVCacheTransferData(**read).to_bytes()
        packed = KVCacheTransferData(**KVCacheTransferData.from_bytes(again)).to_bytes()
        assert packed == again, "packed again it reads otherwise"
        if way < 3:
            place(own_heads(read, one, None), None)
        elif way < 5:
            place(own_heads(read, two, None), None)
        else:
            shards = [read, intact] if way == 6 else [intact, read]
            place(merge_shards(shards, joined, None if way == 7 else 2), None)
        return True

    yield Parser("packed KV", make, parse, (ValueError,))


@contextmanager
def unpacked_kv() -> Iterator[Parser]:
    """KV that a connector gives to the manager as a dict, in place of bytes."""
    intact = read_payload(payloads()[-1])

    def make(rng: random.Random) -> Any:
        if rng.random() < 0.02:
            return rng.choice((None, 3, "x", [], {}, object(), {"layer_blocks": 3}))
        part = rng.choice(list(intact))
        odd: Any = rng.choice(
            (None, 3, -1, "x", b"x", [], {}, [None], [3], {"a": 1}, object(), 1e308)
        )
        if part == "layer_blocks" and rng.random() < 0.8:
            cache = rng.choice(("key_cache", "value_cache", "other"))
            tensor = rng.choice(
                (odd, torch.ones(2), torch.ones(3, 1, 2, device="meta"), torch.ones(3, 0, 8))
            )
            odd = {**intact[part], cache: rng.choice((odd, [tensor], [tensor] * 3))}
        return {**intact, part: odd}

    def parse(hostile: Any) -> bool:
        read = read_payload(hostile)
        check_tokens(read)
        place(own_heads(read, Topology(1, 1), None), None)
        return True

    yield Parser("unpacked KV", make, parse, (ValueError,))
