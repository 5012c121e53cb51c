# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from omni_connector.testing.conformance import TransportConformance
from omni_connector.transports.base import OmniConnector
from omni_connector.transports.shm import SharedMemoryConnector


class TestSharedMemoryConformance(TransportConformance):
    object_slot_bytes = 16384
    object_slots = 16

    def connect(self, place: Path) -> OmniConnector:
        return SharedMemoryConnector(
            folder=place, object_slot_bytes=self.object_slot_bytes, object_slots=self.object_slots
        )
