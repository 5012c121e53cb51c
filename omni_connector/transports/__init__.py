# SPDX-License-Identifier: Apache-2.0
"""How an arena is exported to peers and read by them, and objects passed: `OmniConnector`."""

from omni_connector.transports.arena import Arena, ArenaView
from omni_connector.transports.arena_format import SlotHeader, SlotState
from omni_connector.transports.base import Endpoint, ObjectKey, OmniConnector, RemoteArena
from omni_connector.transports.codec import Pieces
from omni_connector.transports.factory import ConnectorSpec, OmniConnectorFactory
from omni_connector.transports.registry import (
    create_transport,
    register_transport,
    transport_class,
    transport_names,
)
from omni_connector.transports.transfer_config import OmniTransferConfig, load_omni_transfer_config

__all__ = [
    "Arena",
    "ArenaView",
    "ConnectorSpec",
    "Endpoint",
    "ObjectKey",
    "OmniConnector",
    "OmniConnectorFactory",
    "OmniTransferConfig",
    "Pieces",
    "RemoteArena",
    "SlotHeader",
    "SlotState",
    "create_transport",
    "load_omni_transfer_config",
    "register_transport",
    "transport_class",
    "transport_names",
]
