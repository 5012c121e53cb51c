# SPDX-License-Identifier: Apache-2.0
"""Copies in machine code give what numpy and xxhash give, and go where numpy must."""

import importlib

import numpy as np
import pytest
import xxhash

from omni_connector import native_copy as native
from omni_connector.native_copy import ALIGNMENT, Rows, native_copy


def copied(lengths, slots, checksum=True):
    """Rows of some slots before and after a copy, and the checksums."""
    pytest.importorskip("llvmlite")
    copy = native_copy()
    assert copy is not None
    sizes = [-(-max(length, 1) // ALIGNMENT) * ALIGNMENT for length in lengths]
    room = np.full(slots * sum(sizes) + ALIGNMENT, 7, np.uint8)
    target = room[-room.ctypes.data % ALIGNMENT :][: slots * sum(sizes)]
    source = np.random.default_rng(1).integers(0, 256, target.size + 1, np.uint8)[1:]
    offsets = np.arange(slots)[:, None] * sum(sizes) + np.cumsum([0, *sizes])[: len(sizes)]
    sums = copy(
        target.ctypes.data + offsets,
        source.ctypes.data + offsets,
        np.array(lengths, np.int64),
        checksum,
    )
    return source, target, offsets, sums


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    "lengths", [[1], [127], [128], [129], [4096], [4097, 0, 64], [100_000, 12_345]]
)
def test_rows_of_any_length_arrive_with_their_checksum_and_nothing_else_is_written(lengths, slots):
    source, target, offsets, sums = copied(lengths, slots)
    expected = np.full(target.size, 7, np.uint8)
    for slot in range(slots):
        rows = [slice(at, at + n) for at, n in zip(offsets[slot], lengths, strict=True)]
        for row in rows:
            expected[row] = source[row]
        content = b"".join(source[row].tobytes() for row in rows)
        assert sums[slot] == xxhash.xxh3_64_intdigest(content)
    assert np.array_equal(target, expected)


def test_no_checksums_are_made_that_nobody_asks_for():
    assert copied([5000], 2, checksum=False)[3].tolist() == [0, 0]


def test_no_slots_and_no_rows_are_no_copy():
    assert copied([64], 0)[3].tolist() == []
    assert copied([], 2)[3].tolist() == [0, 0]


def test_rows_that_do_not_agree_are_refused():
    copied([64], 1)  # there is a native copy
    two = np.zeros((1, 2), np.int64)
    with pytest.raises(ValueError, match="lengths"):
        native_copy()(two, two, np.zeros(1, np.int64), True)


@pytest.mark.parametrize("ids", [[-1], [0, 3]])
def test_ids_that_do_not_exist_have_no_address(ids):
    rows = Rows.of([(4096, 64, 8)], num_blocks=3)
    with pytest.raises(IndexError, match="of 3"):
        rows.blocks(np.array(ids))
    with pytest.raises(IndexError, match="of 3"):
        rows.slots(np.zeros((3, 8), np.uint8), np.array(ids))


def test_numpy_copies_where_the_compiler_is_missing(monkeypatch, caplog):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with caplog.at_level("WARNING", "vllm"):
        assert native_copy.__wrapped__() is None
    assert "there is no native copy" in caplog.text


def test_numpy_copies_where_machine_code_gives_something_else(monkeypatch):
    monkeypatch.setattr(
        native, "_compiled", lambda: lambda targets, *_: np.zeros(len(targets), np.uint64)
    )
    assert native_copy.__wrapped__() is None
