# SPDX-License-Identifier: Apache-2.0
"""Pauses between tries: when they are over, and how long the next one is."""

from hypothesis import given
from hypothesis import strategies as st

from omni_connector.runtime.backoff import Backoff
from omni_connector.testing import FakeClock

SECONDS = st.floats(0.25, 8.0)


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0, FakeClock())
    assert [backoff.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(SECONDS, SECONDS, st.lists(st.one_of(SECONDS, st.booleans())))
def test_a_try_is_due_when_the_pause_is_over(
    first: float, longest: float, calls: list[float | bool]
) -> None:
    """A number is time that passes, True a try that works, False one that fails."""
    clock = FakeClock()
    backoff = Backoff(first, longest, clock)
    failures, due_at = 0, clock()
    for call in calls:
        if call is True:
            backoff.worked()
            failures, due_at = 0, clock()
        elif call is False:
            pause = backoff.failed()
            assert pause == min(first * 2**failures, longest)
            failures, due_at = failures + 1, clock() + pause
        else:
            clock.advance(call)
        assert backoff.failing == (failures > 0)
        assert backoff.active == (clock() < due_at)
