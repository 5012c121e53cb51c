# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Iterator

import pytest

from omni_connector.errors import TransportError
from omni_connector.transports.bounded import CallThreads

WAIT_S = 20.0


@pytest.fixture
def threads() -> Iterator[CallThreads]:
    made = CallThreads("omni-test", 2)
    yield made
    made.close()


def test_calls_answer_or_raise(threads: CallThreads) -> None:
    def fail() -> int:
        raise KeyError("key")

    assert threads.start(lambda: 5).result(WAIT_S) == 5
    with pytest.raises(KeyError, match="key"):
        threads.start(fail).result(WAIT_S)
    assert threads.start(lambda: 6).result(WAIT_S) == 6
    assert threads.running == 0


def test_calls_that_do_not_end_are_limited(threads: CallThreads) -> None:
    go_on = threading.Event()
    stuck = [threads.start(lambda: go_on.wait(WAIT_S)) for _ in range(2)]
    assert threads.running == 2
    with pytest.raises(TransportError, match="2 calls are under way"):
        threads.start(lambda: None)
    go_on.set()
    assert [each.result(WAIT_S) for each in stuck] == [True, True]
    assert threads.start(lambda: 7).result(WAIT_S) == 7


def test_closed_threads_end_and_take_nothing(threads: CallThreads) -> None:
    ended = threads.start(threading.current_thread)
    thread = ended.result(WAIT_S)
    threads.close()
    threads.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(TransportError, match="closed"):
        threads.start(lambda: None)
