# SPDX-License-Identifier: Apache-2.0
"""The machine code of the table finds what a dict finds, and changes no memory but the table's."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena import row_table as table_module
from omni_connector.arena.row_table import (
    ROW_BYTES,
    DictTable,
    NativeTable,
    native_calls,
    row_table,
)
from omni_connector.runtime import machine_code
from omni_connector.runtime.machine_code import kernel

ROWS = [bytes([i]) * ROW_BYTES for i in range(9)] + [
    bytes(at) + b"\1" + bytes(ROW_BYTES - at - 1) for at in range(0, ROW_BYTES, 5)
]
blocks = st.tuples(st.sampled_from(ROWS), st.integers(0, 8))


@given(
    entries=st.integers(1, 9),
    steps=st.lists(st.tuples(st.lists(blocks, max_size=8), st.sets(st.integers(0, 8))), max_size=8),
)
def test_machine_code_finds_what_a_dict_finds(
    entries: int, steps: list[tuple[list[tuple[bytes, int]], set[int]]]
) -> None:
    """Of few entries many have the same bucket. An entry may be named while it lives."""
    pytest.importorskip("llvmlite")
    native, plain = row_table(np.zeros(entries, bool)), DictTable(np.zeros(entries, bool))
    assert isinstance(native, NativeTable)
    for named, die in steps:
        rows = b"".join(row for row, _ in named)
        numbers = np.array([number % entries for _, number in named], np.int64)
        dead = np.array([number for number in die if number < entries], np.int64)
        for table in (native, plain):
            table.name(rows, numbers)
            table._alive[dead] = False
        assert native._alive.tolist() == plain._alive.tolist()
        assert native.find(b"".join(ROWS)).tolist() == plain.find(b"".join(ROWS)).tolist()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"icmp eq i8 (\S+), 0", r"icmp ult i8 \1, 0"),  # what is dead is found
        (r"icmp eq i64 (%or\S+), 0", r"icmp uge i64 \1, 0"),  # and what is another's
    ],
)
def test_machine_code_that_finds_others_is_not_used(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llvmlite")
    changed, count = re.subn(right, wrong, kernel(table_module.__name__, "row_table.ll"))
    assert count == 2  # in `find` and in `name`
    monkeypatch.setattr(machine_code, "kernel", lambda module, name: changed)
    assert native_calls.__wrapped__() is None
    assert "the machine code finds wrong ones" in caplog.text


def test_entries_that_do_not_exist_are_refused() -> None:
    for table in (row_table(np.zeros(4, bool)), DictTable(np.zeros(4, bool))):
        for number in (-1, 4, 1 << 40):
            with pytest.raises(IndexError):
                table.name(b"\1" * ROW_BYTES, np.array([number]))
        with pytest.raises(ValueError, match=r"rows|zip"):
            table.name(b"\1" * ROW_BYTES, np.array([1, 2]))


def test_buckets_are_even_whatever_the_rows_differ_in() -> None:
    pytest.importorskip("llvmlite")
    count = 1 << 14
    for place in (0, 7, 13, 24, 29):
        table = row_table(np.zeros(count, bool))
        assert isinstance(table, NativeTable)
        made = [
            bytes(place) + i.to_bytes(2, "big") + bytes(ROW_BYTES - place - 3) + b"\1"
            for i in range(count)
        ]
        table.name(b"".join(made), np.arange(count))
        _, _, _, buckets, _ = table._arrays
        assert np.bincount(buckets).max() <= 16
        assert table.find(b"".join(made)).tolist() == list(range(count))


@pytest.mark.usefixtures("without_llvmlite")
def test_without_a_compiler_a_dict_does_the_work(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "vllm"):
        assert native_calls.__wrapped__() is None
    assert "machine code cannot be used (llvmlite" in caplog.text
