# SPDX-License-Identifier: Apache-2.0
"""Which transport reads which peer: an engine exports by each it has, and reads by the nearest."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from omni_connector.config import OmniConfig, read_settings
from omni_connector.errors import ConfigError, OmniError, PeerRefusedError, unknown
from omni_connector.memory.arena import Arena
from omni_connector.net.peers import Peers, is_loopback, parse_listen
from omni_connector.transports.base import ArenaTransport, Endpoint, Site
from omni_connector.transports.registry import AUTO, transport_class, transport_names

logger = logging.getLogger(__name__)

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
            for transport in self._exporters:
                endpoints.append(transport.export(arena, name))
        except OmniError:
            for transport, endpoint in zip(self._exporters, endpoints, strict=False):
                transport.withdraw(endpoint)
            raise
        return tuple(endpoints)

    @property
    def needs_checksums(self) -> bool:
        """Whether our arena is read otherwise than in place: what says then that bytes are those
        of their slot is nothing but their checksum."""
        return not all(transport.supports_mapping for transport in self._exporters)

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
        for transport, endpoint in ways:
            obstacle = transport.obstacle(endpoint)
            if obstacle is None or len(ways) == 1:  # then trying tells more
                self._note(endpoint, obstacles)
                return transport, endpoint
            obstacles.append(f"{transport.transport}: {obstacle}")
        if not ways:
            ours = ", ".join(transport.transport for transport in self._readers)
            theirs = ", ".join(offered) or "no transport"
            obstacles = [f"it is read by {theirs}, this engine reads by {ours}"]
        raise PeerRefusedError(f"no transport reaches the peer: {'; '.join(obstacles)}")

    def take_choices(self) -> list[Choice]:
        """What was chosen since the last call, once an arena."""
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def close(self) -> None:
        """Close them all. Idempotent."""
        for transport in self._readers:
            transport.close()

    def _note(self, endpoint: Endpoint, obstacles: list[str]) -> None:
        if len(self._readers) == 1:
            reason, why = "configured", "as configured"
        elif obstacles:
            reason, why = "nearer_ones_cannot", "; ".join(obstacles)
        elif endpoint.transport == (nearest := self._readers[0]).transport:
            reason, why = "nearest", nearest.why_near
        else:
            reason, why = "nearer_ones_cannot", "the peer offers no nearer one"
        self._untold.append(Choice(endpoint.transport, endpoint.address, reason, why))


def make_transports(config: OmniConfig) -> Transports:
    """The transports that a configuration asks for.

    `auto` takes all that are candidates by what they say of themselves, the nearest first; those
    that reach other hosts only where the engine listens to some or may connect to them. Nothing of
    Mooncake starts before it is used.

    Raises:
        ConfigError, MissingDependencyError: a transport is unknown, or lacks what it needs, or a
            setting is wrong.
    """
    if config.transport == AUTO:
        classes = _candidates(beyond_host=bool(config.listen or config.peers))
        given = config.transport_config
        for name in given:
            if name not in classes:
                raise ConfigError(f"transport_config: {unknown('transport', name, classes)}")
    else:
        classes = {config.transport: transport_class(config.transport)}
        given = {config.transport: config.transport_config}
    transports = [_make(name, kind, given.get(name, {}), config) for name, kind in classes.items()]
    # An arena on the network is of use to those only who can ask for its slots from there.
    exporters = [
        each
        for each in transports
        if each is transports[0] or config.listen or not each.beyond_host
    ]
    return Transports(transports, exporters)


def _candidates(*, beyond_host: bool) -> dict[str, type[ArenaTransport]]:
    """Those of `auto` by name, the nearest first."""
    found: dict[str, type[ArenaTransport]] = {}
    for name in transport_names():
        try:
            kind = transport_class(name)
        except Exception as error:
            # Another package's, which nobody has asked for by name.
            logger.warning("Transport %r is left out: %s", name, error, exc_info=True)
            continue
        if kind.nearness is not None and (beyond_host or not kind.beyond_host):
            found[name] = kind
    return dict(sorted(found.items(), key=lambda each: each[1].nearness or 0))


def _make(name: str, kind: type[ArenaTransport], given: Any, config: OmniConfig) -> ArenaTransport:
    where = "transport_config" if config.transport == name else f"transport_config.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an object, not {given!r:.200}")
    allowed = Peers(config.peers)
    site = Site(
        namespace=config.namespace,
        host=parse_listen(config.listen).host if config.listen else None,
        allows=lambda host: is_loopback(host) or allowed.allows(host),
    )
    settings = read_settings(where, kind.Settings, given)
    own = getattr(config, name, None)  # `mooncake` is a key of its own as well
    if isinstance(own, kind.Settings):
        if given and own != kind.Settings():
            raise ConfigError(f"{name} and {where} say the same; give one")
        settings = settings if given else own
    return kind.create(settings, site)
