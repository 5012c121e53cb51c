# SPDX-License-Identifier: Apache-2.0
"""`OmniConnectorFactory`: connectors by the names that pipeline configurations use."""

import difflib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec

from omni_connector.config import MooncakeSettings
from omni_connector.errors import ConfigError
from omni_connector.net.peers import HostPort, Peers, is_loopback, parse_host
from omni_connector.objects.base import OmniConnector
from omni_connector.objects.object_store import DEFAULT_TTL_S
from omni_connector.transports.registry import transport_class, transport_names

SHARED_MEMORY: Final = "SharedMemoryConnector"
MOONCAKE_STORE: Final = "MooncakeStoreConnector"
MOONCAKE_ENGINE: Final = "MooncakeTransferEngineConnector"

# Settings that pipelines give every connector, and those of other connectors of the same name.
_FOREIGN_SETTINGS: Final = frozenset(
    {
        "stage_id",
        "role",
        "from_stage",
        "to_stage",
        "type",
        "shm_threshold_bytes",
        "wakeup_scope",
        "buffer_ttl_seconds",
    }
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
    buffer_ttl_seconds: float = DEFAULT_TTL_S


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


class _MooncakeEngineSettings(msgspec.Struct, frozen=True):
    """`ConnectorSpec.extra` of the Transfer Engine; see `MooncakeConnector`.

    The names down to `sender_zmq_port` are vLLM-Omni's. `memory_pool_size` is in bytes, and limits
    what has been put and neither been got nor cleaned up.
    """

    host: str = "127.0.0.1"
    zmq_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 50051
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_name: str = ""
    memory_pool_size: Annotated[int, msgspec.Meta(gt=0)] | None = None
    memory_pool_device: Literal["cpu"] = "cpu"
    sender_host: str | None = None
    sender_zmq_port: int | None = None
    key_file: str | None = None
    peers: tuple[str, ...] = ()
    object_timeout: float = 5.0
    transfer_timeout: float = 10.0
    buffer_ttl_seconds: float = DEFAULT_TTL_S


# vLLM-Omni's names of settings: what they are here, and how many of theirs are one of ours.
_STORE_ALIASES: Final = {
    "segment": ("segment_gib", 1 << 30),
    "localbuf": ("buffer_mib", 1 << 20),
    "proto": ("protocol", None),
    "rdma": ("device", None),
}

# What vLLM-Omni takes for "the address that others reach"; the port of no matter is "discard".
_ANY_HOST: Final = frozenset({"auto", "", "*", "0.0.0.0", "::"})
_ELSEWHERE: Final = "192.0.2.1"  # in no network: the way there is the default route

_Settings = TypeVar("_Settings", bound=msgspec.Struct)


def _read(connector: str, extra: dict[str, Any], settings: type[_Settings]) -> _Settings:
    known = settings.__struct_fields__
    foreign = _FOREIGN_SETTINGS.difference(known)
    own = {key: value for key, value in extra.items() if key not in foreign}
    for key in own:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:80], known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{connector}: unknown setting {key!r}; did you mean {near!r}? "
                f"Known are {', '.join(known)}"
            )
    try:
        return msgspec.convert(own, settings)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ConfigError(f"{connector}: {error}") from error


def _shared_memory(extra: dict[str, Any]) -> OmniConnector:
    from omni_connector.transports.shm import SharedMemoryConnector

    settings = _read(SHARED_MEMORY, extra, _SharedMemorySettings)
    try:
        return SharedMemoryConnector(**msgspec.structs.asdict(settings))
    except ValueError as error:
        raise ConfigError(f"{SHARED_MEMORY}: {error}") from error


def _mooncake_store(extra: dict[str, Any]) -> OmniConnector:
    from omni_connector.objects.mooncake_store import MooncakeStoreConnector

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
    from omni_connector.transports.mooncake import MooncakeConnector
    from omni_connector.transports.mooncake_engine import address_towards

    settings = _read(MOONCAKE_ENGINE, extra, _MooncakeEngineSettings)
    try:
        host = settings.host
        if host in _ANY_HOST:
            host = address_towards(HostPort(settings.sender_host or _ELSEWHERE, 9))
        host = str(parse_host("127.0.0.1" if host == "localhost" else host))
        allowed = Peers(settings.peers)
        connector = MooncakeConnector(
            settings=MooncakeSettings(
                protocol=settings.protocol,
                device=settings.device_name,
                timeout_s=settings.transfer_timeout,
            ),
            host=host,
            allowed=lambda host: is_loopback(host) or allowed.allows(host),
            port=settings.zmq_port,
            key_file=settings.key_file,
            object_gib=settings.memory_pool_size and settings.memory_pool_size / (1 << 30),
            object_timeout=settings.object_timeout,
            buffer_ttl_seconds=settings.buffer_ttl_seconds,
        )
        try:
            if settings.sender_host is not None and settings.sender_zmq_port is not None:
                connector.update_sender_info(settings.sender_host, settings.sender_zmq_port)
            if str(extra.get("role", "sender")).lower() != "receiver":
                connector.listen()
        except BaseException:
            connector.close()
            raise
    except ValueError as error:
        raise ConfigError(f"{MOONCAKE_ENGINE}: {error}") from error
    return connector


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
        MOONCAKE_ENGINE: _mooncake_engine,
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
