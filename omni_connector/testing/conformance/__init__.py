# SPDX-License-Identifier: Apache-2.0
"""`TransportConformance`: the tests that every transport has to pass.

Stores of objects (`OmniConnector.is_store`), which export no arenas, pass `StoreConformance`.

class TestMyTransport(TransportConformance):
    object_slot_bytes = 16384
    object_slots = 16

    def connect(self, place: Path) -> OmniConnector:
        return MyTransport(folder=place, ...)
"""

from omni_connector.testing.conformance.arenas import ArenaConformance
from omni_connector.testing.conformance.base import publish
from omni_connector.testing.conformance.model import ObjectModelConformance
from omni_connector.testing.conformance.objects import ObjectConformance
from omni_connector.testing.conformance.peers import PeerConformance

__all__ = ["StoreConformance", "TransportConformance", "publish"]


class TransportConformance(
    ArenaConformance, PeerConformance, ObjectConformance, ObjectModelConformance
):
    """Subclass it in a test module, under a name that pytest collects.

    Attributes:
        object_slot_bytes: granularity in which objects take room.
        object_slots: how many of those a connector made by `connect` has; None where a store
            behind it sets no limit that a test could reach.
    """


class StoreConformance(ObjectConformance, ObjectModelConformance):
    """The part of `TransportConformance` that is about objects, with the same attributes."""
