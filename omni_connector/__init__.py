# SPDX-License-Identifier: Apache-2.0
"""One vLLM plugin that moves KV cache between engines: one install, one flag, no daemon.

The names below are imported on first use, so that `import omni_connector` loads neither
vLLM nor torch.
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
    from omni_connector.transports.base import OmniConnector
    from omni_connector.vllm_v1.connector import OmniKVConnector

__version__ = "0.1.0"

__all__ = [
    "ArenaFullError",
    "ChecksumError",
    "ConfigError",
    "IncompatiblePeerError",
    "IntegrityError",
    "LayoutError",
    "MissingDependencyError",
    "OmniConfig",
    "OmniConnector",
    "OmniError",
    "OmniKVConnector",
    "PeerRefusedError",
    "PeerUnreachableError",
    "ProtocolError",
    "StaleSlotError",
    "TransportError",
    "UnsupportedVersionError",
    "__version__",
]

_HOMES = {
    "OmniConfig": "omni_connector.config",
    "OmniConnector": "omni_connector.transports.base",
    "OmniKVConnector": "omni_connector.vllm_v1.connector",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES.get(name, "omni_connector.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
