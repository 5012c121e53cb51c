# SPDX-License-Identifier: Apache-2.0
"""An engine that is alone on its host is killed, and finds after its start what it had kept, if
`omni-connector keep` runs beside it."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from omni_connector.testing.engines import Engine
from omni_connector.testing.models import make_model
from omni_connector.testing.ports import free_port

from .configurations import BLOCK
from .harness import Case, ask
from .pool import Pool
from .prompts import new_salt, random_prompt

# An engine that is not forked starts, beside all that uses the cores then.
pytestmark = pytest.mark.e2e

WAIT_S = 60.0
SAVED = "vllm:omni_connector_blocks_saved_total"
FOUND = "vllm:omni_connector_tokens_from_host_total"
TOKENS = 600


class KeepProcess:
    """`omni-connector keep`, as an operator starts it."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "omni_connector", "keep", "--gib", "1"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def said(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


@pytest.fixture
def lone(engine_pool: Pool) -> Iterator[Callable[[], Engine]]:
    """Makes engines with a runtime folder of their own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, contextlib.ExitStack() as ends:
        environment = {RUNTIME_DIR_VARIABLE: f"{folder}/run"}

        def make() -> Engine:
            engine = engine_pool.new("share", environment=environment)
            ends.callback(engine.stop)
            return engine

        yield make


def until(what: str, holds: Callable[[], bool], told: Callable[[], str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}:\n{told()}"
        time.sleep(0.1)


def start(engine: Engine) -> None:
    engine.process = None
    engine.port = free_port()  # connections to the one that was killed may hold its port
    engine.start()
    engine.wait_ready()


def cache(environment: Mapping[str, str], *words: str) -> dict[str, Any]:
    """The document that a verb prints."""
    done = subprocess.run(
        [sys.executable, "-m", "omni_connector", "cache", *words, "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=WAIT_S,
        check=True,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def keeps(engine: Engine, prompt: list[int]) -> None:
    """Wait until the arena has the prompt."""

    def saved() -> bool:
        engine.complete(random_prompt(7, 3), max_tokens=1)  # idle engines tell nothing
        return engine.metric(SAVED) >= len(prompt) // BLOCK

    until("not saved", saved, engine.log_tail)


def test_a_killed_engine_finds_what_it_had_kept(
    lone: Callable[[], Engine], cases: dict[str, Case], tmp_path: Path
) -> None:
    prompt = random_prompt(70, TOKENS)
    case = Case("six-hundred", prompt, cases["two-thousand"].references)
    salts = [new_salt() for _ in range(2)]
    reached = (TOKENS - 1) // BLOCK * BLOCK
    engine = lone()
    start(engine)
    case.check(ask(engine, prompt, salts[0]))
    keeps(engine, prompt)
    engine.kill()

    # The control: nobody has kept anything.
    start(engine)
    case.check(ask(engine, prompt, salts[0]))
    assert engine.metric(FOUND) == 0
    keeps(engine, prompt)

    environment = {RUNTIME_DIR_VARIABLE: engine.environment[RUNTIME_DIR_VARIABLE]}
    keep = KeepProcess(tmp_path / "keep.log", environment)
    with contextlib.closing(keep):
        until("not met", lambda: "will be kept" in keep.said(), keep.said)
        engine.kill()
        until("not kept", lambda: "has ended: its" in keep.said(), keep.said)

        # Other weights of the same architecture find nothing, and compute what they should.
        model = engine.model
        engine.model = make_model("llama", tmp_path / "other weights", seed=1)
        start(engine)
        until("not met", lambda: "which has ended" in engine.log_tail(10_000), engine.log_tail)
        ask(engine, prompt, salts[0])
        ask(engine, prompt, salts[0])
        assert engine.metric(FOUND) == 0
        engine.kill()

        engine.model = model
        start(engine)
        until("not met", lambda: "which has ended" in engine.log_tail(10_000), engine.log_tail)
        case.check(ask(engine, prompt, salts[0]))
        assert engine.metric(FOUND) == reached
        case.check(ask(engine, prompt, salts[1]))  # nobody has asked this before
        assert engine.metric(FOUND) == reached

        keep.process.kill()
        keep.process.wait(WAIT_S)
        case.check(ask(engine, prompt, new_salt()))
        case.check(ask(engine, prompt, salts[0]))
        assert engine.alive

        # The engine is idle; nothing but its sockets is asked.
        found = cache(environment, "ls")["engines"][0]["prompts"]
        [name] = {each["name"] for each in found if each["hits"]}
        assert cache(environment, "pin", name[:8], "600")["engines"][0]["blocks"] == TOKENS // BLOCK
        [pinned] = [
            each for each in cache(environment, "ls")["engines"][0]["prompts"] if each["pinned"]
        ]
        assert (pinned["name"], pinned["kept"]) == (name, TOKENS // BLOCK * BLOCK)
        assert cache(environment, "drop", name)["engines"][0]["blocks"] == TOKENS // BLOCK
        left = cache(environment, "ls")["engines"][0]["prompts"]
        assert {each["name"] for each in left} == {each["name"] for each in found} - {name}
        case.check(ask(engine, prompt, salts[0]))  # vLLM's own cache is not dropped
