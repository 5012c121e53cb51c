# SPDX-License-Identifier: Apache-2.0
"""Turns on a thread: made at once, later, or when it is woken; nothing that wakes is lost."""

import os
import threading
import time

from omni_connector.runtime.turns import WOKEN, Copies, TurnThread

LONG = 60.0


def test_turns_are_made_until_one_is_the_last():
    seconds = [0.0, 0.001, 0.0, None]
    made = []

    def turn() -> float | None:
        made.append(threading.current_thread().name)
        return seconds[len(made) - 1]

    thread = TurnThread("omni-test", turn)
    thread.join(LONG)
    assert not thread.is_alive()
    assert made == ["omni-test"] * 4


def test_a_thread_that_is_woken_makes_a_turn_also_if_it_was_not_yet_asleep():
    entered, wanted = threading.Semaphore(0), [1]

    def turn() -> float | None:
        entered.release()
        if wanted[0] == 0:
            return None
        time.sleep(0.001)  # it is woken meanwhile
        return WOKEN

    thread = TurnThread("omni-test", turn)
    for _ in range(50):
        assert entered.acquire(timeout=LONG)
        thread.wake()
    wanted[0] = 0
    thread.wake()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_turn_that_raises_is_logged_and_ends_the_thread(caplog):
    ended = []

    def turn() -> None:
        raise ValueError("a fault")

    thread = TurnThread("omni-test", turn, end=lambda: ended.append(True))
    thread.join(LONG)
    assert not thread.is_alive()
    assert ended == [True]
    [record] = caplog.records
    assert "omni-test" in record.getMessage()
    assert "a fault" in str(record.exc_info)


def test_the_end_comes_after_the_last_turn():
    made = []
    TurnThread("omni-test", lambda: made.append("turn"), end=lambda: made.append("end")).join(LONG)
    assert made == ["turn", "end"]


def test_a_thread_runs_on_the_cores_that_it_is_given():
    core = min(os.sched_getaffinity(0))
    found = []

    def turn() -> None:
        found.append(os.sched_getaffinity(0))

    TurnThread("omni-test", turn, cores=frozenset({core})).join(LONG)
    assert found == [{core}]
    assert core in os.sched_getaffinity(0)


def test_copies_are_counted_and_shown():
    copies, early, late = Copies(), bytearray(1), bytearray(1)
    copies.show(first := memoryview(early))
    with copies:
        copies.show(memoryview(late))
        with copies:
            assert copies.running
        assert (early, late) == (b"\1", b"\1")
        copies.hide(first)
    assert not copies.running
    assert (early, late) == (b"\1", b"\0")
