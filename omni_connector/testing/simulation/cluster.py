# SPDX-License-Identifier: Apache-2.0
"""The engines of a simulation, their clients and operators, and all that can happen to them."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.engine import FinishReason

from omni_connector.kv import make_copier
from omni_connector.testing.simulation.babble import Liar, babble
from omni_connector.testing.simulation.connector import SURROUNDINGS_OF
from omni_connector.testing.simulation.copiers import RaisingCopier
from omni_connector.testing.simulation.engine import SimulatedEngine
from omni_connector.testing.simulation.memory import (
    Host,
    Shelf,
    SimulatedStore,
    SimulatedTransport,
)
from omni_connector.testing.simulation.plan import Plan
from omni_connector.testing.simulation.waiting import Asking, Waiters, being_saved, leases_hold
from omni_connector.testing.simulation.weights import updating
from omni_connector.testing.simulation.wires import STRANGER, Net, SimulatedSockets, Weather
from omni_connector.testing.simulation.world import SimulatedTurns, Violation, World
from omni_connector.transports.base import Endpoint
from omni_connector.transports.choice import Transports
from omni_connector.vllm_v1.surroundings import Surroundings

HANDOFF: Final = {"do_remote_decode": True, "do_remote_prefill": False}

PATIENCE_S: Final = 90.0
"""Seconds after which a request must have ended: all waits of the connector, and a queue."""

_FAST: Final = 0.0005

_OPERATOR_S: Final = 60.0


@dataclass(eq=False)
class Sent:
    """A request that a client has sent.

    Attributes:
        engine: where; that very one, not a later one of its name.
        deadline: when it must have ended.
        done: called with its end: `kv_transfer_params` of the answer, and whether it went well.
    """

    request_id: str
    engine: SimulatedEngine
    max_tokens: int
    deadline: float
    done: Callable[[Any, bool], None]
    tokens: int = 0
    ended: bool = False
    aborted: bool = False


class Cluster:
    """Engines and whoever uses them.

    Args:
        plan: engines and troubles; its events are given by who runs it.
    """

    def __init__(self, plan: Plan) -> None:
        trouble = plan.trouble
        self.world = World(plan.seed, plan.pace)
        self.net = Net(
            self.world,
            Weather(*(trouble.get(name, 0.0) for name in ("lost", "doubled", "late"))),
        )
        self.host = Host(self.world, mapped=plan.mapped)
        self.host.failing = trouble.get("failing", 0.0)
        self.host.slow = trouble.get("slow", 0.0)
        self.host.garbled = trouble.get("garbled", 0.0)
        self.shelf = Shelf(self.world)
        self.shelf.absent = trouble.get("store_absent", 0.0)
        self.shelf.slow = trouble.get("store_slow", 0.0)
        self.shelf.forgets = trouble.get("store_forgets", 0.0)
        self.raising = {
            "save": trouble.get("raising_saves", 0.0),
            "load": trouble.get("raising_loads", 0.0),
        }
        # What may make a request fail where vLLM is told to let it; a slow engine is late, too.
        step_s = max(shape.step_s for shape in plan.engines)
        self.excuses = bool(trouble) or plan.pace > _FAST or step_s > 0
        self._slack = 5000 * plan.pace + 300 * step_s
        self.expected_errors = any(self.raising.values())
        self.plan = plan
        self.shapes = {shape.name: shape for shape in plan.engines}
        self.engines: dict[str, SimulatedEngine] = {}
        self.sent: dict[str, Sent] = {}
        self.liars: list[Liar] = []
        self.operating = 0
        self.intents = 0  # what clients are about to do
        self._thinking: list[Callable[[], None]] = []
        self._leaving: set[str] = set()
        self.deaf: set[str] = set()  # engines whose leases end with their steps
        self.voids = False  # whether hand-offs may have become void
        self.lingers = False  # whether there may be hand-offs that nobody claims
        self.lag = 0.0  # seconds that passed without anybody's fault
        self._weights = 0
        self._numbers = itertools.count()
        self._incarnations = itertools.count()
        for shape in plan.engines:
            self._start(shape.name)

    @property
    def weights(self) -> bytes:
        """Of the model that is served."""
        return b"w%d" % self._weights

    def close(self) -> None:
        """Stop all engines."""
        for engine in list(self.engines.values()):
            engine.shutdown()
        self.net.kill(STRANGER)

    def _start(self, name: str) -> None:
        owner = f"{name}.{next(self._incarnations)}"
        SURROUNDINGS_OF[name] = self._surroundings(owner)
        engine = SimulatedEngine(
            self.world,
            self.shapes[name],
            self.weights,
            functools.partial(self._answered, owner),
            lambda: look(),
        )
        look = functools.partial(self._look, engine, Waiters(name), Asking(engine))
        engine.owner = owner
        self.engines[name] = engine

    def _surroundings(self, owner: str) -> Surroundings:
        world = self.world
        model = f"weights {self._weights}/"
        transport = functools.partial(SimulatedTransport, self.host, owner)

        def transports(config: Any) -> Transports:
            each = transport()
            return Transports([each], [each])

        def copier(caches: Any, layout: Any) -> Any:
            return RaisingCopier(world, self.raising, make_copier(caches, layout))

        return Surroundings(
            clock=world.clock,
            randbytes=world.randbytes,
            start=functools.partial(SimulatedTurns, world, owner),
            sockets=lambda: SimulatedSockets(self.net, owner),
            transports=transports,
            block_store=lambda settings, lends: SimulatedStore(self.shelf, model),
            copier=copier,
            populate=False,
        )

    def _look(self, engine: SimulatedEngine, waiters: Waiters, asking: Asking) -> None:
        name = engine.name
        if self.engines.get(name) is not engine or not engine.halves:
            return
        half = engine.halves[0]
        waiters.look(half)
        asking.look(half)
        self._leave(half)
        if not (self.excuses or self.voids):
            owners = {e.shape.name: e.halves[0] for e in self.engines.values() if e.halves}
            leases_hold(name, half, owners)

    def _leave(self, half: Any) -> None:
        """Clients that are about to leave do so while the first copies of their KV are made."""
        for request_id in being_saved(half) if self._leaving else ():
            if request_id not in self._leaving:
                continue
            self._leaving.discard(request_id)
            if sent := self.sent.get(request_id):
                self.world.tell(f"the client of {request_id} goes away, whose KV is being copied")
                self._gone(sent)

    # Requests

    def _send(
        self,
        engine: str,
        prompt: tuple[int, int],
        max_tokens: int,
        done: Callable[[Any, bool], None] = lambda params, well: None,
        **options: Any,
    ) -> Sent | None:
        target = self.engines.get(engine)
        if target is None:  # it is down, and the client is told so
            done(None, False)
            return None
        request_id = f"r{next(self._numbers)}"
        params = options.get("params")
        what = ""
        if params is not None:
            what = " to be handed off" if params.get("do_remote_decode") else " prefilled elsewhere"
        family, length = prompt
        self.world.tell(
            f"{request_id}: {length} tokens of text {family}{what} go to {engine}, "
            f"{max_tokens} wanted"
        )
        deadline = self.world.now - self.lag + PATIENCE_S + self._slack
        sent = Sent(request_id, target, max_tokens, deadline, done)
        self.sent[request_id] = sent
        target.submit(request_id, text(family, length), max_tokens, **options)
        return sent

    def _answered(
        self, owner: str, request_id: str, tokens: list[int], reason: Any, params: Any
    ) -> None:
        sent = self.sent.get(request_id)
        if sent is None:  # aborted
            self.lingers = self.lingers or bool(params)
            return
        sent.tokens += len(tokens)
        if reason is None:
            return
        del self.sent[request_id]
        sent.ended = True
        well = reason in (FinishReason.LENGTH, FinishReason.STOP)
        self.world.tell(f"{request_id} ends: {reason}, {sent.tokens} tokens")
        # An operator may reset a prefill engine while its KV is read.
        void = self.voids and sent.engine.shape.policy == "fail"
        if not (well or sent.aborted or self.excuses or void):
            raise Violation(
                "request_failed", f"{request_id} ends with {reason} although nothing went wrong"
            )
        sent.done(params, well)

    @property
    def quiet(self) -> bool:
        """Whether nobody wants anything."""
        return not (self.sent or self.operating or self.intents or self.world.stopped)

    def overdue(self) -> Sent | None:
        """A request that should have ended by now."""
        now = self.world.now - self.lag
        return next((each for each in self.sent.values() if now > each.deadline), None)

    def give_up(self, sent: Sent) -> None:
        """A client goes away because nothing comes."""
        self.world.tell(f"vLLM at {sent.engine.name} stalls; the client of {sent.request_id} goes")
        self._gone(sent)
        for other in self.sent.values():  # which it has kept waiting
            if other.engine is sent.engine:
                other.deadline = self.world.now - self.lag + PATIENCE_S + self._slack

    def _gone(self, sent: Sent) -> None:
        sent.aborted = True
        del self.sent[sent.request_id]
        sent.engine.abort(sent.request_id)

    # What happens; each is an event of a plan

    def serve(self, engine: str, prompt: tuple[int, int], tokens: int, priority: int) -> None:
        """A request without hand-off."""
        self._send(engine, prompt, tokens, priority=priority)

    def hand_off(
        self,
        prefill: str,
        decode: str,
        prompt: tuple[int, int],
        tokens: int,
        times: int,
        again: int,
        prefills: int,
        pause: float,
        priority: int,
        mixed_up: bool,
        leaves: bool,
        rejected: bool,
    ) -> None:
        """A prompt is prefilled here and decoded there.

        Args:
            times: children of n > 1 on the decode side.
            again: how often the decode request is sent again after it has ended.
            prefills: how often the same prefill is asked for at once.
            pause: seconds between the two.
            mixed_up: the decode request is of another text.
            leaves: the first client that has a prefill goes away while its KV is copied.
            rejected: the decode engine's server refuses the last of the children, and vLLM passes
                on a prompt of one token in its place, aborted at once, for its hand-off's sake.
        """
        self.lingers = self.lingers or mixed_up
        asked = ((prompt[0] + 1) % 3, prompt[1]) if mixed_up else prompt

        def decoded(left: int, params: Any) -> None:
            if left > 0:
                self._send(
                    decode,
                    asked,
                    tokens,
                    lambda *_: decoded(left - 1, params),
                    params=dict(params),
                    priority=priority,
                )

        def prefilled(params: Any, well: bool) -> None:
            self.intents += 1

            def go_on() -> None:
                if go_on not in self._thinking:  # it has been hastened
                    return
                self._thinking.remove(go_on)
                self.intents -= 1
                if not well or params is None:
                    self._send(decode, prompt, tokens, priority=priority)
                    return
                for number in range(times - rejected):
                    decoded(1 + (again if number == 0 else 0), params)
                if rejected:
                    self._reject(decode, params)

            self._thinking.append(go_on)
            self.world.later(pause, go_on)

        for number in range(prefills):
            params = dict(HANDOFF)
            sent = self._send(prefill, prompt, 1, prefilled, params=params, priority=priority)
            if sent is not None and leaves and number == 0:
                self._leaving.add(sent.request_id)

    def hasten(self) -> None:
        """Who is about to send a decode request does so now."""
        for go_on in self._thinking.copy():
            go_on()

    def _reject(self, engine: str, params: Any) -> None:
        target = self.engines.get(engine)
        if target is not None:
            request_id = f"r{next(self._numbers)}"
            self.world.tell(f"{request_id}: {engine} rejects a request, and passes on its params")
            target.submit(request_id, [0], 1, params=dict(params))
            target.abort(request_id)

    def abort(self, number: int) -> None:
        """A client goes away."""
        if self.sent:
            sent = list(self.sent.values())[number % len(self.sent)]
            self.world.tell(f"the client of {sent.request_id} goes away")
            self._gone(sent)

    def preempt(self, engine: str) -> None:
        """Whatever runs is preempted, and computed again."""
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

    def reset(self, engine: str, connector: bool) -> None:
        """The prefix cache is reset where that can be done at once; weights stay."""
        self.voids = True
        target = self.engines.get(engine)
        if target is not None:
            self.world.tell(f"the prefix cache of {engine} is reset, connector: {connector}")
            target.call(lambda: target.scheduler.reset_prefix_cache(False, connector))

    def kill(self, engine: str, seconds: float) -> None:
        """SIGKILL, and a new engine of the name so much later."""
        target = self.engines.pop(engine, None)
        if target is None or target.owner is None:
            return
        self.excuses = True
        self.world.tell(f"{engine} is killed")
        world, owner = self.world, target.owner
        target.alive = False
        world.dead.add(owner)
        for actor in [actor for actor in world.actors if actor.owner == owner]:
            world.remove(actor)
        self.net.kill(owner)
        self.host.kill(owner)
        self._lost(target)
        self._start_later(engine, seconds)

    def restart(self, engine: str, seconds: float) -> None:
        """The engine is stopped as it should be, and started again so much later."""
        target = self.engines.pop(engine, None)
        if target is None:
            return
        self.excuses = True
        self.world.tell(f"{engine} is shut down")

        def stop() -> None:
            target.shutdown()
            self.world.dead.add(str(target.owner))
            self.net.kill(str(target.owner))
            self.host.kill(str(target.owner))
            self._lost(target)
            self._start_later(engine, seconds)

        target.call(stop)

    def _lost(self, engine: SimulatedEngine) -> None:
        for sent in [sent for sent in self.sent.values() if sent.engine is engine]:
            del self.sent[sent.request_id]
            sent.done(None, False)

    def _start_later(self, engine: str, seconds: float) -> None:
        def start() -> None:
            if self.operating:  # what it loads now would be the old weights, or not yet the new
                self.world.later(0.1, start)
                return
            self.world.tell(f"{engine} starts again")
            self._start(engine)

        self.world.later(seconds, start)

    def stop(self, engine: str, seconds: float) -> None:
        """SIGSTOP: all of it stands still for so long."""
        target = self.engines.get(engine)
        if target is None or target.owner is None:
            return
        self.excuses = True
        self.world.tell(f"{engine} stands still for {seconds:g} s")
        owner = target.owner
        self.world.stopped.add(owner)
        self.host.silent.add(owner)
        self.lag += seconds

        def go_on() -> None:
            self.world.stopped.discard(owner)
            self.host.silent.discard(owner)

        self.world.later(seconds, go_on)

    def jump(self, seconds: float) -> None:
        """The host sleeps, and wakes."""
        self.excuses = True
        self.world.tell(f"the clock jumps by {seconds:g} s")
        self.world.advance(seconds)
        self.lag += seconds

    def spoil(self, engine: str) -> None:
        """Bytes in an arena change, and in the shared store."""
        self.excuses = True
        for key, entry in self.shelf.entries.items():
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
        self.world.tell(f"{thread} of {engine} ends")
        for turns in target.turns(thread):
            if thread == "omni-control":  # it says what it leaves, and that it does
                self.deaf.add(engine)
                turns.sleep.broken = True
                turns.wake()
            else:
                turns.die()

    def babble(self, engine: str, number: int) -> None:
        """A stranger says anything that decodes to a serving engine."""
        target = self.engines.get(engine)
        if target is not None:
            self.excuses = True
            babble(self.net, engine, random.Random(number))

    def mislead(self, engine: str, number: int) -> None:
        """A request comes with the params of a serving peer that answers anything that decodes."""
        target = self.engines.get(engine)
        if target is None:
            return
        self.excuses = True
        liar = Liar(self.net, f"L{number % 3}", random.Random(number), self._endpoints())
        self.liars.append(liar)
        draw = random.Random(number)
        for _ in range(draw.randrange(1, 4)):
            self._send(engine, (draw.randrange(3), 13), 3, params=liar.params(12))

    def _endpoints(self) -> list[Endpoint]:
        return [
            Endpoint.of(arena, SimulatedTransport.transport, name)
            for name, (_, arena) in sorted(self.host.arenas.items())
        ]

    # Weights

    def update_weights(self, **how: Any) -> None:
        """All engines are paused, get other weights, have their caches reset, and go on."""
        if self.operating:
            return  # there is one operator
        self.operating += 1
        self.excuses = True
        self._operate(updating(self, **how), self.world.now - self.lag + _OPERATOR_S + self._slack)

    def _operate(self, steps: Iterator[float], deadline: float) -> None:
        if self.world.now - self.lag > deadline:
            raise Violation("never_ends", "the weights cannot be updated: caches are not free")
        pause = next(steps, None)
        if pause is None:
            self.operating -= 1
        else:
            self.world.later(pause, lambda: self._operate(steps, deadline))

    def new_weights(self) -> int:
        """Other weights are there to be loaded; their number."""
        self._weights += 1
        return self._weights

    def abort_all(self, engine: SimulatedEngine) -> None:
        """Whoever waits for an engine is told that its request is over."""
        for sent in list(self.sent.values()):
            if sent.engine is engine:
                self._gone(sent)  # also those that the engine has yet to take in
        engine.abort_all()


def text(family: int, length: int) -> list[int]:
    """Token ids; of one family, a shorter text is the beginning of a longer one."""
    draw = random.Random(family)
    return [draw.randrange(3, 500) for _ in range(length)]
