# SPDX-License-Identifier: Apache-2.0
"""The engines of a simulation, and what they run in: processes, a network, a shared store."""

import functools
import itertools
from collections import defaultdict
from typing import Any, Final

from omni_connector.copy.choice import make_copier
from omni_connector.errors import ConfigError, LayoutError
from omni_connector.identity.epochs import WeightsSaid
from omni_connector.net.orders import NO_ORDERS, Orders
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import Turn, Turns
from omni_connector.transports.choice import Transports
from omni_connector.vllm_v1.adapter_loads import AdapterLoads
from omni_connector.vllm_v1.surroundings import Surroundings
from tests import inspection
from tests.simulation.engines.connector import (
    ADAPTERS_OF,
    IS_LATE,
    SURROUNDINGS_OF,
)
from tests.simulation.engines.copiers import TroubledCopier
from tests.simulation.engines.engine import (
    SimulatedEngine,
    SimulatedRankCopies,
)
from tests.simulation.engines.other import OTHER_OF, OtherSettings
from tests.simulation.engines.settings import copies_by_layer
from tests.simulation.plan import SLOW_S, Plan
from tests.simulation.promises import Promises, Wishes
from tests.simulation.refusals import Refusals
from tests.simulation.surroundings.device import Device, DeviceCopier
from tests.simulation.surroundings.files import FileShelf
from tests.simulation.surroundings.memory import (
    Host,
    SimulatedRanks,
    SimulatedTransport,
    TroubledShelf,
    UnwrittenFile,
)
from tests.simulation.surroundings.neighbours import SimulatedNeighbours
from tests.simulation.surroundings.precedence import Precedence
from tests.simulation.surroundings.wires import (
    STRANGER,
    Net,
    SimulatedSockets,
    Weather,
)
from tests.simulation.surroundings.world import (
    SimulatedLock,
    SimulatedTurns,
    Violation,
    World,
)
from tests.simulation.waiting import Asking, Listed, Loads, Waiters

_FAST: Final = 0.0005

# What goes wrong and excuses nothing: no request is late for it, and none fails.
_HARMLESS: Final = {
    "slow_copies",
    "slow_loads",
    "met_late",
    "hits_lost",
    "hits_nonsense",
    "refuses",
    "other_often",
    "other_later",
    "files",
    "file_torn",
    "store_holes",
    "store_vanishing",
    "ids_again",
}

# What goes wrong without making anything slow.
_QUICK: Final = {
    "ids_again",
    "met_late",
    "hits_lost",
    "hits_nonsense",
    "refuses",
    "failing",
    "garbled",
    "raising_loads",
}


class Deployment:
    """Starts and stops engines.

    Args:
        plan: engines and troubles; `run` gives its events.

    Attributes:
        spoiled: whether bytes of the store were changed.
        excuses: whether something happened that may make a request fail.
        voids: whether hand-offs may have become void.
        orders: of operators to engines, by the owner of their threads.
        leaving: engines that take no new requests, and still hold something, by name.
        left: whether an engine has left by a drain, so that what it offered is gone.
        deaf: engines whose control thread has ended, so that their leases end with their steps.
        lag: seconds that passed and count for no deadline, as no engine could act in them.
        refusals: judges hand-offs that are refused.
        wishes: what requests have asked of the prefix cache.
        loads: looks at what each engine loads, by name.
    """

    def __init__(self, plan: Plan) -> None:
        trouble = plan.trouble
        self.world = World(plan.seed, plan.pace, plan.interrupts)
        self.net = Net(
            self.world,
            Weather(
                **{
                    name: trouble.get(name, 0.0)
                    for name in ("lost", "doubled", "late", "late_answers")
                }
            ),
        )
        self.host = Host(self.world, mapped=plan.mapped)
        self.host.failing = trouble.get("failing", 0.0)
        self.host.slow = trouble.get("slow", 0.0)
        neighbourhood = self.host.neighbourhood
        neighbourhood.late = trouble.get("met_late", neighbourhood.late)
        neighbourhood.lost = trouble.get("hits_lost", 0.0)
        neighbourhood.nonsense = trouble.get("hits_nonsense", 0.0)
        self._slow_copies = trouble.get("slow_copies", 0.0)
        self._slow_loads = trouble.get("slow_loads", 0.0)
        self.host.garbled = trouble.get("garbled", 0.0)
        if "files" in trouble:
            files = FileShelf(self.world, int(trouble["files"]))
            files.slow = trouble.get("file_slow", 0.0)
            files.hangs = trouble.get("file_hangs", 0.0)
            files.torn = trouble.get("file_torn", 0.0)
            self.shelf: TroubledShelf = files
        else:
            self.shelf = TroubledShelf(self.world)
        self.shelf.absent = trouble.get("store_absent", 0.0)
        self.shelf.slow = trouble.get("store_slow", 0.0)
        self.shelf.forgets = trouble.get("store_forgets", 0.0)
        self.shelf.holes = trouble.get("store_holes", 0.0)
        self.shelf.vanishing = trouble.get("store_vanishing", 0.0)
        self.raising = {
            "save": trouble.get("raising_saves", 0.0),
            "load": trouble.get("raising_loads", 0.0),
        }
        # vLLM may be told to let a request fail for these; where engines are slow, some are late.
        step_s = max(shape.step_s for shape in plan.engines)
        slow = self._slow_copies > SLOW_S
        self._quick = not (trouble.keys() - _QUICK or plan.pace > _FAST or step_s)
        self.excuses = bool(trouble.keys() - _HARMLESS) or slow or plan.pace > _FAST or step_s > 0
        self._slack = 5000 * plan.pace + 300 * step_s
        self._failing = trouble.get("failing_memory", 0.0), trouble.get("failing_device", 0.0)
        self.expected_errors = any(self.raising.values()) or any(self._failing)
        self.refusals = Refusals(self.world, judges=not (self.excuses or slow or self._slow_loads))
        self.plan = plan
        self.shapes = {shape.name: shape for shape in plan.engines}
        self.engines: dict[str, SimulatedEngine] = {}
        self._started: dict[str, SimulatedEngine] = {}  # those that are being shut down, too
        self.loads: dict[str, Loads] = {}
        self.voids = False
        self.spoiled = False
        self.deaf: set[str] = set()
        self.orders: dict[str, Orders] = {}
        self.leaving: dict[str, SimulatedEngine] = {}
        self.left = False
        self.lag = 0.0
        self.wishes = Wishes(any("wish" in event.how for event in plan.events))
        # The copies of a hand-off are cancelled where its client goes away.
        ends = any(event.what in ("end_thread", "hand_off") for event in plan.events)
        self._copies_fail = ends or self.raising["save"] > 0 or any(self._failing)
        self._weights = 0
        self._said: defaultdict[str | None, WeightsSaid] = defaultdict(WeightsSaid)
        self._incarnations = itertools.count()

    @property
    def weights(self) -> bytes:
        """Content of the weights that are served now."""
        return b"w%d" % self._weights

    def close(self) -> None:
        """Stop all engines."""
        for engine in list(self.engines.values()):
            engine.ends = True  # nobody kills it meanwhile
            engine.shutdown()
        self.net.kill(STRANGER)
        self.shelf.close()
        self.host.close()

    def _start(self, name: str) -> None:
        owner = f"{name}.{next(self._incarnations)}"
        device = None
        if self.plan.buffers:
            failed = functools.partial(self._device_failed, name, owner)
            device = Device(self.world, owner, self._failing, failed)
        SURROUNDINGS_OF[name] = self._surroundings(owner, device)
        ADAPTERS_OF[name] = []
        shape = self.shapes[name]
        IS_LATE.pop(name, None)
        if shape.late_reports:
            IS_LATE[name] = functools.partial(self._is_late, name, owner, shape.late_reports)
        spoils = bool(self.plan.trouble.get("other_spoils"))
        OTHER_OF[name] = OtherSettings(
            world=self.world,
            runner=lambda: engine.runner,
            often=int(self.plan.trouble.get("other_often", 50)),
            later=(shape.overlap and not spoils) or bool(self.plan.trouble.get("other_later")),
            failing=self.plan.trouble.get("other_fails", 0.0),
            spoils=spoils,
        )
        try:
            engine = SimulatedEngine(
                self.world,
                shape,
                self.weights,
                functools.partial(self._answered, owner),
                lambda: look(),
                device,
            )
        except (ConfigError, LayoutError) as error:
            raise Violation("engine_died", f"{name} does not start: {error}") from error
        promises = Promises(engine, self.wishes, copies_fail=self._copies_fail)
        loads = self.loads[name] = Loads(engine, quick=self._quick)
        look = functools.partial(
            self._look, engine, Waiters(name), Asking(engine), loads, Listed(name), promises
        )
        engine.owner = owner
        for rank, half in enumerate(engine.halves[1:]):
            inspection.read_weights(half, functools.partial(engine.runner.digest, rank))
        for half in engine.halves[:1]:
            inspection.hear_refusals(half, self.refusals.heard)
            if often := self.plan.trouble.get("refuses"):
                inspection.refuse_handoffs(
                    half,
                    functools.partial(self.world.chance, often),
                    lambda request_id: self.refusals.heard(request_id, ""),
                )
        self.engines[name] = self._started[name] = engine

    def _device_failed(self, name: str, owner: str) -> None:
        raise NotImplementedError

    def _is_late(self, name: str, owner: str, often: float) -> bool:
        late = self.world.chance(often)
        if late:  # what has been loaded by now may be told with any later step
            self.loads[name].stood_still(self.world.now)
            self.world.stir(owner)  # vLLM steps on while a request waits for its load
        return late

    def called(self, engine: SimulatedEngine, really: bool) -> None:
        """The workers of an engine are called, by whomever, if they are."""
        if really:
            self._said[engine.owner].workers_called()

    def _surroundings(self, owner: str, device: Device | None) -> Surroundings:
        world = self.world
        transport = functools.partial(SimulatedTransport, self.host, owner)

        def transports(config: Any, offers: bool) -> Transports:
            each = transport()
            return Transports([each], [each])

        def copier(caches: Any, layout: Any, helpers: Any) -> Any:  # no thread runs by itself
            made: Any = make_copier(caches, layout)
            if device is not None:
                maps = functools.partial(self.host.maps, owner)
                made = DeviceCopier(device, caches, layout, self.plan.buffers, maps)
            slow = {"save": self._slow_copies, "load": self._slow_loads}
            return TroubledCopier(world, self.raising, slow, made)

        def start(name: str, turn: Turn, **options: Any) -> Turns:
            inspection.watch_choices(turn, Precedence(f"{owner}'s {name}").chosen)
            return SimulatedTurns(world, owner, name, turn, **options)

        def adapter_loads(_: object) -> AdapterLoads:
            found = ADAPTERS_OF[owner.split(".")[0]]
            found.append(AdapterLoads())
            return found[-1]

        return Surroundings(
            context=EngineContext(
                clock=world.clock,
                start=start,
                lock=functools.partial(SimulatedLock, world),
                randbytes=world.randbytes,
            ),
            sockets=lambda: SimulatedSockets(self.net, owner),
            transports=transports,
            block_store=lambda settings, lends: self.shelf.client(owner),
            rank_copies=lambda folder, engine_id, *_: SimulatedRankCopies(self._started[engine_id]),
            neighbours=lambda local_engine, *_: SimulatedNeighbours(
                self.host.neighbourhood, owner, local_engine
            ),
            answer_for_rank=lambda folder, engine_id, rank, answers: self.host.answer_for_rank(
                owner, rank, answers
            ),
            ranks=lambda folder, engine_id, reads: SimulatedRanks(self.host, owner, reads),
            copier=copier,
            adapter_loads=adapter_loads,
            weight_files=None,
            status_file=functools.partial(
                UnwrittenFile, world, lambda: self.orders.get(owner, NO_ORDERS)
            ),
            weights_said=lambda _: self._said[owner],
            head_copies=lambda _: copies_by_layer(self.shapes[owner.split(".")[0]]),
            prefault=False,
            explains=False,
            lingers=False,
        )

    def new_weights(self) -> int:
        """Have other weights ready to be loaded; returns their number."""
        self._weights += 1
        return self._weights

    def _answered(
        self, owner: str, request_id: str, tokens: list[int], reason: Any, params: Any
    ) -> None:
        """An engine has computed tokens of a request, or ended it."""
        raise NotImplementedError

    def _look(
        self,
        engine: SimulatedEngine,
        waiters: Waiters,
        asking: Asking,
        loads: Loads,
        listed: Listed,
        promises: Promises,
    ) -> None:
        """An engine has built a step: check what must hold after it."""
        raise NotImplementedError
