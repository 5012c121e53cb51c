# SPDX-License-Identifier: Apache-2.0
"""One vLLM plugin that moves KV cache between engines: one install, one flag, no daemon.

The names below are imported on first use, so that `import omni_connector` loads neither vLLM
nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_connector.config import OmniConfig
    from omni_connector.errors import (
        ArenaFullError,
        ChecksumError,
        ConfigError,
        IncompatiblePeerError,
        IntegrityError,
        LayoutError,
        MissingDependencyError,
        OmniError,
        PeerRefusedError,
        PeerUnreachableError,
        ProtocolError,
        StaleSlotError,
        TransportError,
        UnsupportedVersionError,
    )
    from omni_connector.objects.base import OmniConnector
    from omni_connector.objects.codec import Pieces
    from omni_connector.objects.factory import ConnectorSpec, OmniConnectorFactory
    from omni_connector.objects.transfer_config import load_omni_transfer_config
    from omni_connector.stage.config import OmniKVCacheConfig
    from omni_connector.stage.manager import OmniKVTransferManager
    from omni_connector.stage.payload import KVCacheTransferData
    from omni_connector.vllm_v1.connector import OmniKVConnector

__version__ = "0.2.0"

__all__ = [
    "ArenaFullError",
    "ChecksumError",
    "ConfigError",
    "ConnectorSpec",
    "IncompatiblePeerError",
    "IntegrityError",
    "KVCacheTransferData",
    "LayoutError",
    "MissingDependencyError",
    "OmniConfig",
    "OmniConnector",
    "OmniConnectorFactory",
    "OmniError",
    "OmniKVCacheConfig",
    "OmniKVConnector",
    "OmniKVTransferManager",
    "PeerRefusedError",
    "PeerUnreachableError",
    "Pieces",
    "ProtocolError",
    "StaleSlotError",
    "TransportError",
    "UnsupportedVersionError",
    "__version__",
    "load_omni_transfer_config",
]

_HOMES = {
    "ConnectorSpec": "omni_connector.objects.factory",
    "KVCacheTransferData": "omni_connector.stage.payload",
    "OmniConfig": "omni_connector.config",
    "OmniConnector": "omni_connector.objects.base",
    "OmniConnectorFactory": "omni_connector.objects.factory",
    "OmniKVCacheConfig": "omni_connector.stage.config",
    "OmniKVConnector": "omni_connector.vllm_v1.connector",
    "OmniKVTransferManager": "omni_connector.stage.manager",
    "Pieces": "omni_connector.objects.codec",
    "load_omni_transfer_config": "omni_connector.objects.transfer_config",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES.get(name, "omni_connector.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
