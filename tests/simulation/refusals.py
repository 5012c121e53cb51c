# SPDX-License-Identifier: Apache-2.0
"""Which hand-offs may be refused: those for which something has happened that explains it.

What goes wrong at one engine explains nothing at another, and what is over explains nothing that
begins later. So a hand-off has to succeed after a reset, and beside a failure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tests.inspection import TOO_LATE
from tests.simulation.engines.settings import HANDOFF_TTL_S
from tests.simulation.surroundings.world import NEVER, Violation, World

# Refusals that need nothing to go wrong: of prompts, and of arenas without room.
_ALWAYS: Final = {"arena_full", "nothing_to_hand_off", "passed_on", "prompt_too_long"}

# Refusals of what waited too long, for room or for a step, and the least seconds that takes.
_WAITED: Final = {"lease_expired", "not_ready", "peer_unreachable"}
_WAITED_S: Final = 2.5

_AFTER_S: Final = 6.0
"""Seconds in which a peer that was away may still count as failed."""


@dataclass(eq=False)
class Handed:
    """A hand-off, as its clients know it.

    Attributes:
        since: when its prefill was sent.
        prefill: the engine that prefills.
        excused: whether its requests ask for what there is not.
        used: whether a lease on it has ended, and so maybe the hand-off.
    """

    since: float
    prefill: str
    excused: bool
    used: bool = False


@dataclass(eq=False)
class _Event:
    engine: str | None  # None: all
    begins: float
    ends: float = NEVER


class Refusals:
    """Notes what happens to engines, and judges each refusal by it.

    Args:
        world: its clock.
        judges: whether refusals are judged; not where messages, copies or engines are slow or fail
            by chance, as that explains all.
    """

    def __init__(self, world: World, *, judges: bool) -> None:
        self._world = world
        self._judges = judges
        self.too_late: set[str] = set()  # engines that gave leases up, as their steps came late
        self._events: list[_Event] = []
        self._of: dict[str, tuple[Handed, str]] = {}  # by request, with its engine

    def happens(self, engine: str | None, seconds: float = NEVER) -> _Event:
        """Something goes wrong at an engine, or at all, from now on for so many seconds."""
        now = self._world.now
        event = _Event(engine, now, now + seconds)
        self._events.append(event)
        return event

    def over(self, event: _Event, after: float = 0.0) -> None:
        """It is over, or will be after so many seconds."""
        event.ends = self._world.now + after

    def back(self, event: _Event) -> None:
        """An engine that was away is back."""
        self.over(event, _AFTER_S)

    def sent(self, request_id: str, handed: Handed | None, engine: str) -> None:
        """A request is sent to an engine, maybe under an id that was used before.

        Args:
            handed: the hand-off that it belongs to; None: none that is judged.
        """
        if handed is None:
            self._of.pop(request_id, None)
        else:
            self._of[request_id] = handed, engine

    def left(self, request_id: str) -> None:
        """The client of a request has gone: its lease, if it has one or is about to, ends."""
        if request_id in self._of:
            self._of[request_id][0].used = True

    def heard(self, request_id: str, kind: str) -> None:
        """An engine has refused a hand-off, or with "" for a kind: has ended its lease.

        Raises:
            Violation: nothing explains that.
        """
        if request_id not in self._of:
            return
        handed, engine = self._of[request_id]
        if kind == TOO_LATE:
            self.too_late.add(engine)
            kind = "peer_unreachable"
        if not self._judges:
            return
        if not kind:
            handed.used = True
            return
        waited = self._world.now - handed.since
        if (
            handed.excused
            or kind in _ALWAYS
            or (kind == "no_drafter_kv" and self._world.without_drafter)
            or (kind in _WAITED and waited > _WAITED_S)
            or (kind == "unknown_token" and (handed.used or waited > HANDOFF_TTL_S / 2))
            or self._happened((engine, handed.prefill), handed.since)
        ):
            return
        raise Violation(
            "refused", f"{engine} refuses the hand-off of {request_id} ({kind}) without a reason"
        )

    def _happened(self, engines: Iterable[str], since: float) -> bool:
        named = {None, *engines}
        return any(each.engine in named and each.ends >= since for each in self._events)
