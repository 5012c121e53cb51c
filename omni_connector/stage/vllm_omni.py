# SPDX-License-Identifier: Apache-2.0
"""Registers our connectors with vLLM-Omni, so that its pipelines can name them, and its connectors
with ours.

vLLM-Omni loads this through its entry-point group `vllm_omni.general_plugins`, in each of its
processes. A pipeline then configures `{"name": "OmniSharedMemoryConnector", "extra": {...}}`. Our
manager knows vLLM-Omni's connectors as `vllm_omni.{name}`.
"""

import functools
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import (
    SharedMemoryConnector,
)
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.initialization import compute_connector_zmq_port

from omni_connector.errors import OmniError
from omni_connector.objects.base import OmniConnector
from omni_connector.objects.codec import Pieces, misfit
from omni_connector.objects.factory import (
    ENGINE_PORT,
    MOONCAKE_ENGINE,
    MOONCAKE_STORE,
    SHARED_MEMORY,
    ConnectorSpec,
)
from omni_connector.objects.factory import OmniConnectorFactory as OurFactory
from omni_connector.stage.ports import configured_port, replica_id, stage_number
from omni_connector.stage.tp import local_rank

logger = logging.getLogger(__name__)


_SERIALIZED: Final = b"vllm_omni object"
"""Before an object that vLLM-Omni's serializer has made bytes of. No packed KV begins so."""


class _Adapter(SharedMemoryConnector):  # type: ignore[misc]
    """A connector of this package behind vLLM-Omni's interface.

    vLLM-Omni frees the chunks of an aborted request, key by key, only where the connector is a
    `SharedMemoryConnector`. So this is one, and nothing of that class is used.

    Bytes travel as they are. Every other object passes through vLLM-Omni's serializer, which knows
    vLLM-Omni's types and does not pickle. What a stage outside vLLM-Omni has put arrives as it was
    put; packed KV arrives as a tensor of bytes, which vLLM-Omni's manager reads.

    Args:
        config: `extra` of the pipeline's configuration.

    Attributes:
        config: as given; the stage processors of models read their own settings there.
        stage_id: the stage whose worker this is, by which chunks are named; -1 if none is given.

    Raises:
        ConfigError: a setting of our connector is ill-typed or mistyped.
        MissingDependencyError, TransportError: the connector does not start.
    """

    supports_raw_data = False
    _name: str
    # The base's `__del__` closes this, even if `__init__` has failed.
    _inner: OmniConnector = None  # type: ignore[assignment]

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.stage_id = int(config.get("stage_id", -1))
        self._inner = OurFactory.create_connector(ConnectorSpec(self._name, self._own(config)))
        # The keys of chunks and KV are made of the request's id, which may be used again.
        self._inner.consumes = True

    @classmethod
    def _own(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return dict(config)

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: Any
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """See `OmniConnector.put`; an object is what vLLM-Omni's serializer takes."""
        if not isinstance(data, bytes | bytearray | memoryview):
            try:
                serialized = self.serialize_obj(data)
            except Exception as error:  # it raises what msgspec, numpy and torch do
                raise TypeError(f"{misfit(data, self._refuses)} cannot be sent: {error}") from error
            data = Pieces([_SERIALIZED, serialized])
        return self._inner.put(from_stage, to_stage, put_key, data)

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """See `OmniConnector.get`."""
        return self._read(
            get_key, self._inner.get(from_stage, to_stage, get_key, self._trusted(metadata))
        )

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """See `OmniConnector.get_with_deadline`."""
        found = self._inner.get_with_deadline(
            from_stage, to_stage, get_key, self._trusted(metadata), deadline=deadline
        )
        return self._read(get_key, found)

    def abandon_get(self, get_key: str) -> None:
        """See `OmniConnector.abandon_get`."""
        self._inner.abandon_get(get_key)

    def reap_consumed(self) -> None:
        """See `OmniConnector.reap_consumed`."""
        self._inner.reap_consumed()

    def cleanup(self, request_id: str) -> None:
        """See `OmniConnector.cleanup`."""
        self._inner.cleanup(request_id)

    def health(self) -> dict[str, Any]:
        """See `OmniConnector.health`."""
        return self._inner.health()

    def close(self) -> None:
        """Free what was put. Idempotent."""
        if self._inner is not None:
            self._inner.close()

    def _trusted(self, metadata: Any) -> Any:
        return metadata

    def _refuses(self, value: object) -> bool:
        with suppress(Exception):  # as in `put`
            self.serialize_obj(value)
            return False
        return True

    def _read(self, get_key: str, found: tuple[Any, int] | None) -> tuple[Any, int] | None:
        if found is None:
            return None
        data, size = found
        if not isinstance(data, memoryview):
            return data, size
        if bytes(data[: len(_SERIALIZED)]) != _SERIALIZED:
            return bytes(data), size
        try:
            return self.deserialize_obj(data[len(_SERIALIZED) :]), size
        except Exception:
            # vLLM-Omni's serializer may raise anything on bytes that it has not made.
            logger.warning("The object under %r cannot be deserialized", get_key, exc_info=True)
            return None


class OmniSharedMemoryConnector(_Adapter):
    """`SharedMemoryConnector` of this package, for vLLM-Omni."""

    _name = SHARED_MEMORY


class OmniMooncakeStoreConnector(_Adapter):
    """`MooncakeStoreConnector` of this package, for vLLM-Omni."""

    _name = MOONCAKE_STORE


class OmniMooncakeTransferEngineConnector(_Adapter):
    """`MooncakeTransferEngineConnector` of this package, for vLLM-Omni's stages.

    It begins to listen with the first `put`, at the port by which vLLM-Omni's orchestrator names
    this sender to receivers: one for what a stage forwards, another for its KV. vLLM-Omni gives the
    connectors of what it forwards a `stage_id`, and those of KV none. A receiver that is told of no
    sender asks at `sender_host`, by default this host, at the port of the stage before.
    """

    _name = MOONCAKE_ENGINE

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._forwards = "stage_id" in config
        self._base = configured_port(config.get("zmq_port", ENGINE_PORT))
        self._listens = False
        sender = stage_number(config.get("from_stage", self.stage_id - 1))
        if self._forwards and self._base and 0 <= sender != self.stage_id:
            host = config.get("sender_host") or self._engine.host
            port = config.get("sender_zmq_port") or self._port_of(sender)
            self._engine.update_sender_info(host, port)

    @classmethod
    def _own(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # Until the first `put` both sides are as receivers.
        own = {key: value for key, value in super()._own(config).items() if key != "zmq_port"}
        return own | {"role": "receiver"}

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: Any
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """See `OmniConnector.put`."""
        if not self._listens:
            try:
                self._listen(stage_number(from_stage))
            except OmniError as error:
                logger.warning("put of %r failed: %s", put_key, error)
                return False, 0, None
        return super().put(from_stage, to_stage, put_key, data)

    def update_sender_info(
        self, sender_host: str, sender_zmq_port: int, sender_rank: int | None = None
    ) -> None:
        """See `MooncakeTransferEngineConnector.update_sender_info`."""
        self._engine.update_sender_info(sender_host, sender_zmq_port, sender_rank)

    @property
    def _engine(self) -> Any:
        return self._inner

    def _listen(self, stage: int) -> None:
        self._engine.listen(self._base and self._port_of(stage))
        self._listens = True

    def _port_of(self, stage: int) -> int:
        purpose = "request_forwarding" if self._forwards else "kv_transfer"
        port: int = compute_connector_zmq_port(
            self._base,
            purpose=purpose,
            from_stage=stage,
            local_rank=local_rank(),
            replica_id=replica_id(),
        )
        return port

    def _trusted(self, metadata: Any) -> Any:
        # It comes from the orchestrator, which says whom to ask for a request.
        host = metadata.get("source_host") if isinstance(metadata, Mapping) else None
        if isinstance(host, str):
            try:
                self._engine.allow_sender(host)
            except ValueError as error:
                logger.warning("No sender is at %r: %s", host, error)
        return metadata


def register() -> None:
    """Make our connectors known to vLLM-Omni, and its to our manager. Idempotent."""
    theirs = OmniConnectorFactory.list_registered_connectors()
    for adapter in (
        OmniSharedMemoryConnector,
        OmniMooncakeStoreConnector,
        OmniMooncakeTransferEngineConnector,
    ):
        if adapter.__name__ not in theirs:
            OmniConnectorFactory.register_connector(adapter.__name__, adapter)
    known = OurFactory.list_registered_connectors()
    for name in theirs:
        if not name.startswith("Omni") and f"vllm_omni.{name}" not in known:
            OurFactory.register_connector(f"vllm_omni.{name}", functools.partial(_theirs, name))


def _theirs(name: str, extra: dict[str, Any]) -> Any:
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec as TheirSpec

    return OmniConnectorFactory.create_connector(TheirSpec(name, extra))
