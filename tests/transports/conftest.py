# SPDX-License-Identifier: Apache-2.0
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A private folder whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)
