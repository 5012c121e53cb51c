# SPDX-License-Identifier: Apache-2.0
"""Which copier a KV cache needs."""

from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.cuda import CudaStream
from omni_connector.copy.host import CpuCopier
from omni_connector.copy.host_rows import Sharing
from omni_connector.copy.staged import StagedCopier
from omni_connector.errors import LayoutError
from omni_connector.kv.canonical import CanonicalKVCaches, SlotLayout


def make_copier(
    canonical: CanonicalKVCaches, layout: SlotLayout, helpers: Sharing | None = None
) -> BlockCopier:
    """The copier for the device that the KV cache lies on; `helpers` share in what the host does.

    Raises:
        LayoutError: a device that is neither a CPU nor a CUDA device.
    """
    device = canonical.device
    if device.type == "cpu":
        return CpuCopier(canonical, layout, helpers)
    if device.type == "cuda":
        return StagedCopier(canonical, layout, CudaStream(device), helpers)
    raise LayoutError(f"a KV cache on {device} cannot be copied: expected cpu or cuda")
