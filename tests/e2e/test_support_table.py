# SPDX-License-Identifier: Apache-2.0
"""The pages of supported models say what the tests say."""

import subprocess
import sys
from pathlib import Path

import pytest

from .. import support_table

pytestmark = pytest.mark.vllm


def test_the_pages_of_models_are_up_to_date(pytestconfig: pytest.Config) -> None:
    pages = support_table.pages_of(pytestconfig)
    if pages is not None:
        there = tuple(path.read_text() for path in support_table.PAGES)
        assert there == pages, "run `python -m tests.support_table`"
        return
    # Some of the tests alone do not make the pages.
    done = subprocess.run(
        [sys.executable, "-m", "tests.support_table", "--check"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
