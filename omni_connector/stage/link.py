# SPDX-License-Identifier: Apache-2.0
"""The connector of a transfer manager: made at first use, told where the sender is."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_connector.objects.factory import ConnectorSpec, OmniConnectorFactory
from omni_connector.stage.config import OmniKVCacheConfig
from omni_connector.stage.tp import PORT_STRIDE, Topology

logger = logging.getLogger(__name__)

# Connectors of which each rank listens, or connects, at a port of its own.
_RANKED_PORTS: Final = ("MooncakeTransferEngineConnector",)


@dataclass
class TransferStats:
    """What a manager has done since it was made.

    Attributes:
        sent: requests whose KV was handed to the connector, whole.
        sent_bytes: theirs, as packed.
        send_retries: tries after the first one.
        send_failures: requests that were given up.
        received: requests whose KV came, whole.
        received_bytes: theirs, as packed.
        receive_timeouts: requests whose KV did not come in time.
        receive_failures: requests whose KV came, but could not be used.
        connector_failures: connectors that did not start.
        companion_failures: requests whose companions could not be collected.
    """

    sent: int = 0
    sent_bytes: int = 0
    send_retries: int = 0
    send_failures: int = 0
    received: int = 0
    received_bytes: int = 0
    receive_timeouts: int = 0
    receive_failures: int = 0
    connector_failures: int = 0
    companion_failures: int = 0


class ConnectorLink:
    """A connector that is made at first use, and again at the next if it did not start.

    Args:
        config: of the manager.
        topology: tells this rank's place; asked when it is needed.

    Attributes:
        stats: the manager's counters.
    """

    def __init__(self, config: OmniKVCacheConfig, topology: Callable[[], Topology]) -> None:
        self.stats: Final = TransferStats()
        self._config = config
        self._topology = topology
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._connector: Any = None
        self._closed = False
        self._sender: tuple[str, int | None] | None = None

    @property
    def connector(self) -> Any:
        """The connector; None if none is configured, it did not start, or this is closed."""
        with self._lock:
            if self._connector is None and not self._closed:
                self._connector = self._create()
            return self._connector

    @property
    def configured(self) -> bool:
        """Whether there is a connector to make."""
        return bool((self._config.connector_config or {}).get("type"))

    def count(self, **counts: int) -> None:
        """Add to the counters."""
        with self._counting:
            for name, count in counts.items():
                setattr(self.stats, name, getattr(self.stats, name) + count)

    def update_sender(self, info: object, stage: str) -> bool:
        """Take the sender's host and port from what an orchestrator says; see the manager.

        Returns:
            Whether they are there.
        """
        sender = _find_sender(info, stage)
        if sender is None:
            return False
        with self._lock:
            self._sender = sender
            self._tell(self._connector)
        return True

    def source(self, rank: int | None) -> dict[str, Any] | None:
        """What `get` is told of the sender's rank; None where that is not known."""
        host, port = self._sender or (None, None)
        if rank is None or port is None:
            return None
        return {"source_host": host, "source_port": port + PORT_STRIDE * rank}

    def cleanup(self, request_id: str) -> None:
        """Let go of what was put for a request."""
        connector = self._connector
        if connector is not None:
            connector.cleanup(request_id)

    def close(self) -> None:
        """Close the connector, for good. Idempotent."""
        with self._lock:
            self._closed = True
            connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()

    def _create(self) -> Any:
        settings = dict(self._config.connector_config or {})
        name = settings.pop("type", None)
        if not name:
            return None
        try:
            if name in _RANKED_PORTS:
                settings |= self._rank_settings(settings)
            connector = OmniConnectorFactory.create_connector(ConnectorSpec(name, settings))
            self._tell(connector)
        except Exception as error:
            # A connector may be anybody's. The traceback is for the first time only.
            first = not self.stats.connector_failures
            logger.warning("connector %s did not start: %s", name, error, exc_info=first)
            self.count(connector_failures=1)
            return None
        return connector

    def _rank_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        config = self._config
        sends = config.need_send_cache
        from_stage, to_stage = config.send_stages() if sends else config.recv_stages()
        found: dict[str, Any] = {"from_stage": from_stage or "0", "to_stage": to_stage or "1"}
        if sends:
            found["role"] = "sender"
            if "zmq_port" in settings:
                found["zmq_port"] = self._own_port(int(settings["zmq_port"]))
        elif config.need_recv_cache:
            found["role"] = "receiver"
            if self._sender is not None:
                host, port = self._sender
                found["sender_host"] = host
                found["sender_zmq_port"] = None if port is None else self._own_port(port)
        return found

    def _own_port(self, base: int) -> int:
        return base + PORT_STRIDE * self._topology().rank

    def _tell(self, connector: Any) -> None:
        tell = getattr(connector, "update_sender_info", None)
        if self._sender is not None and callable(tell):
            host, port = self._sender
            try:
                tell(host, None if port is None else self._own_port(port))
            except Exception:
                # A connector may be anybody's.
                logger.warning("the connector does not take its sender's address", exc_info=True)


def _find_sender(info: object, stage: str) -> tuple[str, int | None] | None:
    if not isinstance(info, Mapping):
        return None
    if "host" not in info:
        by_stage = {str(key): each for key, each in info.items() if isinstance(each, Mapping)}
        # One entry can only be the sender's.
        only = next(iter(by_stage.values())) if len(by_stage) == 1 else {}
        info = by_stage.get(stage, only)
    host, port = info.get("host"), info.get("zmq_port")
    try:
        port = None if port is None else int(port)
    except (TypeError, ValueError):
        return None
    if not isinstance(host, str) or not host or (port is not None and not 0 < port < 1 << 16):
        return None
    return host, port
