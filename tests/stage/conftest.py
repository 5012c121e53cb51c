# SPDX-License-Identifier: Apache-2.0
"""Managers over shared memory, in this process and in others of one runtime folder."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from omni_connector.stage.manager import OmniKVTransferManager

from ..fetched import fetched
from .forks import Forked
from .shared import shared_manager


@pytest.fixture(scope="session")
def vllm_omni() -> Path:
    """Folder of the published package."""
    if given := os.environ.get("VLLM_OMNI_PATH"):
        return Path(given)
    return fetched("vllm-omni")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder of this test's processes; its path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def shared(place: Path) -> Iterator[Callable[..., OmniKVTransferManager]]:
    """Makes managers over shared memory, and closes them."""
    made: list[OmniKVTransferManager] = []

    def make(**config: object) -> OmniKVTransferManager:
        made.append(shared_manager(**config))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def spawn(place: Path) -> Iterator[Callable[..., Forked]]:
    """Starts a module of this folder in a process of its own, and ends it with the test."""
    started: list[Forked] = []

    def start(module: str, *arguments: object) -> Forked:
        started.append(Forked(f"tests.stage.{module}", *map(str, arguments)))
        return started[-1]

    yield start
    for process in started:
        process.close()
