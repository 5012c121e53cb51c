# SPDX-License-Identifier: Apache-2.0
"""How an arena is exported to peers and read by them: `OmniConnector` and its transports."""

from omni_connector.transports.arena import Arena
from omni_connector.transports.base import Endpoint, OmniConnector, RemoteArena


def create_transport(name: str, *, namespace: str) -> OmniConnector:
    """The transport of the configuration's `transport` key."""
    from omni_connector.transports.shm import SharedMemoryConnector

    return SharedMemoryConnector(namespace=namespace)


__all__ = ["Arena", "Endpoint", "OmniConnector", "RemoteArena", "create_transport"]
