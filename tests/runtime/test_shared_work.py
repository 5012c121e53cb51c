# SPDX-License-Identifier: Apache-2.0
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from omni_connector.errors import TransportError
from omni_connector.runtime import shared_work as module
from omni_connector.runtime.shared_work import Helpers, share_out
from tests.patience import wait_until

LONG = 60.0  # a deadline that only a hang reaches


def test_work_is_done_on_each_item_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    done: list[int] = []
    names = set()
    together = threading.Barrier(4, timeout=LONG)

    def work(item: int) -> None:
        names.add(threading.current_thread().name)
        if item < 4:
            together.wait()
        done.append(item)

    share_out(work, range(100), 1 << 30)
    assert sorted(done) == list(range(100))
    assert len(names) == 2
    assert threading.current_thread().name in names


@pytest.mark.parametrize(("nbytes", "cores"), [(1 << 20, {0, 1, 2, 3}), (1 << 40, {3})])
def test_small_work_or_one_core_starts_no_thread(
    nbytes: int, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(threading, "Thread", None)
    done: list[int] = []
    share_out(done.append, [1, 2], nbytes)
    assert done == [1, 2]


@pytest.mark.parametrize("nbytes", [0, 1 << 40])
def test_error_in_a_thread_is_raised_and_ends_the_work(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    done: list[int] = []
    fail, failed = module._Call.fail, threading.Event()

    def noted(call: module._Call[int], error: BaseException) -> None:
        fail(call, error)
        failed.set()

    monkeypatch.setattr(module._Call, "fail", noted)

    def work(item: int) -> None:
        if item == 5:
            raise TransportError("five")
        if item > 5:
            failed.wait(LONG)
        done.append(item)

    with pytest.raises(TransportError, match="five"):
        share_out(work, range(1000), nbytes)
    assert len(done) < 100
    assert "omni-connector-copy" not in [thread.name for thread in threading.enumerate()]


def test_system_without_threads_to_spare_does_the_work_with_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error while some of them work would let others have the memory that they write."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    start, started = threading.Thread.start, []

    def short(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short)
    done: list[int] = []
    share_out(done.append, range(100), 1 << 40)
    assert sorted(done) == list(range(100))
    assert not started[0].is_alive()


def test_what_a_signal_raises_ends_the_work_before_it_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    join, joined = threading.Thread.join, []
    begun, again = threading.Event(), threading.Event()

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(thread)
        if len(joined) == 1:
            raise KeyboardInterrupt
        again.set()
        join(thread, timeout)

    def work(item: int) -> None:
        if threading.current_thread().name == "omni-connector-copy":
            begun.set()
            again.wait(LONG)
        else:
            begun.wait(LONG)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        share_out(work, range(2), 1 << 40)
    assert len(joined) > 1
    assert not joined[0].is_alive()


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    found = Helpers()
    found.threads = 4  # one of them lends itself
    yield found
    found.close(LONG)


def test_helpers_take_part_in_each_call(helpers: Helpers) -> None:
    together = threading.Barrier(3, timeout=LONG)
    threads = set()

    def work(item: int) -> None:
        together.wait()
        threads.add(threading.get_ident())

    for _ in range(20):
        helpers.share(work, range(3))
    assert len(threads) == 3


def test_calls_of_several_threads_are_helped_with_at_once(helpers: Helpers) -> None:
    done: list[int] = []
    callers = [
        threading.Thread(target=helpers.share, args=(done.append, range(at, at + 100)))
        for at in range(0, 500, 100)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LONG)
    assert sorted(done) == list(range(500))


def test_error_of_a_helper_is_raised_after_all_have_ended(helpers: Helpers) -> None:
    begun, ended = threading.Barrier(3, timeout=LONG), []

    def work(item: int) -> None:
        begun.wait()
        if item == 0:
            raise TransportError("zero")
        time.sleep(0.05)
        ended.append(item)

    with pytest.raises(TransportError, match="zero"):
        helpers.share(work, range(3))
    assert sorted(ended) == [1, 2]


def test_call_returns_though_no_helper_is_free(helpers: Helpers) -> None:
    busy, free = threading.Barrier(4, timeout=LONG), threading.Event()

    def wait(item: int) -> None:
        busy.wait()
        free.wait(LONG)

    caller = threading.Thread(target=helpers.share, args=(wait, range(3)))
    caller.start()
    busy.wait()
    done: list[int] = []
    helpers.share(done.append, range(5))
    assert done == list(range(5))
    free.set()
    caller.join(LONG)


def test_closed_helpers_leave_the_work_to_the_caller(helpers: Helpers) -> None:
    done: list[int] = []
    helpers.share(done.append, range(5))
    helpers.close(LONG)
    helpers.close(LONG)
    helpers.share(done.append, range(5))
    assert sorted(done) == sorted([*range(5)] * 2)
    assert "omni-connector-copy" not in [thread.name for thread in threading.enumerate()]


class Caller(threading.Thread):
    """Has its work shared, and then tells who lends itself that it is not needed any more."""

    def __init__(self, helpers: Helpers, work: Callable[[int], None], items: int) -> None:
        super().__init__(daemon=True)
        self.helpers, self.work, self.items = helpers, work, items
        self.needs_help = True
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.helpers.share(self.work, range(self.items))
        except (TransportError, SystemExit) as error:
            self.raised = error
        self.needs_help = False
        self.helpers.tell_lender()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Helpers:
    """For who calls, and one that lends itself, however late the call comes."""
    monkeypatch.setattr(module, "_NO_CALL_S", 60.0)
    found = Helpers(frozenset(os.sched_getaffinity(0)))
    found.threads = 2
    return found


@pytest.mark.parametrize("raises", [False, True])
def test_who_lends_itself_takes_part_and_what_it_raises_is_raised_at_the_caller(
    pair: Helpers, raises: bool
) -> None:
    together, threads = threading.Barrier(2, timeout=LONG), set()

    def work(item: int) -> None:
        together.wait()
        threads.add(threading.get_ident())
        if raises and threading.current_thread() is not caller:
            raise TransportError("lent")

    caller = Caller(pair, work, 2)
    pair.lend(lambda: caller.needs_help, seconds=60)
    assert threads == {threading.get_ident(), caller.ident}
    assert str(caller.raised) == ("lent" if raises else "None")


def test_what_a_signal_raises_in_a_lent_thread_is_raised_there(pair: Helpers) -> None:
    """And the caller learns that its work is not done."""
    together = threading.Barrier(2, timeout=LONG)

    def work(item: int) -> None:
        together.wait()
        if threading.current_thread() is not caller:
            raise SystemExit

    caller = Caller(pair, work, 2)
    with pytest.raises(SystemExit):
        pair.lend(lambda: caller.needs_help, seconds=60)
    caller.join(LONG)
    assert isinstance(caller.raised, SystemExit)


def test_who_lends_itself_and_is_not_called_goes(helpers: Helpers) -> None:
    helpers.lend(lambda: True, seconds=1e9)


def test_who_lends_itself_has_no_call_to_wait_for(pair: Helpers) -> None:
    pair.lend(lambda: False, seconds=1e9)


def test_who_calls_leaves_its_core_to_who_lends_itself(pair: Helpers) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core")
    own, seen = {min(cores)}, []
    together = threading.Barrier(2, timeout=LONG)

    def work(item: int) -> None:
        together.wait()
        if threading.current_thread() is caller:
            seen.append(os.sched_getaffinity(0))
        together.wait()

    os.sched_setaffinity(0, own)
    try:
        caller = Caller(pair, work, 2)
        pair.lend(lambda: caller.needs_help, seconds=60)
    finally:
        os.sched_setaffinity(0, cores)
    caller = Caller(pair, lambda item: seen.append(os.sched_getaffinity(0)), 2)
    caller.join(LONG)
    assert seen == [cores - own, cores, cores]


def test_who_gets_no_time_elsewhere_comes_to_the_core_of_who_lends_itself(
    pair: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kernels keep all others off a core where a process spins. For a while later calls run
    beside who lends itself at once."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core")
    monkeypatch.setattr(module, "_CROWDED_S", 60.0)
    own, seen = {min(cores)}, []
    callers: list[Caller] = []
    together = threading.Barrier(2, timeout=LONG)

    def work(item: int) -> None:
        together.wait()
        caller = threading.current_thread() in callers
        if caller:
            seen.append(os.sched_getaffinity(0))
        together.wait()  # it is not late before who lends itself has done its part
        if not caller:
            return
        wait_until(lambda: os.sched_getaffinity(0) == own)
        seen.append(os.sched_getaffinity(0))

    os.sched_setaffinity(0, own)
    try:
        for _ in range(2):
            callers.append(caller := Caller(pair, work, 2))
            pair.lend(lambda caller=caller: caller.needs_help, seconds=60)
    finally:
        os.sched_setaffinity(0, cores)
    assert seen == [cores - own, own, own, own]
