# SPDX-License-Identifier: Apache-2.0
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .masters import Master


@pytest.fixture
def place() -> Iterator[Path]:
    """A private folder whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A Mooncake master that stays up."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    started = Master(tmp_path_factory.mktemp("mooncake"))
    started.start()
    yield started
    started.kill()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Master]:
    """A Mooncake master of the test's own, to be stopped and killed."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    started = Master(tmp_path)
    started.start()
    yield started
    started.kill()
