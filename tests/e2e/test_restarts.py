# SPDX-License-Identifier: Apache-2.0
"""A service that is alone on its host is killed, and finds after its restart what it had kept."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from omni_connector.testing.engines import Engine, Process
from tests.systemd import Systemd

from .configurations import BLOCK
from .fork_server import ForkServer
from .harness import Case, ask
from .pool import Pool
from .prompts import new_salt, random_prompt

# An engine that is not forked starts, beside all that uses the cores then.
pytestmark = pytest.mark.e2e

WAIT_S = 60.0
SAVED = "vllm:omni_connector_blocks_saved_total"
FOUND = "vllm:omni_connector_tokens_from_host_total"
MET = "Sharing prefixes with the engine at"


class Unit(Systemd):
    """A service whose main process is vLLM's server. What finds descriptors is started as systemd
    does that; else it is forked, as other engines are."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        super().__init__(folder)
        self._fork_server = fork_server

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        host: str | None = None,
    ) -> Process:
        if not self.kept:
            return self._fork_server.start(
                module, arguments, {**environment, **self.environment}, output
            )
        return self.launch([sys.executable, "-m", module, *arguments], environment, output)


@pytest.fixture
def unit(engine_pool: Pool) -> Iterator[Unit]:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        contextlib.closing(Unit(Path(folder), engine_pool.fork_server())) as made,
    ):
        yield made


def until(engine: Engine, what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}:\n{engine.log_tail()}"
        time.sleep(0.1)


def test_a_killed_service_finds_what_it_had_kept(
    unit: Unit, engine_pool: Pool, cases: dict[str, Case]
) -> None:
    case = cases["two-thousand"]
    salts = [new_salt() for _ in range(2)]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        service = engine_pool.new("share", environment={RUNTIME_DIR_VARIABLE: f"{folder}/run"})
        service.fork_server = unit
        try:
            service.start()
            service.wait_ready()
            case.check(ask(service, case.prompt, salts[0]))
            full = len(case.prompt) // BLOCK

            def saved() -> bool:
                service.complete(random_prompt(7, 3), max_tokens=1)  # idle engines tell nothing
                return service.metric(SAVED) >= full

            until(service, "not saved", saved)
            service.kill()
            assert len(unit.kept) == 3  # arena, index, label
            service.process = None
            service.start()
            service.wait_ready()
            until(service, "not met", lambda: MET in service.log.read_text(errors="replace"))
            # A prompt that nobody has asked is the control: it is not found.
            case.check(ask(service, case.prompt, salts[1]))
            assert service.metric(FOUND) == 0
            case.check(ask(service, case.prompt, salts[0]))
            assert service.metric(FOUND) == (len(case.prompt) - 1) // BLOCK * BLOCK
            until(service, "the first one's are kept", lambda: len(unit.kept) == 3)
            # The stand-in has gone; what it stood in for is an orphan of the engine.
            case.check(ask(service, case.prompt, salts[0]))
        finally:
            service.stop()
