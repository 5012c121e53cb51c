# SPDX-License-Identifier: Apache-2.0
"""Which transport reads which peer: an engine exports by each it has, and reads by the nearest."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from omni_connector.config import OmniConfig
from omni_connector.errors import OmniError, PeerRefusedError
from omni_connector.peers import Peers, is_loopback, parse_listen
from omni_connector.transports.arena import Arena
from omni_connector.transports.base import Endpoint, OmniConnector
from omni_connector.transports.registry import AUTO, create_transport

logger = logging.getLogger(__name__)

_MAX_CHOSEN: Final = 4096


class Transports:
    """The transports of one engine's worker, nearest first.

    Args:
        readers: all of them.
        exporters: those of them by which peers may read our arena.
    """

    def __init__(
        self, readers: Sequence[OmniConnector], exporters: Sequence[OmniConnector]
    ) -> None:
        self._readers = tuple(readers)
        self._exporters = tuple(exporters)
        self._untold: deque[tuple[str, str]] = deque(maxlen=_MAX_CHOSEN)
        self._chosen: dict[tuple[Endpoint, ...], tuple[OmniConnector, Endpoint]] = {}

    def export(self, arena: Arena, name: str) -> tuple[Endpoint, ...]:
        """Let peers read an arena by every exporter; the nearest comes first.

        Raises:
            MissingDependencyError, TransportError: one of them cannot.
        """
        endpoints: list[Endpoint] = []
        try:
            for connector in self._exporters:
                endpoints.append(connector.export(arena, name))
        except OmniError:
            for connector, endpoint in zip(self._exporters, endpoints, strict=False):
                connector.withdraw(endpoint)
            raise
        return tuple(endpoints)

    def choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[OmniConnector, Endpoint]:
        """How to read an arena that its owner exports in these ways; stays as it is once chosen.

        Raises:
            PeerRefusedError: in none of them; the message says why.
        """
        chosen = self._chosen.get(endpoints)
        if chosen is None:
            chosen = self._choose(endpoints)
            if len(self._chosen) >= _MAX_CHOSEN:
                self._chosen.clear()
            self._chosen[endpoints] = chosen
        return chosen

    def _choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[OmniConnector, Endpoint]:
        offered = {endpoint.transport: endpoint for endpoint in endpoints}
        obstacles: list[str] = []
        for connector in self._readers:
            endpoint = offered.get(connector.transport)
            if endpoint is None:
                obstacles.append(f"{connector.transport}: the peer does not offer it")
                continue
            obstacle = connector.obstacle(endpoint)
            if obstacle is None or len(self._readers) == 1:  # then trying tells more
                self._tell(connector, endpoint, obstacles)
                return connector, endpoint
            obstacles.append(f"{connector.transport}: {obstacle}")
        raise PeerRefusedError(f"no transport reaches the peer: {'; '.join(obstacles)}")

    def take_choices(self) -> list[tuple[str, str]]:
        """What was chosen since the last call: a transport, and a word for why, once an arena."""
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def close(self) -> None:
        """Close them all. Idempotent."""
        for connector in self._readers:
            connector.close()

    def _tell(self, connector: OmniConnector, endpoint: Endpoint, obstacles: list[str]) -> None:
        if len(self._readers) == 1:
            reason, why = "configured", "as configured"
        elif obstacles:
            reason, why = "nearer_ones_cannot", "; ".join(obstacles)
        else:
            reason, why = "nearest", "same kernel, user and runtime folder"
        logger.info(
            "Reading the arena at %s by %s (%s)", endpoint.address, connector.transport, why
        )
        self._untold.append((connector.transport, reason))


def make_transports(config: OmniConfig) -> Transports:
    """The transports that a configuration asks for.

    `auto` is shared memory, and Mooncake beside it where the engine listens to other hosts or may
    connect to them; nothing of Mooncake starts before it is used.

    Raises:
        ConfigError, MissingDependencyError: a transport is unknown, or lacks what it needs.
    """
    names = ["shm"] if config.transport == AUTO else [config.transport]
    if config.transport == AUTO and (config.listen or config.peers):
        names.append("mooncake")
    connectors = [_make(name, config) for name in names]
    # An arena on the network is of use to those only who can ask for its slots from there.
    exporters = [
        each for each in connectors if each.transport == connectors[0].transport or config.listen
    ]
    return Transports(connectors, exporters)


def _make(name: str, config: OmniConfig) -> OmniConnector:
    if name != "mooncake":
        return create_transport(name, namespace=config.namespace)
    from omni_connector.transports.mooncake import MooncakeConnector

    allowed = Peers(config.peers)
    return MooncakeConnector(
        settings=config.mooncake,
        host=parse_listen(config.listen).host if config.listen else None,
        allowed=lambda host: is_loopback(host) or allowed.allows(host),
    )
