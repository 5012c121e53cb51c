# SPDX-License-Identifier: Apache-2.0
"""The packed KV payload: its bytes, and what is refused."""

import base64
import json
import struct
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector.stage.contract import validate
from omni_connector.stage.payload import KVCacheTransferData

from .payloads import META, equal, header, key, pack, payloads, same

read = KVCacheTransferData.from_bytes


def _read_device(packed: bytes) -> dict:
    return KVCacheTransferData.from_bytes_device(
        torch.frombuffer(bytearray(packed) or bytearray(1), dtype=torch.uint8)[: len(packed)]
    )


def _payload() -> KVCacheTransferData:
    return KVCacheTransferData(
        request_id="req/ä",
        layer_blocks={
            "key_cache": [torch.arange(4, dtype=torch.float32).view(2, 1, 2), None],
            "value_cache": [torch.tensor([[7, 8]], dtype=torch.int16), None],
        },
        block_ids=[3, 9],
        metadata=dict(META),
    )


def test_the_bytes_are_those_of_the_format() -> None:
    text = (
        '{"rid":"req/ä","bids":[3,9],'
        '"meta":{"block_size":4,"num_layers":1,"dtype":"float32","seq_len":2},"nl":2,"td":['
        '{"n":"key_cache_0","i":0,"d":"float32","s":[2,1,2],"o":0,"b":16},'
        '{"n":"key_cache_1","x":true},'
        '{"n":"value_cache_0","i":0,"d":"int16","s":[1,2],"o":16,"b":4},'
        '{"n":"value_cache_1","x":true}]}'
    ).encode()
    data = struct.pack("<4f", 0, 1, 2, 3) + struct.pack("<2h", 7, 8)
    expected = struct.pack(">I", len(text)) + text + data
    assert _payload().to_bytes() == expected
    assert type(_payload().to_bytes()) is bytes
    assert _payload().to_gpu_tensor().numpy().tobytes() == expected
    assert b"".join(_payload().to_pieces()) == expected


def test_a_payload_of_another_writer_is_read() -> None:
    # Header keys in another order, escapes for what is not ASCII, no `i`.
    written = {"td": [{"n": "key_cache_0", "d": "int8", "s": [2], "o": 0, "b": 2}],
               "nl": 1, "meta": {"k": [None, 1.5]}, "bids": [], "rid": "ä"}  # fmt: skip
    found = read(pack(json.dumps(written, ensure_ascii=True).encode(), b"\x01\xff"))
    assert (found["request_id"], found["metadata"]) == ("ä", {"k": [None, 1.5]})
    assert found["layer_blocks"]["key_cache"][0].tolist() == [1, -1]
    assert found["layer_blocks"]["value_cache"] == [None]


@pytest.mark.parametrize("name", ["key_cache_", "key_cache_of layer 0", "key_cache_0\n"])
def test_a_layer_that_is_stated_needs_no_number_in_the_name(name: str) -> None:
    first, second = key(0, [1], 1, 1), key(1, [1], 0, 1) | {"n": name}
    found = read(pack(header(second, first), b"\x07\x08"))
    assert [each.item() for each in found["layer_blocks"]["key_cache"]] == [8, 7]


@pytest.mark.parametrize("metadata", [None, [], ["a"], "text", 7, True])
def test_metadata_may_be_no_mapping(metadata: object) -> None:
    payload = KVCacheTransferData("r", {"key_cache": [torch.ones(2)]}, [1], metadata)
    assert read(payload.to_bytes())["metadata"] == metadata
    assert payload.to_dict()["metadata"] == metadata


def _whole(**metadata: object) -> dict[str, object]:
    layer = [torch.zeros(5, 2, 3) for _ in range(2)]
    stated = {"_kv_payload_contract": 1, "num_layers": 2, "seq_len": 5, "block_size": 4}
    return {"request_id": "r", "block_ids": [7, 3], "metadata": stated | metadata,
            "layer_blocks": {"key_cache": layer, "value_cache": list(layer)}}  # fmt: skip


def test_a_payload_that_keeps_its_contract_passes() -> None:
    validate(_whole(), "r")
    validate(_whole(), "r", required=True)


@pytest.mark.parametrize("metadata", [{}, None, []])
def test_a_payload_without_contract_passes_unless_one_is_required(metadata: object) -> None:
    bare = _whole() | {"metadata": metadata}
    validate(bare, "another")
    with pytest.raises(ValueError, match="removed"):
        validate(bare, "r", required=True)


def _layers(**caches: object) -> dict[str, object]:
    blocks = _whole()["layer_blocks"]
    assert isinstance(blocks, dict)
    return _whole() | {"layer_blocks": blocks | caches}


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ([], "list"),
        (_whole(_kv_payload_contract=2), "Unsupported"),
        (_whole() | {"request_id": "q"}, "request ID mismatch"),
        (_whole(num_layers=3), "Incomplete KV payload layers"),
        (_whole(num_layers=True), "num_layers"),
        (_whole(seq_len="5"), "seq_len"),
        (_whole(block_size=0), "block_size"),
        (_whole(seq_len=9), "block table"),
        (_whole() | {"block_ids": None}, "block table"),
        (_whole() | {"layer_blocks": None}, "lists"),
        (_layers(value_cache=None), "lists"),
        (_layers(value_cache=[torch.zeros(5, 2, 3)]), "Incomplete KV payload layers"),
        (_layers(key_cache=[torch.zeros(5, 2, 3), None]), "missing key or value"),
        (_layers(value_cache=[torch.zeros(5, 1, 3)] * 2), "mismatched K/V shapes"),
        (_layers(**dict.fromkeys(("key_cache", "value_cache"), [torch.zeros(4, 2, 3)] * 2)),
         "not 5 tokens"),
        (_layers(**dict.fromkeys(("key_cache", "value_cache"), [torch.zeros(())] * 2)),
         "not 5 tokens"),
    ],
)  # fmt: skip
def test_a_payload_that_breaks_its_contract_is_refused(payload: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        validate(payload, "r")


RECORDED = json.loads(Path(__file__).with_name("vllm_omni_0_30_payloads.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_what_vllm_omni_has_packed_is_read(name: str) -> None:
    """The bytes were recorded from `KVCacheTransferData.to_bytes` of vLLM-Omni 0.30.0."""
    packed = base64.b64decode(RECORDED[name])
    count = torch.arange(12).view(3, 2, 2).remainder(2 if name == "bool" else 100)
    key = count.to(getattr(torch, name))
    for found in (read(packed), _read_device(packed)):
        assert (found["request_id"], found["block_ids"]) == ("req-ä", [5, 2])
        assert found["metadata"] == {"seq_len": 3, "num_layers": 2}
        blocks = found["layer_blocks"]
        assert equal(blocks["key_cache"][0], key)
        assert equal(blocks["value_cache"][0], count.flip(0).to(key.dtype))
        assert blocks["key_cache"][1] is blocks["value_cache"][1] is None


@given(payloads())
@settings(max_examples=150)
def test_what_is_packed_is_read_back(payload: KVCacheTransferData) -> None:
    packed = payload.to_bytes()
    assert payload.to_gpu_tensor().numpy().tobytes() == packed
    assert same(read(packed), payload)
    assert same(_read_device(packed), payload)


def test_lazy_conjugates_arrive_as_what_they_stand_for() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    payload = KVCacheTransferData("r", {"key_cache": [conjugate, conjugate.imag]}, [], {})
    for found in (read(payload.to_bytes()), _read_device(payload.to_gpu_tensor().numpy().data)):
        assert found["layer_blocks"]["key_cache"][0].tolist() == [1 - 2j, 3 + 4j]
        assert found["layer_blocks"]["key_cache"][1].tolist() == [-2.0, 4.0]


def test_from_bytes_gives_views_and_from_bytes_device_copies() -> None:
    buffer = bytearray(_payload().to_bytes())
    view = read(buffer)["layer_blocks"]["key_cache"][0]
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    copies = [
        KVCacheTransferData.from_bytes_device(tensor)["layer_blocks"]["key_cache"][0],
        KVCacheTransferData.from_bytes_gpu(tensor)["layer_blocks"]["key_cache"][0],
    ]
    buffer[-20:-4] = struct.pack("<4f", 4, 5, 6, 7)
    assert view.flatten().tolist() == [4, 5, 6, 7]
    for copy in copies:
        assert copy.flatten().tolist() == [0, 1, 2, 3]


def test_views_keep_the_buffer_alive_and_read_only_ones_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view = read(_payload().to_bytes())["layer_blocks"]["key_cache"][0]
    assert view.flatten().tolist() == [0, 1, 2, 3]


def test_strided_device_buffers_are_read() -> None:
    packed = torch.frombuffer(bytearray(_payload().to_bytes()), dtype=torch.uint8)
    apart = torch.zeros(2 * packed.numel(), dtype=torch.uint8)
    apart[::2] = packed
    assert same(KVCacheTransferData.from_bytes_device(apart[::2]), _payload())


def test_to_dict_has_the_fields_and_the_same_tensors() -> None:
    payload = _payload()
    found = payload.to_dict()
    assert list(found) == ["request_id", "layer_blocks", "block_ids", "metadata"]
    assert found["layer_blocks"]["key_cache"][0] is payload.layer_blocks["key_cache"][0]
    found["metadata"]["new"] = found["layer_blocks"]["key_cache"].pop()
    assert same(read(payload.to_bytes()), _payload())


def test_packing_copies_each_tensor_once() -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.float32)
    payload = KVCacheTransferData("r", {"key_cache": [tensor] * 4}, [], {})
    tracemalloc.start()
    packed = payload.to_bytes()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.01 * len(packed)


@pytest.mark.parametrize(
    ("payload", "error", "says"),
    [
        (KVCacheTransferData("r", {"key_cache": [torch.zeros(1).to(torch.float8_e8m0fnu)]}, [], {}),
         ValueError, "Unsupported dtype of key_cache_0"),
        (KVCacheTransferData("r", {"key_cache": [torch.eye(2).to_sparse()]}, [], {}),
         ValueError, "no plain memory"),
        (KVCacheTransferData("r", {"key_cache": [torch.zeros(1, device="meta")]}, [], {}),
         ValueError, "no plain memory"),
        (KVCacheTransferData("r", {"key_cache": [np.zeros(1)]}, [], {}), TypeError, "ndarray"),
        (KVCacheTransferData("r", {"key_cache": [], "value_cache": [torch.zeros(1)]}, [], {}),
         ValueError, "1 layers have values"),
        (KVCacheTransferData("r", {"query_cache": []}, [], {}), ValueError, "query_cache"),
        (KVCacheTransferData("r", {}, [], {"k": float("nan")}), ValueError, "(?i)not json compl"),
        (KVCacheTransferData("r", {}, [], {"k": torch.zeros(1)}), TypeError, "Tensor"),
        (KVCacheTransferData("r", {}, ["1"], {}), TypeError, "str"),
        (KVCacheTransferData("r", {}, [[1], [2]], {}), TypeError, "list"),
        (KVCacheTransferData(7, {}, [], {}), TypeError, "request id"),
        (KVCacheTransferData("\ud800", {}, [], {}), ValueError, "surrogates"),
        (KVCacheTransferData("r" * (1 << 26), {}, [], {}), ValueError, "header_len"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(
    payload: KVCacheTransferData, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        payload.to_bytes()
    with pytest.raises(error, match=says):
        payload.to_gpu_tensor()


def test_metadata_nested_too_deeply_is_refused() -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="deeply"):
        KVCacheTransferData("r", {}, [], {"k": deep}).to_bytes()


def _nested(depth: int) -> bytes:
    return (
        b'{"rid":"r","bids":[],"meta":{"k":' + b"[" * depth + b"]" * depth + (b'},"nl":0,"td":[]}')
    )


BAD = [
    ("empty", b"", "header_len"),
    ("three bytes", b"\0\0\0", "header_len"),
    ("header longer than the bytes", b"\0\0\0\5{}", "header_len"),
    ("header of 4 GiB", b"\xff\xff\xff\xff{}", "header_len"),
    ("no JSON", pack(b"{"), "malformed header"),
    ("not UTF-8", pack(b'{"rid":"\xff"}'), "malformed header"),
    ("no object", pack(b"[]"), "malformed header"),
    ("two values", pack(b"{} {}"), "malformed header"),
    ("no header", pack(b""), "malformed header"),
    ("NaN", pack(b'{"rid":"r","bids":[],"meta":{"k":NaN},"nl":0,"td":[]}'), "malformed header"),
    ("deep JSON", pack(_nested(200_000)), "malformed header"),
    ("no rid", pack({"bids": [], "meta": {}, "nl": 0, "td": []}), "malformed header"),
    ("rid a number", pack(header(rid=3)), "malformed header"),
    ("block ids strings", pack(header(bids=["1"])), "malformed header"),
    ("block ids floats", pack(header(bids=[1.5])), "malformed header"),
    ("block ids bools", pack(header(bids=[True])), "malformed header"),
    ("block ids nested", pack(header(bids=[[1]])), "malformed header"),
    ("td a dict", pack(header(td={})), "malformed header"),
    ("x a string", pack(header({"n": "key_cache_0", "x": "yes"})), "malformed header"),
    ("nl too large", pack(header(nl=1 << 40)), "nl 1099511627776"),
    ("nl negative", pack(header(nl=-1)), "nl -1"),
    ("nl too small", pack(header(key(0, [1], 0, 1), nl=0), b"a"), "nl 0"),
    ("a layer missing", pack(header(key(1, [1], 0, 1)), b"a"), "nl 1"),
    ("a value without key", pack(header({"n": "value_cache_0", "x": True}, nl=0)), "nl 0"),
    ("same name twice", pack(header(key(0, [1], 0, 1), key(0, [1], 1, 1)), b"ab"), "twice"),
    ("unknown name", pack(header({"n": "key_cache_", "x": True})), "no name"),
    ("name with sign", pack(header({"n": "key_cache_-1", "x": True})), "no name"),
    ("name with other digits", pack(header({"n": "key_cache_٣", "x": True})), "no name"),
    ("name with newline", pack(header({"n": "key_cache_0\n", "x": True})), "no name"),
    ("name with zeros", pack(header({"n": "key_cache_00", "x": True})), "no name"),
    ("index beyond the layers", pack(header(key(0, [1], 0, 1) | {"i": 1}), b"a"), "nl 1"),
    ("index negative", pack(header(key(0, [1], 0, 1) | {"i": -1}), b"a"), "nl 1"),
    ("index of another", pack(header(key(0, [1], 0, 1), key(1, [1], 1, 1) | {"i": 0}), b"ab"),
     "twice"),
    ("index without a cache", pack(header({"n": "query_cache_0", "i": 0, "x": True})), "no name"),
    ("absent and described", pack(header(key(0, [1], 0, 1) | {"x": True}), b"a"), "absent"),
    ("no span", pack(header({"n": "key_cache_0", "d": "uint8", "s": [0]})), "tensor span"),
    ("dtype unknown", pack(header(key(0, [1], 0, 1, "complex32")), b"a"), "Unsupported dtype"),
    ("dtype an attribute", pack(header(key(0, [1], 0, 1, "Tensor")), b"a"), "Unsupported dtype"),
    ("offset negative", pack(header(key(0, [1], -1, 1)), b"a"), "tensor span"),
    ("bytes negative", pack(header(key(0, [1], 0, -1)), b"a"), "tensor span"),
    ("span beyond the end", pack(header(key(0, [2], 0, 2)), b"a"), "tensor span"),
    ("offset beyond the end", pack(header(key(0, [0], 2, 0)), b"a"), "tensor span"),
    ("sum overflows", pack(header(key(0, [1], 2**63, 2**63)), b"a"), "tensor span"),
    ("huge numbers", pack(header(key(0, [1], 10**40, 1)), b"a"), "tensor span"),
    ("spans overlap", pack(header(key(0, [2], 0, 2), key(1, [2], 1, 2)), b"abc"), "tensor span"),
    ("gap", pack(header(key(0, [1], 0, 1), key(1, [1], 2, 1)), b"abc"), "tensor span"),
    ("gap at the start", pack(header(key(0, [1], 1, 1)), b"ab"), "tensor span"),
    ("trailing bytes", pack(header(key(0, [1], 0, 1)), b"ab"), "1 bytes follow"),
    ("trailing bytes only", pack(header(), b"a"), "1 bytes follow"),
    ("bytes not the shape's", pack(header(key(0, [3], 0, 2)), b"ab"), "tensor span"),
    ("bytes not the dtype's", pack(header(key(0, [2], 0, 2, "int16")), b"ab"), "tensor span"),
    ("extent negative", pack(header(key(0, [-1, -1], 0, 1)), b"a"), "impossible shape"),
    ("extent a float", pack(header(key(0, [1.5], 0, 1)), b"a"), "malformed header"),
    ("shape wraps to 0", pack(header(key(0, [2**32, 2**32], 0, 0))), "overflows"),
    ("strides overflow", pack(header(key(0, [0, 2**62, 2**62], 0, 0))), "overflows"),
    ("many dimensions", pack(header(key(0, [1] * 65, 0, 1)), b"a"), "impossible shape"),
    ("bytes that are no bool", pack(header(key(0, [2], 0, 2, "bool")), b"\x01\x02"), "no bool"),
]  # fmt: skip


@pytest.mark.parametrize(("packed", "says"), [case[1:] for case in BAD], ids=[c[0] for c in BAD])
def test_bad_bytes_are_a_value_error(packed: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(packed)
    with pytest.raises(ValueError, match=says):
        _read_device(packed)


def test_fields_of_a_newer_version_are_left_out() -> None:
    newer = pack(header(key(0, [1], 0, 1) | {"zz": [1]}, zz=1), b"a")
    assert str(read(newer)) == str(read(pack(header(key(0, [1], 0, 1)), b"a")))


def test_nothing_is_allocated_for_what_is_only_announced() -> None:
    payloads = [
        pack(header(nl=1 << 40)),
        pack(header(key(0, [1 << 40], 0, 1 << 40))),
        b"\x7f\xff\xff\xff{}",
    ]
    tracemalloc.start()
    for packed in payloads:
        with pytest.raises(ValueError):
            read(packed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_tensors_of_another_form_are_a_value_error() -> None:
    packed = torch.frombuffer(bytearray(_payload().to_bytes()), dtype=torch.uint8)
    for wrong in (packed.view(torch.int8), packed.view(1, -1), packed[0]):
        with pytest.raises(ValueError, match="uint8 tensor of one dimension"):
            KVCacheTransferData.from_bytes_device(wrong)


def test_other_buffers_are_read_and_strided_ones_refused() -> None:
    packed = _payload().to_bytes()
    assert same(read(memoryview(np.frombuffer(packed, np.int8))), _payload())
    with pytest.raises(ValueError, match="not contiguous"):
        read(memoryview(packed * 2)[::2])
    with pytest.raises(TypeError):
        read("text")


def test_every_truncation_is_a_value_error() -> None:
    packed = _payload().to_bytes()
    for length in range(len(packed)):
        with pytest.raises(ValueError):
            read(packed[:length])
        with pytest.raises(ValueError):
            _read_device(packed[:length])


def test_every_flipped_bit_is_a_value_error_or_a_valid_payload() -> None:
    packed = _payload().to_bytes()
    refused = 0
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        refused += not _valid(bytes(damaged))
    assert refused > 1000


@given(payloads(2), st.data())
@settings(max_examples=150)
def test_damaged_payloads_are_a_value_error_or_valid(
    payload: KVCacheTransferData, data: st.DataObject
) -> None:
    damaged = bytearray(payload.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        end = data.draw(st.integers(at, min(len(damaged), at + 8)))
        damaged[at:end] = data.draw(st.binary(max_size=8))
        if not damaged:
            break
    _valid(bytes(damaged))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_value_error_or_valid(packed: bytes) -> None:
    _valid(packed)
    _valid(pack(packed))


def _valid(packed: bytes) -> bool:
    try:
        found = read(packed)
    except ValueError:
        with pytest.raises(ValueError):
            _read_device(packed)
        return False
    again = KVCacheTransferData(**found)
    assert same(read(again.to_bytes()), again)
    copies = _read_device(packed)["layer_blocks"]
    for cache in ("key_cache", "value_cache"):
        pairs = zip(copies[cache], found["layer_blocks"][cache], strict=True)
        assert all(equal(copy, view) for copy, view in pairs)
    return True
