# SPDX-License-Identifier: Apache-2.0
"""Copies in machine code give what numpy and xxhash give, and go where numpy must."""

import itertools
import platform
import re

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.copy import native
from omni_connector.copy.native import ALIGNMENT, Rows, begin, checksums, native_copy
from omni_connector.runtime.machine_code import kernel


def filled(shape, seed):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


class Slots:
    """Slots with rows of so many stripes each, beside each other; the sources begin anywhere."""

    def __init__(self, stripes, slots, apart=1):
        pytest.importorskip("llvmlite")
        self.copy = native_copy()
        assert self.copy is not None
        self.lengths = np.array(stripes, np.int64) * ALIGNMENT
        steps = self.lengths + apart * ALIGNMENT
        size = int(steps.sum())
        self.room = np.full(slots * size + ALIGNMENT, 7, np.uint8)
        self.target = self.room[-self.room.ctypes.data % ALIGNMENT :][: slots * size]
        self.source = filled(self.target.size + 1, seed=1)[1:]
        self.offsets = np.arange(slots)[:, None] * size + np.cumsum(steps) - steps
        self.states = begin(slots, int(self.lengths.sum()))

    def run(self, some=slice(None), *, checksum=True):
        """Copy some of the rows."""
        offsets = self.offsets[:, some]
        places = self.target.ctypes.data + offsets, self.source.ctypes.data + offsets
        self.copy(*places, self.lengths[some], self.states, checksum=checksum)

    def check(self, *, checksum=True):
        expected = np.full(self.target.size, 7, np.uint8)
        for offsets, found in zip(self.offsets, checksums(self.states), strict=True):
            rows = [slice(at, at + n) for at, n in zip(offsets, self.lengths, strict=True)]
            for row in rows:
                expected[row] = self.source[row]
            content = b"".join(self.source[row].tobytes() for row in rows)
            assert not checksum or found == xxhash.xxh3_64_intdigest(content)
        assert np.array_equal(self.target, expected)


STRIPES = st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(lambda some: sum(some) > 3)


@given(stripes=STRIPES, slots=st.integers(1, 3), apart=st.integers(0, 2), checksum=st.booleans())
def test_rows_arrive_with_their_checksum_and_nothing_else_is_written(
    stripes, slots, apart, checksum
):
    each = Slots(stripes, slots, apart)
    each.run(checksum=checksum)
    each.check(checksum=checksum)


@given(stripes=STRIPES, slots=st.integers(1, 3), data=st.data())
def test_checksums_go_on_from_copy_to_copy(stripes, slots, data):
    each = Slots(stripes, slots)
    ends = sorted(data.draw(st.sets(st.integers(0, len(stripes)))) | {0, len(stripes)})
    for first, end in itertools.pairwise(ends):
        each.run(slice(first, end))
    each.check()


@given(stripes=STRIPES, slots=st.integers(1, 3), data=st.data())
def test_rows_that_are_hashed_alone_count_as_those_that_are_copied(stripes, slots, data):
    each = Slots(stripes, slots)
    places = each.target.ctypes.data + each.offsets, each.source.ctypes.data + each.offsets
    each.copy(*places, each.lengths, each.states, checksum=True)
    each.check()
    some = data.draw(st.integers(0, len(stripes)))
    passed = begin(slots, int(each.lengths.sum()))
    for rows in (slice(0, some), slice(some, None)):
        each.copy.hash(places[1][:, rows], each.lengths[rows], passed)
    assert np.array_equal(checksums(passed), checksums(each.states))


@given(data=st.data())
def test_rows_of_some_bytes_are_those_of_all(data):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    starts = data.draw(st.permutations(range(0, 600, 100)))[: len(lengths)]
    whole = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)]
    rows = Rows.of([(start, 7, n) for start, n in zip(starts, lengths, strict=True)], 3)
    first = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(first, len(whole)))
    some = rows.between(first, end)
    found = [
        start + i
        for start, n in zip(some.starts.tolist(), some.lengths.tolist(), strict=True)
        for i in range(n)
    ]
    assert found == whole[first:end]
    assert some.offsets.tolist() == [0, *np.cumsum(some.lengths)[:-1]][: len(some.offsets)]
    assert (some.strides == 7).all()
    assert some.nbytes == end - first


@pytest.mark.parametrize("page", [16 << 10, 1 << 20])
def test_rows_as_long_as_those_of_models_arrive(page):
    each = Slots([page // ALIGNMENT] * 4, 2, apart=0)
    each.run()
    each.check()


def test_no_slots_and_no_rows_are_no_copy():
    for each in (Slots([4], 0), Slots([], 2)):
        each.run()
        each.check(checksum=False)


def test_arrays_that_do_not_agree_are_refused():
    each = Slots([8], 2)
    two = np.zeros((2, 1), np.int64)
    for wrong in (
        (two, two[:1], each.lengths, each.states),
        (two, two, each.lengths[:0], each.states),
        (two, two, each.lengths, each.states[:1]),
        (two, two, each.lengths, each.states[:, :-1]),
        (two, two, each.lengths, np.asfortranarray(each.states)),
    ):
        with pytest.raises(ValueError, match="lengths"):
            each.copy(*wrong, checksum=True)
        if wrong[0].shape == wrong[1].shape:
            with pytest.raises(ValueError, match="lengths"):
                each.copy.hash(*wrong[1:])


@pytest.mark.parametrize("ids", [[-1], [0, 3]])
def test_ids_that_do_not_exist_have_no_address(ids):
    rows = Rows.of([(4096, 64, 8)], num_blocks=3)
    with pytest.raises(IndexError, match="of 3"):
        rows.blocks(np.array(ids))
    with pytest.raises(IndexError, match="of 3"):
        rows.slots(np.zeros((3, 8), np.uint8), np.array(ids))


@pytest.mark.usefixtures("without_llvmlite")
def test_numpy_copies_where_the_compiler_is_missing(caplog):
    with caplog.at_level("WARNING", "vllm"):
        assert native_copy.__wrapped__() is None
    assert "machine code cannot be used (llvmlite" in caplog.text


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"store <8 x i64> .*!nontemporal !0", ""),
        (r"(@copy_hashed(?:.*\n)*?)  store <8 x i64> .*!nontemporal !0", r"\1"),
        (
            r"(@copy_hashed(?:.*\n)*?  store <8 x i64> (?:.*\n)*?)  store <8 x i64> .*!nontemp.*",
            r"\1",
        ),
        (r"(define void @copy_hashed(?:.*\n)*?.*phi i64 \[ )16,", r"\g<1>15,"),
        (r"i64 121, i64", "i64 120, i64"),
        (r"@SECRET, i64 11\)", "@SECRET, i64 12)"),
        (r"i64 2654435761", "i64 2654435763"),
        (r"(lshr i64 \S+), 37", r"\1, 36"),
        (r"store i64 %left\S+, ptr %left", "store i64 0, ptr %left"),
    ],
)
def test_numpy_copies_where_machine_code_gives_something_else(monkeypatch, caplog, right, wrong):
    changed, count = re.subn(right, wrong, kernel(native.__name__, "copy.ll"), count=1)
    assert count == 1
    monkeypatch.setattr(native, "kernel", lambda module, name: changed)
    assert native_copy.__wrapped__() is None
    assert "differ from those" in caplog.text


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are processors of x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
def test_processors_with_narrow_registers_get_the_same(monkeypatch, caplog, processor):
    llvm = pytest.importorskip("llvmlite.binding")
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: processor)
    monkeypatch.setattr(llvm, "get_host_cpu_features", llvm.FeatureMap)
    assert native_copy.__wrapped__() is not None, caplog.text
