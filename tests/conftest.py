# SPDX-License-Identifier: Apache-2.0
import functools
import gc
import importlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from omni_connector.runtime.turns import take_ended_threads
from omni_connector.transports import choice
from omni_connector.transports.mooncake.engine import TransferEngine

from . import early, machine, pairs, support_table
from .masters import Master
from .patience import lengthen_objects
from .peer_processes import Peer, starting
from .simulation import beside

# How long an example takes, and how long it takes to make one, says nothing but how busy the
# machine is; what must not take long is limited by the tests' own deadlines.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Have the marks of this run's tests at hand."""
    config.pluginmanager.register(support_table.Table(), support_table.NAME)


def pytest_report_header() -> list[str]:
    """What these tests run on, for whoever reads the log of a failure."""
    return machine.lines()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations of parameters; and in the processes that share the tests, have long
    files begin first."""
    pairs.choose(config, items)
    if hasattr(config, "workerinput"):
        early.put_first(items)


def pytest_collection_finish() -> None:
    """Tensors of these tests are small: torch's threads cost more than they do, and more beside
    the threads that the tests are about.

    All that is there now stays until the end: with vLLM a million objects. No collection
    of garbage has to look at it, least of all one in a process that is forked, which would copy it.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def packages_read_once() -> Iterator[None]:
    """The names of installed transports are read once. Each engine would read the files of all
    installed packages for 5 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "entry_points", functools.cache(choice.entry_points))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_objects() -> Iterator[None]:
    """A receiver waits for its sender as long as a busy machine takes."""
    with pytest.MonkeyPatch.context() as patch:
        lengthen_objects(patch)
        yield


@pytest.fixture
def without_llvmlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine code can be compiled."""
    found = importlib.import_module

    def missing(name: str, package: str | None = None) -> ModuleType:
        if name.startswith("llvmlite"):
            raise ImportError(name)
        return found(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)


@pytest.fixture(scope="session")
def campaigns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, beside.Run]]:
    """200 schedules of the simulation, which are on their way."""
    with beside.campaigns(tmp_path_factory.mktemp("campaigns")) as runs:
        yield runs


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[beside.Run]]:
    """Schedules of the simulation that are told twice, which are on their way."""
    with beside.stories(tmp_path_factory.mktemp("stories")) as runs:
        yield runs


@pytest.fixture(autouse=True)
def ended_threads_are_told_once() -> Iterator[None]:
    """What a test has had end is no failure of the engines of a later one."""
    yield
    take_ended_threads()


@pytest.fixture(scope="session", autouse=True)
def begun_early(request: pytest.FixtureRequest) -> None:
    """What takes nothing but time, which it has from here on."""
    early.begin(request, "campaigns", "stories")


@pytest.fixture
def caplog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """With the records of loggers below vLLM's, whatever vLLM has made of it when imported."""
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield caplog
    logger.setLevel(level)


@pytest.fixture(scope="module")
def reused_engines() -> Iterator[None]:
    """Engines of Mooncake are used by one connector after the other: each takes 1 s to end."""
    unused: list[Any] = []
    start, close = TransferEngine._start, TransferEngine.close

    def take(self: TransferEngine, host: str) -> Any:
        return unused.pop() if unused and host == "127.0.0.1" else start(self, host)

    def keep(self: TransferEngine) -> None:
        engine = self._engine
        close(self)
        if engine is not None:
            unused.append(getattr(engine, "inner", engine))  # what a test has put around it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransferEngine, "_start", take)
        patch.setattr(TransferEngine, "close", keep)
        yield


@pytest.fixture
def place() -> Iterator[Path]:
    """A private folder whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(place: Path) -> Iterator[Callable[[str], Peer]]:
    """Starts peers over shared memory in processes of their own, which leave nothing there."""
    with starting(place) as begin:
        yield begin


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
