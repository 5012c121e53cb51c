# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import tracemalloc
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.errors import MissingDependencyError, OmniError, ProtocolError
from omni_connector.objects.codec import (
    ALIGNMENT,
    ITEM_BYTES,
    MAX_DEPTH,
    Pieces,
    decode,
    encode,
    size_of,
)
from omni_connector.testing.conformance.values import ARRAY_DTYPES, OBJECTS, same

TRAILER_BYTES = 17


def joined(data: object) -> bytearray:
    return bytearray().join(encode(data))


def there_and_back(data: object) -> Any:
    content = joined(data)
    found, size = decode(memoryview(content))
    assert size == size_of(encode(data)) == len(content) - TRAILER_BYTES
    return found


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return pytest.importorskip("torch")


# Values


@given(OBJECTS)
def test_objects_arrive_as_they_were(data: object) -> None:
    assert same(data, there_and_back(data))


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)])
@pytest.mark.values
def test_arrays_of_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    sent = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    assert same(sent, there_and_back(sent))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)])
@pytest.mark.values
def test_tensors_of_every_dtype_and_shape(
    torch: ModuleType, dtype: str, shape: tuple[int, ...]
) -> None:
    sent = torch.zeros(shape, dtype=getattr(torch, dtype))
    content = sent.reshape(-1).view(torch.uint8)
    content[:] = torch.arange(content.numel()) % (2 if dtype == "bool" else 100)
    found = there_and_back({"k": sent})["k"]
    assert (found.dtype, found.shape, found.device) == (sent.dtype, sent.shape, sent.device)
    assert torch.equal(found.reshape(-1).view(torch.uint8), content)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t.expand(2, 6, 8),
        lambda t: t.flip(0),
        lambda t: t.requires_grad_(),
        lambda t: t[2, 3],
        lambda t: t.to(dtype=t.dtype.to_complex()).conj() * 1j,
        lambda t: t.to(dtype=t.dtype.to_complex()).conj(),
        lambda t: t.to(dtype=t.dtype.to_complex()).conj().imag,
    ],
    ids=["t", "strided", "expanded", "flipped", "grad", "scalar", "complex", "conj", "neg"],
)
def test_tensors_that_are_views_arrive_plain(torch: ModuleType, change: Any) -> None:
    sent = change(torch.randn(6, 8))
    found = there_and_back(sent)
    assert torch.equal(found, sent)
    assert found.is_contiguous()
    assert not found.requires_grad


def test_tensors_are_sent_from_where_they_are(torch: ModuleType) -> None:
    tensor, array = torch.arange(100.0), np.arange(50)
    first, _, second, *_ = encode([tensor, array])
    tensor[0], array[0] = 7.0, 8
    assert bytes(first[:4]) == np.float32(7.0).tobytes()
    assert bytes(second[:8]) == (8).to_bytes(8, "little")


def test_tensors_arrive_in_the_bytes_that_were_received(torch: ModuleType) -> None:
    content = joined([torch.ones(3), np.ones(5, np.int8), torch.ones(2, dtype=torch.bfloat16)])
    found, _ = decode(memoryview(content))
    start = np.frombuffer(content, np.uint8).ctypes.data
    starts = [found[0].data_ptr(), found[1].ctypes.data, found[2].data_ptr()]
    assert [each - start for each in starts] == [0, ALIGNMENT, 2 * ALIGNMENT]


def test_one_tensor_in_two_places_is_sent_once(torch: ModuleType) -> None:
    tensor = torch.ones(1000)
    found = there_and_back({"a": tensor, "b": [tensor]})
    assert found["a"] is found["b"][0]
    assert size_of(encode([tensor, tensor])) < 2 * tensor.nbytes


def test_read_only_content_is_copied_for_tensors(torch: ModuleType) -> None:
    found, _ = decode(memoryview(bytes(joined([torch.ones(3)]))))
    found[0][0] = 2.0
    assert found[0].tolist() == [2.0, 1.0, 1.0]


def test_containers_arrive_as_lists_and_dicts() -> None:
    pair = namedtuple("pair", "a b")
    found = there_and_back([(1, (2,)), pair(1, np.int8(2)), OrderedDict(x=1), {3: 4, None: 5}])
    assert found == [[1, [2]], [1, 2], {"x": 1}, {3: 4, None: 5}]
    assert [type(each) for each in found] == [list, list, dict, dict]


def test_numpy_scalars_arrive_as_numbers() -> None:
    sent = [np.float64(1.5), np.float16(0.5), np.int64(-3), np.uint32(2**32 - 1), np.bool_(True)]
    found = there_and_back({"a": sent, "b": sent[0]})
    assert found == {"a": [1.5, 0.5, -3, 2**32 - 1, True], "b": 1.5}
    assert [type(each) for each in found["a"]] == [float, float, int, int, bool]


def test_bytes_like_values_arrive_as_bytes() -> None:
    assert there_and_back([b"a", bytearray(b"b"), memoryview(b"c")]) == [b"a", b"b", b"c"]
    strided = memoryview(bytes(range(10)))[::3]
    assert there_and_back(strided) == bytes([0, 3, 6, 9])


def test_pieces_are_joined_without_a_copy_of_them() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    pieces = Pieces([b"ab", array, b"", bytearray(b"c")])
    assert pieces.nbytes == 15
    array[0, 0] = 259
    found = there_and_back(pieces)
    assert isinstance(found, memoryview)
    assert bytes(found) == b"ab" + array.tobytes() + b"c"
    assert not found.readonly


@pytest.mark.parametrize("parts", [[b"ab", b"", b"c" * 99], [b""], []])
def test_pieces_arrive_as_a_tensor_if_that_is_wanted(parts: list[bytes], torch: Any) -> None:
    content = memoryview(bytearray(b"".join(encode(Pieces(parts, as_tensor=True)))))
    found, size = decode(content)
    assert (found.dtype, found.shape, size) == (torch.uint8, (size,), sum(map(len, parts)))
    assert found.numpy().tobytes() == b"".join(parts)
    if size:
        content[0] = 7
        assert found[0] == 7  # a view


# What cannot be sent


class Colour(IntEnum):
    RED = 1


CYCLE: list[Any] = []
CYCLE.append(CYCLE)

DEEP: list[Any] = []
for _ in range(MAX_DEPTH + 1):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (object(), "object cannot be sent: it is of type object"),
        ({"a": [0, {"b": {1}}]}, r"object\['a'\]\[1\]\['b'\] cannot be sent"),
        ([Colour.RED], r"object\[0\] cannot be sent: it is of type Colour"),
        ({"d": np.datetime64("2020-01-01")}, r"\['d'\]"),
        ({"u": np.zeros(1, np.longdouble)}, r"\['u'\].*float128"),
        ({"s": np.array(["a"])}, r"\['s'\].*<U1"),
        ({"o": np.array([{}])}, r"\['o'\].*object"),
        ({"r": np.zeros(1, [("x", "i4")])}, r"\['r'\]"),
        ({"l": np.zeros(1, np.longdouble)}, r"\['l'\].*float128|longdouble"),
        ({"m": np.ma.masked_array([1], [True])}, r"\['m'\].*MaskedArray"),
        ({(1,): 2}, "key of type tuple"),
        ([{Path("/"): 2}], r"object\[0\] has a key of type PosixPath"),
        ([2**64], r"object\[0\] cannot be sent"),
        (-(2**63) - 1, "object cannot be sent"),
        ({"a": 1, "b": [{"c": 2**63}, {"d": -(2**63), "e": 2**64}]}, r"object\['b'\]\[1\]\['e'\] "),
        ({"a": {2**64: "k"}}, r"object\['a'\]\[18446744073709551616\] cannot be sent"),
        ("\udc80", "object cannot be sent"),
        ({"a": ("x", "\udc80")}, r"object\['a'\]\[1\] cannot be sent"),
        ({"k" * 1000: object()}, r"object\['kkk.{60,90}\] cannot"),
        (CYCLE, "nested more than"),
        (DEEP, "nested more than"),
        ([b"", memoryview(bytes(10))[::2]], r"object\[1\] cannot be sent"),
    ],
    ids=range(22),
)
def test_other_things_are_refused_with_their_place(data: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(data)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_tensors_are_refused_with_their_place(torch: ModuleType) -> None:
    for odd, message in (
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (torch.nested.nested_tensor([torch.ones(2)]), "nested"),
    ):
        with pytest.raises(TypeError, match=rf"\['t'\]\[1\] cannot be sent.*{message}"):
            encode({"t": [0, odd]})


def test_deep_recursion_elsewhere_does_not_matter() -> None:
    """What could be sent can be received: objects have a limit of their own, not the stack's."""

    def at_depth(n: int) -> Any:
        return at_depth(n - 1) if n else there_and_back(DEEP[0])

    assert at_depth(sys.getrecursionlimit() // 2) == DEEP[0]


# Bytes that are no object


def leaf(*fields: object) -> bytes:
    return msgspec.msgpack.encode([list(fields)])


def packed(data: bytes, leaves: bytes, tree: object = None, kind: int = 2) -> bytearray:
    encoded = msgspec.msgpack.encode(tree)
    trailer = len(leaves).to_bytes(8, "little") + len(encoded).to_bytes(8, "little")
    return bytearray(data + leaves + encoded + trailer + bytes([kind]))


def index(which: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(1, which.to_bytes(4, "little"))


@pytest.mark.parametrize("fields", [(), ({"of a": "newer version"},)])
def test_the_bytes_are_as_the_module_says(fields: tuple[object, ...]) -> None:
    content = packed(bytes(range(64)), leaf(False, "int8", [3], *fields), {"a": index(0)})
    found, _ = decode(memoryview(content))
    assert found["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        bytearray(),
        bytearray(TRAILER_BYTES - 1),
        packed(b"", b"\x90", kind=3),
        packed(b"", b"", msgspec.Raw(b""), kind=4),
        packed(b"x", b"\x90", kind=0),
        packed(b"", b"\x90")[:-17] + b"\xff" * 16 + b"\x02",
        packed(b"", b"\x90")[:-17] + b"\xff" * 7 + b"\x7f" + bytes(8) + b"\x02",
        packed(bytes(64), b"\x90"),
        packed(bytes(64), leaf(False, "int8", [65])),
        packed(bytes(63), leaf(False, "int8", [63])),
        packed(bytes(64), leaf(False, "int8", [-1])),
        packed(bytes(64), leaf(False, "int8", [2**63])),
        packed(b"", leaf(False, "int8", [2**62, 2**62, 0])),
        packed(b"", leaf(True, "int8", [2**62, 2**62, 0])),
        packed(b"", leaf(False, "int8", [0] * 65)),
        packed(b"", leaf(False, "int8", [2**64 - 1] * 64)),
        packed(bytes(64), leaf(False, "object", [1])),
        packed(bytes(64), leaf(False, "bfloat16", [1])),
        packed(bytes(64), leaf(True, "__class__", [1])),
        packed(bytes(64), leaf(True, "Tensor", [1])),
        packed(bytes(64), leaf(1, "int8", [1])),
        packed(bytes(64), leaf(False, "int8", [1]), index(1)),
        packed(bytes(64), leaf(False, "int8", [1]), index(2**32 - 1)),
        packed(bytes(64), leaf(False, "int8", [1]), msgspec.msgpack.Ext(2, bytes(4))),
        packed(bytes(64), leaf(False, "int8", [1]), msgspec.msgpack.Ext(1, bytes(3))),
        packed(b"", b"\xdd\xff\xff\xff\xff"),
        packed(b"", b"\x91" * 5000),
        packed(b"", b"\x90", msgspec.Raw(b"\x91" * 100_000)),
        packed(b"", b"\x90", msgspec.Raw(b"\xdd\xff\xff\xff\xff\xc0")),
        packed(bytes(64), leaf(False, "int8", [1]), msgspec.Raw(b"\x81\xd6\x01" + bytes(5))),
    ],
    ids=range(30),
)
def test_malformed_bytes_are_refused(content: bytearray) -> None:
    with pytest.raises(ProtocolError):
        decode(memoryview(content))


def test_an_announced_size_allocates_nothing() -> None:
    contents = [
        packed(b"", leaf(False, "float64", [2**40])),
        packed(b"", leaf(True, "float64", [2**40])),
        packed(b"", b"\xdd\xff\xff\xff\xff" + b"\xc0" * 100),
        packed(b"", b"\x90")[:-17] + (2**40).to_bytes(8, "little") * 2 + b"\x02",
    ]
    tracemalloc.start()
    try:
        for content in contents:
            with pytest.raises(ProtocolError):
                decode(memoryview(content))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@given(OBJECTS, st.data())
def test_a_flipped_bit_does_no_harm(data: object, more: st.DataObject) -> None:
    content = joined(data)
    for _ in range(more.draw(st.integers(1, 3))):
        at = more.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << more.draw(st.integers(0, 7))
    try:
        _, size = decode(memoryview(content))
    except ProtocolError:
        return
    assert size == len(content) - TRAILER_BYTES


@given(OBJECTS, st.data())
def test_a_cut_object_is_refused_or_shorter(data: object, more: st.DataObject) -> None:
    content = joined(data)
    end = more.draw(st.integers(0, len(content) - 1))
    try:
        _, size = decode(memoryview(content)[:end])
    except ProtocolError:
        return
    assert size == end - TRAILER_BYTES


@given(st.binary(max_size=300), st.binary(max_size=60), st.binary(max_size=60))
def test_random_bytes_do_no_harm(data: bytes, leaves: bytes, tree: bytes) -> None:
    sizes = len(leaves).to_bytes(8, "little") + len(tree).to_bytes(8, "little")
    for content in (data, data + leaves + tree + sizes + b"\x02"):
        try:
            _, size = decode(memoryview(bytearray(content)))
        except OmniError:
            continue
        assert size == len(content) - TRAILER_BYTES


# Without torch


def test_tensor_without_torch_is_a_missing_dependency(
    torch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = joined([torch.ones(3)])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="torch"):
        decode(memoryview(content))
    assert there_and_back([np.ones(3)])[0].tolist() == [1.0] * 3


def test_objects_without_tensors_do_not_load_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from omni_connector.objects.codec import decode, encode\n"
        "content = bytearray().join(encode({'a': np.ones(3), 'b': [1, 'x', b'y']}))\n"
        "assert decode(memoryview(content))[0]['b'] == [1, 'x', b'y']\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
