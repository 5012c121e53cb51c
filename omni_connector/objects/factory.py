# SPDX-License-Identifier: Apache-2.0
"""`OmniConnectorFactory`: connectors by the names that pipeline configurations use."""

import difflib
import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, get_type_hints

import msgspec

from omni_connector.config import read_settings
from omni_connector.errors import ConfigError, unknown
from omni_connector.objects.base import OmniConnector

SHARED_MEMORY: Final = "SharedMemoryConnector"
MOONCAKE_STORE: Final = "MooncakeStoreConnector"
MOONCAKE_ENGINE: Final = "MooncakeTransferEngineConnector"

ENGINE_PORT: Final = 50051
"""Port of a sender's `MooncakeTransferEngineConnector`, by default; vLLM-Omni's default, too."""

logger = logging.getLogger(__name__)

# How much an unknown setting is like one of ours if it is taken for a typing error, from 0 to 1.
# vLLM-Omni's models have their own settings beside ours, none of which is so near.
_NEAR: Final = 0.75

Constructor = Callable[[dict[str, Any]], OmniConnector]


@dataclass
class ConnectorSpec:
    """A connector to make: its registered name, and its settings."""

    name: str
    extra: dict[str, Any] = field(default_factory=dict)


# vLLM-Omni's name of a setting -> our name, and how many of its units are one of ours.
STORE_ALIASES: Final = {
    "segment": ("segment_gib", 1 << 30),
    "localbuf": ("buffer_mib", 1 << 20),
    "proto": ("protocol", None),
    "rdma": ("device", None),
}

# Arguments of constructors that only programs may give, not configurations.
_NO_SETTINGS: Final = frozenset({"self", "folder", "geometry", "clock"})


@functools.cache
def settings_of(connector: type[OmniConnector]) -> type[msgspec.Struct]:
    """The settings of a connector: the arguments of its constructor, their types and defaults."""
    constructor = connector.__init__
    kinds = get_type_hints(constructor, include_extras=True)
    arguments = inspect.signature(constructor).parameters.values()
    fields = [(a.name, kinds[a.name], a.default) for a in arguments if a.name not in _NO_SETTINGS]
    return msgspec.defstruct(connector.__name__, fields, frozen=True)


def class_of(name: str) -> type[OmniConnector]:
    """The class of a connector of this package; its module is imported when it is first needed."""
    class_name, module = _OURS[name]
    found: type[OmniConnector] = getattr(
        importlib.import_module(f"omni_connector.objects.{module}"), class_name
    )
    return found


def _ours(name: str, extra: dict[str, Any]) -> OmniConnector:
    connector = class_of(name)
    settings = settings_of(connector)
    aliases = STORE_ALIASES.keys() if _OURS[name][0] == MOONCAKE_STORE else ()
    own = _own_of(name, extra, [*settings.__struct_fields__, *aliases])
    if aliases:
        _rename(own)
    arguments = msgspec.structs.asdict(read_settings(name, settings, own))
    try:
        return connector(**arguments)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _own_of(name: str, extra: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """The settings that are the connector's. A pipeline gives those of its models beside them."""
    others = [key for key in extra if key not in known]
    for key in others:
        if difflib.get_close_matches(str(key), known, n=1, cutoff=_NEAR):
            raise ConfigError(f"{name}: {unknown('setting', key, known)}")
    if others:
        logger.info("%s has no settings %s: they are left to others", name, ", ".join(others))
    return {key: value for key, value in extra.items() if key in known}


def _rename(extra: dict[str, Any]) -> None:
    for alias, (name, unit) in STORE_ALIASES.items():
        if alias in extra:
            if name in extra:
                raise ConfigError(
                    f"{MOONCAKE_STORE}: {alias!r} and {name!r} say the same; give one"
                )
            value = extra.pop(alias)
            extra[name] = value / unit if unit and isinstance(value, int | float) else value


_OURS: Final = {
    SHARED_MEMORY: (SHARED_MEMORY, "shm"),
    MOONCAKE_STORE: (MOONCAKE_STORE, "mooncake_store"),
    "MooncakeConnector": (MOONCAKE_STORE, "mooncake_store"),
    MOONCAKE_ENGINE: (MOONCAKE_ENGINE, "mooncake"),
}


class OmniConnectorFactory:
    """Makes connectors by name. All methods may be called from any thread."""

    _lock: ClassVar = threading.Lock()
    _constructors: ClassVar[dict[str, Constructor]] = {
        name: functools.partial(_ours, name) for name in _OURS
    }

    @classmethod
    def register_connector(cls, name: str, constructor: Constructor) -> None:
        """Make a connector known in this process.

        Args:
            name: the name for `ConnectorSpec.name`.
            constructor: called with the settings (`ConnectorSpec.extra`); it may import what it
                needs only then.

        Raises:
            ConfigError (a ValueError): the name is taken.
        """
        with cls._lock:
            if name in cls._constructors:
                raise ConfigError(f"a connector named {name!r} is registered already")
            cls._constructors[name] = constructor

    @classmethod
    def create_connector(cls, spec: ConnectorSpec) -> OmniConnector:
        """A new connector, which the caller closes.

        Raises:
            ConfigError (a ValueError): the name is unknown, or a setting is unknown or wrong.
            MissingDependencyError: a package that the connector needs is not installed.
            TransportError: the store or network that it needs cannot be reached.
        """
        constructor = cls._constructors.get(spec.name)
        if constructor is None:
            raise ConfigError(unknown("connector", spec.name, cls._constructors))
        return constructor(dict(spec.extra))

    @classmethod
    def list_registered_connectors(cls) -> list[str]:
        """The names that `create_connector` knows, sorted; not all of them need to work here."""
        return sorted(cls._constructors)
