# SPDX-License-Identifier: Apache-2.0
"""Transports by name: ours, those of installed packages, and those registered by hand.

A package offers one through the entry-point group `omni_connector.transports`. The class is
imported when its name is first asked for, so that one that is broken, or lacks a dependency,
is in nobody's way.
"""

import difflib
import importlib
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from omni_connector.errors import ConfigError, MissingDependencyError
from omni_connector.transports.base import ArenaTransport

ENTRY_POINT_GROUP: Final = "omni_connector.transports"
AUTO: Final = "auto"

_BUILT_IN: Final = {
    "shm": "omni_connector.transports.shm:SharedMemoryConnector",
    "mooncake": "omni_connector.transports.mooncake:MooncakeConnector",
    "mooncake_store": "omni_connector.objects.mooncake_store:MooncakeStoreConnector",
}

_lock = threading.Lock()
_registered: dict[str, type[ArenaTransport]] = {}


def register_transport(name: str, transport: type[ArenaTransport]) -> None:
    """Make a transport known in this process. The same class may be registered again.

    Raises:
        ConfigError: the name is taken.
    """
    with _lock:
        taken = name == AUTO or name in _BUILT_IN or name in _entry_points()
        if taken or _registered.get(name, transport) is not transport:
            raise ConfigError(f"a transport named {name!r} exists already")
        _registered[name] = transport


def transport_names() -> list[str]:
    """The names that `transport_class` knows, sorted; whether each can be loaded is not tried."""
    return sorted({*_BUILT_IN, *_registered, *_entry_points()})


def transport_class(name: str) -> type[ArenaTransport]:
    """The class of a transport.

    Args:
        name: a registered name, or "auto" for the one that needs nothing configured.

    Raises:
        ConfigError: the name is unknown, or what it stands for is no transport.
        MissingDependencyError: the transport needs a package that is not installed.
    """
    name = "shm" if name == AUTO else name
    found: object = _registered.get(name)
    if found is None:
        found = _load(name)
    if not (isinstance(found, type) and issubclass(found, ArenaTransport)):
        raise ConfigError(f"transport {name!r} is {found!r}, which is no ArenaTransport class")
    return found


def create_transport(name: str, *, namespace: str) -> ArenaTransport:
    """A new connector of the named transport; its class is called with `namespace` by keyword.

    Raises:
        ConfigError, MissingDependencyError: as `transport_class`, and what the class raises.
    """
    return transport_class(name)(namespace=namespace)  # type: ignore[call-arg]


def _load(name: str) -> object:
    target, package = _BUILT_IN.get(name), "omni-connector"
    if target is None:
        entry_point = _entry_points().get(name)
        if entry_point is None:
            known = transport_names()
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown transport {name!r}; did you mean {near[0]!r}? "
                f"Known are {', '.join(known)}"
            )
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
        # Also a compiled module whose system library is missing; its message names it.
        raise MissingDependencyError(
            f"transport {name!r} of {package} cannot be loaded: {error}"
        ) from error


def _entry_points() -> dict[str, EntryPoint]:
    found = entry_points(group=ENTRY_POINT_GROUP)
    return {each.name: each for each in found if each.name not in _BUILT_IN}
