# SPDX-License-Identifier: Apache-2.0
"""The tests that every transport has to pass, and those for what passes objects.

Subclass one in a test module, under a name that pytest collects:

class TestMyTransport(TransportConformance):
    def connect(self, place: Path) -> ArenaTransport:
        return MyTransport(folder=place, ...)

class TestMyConnector(ObjectConformance):
    object_slot_bytes = 16384
    object_slots = 16

    def connect(self, place: Path) -> OmniConnector:
        return MyConnector(folder=place, ...)
"""

from omni_connector.testing.conformance.arenas import ArenaConformance
from omni_connector.testing.conformance.model import ObjectModel
from omni_connector.testing.conformance.objects import ObjectVerbs
from omni_connector.testing.conformance.peers import PeerConformance
from omni_connector.testing.conformance.slots import publish, read

__all__ = ["ObjectConformance", "StoreConformance", "TransportConformance", "publish", "read"]


class TransportConformance(ArenaConformance, PeerConformance):
    """What an `ArenaTransport` has to do: hand arenas out, read them, notice every change."""


class ObjectConformance(ObjectVerbs, ObjectModel):
    """What an `OmniConnector` has to do: pass objects whole, keep them, free them."""


class StoreConformance(ObjectConformance):
    """The same of a store, whose objects outlive who put them."""
