# SPDX-License-Identifier: Apache-2.0
"""What begins before all else: fixtures that take long in processes of their own, and, where
processes share the tests file by file, files of few tests that take long."""

from collections import Counter
from pathlib import Path
from typing import Final

import pytest

LONG: Final = (
    "simulation/test_simulation.py",
    "vllm_v1/test_loaded_models.py",
    "arena/test_eviction.py",
    "arena/test_slot_index.py",
)
"""Files in which a test takes many times as long as elsewhere."""

_FOLDER: Final = Path(__file__).parent


def begin(request: pytest.FixtureRequest, *names: str) -> None:
    """Set up each of these fixtures of the session that a test of this run asks for.

    Nothing is set up if processes share the tests: each process sees all tests, and would set up
    fixtures that only another one needs.
    """
    if hasattr(request.config, "workerinput"):
        return
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in names:
        if name in asked:
            request.getfixturevalue(name)


def put_first(items: list[pytest.Item]) -> None:
    """Sort tests by file: the `LONG` ones first, then those of many tests.

    pytest-xdist by itself begins files of many tests first, unless told not to. Then one process
    goes on with a long file of few tests when the others have ended.
    """
    numbers = Counter(item.path for item in items)
    long = {_FOLDER / name for name in LONG}
    items.sort(key=lambda item: (item.path not in long, -numbers[item.path]))
