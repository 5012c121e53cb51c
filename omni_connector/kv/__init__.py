# SPDX-License-Identifier: Apache-2.0
"""What a KV cache is: its canonical form, the slots that hold its blocks, and copying.

The names are imported on first use: those who need only spans do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_connector.kv.canonical import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GroupSpec,
        LayerSpec,
        SlotLayout,
        canonicalize,
        canonicalize_cross_layers,
    )
    from omni_connector.kv.convert import SlotConverter
    from omni_connector.kv.copying import BlockCopier, BlockCopy, CpuCopier, make_copier
    from omni_connector.kv.heads import HeadSlice, head_sources
    from omni_connector.kv.spans import BlockSpans, GroupSpan, expand
    from omni_connector.kv.staging import StagedCopier

_HOMES = {
    "BlockCopier": "copying",
    "BlockCopy": "copying",
    "BlockSpans": "spans",
    "CanonicalKVCacheRef": "canonical",
    "CanonicalKVCacheTensor": "canonical",
    "CanonicalKVCaches": "canonical",
    "CpuCopier": "copying",
    "GroupSpan": "spans",
    "GroupSpec": "canonical",
    "HeadSlice": "heads",
    "LayerSpec": "canonical",
    "SlotConverter": "convert",
    "SlotLayout": "canonical",
    "StagedCopier": "staging",
    "canonicalize": "canonical",
    "canonicalize_cross_layers": "canonical",
    "expand": "spans",
    "head_sources": "heads",
    "make_copier": "copying",
}

__all__ = [
    "BlockCopier",
    "BlockCopy",
    "BlockSpans",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "CpuCopier",
    "GroupSpan",
    "GroupSpec",
    "HeadSlice",
    "LayerSpec",
    "SlotConverter",
    "SlotLayout",
    "StagedCopier",
    "canonicalize",
    "canonicalize_cross_layers",
    "expand",
    "head_sources",
    "make_copier",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
