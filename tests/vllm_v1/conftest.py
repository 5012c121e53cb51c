# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, each test with a runtime folder of its own."""

import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_connector.copy import held_blocks
from omni_connector.prefix import neighbours
from omni_connector.vllm_v1 import connector, scheduler_report
from omni_connector.vllm_v1.surroundings import SURROUNDINGS
from tests.patience import lengthen
from tests.toy import write_model

from .harness import (
    SEVERAL_MODULES,
    InProcessEngine,
    Lifecycle,
    connector_threads,
    sockets,
    wait,
)
from .runners import RUNNERS
from .stores import MASTER, SwitchedShelf

MakeEngine = Callable[..., InProcessEngine]

DEADLINES = (
    "omni_connector.cli.explained._ANSWER_S",
    "omni_connector.copy.held_blocks.SETTLE_S",
    "omni_connector.handoff.receiver._FRESH_S",
    "omni_connector.identity.epochs.WAIT_S",
    "omni_connector.prefix.attaching._ANSWER_S",
    "omni_connector.prefix.neighbours._ADOPT_S",
    "omni_connector.prefix.neighbours._ANSWER_S",
    "omni_connector.prefix.neighbours._CLOSE_S",
    "omni_connector.prefix.neighbours._CONNECT_S",
    "omni_connector.prefix.store_jobs._DISCARD_S",
    "omni_connector.prefix.store_jobs._GET_S",
    "omni_connector.prefix.store_jobs._PUT_S",
    "omni_connector.prefix.store_jobs._STAGING_WAIT_S",
    "omni_connector.runtime.trace._CLOSE_S",
    "omni_connector.runtime.turns._WATCH_CLOSE_S",
    "omni_connector.transports.reading._CLOSE_S",
    "omni_connector.vllm_v1.connector.SETTLE_S",
)
"""Those that engines of these tests meet on any machine."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the toy model's configuration."""
    return write_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder; short, as the paths of Unix sockets must be."""
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for each other, for ranks, stores and copies as long as it takes, and keep
    orphans whatever memory others use."""
    lengthen(monkeypatch, DEADLINES)
    monkeypatch.setattr(neighbours, "available_bytes", lambda: 1 << 60)


@pytest.fixture
def hasty_resets(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset of vLLM's prefix cache hardly waits for copies, which the test holds back."""
    for module in (connector, held_blocks):
        monkeypatch.setattr(module, "SETTLE_S", 0.1)


@pytest.fixture
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines tell in each step what they have counted."""
    monkeypatch.setattr(scheduler_report, "_REPORT_S", 0.0)


@pytest.fixture
def engine(model: Path, runtime: Path, told_at_once: None, patient: None) -> Iterator[MakeEngine]:
    """Makes engines, and at the end of the test stops them and sees what they leave behind."""
    made: list[InProcessEngine] = []
    others = connector_threads()  # of a test that failed, which is enough said of it

    def make(role: str | None = None, *, at: Path | None = None, **options: Any) -> InProcessEngine:
        if options.get("drafter") == "modules" and not SEVERAL_MODULES:
            pytest.skip("this vLLM has no MTP of several modules")
        made.append(InProcessEngine(at or model, role, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
    wait(lambda: connector_threads() <= others)
    assert not sockets(runtime)


@pytest.fixture(scope="session")
def tokens(model: Path) -> Callable[[list[int], int], list[int]]:
    """What an engine without connector generates for a prompt."""
    reference = InProcessEngine(model)
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(prompt: list[int], count: int) -> list[int]:
        asked = (tuple(prompt), count)
        if asked not in known:
            known[asked] = reference.generate(prompt, count).tokens
        return list(known[asked])

    return generate


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Warnings and errors of this package, which vLLM's logger does not propagate."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("vllm.omni_connector")
    level = logger.level
    logger.setLevel(logging.WARNING)  # whatever vLLM's own level is by now
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> SwitchedShelf:
    """The store of this test's engines, in this process."""
    shelf = SwitchedShelf()
    surroundings = dataclasses.replace(SURROUNDINGS, block_store=shelf.connect)
    monkeypatch.setattr(connector, "SURROUNDINGS", surroundings)
    return shelf


@pytest.fixture
def sharer(engine: MakeEngine, shelf: SwitchedShelf) -> MakeEngine:
    """Makes engines that share their prefixes."""

    def make(role: str = "kv_both", extra: dict[str, Any] | None = None, **options: Any) -> Any:
        return engine(role, extra={**MASTER, **(extra or {})}, **options)

    return make


@pytest.fixture(params=RUNNERS, ids=lambda runner: runner.__name__)
def runner(request) -> type[Lifecycle]:
    return request.param


@pytest.fixture(params=["full", "window", "all three"])
def family(request) -> str:
    """A failed load is reported by its blocks for the first, as a whole for the others."""
    return request.param
