# SPDX-License-Identifier: Apache-2.0
"""Which transport reads which peer: an engine exports by each it has, and reads by the nearest."""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from omni_connector.config import OmniConfig
from omni_connector.errors import OmniError, PeerRefusedError
from omni_connector.memory.arena import Arena
from omni_connector.net.peers import Peers, is_loopback, parse_listen
from omni_connector.transports.base import ArenaTransport, Endpoint
from omni_connector.transports.registry import AUTO, create_transport

_MAX_CHOSEN: Final = 4096


class Choice(NamedTuple):
    """By which transport an arena is read, and why.

    Attributes:
        transport, address: of its endpoint.
        reason: `configured`, `nearest`, or `nearer_ones_cannot`.
        why: the same in words.
    """

    transport: str
    address: str
    reason: str
    why: str


class Transports:
    """The transports of one engine's worker, nearest first.

    Args:
        readers: all of them.
        exporters: those of them by which peers may read our arena.
    """

    def __init__(
        self, readers: Sequence[ArenaTransport], exporters: Sequence[ArenaTransport]
    ) -> None:
        self._readers = tuple(readers)
        self._exporters = tuple(exporters)
        self._untold: deque[Choice] = deque(maxlen=_MAX_CHOSEN)
        self._chosen: dict[tuple[Endpoint, ...], tuple[ArenaTransport, Endpoint]] = {}

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

    @property
    def needs_checksums(self) -> bool:
        """Whether our arena is read otherwise than in place: what says then that bytes are those
        of their slot is nothing but their checksum."""
        return not all(connector.supports_mapping for connector in self._exporters)

    def choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[ArenaTransport, Endpoint]:
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

    def _choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[ArenaTransport, Endpoint]:
        offered = {endpoint.transport: endpoint for endpoint in endpoints}
        ways = [(c, offered[c.transport]) for c in self._readers if c.transport in offered]
        obstacles: list[str] = []
        for connector, endpoint in ways:
            obstacle = connector.obstacle(endpoint)
            if obstacle is None or len(ways) == 1:  # then trying tells more
                self._note(endpoint, obstacles)
                return connector, endpoint
            obstacles.append(f"{connector.transport}: {obstacle}")
        if not ways:
            ours = ", ".join(connector.transport for connector in self._readers)
            theirs = ", ".join(offered) or "no transport"
            obstacles = [f"it is read by {theirs}, this engine reads by {ours}"]
        raise PeerRefusedError(f"no transport reaches the peer: {'; '.join(obstacles)}")

    def take_choices(self) -> list[Choice]:
        """What was chosen since the last call, once an arena."""
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def close(self) -> None:
        """Close them all. Idempotent."""
        for connector in self._readers:
            connector.close()

    def _note(self, endpoint: Endpoint, obstacles: list[str]) -> None:
        if len(self._readers) == 1:
            reason, why = "configured", "as configured"
        elif obstacles:
            reason, why = "nearer_ones_cannot", "; ".join(obstacles)
        elif endpoint.transport == self._readers[0].transport:
            reason, why = "nearest", "same kernel, user and runtime folder"
        else:
            reason, why = "nearer_ones_cannot", "the peer offers no nearer one"
        self._untold.append(Choice(endpoint.transport, endpoint.address, reason, why))


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


def _make(name: str, config: OmniConfig) -> ArenaTransport:
    if name != "mooncake":
        return create_transport(name, namespace=config.namespace)
    from omni_connector.transports.mooncake import MooncakeConnector

    allowed = Peers(config.peers)
    return MooncakeConnector(
        settings=config.mooncake,
        host=parse_listen(config.listen).host if config.listen else None,
        allowed=lambda host: is_loopback(host) or allowed.allows(host),
    )
