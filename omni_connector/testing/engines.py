# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines as child processes: OpenAI servers on loopback, started, asked and stopped.

Every engine runs in a process group of its own, so that stopping it, or killing it, takes its
engine core and workers along. Nothing here imports vllm.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router of the NIXL shape sends to the prefill engine."""

MODEL_NAME = "model"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)$")


class EngineError(RuntimeError):
    """An engine did not start, died, or answered with an HTTP error; the message says which."""


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@dataclass(slots=True)
class Engine:
    """One vLLM server in a process group of its own.

    Use it as a context manager, or call `start`, `wait_ready` and `stop` yourself: engines that
    are started together become ready together.

    Args:
        model: folder of the model.
        log: file that takes the output of the server.
        kv_transfer_config: the value of `--kv-transfer-config`, or None for no connector.
        arguments: further command line arguments.
        environment: variables set on top of this process's own.
        core: the CPU core that the engine's threads are bound to; None leaves it to vLLM.
        kv_cache_bytes: size of the KV cache; None leaves it to vLLM.
        launcher: command that the server is started through, such as `ip netns exec NAME`.
        unix_socket: where the server listens in place of its port; as another network namespace
            can be asked.
    """

    model: Path
    log: Path
    kv_transfer_config: Mapping[str, Any] | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    core: int | None = None
    kv_cache_bytes: int | None = 256 << 20
    launcher: Sequence[str] = ()
    unix_socket: Path | None = None
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, without waiting for it; a started engine is left as it is."""
        if self.process is not None:
            return
        command = [*self.launcher, sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--uvicorn-log-level", "warning"]
        if self.unix_socket is not None:
            command += ["--uds", str(self.unix_socket)]
        if self.kv_cache_bytes is not None:
            command += ["--kv-cache-memory-bytes", str(self.kv_cache_bytes)]
        if self.kv_transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer_config)]
        command += self.arguments
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.core is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = str(self.core)
        environment |= self.environment
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_ready(self, timeout: float = 180.0) -> None:
        """Wait until the server answers.

        Raises:
            EngineError: it died, or was not ready within `timeout` seconds; carries the end of
                its log.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.alive:
                raise EngineError(f"engine died while starting:\n{self.log_tail()}")
            if self.healthy():
                return
            time.sleep(0.2)
        raise EngineError(f"engine not ready within {timeout:.0f} s:\n{self.log_tail()}")

    @property
    def alive(self) -> bool:
        """Whether the server process runs."""
        return self.process is not None and self.process.poll() is None

    def healthy(self) -> bool:
        """Whether `/health` answers 200."""
        try:
            with self.client(timeout=5.0) as client:
                client.get("/health")
        except (OSError, http.client.HTTPException, EngineError):
            return False
        return True

    def client(self, timeout: float = 120.0) -> "Client":
        """Return a client with a connection of its own, kept alive."""
        return Client(self.port, timeout=timeout, unix_socket=self.unix_socket)

    def complete(
        self, prompt: Sequence[int], timeout: float = 120.0, **fields: Any
    ) -> dict[str, Any]:
        """Send one completion over a fresh connection; see `Client.complete`."""
        with self.client(timeout) as client:
            return client.complete(prompt, **fields)

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each sample of a Prometheus metric."""
        with self.client() as client:
            text = client.get("/metrics").decode()
        found = (_SAMPLE.match(line) for line in text.splitlines())
        return [
            (dict(_LABEL.findall(sample[2] or "")), float(sample[3]))
            for sample in found
            if sample and sample[1] == name
        ]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a Prometheus metric with these labels; 0 if none."""
        return sum(value for tags, value in self.samples(name) if labels.items() <= tags.items())

    def log_tail(self, lines: int = 60) -> str:
        """Return the last lines of the server's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """Kill the whole process group with SIGKILL, as an out-of-memory killer would."""
        self._signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(timeout=30)

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the server: SIGTERM, then SIGKILL for what is left after `timeout` seconds.

        The engine core and its workers outlive the server for a moment, and put away what they
        hold; so the whole group is waited for.
        """
        if self.process is None:
            return
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while self._group_runs() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def _group_runs(self) -> bool:
        """Whether a process of the group is running; the dead that nobody reaped are not."""
        if self.process is None:
            return False
        self.process.poll()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name before the state is in parentheses, and may hold anything.
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):  # it ended meanwhile
                continue
            if int(group) == self.process.pid and state not in "ZX":
                return True
        return False

    def _signal(self, number: signal.Signals) -> None:
        if self.process is None:
            return
        try:
            # The server leads its group; children that outlive it keep the group's id in use.
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Client:
    """A keep-alive HTTP connection to one server, on loopback or at a Unix socket."""

    def __init__(
        self, port: int, *, timeout: float = 120.0, unix_socket: Path | None = None
    ) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        if unix_socket is not None:
            self.connection = _UnixConnection(unix_socket, timeout)

    def get(self, path: str) -> bytes:
        """Return the body of a GET; EngineError unless the answer is 200."""
        self.connection.request("GET", path)
        return self._body(path)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON answer of a POST; EngineError unless the answer is 200."""
        self.send(path, body)
        answer: dict[str, Any] = json.loads(self._body(path))
        return answer

    def send(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a POST without waiting for its answer."""
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", path, json.dumps(body), headers)

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """POST /v1/completions: greedy, by token ids, never stopped by an end token."""
        return self.post("/v1/completions", completion(prompt, **fields))

    def close(self) -> None:
        """Close the connection; a request under way is aborted by the server."""
        self.connection.close()

    def _body(self, path: str) -> bytes:
        response = self.connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise EngineError(f"{path}: HTTP {response.status}: {data[:500]!r}")
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def completion(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Return the body of a greedy completion of token ids; `fields` add to it or override."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": 8,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return {**body, **fields}


def prefill(client: Client | Engine, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Have the prefill engine compute the prompt; return the `kv_transfer_params` it answers."""
    settings = {"max_tokens": 1, "kv_transfer_params": dict(PREFILL_PARAMS), **fields}
    answer = client.complete(prompt, **settings)
    params: dict[str, Any] | None = answer.get("kv_transfer_params")
    if params is None:
        raise EngineError(f"the prefill engine answered no kv_transfer_params: {answer}")
    return params
