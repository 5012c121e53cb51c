# SPDX-License-Identifier: Apache-2.0
"""Registers our shared-memory connector with vLLM-Omni, so that its pipelines can name it.

vLLM-Omni loads this through its entry-point group `vllm_omni.general_plugins`, in each of its
processes. A pipeline then configures `{"name": "OmniSharedMemoryConnector", "extra": {...}}`.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Final

from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

from omni_connector.objects.base import OmniConnector
from omni_connector.objects.factory import SHARED_MEMORY, ConnectorSpec, settings_of
from omni_connector.objects.factory import OmniConnectorFactory as OurFactory
from omni_connector.objects.shm import SharedMemoryConnector
from omni_connector.runtime.backoff import Backoff
from omni_connector.stage.link import LEAST_ASK_S

logger = logging.getLogger(__name__)

NAME: Final = "OmniSharedMemoryConnector"

_OURS: Final = frozenset(settings_of(SharedMemoryConnector).__struct_fields__)
_SERIALIZED: Final = "vllm_omni"
_FIRST_PAUSE_S: Final = 0.001
_LAST_PAUSE_S: Final = 0.05


class OmniSharedMemoryConnector(OmniConnectorBase):  # type: ignore[misc]
    """`SharedMemoryConnector` of this package behind vLLM-Omni's interface.

    Bytes travel as they are. Every other object passes through vLLM-Omni's serializer, which knows
    vLLM-Omni's types and does not pickle. What a stage outside vLLM-Omni has put arrives as it was
    put; packed KV arrives as bytes, which vLLM-Omni's manager reads.

    Args:
        config: `extra` of the pipeline's configuration. The settings of `SharedMemoryConnector`
            are taken from it; the others, which vLLM-Omni adds, are ignored.

    Raises:
        ConfigError: a setting of `SharedMemoryConnector` is ill-typed.
    """

    supports_raw_data = False
    # The base's `__del__` closes this, even if `__init__` has failed.
    _inner: OmniConnector = None  # type: ignore[assignment]

    def __init__(self, config: Mapping[str, Any]) -> None:
        own = {key: value for key, value in config.items() if key in _OURS}
        self._inner = OurFactory.create_connector(ConnectorSpec(SHARED_MEMORY, own))

    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: Any
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """See `OmniConnector.put`."""
        if not isinstance(data, bytes | bytearray | memoryview):
            data = {_SERIALIZED: self.serialize_obj(data)}
        return self._inner.put(from_stage, to_stage, put_key, data)

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """See `OmniConnector.get`."""
        return self._get(from_stage, to_stage, get_key, metadata, math.inf)

    def _get(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None,
        timeout: float,
    ) -> tuple[Any, int] | None:
        found = self._inner.get(from_stage, to_stage, get_key, metadata, timeout=timeout)
        if found is None:
            return None
        data, size = found
        if isinstance(data, memoryview):
            return bytes(data), size
        if not _is_serialized(data):
            return data, size
        try:
            return self.deserialize_obj(data[_SERIALIZED]), size
        except Exception:
            # vLLM-Omni's serializer may raise anything on bytes that it has not made.
            logger.warning("The object under %r cannot be deserialized", get_key, exc_info=True)
            return None

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """Call `get` until it finds the object, or `time.monotonic()` reaches `deadline`.

        The call that is under way then may take half a second more.
        """
        backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        while True:
            timeout = max(deadline - time.monotonic(), LEAST_ASK_S)
            found = self._get(from_stage, to_stage, get_key, metadata, timeout)
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            time.sleep(min(backoff.failed(), left))

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


def _is_serialized(data: object) -> bool:
    return (
        isinstance(data, dict)
        and data.keys() == {_SERIALIZED}
        and isinstance(data[_SERIALIZED], bytes)
    )


def register() -> None:
    """Make our connector known to vLLM-Omni. Idempotent."""
    if NAME not in OmniConnectorFactory.list_registered_connectors():
        OmniConnectorFactory.register_connector(NAME, OmniSharedMemoryConnector)
