# SPDX-License-Identifier: Apache-2.0
"""A hash table of rows of bytes, in one call of machine code for the rows of a whole prompt.

A dict of bytes takes a hundred and fifty bytes for each key beside the key's own, and stops for
many milliseconds to grow; numpy takes some ten calls for each step of a probe. The entries of this
table are numbered, and its size is fixed. Those of one bucket form a list, and their rows are
compared as a whole: no hash decides what is found.

As in `native_copy`, llvmlite compiles it; without llvmlite a dict does the work.
"""

import ctypes
import functools
import logging
import struct
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.native_code import CodeDeniedError
from omni_connector.native_copy import compiled

logger = logging.getLogger("vllm.omni_connector.native")

ROW_BYTES: Final = 36

_MAX_KEY: Final = ROW_BYTES - 4
"""Of a longer key, a cryptographic hash of so many bytes stands for it."""

# Two functions: find(table, rows, count, numbers) and name(table, rows, count, numbers). A table
# is {rows, alive, next, bucket of each entry, first of each bucket, number of buckets}. -1 ends a
# list, and -1 is the bucket of an entry that is in none. Dead entries stay in their lists until
# they get other rows.
_CODE: Final = """
define internal i64 @bucket(ptr %table, ptr %row) {
  %w0 = load i64, ptr %row, align 1
  %at1 = getelementptr i8, ptr %row, i64 8
  %w1 = load i64, ptr %at1, align 1
  %at2 = getelementptr i8, ptr %row, i64 16
  %w2 = load i64, ptr %at2, align 1
  %at3 = getelementptr i8, ptr %row, i64 24
  %w3 = load i64, ptr %at3, align 1
  %at4 = getelementptr i8, ptr %row, i64 32
  %narrow = load i32, ptr %at4, align 1
  %w4 = zext i32 %narrow to i64
  %m4 = mul i64 %w4, -7046029254386353131
  %x3 = xor i64 %m4, %w3
  %m3 = mul i64 %x3, -2960836687050489109
  %r3 = call i64 @llvm.fshl.i64(i64 %m3, i64 %m3, i64 29)
  %x2 = xor i64 %r3, %w2
  %m2 = mul i64 %x2, -7046029254386353131
  %r2 = call i64 @llvm.fshl.i64(i64 %m2, i64 %m2, i64 29)
  %x1 = xor i64 %r2, %w1
  %m1 = mul i64 %x1, -2960836687050489109
  %r1 = call i64 @llvm.fshl.i64(i64 %m1, i64 %m1, i64 29)
  %x0 = xor i64 %r1, %w0
  %m0 = mul i64 %x0, -7046029254386353131
  %high = lshr i64 %m0, 32
  %count.at = getelementptr i64, ptr %table, i64 5
  %count = load i64, ptr %count.at
  %scaled = mul i64 %high, %count
  %bucket = lshr i64 %scaled, 32
  ret i64 %bucket
}

declare i64 @llvm.fshl.i64(i64, i64, i64)

define internal i64 @entry(ptr %table, ptr %row, i64 %bucket) {
start:
  %alive.at = getelementptr i64, ptr %table, i64 1
  %nexts.at = getelementptr i64, ptr %table, i64 2
  %firsts.at = getelementptr i64, ptr %table, i64 4
  %rows = load ptr, ptr %table
  %alive = load ptr, ptr %alive.at
  %nexts = load ptr, ptr %nexts.at
  %firsts = load ptr, ptr %firsts.at
  %wanted = load i288, ptr %row, align 1
  %first.at = getelementptr i32, ptr %firsts, i64 %bucket
  br label %step

step:
  %link = phi ptr [%first.at, %start], [%next.at, %other]
  %narrow = load i32, ptr %link
  %number = sext i32 %narrow to i64
  %ends = icmp slt i64 %number, 0
  br i1 %ends, label %done, label %compare

compare:
  %offset = mul i64 %number, 36
  %row.at = getelementptr i8, ptr %rows, i64 %offset
  %there = load i288, ptr %row.at, align 1
  %same = icmp eq i288 %there, %wanted
  br i1 %same, label %candidate, label %other

candidate:
  %life.at = getelementptr i8, ptr %alive, i64 %number
  %life = load i8, ptr %life.at
  %lives = icmp ne i8 %life, 0
  br i1 %lives, label %done, label %other

other:
  %next.at = getelementptr i32, ptr %nexts, i64 %number
  br label %step

done:
  ret i64 %number
}

define void @find(ptr %table, ptr %wanted, i64 %count, ptr %found) {
start:
  %nothing = icmp eq i64 %count, 0
  br i1 %nothing, label %end, label %each

each:
  %i = phi i64 [0, %start], [%i.next, %each]
  %offset = mul i64 %i, 36
  %row = getelementptr i8, ptr %wanted, i64 %offset
  %bucket = call i64 @bucket(ptr %table, ptr %row)
  %number = call i64 @entry(ptr %table, ptr %row, i64 %bucket)
  %found.at = getelementptr i64, ptr %found, i64 %i
  store i64 %number, ptr %found.at
  %i.next = add i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %each

end:
  ret void
}

define void @name(ptr %table, ptr %given, i64 %count, ptr %numbers) {
start:
  %rows = load ptr, ptr %table
  %alive.at = getelementptr i64, ptr %table, i64 1
  %nexts.at = getelementptr i64, ptr %table, i64 2
  %buckets.at = getelementptr i64, ptr %table, i64 3
  %firsts.at = getelementptr i64, ptr %table, i64 4
  %alive = load ptr, ptr %alive.at
  %nexts = load ptr, ptr %nexts.at
  %buckets = load ptr, ptr %buckets.at
  %firsts = load ptr, ptr %firsts.at
  %nothing = icmp eq i64 %count, 0
  br i1 %nothing, label %end, label %each

each:
  %i = phi i64 [0, %start], [%i.next, %each.next]
  %offset = mul i64 %i, 36
  %row = getelementptr i8, ptr %given, i64 %offset
  %last.at = getelementptr i8, ptr %row, i64 35
  %last = load i8, ptr %last.at
  %empty = icmp eq i8 %last, 0
  br i1 %empty, label %each.next, label %look

look:
  %bucket = call i64 @bucket(ptr %table, ptr %row)
  %known = call i64 @entry(ptr %table, ptr %row, i64 %bucket)
  %is.new = icmp slt i64 %known, 0
  br i1 %is.new, label %change, label %each.next

change:
  %number.at = getelementptr i64, ptr %numbers, i64 %i
  %number = load i64, ptr %number.at
  %number.narrow = trunc i64 %number to i32
  %next.at = getelementptr i32, ptr %nexts, i64 %number
  %bucket.at = getelementptr i32, ptr %buckets, i64 %number
  %old.narrow = load i32, ptr %bucket.at
  %old = sext i32 %old.narrow to i64
  %is.free = icmp slt i64 %old, 0
  br i1 %is.free, label %put, label %unlink

unlink:
  %old.first.at = getelementptr i32, ptr %firsts, i64 %old
  br label %step

step:
  %link = phi ptr [%old.first.at, %unlink], [%after.at, %past]
  %at.narrow = load i32, ptr %link
  %is.it = icmp eq i32 %at.narrow, %number.narrow
  br i1 %is.it, label %cut, label %past

past:
  %at = sext i32 %at.narrow to i64
  %after.at = getelementptr i32, ptr %nexts, i64 %at
  br label %step

cut:
  %rest = load i32, ptr %next.at
  store i32 %rest, ptr %link
  br label %put

put:
  %target.offset = mul i64 %number, 36
  %target = getelementptr i8, ptr %rows, i64 %target.offset
  %content = load i288, ptr %row, align 1
  store i288 %content, ptr %target, align 1
  %first.at = getelementptr i32, ptr %firsts, i64 %bucket
  %first = load i32, ptr %first.at
  store i32 %first, ptr %next.at
  store i32 %number.narrow, ptr %first.at
  %bucket.narrow = trunc i64 %bucket to i32
  store i32 %bucket.narrow, ptr %bucket.at
  %life.at = getelementptr i8, ptr %alive, i64 %number
  store i8 1, ptr %life.at
  br label %each.next

each.next:
  %i.next = add i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %each

end:
  ret void
}
"""

_Call = Callable[[bytes, bytes, int, int], None]


class DictTable:
    """Which entry has a row of bytes. An entry has one row at a time, and is found while it lives.

    Args:
        alive: whether each entry lives, which the caller may change; (entries,) bool.
    """

    def __init__(self, alive: NDArray[np.bool_]) -> None:
        self._alive = alive
        self._number: dict[bytes, int] = {}
        self._row: dict[int, bytes] = {}

    def find(self, rows: bytes) -> NDArray[np.int64]:
        """The number of the entry that has each of these rows, -1 for none.

        Args:
            rows: of `ROW_BYTES` bytes each.
        """
        found = np.array([self._number.get(row, -1) for row in _split(rows)], np.int64)
        found[~self._alive[found]] = -1
        return found

    def name(self, rows: bytes, numbers: NDArray[np.int64]) -> None:
        """Give rows to entries, which live from now on; except where a living entry has the row, or
        where the last byte of a row is 0.

        Args:
            rows: as for `find`.
            numbers: of as many entries.

        Raises:
            IndexError: there is no such entry.
        """
        _require(numbers, len(self._alive))
        for row, number in zip(_split(rows), numbers.tolist(), strict=True):
            if row[-1] and self.find(row)[0] < 0:
                former = self._row.get(number, b"")
                if self._number.get(former) == number:
                    del self._number[former]
                self._number[row], self._row[number] = number, row
                self._alive[number] = True


class NativeTable(DictTable):
    """The same in machine code, in a third of the memory."""

    def __init__(self, alive: NDArray[np.bool_], find: _Call, name: _Call) -> None:
        self._alive = alive
        self._find, self._name = find, name
        count = len(alive)
        rows = np.zeros(count * ROW_BYTES, np.uint8)
        following, bucket, first = (np.full(count, -1, np.int32) for _ in range(3))
        self._arrays = rows, alive, following, bucket, first
        self._words = struct.pack("=6Q", *(each.ctypes.data for each in self._arrays), count)

    def find(self, rows: bytes) -> NDArray[np.int64]:
        found = np.empty(len(rows) // ROW_BYTES, np.int64)
        self._find(self._words, rows, len(found), found.ctypes.data)
        return found

    def name(self, rows: bytes, numbers: NDArray[np.int64]) -> None:
        _require(numbers, len(self._alive))
        numbers = np.ascontiguousarray(numbers, np.int64)
        if len(rows) != len(numbers) * ROW_BYTES:
            raise ValueError(f"{len(rows)} bytes of rows for {len(numbers)} entries")
        self._name(self._words, rows, len(numbers), numbers.ctypes.data)


def rows_of(group: int, keys: Sequence[bytes | None]) -> bytes:
    """The rows that blocks of a cache group have: each its key, the group, and the key's length.

    The last byte of the row is 0 if there is no key, and only then.
    """
    named = [key or b"" for key in keys]
    lengths = set(map(len, named))
    if len(lengths) == 1 and max(lengths) <= _MAX_KEY:
        [length] = lengths
        rest = bytes(_MAX_KEY - length) + group.to_bytes(3, "little") + bytes([length])
        return rest.join(named) + rest
    return b"".join(
        (key if len(key) <= _MAX_KEY else blake2b(key, digest_size=_MAX_KEY).digest()).ljust(
            _MAX_KEY, b"\0"
        )
        + group.to_bytes(3, "little")
        + bytes([min(len(key), _MAX_KEY + 1)])
        for key in named
    )


def row_table(alive: NDArray[np.bool_]) -> DictTable:
    """An empty table of as many entries; its arguments are those of `DictTable`."""
    calls = native_calls()
    return DictTable(alive) if calls is None else NativeTable(alive, *calls)


@functools.cache
def native_calls() -> tuple[_Call, _Call] | None:
    """`find` and `name`, compiled at the first call; None where they cannot be had."""
    try:
        if sys.byteorder != "little":
            raise OSError("the lowest byte of a word is not its first")
        engine = compiled(_CODE)
    except CodeDeniedError:  # which `compiled` has said
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, a dict does the work
        logger.warning("slots are looked up in a dict: there is no native table (%s)", error)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    # They keep the GIL, as what they change is read without another lock.
    prototype = ctypes.PYFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, number, pointer)
    find, name = (prototype(engine.get_function_address(each)) for each in ("find", "name"))
    find.engine = name.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    if not _agrees(find, name):
        logger.warning("slots are looked up in a dict: the native table finds others")
        return None
    return find, name


def _agrees(find: _Call, name: _Call) -> bool:
    """Whether these find what a dict finds, while entries get other rows, and die."""
    draw = np.random.default_rng(0)
    size = 64
    lives = np.zeros(size, bool), np.zeros(size, bool)
    tables = DictTable(lives[0]), NativeTable(lives[1], find, name)
    for _ in range(16):
        keys = [b"%d" % key for key in draw.integers(0, 2 * size, size // 2)]
        rows, numbers = rows_of(1, [*keys, None]), draw.permutation(size)[: len(keys) + 1]
        for table, alive in zip(tables, lives, strict=True):
            alive[numbers] = False
            table.name(rows, numbers)
        if not np.array_equal(tables[0].find(rows), tables[1].find(rows)):
            return False
    return np.array_equal(lives[0], lives[1])


def _split(rows: bytes) -> list[bytes]:
    return [rows[at : at + ROW_BYTES] for at in range(0, len(rows), ROW_BYTES)]


def _require(numbers: NDArray[np.int64], count: int) -> None:
    # In machine code, an entry that does not exist is another's memory.
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"entries from {numbers.min()} to {numbers.max()}, of {count}")
