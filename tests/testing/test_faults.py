# SPDX-License-Identifier: Apache-2.0
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_connector.errors import ChecksumError, PeerUnreachableError, StaleSlotError
from omni_connector.memory.arena import Arena
from omni_connector.objects.base import OmniConnector
from omni_connector.testing import FaultyConnector
from omni_connector.testing.conformance import TransportConformance, publish
from omni_connector.transports.base import Endpoint
from omni_connector.transports.shm import SharedMemoryConnector


class TestWithoutFaults(TransportConformance):
    object_slot_bytes = 16384
    object_slots = 16

    def connect(self, place: Path) -> OmniConnector:
        return FaultyConnector(
            SharedMemoryConnector(
                folder=place,
                object_slot_bytes=self.object_slot_bytes,
                object_slots=self.object_slots,
            )
        )


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(4, 4096) as arena:
        publish(arena, 1, 5, b"content")
        yield arena


@pytest.fixture
def connector() -> Iterator[FaultyConnector]:
    with (
        tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as place,
        FaultyConnector(SharedMemoryConnector(folder=Path(place))) as connector,
    ):
        yield connector


@pytest.fixture
def endpoint(connector: FaultyConnector, arena: Arena) -> Endpoint:
    return connector.export(arena, "name")


def test_fault_strikes_when_told_and_as_often(
    connector: FaultyConnector, endpoint: Endpoint
) -> None:
    connector.fail("attach", PeerUnreachableError("gone"), after=1, times=2)
    outcomes = []
    for _ in range(5):
        try:
            connector.attach(endpoint, timeout=5).close()
            outcomes.append("attached")
        except PeerUnreachableError:
            outcomes.append("failed")
    assert outcomes == ["attached", "failed", "failed", "attached", "attached"]


def test_fault_can_last_until_healed(connector: FaultyConnector) -> None:
    connector.fail("store_object", PeerUnreachableError("gone"), times=None)
    assert [connector.put("0", "1", "k", 1)[0] for _ in range(3)] == [False] * 3
    connector.heal()
    assert connector.put("0", "1", "k", 1)[0]


def test_slot_can_go_stale_between_two_looks(
    connector: FaultyConnector, endpoint: Endpoint
) -> None:
    with connector.attach(endpoint, timeout=5) as remote:
        connector.fail("verify", StaleSlotError("reused"), after=1)
        with pytest.raises(StaleSlotError):
            remote.read(1, 5)
        assert remote.read(1, 5).tobytes() == b"content"


def test_flipped_bit_is_seen_both_ways_and_healed(
    connector: FaultyConnector, endpoint: Endpoint
) -> None:
    with connector.attach(endpoint, timeout=5) as remote:
        connector.flip(1, offset=2)
        with pytest.raises(ChecksumError):
            remote.read(1, 5)
        assert remote.slots[1, :7].tobytes() == b"cootent"
        assert not remote.slots.flags.writeable
        row = np.zeros((1, 7), np.uint8)
        remote.read_into([1], row)
        assert row.tobytes() == b"cootent"
        connector.heal()
        assert remote.read(1, 5).tobytes() == b"content"


def test_partitioned_peer_looks_dead(connector: FaultyConnector, endpoint: Endpoint) -> None:
    with connector.attach(endpoint, timeout=5) as remote:
        connector.partition()
        assert not remote.alive
        connector.heal()
        assert remote.alive
