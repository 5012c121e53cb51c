# SPDX-License-Identifier: Apache-2.0
"""The digest of weights in memory depends on every bit of them, and on nothing else."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_connector.identity import loaded_weights
from omni_connector.identity.loaded_weights import (
    UnreadableWeightsError,
    digest_in_pieces,
    digest_of,
    digest_of_tensor,
)

_DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn]


@pytest.fixture(params=["host", "device"], autouse=True)
def hashed(request, monkeypatch):
    """Hash as weights of the host are hashed, and as those of a device are."""
    if request.param == "device":
        monkeypatch.setattr(loaded_weights, "_hash_on", loaded_weights._DeviceHash)
    # Pieces that are smaller than most tensors here.
    monkeypatch.setattr(loaded_weights, "PIECE_BYTES", 2 * loaded_weights._ROW_BYTES)
    return request.param


def tensor_of(content: bytes, dtype: torch.dtype, shape: tuple[int, ...] = (-1,)) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).view(shape)


@st.composite
def bytes_of_words(draw, most: int = 6000) -> bytes:
    number = draw(st.integers(1, most)) * 8
    seed = draw(st.integers(0, 1 << 30))
    noise = torch.randint(0, 256, (number,), generator=torch.Generator().manual_seed(seed))
    kept = draw(st.sampled_from([0, 1, 255]))  # also weights that are mostly alike
    return (noise * (noise > 256 - kept)).to(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None)
@given(content=bytes_of_words(), dtype=st.sampled_from(_DTYPES), data=st.data())
def test_one_changed_bit_anywhere_is_seen(content, dtype, data):
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    one, other = (digest_of({"w": tensor_of(each, dtype)}) for each in (content, bytes(changed)))
    assert one.content != other.content
    assert one.form == other.form


@settings(max_examples=60, deadline=None)
@given(content=bytes_of_words(), data=st.data())
def test_words_that_change_places_are_seen(content, data):
    words = tensor_of(content, torch.int64)
    first, second = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    moved = words.clone()
    moved[first], moved[second] = words[second], words[first]
    same = torch.equal(moved, words)
    assert (digest_of({"w": words}) == digest_of({"w": moved})) == same


@pytest.mark.parametrize("top", [63, 62, 56, 32])
def test_changes_of_upper_bits_alone_are_seen(top):
    """Two words that change by the same upper bit cancel out in a sum of words times odd
    numbers."""
    words = torch.arange(4096)
    changed = words.clone()
    changed[[5, 5 + loaded_weights._COLUMNS]] ^= (1 << top) - (1 << 64) * (top == 63)
    assert digest_of({"w": words}) != digest_of({"w": changed})


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 90),
    dtype=st.sampled_from(_DTYPES),
    offset=st.integers(0, 9),
    how=st.sampled_from(["offset", "transposed", "stepped", "column", "expanded"]),
)
@example(19, 27, torch.float32, 0, "transposed")  # its last piece is one element, 27 apart
def test_where_and_how_a_tensor_lies_is_not_seen(rows, columns, dtype, offset, how):
    values = torch.randint(1, 100, (rows, columns)).to(torch.float32).to(dtype)
    if how == "offset":
        room = torch.zeros(offset + values.numel(), dtype=dtype)
        same = room[offset:].view(rows, columns)
    elif how == "transposed":
        same = torch.zeros(columns, rows, dtype=dtype).t()
    elif how == "stepped":
        same = torch.zeros(2 * rows, 3 * columns, dtype=dtype)[::2, ::3]
    elif how == "column":
        same = torch.zeros(rows, columns + 3, dtype=dtype)[:, 2 : 2 + columns]
    else:
        values = values[:1].clone().expand(rows, columns)
        same = values.contiguous()
    if how != "expanded":
        same.copy_(values)
    assert digest_of({"w": same}) == digest_of({"w": values})
    assert digest_of({"w": same}).content != digest_of({"w": 0 * values.float()}).content


def test_rows_larger_than_a_piece_are_read_in_their_order(hashed):
    values = torch.randn(3, 5, 700)
    turned = values.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not turned.is_contiguous()
    assert digest_of({"w": turned}) == digest_of({"w": values})


def test_neither_the_order_of_names_nor_shared_tensors_are_seen():
    embedding, other = torch.randn(50, 8), torch.randn(7)
    apart = {"embed": embedding, "head": embedding.clone(), "norm": other}
    tied = {"norm": other, "head": embedding, "embed": embedding}
    viewed = {"norm": other, "head": embedding.view(50, 8), "embed": embedding}
    assert digest_of(apart) == digest_of(tied) == digest_of(viewed)


def test_shared_tensors_are_read_once():
    tensor = torch.randn(4096)
    once = sum(1 for _ in digest_in_pieces({"a": tensor}))
    assert sum(1 for _ in digest_in_pieces({"a": tensor, "b": tensor})) == once


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.ones(6)},
        {"w": torch.ones(2, 3)},
        {"w": torch.ones(6).view(torch.int32)},
        {"w": torch.ones(6), "empty": torch.ones(0)},
        {"w": torch.cat([torch.ones(6), torch.zeros(1)])},
        {},
    ],
    ids=["name", "shape", "dtype", "number", "zeros behind", "none"],
)
def test_names_shapes_and_dtypes_are_parts_of_the_form(other):
    digest = digest_of({"w": torch.ones(6)})
    assert digest_of(other).content != digest.content
    assert digest_of(other).form != digest.form


def test_digests_of_the_host_and_of_a_device_cannot_be_compared(monkeypatch, hashed):
    weights = {"w": torch.ones(6)}
    digest = digest_of(weights)
    other = loaded_weights._DeviceHash if hashed == "host" else lambda _: loaded_weights._HostHash()
    monkeypatch.setattr(loaded_weights, "_hash_on", other)
    assert digest_of(weights).form != digest.form


def test_a_tensor_that_was_hashed_before_stands_for_its_bytes():
    weights = {"w": torch.randn(40, 3), "v": torch.randn(3)}
    hashed = weights | {"w": digest_of_tensor("w", weights["w"])}
    assert digest_of(hashed) == digest_of(weights)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(3, device="meta"), "w is on no device"),
        (torch.eye(3).to_sparse(), "w is no dense tensor"),
    ],
    ids=["meta", "sparse"],
)
def test_a_tensor_without_bytes_is_refused_by_name(tensor, why):
    with pytest.raises(UnreadableWeightsError, match=why):
        digest_of({"w": tensor})
