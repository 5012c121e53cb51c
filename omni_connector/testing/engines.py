# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines as child processes: OpenAI servers on loopback, started, asked and stopped.

Every engine runs in a process group of its own, so that stopping it, or killing it, takes its
engine core and workers along. vLLM's processes that are killed leave files in /dev/shm and in the
temporary folder; those of an engine are removed when it is stopped or killed. Nothing here imports
vllm.
"""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Protocol, Self

from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE, runtime_root
from omni_connector.testing.ports import free_port

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
SERVER: Final = "vllm.entrypoints.openai.api_server"
_SHARED_MEMORY: Final = Path("/dev/shm")
_KILL_S: Final = 30.0
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)$")


class EngineError(RuntimeError):
    """An engine did not start, died, or answered with an HTTP error; the message says which."""


class Process(Protocol):
    """What an engine needs of the process that it is: `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit status; raises `subprocess.TimeoutExpired`."""

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, unless it has ended."""


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
    unix_socket: Path | None = None
    port: int = field(default_factory=free_port)
    process: Process | None = None
    _temporary: Path | None = None
    _shared_memory: set[Path] = field(default_factory=set)

    def start(self) -> None:
        """Start the server, without waiting for it; a started engine is left as it is."""
        if self.process is not None:
            return
        # Not in the engine's own temporary folder: engines meet in the one, and what torch has
        # compiled for one engine serves the next.
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        shared = {RUNTIME_DIR_VARIABLE: runtime_root(), "TORCHINDUCTOR_CACHE_DIR": compiled}
        environment = {**{name: str(path) for name, path in shared.items()}, **os.environ}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.core is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = str(self.core)
        if self.unix_socket is not None:
            self.unix_socket.unlink(missing_ok=True)  # of one that was killed
        self._temporary = Path(tempfile.mkdtemp(prefix="omni-engine-"))
        environment |= {"TMPDIR": str(self._temporary), **self.environment}
        with self.log.open("wb") as output:
            self.process = self.launch(self.server_arguments(), environment, output)

    def launch(
        self, arguments: list[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> Process:
        """Start the server's process, the leader of a group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", SERVER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def server_arguments(self) -> list[str]:
        """The command line of the server, without the program."""
        command = ["--model", str(self.model), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--uvicorn-log-level", "warning"]
        if self.unix_socket is not None:
            command += ["--uds", str(self.unix_socket)]
        if self.kv_cache_bytes is not None:
            command += ["--kv-cache-memory-bytes", str(self.kv_cache_bytes)]
        if self.kv_transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer_config)]
        return [*command, *self.arguments]

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
                self._note_shared_memory()
                return
            time.sleep(0.1)
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
        return [
            (dict(_LABEL.findall(sample[2] or "")), float(sample[3]))
            for sample in self._all_samples()
            if sample[1] == name
        ]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a Prometheus metric with these labels; 0 if none."""
        return sum(value for tags, value in self.samples(name) if labels.items() <= tags.items())

    def metrics(self, *names: str) -> dict[str, float]:
        """Return what `metric` does for several names, with one request."""
        sums = dict.fromkeys(names, 0.0)
        for sample in self._all_samples():
            if sample[1] in sums:
                sums[sample[1]] += float(sample[3])
        return sums

    def _all_samples(self) -> Iterator[re.Match[str]]:
        with self.client() as client:
            text = client.get("/metrics").decode()
        return filter(None, map(_SAMPLE.match, text.splitlines()))

    def log_tail(self, lines: int = 60) -> str:
        """Return the last lines of the server's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """Kill the whole process group with SIGKILL, as an out-of-memory killer would."""
        if self.process is None:
            return
        self._note_shared_memory()
        try:
            # The server leads its group; children that outlive it keep the group's id in use.
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(timeout=_KILL_S)
        deadline = time.monotonic() + _KILL_S
        while any(self.processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for path in self._shared_memory:
            path.unlink(missing_ok=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the server: SIGTERM, then SIGKILL for what is left after `timeout` seconds.

        The engine core and its workers outlive the server for a moment, and put away what they
        hold; so the whole group is waited for.
        """
        if self.process is None:
            return
        self._note_shared_memory()
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while any(self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def processes(self) -> Iterator[Path]:
        """Folders in /proc of the group's running processes, without the dead ones that nobody
        has reaped."""
        if self.process is None:
            return
        self.process.poll()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name before the state is in parentheses, and may hold anything.
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):  # it ended meanwhile
                continue
            if int(group) == self.process.pid and state not in "ZX":
                yield stat.parent

    def left_behind(self) -> set[Path]:
        """What vLLM would leave in /dev/shm and in the temporary folder if it were killed now."""
        self._note_shared_memory()
        temporary = self._temporary.iterdir() if self._temporary is not None else ()
        return self._shared_memory | set(temporary)

    def _note_shared_memory(self) -> None:
        """Remember the files in /dev/shm that the engine maps, as who is killed leaves them."""
        for process in self.processes():
            try:
                maps = (process / "maps").read_text()
            except OSError:  # it ended meanwhile
                continue
            found = (line.split(maxsplit=5)[5:] for line in maps.splitlines())
            paths = (Path(path) for (path,) in filter(None, found))
            self._shared_memory |= {path for path in paths if path.parent == _SHARED_MEMORY}

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

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[bytes]:
        """POST, and yield each event of the answer as it comes."""
        self.send(path, {**body, "stream": True})
        response = self.connection.getresponse()
        if response.status != 200:
            raise EngineError(f"{path}: HTTP {response.status}: {response.read()[:500]!r}")
        while line := response.readline():
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield line.removeprefix(b"data: ")

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
