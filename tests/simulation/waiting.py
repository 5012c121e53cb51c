# SPDX-License-Identifier: Apache-2.0
"""What must hold of an arena's slots after each step: they are given in order, none twice, and kept
while somebody reads them."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from vllm.v1.request import RequestStatus

from omni_connector.errors import OmniError
from tests import inspection
from tests.simulation.engines.engine import SimulatedEngine
from tests.simulation.surroundings.world import Violation

_STOOD_STILL_S: Final = 0.2
_A_MOMENT_S: Final = 0.01
# A piece of a load may begin just before the end of its lease.
_LATE_S: Final = 3.0
# Less than the time after which a load is given up.
_LONGEST_LOAD_S: Final = 2.0


class Waiters:
    """Looks at the prefills of one engine that want room in its arena.

    Args:
        name: of the engine.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._next: Any = None  # for whom there was room after the step before

    def look(self, half: Any) -> None:
        """Look at a scheduler half that has just built a step.

        Raises:
            Violation: one waits although there is room, was overtaken by one that came later, or
                two of the same prompt have slots of their own.
        """
        for twins in inspection.twins(half):
            if len(twins) > 1:
                self._compare([twin.held for twin in twins])
        first = inspection.first_waiting(half)
        if first is not None and first is self._next:
            raise Violation("never_ends", f"{self._name} has room, and {_id(first)} waits for some")
        self._next = first if first is not None and _fits(first, half) else None
        if first is None:
            return
        for send in inspection.sends(half).values():
            if send.handoff is not None and (send.wait_until or 0.0) > first.wait_until:
                raise Violation(
                    "overtaken",
                    f"{_id(first)} waits for room at {self._name}, {_id(send)} has some",
                )

    def _compare(self, held: list[Any]) -> None:
        if not all(np.array_equal(held[0], other) for other in held[1:]):
            raise Violation("left_behind", f"{self._name} keeps two copies of one prompt")


class Asking:
    """Looks at what one decode engine asks its peers for, and how often.

    Args:
        engine: it.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._asked: dict[str, tuple[Any, float]] = {}

    def look(self, half: Any) -> None:
        """Look at a scheduler half that has just built a step.

        Raises:
            Violation: a lease is requested again although the engine has hardly stood still since.
        """
        seconds = self._engine.unoccupied.seconds
        now: dict[str, tuple[Any, float]] = {}
        for request_id, load in inspection.fetches(half).items():
            former, before = now[request_id] = self._asked.get(
                request_id, (None, self._engine.arrived[request_id])
            )
            if load.former is None or load.former is former:
                continue
            # Other threads may have held up the step since it asked.
            now[request_id] = load.former, self._engine.step_began
            if seconds - before < _STOOD_STILL_S:
                raise Violation(
                    "asks_again",
                    f"{self._engine.name} requests the lease of {request_id} again, although "
                    "it has hardly stood still since",
                )
        self._asked = now


class Loads:
    """Looks at what one engine loads, how long it takes, and what it has leased for that.

    Args:
        engine: it.
        quick: whether nothing is slow, so that no load from the host takes any time.
    """

    def __init__(self, engine: SimulatedEngine, *, quick: bool) -> None:
        self._engine = engine
        self._quick = quick
        self._started: set[str] = set()
        self._waits_since: dict[str, float] = {}
        self._watched = False
        self._steps = 0.0, 0.0  # when the last two were built
        self.not_before = 0.0

    def stood_still(self, until: float) -> None:
        """Nobody could act before that."""
        self.not_before = max(self.not_before, until)

    def look(self, half: Any) -> None:
        """Look at a scheduler half that has just built a step.

        Raises:
            Violation: a load has begun although its lease is about to end, or has been called good
                long after that; a lease is kept that is not used; a request without hand-off waits
                for what its host has.
        """
        if not self._watched:
            self._watched = True
            inspection.watch_loads(half, self._ends)
        name, now, loads = self._engine.name, inspection.now(half), inspection.fetches(half)
        self._steps = self._steps[1], now
        self._started &= loads.keys()
        for request_id, load in loads.items():
            if load.lease is None:
                continue
            if load.job_id is None:
                if load.request.status == RequestStatus.RUNNING and not load.ended:
                    raise Violation(
                        "left_behind", f"{name} keeps a lease for {request_id}, and computes it"
                    )
            elif request_id not in self._started:
                self._started.add(request_id)
                left, whole = load.lease.expires - now, load.lease.granted.lease_s
                if left < min(1.0, whole / 4) - _A_MOMENT_S:
                    raise Violation(
                        "late_read", f"{name} loads {request_id}, whose lease ends in {left:.2f} s"
                    )
        if self._quick:
            self._nobody_waits(now)

    def _ends(self, load: Any, failure: str | None) -> None:
        # It has ended after the step before was built, and a step may take long.
        late = self._steps[0] - max(load.lease.expires, self.not_before)
        if failure is None and late > _LATE_S:
            raise Violation(
                "late_read",
                f"{self._engine.name} has read slots for {_id(load)} {late:.1f} s after the lease",
            )

    def _nobody_waits(self, now: float) -> None:
        waiting: dict[str, float] = {}
        held_up = self._engine.world.held_up.get(self._engine.owner, 0.0)
        not_before = max(self.not_before, held_up)
        for request_id, request in self._engine.scheduler.requests.items():
            if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS or request.kv_transfer_params:
                continue
            since = waiting[request_id] = self._waits_since.get(request_id, now)
            if now - max(since, not_before) > _LONGEST_LOAD_S:
                raise Violation(
                    "delayed", f"{request_id} at {self._engine.name} waits for its host"
                )
        self._waits_since = waiting


class Listed:
    """Looks at the index of one engine.

    Args:
        name: of the engine.

    Attributes:
        names: the key in the header of each slot that is listed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.names: dict[int, bytes] = {}
        self._seen: dict[int, int] = {}
        self._beginnings: tuple[bytes, ...] = ()

    def look(self, half: Any, *workers: Any) -> None:
        """Look at halves that have just built a step.

        Raises:
            Violation: a slot is listed that does not hold, on each rank or on the one that owns
                it, a block of this epoch in the generation that the index says.
        """
        if not inspection.shares(half):
            return
        slots, generations, held = inspection.listed(half)
        beginnings = inspection.key_beginnings(half)
        if not np.array_equal(generations, held):
            raise Violation("lists_wrong", f"{self._name} lists slots that hold something else")
        listed = dict(zip(slots.tolist(), generations.tolist(), strict=True))
        renamed = beginnings != self._beginnings
        names: dict[int, bytes] = {}
        for slot, generation in listed.items():
            if renamed or self._seen.get(slot) != generation:
                for worker in workers:
                    stripe, stripes = inspection.stripe(worker)
                    if slot % stripes == stripe:
                        arena = inspection.arena(worker)
                        names[slot] = self._compare(arena, slot // stripes, generation, beginnings)
            else:
                names[slot] = self.names[slot]
        self.names, self._seen, self._beginnings = names, listed, beginnings

    def _compare(
        self, arena: Any, slot: int, generation: int, beginnings: tuple[bytes, ...]
    ) -> bytes:
        try:
            header = arena.verify(slot, generation)
        except OmniError as error:
            raise Violation("lists_wrong", f"{self._name} lists a slot: {error}") from error
        if not header.key.startswith(beginnings):
            raise Violation("lists_wrong", f"{self._name} lists slot {slot} of another epoch")
        return bytes(header.key)


def leases_hold(name: str, half: Any, owners: Mapping[str, Any]) -> None:
    """Look at the leases of a scheduler half, where nothing went wrong.

    Args:
        name: of its engine.
        owners: the scheduler halves of all engines.

    Raises:
        Violation: slots that it may read are not held for it.
    """
    for load in inspection.fetches(half).values():
        engine_id = load.remote.remote_engine_id
        owner = owners.get(engine_id)
        if load.lease is None or owner is None or inspection.now(owner) >= load.lease.expires:
            continue
        token = load.lease.token
        if not any(each.leases for each in inspection.handoffs(owner) if each.token == token):
            raise Violation(
                "lease_lost",
                f"{engine_id} does not hold what {_id(load)} has a lease for at {name}",
            )


def being_saved(half: Any) -> list[str]:
    """The requests of a scheduler half whose KV is being copied to its arena."""
    return [request_id for request_id, send in inspection.sends(half).items() if send.jobs]


def _fits(send: Any, half: Any) -> bool:
    there = inspection.free_for(half, send.keys)
    return sum(map(len, send.keys)) <= there and inspection.has_shards(half, send.keys)


def _id(send: Any) -> str:
    return str(send.request.request_id)
