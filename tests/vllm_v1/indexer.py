# SPDX-License-Identifier: Apache-2.0
"""Dynamo's indexer of KV events, as its wheel has it: what a router of it credits to engines."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from omni_connector.testing.ports import free_port
from tests.fetched import fetched
from tests.patience import PATIENCE_S, wait_until

_MODEL = "m"


class Credit(NamedTuple):
    """Tokens at the beginning of a prompt that an engine is credited with, by tier."""

    gpu: int
    cpu: int
    disk: int

    def __bool__(self) -> bool:
        return any(self)


class Indexer:
    """An indexer in a process of its own, which follows one engine.

    Args:
        folder: where its log goes.
        endpoint: of the engine's events.
        block_size: of the engine, in tokens.
    """

    def __init__(self, folder: Path, endpoint: str, block_size: int) -> None:
        self._log = folder / "indexer.log"
        self._port = free_port()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port)]
        command += ["--block-size", str(block_size), "--model-name", _MODEL]
        command += ["--threads", "1"]  # it takes events in their order
        command += ["--workers", f"1={endpoint}"]
        environment = {**os.environ, "PYTHONPATH": str(fetched("dynamo")), "NO_COLOR": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        wait_until(self._answers)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            return bool(self._ask("/workers")[0]["listeners"])
        except OSError:
            return False

    def _fetch(self, path: str, data: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())

    def _ask(self, path: str, given: Any = None) -> Any:
        data = None if given is None else json.dumps(given).encode()
        return json.loads(self._fetch(path, data) or b"null")

    def credit(self, tokens: list[int]) -> Credit:
        """What the engine is credited with for a prompt."""
        try:
            answer = self._ask("/query", {"model_name": _MODEL, "token_ids": tokens})
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return Credit(0, 0, 0)  # it knows no engine of the model
        found = answer["instances"].get("1", {})
        return Credit(*(found.get(tier, 0) for tier in Credit._fields))

    def forget_engine(self) -> None:
        """Tell it that the engine has ended, as Dynamo's discovery does."""
        self._ask("/unregister", {"instance_id": 1, "model_name": _MODEL})

    def duplicates(self) -> int:
        """Blocks of its device tier that were stored though they were there, as it counts them."""
        name = r'dynamo_kvrouter_kv_cache_event_warnings\{warning_kind="duplicate_store"\} (\d+)'
        (number,) = re.findall(name, self._fetch("/metrics").decode())
        return int(number)

    def log(self) -> str:
        """What it has said."""
        return self._log.read_text(errors="replace")
