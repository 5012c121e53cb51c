# SPDX-License-Identifier: Apache-2.0
"""`DrainMiddleware` around a server that is made up: what it answers, when it lets vLLM stop."""

import asyncio
import functools
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from omni_connector.net.orders import Orders, Phase, Service
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE, runtime_dir
from omni_connector.net.status import EngineStatus, StatusFile
from omni_connector.testing import FakeClock
from omni_connector.vllm_v1 import drain_middleware
from omni_connector.vllm_v1.drain_middleware import DrainMiddleware

QUIET_S = 0.3
WAITS = {"/v1/completions", "/v1/responses/resp_1"}


class StandIn:
    """An engine as its status file shows it."""

    def __init__(self, engine_id: str = "mine") -> None:
        self.file = StatusFile(runtime_dir())
        self._engine_id = engine_id
        self.says("serving")

    def says(self, phase: Phase) -> None:
        status = EngineStatus(
            engine_id=self._engine_id, role="kv_both", model="m", service=Service(phase=phase)
        )
        self.file.write(msgspec.json.encode(status))

    @property
    def drains(self) -> bool:
        return self.file.orders() == Orders(drain=True)


@pytest.fixture
def engines(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandIn]]:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place))
    made = [StandIn()]
    yield made
    for each in made:
        each.file.close()


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Server:
    """vLLM's server, as the middleware sees it, and the loop that it runs in."""

    def __init__(
        self, timeout: float = 60, connector: str = "OmniKVConnector", **settings: Any
    ) -> None:
        extra: dict[str, Any] = {"drain_quiet_s": QUIET_S, **settings}
        if connector == "MultiConnector":
            ours = {"kv_connector": "OmniKVConnector", "kv_connector_extra_config": extra}
            extra = {"connectors": [{"kv_connector": "NixlConnector"}, ours]}
        transfer = SimpleNamespace(
            kv_connector=connector, engine_id="mine", kv_connector_extra_config=extra
        )
        config = SimpleNamespace(kv_transfer_config=transfer, shutdown_timeout=timeout)
        client = SimpleNamespace(vllm_config=config)
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
        self.go_on = asyncio.Event()
        self.stopped = asyncio.Event()
        self._middleware = DrainMiddleware(self._serve)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in WAITS:
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def start(self) -> None:
        """What vLLM does at its start: its handlers come first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopped.set)
        await self._middleware({"type": "lifespan", "app": self.app}, _nothing, _drop)

    async def ask(self, path: str = "/v1/completions", method: str = "POST", **scope: Any) -> int:
        """Status of the answer to a request."""
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])

        scope |= {"type": "http", "path": path, "method": method}
        await self._middleware(scope, _nothing, send)
        return statuses[0]

    async def get(self, path: str, **scope: Any) -> int:
        """The same of a GET."""
        return await self.ask(path, "GET", **scope)


async def _nothing() -> Any:
    return {}


async def _drop(message: Any) -> None:
    pass


def scene(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Have a coroutine be a test."""

    @functools.wraps(test)
    def run(*args: Any, **given: Any) -> None:
        async def within() -> None:
            await asyncio.wait_for(test(*args, **given), 60.0)

        asyncio.run(within())

    return run


async def started(**settings: Any) -> Server:
    """A server of vLLM's."""
    server = Server(**settings)
    await server.start()
    return server


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("connector", ["OmniKVConnector", "MultiConnector"])
@scene
async def test_it_drains_before_vllm_stops(engines: list[StandIn], connector: str) -> None:
    server = await started(connector=connector)
    assert await server.get("/health") == 200
    running = asyncio.create_task(server.ask())
    await asyncio.sleep(0)
    terminate()
    await until(lambda: engines[0].drains)
    assert await server.get("/health") == 503
    engines[0].says("drained")
    late = asyncio.create_task(server.ask())  # it is served
    await asyncio.sleep(3 * QUIET_S)
    assert not server.stopped.is_set()  # requests are left
    server.go_on.set()
    assert await running == await late == 200
    await server.stopped.wait()


@scene
async def test_it_waits_for_what_its_engines_hold_and_for_no_others(engines: list[StandIn]) -> None:
    engines += [StandIn("mine_dp1"), StandIn("mine-too")]

    server = await started()
    terminate()
    await until(lambda: engines[1].drains)
    engines[0].says("drained")
    engines[1].says("draining")
    await asyncio.sleep(3 * QUIET_S)
    assert not server.stopped.is_set()
    engines[1].says("drained")
    await server.stopped.wait()
    assert not engines[2].drains


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The middleware's clock; it looks all the time."""
    clock = FakeClock()
    monkeypatch.setattr(drain_middleware, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(drain_middleware, "_LOOK_S", 0.01)
    return clock


@scene
async def test_requests_that_still_come_put_the_end_off(
    engines: list[StandIn], clock: FakeClock
) -> None:
    server = Server(drain_quiet_s=0.5)
    server.go_on.set()
    await server.start()
    engines[0].says("drained")
    terminate()
    for _ in range(10):
        assert await server.ask() == 200
        clock.advance(0.4)
        assert await server.get("/health") == 503  # which is no request
        await asyncio.sleep(0.05)  # it looks a few times
        assert not server.stopped.is_set()
    clock.advance(0.2)
    await server.stopped.wait()


@scene
async def test_a_server_that_nobody_has_asked_for_long_is_not_quiet_at_once(
    engines: list[StandIn], clock: FakeClock
) -> None:
    """Routers have not seen yet that it drains."""
    server = await started(drain_quiet_s=5)
    clock.advance(1000)
    engines[0].says("drained")
    terminate()
    await until(lambda: engines[0].drains)
    for _ in range(3):
        await asyncio.sleep(0.05)  # it looks a few times
        assert not server.stopped.is_set()
        clock.advance(1.5)
    clock.advance(1)
    await server.stopped.wait()


@pytest.mark.parametrize(
    ("method", "path", "works"),
    [
        ("GET", "/v1/models", False),
        ("GET", "/metrics", False),
        ("HEAD", "/", False),
        ("POST", "/ping", False),
        ("GET", "/v1/responses/resp_1", True),
        ("POST", "/v1/chat/completions", True),
    ],
)
@scene
async def test_a_look_at_a_server_is_no_work(
    engines: list[StandIn], clock: FakeClock, method: str, path: str, works: bool
) -> None:
    server = Server(drain_quiet_s=5)
    server.go_on.set()
    await server.start()
    engines[0].says("drained")
    terminate()
    await until(lambda: engines[0].drains)
    clock.advance(4)
    assert await server.ask(path, method) == 200
    clock.advance(2)
    if works:
        await asyncio.sleep(0.1)  # it looks a few times
        assert not server.stopped.is_set()
        clock.advance(5)
    await server.stopped.wait()


@scene
async def test_an_answer_that_is_waited_for_is_work(engines: list[StandIn]) -> None:
    server = await started()
    waiting = asyncio.create_task(server.get("/v1/responses/resp_1"))
    engines[0].says("drained")
    terminate()
    await asyncio.sleep(3 * QUIET_S)
    assert not server.stopped.is_set()
    server.go_on.set()
    assert await waiting == 200
    await server.stopped.wait()


@scene
async def test_a_status_file_that_cannot_be_read_is_not_that_of_an_engine_that_is_drained(
    engines: list[StandIn],
) -> None:
    server = await started()
    assert await server.get("/health") == 200
    engines[0].file.write(b"?")
    terminate()
    await until(lambda: engines[0].drains)
    await asyncio.sleep(3 * QUIET_S)
    assert not server.stopped.is_set()
    engines[0].says("drained")
    await server.stopped.wait()


@scene
async def test_an_engine_that_could_not_be_read_at_first_drains_too(engines: list[StandIn]) -> None:
    server = await started()
    engines[0].file.write(b"?")
    terminate()
    await asyncio.sleep(3 * QUIET_S)
    assert not server.stopped.is_set()
    engines[0].says("draining")
    await until(lambda: engines[0].drains)
    engines[0].file.close()  # it ends
    await server.stopped.wait()


@scene
async def test_an_order_that_fails_is_given_again(
    engines: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    give = drain_middleware.give_order
    failing = iter([OSError("no space")])

    def give_order(*args: Any) -> None:
        for error in failing:
            raise error
        give(*args)

    monkeypatch.setattr(drain_middleware, "give_order", give_order)
    server = await started()
    running = asyncio.create_task(server.ask())
    await asyncio.sleep(0)
    terminate()
    await until(lambda: engines[0].drains)
    assert not server.stopped.is_set()
    server.go_on.set()
    assert await running == 200
    engines[0].says("drained")
    await server.stopped.wait()


@scene
async def test_the_time_out_ends_the_wait(engines: list[StandIn]) -> None:
    server = await started(timeout=1)
    running = asyncio.create_task(server.ask())
    await asyncio.sleep(0)
    terminate()
    await server.stopped.wait()
    assert not running.done()
    running.cancel()


@scene
async def test_a_second_sigterm_ends_the_wait(engines: list[StandIn]) -> None:
    server = await started()
    terminate()
    await until(lambda: engines[0].drains)
    terminate()
    await server.stopped.wait()


@scene
async def test_without_a_time_out_vllm_stops_at_once(engines: list[StandIn]) -> None:
    server = await started(timeout=0)
    terminate()
    await server.stopped.wait()
    assert not engines[0].drains


@scene
async def test_health_follows_an_order_to_drain(engines: list[StandIn]) -> None:
    server = await started()
    engines[0].says("draining")
    assert await server.get("/health") == 503
    assert await server.get("/a/health", root_path="/a") == 503
    assert await server.get("/ping") == 200
    engines[0].file.write(b"?")  # so it is not known
    await asyncio.sleep(0.3)
    assert await server.get("/health") == 503
    engines[0].says("serving")
    await asyncio.sleep(0.3)
    assert await server.get("/health") == 200


@scene
async def test_a_server_whose_folder_is_gone_stops(
    engines: list[StandIn], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await started(timeout=1)
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place / "no" / "such"))
    terminate()
    await server.stopped.wait()


@pytest.mark.parametrize("transfer", [None, SimpleNamespace(kv_connector="NixlConnector")])
@scene
async def test_with_other_connectors_it_does_nothing(engines: list[StandIn], transfer: Any) -> None:
    server = Server()
    if transfer is not None:
        transfer.kv_connector_extra_config = {}
    server.app.state.engine_client.vllm_config.kv_transfer_config = transfer
    await server.start()
    engines[0].says("draining")
    assert await server.get("/health") == 200
    terminate()
    await server.stopped.wait()
