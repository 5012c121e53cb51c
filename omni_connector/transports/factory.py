# SPDX-License-Identifier: Apache-2.0
"""`OmniConnectorFactory`: connectors by the names that pipeline configurations use."""

import difflib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from omni_connector.errors import ConfigError, MissingDependencyError
from omni_connector.transports.base import OmniConnector
from omni_connector.transports.registry import transport_class, transport_names

SHARED_MEMORY: Final = "SharedMemoryConnector"

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


def _shared_memory(extra: dict[str, Any]) -> OmniConnector:
    from omni_connector.transports.shm import SharedMemoryConnector

    known = _SharedMemorySettings.__struct_fields__
    own = {key: value for key, value in extra.items() if key not in _FOREIGN_SETTINGS}
    for key in own:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{SHARED_MEMORY}: unknown setting {key!r}; did you mean {near!r}? "
                f"Known are {', '.join(known)}"
            )
    try:
        settings = msgspec.convert(own, _SharedMemorySettings)
        return SharedMemoryConnector(**msgspec.structs.asdict(settings))
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{SHARED_MEMORY}: {error}") from error


def _not_built(name: str) -> Constructor:
    def refuse(extra: dict[str, Any]) -> OmniConnector:
        raise MissingDependencyError(
            f"{name} is not in this version of omni-connector, which has no Mooncake transport; "
            f"on one host use {SHARED_MEMORY}"
        )

    return refuse


def _transfer_engine(extra: dict[str, Any]) -> OmniConnector:
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
        "MooncakeStoreConnector": _not_built("MooncakeStoreConnector"),
        "MooncakeConnector": _not_built("MooncakeConnector"),
        "MooncakeTransferEngineConnector": _transfer_engine,
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
