# SPDX-License-Identifier: Apache-2.0
"""vllm-router with its policy `kv_aware`: where it sends a prompt, by the KV events it hears."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

from omni_connector.testing.ports import free_port
from tests.patience import PATIENCE_S, wait_until

_MODEL = "m"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CREDITED = re.compile(r"KV prefix decision .*credited_prefix_tokens=(\d+)")


class _Worker:
    """A server that is healthy, and answers with its name."""

    def __init__(self, name: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version: ClassVar[str] = "HTTP/1.1"

            def do_GET(self) -> None:
                self._say({})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._say({"choices": [{"index": 0, "text": name, "finish_reason": "length"}]})

            def _say(self, what: Any) -> None:
                body = json.dumps(what).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)


class KvAwareRouter:
    """A router before a worker that tells nothing and one that an engine's events are told for.

    Args:
        folder: where its log goes.
        endpoint: of the engine's events.
        block_size: of the engine, in tokens.
        host_credit: what it credits a block in host memory with, of one on the device.
    """

    def __init__(self, folder: Path, endpoint: str, block_size: int, host_credit: float) -> None:
        self._other, self._followed = _Worker("other"), _Worker("followed")
        self._port = free_port()
        self._log = folder / f"router-{host_credit}.log"
        command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "kv_aware"]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        command += ["--worker-urls", self._other.url, self._followed.url]
        command += ["--kv-event-source", f"{self._followed.url}={endpoint}"]
        command += ["--kv-event-model", _MODEL, "--kv-event-block-size", str(block_size)]
        command += ["--kv-penalty-host", str(host_credit), "--log-level", "debug"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        try:
            return self._ask([1]) != ""
        except (OSError, http.client.HTTPException):
            return False

    def _ask(self, tokens: Sequence[int]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            body = json.dumps({"model": _MODEL, "prompt": list(tokens), "max_tokens": 1})
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            said = answer.read()
            return json.loads(said)["choices"][0]["text"] if answer.status == 200 else ""
        finally:
            connection.close()

    def credits(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that need not be computed where it is sent, as the router says."""
        before = len(self._decisions())
        assert self._ask(tokens)
        wait_until(lambda: len(self._decisions()) > before)
        return int(self._decisions()[-1])

    def _decisions(self) -> list[str]:
        log = _COLOUR.sub("", self._log.read_text(errors="replace"))
        return _CREDITED.findall(log)

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        self._other.close()
        self._followed.close()
