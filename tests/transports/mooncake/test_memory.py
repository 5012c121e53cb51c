# SPDX-License-Identifier: Apache-2.0
"""Who may have memory when; the client only notes what is registered with it."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from omni_connector.arena.pool import QUARANTINE_S, pages
from omni_connector.errors import TransportError
from omni_connector.testing import FakeClock
from omni_connector.transports.mooncake.transport.client import OK, TRANSFER_FAILED
from omni_connector.transports.mooncake.transport.memory import Staging

SIZE = 8192


class Client:
    def __init__(self) -> None:
        self.registered: set[int] = set()

    def register(self, memory: Any) -> None:
        self.registered.add(memory.ctypes.data)

    def unregister(self, memory: Any) -> None:
        self.registered.remove(memory.ctypes.data)

    def start(self, call: Any) -> Any:
        raise TransportError("the connector is closed")


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def staging(client: Client, clock: FakeClock) -> Staging:
    return Staging(client, 2 * SIZE, clock)


def ended(code: int) -> "Future[list[int]]":
    future: Future[list[int]] = Future()
    future.set_result([OK, code])
    return future


def failed() -> "Future[list[int]]":
    future: Future[list[int]] = Future()
    future.set_exception(RuntimeError("Mooncake failed"))
    return future


def test_a_buffer_is_used_again_once_its_call_has_ended(staging: Staging) -> None:
    first = staging.take(SIZE)
    assert (first.dtype, first.shape) == (np.uint8, (SIZE,))
    future: Future[list[int]] = Future()
    staging.settle(first, future)
    second = staging.take(SIZE)
    assert second.ctypes.data != first.ctypes.data
    future.set_result([OK])
    assert staging.take(SIZE).ctypes.data == first.ctypes.data


def test_no_more_is_kept_than_was_asked_for(staging: Staging, client: Client) -> None:
    for memory in [staging.take(SIZE) for _ in range(5)]:
        staging.settle(memory, ended(OK))
    assert len(client.registered) == 2
    staging.keep_spare(0)
    assert client.registered == set()


@pytest.mark.parametrize("future", [ended(TRANSFER_FAILED), failed()], ids=["failed", "raised"])
def test_memory_of_a_failed_call_is_nobodys_for_a_while(
    staging: Staging, client: Client, clock: FakeClock, future: "Future[list[int]]"
) -> None:
    memory = staging.take(SIZE)
    staging.settle(memory, future)
    clock.advance(QUARANTINE_S - 1)
    assert staging.take(SIZE).ctypes.data != memory.ctypes.data
    assert memory.ctypes.data in client.registered
    clock.advance(1)
    staging.check()
    assert memory.ctypes.data not in client.registered


def test_too_much_memory_in_quarantine_stops_everything(staging: Staging, clock: FakeClock) -> None:
    memory = pages(512 << 20)
    staging._client.register(memory)
    staging.retire(memory, [ended(OK), ended(TRANSFER_FAILED)])
    with pytest.raises(TransportError, match="may still write"):
        staging.take(SIZE)
    clock.advance(QUARANTINE_S)
    staging.take(SIZE)


def test_retired_memory_goes_when_all_of_its_calls_have_ended(
    staging: Staging, client: Client
) -> None:
    memory = staging.take(SIZE)
    calls: list[Future[list[int]]] = [Future(), Future()]
    staging.retire(memory, calls)
    calls[1].set_result([OK])
    assert memory.ctypes.data in client.registered
    calls[0].set_result([-704])
    assert client.registered == set()


def test_memory_of_a_call_that_did_not_start_is_given_back(
    staging: Staging, client: Client
) -> None:
    memory = staging.take(SIZE)
    with pytest.raises(TransportError, match="closed"):
        staging.start(memory, lambda store: [OK])
    assert staging.take(SIZE).ctypes.data == memory.ctypes.data
    assert client.registered == {memory.ctypes.data}
