# SPDX-License-Identifier: Apache-2.0
"""`omni-connector keep` in a world: what it decides is the real one's, what it holds is real."""

import os
import random
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from omni_connector.arena.block_index import BlockIndexView
from omni_connector.arena.slot_index import Ints
from omni_connector.prefix.keep import KeptEngines
from omni_connector.prefix.neighbours import GiveIndex
from tests.simulation.plan import Event, Plan
from tests.simulation.scenes import serve
from tests.simulation.surroundings.memory import Host
from tests.simulation.surroundings.neighbours import Home
from tests.simulation.surroundings.world import Violation

_LOOK_S: Final = 1.0
_LATE_S: Final = 5.0
_OFTEN: Final = 0.5
_SCENES_OFTEN: Final = 0.15


def kept(plan: Plan, draw: random.Random) -> Plan:
    """The same with a process that keeps what engines leave, and may itself be killed, for some of
    the plans in which engines share and end; the plan itself for the others. In some of them
    engines end and are asked again, and little else happens.

    Args:
        draw: of this, and of nothing else.
    """
    ends = {"kill", "restart", "drain", "leave"} & {each.what for each in plan.events}
    often = _OFTEN if ends else _SCENES_OFTEN
    if draw.random() >= often or not all(each.hosts for each in plan.engines):
        return plan
    events = _ending(plan, draw) if not ends else list(plan.events)
    for _ in range(draw.choice((1, 1, 1, 2))):
        how = {"engines": draw.choice((1, 2, 4)), "seconds": draw.choice((2.0, 20.0))}
        place = draw.randrange(max(1, len(events) // 2))
        events.insert(place, Event("keep", how, draw.choice((0, 0, 30)), 0))
    if draw.random() < 0.3:
        events.append(Event("keep", {"engines": 0, "seconds": 0.0}, draw.choice((0, 30, 300)), 0))
    numbered = (replace(each, number=number) for number, each in enumerate(events))
    return replace(plan, events=tuple(numbered))


def _ending(plan: Plan, draw: random.Random) -> list[Event]:
    """Engines are asked, end, start again, and are asked for the same."""
    events = []
    for family in draw.sample(range(3), 3):
        engine, asked = (draw.choice(plan.engines).name for _ in range(2))
        prompt = family, draw.choice((20, 33, 37))
        end = {"engine": engine, "seconds": draw.choice((0.0, 0.0, 5.0))}
        events += [
            Event("serve", serve(engine, prompt), draw.choice((30, 300)), 0),
            Event(draw.choice(("kill", "restart")), end, draw.choice((300, 1000)), 0),
            Event(
                "serve", serve(draw.choice((engine, asked)), prompt), draw.choice((300, 1000)), 0
            ),
        ]
    return events


@dataclass
class _Arena:
    """An arena whose engine has ended, or will end."""

    epoch: bytes
    fd: int


@dataclass
class _Taken:
    """What is held of an engine."""

    gives: GiveIndex
    fd: int
    arenas: list[_Arena]

    def close(self) -> None:
        for each in (self.fd, *(arena.fd for arena in self.arenas)):
            os.close(each)


class SimulatedKeep:
    """The process.

    Args:
        engines: the memory of how many of the largest engines it keeps.
        seconds: for which it keeps each.
    """

    def __init__(self, host: Host, engines: int, seconds: float) -> None:
        self.host = host
        self._world = host.world
        self._engines = engines
        self._seconds = seconds
        around = host.neighbourhood
        largest = max((_nbytes(home.gives) for home in around.homes.values()), default=0)
        self._most = largest * engines
        self._kept = KeptEngines(
            self._most, seconds, self._world.clock, lambda: self._world.chance(around.short)
        )
        self._taken: dict[Home, _Taken] = {}
        self._given: list[KeptHome] = []
        self.closed = False
        for home in around.homes.values():
            around.soon(lambda home=home: self.meet(home))  # type: ignore[misc]

    def meet(self, home: Home) -> None:
        """Take the descriptors of a living engine."""
        gives, found = home.gives, []
        if self.closed or home.owner not in self.host.neighbourhood.homes or gives.ended:
            return
        for endpoints in gives.arenas:
            there = self.host.found(endpoints[0].address)
            if there is None or there[1].epoch != endpoints[0].epoch:
                return
            found.append(there[1])
        arenas = [_Arena(each.epoch, os.dup(each.fd)) for each in found]
        if (before := self._taken.pop(home, None)) is not None:
            before.close()
        self._taken[home] = _Taken(gives, os.dup(home.fd), arenas)

    def ended(self, home: Home) -> None:
        """An engine has ended: give what it had in its place."""
        taken = self._taken.pop(home, None)
        if taken is None:
            return
        gives = taken.gives
        with BlockIndexView.open(taken.fd, epoch=gives.epoch, num_slots=gives.num_slots) as index:
            empty = index.is_empty
        if self.closed or empty:
            taken.close()
            return
        self._world.tell(f"what {home.owner} had is kept")
        self._given.append(KeptHome(self.host, taken, self._world.now + self._seconds))
        self._kept.keep(gives.epoch, self._given[-1])
        self._look()

    def _look(self) -> None:
        if self.closed:
            return
        self._kept.follow()
        self._given = [each for each in self._given if not each.closed]
        if self._kept.nbytes > self._most:
            raise Violation("left_behind", f"{self._kept.nbytes} bytes are kept of {self._most}")
        if self._given:
            self._world.later(_LOOK_S, self._look)

    def look(self) -> None:
        """Raise Violation if something is kept beyond its time."""
        for each in self._given:
            if not each.closed and self._world.now > each.until + _LATE_S:
                raise Violation("left_behind", f"{each.name} is kept beyond its time")

    def close(self) -> None:
        """It has ended, however. Idempotent."""
        self.closed = True
        while self._taken:
            self._taken.popitem()[1].close()
        self._kept.close()


class KeptHome(Home):
    """An engine that has ended, in its place among the living."""

    def __init__(self, host: Host, taken: _Taken, until: float) -> None:
        self._host = host
        self._taken = taken
        self.until = until
        self.closed = False
        self.used_at = host.world.now
        self.owner = self.name = f"kept {taken.gives.epoch.hex()}"
        self.fd = taken.fd
        arenas = []
        for rank, arena in zip(taken.gives.arenas, taken.arenas, strict=True):
            address = f"kept arena {arena.epoch.hex()}"
            host.handed_on[address] = (self.owner, arena)
            arenas.append((msgspec.structs.replace(rank[0], address=address),))
        self.gives = msgspec.structs.replace(
            taken.gives, arenas=tuple(arenas), orphans=(), ended=True
        )
        host.neighbourhood.join(self)

    @property
    def nbytes(self) -> int:
        """As if all of its arenas were allocated."""
        return _nbytes(self.gives)

    def told(self, slots: Ints, generations: Ints) -> None:
        self.used_at = self._host.world.now

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._host.neighbourhood.leave(self)
            for (endpoint,) in self.gives.arenas:
                self._host.handed_on.pop(endpoint.address, None)
            self._taken.close()

    kill = close


def _nbytes(gives: GiveIndex) -> int:
    return sum(rank[0].n_slots * rank[0].slot_bytes for rank in gives.arenas)
