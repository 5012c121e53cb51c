# SPDX-License-Identifier: Apache-2.0
"""Newer states of a session end the pins of older ones, and nobody else's."""

from hypothesis import given
from hypothesis import strategies as st

from omni_connector.prefix.sessions import MAX_SESSIONS, Sessions
from omni_connector.runtime.context import PROCESS_CONTEXT

ALL = 1000  # slots with which no session is forgotten


class Host:
    """The arena as `Sessions` uses it: which keys have pins of a session, or others, or none."""

    def __init__(self, num_slots: int = ALL) -> None:
        self.num_slots = num_slots
        self.pinned: set[bytes] = set()
        self.kept: set[bytes] = set()
        self.fixed: set[bytes] = set()

    def end_session_pins(self, keys: list[list[bytes]]) -> int:
        ended = self.pinned & {key for of in keys for key in of} - self.fixed
        self.pinned -= ended
        return len(ended)

    def fix_session_pins(self, keys: list[list[bytes]]) -> None:
        self.fixed |= {key for of in keys for key in of}

    def let_go(self, keys: list[list[bytes]]) -> int:
        freed = (self.kept - self.pinned) & {key for of in keys for key in of}
        self.kept -= freed
        return len(freed)


def blocks(branch: tuple[int, ...]) -> list[bytes]:
    """The keys of a prompt's blocks, each of which names those before it."""
    return [bytes(branch[: i + 1]) for i in range(len(branch))]


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([(None, "a"), (None, "b"), ("salt", "a")]),
        st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple),
        st.booleans(),  # whether it asks for a pin
        st.integers(0, 9).map(lambda number: number == 0),  # whether the session is over
    ),
    max_size=12,
)


@given(REQUESTS, st.randoms(use_true_random=False), st.sampled_from([3, 8, ALL]))
def test_pins_are_those_of_the_newest_state_of_each_session(requests, draw, num_slots) -> None:
    host = Host(num_slots)
    sessions = Sessions(host, PROCESS_CONTEXT.stats)  # type: ignore[arg-type]
    newest: dict[tuple[str | None, str], tuple[int, list[bytes], bool]] = {}
    running: dict[int, tuple[tuple[str | None, str], list[bytes], bool, bool]] = {}
    arriving = list(requests)
    while arriving or running:
        if arriving and (not running or draw.random() < 0.5):
            session, branch, pins, over = arriving.pop()
            pins = pins and not over
            keys = blocks(branch)
            number = sessions.arrives([keys] if pins else [])
            running[number] = session, keys, pins, over
            host.pinned.update(keys if pins else [])  # as its blocks fill
            host.kept.update(keys)
            continue
        number = draw.choice(list(running))
        session, keys, pins, over = running.pop(number)
        host.kept.update(keys)
        sessions.ended(session, number, [keys], [0], pins=pins, over=over)
        former = newest.get(session)
        if former is None or former[0] < number:
            newest[session] = number, keys, pins
            if over:
                del newest[session]
        pinning = {key for _, of, pins, _ in running.values() if pins for key in of}
        wanted = {key for _, of, pins in newest.values() if pins for key in of} | pinning
        assert wanted <= host.pinned
    used = {key for _, keys, _ in newest.values() for key in keys}
    if num_slots == ALL:  # else pins of sessions that were forgotten end with their time
        assert host.pinned <= used <= host.kept
    sessions.clear()
    assert not sessions._users


def test_blocks_that_were_there_before_a_session_outlive_it() -> None:
    host = Host()
    sessions = Sessions(host, PROCESS_CONTEXT.stats)  # type: ignore[arg-type]
    first, last = blocks((1, 2, 3)), blocks((1, 2, 3, 4, 5))
    host.kept.update(last)
    for keys, found, over in ((first, 2, False), (last, 3, False), (first[:1], 1, True)):
        sessions.ended((None, "s"), sessions.arrives([]), [keys], [found], pins=False, over=over)
    assert host.kept == set(first[:2])


def test_pins_of_a_session_that_is_forgotten_are_not_ended_by_another() -> None:
    host = Host(num_slots=3)
    sessions = Sessions(host, PROCESS_CONTEXT.stats)  # type: ignore[arg-type]
    shared, other = blocks((1, 2)), blocks((3,))
    host.pinned.update(shared)
    for name, keys in (("forgotten", shared), ("a", shared), ("a", other)):
        sessions.ended((None, name), sessions.arrives([]), [keys], [0], pins=True, over=False)
    assert set(shared) <= host.pinned


def test_sessions_are_remembered_within_bounds() -> None:
    host = Host(num_slots=3 * MAX_SESSIONS)
    sessions = Sessions(host, PROCESS_CONTEXT.stats)  # type: ignore[arg-type]
    for number in range(3 * MAX_SESSIONS):
        keys = [b"%d" % number, b"%d/" % number]
        sessions.ended(
            (None, str(number)), sessions.arrives([]), [keys], [0], pins=True, over=False
        )
        assert len(sessions._states) <= MAX_SESSIONS
    assert len(sessions._users) == sessions._num_keys == 2 * MAX_SESSIONS
    long = [b"%d" % i for i in range(4 * MAX_SESSIONS)]
    sessions.ended((None, "long"), sessions.arrives([]), [long], [0], pins=True, over=False)
    assert not sessions._states
    assert not sessions._users
