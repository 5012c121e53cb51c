# SPDX-License-Identifier: Apache-2.0
"""Transports let peers read each other's arenas, by mapping them or over the network.

An engine exports its arena and gets an endpoint, which it sends to peers. A reader attaches the
arena at a peer's endpoint and gets the peer's slots, which it checks.
"""

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.format import SlotHeader, SlotState
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
