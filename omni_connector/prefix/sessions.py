# SPDX-License-Identifier: Apache-2.0
"""What the sessions of agents have pinned, so that a newer state of a session replaces older ones.

Each request that names a session is a state of it, in the order of their arrival. When one ends,
pins that an older state asked for and this one did not are over, except on blocks of the prompts of
requests that run and pin. A request that says `over` is the last: all pins of the session end, and
the blocks that it was the first to compute are let go.

A session is known by its name and the request's cache salt. It is a hint like others: whoever names
the session of another client with the same salt ends that one's pins, and gets no block by it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from omni_connector.prefix.host_blocks import HostBlocks
from omni_connector.runtime.stats import Stats

MAX_SESSIONS: Final = 1024
"""Sessions that are remembered; beyond, the one whose state is oldest is forgotten. Its pins end by
their time then."""

Keys = Sequence[list[bytes]]
"""For each group the keys of a prompt's blocks, from the first on."""


@dataclass(slots=True, eq=False)
class _State:
    """The newest state of a session that has ended.

    Attributes:
        number: its place among all requests that name a session.
        keys: of its blocks.
        begins: for each group the number of leading blocks that were there before the session.
        pins: whether it asked to pin them.
    """

    number: int
    keys: Keys
    begins: Sequence[int]
    pins: bool


class Sessions:
    """The sessions that requests name.

    Args:
        host: the own arena. All sessions together are remembered with as many blocks as it has
            slots.
        stats: counts what ends early.
    """

    def __init__(self, host: HostBlocks, stats: Stats) -> None:
        self._host = host
        self._stats = stats
        self._numbers = count()
        self._num_keys = 0
        self._states: OrderedDict[tuple[str | None, str], _State] = OrderedDict()
        self._running: dict[int, Keys] = {}
        # How many sessions have each block in their newest state, and how many of the requests that
        # run have it and pin.
        self._users: Counter[tuple[int, bytes]] = Counter()

    def arrives(self, pinned: Keys) -> int:
        """A request arrives that names a session; returns its number.

        Args:
            pinned: keys of the blocks of its prompt if it asks to pin them, else none.
        """
        number = next(self._numbers)
        self._running[number] = pinned
        self._users.update(_pairs(pinned))
        return number

    def leaves(self, number: int) -> None:
        """A request of this number has ended; nothing changes for its session."""
        self._lose(self._running.pop(number))

    def ended(
        self,
        session: tuple[str | None, str],
        number: int,
        keys: Keys,
        found: Sequence[int],
        *,
        pins: bool,
        over: bool,
    ) -> None:
        """A request that names a session has ended.

        Args:
            session: its salt and its name.
            number: of `arrives`.
            keys: of its blocks.
            found: for each group the number of its leading blocks that were there before it.
            pins: whether it asked to pin its blocks.
            over: whether it is the last of the session.
        """
        self.leaves(number)
        former = self._states.get(session)
        if former is not None and number < former.number:
            # A newer state has ended before it.
            self._end_pins(_without(keys, former.keys if former.pins else ()))
            return
        if former is not None:
            self._forget(session)
            self._end_pins(_without(former.keys, keys if pins and not over else ()))
        if not over:
            begins = found if former is None else former.begins
            self._remember(session, _State(number, keys, begins, pins))
        elif former is not None:
            own = [of[at:] for of, at in zip(former.keys, former.begins, strict=True)]
            self._stats.count("blocks_let_go", self._host.let_go(self._unused(own)))

    def clear(self) -> None:
        """All blocks are void."""
        while self._states:
            self._forget(next(iter(self._states)))

    def _remember(self, session: tuple[str | None, str], state: _State) -> None:
        self._states[session] = state
        self._users.update(_pairs(state.keys))
        self._num_keys += sum(map(len, state.keys))
        while len(self._states) > MAX_SESSIONS or self._num_keys > self._host.num_slots:
            forgotten = self._forget(next(iter(self._states)))
            if forgotten.pins:  # others could not know that these blocks are in use
                self._host.fix_session_pins(forgotten.keys)

    def _forget(self, session: tuple[str | None, str]) -> _State:
        state = self._states.pop(session)
        self._lose(state.keys)
        self._num_keys -= sum(map(len, state.keys))
        return state

    def _lose(self, keys: Keys) -> None:
        self._users.subtract(_pairs(keys))
        for pair in _pairs(keys):
            if not self._users[pair]:
                del self._users[pair]

    def _end_pins(self, keys: Keys) -> None:
        self._stats.count("pins_superseded", self._host.end_session_pins(self._unused(keys)))

    def _unused(self, keys: Keys) -> Keys:
        """Those of these blocks that no session has in its newest state, and no request pins that
        runs."""
        return [[k for k in of if (g, k) not in self._users] for g, of in enumerate(keys)]


def _pairs(keys: Keys) -> Iterable[tuple[int, bytes]]:
    return ((group, key) for group, of in enumerate(keys) for key in of)


def _without(keys: Keys, others: Keys) -> Keys:
    """Those of these keys that are not among the others, by group."""
    known = [set(of) for of in others] or [set[bytes]()] * len(keys)
    return [[k for k in of if k not in known[g]] for g, of in enumerate(keys)]
