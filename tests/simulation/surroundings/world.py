# SPDX-License-Identifier: Apache-2.0
"""Virtual time, and who acts next.

Everything that happens in a simulation is an act of an actor: a step of an engine, a turn of one of
its threads, a message that arrives, a client that does something. One acts at a time, for one
small piece, and the seed draws whose turn it is.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any, Final

from omni_connector.runtime.turns import Sleep, Turn
from tests import inspection

NEVER: Final = math.inf

_BACK_OFF_S: Final = 0.2
_SOON_S: Final = 0.0003

# Threads that all jobs and messages share: who waits for one peer there holds up the others.
_SHARED_THREADS: Final = ("omni-control", "omni-load", "omni-save")
_DEPTH: Final = 4


class Violation(BaseException):
    """Something that must never happen has; nothing that catches exceptions hides it.

    Attributes:
        kind: one word for what must hold.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Killed(BaseException):
    """The process of the thread that acts has ended while it waited for something."""


class Actor:
    """Something that acts now and then.

    Attributes:
        name: for the trace.
        owner: name of the engine that it ends with; None for the world's own.
        due: when it acts next, in seconds of the clock; `NEVER` until something happens.
        speed: how often it is drawn, beside others that are due.
        waits: it is in the middle of an act.
        on_engine_thread: whether what it does is done by an engine's thread, which may not wait.
        is_shared: whether what it does is done by another thread that may not.
    """

    on_engine_thread = False
    is_shared = False

    def __init__(self, name: str, owner: str | None = None) -> None:
        self.name = name
        self.owner = owner
        self.due = NEVER
        self.speed = 1.0
        self.waits = False

    def act(self) -> None:
        """Do one small piece, and set `due`."""
        raise NotImplementedError

    def look(self) -> None:
        """Something has happened beside it."""

    def may_interrupt(self, owner: str) -> bool:
        """Whether it may act while a thread of this engine is in the middle of an act."""
        return self.owner == owner


class World:
    """The clock, the dice, and all actors.

    Args:
        seed: of the order in which they act.
        pace: seconds of the clock that an act takes, at most.
        interrupts: how often a thread is interrupted where it takes a lock or lets go of one.

    Attributes:
        held: how many locks are held.
        excused_drafts: what drafters have found that vLLM's own cache has mixed up.
        without_drafter: engines that have no drafter with KV.
        held_up: by owner, until when a thread was last kept in the middle of an act, as another
            that acted meanwhile had to wait.
        told_to_vllm: errors that engines were told, and may keep.
    """

    def __init__(self, seed: str, pace: float = 0.0, interrupts: float = 0.0) -> None:
        self.draw = random.Random(seed)
        self.interrupts = interrupts
        self.held = 0
        self.excused_drafts: set[bytes] = set()
        self.without_drafter: set[str] = set()
        self.held_up: dict[str | None, float] = {}
        self._interruptions = random.Random(f"{seed}/locks")
        self.now = 1000.0
        self.pace = pace
        self.acts = 0
        self.acting: list[Actor] = []
        self.actors: list[Actor] = []
        self._engines: list[Actor] = []  # those of them that are engines' threads
        self.story: list[tuple[float, str]] = []
        self.violation: Violation | None = None
        self.told_to_vllm: list[Exception] = []
        self.dead: set[str] = set()
        self.stopped: set[str] = set()
        self._bytes = random.Random(f"{seed}/bytes")
        self._agenda = Agenda(self)
        self.add(self._agenda)

    def clock(self) -> float:
        """Seconds, as `time.monotonic`."""
        return self.now

    def randbytes(self, count: int) -> bytes:
        """So many bytes, the same for the same seed."""
        return self._bytes.randbytes(count)

    def tell(self, text: str) -> None:
        """Add a line to the story that a failure is told by."""
        self.story.append((self.now, text))

    def chance(self, probability: float) -> bool:
        """Whether something happens that happens so often."""
        return probability > 0 and self.draw.random() < probability

    def add(self, actor: Actor) -> None:
        """Let it act when it is due."""
        actor.speed = self.draw.choice((0.2, 1.0, 1.0, 3.0))
        self.actors.append(actor)
        if actor.on_engine_thread:
            self._engines.append(actor)

    def remove(self, actor: Actor) -> None:
        """It never acts again."""
        if actor in self.actors:
            self.actors.remove(actor)
        if actor in self._engines:
            self._engines.remove(actor)

    def stir(self, owner: str | None) -> None:
        """Something has happened at an engine: its own thread looks."""
        for actor in self._engines:
            if actor.owner == owner:
                actor.look()

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """Have something done by nobody in particular, so many seconds from now."""
        self._agenda.add(self.now + seconds, what)

    def advance(self, seconds: float) -> None:
        """Let time pass in which nobody acts."""
        self.now += seconds

    def run(self, until: Callable[[], bool], deadline: float = NEVER) -> bool:
        """Let actors act until a condition holds; False if nothing more will happen before
        `deadline`, and it does not."""
        while not until():
            if not self._act(deadline):
                return False
            if self.violation is not None:  # whoever has caught it
                raise self.violation
        return True

    def breathe(self, most: int = 3) -> None:
        """In the middle of an engine's step: let the others act a little."""
        for _ in range(self.draw.randrange(most + 1)):
            self._act(self.now, threads_only=True)

    def beside(self, owner: str, most: int) -> None:
        """In the start of an engine: let its threads act a little."""
        for _ in range(self.draw.randrange(most + 1)):
            self._act(self.now, beside=owner)

    def between_locks(self) -> None:
        """A thread takes a lock, or has let go of one: maybe other threads of its engine act now,
        its main thread among them, and messages arrive."""
        if not self.interrupts or self.held or not self.acting or len(self.acting) >= _DEPTH:
            return
        owner = self.acting[-1].owner
        if owner is None or self._interruptions.random() >= self.interrupts:
            return
        for _ in range(self._interruptions.randrange(1, 4)):
            self._act(self.now, beside=owner)

    def wait(self, seconds: float) -> None:
        """The thread that acts waits for so long, while the others go on."""
        actor = self.acting[-1]
        if actor.on_engine_thread:
            raise Violation("engine_waits", f"{actor.name} waits for something outside")
        if len(self.acting) >= _DEPTH:
            return
        end = self.now + seconds
        self.later(seconds, lambda: None)
        self.run(lambda: self.now >= end, end)
        for beneath in self.acting[:-1]:
            self.held_up[beneath.owner] = self.now
        if actor.owner in self.dead:
            raise Killed

    def forbid_waiting(self, what: str) -> None:
        """Something is called that may take long, not on an engine's thread nor a shared one."""
        if self.acting and (self.acting[-1].on_engine_thread or self.acting[-1].is_shared):
            raise Violation("engine_waits", f"{self.acting[-1].name} calls {what}")

    def forbid_engine(self, what: str) -> None:
        """Something is called that no engine's thread may wait for."""
        if self.acting and self.acting[-1].on_engine_thread:
            raise Violation("engine_waits", f"{self.acting[-1].name} calls {what}")

    def _act(
        self, deadline: float, *, threads_only: bool = False, beside: str | None = None
    ) -> bool:
        now, stopped = self.now, self.stopped
        # First what keeps out most of them.
        ready = [actor for actor in self.actors if actor.due <= now and not actor.waits]
        if ready and stopped:
            ready = [actor for actor in ready if actor.owner not in stopped]
        if ready and threads_only:
            ready = [actor for actor in ready if not actor.on_engine_thread]
        if ready and beside is not None:
            ready = [actor for actor in ready if actor.may_interrupt(beside)]
        if not ready:
            if threads_only or beside is not None:
                next_due = NEVER
            else:
                next_due = min(
                    [a.due for a in self.actors if not a.waits and a.owner not in stopped],
                    default=NEVER,
                )
            if next_due > deadline or next_due == NEVER:
                self.now = max(now, min(deadline, next_due)) if deadline < NEVER else now
                return False
            self.now = max(now, next_due)
            return True
        actor = ready[0] if len(ready) == 1 else self._drawn(ready)
        self.acts += 1
        if self.pace:
            self.now += self.pace * self.draw.random()
        actor.waits = True
        self.acting.append(actor)
        try:
            actor.act()
        except Killed:
            self.remove(actor)
        except Violation as violation:
            self.violation = self.violation or violation
            raise
        finally:
            self.acting.pop()
            actor.waits = False
        return True

    def _drawn(self, actors: list[Actor]) -> Actor:
        """One of them, by their speeds."""
        point = self.draw.random() * sum([actor.speed for actor in actors])
        for actor in actors:
            point -= actor.speed
            if point < 0:
                return actor
        return actors[-1]


class Agenda(Actor):
    """Things to be done at a time."""

    def __init__(self, world: World) -> None:
        super().__init__("agenda")
        self._world = world
        self._entries: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def may_interrupt(self, owner: str) -> bool:
        # What operators do is done by engines' threads, which may be in the middle of an act.
        return not any(actor.on_engine_thread for actor in self._world.acting)

    def add(self, when: float, what: Callable[[], object]) -> None:
        """Have it done then."""
        heapq.heappush(self._entries, (when, next(self._numbers), what))
        self.due = self._entries[0][0]

    def act(self) -> None:
        _, _, what = heapq.heappop(self._entries)
        self.due = self._entries[0][0] if self._entries else NEVER
        what()


class SimulatedLock:
    """A lock that threads of an engine share. Nobody waits for it: whoever holds it is not
    interrupted."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False

    def __enter__(self) -> None:
        self._world.between_locks()
        if self._held:
            raise Violation("hangs", "a thread waits for a lock that it holds")
        self._held = True
        self._world.held += 1

    def __exit__(self, *_: object) -> None:
        self._held = False
        self._world.held -= 1
        self._world.between_locks()


class SimulatedTurns(Actor):
    """Stands in for a thread; see `omni_connector.runtime.turns`."""

    def __init__(
        self,
        world: World,
        owner: str,
        name: str,
        turn: Turn,
        *,
        sleep: Sleep | None = None,
        cores: frozenset[int] | None = None,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(f"{owner}'s {name}", owner)
        self._world = world
        self._turn = turn
        self._end = end
        self._alive = True
        self.is_shared = name in _SHARED_THREADS
        self._waiting = inspection.waiting_jobs(turn)
        self._idle = 0
        self._looks = 0  # turns in a row that only looked after one of several jobs that wait
        self._woken = self._rung = False
        self.due = world.now
        if sleep is not None:
            bind: Any = sleep
            bind.turns = self
        world.add(self)

    def wake(self) -> None:
        self._idle = 0
        self._woken = self._rung = True
        self.due = min(self.due, self._world.now)

    def is_alive(self) -> bool:
        return self._alive

    def die(self) -> None:
        """End in the middle of what it does, as a thread does whose turn raises."""
        self._alive = False
        self._world.remove(self)
        self._end()

    def join(self, timeout: float) -> None:
        """Make all turns that are left; the caller has told it to end."""
        if self.waits:
            return  # like a thread that waits for a peer, longer than `timeout`
        world = self._world
        for _ in range(100_000):
            if not self._alive or self.owner in world.dead:
                return
            self.waits = True
            world.acting.append(self)
            try:
                seconds = self._once()
            finally:
                world.acting.pop()
                self.waits = False
            if seconds:
                return  # it does not end

    def act(self) -> None:
        self._once()

    def _once(self) -> float | None:
        self._rung = False
        try:
            seconds = self._turn()
            if seconds is None:
                self._end()
        except (Violation, Killed):
            raise
        except BaseException as error:
            self._alive = False
            self._world.remove(self)
            raise Violation(
                "thread_died", f"{self.name} died of {type(error).__name__}: {error}"
            ) from error
        waiting = self._waiting() if seconds == 0 and not self._woken else 0
        self._looks = self._looks + 1 if waiting else 0
        if self._woken or not (seconds or waiting):
            self._woken = False
            self._world.stir(self.owner)
        if seconds is None:
            self._alive = False
            self._world.remove(self)
        elif self._rung and self._world.interrupts:  # by who interrupted it
            self._idle = 0
            self.due = self._world.now
        elif seconds == 0 and self._looks < max(1, waiting):  # there is more to do, or to look at
            self._idle = self._idle if waiting else 0
            self.due = self._world.now
        else:
            # Who only looks whether something has happened looks less and less often.
            self._looks = 0
            self._idle = min(self._idle + 1, 20)
            pause = max(seconds, min(_BACK_OFF_S, _SOON_S * 2**self._idle))
            self.due = self._world.now + (seconds if seconds >= _BACK_OFF_S else pause)
        return seconds
