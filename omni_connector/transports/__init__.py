# SPDX-License-Identifier: Apache-2.0
"""How an arena is exported to peers and read by them: `OmniConnector` and its transports."""

from omni_connector.transports.arena import Arena, ArenaView, SlotHeader, SlotState
from omni_connector.transports.base import Endpoint, ObjectKey, OmniConnector, RemoteArena
from omni_connector.transports.registry import (
    create_transport,
    register_transport,
    transport_class,
    transport_names,
)

__all__ = [
    "Arena",
    "ArenaView",
    "Endpoint",
    "ObjectKey",
    "OmniConnector",
    "RemoteArena",
    "SlotHeader",
    "SlotState",
    "create_transport",
    "register_transport",
    "transport_class",
    "transport_names",
]
