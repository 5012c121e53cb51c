# SPDX-License-Identifier: Apache-2.0
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from omni_connector.errors import TransportError
from omni_connector.runtime.blocking_calls import CallThreads

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


def test_calls_that_do_not_end_are_limited(threads: CallThreads) -> None:
    go_on = threading.Event()
    stuck = [threads.start(lambda: go_on.wait(WAIT_S)) for _ in range(2)]
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


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_the_end_comes_once_after_the_last_call(calls: int) -> None:
    go_on, ended = threading.Event(), threading.Semaphore(0)
    threads = CallThreads("omni-test", 2, ended.release)
    under_way = [threads.start(lambda: go_on.wait(WAIT_S)) for _ in range(calls)]
    threads.close()
    threads.close()
    assert ended.acquire(blocking=False) == (not calls)
    go_on.set()
    for each in under_way:
        assert each.result(WAIT_S)
    assert not calls or ended.acquire(timeout=WAIT_S)
    assert not ended.acquire(blocking=False)


def test_a_system_without_threads_to_spare_refuses_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = CallThreads("omni-test", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        for _ in range(2):
            with pytest.raises(TransportError, match="can't start new thread"):
                threads.start(lambda: None)
    assert threads.start(lambda: 8).result(WAIT_S) == 8
    threads.close()


def test_a_forked_process_makes_calls_on_threads_of_its_own(threads: CallThreads) -> None:
    assert threads.start(lambda: 9).result(WAIT_S) == 9  # its thread rests now
    with threads._lock:
        child = os.fork()
        if not child:
            signal.alarm(int(WAIT_S))  # it ends if it hangs
            code = 1
            try:
                code = threads.start(lambda: 0).result(WAIT_S)
                threads.close()
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert threads.start(lambda: 10).result(WAIT_S) == 10
