# SPDX-License-Identifier: Apache-2.0
"""Which job of a copy thread makes the next piece: background jobs step back, but not for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector.copy.threads import (
    STEP_BACK,
    STEP_BACK_S,
    UNTIL_NOTIFIED,
    CopyThread,
    Outcome,
)
from omni_connector.testing.clock import FakeClock

from .test_layered import ByHand

PIECE_S = 0.002


class Threads:
    """A thread that saves and one that loads, whose pieces take `PIECE_S` each.

    Attributes:
        made: the jobs whose pieces were made, in order.
    """

    def __init__(self):
        self.clock = FakeClock()
        self.made = []
        self.loads = CopyThread("omni-load", None, ByHand, clock=self.clock)
        self.saves = CopyThread("omni-save", None, ByHand, clock=self.clock, first=self.loads)

    def job(self, number, pieces, seconds=PIECE_S, ends=True):
        def work(cancelled):
            for _ in range(pieces):
                if cancelled():
                    break
                self.made.append(number)
                self.clock.advance(seconds)
                yield True
            while not ends and not cancelled():
                yield UNTIL_NOTIFIED
            return Outcome(number)

        return work

    def load(self, number, pieces, **options):
        self.loads.submit(number, self.job(number, pieces, **options))

    def save(self, number, pieces, *, background=True, **options):
        self.saves.submit(number, self.job(number, pieces), background=background, **options)

    def turn(self, thread):
        return thread._thread.turn()


@pytest.fixture
def threads():
    return Threads()


def test_a_background_job_makes_no_piece_while_a_load_could(threads):
    threads.load(1, 1)
    threads.save(2, 2)
    assert threads.turn(threads.saves) > 0.0
    assert threads.made == []
    while threads.turn(threads.loads) == 0.0:
        pass
    assert threads.turn(threads.saves) == 0.0
    assert threads.made == [1, 2]


def test_a_save_that_somebody_waits_for_goes_on_beside_loads_and_before_background_jobs(threads):
    threads.load(1, 5)
    threads.save(2, 1)
    threads.save(3, 2, background=False)
    for _ in range(2):
        threads.turn(threads.saves)
    assert threads.made == [3, 3]


def test_a_background_job_has_a_tenth_of_the_time_beside_loads(threads):
    threads.load(1, 10_000)
    threads.save(2, 1_000)
    began = threads.clock()
    while threads.made.count(2) < 100:
        if threads.turn(threads.saves):
            threads.turn(threads.loads)
    share = 100 * PIECE_S / (threads.clock() - began)
    assert 1 / (1 + STEP_BACK) * 0.8 < share <= 1 / (1 + STEP_BACK) * 1.1


def test_a_background_job_with_long_pieces_steps_back_for_a_bounded_time(threads):
    threads.saves.submit(1, threads.job(1, 2, seconds=5.0), background=True)
    threads.turn(threads.saves)  # alone
    threads.load(2, 1)
    assert threads.turn(threads.saves) == pytest.approx(STEP_BACK_S)
    threads.clock.advance(STEP_BACK_S)
    assert threads.turn(threads.saves) == 0.0
    assert threads.made == [1, 1]


def test_a_load_that_waits_for_something_stops_no_background_job(threads):
    threads.load(1, 0, ends=False)
    threads.save(2, 1)
    assert threads.turn(threads.loads) > 0.0
    assert threads.turn(threads.saves) == 0.0
    assert threads.made == [2]


def test_the_thread_is_woken_when_the_last_load_has_ended_or_waits(threads):
    threads.load(1, 1, ends=False)
    threads.save(2, 1)
    threads.turn(threads.saves)
    woken = threads.saves._thread.woken
    threads.turn(threads.loads)
    assert threads.saves._thread.woken == woken  # it has another piece
    threads.turn(threads.loads)
    assert threads.saves._thread.woken == woken + 1


def test_nothing_steps_back_before_a_job_in_order_nor_overtakes_it(threads):
    threads.load(1, 1)
    threads.save(2, 1)
    threads.save(3, 1, background=False, in_order=True)
    threads.save(4, 1, background=False)
    while threads.made[-1:] != [4]:
        threads.turn(threads.saves)
    assert threads.made == [2, 3, 4]


def test_a_background_job_that_is_cancelled_ends_at_once(threads):
    threads.load(1, 1)
    threads.save(2, 1)
    assert threads.turn(threads.saves) > 0.0
    threads.saves.cancel({2})
    assert threads.turn(threads.saves) == 0.0
    assert [each.job_id for each in threads.saves.take_ended()] == [2]
    assert threads.made == []


@settings(deadline=None)
@given(
    jobs=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 4)), max_size=8),
    loads=st.integers(0, 30),
    choices=st.lists(st.booleans(), max_size=60),
)
def test_all_jobs_end_whatever_the_order_of_turns(jobs, loads, choices):
    threads = Threads()
    if loads:
        threads.load(0, loads)
    for number, (background, in_order, pieces) in enumerate(jobs, 1):
        threads.save(number, pieces, background=background, in_order=in_order and not background)
    for first in choices:
        threads.turn(threads.loads if first else threads.saves)
    for _ in range(1000):
        if (pause := threads.turn(threads.saves)) == UNTIL_NOTIFIED:
            break
        threads.clock.advance(pause)
    ended = {each.job_id for each in threads.saves.take_ended()}
    assert ended == set(range(1, len(jobs) + 1))
