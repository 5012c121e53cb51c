# SPDX-License-Identifier: Apache-2.0
"""How peers read each other's arenas: by mapping them, or over the network.

In goes an arena to export, or the endpoint that a peer has sent; out comes an endpoint, or the
peer's slots, which the reader checks.
"""

from omni_connector.memory.arena import Arena, ArenaView
from omni_connector.memory.arena_format import SlotHeader, SlotState
from omni_connector.transports.base import ArenaTransport, Endpoint, RemoteArena, Site
from omni_connector.transports.choice import register_transport, transport_class, transport_names

__all__ = [
    "Arena",
    "ArenaTransport",
    "ArenaView",
    "Endpoint",
    "RemoteArena",
    "Site",
    "SlotHeader",
    "SlotState",
    "register_transport",
    "transport_class",
    "transport_names",
]
