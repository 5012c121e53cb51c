# SPDX-License-Identifier: Apache-2.0
"""`DrainMiddleware`: a vLLM server that takes itself out of its routers before it stops.

    vllm serve ... --shutdown-timeout 60 \
        --middleware omni_connector.vllm_v1.drain_middleware.DrainMiddleware

On SIGTERM vLLM refuses new requests at once, while routers still send some: until their next look
at `/health`, which goes on to answer 200. With this middleware the server answers `/health` with
503 first, has its engines drain, and serves whatever still comes. It stops when nothing has come
for `drain_quiet_s`, and nothing is left. Then vLLM shuts down as it does on SIGINT.

`/health` also answers 503 while an engine of this server drains by order of `omni-connector drain`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omni_connector.config import OmniConfig
from omni_connector.errors import OmniError
from omni_connector.net.orders import DRAIN, give_order
from omni_connector.net.runtime import runtime_dir
from omni_connector.net.status import EngineStatus, read_each, read_file
from omni_connector.plugin import CONNECTOR_NAME
from omni_connector.vllm_v1.patches import own_extra_config

logger = logging.getLogger("vllm.omni_connector.drain")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEALTH: Final = "/health"
_PINGS: Final = frozenset({HEALTH, "/ping"})

# What a request with one of these methods asks for is there already: `/v1/models`, `/metrics`, a
# load balancer's look.
_LOOKS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

# Below it a GET may wait for an answer that is being computed.
_RESPONSES: Final = "/v1/responses/"

# Seconds between two looks at the status files.
_LOOK_S: Final = 0.25

# Seconds before `--shutdown-timeout` is over at which the drain ends. A supervisor of several API
# servers kills them then, and they need some time to stop.
_STOP_S: Final = 5.0

# Largest part of the time-out that `_STOP_S` may take.
_STOP_PART: Final = 0.25

_UNAVAILABLE: Final = b"draining\n"


def is_work(method: str, path: str) -> bool:
    """Whether a request is work. Others look at a server all the time, and it is idle still."""
    return path not in _PINGS and (method not in _LOOKS or path.startswith(_RESPONSES))


@dataclass
class _Server:
    """Of the server that the middleware is in: how its engines are found, and its time-outs.

    Attributes:
        files: status files of its engines that were there at the last look.
    """

    engine_id: str
    config: OmniConfig
    timeout: float
    files: frozenset[Path] = frozenset()

    @classmethod
    def of(cls, app: Any) -> "_Server | None":
        """What vLLM has told its application; None where it runs no engine of ours."""
        vllm_config = getattr(getattr(app.state, "engine_client", None), "vllm_config", None)
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        extra = own_extra_config(transfer)
        if transfer is None or extra is None:
            return None
        timeout = float(getattr(vllm_config, "shutdown_timeout", 0))
        return cls(transfer.engine_id, OmniConfig.load(extra), timeout)

    def engines(self) -> dict[Path, EngineStatus | None]:
        """What its engines say, by status file; None where a file cannot be read now. Each
        data-parallel rank has an id of its own.

        Raises:
            OmniError, OSError: the folder, or each file in it, cannot be read.
        """
        found, remarks = read_each(runtime_dir(self.config.namespace))
        engines: dict[Path, EngineStatus | None] = {
            file: status
            for file, status in found.items()
            if status.engine_id.rpartition("_dp")[0] == self.engine_id
            or status.engine_id == self.engine_id
        }
        for file in self.files - engines.keys():
            try:
                status = read_file(file)
            except (OSError, ValueError):
                engines[file] = None
            else:
                if status is not None:
                    engines[file] = status
        if remarks and not engines:
            raise OSError(remarks[0])
        self.files = frozenset(engines)
        return engines

    def drain(self) -> bool:
        """Have all its engines drain; returns whether all are drained."""
        engines = self.engines()
        for file in engines:
            if not file.with_suffix(DRAIN).exists():
                give_order(file, DRAIN)
        return all(
            each is not None and each.service.phase == "drained" for each in engines.values()
        )


class DrainMiddleware:
    """ASGI middleware for vLLM's option `--middleware`; see above.

    Args:
        app: what it is put around.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._server: _Server | None = None
        self._draining: asyncio.Task[None] | None = None
        self._ordered = False
        self._looked_at = float("-inf")
        self._active = 0
        self._last_request = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; see ASGI."""
        if scope["type"] == "lifespan":
            self._start(scope["app"])
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == HEALTH and await self._drains():
            headers = [(b"content-type", b"text/plain"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _UNAVAILABLE})
            return
        if not is_work(scope["method"], path):
            await self._app(scope, receive, send)
            return
        self._active += 1
        self._last_request = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            self._active -= 1

    def _start(self, app: Any) -> None:
        self._server = server = _Server.of(app)
        if server is None:
            logger.warning("DrainMiddleware does nothing: no engine runs %s", CONNECTOR_NAME)
        elif server.timeout > 0:  # else vLLM ends all requests at once
            # Later than vLLM, whose handler this takes the place of. That of SIGINT is the same.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated)

    def _terminated(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:  # whoever asks twice does not want to wait
            self._draining.cancel()

    async def _drains(self) -> bool:
        if self._draining is not None:
            return True
        server = self._server
        if server is not None and time.monotonic() >= self._looked_at + _LOOK_S:
            self._looked_at = time.monotonic()
            with contextlib.suppress(OSError, OmniError):
                engines = await asyncio.to_thread(server.engines)
                drains = [each and each.service.phase != "serving" for each in engines.values()]
                if None not in drains or True in drains:  # else it is not known
                    self._ordered = True in drains
        return self._ordered

    async def _drain(self) -> None:
        server = self._server
        assert server is not None
        quiet = server.config.drain_quiet_s
        began = time.monotonic()
        ends = began + server.timeout - min(_STOP_S, _STOP_PART * server.timeout)
        logger.info("Draining: %s answers 503, and requests are served until none comes", HEALTH)
        problem = ""
        try:
            while time.monotonic() < ends:
                try:
                    empty = await asyncio.to_thread(server.drain)
                except (OSError, OmniError) as error:  # what engines hold is not known
                    empty = False
                    if str(error) != problem:
                        problem = str(error)
                        logger.warning("Status files of engines cannot be used: %s", error)
                # From the beginning on routers see that it drains.
                idle = time.monotonic() - max(began, self._last_request)
                if empty and not self._active and idle >= quiet:
                    logger.info("Drained in %.1f s", time.monotonic() - began)
                    break
                await asyncio.sleep(_LOOK_S)
            else:
                logger.warning(
                    "Not drained after %.1f s: %d requests are left here, and peers may still "
                    "want KV of this engine",
                    time.monotonic() - began,
                    self._active,
                )
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # which vLLM handles as it would SIGTERM
