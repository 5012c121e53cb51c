# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_connector.config import FileStoreSettings
from omni_connector.prefix.file_store import FileBlockStore

from .conformance import BlockStoreConformance, name

__all__ = ["name"]  # a fixture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(folder: Path) -> Iterator[FileBlockStore]:
    opened = FileBlockStore(FileStoreSettings(path=str(folder), gib=1))
    yield opened
    opened.close()


class TestFileBlockStore(BlockStoreConformance):
    def another(self, request: pytest.FixtureRequest) -> FileBlockStore:
        folder = request.getfixturevalue("folder")
        return FileBlockStore(FileStoreSettings(path=str(folder), gib=1))
