# SPDX-License-Identifier: Apache-2.0
"""What a schedule can do to engines: operators, accidents, and strangers on the network."""

import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

from omni_connector.arena.block_index import Tags
from omni_connector.errors import ProtocolError
from omni_connector.net.orders import NO_ORDERS, Role
from omni_connector.prefix.cache_orders import AskKeys, BringBlocks
from omni_connector.transports.base import Endpoint
from tests import inspection
from tests.simulation.clients import TIMEOUT_S, Clients
from tests.simulation.engines.engine import SimulatedEngine
from tests.simulation.engines.settings import HANDOFF_TTL_S
from tests.simulation.plan import Plan
from tests.simulation.surroundings.babble import Liar, babble, path_of
from tests.simulation.surroundings.keep import SimulatedKeep
from tests.simulation.surroundings.listeners import LISTENS, ArenaListener
from tests.simulation.surroundings.memory import SimulatedTransport
from tests.simulation.surroundings.neighbours import LyingIndex, SimulatedNeighbours
from tests.simulation.surroundings.world import Violation
from tests.simulation.trainers import training
from tests.simulation.weights import updating

_OPERATOR_S: Final = 60.0

_LOOK_S: Final = 0.5
"""Seconds between two looks of an operator at an engine that drains."""

_DRAIN_S: Final = TIMEOUT_S + 3 * HANDOFF_TTL_S
"""Seconds in which an engine is drained after the last request that it has got: that ends in time,
and nobody may come for its hand-off, on which a lease may end late."""

_LATE_S: Final = 3.0
"""Seconds that an idle engine may take to look at whether it may go."""

_LET_GO_PART: Final = 0.25
"""The last part of vLLM's time-out, in which an engine may let go of hand-offs."""

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
        draining: how many wait for an engine that drains.
        kept: the process that keeps what engines leave; None for none.
        reconnects: how often connections were made anew.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.liars: list[Liar | LyingIndex] = []
        self.operating = 0
        self.draining = 0
        self.kept: SimulatedKeep | None = None
        self._away: dict[str, Any] = {}  # what has happened to engines that are down
        self._update: Any = None  # the one that is under way
        self.reconnects = 0
        self._listed: Tags = np.zeros(0, np.uint64)  # tags of all blocks that slots had until a lie
        for shape in plan.engines:
            self._start(shape.name)

    @property
    def quiet(self) -> bool:
        """Whether no client waits, no operator is at work, and no engine stands still."""
        busy = self.operating or self.draining or self.intents
        return not (self.sent or busy or self.world.stopped)

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
                halves = target.halves
                if halves and not inspection.has_known_weights(halves[0]):
                    # Its weights count as others than those that it was started with. If it
                    # computes now, they are not known before the next reset.
                    self.lingers = True
                    self._may_not_compare()
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

    def _device_failed(self, name: str, owner: str) -> None:
        # All later calls of the process fail, too. So its engine ends when it computes next: vLLM
        # shuts it down, or its process is killed.
        draw = self.world.draw
        end = draw.choice((self.kill, self.restart))
        seconds = draw.choice((0.0, 0.1, 10.0))

        def ends() -> None:
            target = self.engines.get(name)
            if target is not None and target.owner == owner and not target.ends:
                end(name, draw.choice((1.0, 30.0)))

        self.world.later(seconds, ends)

    def drop(self, engine: str, number: int | None) -> None:
        """An operator has an engine drop the prompt of this number in its list, the latest first,
        or all."""
        target = self.engines.get(engine)
        if target is None or not target.halves or not inspection.shares(target.halves[0]):
            return
        kept = inspection.shared_parts(target.halves[0]).kept
        if number is None:
            done = kept.drop_all()
        else:
            prompts = kept.listed(0).prompts[number:]
            done = kept.drop(prompts[0].name) if prompts else None
        self.world.tell(f"{engine} is asked to drop prompt {number}: {done}")

    def move(self, engine: str, to: str, number: int) -> None:
        """An operator has an engine copy the prompt of this number in another's list, which drops
        it then."""
        source, target = (self.engines.get(each) for each in (engine, to))
        both = [each for each in (source, target) if each is not None and each.halves]
        if len(both) < 2 or not all(inspection.shares(each.halves[0]) for each in both):
            return
        prompts = inspection.shared_parts(both[0].halves[0]).kept.listed(0).prompts[number:]
        if prompts:
            self.world.tell(f"{to} is asked to bring a prompt of {engine}")
            self._moved(self._moving(both[0], both[1], prompts[0].name))

    def _moving(
        self, source: SimulatedEngine, target: SimulatedEngine, name: str
    ) -> Iterator[None]:
        """As `omni-connector cache move` does."""
        kept, brings = (inspection.shared_parts(each.halves[0]).kept for each in (source, target))
        ticket, blocks, others = self.world.draw.getrandbits(62), 0, 0
        for group in range(kept.keys(AskKeys(name, 0, 0)).groups):
            keys = kept.keys(AskKeys(name, group, 0))
            if keys is None or not keys.keys:
                continue
            done = brings.bring(BringBlocks(ticket, group, keys.keys))
            while done is None:
                yield
                if self.engines.get(source.name) is not source:
                    return
                if self.engines.get(target.name) is not target:
                    return
                done = brings.bring(BringBlocks(ticket))
            blocks, others = blocks + done.blocks, others + done.others
        brings.bring(BringBlocks(ticket, whole=True))
        self.world.tell(f"{target.name} has {blocks} blocks, and not {others}")
        if blocks and not others:
            kept.drop(name)

    def _moved(self, steps: Iterator[None]) -> None:
        try:
            next(steps)
        except (StopIteration, ProtocolError):  # slots are spread over ranks, or weights changed
            return
        self.world.later(0.05, lambda: self._moved(steps))

    def keep(self, engines: int, seconds: float) -> None:
        """`omni-connector keep` is killed, if it runs, and started with room for so many engines,
        if that is not 0."""
        self._end_keep()
        self.world.tell(f"what engines leave is kept: {engines} for {seconds} s")
        if engines:
            self.kept = SimulatedKeep(self.host, engines, seconds)
            self.host.neighbourhood.keep = self.kept

    def _end_keep(self) -> None:
        kept, self.kept = self.kept, None
        self.host.neighbourhood.keep = None
        if kept is not None:
            kept.close()

    def close(self) -> None:
        super().close()
        self._end_keep()

    def restart(self, engine: str, seconds: float) -> None:
        """An operator shuts an engine down, and starts it again so many seconds later."""
        target = self.engines.pop(engine, None)
        if target is None:
            return
        self.excuses = True
        self.world.tell(f"{engine} is shut down")
        self._away[engine] = self.refusals.happens(engine)

        target.ends = True
        target.call(lambda: self._ended(target, seconds))

    def _start_later(self, engine: str, seconds: float) -> None:
        def start() -> None:
            if self.operating:  # the weights that it would load are about to change
                self.world.later(0.1, start)
                return
            self.world.tell(f"{engine} starts again")
            self._start(engine)
            self.refusals.back(self._away[engine])

        self.world.later(seconds, start)

    def order_role(self, engine: str, role: Role) -> None:
        """An operator gives an engine a role, which its configuration may not allow."""
        target = self.engines.get(engine)
        if target is None:
            return
        self.world.tell(f"{engine} is given the role {role}")
        # Of several children of a prompt, some may fetch before, and some not any more.
        self.refusals.happens(None)
        self._order(target, role=role)

    def _order(self, target: SimulatedEngine, **changes: Any) -> None:
        owner = str(target.owner)
        before = self.orders.get(owner, NO_ORDERS)
        self.orders[owner] = msgspec.structs.replace(before, **changes)

    def drain(self, engine: str, leaves: bool, seconds: float) -> None:
        """An operator has an engine drain. When it is empty, it is restarted, or it serves again
        after so many seconds."""
        target = self.engines.get(engine)
        if target is None or self.operating or not target.halves:
            return
        if self.orders.get(str(target.owner), NO_ORDERS).drain:
            return  # another operator waits for that already
        self.world.tell(f"{engine} is to drain")
        self.draining += 1
        self._order(target, drain=True)
        serving = inspection.serving(target.halves[0])
        began, arrived = self.world.now - self.lag, -1

        def ends() -> None:
            self.draining -= 1

        def undo() -> None:
            self._order(target, drain=False)
            ends()

        def look() -> None:
            nonlocal began, arrived
            if self.engines.get(engine) is not target or engine in self.deaf:
                ends()  # it was killed, or no thread reads orders any more
                return
            service, now = serving.service(), self.world.now - self.lag
            if service.arrived != arrived or self.operating:
                began, arrived = now, service.arrived
            if service.phase == "drained" and not target.has_inputs:
                self._is_empty(target)
                self.world.tell(f"{engine} is drained")
                if leaves:
                    ends()
                    self.engines.pop(engine)
                    self._goes(target, seconds)
                else:
                    self.world.later(seconds, undo)
                return
            if now > began + _DRAIN_S + self._slack:
                raise Violation("never_drained", f"{engine} does not drain: {service}")
            self.world.later(_LOOK_S, look)

        self.world.later(_LOOK_S, look)

    def _is_empty(self, target: SimulatedEngine) -> None:
        """Check that an engine which says that it is drained holds nothing for anybody."""
        half = target.halves[0]
        requests = [each.request_id for each in self.sent.values() if each.engine is target]
        handoffs = len(inspection.handoffs(half))
        if requests or handoffs or half.copying():
            raise Violation(
                "drained_early",
                f"{target.name} says that it is drained, with requests {requests} and "
                f"{handoffs} hand-offs",
            )

    def leave(self, engine: str, timeout: float, seconds: float) -> None:
        """vLLM shuts an engine down with a time-out: it takes no new requests, ends those that it
        has, and goes when its connector lets it go. It starts again so many seconds later."""
        target = self.engines.get(engine)
        if target is None or self.operating or not target.halves:
            return
        self.leaving[engine] = self.engines.pop(engine)
        self.lingers = True  # what is prefilled for it now
        self.world.tell(f"{engine} is shut down within {timeout:g} s")
        self.draining += 1
        half, world = target.halves[0], self.world
        ends_at = world.now + timeout
        late_at = ends_at - self.lag + _LATE_S + self._slack
        target.call(lambda: half.leave(timeout))

        def look() -> None:
            late = world.now - self.lag > late_at
            if target.has_inputs or not (target.idle or late):
                world.later(_LOOK_S, look)
                return
            self.draining -= 1
            del self.leaving[engine]
            if inspection.handoffs(half) and world.now < ends_at - timeout * _LET_GO_PART:
                raise Violation("left_early", f"{engine} goes, and takes hand-offs with it")
            # Its last requests and copies may have ended a moment ago.
            if late and inspection.serving(half).stays():
                raise Violation("never_leaves", f"{engine} stays longer than its time-out")
            # What it has not ended by now is lost, as vLLM kills it.
            self.excuses = self.excuses or late or bool(inspection.handoffs(half))
            self._goes(target, seconds)

        world.later(_LOOK_S, look)

    def _goes(self, target: SimulatedEngine, seconds: float) -> None:
        """An engine that has been drained ends, and starts again so many seconds later."""
        engine = target.name
        self.left = self.lingers = True
        self._away[engine] = self.refusals.happens(engine)
        target.ends = True

        def stop() -> None:
            lost = [each.request_id for each in self.sent.values() if each.engine is target]
            if lost and not self.excuses:
                raise Violation("request_lost", f"{engine} goes with the requests {lost}")
            self._ended(target, seconds)

        target.call(stop)

    def _ended(self, target: SimulatedEngine, seconds: float) -> None:
        target.shutdown()
        self.world.dead.add(str(target.owner))
        self.net.kill(str(target.owner))
        self.host.kill(str(target.owner))
        self._lost(target)
        self._start_later(target.name, seconds)

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
                for slot in range(len(arena.slots)):
                    # One page of the block, another in each slot; none in what holds no block.
                    length = max(8, arena.header(slot).length)
                    arena.slots[slot, (7 + 320 * slot) % length] ^= 0x10

    def end_thread(self, engine: str, thread: str) -> None:
        """One of the connector's threads ends, as none should."""
        target = self.engines.get(engine)
        if target is None:
            return
        self.excuses = self.expected_errors = True
        self.refusals.happens(engine)
        self.world.tell(f"{thread} of {engine} ends")
        if thread == LISTENS:
            for listener in self._listeners(target):
                listener.die()
        for turns in target.turns(thread):
            if thread == "omni-control":
                self.deaf.add(engine)
            turns.die()

    def hang_up(self, engine: str, number: int) -> None:
        """Strangers ask for arenas of an engine, and are gone before they are answered."""
        target = self.engines.get(engine)
        draw = random.Random(number)
        for name, (owner, _) in list(self.host.arenas.items()):
            if target is not None and owner == target.owner and name in self.host.listeners:
                self.host.listeners[name].hang_up(name, draw)

    def _listeners(self, engine: SimulatedEngine) -> list[ArenaListener]:
        listeners = self.host.listeners.values()
        return list(dict.fromkeys(each for each in listeners if each.owner == engine.owner))

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
        if target is None or not isinstance(home, SimulatedNeighbours):
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
        if self.operating or self.draining:
            return  # there is one operator
        self.operating += 1
        self.excuses = True
        self._update = self.refusals.happens(None)
        self._may_not_compare()
        self._operate(updating(self, **how), self.world.now - self.lag + _OPERATOR_S + self._slack)

    def _may_not_compare(self) -> None:
        """Weights have changed, or count as changed, and no trainer names them: from now on engines
        of other ranks and pipeline stages refuse each other, as they cannot compare them. What is
        refused stays until its time is over."""
        layouts = {(each.shape.ranks, each.shape.stages) for each in self._started.values()}
        if len(layouts) > 1:
            self.lingers = True
            self.refusals.happens(None)

    def train(self, engine: str, **how: Any) -> None:
        """A trainer gives one engine other weights."""
        target = self.engines.get(engine)
        if target is None or self.operating or self.draining:
            return
        self.operating += 1
        self.voids = self.excuses = True
        self.refusals.happens(None)  # from now on engines may have weights that cannot be compared
        self._update = self.refusals.happens(None)
        steps = training(self, target, **how)
        self._operate(steps, self.world.now - self.lag + _OPERATOR_S + self._slack)

    def _operate(self, steps: Iterator[float], deadline: float) -> None:
        if self.world.now - self.lag > deadline:
            raise Violation("never_ends", "the weights cannot be updated: caches are not free")
        pause = next(steps, None)
        if pause is None:
            self.operating -= 1
            self.refusals.over(self._update)
        else:
            self.world.later(pause, lambda: self._operate(steps, deadline))
