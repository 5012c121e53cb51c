# SPDX-License-Identifier: Apache-2.0
"""KV cache from one stage of a pipeline to the next: `OmniKVTransferManager`.

The names are imported on first use, so that importing this package does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_connector.stage.config import OmniKVCacheConfig
    from omni_connector.stage.distributed import ParallelGroups
    from omni_connector.stage.extract import KVLayout, LayerKV, extract_kv_cache
    from omni_connector.stage.link import TransferStats
    from omni_connector.stage.manager import OmniKVTransferManager
    from omni_connector.stage.payload import KVCacheTransferData

_HOMES = {
    "KVCacheTransferData": "payload",
    "KVLayout": "extract",
    "LayerKV": "extract",
    "OmniKVCacheConfig": "config",
    "OmniKVTransferManager": "manager",
    "ParallelGroups": "distributed",
    "TransferStats": "link",
    "extract_kv_cache": "extract",
}

__all__ = [
    "KVCacheTransferData",
    "KVLayout",
    "LayerKV",
    "OmniKVCacheConfig",
    "OmniKVTransferManager",
    "ParallelGroups",
    "TransferStats",
    "extract_kv_cache",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
