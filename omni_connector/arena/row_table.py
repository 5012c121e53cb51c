# SPDX-License-Identifier: Apache-2.0
"""A hash table of rows of bytes; one call of machine code looks up the rows of a whole prompt.

With a million rows a dict takes 190 bytes a row, 1.9 ms to add 512 new ones, and pauses of 90 ms to
grow. This table takes 56 bytes a row and 0.3 ms. (numpy would need some ten calls for each step of
a probe.) The size is fixed, and the entries are numbered from 0. The entries of a bucket form a
list. Rows are compared byte by byte, so two rows with equal hashes are never confused.

kernels/rows.h has the code. Where it cannot be compiled, a dict does the work.
"""

import ctypes
import functools
import logging
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.runtime.machine_code import compiled_or_none

logger = logging.getLogger("vllm.omni_connector.native")

ROW_BYTES: Final = 36

_MAX_KEY: Final = ROW_BYTES - 4
"""Bytes of the longest key that a row holds. A longer one is replaced by a hash of this length."""

_Call = Callable[[bytes, bytes, int, int], None]


class DictTable:
    """Maps rows of bytes to entries, by a dict. An entry has one row at a time.

    Args:
        alive: (entries,) bool, whether an entry is found; the caller may clear it.

    Attributes:
        words: `struct table` of kernels/rows.h; None where a dict does the work.
    """

    words: bytes | None = None

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
        """Give each entry its row, and set it alive. Skips a row that a living entry has already,
        and a row whose last byte is 0.

        Args:
            rows: as for `find`.
            numbers: the entries, as many as rows.

        Raises:
            IndexError: there is no such entry.
        """
        _require(numbers, len(self._alive))
        for row, number in zip(_split(rows), numbers.tolist(), strict=True):
            there = self._number.get(row)
            if not row[-1] or (there is not None and self._alive[there]):
                continue
            former = self._row.get(number, b"")
            if self._number.get(former) == number:
                del self._number[former]
            self._number[row] = number
            self._row[number] = row
            self._alive[number] = True


class NativeTable(DictTable):
    """The same in machine code, with a third of the memory."""

    def __init__(self, alive: NDArray[np.bool_], find: _Call, name: _Call) -> None:
        self._alive = alive
        self._find = find
        self._name = name
        count = len(alive)
        rows = np.zeros(count * ROW_BYTES, np.uint8)
        following, bucket, first = (np.full(count, -1, np.int32) for _ in range(3))
        self._arrays = rows, alive, following, bucket, first
        self.words: bytes = struct.pack("=6Q", *(each.ctypes.data for each in self._arrays), count)

    def find(self, rows: bytes) -> NDArray[np.int64]:
        found = np.empty(len(rows) // ROW_BYTES, np.int64)
        self._find(self.words, rows, len(found), found.ctypes.data)
        return found

    def name(self, rows: bytes, numbers: NDArray[np.int64]) -> None:
        _require(numbers, len(self._alive))
        numbers = np.ascontiguousarray(numbers, np.int64)
        if len(rows) != len(numbers) * ROW_BYTES:
            raise ValueError(f"{len(rows)} bytes of rows for {len(numbers)} entries")
        self._name(self.words, rows, len(numbers), numbers.ctypes.data)


def rows_of(group: int, keys: Sequence[bytes | None]) -> bytes:
    """The rows of blocks of a cache group, one after the other.

    The row of key "ab" in group 1:

        61 62 00 ... 00 | 01 00 00 | 02
        key, 32 bytes   | group    | length of the key

    The last byte is 0 if the block has no key, and only then.
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
    """An empty table, native if possible; the argument is that of `DictTable`."""
    calls = native_calls()
    return DictTable(alive) if calls is None else NativeTable(alive, *calls)


@functools.cache
def native_calls() -> tuple[_Call, _Call] | None:
    """`find` and `name` of the native table, compiled at the first call; None if that fails."""
    engine = compiled_or_none(__name__, "row_table.ll", "Slots are looked up in a dict")
    if engine is None:
        return None
    pointer = ctypes.c_void_p
    number = ctypes.c_int64
    # They keep the GIL (PYFUNCTYPE): other threads read the arrays without a lock.
    prototype = ctypes.PYFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, number, pointer)
    find, name = (prototype(engine.get_function_address(each)) for each in ("find", "name"))
    find.engine = name.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    if not _agrees(find, name):
        logger.warning("Slots are looked up in a dict: the machine code finds wrong ones")
        return None
    return find, name


def _agrees(find: _Call, name: _Call) -> bool:
    """Whether the native table finds the same as a dict, while entries get other rows and die."""
    draw = np.random.default_rng(0)
    size = 64
    lives = np.zeros(size, bool), np.zeros(size, bool)
    tables = DictTable(lives[0]), NativeTable(lives[1], find, name)
    for _ in range(16):
        keys = [b"%d" % key for key in draw.integers(0, 2 * size, size // 2)]
        rows = rows_of(1, [*keys, None])
        numbers = draw.permutation(size)[: len(keys) + 1]
        for table, alive in zip(tables, lives, strict=True):
            alive[numbers] = False
            table.name(rows, numbers)
        if not np.array_equal(tables[0].find(rows), tables[1].find(rows)):
            return False
    return np.array_equal(lives[0], lives[1])


def _split(rows: bytes) -> list[bytes]:
    return [rows[at : at + ROW_BYTES] for at in range(0, len(rows), ROW_BYTES)]


def _require(numbers: NDArray[np.int64], count: int) -> None:
    # Machine code checks no bounds.
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"entries from {numbers.min()} to {numbers.max()}, of {count}")
