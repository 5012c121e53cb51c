# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_connector.testing.conformance import StoreConformance
from omni_connector.transports.base import OmniConnector
from omni_connector.transports.mooncake_head import INLINE_BYTES
from omni_connector.transports.mooncake_store import MooncakeStoreConnector

from .masters import Master


@pytest.fixture(scope="module")
def keeper(master: Master) -> Iterator[MooncakeStoreConnector]:
    """Lends memory, and keeps the client that connectors of this process share."""
    with MooncakeStoreConnector(master=master.address) as connector:
        yield connector


class TestMooncakeStoreConformance(StoreConformance):
    object_slot_bytes = INLINE_BYTES
    object_slots = None

    @pytest.fixture(autouse=True)
    def _master(self, master: Master, keeper: MooncakeStoreConnector) -> None:
        self.address = master.address

    def connect(self, place: Path) -> OmniConnector:
        return MooncakeStoreConnector(master=self.address, namespace=place.name)
