# SPDX-License-Identifier: Apache-2.0
"""What is remembered of names that others choose, and for how long."""

from hypothesis import given
from hypothesis import strategies as st

from omni_connector.runtime.bounded import BoundedMap, ExpiringSet
from omni_connector.testing import FakeClock

NAMES = st.integers(0, 7)


@given(st.integers(1, 5), st.lists(st.tuples(NAMES, st.booleans())))
def test_a_map_has_the_entries_that_were_set_last(most: int, calls: list[tuple[int, bool]]) -> None:
    """Against a list of all that was set: the newest of each key, the last of these."""
    bounded = BoundedMap[int, int](most)
    was_set: list[tuple[int, int]] = []
    for number, (name, sets) in enumerate(calls):
        if sets:
            bounded[name] = number
            was_set = [*(each for each in was_set if each[0] != name), (name, number)][-most:]
        else:
            assert bounded.get(name) == dict(was_set).get(name)
        assert list(bounded.items()) == was_set


@given(st.lists(st.one_of(NAMES, st.floats(0.25, 4.0)), max_size=40))
def test_a_set_forgets_names_in_time_and_has_the_latest(calls: list[int | float]) -> None:
    clock = FakeClock()
    names = ExpiringSet[int](5.0, clock, most=4)
    added: dict[int, float] = {}
    for call in calls:
        if isinstance(call, float):
            clock.advance(call)
        else:
            names.add([call])
            added.pop(call, None)
            added[call] = clock()
        latest = list(added)[-4:]
        there = {name for name in latest if clock() < added[name] + 5.0}
        assert {name for name in range(8) if name in names} == there
