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
from omni_connector.net.status import EngineStatus, read_each
from omni_connector.plugin import CONNECTOR_NAME

logger = logging.getLogger("vllm.omni_connector.drain")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEALTH: Final = "/health"
UNCOUNTED: Final = frozenset({HEALTH, "/ping", "/metrics", "/load", "/version"})
"""Paths by which others look at a server; a request to another path is work."""

# Seconds between two looks at the status files.
_LOOK_S: Final = 0.25

# Seconds before `--shutdown-timeout` is over at which the drain ends. A supervisor of several API
# servers kills them then, and they need some time to stop.
_STOP_S: Final = 5.0

# Largest part of the time-out that `_STOP_S` may take.
_STOP_PART: Final = 0.25

_UNAVAILABLE: Final = b"draining\n"


@dataclass(frozen=True)
class _Server:
    """Of the server that the middleware is in: how its engines are found, and its time-outs."""

    engine_id: str
    config: OmniConfig
    timeout: float

    @classmethod
    def of(cls, app: Any) -> "_Server | None":
        """What vLLM has told its application; None where it runs no engine of ours."""
        vllm_config = getattr(getattr(app.state, "engine_client", None), "vllm_config", None)
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        if transfer is None:
            return None
        timeout = float(getattr(vllm_config, "shutdown_timeout", 0))
        extra = transfer.kv_connector_extra_config
        if transfer.kv_connector == CONNECTOR_NAME:
            return cls(transfer.engine_id, OmniConfig.load(extra), timeout)
        for child in extra.get("connectors", ()):  # of MultiConnector
            if child.get("kv_connector") == CONNECTOR_NAME:
                config = OmniConfig.load(child.get("kv_connector_extra_config"))
                return cls(transfer.engine_id, config, timeout)
        return None

    def engines(self) -> dict[Path, EngineStatus]:
        """What its engines say, by status file. Each data-parallel rank has an id of its own."""
        found, _ = read_each(runtime_dir(self.config.namespace))
        return {
            file: status
            for file, status in found.items()
            if status.engine_id.rpartition("_dp")[0] == self.engine_id
            or status.engine_id == self.engine_id
        }


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
        path = scope["path"]
        if path == HEALTH and await self._drains():
            headers = [(b"content-type", b"text/plain"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _UNAVAILABLE})
            return
        if path in UNCOUNTED:
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
                self._ordered = any(each.service.phase != "serving" for each in engines.values())
        return self._ordered

    async def _drain(self) -> None:
        server = self._server
        assert server is not None
        quiet = server.config.drain_quiet_s
        began = time.monotonic()
        ends = began + server.timeout - min(_STOP_S, _STOP_PART * server.timeout)
        logger.info("Draining: %s answers 503, and requests are served until none comes", HEALTH)
        try:
            await asyncio.to_thread(self._order, server)
            while time.monotonic() < ends:
                idle = time.monotonic() - max(began, self._last_request)
                if not self._active and idle >= quiet and await self._empty(server):
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
        except (OSError, OmniError) as error:
            logger.warning("Not drained: the runtime folder cannot be used: %s", error)
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # which vLLM handles as it would SIGTERM

    @staticmethod
    def _order(server: _Server) -> None:
        for file in server.engines():
            give_order(file, DRAIN)

    @staticmethod
    async def _empty(server: _Server) -> bool:
        engines = await asyncio.to_thread(server.engines)
        return all(each.service.phase == "drained" for each in engines.values())
