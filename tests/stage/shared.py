# SPDX-License-Identifier: Apache-2.0
"""Managers over shared memory, from stage 0 to stage 1."""

import time
from collections.abc import Callable
from typing import Any

from omni_connector.stage.config import OmniKVCacheConfig
from omni_connector.stage.manager import OmniKVTransferManager

from ..patience import PATIENCE_S


def shared_manager(
    *,
    extra: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **config: Any,
) -> OmniKVTransferManager:
    """A manager that sends and receives over `SharedMemoryConnector`.

    Args:
        extra: settings of the connector.
        clock: the manager's.
        config: fields of the configuration.
    """
    settings = {
        "connector_config": {"type": "SharedMemoryConnector", **(extra or {})},
        "from_stage": "0",
        "to_stage": "1",
        "stage_id": 1,
        "need_send_cache": True,
        "need_recv_cache": True,
        "recv_timeout": PATIENCE_S,
    }
    return OmniKVTransferManager(OmniKVCacheConfig(**settings | config), clock=clock)
