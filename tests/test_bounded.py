# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Iterator

import pytest

from omni_connector.bounded import Call, CallThreads
from omni_connector.errors import TransportError

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


def test_a_call_that_is_not_waited_for_any_more_goes_on(threads: CallThreads) -> None:
    go_on, told = threading.Event(), threading.Event()
    call = threads.start(lambda: go_on.wait(WAIT_S))
    call.add_done_callback(lambda _: told.set())
    for timeout in (-1.0, 0.0, 0.01):
        with pytest.raises(TimeoutError):
            call.result(timeout)
        assert not call.wait(timeout)
    assert not told.is_set()
    go_on.set()
    assert told.wait(WAIT_S)
    assert call.done()
    assert call.result() is True
    assert call.exception() is None


def test_all_who_wait_for_a_call_are_woken() -> None:
    call: Call[int] = Call()
    found: list[int] = []
    waiting = [threading.Thread(target=lambda: found.append(call.result(WAIT_S))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    call.set_result(9)
    for thread in waiting:
        thread.join(WAIT_S)
    assert found == [9, 9, 9]


def test_what_follows_a_call_is_done_once_whether_it_is_added_before_its_end_or_after() -> None:
    call: Call[int] = Call()
    told: list[tuple[str, Call[int]]] = []
    call.add_done_callback(lambda ended: told.append(("before", ended)))
    assert told == []
    call.set_exception(KeyError("key"))
    call.add_done_callback(lambda ended: told.append(("after", ended)))
    assert told == [("before", call), ("after", call)]
    assert isinstance(call.exception(), KeyError)


def test_a_thread_outlives_what_follows_its_calls(
    threads: CallThreads, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def fail(_: object) -> None:
        raise ValueError("what follows fails")

    calls = [threads.start(lambda: go_on.wait(WAIT_S)) for _ in range(2)]
    for call in calls:
        call.add_done_callback(fail)
    go_on.set()
    for call in calls:
        assert call.result(WAIT_S)
    # Both threads go on.
    meet = threading.Barrier(2)
    both = [threads.start(lambda: meet.wait(WAIT_S)) for _ in range(2)]
    assert sorted(each.result(WAIT_S) for each in both) == [0, 1]
    assert len(caplog.records) == 2


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
