# SPDX-License-Identifier: Apache-2.0
"""Objects: whole values under keys, from one stage to another; `OmniConnector`.

In come tensors, arrays and what msgpack knows; out go metadata, and on the other side the same
values in memory of their own, verified.
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
