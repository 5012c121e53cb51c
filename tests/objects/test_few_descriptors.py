# SPDX-License-Identifier: Apache-2.0
"""Objects where descriptors run out: errors are logged as all are, and nothing stays behind."""

import contextlib
import logging
import os
from pathlib import Path

import pytest
import zmq

from omni_connector.errors import TransportError
from omni_connector.net.keys import ClusterKey
from omni_connector.net.peers import HostPort
from omni_connector.objects.mooncake import ObjectServer
from omni_connector.objects.peer import Missing
from omni_connector.objects.shm import SharedMemoryConnector
from tests.patience import wait_until

from ..descriptors import memfds, spare

ENOUGH = 20
WAIT_S = 20.0


@pytest.mark.parametrize("count", range(10))
def test_a_put_without_descriptors_fails_in_words_and_leaves_nothing(
    place: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = memfds()
    with SharedMemoryConnector(folder=place, geometry=(4, 4096)) as connector:
        with spare(count):
            done = [connector.put("0", "1", "key", b"object")[0] for _ in range(3)]
        if not all(done):
            assert memfds() <= before
            assert "raise `ulimit -n`" in caplog.text
        assert connector.put("0", "1", "key", b"object")[0]
        assert connector.get("0", "1", "key") == (b"object", 6)
    assert memfds() <= before


def test_with_enough_descriptors_a_put_works(place: Path) -> None:
    connector = SharedMemoryConnector(folder=place, geometry=(4, 4096))
    with connector, spare(ENOUGH):
        assert connector.put("0", "1", "key", b"object")[0]


@pytest.mark.parametrize("count", range(10))
def test_a_get_without_descriptors_finds_nothing_and_leaves_nothing(
    place: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with SharedMemoryConnector(folder=place, geometry=(4, 4096)) as sender:
        assert sender.put("0", "1", "key", b"object")[0]
        before = memfds()
        with SharedMemoryConnector(folder=place, object_timeout=0.5) as receiver:
            with spare(count):
                found = receiver.get("0", "1", "key")
            assert found in (None, (b"object", 6))
        assert found or caplog.text
        wait_until(lambda: memfds() <= before)  # the sender's thread closes what it has sent


@pytest.mark.parametrize("count", range(16))
def test_an_object_server_without_descriptors_is_an_error_of_ours(count: int) -> None:
    key = ClusterKey(*zmq.curve_keypair())
    before = len(os.listdir("/proc/self/fd"))
    with spare(count), contextlib.suppress(TransportError):
        ObjectServer(HostPort("127.0.0.1", 0), key, lambda _: Missing(b""), lambda _: None).close()
    assert len(os.listdir("/proc/self/fd")) <= before
