# SPDX-License-Identifier: Apache-2.0
"""The page of supported models says what the tests say."""

import subprocess
import sys
from pathlib import Path

import pytest

from .. import support_table

pytestmark = pytest.mark.vllm


def test_the_page_of_models_is_up_to_date(pytestconfig: pytest.Config) -> None:
    page = support_table.page_of(pytestconfig)
    if page is not None:
        assert support_table.PAGE.read_text() == page, "run `python -m tests.support_table`"
        return
    # Some of the tests alone do not make the page.
    done = subprocess.run(
        [sys.executable, "-m", "tests.support_table", "--check"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
