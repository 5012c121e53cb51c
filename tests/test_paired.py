# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/paired.py`: what it reads in tables, and what it makes of two runs."""

from pathlib import Path
from typing import Any

import pytest

from .scripts import module_at

FOLDER = Path(__file__).parents[1] / "benchmarks"

PAGE = """# Title

A line with 3 numbers, 4 and 5.

## Rates

| KiB | blocks | save | ratio | load | ratio |
|---:|---|---:|---:|---:|---:|
| 4 | near | 2.5 (0.33) | 1 | 3 | 2 |
| 4 | far | 5.0 (0.50) | 1 | 6 | 2 |

More.

| KiB | ms |
|---:|---:|
| 8 | 7 |
"""


@pytest.fixture(scope="module")
def paired() -> Any:
    return module_at(FOLDER / "paired.py")


def test_numbers_are_named_by_table_row_and_column(paired: Any) -> None:
    near, far = ("Rates", "4, near"), ("Rates", "4, far")
    assert paired.numbers(PAGE) == {
        (*near, "save"): 2.5,
        (*near, "(save)"): 0.33,
        (*near, "ratio"): 1,
        (*near, "load"): 3,
        (*near, "ratio'"): 2,
        (*far, "save"): 5,
        (*far, "(save)"): 0.5,
        (*far, "ratio"): 1,
        (*far, "load"): 6,
        (*far, "ratio'"): 2,
        ("Rates (2)", "8", "ms"): 7,
    }


def test_rounds_are_compared_pair_by_pair(paired: Any) -> None:
    row, same, ours = ("t", "r", "ms"), ("t", "r", "MiB"), ("t", "r", "new")
    here = [{row: value, same: 16.0, ours: 1.0} for value in (2.0, 30.0, 3.0)]
    there = [{row: value, same: 16.0} for value in (1.0, 10.0, 2.0)]
    _, _, *rows = paired.table(here, there, 0.0).splitlines()
    assert rows == ["| t | r | ms | 2 | 3 | 2.00 | 1.50 | 3.00 |"]
    assert len(paired.table(here, there, 150.0).splitlines()) == 2


def test_a_column_is_the_geometric_mean_of_its_rows(paired: Any) -> None:
    first, second, same = ("t", "r", "ms"), ("t", "s", "ms"), ("t", "r", "MiB")
    here = [{first: ours, second: 8.0, same: 16.0} for ours in (2.0, 8.0, 18.0)]
    there = [{first: 1.0, second: 4.0, same: 16.0} for _ in here]
    _, _, *rows = paired.columns(here, there).splitlines()
    assert rows == ["| t | ms | 2 | 4.00 | 2.00 | 6.00 |"]


@pytest.mark.parametrize("name", ["handoff", "objects", "scheduler_step", "store"])
def test_the_tables_of_a_benchmark_can_be_read(paired: Any, name: str) -> None:
    page = (FOLDER / "results" / f"{name}.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    found = paired.numbers(page)
    assert len({(table, row) for table, row, _ in found}) >= len(rows) * 2 // 3
