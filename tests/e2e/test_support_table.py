# SPDX-License-Identifier: Apache-2.0
"""The page of supported models says what the tests say."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_the_page_of_models_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support_table", "--check"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
