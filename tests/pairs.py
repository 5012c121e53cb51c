# SPDX-License-Identifier: Apache-2.0
"""Tests of some combinations of their parameters, in which all pairs of values meet.

A test that is marked `pairs` stands for a product of parameters. Nearly each fault shows with two
values together, whatever the others are. Of three parameters with 5, 3 and 6 values 30 combinations
are tried, in place of 90.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations of the tests that are marked, the same ones in each process."""
    marked = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairs"):
            marked[item.nodeid.split("[")[0]].append(item)
    left = []
    for several in marked.values():
        # As they are told apart in an id; a parameter's value may be equal to nothing.
        rows = [tuple(map(repr, item.callspec.params.values())) for item in several]  # type: ignore[attr-defined]
        chosen = cover(rows)
        left += [item for number, item in enumerate(several) if number not in chosen]
    if left:
        items[:] = [item for item in items if item not in set(left)]
        config.hook.pytest_deselected(items=left)


def cover(rows: Sequence[tuple[str, ...]]) -> set[int]:
    """Numbers of some rows: each two values of different columns that any row has, one of these
    has, too.

    >>> product = [(a, x, n) for a in "ab" for x in "xy" for n in "12"]
    >>> [product[number] for number in sorted(cover(product))]
    [('a', 'x', '1'), ('a', 'y', '2'), ('b', 'x', '2'), ('b', 'y', '1')]
    """
    pairs = [set(combinations(enumerate(row), min(2, len(row)))) for row in rows]
    missing = set().union(*pairs)
    chosen = set[int]()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(missing & pairs[number]))  # the first
        chosen.add(best)
        missing -= pairs[best]
    return chosen
