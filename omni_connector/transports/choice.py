# SPDX-License-Identifier: Apache-2.0
"""Transports: which ones there are, which of them an engine has, and which one reads which peer.

A package offers a transport through the entry-point group `omni_connector.transports`. The class
is imported when its name is first asked for, so that one that is broken, or lacks a dependency,
is in nobody's way. An engine exports its arena by each transport that it has, and reads a peer's
arena by the nearest one that can.
"""

import importlib
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NamedTuple

from omni_connector.arena.arena import Arena
from omni_connector.config import OmniConfig, read_settings
from omni_connector.errors import (
    ConfigError,
    MissingDependencyError,
    OmniError,
    PeerRefusedError,
    unknown,
)
from omni_connector.net.peers import Peers, is_loopback, parse_listen
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.transports.base import ArenaTransport, Endpoint, RemoteArena, Site

logger = logging.getLogger("vllm.omni_connector.transports")

# Most arenas whose transport is remembered. It bounds memory.
_MAX_CHOSEN: Final = 4096

ENTRY_POINT_GROUP: Final = "omni_connector.transports"
AUTO: Final = "auto"

_BUILT_IN: Final = {
    "shm": "omni_connector.transports.shm:SharedMemoryTransport",
    "mooncake": "omni_connector.transports.mooncake.transport:MooncakeTransport",
}
_NONE: Final = {
    "mooncake_store": "a Mooncake Store keeps blocks and objects, but is no transport; configure "
    "it as `store`, or for objects as the connector MooncakeStoreConnector"
}

_lock = threading.Lock()
_registered: dict[str, type[ArenaTransport]] = {}


def register_transport(name: str, transport: type[ArenaTransport]) -> None:
    """Make a transport known in this process. Registering a class twice is no error.

    Raises:
        ConfigError: the name is taken.
    """
    with _lock:
        taken = name == AUTO or name in _BUILT_IN or name in _NONE or name in _entry_points()
        if taken or _registered.get(name, transport) is not transport:
            raise ConfigError(f"a transport named {name!r} exists already")
        _registered[name] = transport


def transport_names() -> list[str]:
    """The names that `transport_class` knows, sorted; not all of them need to load."""
    return sorted({*_BUILT_IN, *_registered, *_entry_points()})


def transport_class(name: str) -> type[ArenaTransport]:
    """The class of a transport.

    Raises:
        ConfigError: the name is unknown, or is not that of a transport.
        MissingDependencyError: the transport needs a package that is not installed.
    """
    found: object = _registered.get(name)
    if found is None:
        found = _load(name)
    if not (isinstance(found, type) and issubclass(found, ArenaTransport)):
        raise ConfigError(f"transport {name!r} is {found!r}, which is no ArenaTransport class")
    return found


def _load(name: str) -> object:
    target = _BUILT_IN.get(name)
    package = "omni-connector"
    if target is None:
        entry_point = _entry_points().get(name)
        if entry_point is None:
            raise ConfigError(_NONE.get(name) or unknown("transport", name, transport_names()))
        target = entry_point.value
        package = entry_point.dist.name if entry_point.dist is not None else "its package"
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        raise MissingDependencyError(
            f"transport {name!r} of {package} needs the module {missing!r}, which is not "
            f"installed; install it with the extras of {package}"
        ) from error
    except (ImportError, AttributeError) as error:
        # A compiled module may lack a system library, which this message names.
        raise MissingDependencyError(
            f"transport {name!r} of {package} cannot be loaded: {error}"
        ) from error


def _entry_points() -> dict[str, EntryPoint]:
    found = entry_points(group=ENTRY_POINT_GROUP)
    return {each.name: each for each in found if each.name not in {*_BUILT_IN, *_NONE}}


class Choice(NamedTuple):
    """By which transport an arena is read, and why.

    Attributes:
        transport, address: of the arena's endpoint.
        reason: `configured`: the settings name the transport. `nearest`: it is the first of those
            that `auto` has. `nearer_ones_cannot`: the nearer ones do not reach the peer.
        why: the reason in words.
    """

    transport: str
    address: str
    reason: str
    why: str


class Transports:
    """The transports of one engine's worker, nearest first.

    Args:
        readers: all transports.
        exporters: the ones by which peers may read our arena.
        configured: whether the settings name the only one.
    """

    def __init__(
        self,
        readers: Sequence[ArenaTransport],
        exporters: Sequence[ArenaTransport],
        *,
        configured: bool = False,
    ) -> None:
        self._configured = configured
        self._readers = tuple(readers)
        self._exporters = tuple(exporters)
        self._untold: deque[Choice] = deque(maxlen=_MAX_CHOSEN)
        self._chosen: BoundedMap[tuple[Endpoint, ...], tuple[ArenaTransport, Endpoint]]
        self._chosen = BoundedMap(_MAX_CHOSEN)

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

    def hand_on(self, arena: RemoteArena) -> tuple[Endpoint, ...]:
        """Let peers attach, at this process, an arena whose owner has gone.

        Returns:
            Where they attach it; empty where no exporter can hand it on.
        """
        handed_on = (transport.hand_on(arena) for transport in self._exporters)
        return tuple(each for each in handed_on if each is not None)

    def withdraw(self, endpoints: Sequence[Endpoint]) -> None:
        """End what `export` or `hand_on` began. Idempotent."""
        by_name = {transport.transport: transport for transport in self._exporters}
        for endpoint in endpoints:
            if endpoint.transport in by_name:
                by_name[endpoint.transport].withdraw(endpoint)

    @property
    def needs_checksums(self) -> bool:
        """Whether some peers read copies of our slots, which only checksums tell from others."""
        return not all(transport.supports_mapping for transport in self._exporters)

    def choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[ArenaTransport, Endpoint]:
        """The transport and endpoint by which to read an arena with these endpoints.

        The choice for an arena never changes.

        Raises:
            PeerRefusedError: no transport can; the message says why.
        """
        chosen = self._chosen.get(endpoints)
        if chosen is None:
            chosen = self._chosen[endpoints] = self._choose(endpoints)
        return chosen

    def _choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[ArenaTransport, Endpoint]:
        offered = {endpoint.transport: endpoint for endpoint in endpoints}
        ways = [(c, offered[c.transport]) for c in self._readers if c.transport in offered]
        obstacles: list[str] = []
        for transport, endpoint in ways:
            obstacle = transport.obstacle(endpoint)
            if obstacle is None or len(ways) == 1:  # the only way is tried: its error says more
                self._note(endpoint, obstacles)
                return transport, endpoint
            obstacles.append(f"{transport.transport}: {obstacle}")
        if not ways:
            ours = ", ".join(transport.transport for transport in self._readers)
            theirs = ", ".join(offered) or "no transport"
            obstacles = [f"it is read by {theirs}, this engine reads by {ours}"]
        raise PeerRefusedError(f"no transport reaches the peer: {'; '.join(obstacles)}")

    def take_choices(self) -> list[Choice]:
        """The choices since the last call, one for each arena."""
        if not self._untold:
            return []
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def details(self) -> dict[str, dict[str, Any]]:
        """What each transport says of itself, by its name."""
        return {transport.transport: transport.details() for transport in self._readers}

    def close(self) -> None:
        """Close them all. Idempotent."""
        for transport in self._readers:
            transport.close()

    def _note(self, endpoint: Endpoint, obstacles: list[str]) -> None:
        if self._configured:
            reason, why = "configured", "as configured"
        elif obstacles:
            reason, why = "nearer_ones_cannot", "; ".join(obstacles)
        elif endpoint.transport == (nearest := self._readers[0]).transport:
            reason, why = "nearest", nearest.why_near
        else:
            reason, why = "nearer_ones_cannot", "the peer offers no nearer one"
        self._untold.append(Choice(endpoint.transport, endpoint.address, reason, why))


def make_transports(config: OmniConfig, offers: bool = True) -> Transports:
    """The transports that a configuration asks for.

    `auto` takes all transports with a `nearness`, the nearest first. Transports that reach other
    hosts are taken only where the engine listens to other hosts or may connect to them. Mooncake
    does not start, nor open a port, before its first use.

    Args:
        offers: whether this engine offers hand-offs, to other hosts where it has a `listen`.

    Raises:
        ConfigError, MissingDependencyError: a transport is unknown, or lacks what it needs, or a
            setting is wrong.
    """
    classes, given = _wanted(config)
    transports = []
    for name, kind in classes.items():
        try:
            transports.append(_make(name, kind, given.get(name, {}), config))
        except MissingDependencyError as error:
            # Another one may reach the same peers; the last one that might is needed.
            if all(each.beyond_host != kind.beyond_host for each in _others(classes, name)):
                raise
            logger.warning("Transport %r is left out: %s", name, error)
    # Peers on other hosts ask for slots at the TCP port: without one nobody needs such an export.
    listens = offers and config.listen is not None
    exporters = [
        each for each in transports if each is transports[0] or listens or not each.beyond_host
    ]
    return Transports(transports, exporters, configured=config.transport != AUTO)


def check_transports(config: OmniConfig) -> None:
    """Check the names and settings of transports, without making any.

    Raises:
        ConfigError: as `make_transports`.
        MissingDependencyError: the module of a transport that is named cannot be imported.
    """
    classes, given = _wanted(config)
    for name, kind in classes.items():
        _settings(name, kind, given.get(name, {}), config)


def _wanted(config: OmniConfig) -> tuple[dict[str, type[ArenaTransport]], dict[str, Any]]:
    """Classes of the transports that a configuration asks for, and their settings, by name."""
    if config.transport != AUTO:
        classes = {config.transport: transport_class(config.transport)}
        return classes, {config.transport: config.transport_config}
    classes = _candidates(beyond_host=bool(config.listen or config.peers))
    for name in config.transport_config:
        if name not in classes:
            raise ConfigError(f"transport_config: {unknown('transport', name, classes)}")
    return classes, config.transport_config


def _others(classes: Mapping[str, type[ArenaTransport]], name: str) -> list[type[ArenaTransport]]:
    return [kind for other, kind in classes.items() if other != name]


def _candidates(*, beyond_host: bool) -> dict[str, type[ArenaTransport]]:
    """The candidates of `auto` by name, the nearest first."""
    found: dict[str, type[ArenaTransport]] = {}
    for name in transport_names():
        try:
            kind = transport_class(name)
        except Exception as error:
            # A broken transport of another package, which nobody has configured, is no error.
            logger.warning("Transport %r is left out: %s", name, error, exc_info=True)
            continue
        if kind.nearness is not None and (beyond_host or not kind.beyond_host):
            found[name] = kind
    return dict(sorted(found.items(), key=lambda each: each[1].nearness or 0))


def _settings(name: str, kind: type[ArenaTransport], given: Any, config: OmniConfig) -> Any:
    where = "transport_config" if config.transport == name else f"transport_config.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an object, not {given!r:.200}")
    settings = read_settings(where, kind.Settings, given)
    own = getattr(config, name, None)  # `mooncake` is also a key of the configuration
    if isinstance(own, kind.Settings):
        if given and own != kind.Settings():
            raise ConfigError(f"{name} and {where} say the same; give one")
        settings = settings if given else own
    return settings


def _make(name: str, kind: type[ArenaTransport], given: Any, config: OmniConfig) -> ArenaTransport:
    settings = _settings(name, kind, given, config)
    allowed = Peers(config.peers)
    site = Site(
        namespace=config.namespace,
        host=parse_listen(config.listen).host if config.listen else None,
        allows=lambda host: is_loopback(host) or allowed.allows(host),
        peers_family=allowed.family,
    )
    return kind.create(settings, site)
