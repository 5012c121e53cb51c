# SPDX-License-Identifier: Apache-2.0
"""Transports by name: ours, those of installed packages, and those registered by hand.

A package offers one through the entry-point group `omni_connector.transports`. The class is
imported when its name is first asked for, so that one that is broken, or lacks a dependency,
is in nobody's way.
"""

import importlib
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from omni_connector.errors import ConfigError, MissingDependencyError, unknown
from omni_connector.transports.base import ArenaTransport

ENTRY_POINT_GROUP: Final = "omni_connector.transports"
AUTO: Final = "auto"

_BUILT_IN: Final = {
    "shm": "omni_connector.transports.shm:SharedMemoryTransport",
    "mooncake": "omni_connector.transports.mooncake:MooncakeTransport",
}
_NONE: Final = {
    "mooncake_store": "a Mooncake Store keeps blocks and objects, but is no transport; configure "
    "it as `store`, or for objects as the connector MooncakeStoreConnector"
}

_lock = threading.Lock()
_registered: dict[str, type[ArenaTransport]] = {}


def register_transport(name: str, transport: type[ArenaTransport]) -> None:
    """Make a transport known in this process. The same class may be registered again.

    Raises:
        ConfigError: the name is taken.
    """
    with _lock:
        taken = name == AUTO or name in _BUILT_IN or name in _NONE or name in _entry_points()
        if taken or _registered.get(name, transport) is not transport:
            raise ConfigError(f"a transport named {name!r} exists already")
        _registered[name] = transport


def transport_names() -> list[str]:
    """The names that `transport_class` knows, sorted; whether each can be loaded is not tried."""
    return sorted({*_BUILT_IN, *_registered, *_entry_points()})


def transport_class(name: str) -> type[ArenaTransport]:
    """The class of a transport.

    Raises:
        ConfigError: the name is unknown, or what it stands for is no transport.
        MissingDependencyError: the transport needs a package that is not installed.
    """
    found: object = _registered.get(name)
    if found is None:
        found = _load(name)
    if not (isinstance(found, type) and issubclass(found, ArenaTransport)):
        raise ConfigError(f"transport {name!r} is {found!r}, which is no ArenaTransport class")
    return found


def _load(name: str) -> object:
    target, package = _BUILT_IN.get(name), "omni-connector"
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
        # Also a compiled module whose system library is missing; its message names it.
        raise MissingDependencyError(
            f"transport {name!r} of {package} cannot be loaded: {error}"
        ) from error


def _entry_points() -> dict[str, EntryPoint]:
    found = entry_points(group=ENTRY_POINT_GROUP)
    return {each.name: each for each in found if each.name not in {*_BUILT_IN, *_NONE}}
