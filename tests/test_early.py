# SPDX-License-Identifier: Apache-2.0
"""Long files of few tests begin before files of many tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import early

TESTS = Path(__file__).parent


@dataclass
class Item:
    path: Path
    number: int


def test_long_files_come_first_and_then_those_of_many_tests() -> None:
    names = ["test_few.py", "test_many.py", early.LONG[1], "test_also_many.py", early.LONG[0]]
    counts = [1, 3, 2, 3, 1]
    items: list[Any] = [
        Item(TESTS / name, number)
        for name, count in zip(names, counts, strict=True)
        for number in range(count)
    ]
    early.put_first(items)
    found = [(str(item.path.relative_to(TESTS)), item.number) for item in items]
    assert found == [
        *((early.LONG[1], number) for number in range(2)),
        (early.LONG[0], 0),
        *(("test_many.py", number) for number in range(3)),
        *(("test_also_many.py", number) for number in range(3)),
        ("test_few.py", 0),
    ]


def test_long_files_are_there() -> None:
    assert [name for name in early.LONG if not (TESTS / name).exists()] == []
