# SPDX-License-Identifier: Apache-2.0
"""What a schedule can do to engines: operators, accidents, and strangers on the network."""

import random
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from omni_connector.arena.block_index import Tags
from omni_connector.transports.base import Endpoint
from tests import inspection
from tests.simulation.clients import Clients
from tests.simulation.plan import Plan
from tests.simulation.surroundings.babble import Liar, babble, path_of
from tests.simulation.surroundings.memory import SimulatedTransport
from tests.simulation.surroundings.neighbours import LyingIndex
from tests.simulation.surroundings.world import Violation
from tests.simulation.weights import updating

_OPERATOR_S: Final = 60.0

# How often a lying index is written, and how many seconds lie between that.
_LIES: Final = 12
_LIE_S: Final = 0.4


class Cluster(Clients):
    """Engines, their clients, and all that can happen to them: each public method is the event of
    a plan, or serves one.

    Args:
        plan: see `Deployment`.

    Attributes:
        liars: peers that answer anything that decodes, or whose indexes are nonsense.
        operating: how many operators are at work.
        reconnects: how often connections were made anew.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.liars: list[Liar | LyingIndex] = []
        self.operating = 0
        self._away: dict[str, Any] = {}  # what has happened to engines that are down
        self._update: Any = None  # the one that is under way
        self.reconnects = 0
        self._listed: Tags = np.zeros(0, np.uint64)  # tags of all blocks that slots had until a lie
        for shape in plan.engines:
            self._start(shape.name)

    @property
    def quiet(self) -> bool:
        """Whether no client waits, no operator is at work, and no engine stands still."""
        return not (self.sent or self.operating or self.intents or self.world.stopped)

    def preempt(self, engine: str) -> None:
        """An engine preempts a running request, which it computes again later."""
        target = self.engines.get(engine)
        if target is None:
            return
        self.world.tell(f"all that runs on {engine} is preempted")

        def preempt() -> None:
            scheduler = target.scheduler
            if scheduler.running:
                request = scheduler.running.pop()
                scheduler._preempt_request(request, self.world.now)
                scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

        target.call(preempt)

    def reset(self, engine: str, connector: bool, seconds: float = 0.0) -> None:
        """So many seconds from now an operator resets the prefix cache, if that can be done at
        once; the weights stay."""
        self.voids = True
        if seconds:
            self.operating += 1

            def reset_now() -> None:
                self.operating -= 1
                self.reset(engine, connector)

            self.world.later(seconds, reset_now)
            return
        target = self.engines.get(engine)
        if target is not None:
            self.world.tell(f"the prefix cache of {engine} is reset, connector: {connector}")
            event = self.refusals.happens(engine)

            def reset() -> None:
                target.scheduler.reset_prefix_cache(False, connector)
                self.refusals.over(event)

            target.call(reset)

    def kill(self, engine: str, seconds: float) -> None:
        """An engine gets SIGKILL; a new one starts under its name so many seconds later."""
        target = self.engines.pop(engine, None)
        if target is None or target.owner is None:
            return
        self.excuses = True
        self.world.tell(f"{engine} is killed")
        self._away[engine] = self.refusals.happens(engine)
        world, owner = self.world, target.owner
        target.alive = False
        world.dead.add(owner)
        for actor in [actor for actor in world.actors if actor.owner == owner]:
            world.remove(actor)
        self.net.kill(owner)
        self.host.kill(owner)
        self.shelf.kill(owner)
        self._lost(target)
        self._start_later(engine, seconds)

    def restart(self, engine: str, seconds: float) -> None:
        """An operator shuts an engine down, and starts it again so many seconds later."""
        target = self.engines.pop(engine, None)
        if target is None:
            return
        self.excuses = True
        self.world.tell(f"{engine} is shut down")
        self._away[engine] = self.refusals.happens(engine)

        target.ends = True

        def stop() -> None:
            target.shutdown()
            self.world.dead.add(str(target.owner))
            self.net.kill(str(target.owner))
            self.host.kill(str(target.owner))
            self._lost(target)
            self._start_later(engine, seconds)

        target.call(stop)

    def _start_later(self, engine: str, seconds: float) -> None:
        def start() -> None:
            if self.operating:  # the weights that it would load are about to change
                self.world.later(0.1, start)
                return
            self.world.tell(f"{engine} starts again")
            self._start(engine)
            self.refusals.back(self._away[engine])

        self.world.later(seconds, start)

    def stop(self, engine: str, seconds: float) -> None:
        """An engine gets SIGSTOP, and stands still for so many seconds."""
        target = self.engines.get(engine)
        if target is None or target.owner is None:
            return
        self.excuses = True
        self.world.tell(f"{engine} stands still for {seconds:g} s")
        owner = target.owner
        self.world.stopped.add(owner)
        self.host.silent.add(owner)
        self.lag += seconds
        event = self.refusals.happens(engine)
        self.loads[engine].stood_still(self.world.now + seconds)

        def go_on() -> None:
            self.refusals.back(event)
            self.world.stopped.discard(owner)
            self.host.silent.discard(owner)

        self.world.later(seconds, go_on)

    def jump(self, seconds: float) -> None:
        """The host is suspended for so many seconds."""
        self.excuses = True
        self.world.tell(f"the clock jumps by {seconds:g} s")
        self.refusals.back(self.refusals.happens(None))
        self.world.advance(seconds)
        self.refusals.back(self.refusals.happens(None))
        self.lag += seconds
        for each in self.loads.values():
            each.stood_still(self.world.now)

    def reconnect(self, engine: str, number: int) -> None:
        """The connections to a serving engine break and are made again, unnoticed.

        It knows the peers by new names, and gets some of their latest messages again, which it may
        have had. What it answers to the former names is lost.
        """
        self.excuses = True
        self.reconnects += 1
        self.refusals.happens(engine)
        self.world.tell(f"the connections to {engine} are made anew")
        self.net.reconnect(path_of(engine), random.Random(number))

    def spoil(self, engine: str) -> None:
        """Bytes change in the arenas of an engine, and in the shared store."""
        self.excuses = self.spoiled = True
        self.refusals.happens(engine)
        for key, entry in list(self.shelf.entries.items()):
            self.shelf.entries[key] = bytes([entry[0] ^ 0x10]) + entry[1:]
        for name, (owner, arena) in self.host.arenas.items():
            if owner.split(".")[0] == engine and not arena.closed:
                if self.shapes[engine].integrity != "full":
                    return  # nothing would notice
                self.world.tell(f"a byte of each slot of {name} flips")
                arena.slots[:, 7] ^= 0x10

    def end_thread(self, engine: str, thread: str) -> None:
        """One of the connector's threads ends, as none should."""
        target = self.engines.get(engine)
        if target is None:
            return
        self.excuses = self.expected_errors = True
        self.refusals.happens(engine)
        self.world.tell(f"{thread} of {engine} ends")
        for turns in target.turns(thread):
            if thread == "omni-control":
                self.deaf.add(engine)
            turns.die()

    def babble(self, engine: str, number: int) -> None:
        """A stranger sends a serving engine messages that decode, with any content."""
        target = self.engines.get(engine)
        if target is not None:
            self.excuses = True
            self.refusals.happens(engine)
            babble(self.net, engine, random.Random(number))

    def mislead(self, engine: str, number: int) -> None:
        """A client sends the params of a peer whose answers decode, and have any content."""
        target = self.engines.get(engine)
        if target is None:
            return
        self.excuses = self.host.lied = True
        self.refusals.happens(engine)
        liar = Liar(self.net, f"L{number % 3}", random.Random(number), self._endpoints())
        self.liars.append(liar)
        draw = random.Random(number)
        for _ in range(draw.randrange(1, 4)):
            self._send(engine, (draw.randrange(3), 13), 3, params=liar.params(12))

    def lie(self, engine: str, number: int) -> None:
        """A process says to be a neighbour of an engine, and writes an index of nonsense."""
        target = self.engines.get(engine)
        home = self.host.neighbourhood.homes.get("" if target is None else str(target.owner))
        if target is None or home is None:
            return
        self.world.tell(f"an index lies of the slots of {engine}")
        liar = LyingIndex(self.host.neighbourhood, home, f"liar {len(self.liars)}")
        self.liars.append(liar)
        draw = random.Random(number)

        def lie() -> None:
            halves = [each.halves[0] for each in self.engines.values()]
            if not halves:  # all are being started again
                return
            tags = [self._listed, *(inspection.tags(half) for half in halves)]
            self._listed = np.setdiff1d(np.concatenate(tags), [0])
            liar.lie(self._listed, inspection.generations(target.halves[0]), draw)

        for times in range(_LIES):
            self.world.later(times * _LIE_S, lie)

    def _endpoints(self) -> list[Endpoint]:
        return [
            Endpoint.of(arena, SimulatedTransport.transport, name)
            for name, (_, arena) in sorted(self.host.arenas.items())
        ]

    def update_weights(self, **how: Any) -> None:
        """An operator pauses all engines, changes their weights, and resets their caches."""
        if self.operating:
            return  # there is one operator
        self.operating += 1
        self.excuses = True
        self._update = self.refusals.happens(None)
        self._operate(updating(self, **how), self.world.now - self.lag + _OPERATOR_S + self._slack)

    def _operate(self, steps: Iterator[float], deadline: float) -> None:
        if self.world.now - self.lag > deadline:
            raise Violation("never_ends", "the weights cannot be updated: caches are not free")
        pause = next(steps, None)
        if pause is None:
            self.operating -= 1
            self.refusals.over(self._update)
        else:
            self.world.later(pause, lambda: self._operate(steps, deadline))
