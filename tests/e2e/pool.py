# SPDX-License-Identifier: Apache-2.0
"""Engines that tests share: started when a test first asks for one, checked when it is done."""

import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from omni_connector.testing.engines import SERVER, Engine, EngineError, Process
from omni_connector.testing.models import make_model
from tests.soak import held

from . import kv, vllm_itself
from .configurations import CONFIGURATIONS, Configuration
from .families import BY_RECIPE
from .fork_server import STACKS, ForkServer

ROOT = Path(__file__).parents[2]
# More would only take memory: no test needs more at a time.
MOST_ENGINES = 6


@dataclass(slots=True)
class PooledEngine(Engine):
    """An engine that the fork server starts, if it is given one, in the namespace `host`."""

    fork_server: ForkServer | None = None
    host: str | None = None

    def launch(
        self, arguments: list[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> Process:
        if self.fork_server is None:
            return Engine.launch(self, arguments, environment, output)
        return self.fork_server.start(SERVER, arguments, environment, output, host=self.host)

    def wait_ready(self, timeout: float = 180.0) -> None:
        """As `Engine.wait_ready`; a forked engine that stands still has a second try.

        vLLM's server forks its engine core while it has threads. A lock that one of them holds in
        this moment stays locked in the child. (Seen once in several hundred starts.) Where it
        stood is in the warning.
        """
        if self.fork_server is None:
            return Engine.wait_ready(self, timeout)
        try:
            return Engine.wait_ready(self, timeout / 2)
        except EngineError:
            if not self.alive:
                raise
        for process in self.processes():
            os.kill(int(process.name), STACKS)
        time.sleep(2.0)
        warnings.warn(f"an engine stood still and starts anew:\n{self.log_tail(200)}", stacklevel=2)
        self.kill()
        self.process = None
        self.start()
        return Engine.wait_ready(self, timeout)


@dataclass
class Member:
    """A running engine, and the probe in it.

    Attributes:
        groups: its cache groups, as vLLM has made them.
    """

    engine: Engine
    probe: kv.Probe
    groups: list[dict[str, Any]]

    @property
    def block(self) -> int:
        """Tokens of its largest blocks."""
        return max(int(group["block_size"]) for group in self.groups)

    def require_quiet(self) -> None:
        """Raise AssertionError unless it runs, and has no request."""
        assert self.engine.alive, f"an engine has died:\n{self.engine.log_tail()}"
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        deadline = time.monotonic() + 30.0
        while any((left := self.engine.metrics(*gauges)).values()):
            assert time.monotonic() < deadline, f"an engine still has requests: {left}"
            time.sleep(0.1)


class Pool:
    """All engines of these tests.

    Args:
        folder: takes models and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Not below the folder: paths of sockets are short.
        self._short = tempfile.TemporaryDirectory(prefix="omni-e2e-")
        self.runtime = Path(self._short.name) / "run"
        self.runtime.mkdir(mode=0o700)
        self._members: dict[tuple[str, str, str], Member] = {}
        self._begun: dict[tuple[str, str, str], Engine] = {}
        self._fork_server: ForkServer | None = None
        self._count = 0
        self.started: set[tuple[str, str]] = set()

    def model(self, recipe: str) -> Path:
        """The model of a recipe, made at the first use."""
        return make_model(recipe, self.folder / recipe)

    def new(
        self,
        configuration: str,
        recipe: str = "llama",
        *,
        connector: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Engine:
        """An engine that is not the pool's, not started yet.

        Args:
            configuration: one of CONFIGURATIONS.
            recipe: of the model.
            connector: what its `kv_connector_extra_config` has besides, such as addresses.
            arguments: of the server, besides.
            environment: on top of the configuration's.
            settings: of `PooledEngine`.

        """
        chosen: Configuration = CONFIGURATIONS[configuration]
        self.started.add((configuration, recipe))
        self._count += 1
        transfer = dict(chosen.connector)
        if connector:
            extra = transfer.get("kv_connector_extra_config", {})
            transfer["kv_connector_extra_config"] = {**extra, **connector}
        cores = sorted(os.sched_getaffinity(0))
        speculative = []
        if chosen.drafter:
            drafter = dict(chosen.drafter)
            if "model" in drafter:
                drafter["model"] = str(self.model(drafter["model"]))
            speculative = ["--speculative-config", json.dumps(drafter)]
        # Engines take turns; the ranks of one have a core each where there are enough.
        first = self._count if chosen.ranks == 1 else 0
        bind = "|".join(str(cores[(first + rank) % len(cores)]) for rank in range(chosen.ranks))
        return PooledEngine(
            self.model(recipe),
            self.folder / f"{self._count}-{configuration}-{recipe}.log",
            transfer,
            arguments=[
                *BY_RECIPE[recipe].arguments,
                *("--worker-extension-cls", chosen.probe),
                *chosen.arguments,
                *speculative,
                *arguments,
            ],
            environment={
                **engine_environment(self.runtime),
                "VLLM_CPU_OMP_THREADS_BIND": bind,
                **chosen.environment,
                **(environment or {}),
            },
            kv_cache_bytes=settings.pop("kv_cache_bytes", chosen.kv_cache_bytes),
            fork_server=self.fork_server() if chosen.forked else None,
            **settings,
        )

    def fork_server(self) -> ForkServer:
        """Starts engines; started at the first use."""
        if self._fork_server is None:
            # Read when torch is loaded, so that vLLM cannot set it for each engine: more threads
            # than the one core that a rank is bound to would wait for each other.
            one_thread = {"OMP_NUM_THREADS": "1"}
            self._fork_server = ForkServer(
                self.folder / "fork-server.log", engine_environment(self.runtime) | one_thread
            )
        return self._fork_server

    def adopt(self, engine: Engine) -> Member:
        """Wait until it is ready, and put its probe to work; what its blocks hold is noise."""
        engine.wait_ready()
        # It knows its weights from its first request on. Before that, a call to its workers, as the
        # probe makes, might have changed them for all that engines of other layouts can see.
        engine.complete([5, 6, 7], max_tokens=1)
        folder = engine.log.with_suffix("")
        folder.mkdir()
        probe = kv.Probe(engine, folder)
        groups = probe.watch()
        probe.spoil()
        return Member(engine, probe, groups)

    def take(self, *wanted: tuple[str, str, str], **settings: Any) -> list[Member]:
        """Running engines by (configuration, recipe, name); another name is another engine.

        They are started together where they are not running yet. A test of a model that this vLLM
        does not compute is skipped.
        """
        for _, recipe, _ in wanted:
            if why := vllm_itself.obstacle(recipe):
                pytest.skip(why)
        self.begin(*wanted, **settings)
        starting = {key: self._begun.pop(key) for key in wanted if key in self._begun}
        try:
            for key, engine in starting.items():
                self._members[key] = self.adopt(engine)
        except BaseException:
            for engine in starting.values():
                engine.stop()
            raise
        return [self._members[key] for key in wanted]

    def begin(self, *wanted: tuple[str, str, str], **settings: Any) -> None:
        """Start engines that a later test takes, without waiting for them."""
        for key in wanted:
            if vllm_itself.obstacle(key[1]):
                continue
            member = self._members.get(key)
            if member is not None and member.engine.alive:
                self._members[key] = self._members.pop(key)  # the latest used are kept
                continue
            self._members.pop(key, None)
            if key not in self._begun:
                self._make_room(len(wanted), keep=wanted)
                configuration, recipe, _ = key
                self._begun[key] = self.new(configuration, recipe, **settings)
                self._begun[key].start()

    def _make_room(self, count: int, keep: Sequence[tuple[str, str, str]]) -> None:
        while len(self._members) > MOST_ENGINES - count:
            others = (key for key in self._members if key not in keep)
            # One that is not forked takes half a minute to start anew.
            oldest = next((key for key in others if CONFIGURATIONS[key[0]].forked), None)
            if oldest is None:
                return
            self._leave(oldest)

    def _leave(self, key: tuple[str, str, str]) -> None:
        member = self._members.pop(key)
        try:
            if member.engine.alive:
                require_idle(member.engine)
        finally:
            member.engine.stop()

    def require_quiet(self) -> None:
        """Raise AssertionError unless all engines could serve another test."""
        for key, member in list(self._members.items()):
            try:
                member.require_quiet()
            except BaseException:
                del self._members[key]
                member.engine.stop()
                raise

    @contextmanager
    def engines(self) -> Iterator["Pool"]:
        """Stop all of them in the end."""
        try:
            yield self
            for key in list(self._members):
                self._leave(key)
        finally:
            for member in self._members.values():
                member.engine.stop()
            for engine in self._begun.values():
                engine.kill()  # one that is still starting does not end when it is asked to
            if self._fork_server is not None:
                self._fork_server.close()
            self._short.cleanup()


def engine_environment(runtime: Path) -> dict[str, str]:
    """For every engine: finds these tests and its peers, and may be looked into."""
    folders = [Path(__file__).parent / "site", ROOT]
    path = os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))
    return {
        "PYTHONPATH": path,
        "OMNI_CONNECTOR_RUNTIME_DIR": str(runtime),
        "VLLM_SERVER_DEV_MODE": "1",
        # What counts the ranks of log-probabilities, say, is compiled by each engine for half a
        # minute otherwise.
        "TORCHDYNAMO_DISABLE": "1",
    }


def require_idle(engine: Engine, timeout: float = 60.0) -> None:
    """Wait until no request, block, slot or lease is held; AssertionError names what is."""
    deadline = time.monotonic() + timeout
    while left := held(engine):
        if time.monotonic() > deadline:
            raise AssertionError(f"still held after {timeout:.0f} s: {left}")
        time.sleep(0.1)
