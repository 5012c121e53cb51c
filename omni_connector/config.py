# SPDX-License-Identifier: Apache-2.0
"""`OmniConfig`: the keys of `kv_connector_extra_config`, typed and checked.

Every key is optional. Each can also be given as the environment variable `OMNI_CONNECTOR_<KEY>`;
the configuration wins. An unknown key is an error that names the nearest known one;
a key of an earlier version is a warning.
"""

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from omni_connector.errors import ConfigError, unknown
from omni_connector.net.peers import Peers, is_loopback, parse_host, parse_listen

logger = logging.getLogger("vllm.omni_connector.config")

ENV_PREFIX = "OMNI_CONNECTOR_"

# Keys that earlier versions had, and what became of each. They are warned of for one version.
_GONE: Final[Mapping[str, str]] = {
    "admission": "a full arena keeps the new blocks of depths at which enough are used again",
    "thinking": "answers are kept up to their first thought, or whole by the hint `thinking: keep`",
    "huge_pages": "an arena has huge pages where the kernel gives them to shared memory",
    "copy_threads": "a copy is shared by as many cores as a rank has beside vLLM's, 4 at most",
    "tenants": "cache salts have no parts of the arena of their own",
    "tenant_quota": "cache salts have no parts of the arena of their own",
    "orphan_s": "what an engine had kept before it ended is kept for a minute",
    "pin_part": "at most a quarter of the arena is pinned, and nothing without `pin_s` in `hints`",
}

# Hints that earlier versions had, which the key `hints` may still name for one version.
_GONE_HINTS: Final[Mapping[str, str]] = {
    "high": "blocks with `cache: high` are kept like others; `pin_s` keeps them for some time",
}

# Environment variables of this prefix that are no configuration keys. Where the runtime folder lies
# must be known before any configuration is read (see net/runtime.py).
_NOT_KEYS = frozenset({ENV_PREFIX + "RUNTIME_DIR"})

# Kubernetes tells a pod of the Service `x` in variables of this suffix and these middles: X_PORT.
_SERVICE_HOST = "_SERVICE_HOST"
_OF_SERVICE = ("_SERVICE_", "_PORT")

# Keys that vLLM itself or MultiConnector puts into kv_connector_extra_config.
_FOREIGN_KEYS = frozenset({"engine_id"})

_GIB = 1 << 30

# Longest part of a value that an error shows, in characters.
_SHOWN_CHARS = 200

HintName = Literal["no", "prefetch", "pin_s", "thinking", "over"]
"""A hint of a request: `no` is a value of `cache`."""

ALL_HINTS: Final[tuple[HintName, ...]] = get_args(HintName)

_Settings = TypeVar("_Settings", bound=msgspec.Struct)


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How Mooncake's Transfer Engine is started.

    Attributes:
        protocol: what carries the bytes.
        device: RDMA devices, comma separated; "" lets Mooncake choose.
        host: address of this machine that peers reach; None takes that of `listen`, else the one
            that this machine has towards its first peer.
        timeout_s: seconds after which Mooncake gives a transfer up (`MC_TRANSFER_TIMEOUT`).
    """

    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    host: str | None = None
    timeout_s: float = 10.0

    def check(self) -> None:
        """Raise ConfigError for a value that is out of range."""
        _check_positive("mooncake.timeout_s", self.timeout_s)
        try:
            parse_host(self.host or "localhost")
        except ValueError as error:
            raise ConfigError(
                f"mooncake.host: peers do not reach {_shown(self.host)} ({error}); name the "
                "address of this machine that they use"
            ) from None


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A store in which engines share the prefixes of prompts: a Mooncake Store.

    Attributes:
        master: `host:port` of its master.
        metadata_server: where Mooncake's clients find each other; by default they ask each other.
        protocol, device: as in `MooncakeSettings`.
        host: address of this machine that the other clients reach; None takes the one that it
            has towards the master.
        segment_gib: memory that this engine lends to the store, over all its ranks; 0 for none.
        lookup_timeout_s: seconds that a request waits to hear what the store holds of its prompt.
    """

    master: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    host: str | None = None
    segment_gib: float = 0.25
    lookup_timeout_s: float = 0.25

    def check(self) -> None:
        """Raise ConfigError for a value that is out of range."""
        host, _, port = self.master.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ConfigError(f"store.master must be host:port, not {self.master!r}")
        if not (math.isfinite(self.segment_gib * _GIB) and self.segment_gib >= 0):
            raise ConfigError(f"store.segment_gib must not be negative, {self.segment_gib!r}")
        _check_positive("store.lookup_timeout_s", self.lookup_timeout_s)

    def segment_bytes(self) -> int:
        """Bytes lent by all ranks of this engine."""
        return int(self.segment_gib * _GIB)


class FileStoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A store in which engines share the prefixes of prompts: the files of a folder.

    Attributes:
        path: the folder, absolute; it is made if it is missing, its parent is not. With the parent
            on the mounted disk, nothing is written where the disk is not mounted.
        gib: size that the files may have together; None takes a tenth of what the file system
            would have free without them.
        lookup_timeout_s: seconds that a request waits to hear what the store holds of its prompt.
    """

    path: str
    gib: float | None = None
    lookup_timeout_s: float = 0.25

    def check(self) -> None:
        """Raise ConfigError for a value that is out of range."""
        if not os.path.isabs(self.path) or "\0" in self.path:
            raise ConfigError(f"store.path must be an absolute path, not {_shown(self.path)}")
        if self.gib is not None:
            _check_positive("store.gib", self.gib)
        _check_positive("store.lookup_timeout_s", self.lookup_timeout_s)

    def size_bytes(self) -> int | None:
        """Bytes that the files may have together; None where no size was set."""
        return None if self.gib is None else int(self.gib * _GIB)

    def segment_bytes(self) -> int:
        """Bytes of memory lent to the store: none."""
        return 0


# What a store must have, and says which one it is.
_NEEDED: dict[type, str] = {
    FileStoreSettings: "`path` (a folder)",
    StoreSettings: "`master` (a Mooncake Store)",
}


class OmniConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine's connector.

    Attributes:
        transport: how bytes reach a peer: `shm` (shared memory on one host), `mooncake`, a name
            that another package has registered, or `auto`. `auto` takes shared memory where both
            sides share a kernel, user and runtime folder, else Mooncake where `listen` or `peers`
            is given, or what other packages offer for `auto`.
        transport_config: settings of the transport that `transport` names, which types them. With
            `auto` it holds such settings by the transports' names.
        arena_gib: size of this engine's arenas in GiB, of all its ranks on this host together; None
            takes what `omni_connector.arena.size` says.
        namespace: engines that share a namespace (and a user) can find each other.
        model_id: what peers compare to know whether both run the same weights; None takes the
            content of the model's files, or its name and revision where that is unknown.
        weights: `fixed` declares that this engine's weights stay those of `model_id` until it ends,
            whatever is reset; `may_change` promises nothing.
        handoff: whether prompts are handed off; not where another connector beside this one does.
        handoff_ttl_s: seconds that a finished prefill waits for its decode engine before its slots
            are reused.
        min_handoff_tokens: tokens from which on a decode engine fetches a prompt's KV; it computes
            shorter prompts itself.
        arena_wait_s: seconds that a prefill request waits for room in a full arena before it is
            computed without hand-off.
        load_timeout_s: seconds that a decode engine waits for a peer's answer, and again for the
            bytes, from the load's first piece on.
        drain_quiet_s: seconds without a new request after which a server that drains takes itself
            to be out of its routers, and stops; see `vllm_v1.drain_middleware`.
        integrity: `full` checks generation and checksum of each slot, `generation` only the
            generation.
        listen: TCP address of the control channel, as `host:port`. The system chooses the port
            where it is 0. Peers are told the host that stands here. None opens no port.
        key_file: what `omni-connector keygen` made, the same for all engines of a cluster.
        peers: hosts that prompts may be fetched from: IP addresses, networks, host names.
        mooncake: how Mooncake is started; see `MooncakeSettings`.
        share: whether this engine keeps full blocks in its arena, and shares them with the engines
            of its user and namespace on this host.
        hints: which hints of requests are followed.
        store: where prefixes are shared with engines on any host, a Mooncake Store (`master`) or a
            folder of files (`path`); None shares none.
        trace: folder to which the engine writes what took how long; None writes nothing.
    """

    transport: str = "auto"
    transport_config: dict[str, Any] = {}
    arena_gib: float | None = None
    namespace: str = "default"
    model_id: str | None = None
    weights: Literal["may_change", "fixed"] = "may_change"
    handoff: bool = True
    handoff_ttl_s: float = 120.0
    min_handoff_tokens: int = 0
    arena_wait_s: float = 10.0
    load_timeout_s: float = 30.0
    drain_quiet_s: float = 5.0
    integrity: Literal["full", "generation"] = "full"
    listen: str | None = None
    key_file: str | None = None
    peers: tuple[str, ...] = ()
    mooncake: MooncakeSettings = MooncakeSettings()
    share: bool = True
    hints: tuple[HintName, ...] = ALL_HINTS
    store: StoreSettings | FileStoreSettings | None = None
    trace: str | None = None

    @classmethod
    def load(
        cls, extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None
    ) -> "OmniConfig":
        """Read the configuration given to vLLM, then the environment, then defaults.

        Args:
            extra_config: `kv_connector_extra_config` as vLLM passes it.
            environ: environment to read, `os.environ` by default.

        Raises:
            ConfigError: a key is unknown, or its value is ill-typed or out of range.
        """
        config, faults = cls.read(extra_config, environ)
        if faults:
            raise ConfigError("; ".join(faults))
        return config

    @classmethod
    def read(
        cls, extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None
    ) -> "tuple[OmniConfig, list[str]]":
        """Read it as `load` does, but to the end.

        Returns:
            The configuration, with a default in the place of each value that is wrong; and what is
            wrong, one message each.
        """
        environ = os.environ if environ is None else environ
        known = get_type_hints(cls)
        values: dict[str, Any] = {}
        faults: list[str] = []
        for variable, key, text in _of_environment(environ, known):
            where = f"environment variable {variable}"
            try:
                if key not in known:
                    raise ConfigError(f"{where}: {_unknown_key(key, known)}")
                value = _from_text(where, known[key], text)
                values[key] = _value(where, key, known[key], value, strict=False)
            except ConfigError as error:
                faults.append(str(error))
        given: object = {} if extra_config is None else extra_config
        if not isinstance(given, Mapping):
            faults.append(f"kv_connector_extra_config must be an object, not {_shown(given)}")
            given = {}
        for key, value in given.items():
            if key in _FOREIGN_KEYS or _is_gone("kv_connector_extra_config", key):
                continue
            try:
                if key not in known:
                    raise ConfigError(f"kv_connector_extra_config: {_unknown_key(key, known)}")
                where = f"kv_connector_extra_config: {key}"
                values[key] = _value(where, key, known[key], value)
            except ConfigError as error:
                faults.append(str(error))
        for key, fault in cls(**values)._out_of_range():
            faults.append(fault)
            values.pop(key, None)
        return cls(**values), faults

    def _out_of_range(self) -> Iterator[tuple[str, str]]:
        """The keys whose values are out of range, and what is wrong with each."""
        for key, check in self._ranges().items():
            try:
                check()
            except ConfigError as error:
                yield key, str(error)

    def _ranges(self) -> "dict[str, Callable[[], object]]":
        numbers = ("arena_gib", "handoff_ttl_s", "arena_wait_s", "load_timeout_s", "drain_quiet_s")
        checks: dict[str, Callable[[], object]] = {
            key: partial(_check_positive, key, getattr(self, key))
            for key in numbers
            if getattr(self, key) is not None
        }
        checks["min_handoff_tokens"] = self._check_min_handoff_tokens
        checks["mooncake"] = self.mooncake.check
        if self.store is not None:
            checks["store"] = self.store.check
        checks["namespace"] = self._check_namespace
        checks["trace"] = self._check_trace
        checks["peers"] = lambda: Peers(self.peers)
        checks["listen"] = self._check_listen
        return checks

    def _check_min_handoff_tokens(self) -> None:
        if self.min_handoff_tokens < 0:
            raise ConfigError(f"min_handoff_tokens must not be negative, {self.min_handoff_tokens}")

    def _check_namespace(self) -> None:
        if not self.namespace or not all(c.isalnum() or c in "-_." for c in self.namespace):
            raise ConfigError(
                f"namespace must be letters, digits, '-', '_' or '.', not {self.namespace!r}"
            )
        if self.namespace.startswith("."):
            raise ConfigError(f"namespace must not start with a dot: {self.namespace!r}")

    def _check_trace(self) -> None:
        if self.trace == "":
            raise ConfigError("trace must name a folder, or be null")

    def _check_listen(self) -> None:
        if self.listen is None:
            return
        host = parse_listen(self.listen).host
        if self.key_file is None and not is_loopback(host):
            raise ConfigError(
                f"listen: {host!r} is no loopback address such as 127.0.0.1, so that key_file "
                "is needed; `omni-connector keygen PATH` makes one, for all engines to share"
            )

    @property
    def needs_loopback_key(self) -> bool:
        """Whether the control channel uses TCP without a `key_file`, which it may on loopback."""
        return self.key_file is None and bool(self.listen or self.peers)

    def arena_bytes(self) -> int | None:
        """Bytes of arena for all ranks of this engine on this host; None where none were set."""
        return None if self.arena_gib is None else int(self.arena_gib * _GIB)


def read_settings(where: str, kind: type[_Settings], given: Mapping[Any, Any]) -> _Settings:
    """Convert given values to a struct of settings.

    Args:
        where: how errors name the settings.
        kind: the struct.
        given: values of its fields by name; those with defaults may be missing.

    Raises:
        ConfigError: a field is unknown or missing, or its value is ill-typed.
    """
    for key in given:
        if key not in kind.__struct_fields__:
            raise ConfigError(f"{where}: {unknown('setting', key, kind.__struct_fields__)}")
    try:
        return msgspec.convert(dict(given), kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ConfigError(f"{where}: {str(error).replace('`$', f'`{where}')}") from error


def _of_environment(
    environ: Mapping[str, str], known: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Each variable that sets a key, or looks as if it did: its name, the key and its text."""
    services = _of_services(environ)
    for variable, text in environ.items():
        key = variable[len(ENV_PREFIX) :].lower()
        if not variable.startswith(ENV_PREFIX) or variable in _NOT_KEYS:
            continue
        if key in known or not (variable.startswith(services) or _is_gone(variable, key)):
            yield variable, key, text


def _value(where: str, key: str, kind: Any, given: Any, *, strict: bool = True) -> Any:
    if key == "hints":
        given = _without_gone_hints(where, given)
    return check_value(where, kind, given, strict=strict)


def _check_positive(key: str, value: float) -> None:
    if not (math.isfinite(value * _GIB) and value > 0):
        raise ConfigError(f"{key} must be a positive number, not {value!r}")


def _of_services(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What variables begin with that Kubernetes has set for a Service `omni-connector...`."""
    services = [
        name.removesuffix(_SERVICE_HOST)
        for name in environ
        if name.startswith(ENV_PREFIX) and name.endswith(_SERVICE_HOST)
    ]
    return tuple(service + part for service in services for part in _OF_SERVICE)


def _is_gone(where: str, key: object) -> bool:
    """Whether a key is one of an earlier version, of which the log then says so."""
    if not isinstance(key, str) or key not in _GONE:
        return False
    logger.warning("%s: the key %r is not there any more: %s", where, key, _GONE[key])
    return True


def _without_gone_hints(where: str, hints: Any) -> Any:
    """The value of `hints` without hints of earlier versions. The log names each of these."""
    if not isinstance(hints, list | tuple):
        return hints
    gone = [each for each in hints if isinstance(each, str) and each in _GONE_HINTS]
    for each in gone:
        logger.warning("%s: there is no hint %r any more: %s", where, each, _GONE_HINTS[each])
    return [each for each in hints if each not in gone]


def _unknown_key(key: Any, known: Mapping[str, Any]) -> str:
    """The message of an error about an unknown key, which may be one of an object's."""
    homes = [
        name
        for name, kind in known.items()
        if any(key in struct.__struct_fields__ for struct in _structs(kind))
    ]
    if not homes:
        return unknown("key", key, known)
    return f"unknown key {key!r}; it is a key of {' and '.join(f'`{name}`' for name in homes)}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _from_text(where: str, kind: Any, text: str) -> Any:
    if get_origin(kind) is tuple:
        return [item.strip() for item in text.split(",")] if text.strip() else []
    if not _structs(kind) and get_origin(kind) is not dict:
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{where} must be a JSON object: {error}") from None


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    """The structs that a key holds, or may hold."""
    parts = (kind, *get_args(kind))
    return [part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)]


def _chosen(
    where: str, structs: list[type[msgspec.Struct]], keys: Iterable[Any]
) -> list[type[msgspec.Struct]]:
    """The structs that have all of these keys."""
    chosen = [each for each in structs if all(key in each.__struct_fields__ for key in keys)]
    if chosen:
        return chosen
    known = {name for each in structs for name in each.__struct_fields__}
    for key in keys:
        if key not in known:
            raise ConfigError(f"{where}: {unknown('key', key, known)}")
    sets = "; or ".join(", ".join(each.__struct_fields__) for each in structs)
    raise ConfigError(f"{where}: {', '.join(keys)} do not go together. Known are {sets}")


def check_value(where: str, kind: Any, value: Any, *, strict: bool = True) -> Any:
    """Convert a value to a type of settings.

    Args:
        where: how errors name the value.
        strict: whether text is no number.

    Raises:
        ConfigError: it is ill-typed.
    """
    structs = _structs(kind)
    if structs and isinstance(value, Mapping):
        chosen = _chosen(where, structs, value)
        known = get_type_hints(chosen[0])
        fields = {
            key: check_value(f"{where}.{key}", known[key], part, strict=strict)
            for key, part in value.items()
        }
        try:
            return chosen[0](**fields)
        except TypeError:  # a field without a default is missing
            needed = " or ".join(text for kind, text in _NEEDED.items() if kind in chosen)
            raise ConfigError(f"{where} needs {needed}") from None
    if len(structs) > 1:  # which msgspec has no word for
        kind = structs[0] | None
    try:
        converted = msgspec.convert(value, kind, strict=strict)
        msgspec.msgpack.encode(converted)  # the environment can say what no message can
        return converted
    except (msgspec.MsgspecError, UnicodeError, TypeError, OverflowError, RecursionError):
        raise ConfigError(f"{where} must be {_describe(kind)}, not {_shown(value)}") from None


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if _structs(kind) or get_origin(kind) is dict:
        return "an object"
    if get_origin(kind) is tuple:
        return f"a list, each item {_describe(get_args(kind)[0])}"
    if get_args(kind):
        return " or ".join(_describe(part) for part in get_args(kind))
    names: dict[Any, str] = {
        bool: "true or false",
        float: "a number",
        int: "a whole number",
        str: "a string",
        type(None): "null",
    }
    return names.get(kind, str(kind))
