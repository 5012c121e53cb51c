# SPDX-License-Identifier: Apache-2.0
"""Of a test's combinations of parameters enough are tried that all pairs of values meet."""

from collections import Counter
from itertools import combinations, product

import pytest

from .pairs import cover, spread


@pytest.mark.parametrize("sizes", [(5, 3, 6), (2, 2, 2, 2), (3, 4)], ids=str)
@pytest.mark.parametrize(
    "possible", [lambda row: True, lambda row: row[0] != row[-1] or row[0] > "1"]
)
def test_each_two_values_meet_in_a_row_that_is_chosen(sizes, possible):
    rows = [row for row in product(*(map(str, range(size)) for size in sizes)) if possible(row)]
    chosen = cover(rows)
    met = {pair for number in chosen for pair in combinations(enumerate(rows[number]), 2)}
    assert met == {pair for row in rows for pair in combinations(enumerate(row), 2)}
    assert (len(chosen) < len(rows)) == (len(sizes) > 2)


def test_a_single_parameter_keeps_its_values():
    assert cover([("a",), ("b",), ("a",)]) == {0, 1}


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("sizes", [(5, 3, 6), (2, 2, 2, 2), (13, 2), (4,)], ids=str)
def test_each_value_is_there_and_partners_are_shared_out(sizes, start):
    rows = list(product(*(map(str, range(size)) for size in sizes)))
    chosen = [rows[number] for number in spread(rows, start)]
    assert len(chosen) == max(sizes)
    for size, values in zip(sizes, zip(*chosen, strict=True), strict=True):
        often = Counter(values)
        assert len(often) == size
        assert max(often.values()) - min(often.values()) <= 2


def test_where_not_all_values_can_meet_each_is_there_still():
    rows = [("a", "1"), ("a", "2"), ("b", "2"), ("b", "3")]
    for start in range(len(rows)):
        chosen = {value for number in spread(rows, start) for value in enumerate(rows[number])}
        assert chosen == {value for row in rows for value in enumerate(row)}
