# SPDX-License-Identifier: Apache-2.0
"""KV cache from one stage of a pipeline to the next: `OmniKVTransferManager`.

In come the KV blocks of finished requests; out go payloads in vLLM-Omni's format, over any
connector of `objects`. The receiving stage gets them back as tensors, checked.
"""

from omni_connector.stage.config import OmniKVCacheConfig
from omni_connector.stage.extract import LayerKV
from omni_connector.stage.manager import OmniKVTransferManager
from omni_connector.stage.payload import KVCacheTransferData

__all__ = [
    "KVCacheTransferData",
    "LayerKV",
    "OmniKVCacheConfig",
    "OmniKVTransferManager",
]
