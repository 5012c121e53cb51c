# SPDX-License-Identifier: Apache-2.0
"""The connector of a transfer manager: it is made at first use, and puts and gets payloads."""

import functools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from omni_connector.errors import TransportError
from omni_connector.net.peers import MAX_PORT, parse_host
from omni_connector.objects.base import LASTING_ERRORS, OmniConnector
from omni_connector.objects.codec import Pieces
from omni_connector.objects.factory import (
    ENGINE_PORT,
    MOONCAKE_ENGINE,
    ConnectorSpec,
    OmniConnectorFactory,
)
from omni_connector.runtime.backoff import Backoff
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.stage.config import OmniKVCacheConfig
from omni_connector.stage.contract import metadata_of
from omni_connector.stage.payload import KVCacheTransferData
from omni_connector.stage.ports import (
    RANK_STRIDE,
    configured_port,
    kv_port,
    replica_id,
    stage_number,
)
from omni_connector.stage.receiving import read_payload
from omni_connector.stage.tp import ReceiveKey, Topology

logger = logging.getLogger(__name__)

# Connectors that listen, or connect, at a port for each rank: ours and vLLM-Omni's, by its name or
# as `vllm_omni.{name}`.
_RANKED_PORTS: Final = frozenset(
    {
        MOONCAKE_ENGINE,
        "MoriTransferEngineConnector",
        "YuanrongTransferEngineConnector",
        "NixlConnector",
    }
)

_ADDRESS: Final = ("sender_host", "sender_zmq_port")

# Most tries to put a payload, and seconds before the second one; each further pause is twice as
# long.
_SEND_TRIES: Final = 3
_SEND_BACK_OFF_S: Final = 0.1

# Seconds between two looks for a payload that is not there yet: at first, and at most.
_FIRST_POLL_S: Final = 0.01
_LAST_POLL_S: Final = 0.5

# Requests whose keys are remembered for `cleanup`. Keys of older ones are found by their format.
# So many payloads that were used are remembered, too.
_MAX_REMEMBERED: Final = 1 << 16

_SENDING: Final = "_omni_sending"
"""Of a payload's metadata: a number drawn for each sending, so that a receiver can tell one under
the same id from another. Receivers take it out."""

LEAST_ASK_S: Final = 0.5
"""Seconds that peers have for an answer even if the deadline comes sooner."""


class Parts(NamedTuple):
    """The payloads of one request.

    Attributes:
        payloads: of each key, in the order of the keys.
        size: their bytes.
        sendings: by key, of which sending they are; "" where the sender does not say.
    """

    payloads: list[dict[str, Any]]
    size: int
    sendings: dict[str, str]


class Sender(NamedTuple):
    """Where the sender's rank 0 is asked.

    Attributes:
        host: its address.
        port: its port; rank r listens at this + 16 r. None where only the host is known.
    """

    host: str
    port: int | None

    def port_of(self, rank: int) -> int | None:
        """The port of one of its ranks."""
        return None if self.port is None else self.port + RANK_STRIDE * rank


class ConnectorLink:
    """A connector that is made at first use, and again at the next if it did not start.

    Args:
        config: the manager's configuration.
        topology: tells this rank's place; called when it is needed.
        clock: monotonic seconds.
        sleep: waits for seconds; by default until `close`, if that comes first.
    """

    def __init__(
        self,
        config: OmniKVCacheConfig,
        topology: Callable[[], Topology],
        clock: Callable[[], float],
        sleep: Callable[[float], object] | None,
    ) -> None:
        self._config = config
        self._topology = topology
        self._clock = clock
        self._closed = threading.Event()
        self._sleep = self._closed.wait if sleep is None else sleep
        self._lock = threading.Lock()
        self._connector: Any = None
        # Whether it has not started once.
        self._failed = False
        # The sender of requests that name none.
        self._sender: Sender | None = None
        # The address that the settings had before `update_sender`; None before that.
        self._configured_address: dict[str, Any] | None = None
        # `sender`: that of the request which this thread receives.
        self._asked = threading.local()
        self._keys: BoundedMap[str, set[str]] = BoundedMap(_MAX_REMEMBERED)
        # By key, the sending that was used last.
        self._used: BoundedMap[str, str] = BoundedMap(_MAX_REMEMBERED)

    @property
    def connector(self) -> Any:
        """The connector; None if none is configured, it did not start, or this is closed."""
        with suppress(TransportError, *LASTING_ERRORS):  # `_create` has logged it
            return self._connector_or_raise()
        return None

    @property
    def configured(self) -> bool:
        """Whether there is a connector to make."""
        return bool((self._config.connector_config or {}).get("type"))

    def put(
        self, stages: tuple[str, str], key: str, data: KVCacheTransferData, request_id: str
    ) -> None:
        """Put a payload of a request under a key.

        Raises:
            TransportError: three tries failed, 0.1 s and 0.2 s apart, or this is closed.
            ConfigError, MissingDependencyError: each try would fail.
            ValueError, TypeError: as `KVCacheTransferData.to_bytes`.
        """
        packed: Any = None
        reason = ""
        backoff = Backoff(_SEND_BACK_OFF_S, math.inf, self._clock)
        for attempt in range(_SEND_TRIES):
            if attempt:
                self._sleep(backoff.failed())
            connector = self._connector_or_raise()
            if connector is None:
                reason = "there is no connector"
                continue
            if packed is None:
                packed = _pack(connector, data)
            try:
                done, _, _ = connector.put(
                    from_stage=stages[0], to_stage=stages[1], put_key=key, data=packed
                )
            except Exception as error:
                # Third parties write connectors, too: anything may be raised.
                reason = f"{type(error).__name__}: {error}"
                logger.warning("put of %r failed", key, exc_info=True)
                continue
            if done:
                self._remember(request_id, key)
                return
            reason = "the connector refused it"
        raise TransportError(f"{key!r} was not put in {_SEND_TRIES} tries: {reason}")

    def get_all(
        self,
        stages: tuple[str, str],
        keys: Sequence[ReceiveKey],
        timeout: float,
    ) -> Parts | None:
        """Get payloads that no request has used, asking every 10 ms at first, every 500 ms later.

        Args:
            stages: the stage that sent them, and this one.
            keys: of the parts, with the ranks that sent them.
            timeout: seconds.

        Returns:
            None after `timeout` seconds, which one `get` that is under way may exceed: by half a
            second, or with a store or a connector of others by as long as it takes. Parts that are
            there are read.

        Raises:
            ValueError: what came is no whole payload.
            TransportError: this is closed.
            ConfigError, IncompatiblePeerError, MissingDependencyError, PeerRefusedError: each
                further try would fail.
        """
        found: dict[str, tuple[dict[str, Any], int, str]] = {}
        deadline = self._clock() + timeout
        polls = Backoff(_FIRST_POLL_S, _LAST_POLL_S, self._clock)
        told: set[str] = set()
        used: set[str] = set()
        while True:
            for key, rank in (each for each in keys if each[0] not in found):
                result = self._get(stages, key, rank, deadline, told)
                payload = None if result is None else read_payload(result[0])
                sending = "" if payload is None else _take_sending(payload)
                if payload is not None and sending and sending == self._used.get(key):
                    used.add(key)
                    payload = None
                if payload is not None:
                    found[key] = payload, int(result[1]), sending
                elif self._clock() >= deadline:
                    break
            missing = [key for key, _ in keys if key not in found]
            if not missing:
                return Parts(
                    [found[key][0] for key, _ in keys],
                    sum(size for _, size, _ in found.values()),
                    {key: sending for key, (_, _, sending) in found.items()},
                )
            left = deadline - self._clock()
            if left <= 0:
                logger.error(
                    "%d of %d parts came from stage %s to %s in %.1f s; %r is missing%s",
                    *(len(found), len(keys), *stages, timeout, missing[0]),
                    ": an earlier request of this id has used it" if missing[0] in used else "",
                )
                return None
            self._sleep(min(polls.failed(), left))

    def use(self, sendings: Mapping[str, str]) -> None:
        """A request uses these payloads: no later request of its id gets them."""
        with self._lock:
            for key, sending in sendings.items():
                self._used[key] = sending

    def update_sender(self, info: object, stage: str) -> None:
        """Take the sender's host and port from what an orchestrator says; see the manager.

        Raises:
            ValueError: as `find_sender`.
        """
        sender = find_sender(info, stage)
        port = sender.port_of(self._topology().rank)
        with self._lock:
            self._sender = sender
            settings = self._config.connector_config
            if settings is not None:
                if self._configured_address is None:
                    self._configured_address = {
                        name: settings[name] for name in _ADDRESS if name in settings
                    }
                told = dict(zip(_ADDRESS, (sender.host, port), strict=True))
                self._config.connector_config = settings | told
            self._tell(self._connector)

    @contextmanager
    def asking(self, sender: Sender | None) -> Iterator[None]:
        """What this thread gets meanwhile comes from this sender; None changes nothing.

        Requests have senders of their own where a stage has replicas, and several requests are
        received at a time. So the sender of one is never that of the others.
        """
        before = self._request_sender()
        self._asked.sender = sender or before
        try:
            yield
        finally:
            self._asked.sender = before

    def cleanup(self, request_id: str) -> None:
        """Free what was put for a request.

        The connector is told the keys themselves: it could not tell to which request the keys of a
        hook belong.
        """
        with self._lock:
            connector = self._connector
            keys = self._keys.pop(request_id, None)
        if connector is None:
            return
        for key in sorted(keys or {request_id}):
            connector.cleanup(key)

    def withdraw(self, request_id: str) -> None:
        """Free what was put for an earlier request of this id, if there was one."""
        with self._lock:
            known = request_id in self._keys
        if known:
            self.cleanup(request_id)

    def close(self) -> None:
        """Close the connector, for good. Idempotent."""
        with self._lock:
            self._closed.set()
            connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()

    def _get(
        self,
        stages: tuple[str, str],
        key: str,
        rank: int | None,
        deadline: float,
        told: set[str],
    ) -> Any:
        connector = self._connector_or_raise()
        if connector is None:
            return None
        get = connector.get
        if isinstance(connector, OmniConnector):  # connectors of others know no timeout
            left = max(deadline - self._clock(), LEAST_ASK_S)
            get = functools.partial(connector.get_or_raise, timeout=left)
        try:
            metadata = self._place(connector, rank)
            return get(from_stage=stages[0], to_stage=stages[1], get_key=key, metadata=metadata)
        except LASTING_ERRORS:
            raise
        except Exception as error:
            # As for `put`; the next poll may succeed, or fail for the same reason.
            reason = f"{type(error).__name__}: {error}"
            if reason not in told:
                told.add(reason)
                logger.warning("get of %r failed", key, exc_info=True)
            return None

    def _place(self, connector: Any, rank: int | None) -> dict[str, Any] | None:
        """The metadata that names the sender to ask; None for the one that the connector knows.

        Args:
            connector: gets the metadata.
            rank: that of the sender, where there are several. Where there is one, only connectors
                that take a sender's address are told a request's own.
        """
        own = self._request_sender()
        if own is None:
            sender = self._sender
            if rank is None or sender is None or sender.port is None:
                return None
        elif rank is None and not callable(getattr(connector, "update_sender_info", None)):
            return None
        else:
            sender = own if own.port is not None else Sender(own.host, self._default_port())
            allow = getattr(connector, "allow_sender", None)
            if callable(allow):
                allow(sender.host)
        if rank is None:
            rank = self._topology().rank
        return {"source_host": sender.host, "source_port": sender.port_of(rank)}

    def _request_sender(self) -> Sender | None:
        return getattr(self._asked, "sender", None)

    def _remember(self, request_id: str, key: str) -> None:
        with self._lock:
            self._keys[request_id] = {*self._keys.get(request_id, ()), key}

    def _connector_or_raise(self) -> Any:
        with self._lock:
            if self._closed.is_set():
                raise TransportError("the transfer manager is closed")
            if self._connector is None:
                self._connector = self._create()
            return self._connector

    def _create(self) -> Any:
        settings = dict(self._config.connector_config or {})
        name = settings.pop("type", None)
        if not name:
            return None
        if self._configured_address is not None:
            # A connector that has no senders is told of none.
            settings = {key: each for key, each in settings.items() if key not in _ADDRESS}
            settings |= self._configured_address
        try:
            if str(name).removeprefix("vllm_omni.") in _RANKED_PORTS:
                settings |= self._rank_settings(settings)
            connector = OmniConnectorFactory.create_connector(ConnectorSpec(name, settings))
            self._tell(connector)
        except Exception as error:
            # Only the first failure is logged with its traceback: each poll tries again.
            logger.warning("Connector %s did not start: %s", name, error, exc_info=not self._failed)
            self._failed = True
            if isinstance(error, LASTING_ERRORS):
                raise
            return None
        return connector

    def _rank_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        config = self._config
        sends = config.need_send_cache
        from_stage, to_stage = config.send_stages() if sends else config.recv_stages()
        found: dict[str, Any] = {"from_stage": from_stage or "0", "to_stage": to_stage or "1"}
        if sends:
            found["role"] = "sender"
            base = configured_port(settings.get("zmq_port", ENGINE_PORT))
            # With 0 the system chooses a port for each rank.
            if base != 0:
                rank = self._topology().rank
                stage = stage_number(from_stage)
                found["zmq_port"] = kv_port(base, stage, replica=replica_id(), rank=rank)
        elif config.need_recv_cache:
            found["role"] = "receiver"
            host = settings.get("sender_host")
            if self._sender is None and host:
                info = {"host": host, "zmq_port": settings.get("sender_zmq_port")}
                self._sender = find_sender(info, "")
            if self._sender is not None:
                found["sender_host"] = self._sender.host
                found["sender_zmq_port"] = self._sender.port_of(self._topology().rank)
        else:
            # Without KV no port is opened before the first `put`.
            found["role"] = settings.get("role", "receiver")
        return found

    def _default_port(self) -> int:
        """Where rank 0 of the sending stage's first replica listens, if nothing is configured."""
        return kv_port(ENGINE_PORT, stage_number(self._config.recv_stages()[0]))

    def _tell(self, connector: Any) -> None:
        tell = getattr(connector, "update_sender_info", None)
        sender = self._sender
        if sender is not None and callable(tell):
            port = self._default_port() if sender.port is None else sender.port
            try:
                tell(sender.host, Sender(sender.host, port).port_of(self._topology().rank))
            except Exception:  # as for `put`
                name = type(connector).__name__
                logger.warning("%s did not take the address of its sender", name, exc_info=True)


def _pack(connector: Any, data: KVCacheTransferData) -> Any:
    if getattr(connector, "supports_raw_data", False):
        return data.to_gpu_tensor()
    # Our own connectors join the pieces where the object is to lie. vLLM-Omni's manager, which may
    # receive it, takes a tensor and no memoryview.
    if isinstance(connector, OmniConnector):
        return Pieces(data.to_pieces(), as_tensor=True)
    return data.to_bytes()


def find_sender(info: object, stage: str) -> Sender:
    """The sender's place in what an orchestrator says; see the manager's `update_sender_info`.

    Args:
        info: `host` and `zmq_port`, or a dict of these by stage.
        stage: which of the stages.

    Raises:
        ValueError: it names no host, or something that is no host, or no port.
    """
    if not isinstance(info, Mapping):
        raise ValueError("it is no mapping")
    if "host" not in info:
        by_stage = {str(key): each for key, each in info.items() if isinstance(each, Mapping)}
        # If there is one entry only, it is the sender's.
        only = next(iter(by_stage.values())) if len(by_stage) == 1 else {}
        info = by_stage.get(stage, only)
    host, port = info.get("host"), info.get("zmq_port")
    if not isinstance(host, str):
        raise ValueError("it has no host")
    try:
        parse_host(host)
    except ValueError as error:
        raise ValueError(f"{host!r} is no host: {error}") from error
    return Sender(host, None if port is None else _port(port))


def _port(value: Any) -> int:
    try:
        port = int(value)
    except (TypeError, ValueError, OverflowError):
        port = 0
    if not 0 < port <= MAX_PORT:
        raise ValueError(f"{value!r} is no port")
    return port


def mark_sending(data: KVCacheTransferData) -> None:
    """Tell this sending of a payload from others, where its metadata can say so."""
    if isinstance(data.metadata, dict):
        data.metadata = data.metadata | {_SENDING: secrets.token_hex(8)}


def _take_sending(payload: dict[str, Any]) -> str:
    metadata = metadata_of(payload)
    if _SENDING not in metadata:
        return ""
    payload["metadata"] = {name: each for name, each in metadata.items() if name != _SENDING}
    return str(metadata[_SENDING])
