# SPDX-License-Identifier: Apache-2.0
"""When Mooncake's master counts as not answering; the library is a stand-in."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.errors import PeerUnreachableError
from omni_connector.transports.mooncake.transport import client as mooncake_client
from omni_connector.transports.mooncake.transport.client import ClientSettings, StoreClient


class Store:
    """A client of a master that answers at once, but to calls for `never` not before the end."""

    ends = threading.Event()

    def setup(self, *settings: Any) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        if keys == ["never"]:
            self.ends.wait(60)
        return [1] * len(keys)

    def close(self) -> int:
        return 0


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreClient]:
    module = SimpleNamespace(MooncakeDistributedStore=Store)
    monkeypatch.setattr(mooncake_client, "store_module", lambda family: module)
    monkeypatch.setattr(mooncake_client, "_reach", lambda master: "127.0.0.1")
    monkeypatch.setattr(Store, "ends", threading.Event())
    client = StoreClient.open(ClientSettings(master="127.0.0.1:1"))
    client.wait(60)
    yield client
    Store.ends.set()
    client.close()


def asked(client: StoreClient, seconds: float) -> None:
    with pytest.raises(PeerUnreachableError):
        client.call(lambda store: store.batch_is_exist(["never"]), time.monotonic() + seconds)


@pytest.mark.parametrize("left", [-1.0, 0.0, 0.02])
def test_a_call_with_hardly_any_time_left_says_nothing_of_the_master(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch, left: float
) -> None:
    backed_off: list[str] = []
    monkeypatch.setattr(client, "_back_off", backed_off.append)
    asked(client, left)
    assert not backed_off


def test_a_call_that_does_not_end_in_some_time_does(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    backed_off: list[str] = []
    monkeypatch.setattr(client, "_back_off", backed_off.append)
    # By a clock that stands the wait is as long as asked for, however late it begins.
    monkeypatch.setattr(client, "_clock", lambda: 0.0)
    with pytest.raises(PeerUnreachableError):
        client.call(lambda store: store.batch_is_exist(["never"]), 0.15)
    assert len(backed_off) == 1
