# SPDX-License-Identifier: Apache-2.0
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.errors import ChecksumError, PeerUnreachableError, StaleSlotError
from omni_connector.testing import FaultyTransport
from omni_connector.testing.conformance import TransportConformance, publish, read
from omni_connector.transports.base import Endpoint
from omni_connector.transports.shm import SharedMemoryTransport


class TestWithoutFaults(TransportConformance):
    def connect(self, place: Path) -> FaultyTransport:
        return FaultyTransport(SharedMemoryTransport(folder=place))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(4, 4096) as arena:
        publish(arena, 1, 5, b"content")
        yield arena


@pytest.fixture
def connector() -> Iterator[FaultyTransport]:
    with (
        tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as place,
        FaultyTransport(SharedMemoryTransport(folder=Path(place))) as connector,
    ):
        yield connector


@pytest.fixture
def endpoint(connector: FaultyTransport, arena: Arena) -> Endpoint:
    return connector.export(arena, "name")


def test_fault_strikes_when_told_and_as_often(
    connector: FaultyTransport, endpoint: Endpoint
) -> None:
    connector.fail("attach", PeerUnreachableError("gone"), after=1, times=2)
    outcomes = []
    for _ in range(5):
        try:
            connector.attach(endpoint, timeout=60).close()
            outcomes.append("attached")
        except PeerUnreachableError:
            outcomes.append("failed")
    assert outcomes == ["attached", "failed", "failed", "attached", "attached"]


def test_fault_can_last_until_healed(connector: FaultyTransport, endpoint: Endpoint) -> None:
    connector.fail("attach", PeerUnreachableError("gone"), times=None)
    for _ in range(3):
        with pytest.raises(PeerUnreachableError):
            connector.attach(endpoint, timeout=60)
    connector.heal()
    connector.attach(endpoint, timeout=60).close()


def test_slot_can_go_stale_between_two_looks(
    connector: FaultyTransport, endpoint: Endpoint
) -> None:
    with connector.attach(endpoint, timeout=60) as remote:
        connector.fail("verify", StaleSlotError("reused"), after=1)
        with pytest.raises(StaleSlotError):
            read(remote, 1, 5)
        assert read(remote, 1, 5).tobytes() == b"content"


def test_flipped_bit_is_seen_both_ways_and_healed(
    connector: FaultyTransport, endpoint: Endpoint
) -> None:
    with connector.attach(endpoint, timeout=60) as remote:
        connector.flip(1, offset=2)
        with pytest.raises(ChecksumError):
            read(remote, 1, 5)
        assert remote.slots[1, :7].tobytes() == b"cootent"
        assert not remote.slots.flags.writeable
        row = np.zeros((1, 7), np.uint8)
        remote.read_into([1], row)
        assert row.tobytes() == b"cootent"
        connector.heal()
        assert read(remote, 1, 5).tobytes() == b"content"


def test_partitioned_peer_looks_dead(connector: FaultyTransport, endpoint: Endpoint) -> None:
    with connector.attach(endpoint, timeout=60) as remote:
        connector.partition()
        assert not remote.alive
        connector.heal()
        assert remote.alive
