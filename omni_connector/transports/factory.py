# SPDX-License-Identifier: Apache-2.0
"""`OmniConnectorFactory`: connectors by the names that pipeline configurations use."""

import difflib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec

from omni_connector.errors import ConfigError
from omni_connector.transports.base import OmniConnector
from omni_connector.transports.registry import transport_class, transport_names

SHARED_MEMORY: Final = "SharedMemoryConnector"
MOONCAKE_STORE: Final = "MooncakeStoreConnector"

# Settings that pipelines give every connector, and those of other connectors of the same name.
_FOREIGN_SETTINGS: Final = frozenset(
    {"stage_id", "role", "from_stage", "to_stage", "type", "shm_threshold_bytes", "wakeup_scope"}
)

Constructor = Callable[[dict[str, Any]], OmniConnector]


@dataclass
class ConnectorSpec:
    """What connector to make: a registered name, and the settings of that connector."""

    name: str
    extra: dict[str, Any] = field(default_factory=dict)


class _SharedMemorySettings(msgspec.Struct, frozen=True):
    """`ConnectorSpec.extra` of shared memory; see `SharedMemoryConnector`."""

    namespace: str = "default"
    object_gib: float | None = None
    object_timeout: float = 5.0
    peer_timeout: float = 1.0


class _MooncakeStoreSettings(msgspec.Struct, frozen=True):
    """`ConnectorSpec.extra` of the store; see `MooncakeStoreConnector`."""

    master: str = "127.0.0.1:50051"
    metadata_server: str = "P2PHANDSHAKE"
    host: str | None = None
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    segment_gib: float = 0.25
    buffer_mib: float = 64.0
    namespace: str = "default"
    object_timeout: float = 10.0


# vLLM-Omni's names of settings: what they are here, and how many of theirs are one of ours.
_STORE_ALIASES: Final = {
    "segment": ("segment_gib", 1 << 30),
    "localbuf": ("buffer_mib", 1 << 20),
    "proto": ("protocol", None),
    "rdma": ("device", None),
}

_Settings = TypeVar("_Settings", bound=msgspec.Struct)


def _read(connector: str, extra: dict[str, Any], settings: type[_Settings]) -> _Settings:
    known = settings.__struct_fields__
    own = {key: value for key, value in extra.items() if key not in _FOREIGN_SETTINGS}
    for key in own:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{connector}: unknown setting {key!r}; did you mean {near!r}? "
                f"Known are {', '.join(known)}"
            )
    try:
        return msgspec.convert(own, settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{connector}: {error}") from error


def _shared_memory(extra: dict[str, Any]) -> OmniConnector:
    from omni_connector.transports.shm import SharedMemoryConnector

    settings = _read(SHARED_MEMORY, extra, _SharedMemorySettings)
    try:
        return SharedMemoryConnector(**msgspec.structs.asdict(settings))
    except ValueError as error:
        raise ConfigError(f"{SHARED_MEMORY}: {error}") from error


def _mooncake_store(extra: dict[str, Any]) -> OmniConnector:
    from omni_connector.transports.mooncake_store import MooncakeStoreConnector

    for alias, (name, unit) in _STORE_ALIASES.items():
        if alias in extra:
            if name in extra:
                raise ConfigError(
                    f"{MOONCAKE_STORE}: {alias!r} and {name!r} say the same; give one"
                )
            value = extra.pop(alias)
            extra[name] = value / unit if unit and isinstance(value, int | float) else value
    settings = _read(MOONCAKE_STORE, extra, _MooncakeStoreSettings)
    try:
        return MooncakeStoreConnector(**msgspec.structs.asdict(settings))
    except ValueError as error:
        raise ConfigError(f"{MOONCAKE_STORE}: {error}") from error


def _mooncake_engine(extra: dict[str, Any]) -> OmniConnector:
    from omni_connector.transports.mooncake import from_settings

    return from_settings(extra)


class OmniConnectorFactory:
    """Makes connectors by name. All methods may be called from any thread.

    Beside the registered names, each transport of the entry-point group
    `omni_connector.transports` is known by its own; its class is called with the settings as
    keyword arguments.
    """

    _lock: ClassVar = threading.Lock()
    _constructors: ClassVar[dict[str, Constructor]] = {
        SHARED_MEMORY: _shared_memory,
        MOONCAKE_STORE: _mooncake_store,
        "MooncakeConnector": _mooncake_store,
        "MooncakeTransferEngineConnector": _mooncake_engine,
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
            if name in cls._constructors or name in transport_names():
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
        if constructor is not None:
            return constructor(dict(spec.extra))
        if spec.name not in transport_names():
            known = ", ".join(cls.list_registered_connectors())
            raise ConfigError(f"unknown connector {spec.name!r}; known are {known}")
        try:
            return transport_class(spec.name)(**spec.extra)
        except TypeError as error:
            raise ConfigError(f"connector {spec.name!r}: {error}") from error

    @classmethod
    def list_registered_connectors(cls) -> list[str]:
        """All names that `create_connector` knows, sorted; whether each works is not tried."""
        return sorted({*cls._constructors, *transport_names()})
