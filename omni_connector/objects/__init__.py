# SPDX-License-Identifier: Apache-2.0
"""Objects: an `OmniConnector` passes whole values under keys from one stage to another.

A sender puts tensors, arrays and plain values, and gets metadata back. A receiver gets the same
values, verified, in memory of their own.
"""

from omni_connector.objects.base import ObjectKey, OmniConnector
from omni_connector.objects.codec import Pieces
from omni_connector.objects.factory import ConnectorSpec, OmniConnectorFactory
from omni_connector.objects.transfer_config import OmniTransferConfig, load_omni_transfer_config

__all__ = [
    "ConnectorSpec",
    "ObjectKey",
    "OmniConnector",
    "OmniConnectorFactory",
    "OmniTransferConfig",
    "Pieces",
    "load_omni_transfer_config",
]
