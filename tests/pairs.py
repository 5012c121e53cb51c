# SPDX-License-Identifier: Apache-2.0
"""Tests of some combinations of their parameters.

A test that is marked `pairs` or `values` stands for a product of parameters. With `pairs` each two
values of different parameters meet in a combination that is tried: of three parameters with 5, 3
and 6 values 30 combinations, in place of 90. With `values` each value is tried once, with partners
that differ from test to test: 6 combinations. A pair that one test leaves out is met in another one
of the same file or folder.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from zlib import crc32

import pytest


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations of the tests that are marked, the same ones in each process."""
    marked = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairs") or item.get_closest_marker("values"):
            marked[item.nodeid.split("[")[0]].append(item)
    left = []
    for name, several in marked.items():
        # As they are told apart in an id; a parameter's value may be equal to nothing.
        rows = [tuple(map(repr, item.callspec.params.values())) for item in several]  # type: ignore[attr-defined]
        if several[0].get_closest_marker("values"):
            chosen = spread(rows, crc32(name.encode()))
        else:
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


def spread(rows: Sequence[tuple[str, ...]], start: int = 0) -> set[int]:
    """Numbers of some rows: each value that any row has, one of these has, too, and no value is
    met much more often than another one. Of rows that are equally good, the first from row `start`
    on is taken.

    >>> product = [(a, x, n) for a in "abc" for x in "xy" for n in "12"]
    >>> [product[number] for number in sorted(spread(product))]
    [('a', 'x', '1'), ('b', 'y', '2'), ('c', 'x', '1')]
    >>> [product[number] for number in sorted(spread(product, 1))]
    [('a', 'x', '2'), ('b', 'y', '1'), ('c', 'x', '1')]
    """
    values = [set(enumerate(row)) for row in rows]
    order = [(start + number) % len(rows) for number in range(len(rows))]
    missing = set().union(*values)
    met = Counter[tuple[int, str]]()
    chosen = set[int]()
    while missing:
        best = max(
            order,
            key=lambda number: (
                len(missing & values[number]),
                -sum(met[value] for value in values[number]),
            ),
        )
        chosen.add(best)
        missing -= values[best]
        met.update(values[best])
    return chosen
