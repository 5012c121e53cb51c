# SPDX-License-Identifier: Apache-2.0
"""Published packages that tests run against without installing them."""

import os
from pathlib import Path

import pytest

from .scripts import module_at

_SCRIPT = Path(__file__).parents[1] / "scripts" / "fetch_wheels.py"


def fetched(name: str) -> Path:
    """The folder of a package that `scripts/fetch_wheels.py` unpacks. Where it cannot be had the
    test is skipped, and fails in CI."""
    script = module_at(_SCRIPT)
    try:
        return Path(script.fetch(name))
    except script.FetchError as error:
        why = f"{name} cannot be had here: {error}"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)
