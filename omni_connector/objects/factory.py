# SPDX-License-Identifier: Apache-2.0
"""`OmniConnectorFactory`: connectors by the names that pipeline configurations use."""

import functools
import importlib
import inspect
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

# Settings that pipelines give every connector, and those of other connectors of the same name.
_FOREIGN_SETTINGS: Final = frozenset(
    ("stage_id", "role", "from_stage", "to_stage", "type", "shm_threshold_bytes", "wakeup_scope")
) | {"buffer_ttl_seconds"}

Constructor = Callable[[dict[str, Any]], OmniConnector]


@dataclass
class ConnectorSpec:
    """What connector to make: a registered name, and the settings of that connector."""

    name: str
    extra: dict[str, Any] = field(default_factory=dict)


# vLLM-Omni's names of settings: what they are here, and how many of theirs are one of ours.
_STORE_ALIASES: Final = {
    "segment": ("segment_gib", 1 << 30),
    "localbuf": ("buffer_mib", 1 << 20),
    "proto": ("protocol", None),
    "rdma": ("device", None),
}


# What a program may give a connector's constructor, and a configuration may not.
_NO_SETTINGS: Final = frozenset({"self", "folder", "geometry", "clock"})


@functools.cache
def settings_of(connector: type[OmniConnector]) -> type[msgspec.Struct]:
    """The settings of a connector: the arguments of its constructor, their types and defaults."""
    constructor = connector.__init__
    kinds = get_type_hints(constructor, include_extras=True)
    arguments = inspect.signature(constructor).parameters.values()
    fields = [(a.name, kinds[a.name], a.default) for a in arguments if a.name not in _NO_SETTINGS]
    return msgspec.defstruct(connector.__name__, fields, frozen=True)


def _make(name: str, connector: type[OmniConnector], extra: dict[str, Any]) -> OmniConnector:
    settings = settings_of(connector)
    foreign = _FOREIGN_SETTINGS.difference(settings.__struct_fields__)
    own = {key: value for key, value in extra.items() if key not in foreign}
    arguments = msgspec.structs.asdict(read_settings(name, settings, own))
    try:
        return connector(**arguments)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _lazily(name: str, module: str) -> Constructor:
    """Makes a connector of ours, whose class is imported when it is first asked for."""

    def construct(extra: dict[str, Any]) -> OmniConnector:
        loaded = importlib.import_module(f"omni_connector.objects.{module}")
        return _make(name, getattr(loaded, name), extra)

    return construct


def _mooncake_store(extra: dict[str, Any]) -> OmniConnector:
    for alias, (name, unit) in _STORE_ALIASES.items():
        if alias in extra:
            if name in extra:
                raise ConfigError(
                    f"{MOONCAKE_STORE}: {alias!r} and {name!r} say the same; give one"
                )
            value = extra.pop(alias)
            extra[name] = value / unit if unit and isinstance(value, int | float) else value
    return _lazily(MOONCAKE_STORE, "mooncake_store")(extra)


class OmniConnectorFactory:
    """Makes connectors by name. All methods may be called from any thread."""

    _lock: ClassVar = threading.Lock()
    _constructors: ClassVar[dict[str, Constructor]] = {
        SHARED_MEMORY: _lazily(SHARED_MEMORY, "shm"),
        MOONCAKE_STORE: _mooncake_store,
        "MooncakeConnector": _mooncake_store,
        MOONCAKE_ENGINE: _lazily(MOONCAKE_ENGINE, "mooncake"),
    }

    @classmethod
    def register_connector(cls, name: str, constructor: Constructor) -> None:
        """Make a connector known in this process.

        Args:
            name: what `ConnectorSpec.name` will say.
            constructor: called with the settings, `ConnectorSpec.extra`; may import what it
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
            ConfigError (a ValueError): the name is unknown, or a setting is.
            MissingDependencyError: the connector needs what is not installed.
            TransportError: what it connects to cannot be reached.
        """
        constructor = cls._constructors.get(spec.name)
        if constructor is None:
            raise ConfigError(unknown("connector", spec.name, cls._constructors))
        return constructor(dict(spec.extra))

    @classmethod
    def list_registered_connectors(cls) -> list[str]:
        """All names that `create_connector` knows, sorted; whether each works is not tried."""
        return sorted(cls._constructors)
