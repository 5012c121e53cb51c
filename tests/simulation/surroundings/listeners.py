# SPDX-License-Identifier: Apache-2.0
"""The listeners at which simulated engines hand out their arenas, and who hangs up on them."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_connector.net.packets import MAX_MESSAGE_BYTES, PROTOCOL
from omni_connector.net.runtime import socket_path
from omni_connector.net.unix import Connection, Listener
from omni_connector.runtime.turns import Sleep, Turn, Turns
from omni_connector.transports.shm import ANSWERS, Attach, AttachReply
from tests.simulation.plan import Event, Plan
from tests.simulation.surroundings.world import Violation, World

LISTENS: Final = "omni-connector-shm"
"""The thread of a listener."""

_OFTEN: Final = 0.15
_ENDS_OFTEN: Final = 0.3

# Turns in which a listener accepts a connection, answers, notices its end, and has nothing to do.
_TURNS: Final = 4

# Seconds of the real clock: the answer is there when it is waited for.
_DEADLINE_S: Final = 30.0

# What a stranger sends before it hangs up: nothing, what is refused, what is answered.
_PACKETS: Final = (
    None,
    b"\x01",
    msgspec.msgpack.encode({"type": "attach", "epoch": bytes(16), "protocol": PROTOCOL + 1}),
    msgspec.msgpack.encode({"type": "of a newer version"}),
    bytes(MAX_MESSAGE_BYTES + 1),
    msgspec.msgpack.encode(Attach(bytes(16))),
)


class ArenaListener:
    """The real listener of one transport, at real sockets. Its thread takes its turns whenever
    somebody has spoken to it.

    Args:
        world: for the story.
        owner: engine.
        folder: of the sockets, private.
        give: returns what is attached, and its descriptor, which is closed after it was sent.
    """

    def __init__(
        self,
        world: World,
        owner: str,
        folder: Path,
        give: Callable[[Attach], tuple[AttachReply | None, int | None]],
    ) -> None:
        self.owner = owner
        self._world = world
        self._folder = folder
        self._alive = True
        self._listener = Listener(msgspec.msgpack.Decoder(Attach), give, self._start)

    def _start(
        self,
        name: str,
        turn: Turn,
        *,
        sleep: Sleep | None = None,
        cores: frozenset[int] | None = None,
        end: Callable[[], object] = lambda: None,
    ) -> Turns:
        self._name = name
        self._turn = turn
        self._end = end
        return self

    # What a listener asks of its thread

    def wake(self) -> None:
        """It takes its turns when it is asked."""

    def join(self, timeout: float) -> None:
        """Take the last turn."""
        self.serve()

    def is_alive(self) -> bool:
        """Whether it takes turns."""
        return self._alive

    def serve(self) -> None:
        """Take turns until nothing is left to do."""
        for _ in range(_TURNS):
            if not self._alive:
                return
            try:
                seconds = self._turn()
            except Exception as error:
                self.die()
                text = f"{self.owner}'s {self._name} died of {type(error).__name__}: {error}"
                raise Violation("thread_died", text) from error
            if seconds is None:
                self.die()

    def die(self) -> None:
        """The thread ends, as one does whose turn raises."""
        self._alive = False
        self._end()

    # What the world does with it

    def add(self, name: str) -> None:
        """Listen for an arena of this name."""
        self._listener.add(self._path(name))
        self.serve()

    def remove(self, name: str) -> None:
        """Listen no more for an arena."""
        self._listener.remove(self._path(name))
        self.serve()

    def close(self) -> None:
        """The engine ends."""
        self._listener.close()

    def attach(self, name: str, epoch: bytes) -> int:
        """A descriptor of the arena of this name.

        Raises:
            OmniError: the listener does not give it.
        """
        deadline = time.monotonic() + _DEADLINE_S
        connection = Connection(self._path(name), deadline)
        try:
            connection.tell(Attach(epoch))
            self.serve()
            _, descriptor = connection.answer(ANSWERS, deadline, with_fd=True)
        finally:
            connection.close()
            self.serve()
        assert descriptor is not None
        return int(descriptor)

    def hang_up(self, name: str, draw: random.Random) -> None:
        """Strangers say something, and are gone before they are answered."""
        for _ in range(draw.choice((1, 2, 5))):
            packet = draw.choice(_PACKETS)
            if not self._alive:
                return
            connection = Connection(self._path(name), time.monotonic() + _DEADLINE_S)
            said = "nothing" if packet is None else f"{packet[:60]!r}"
            self._world.tell(f"somebody says {said} to {self.owner}'s listener, and hangs up")
            if packet is not None:
                connection.tell(msgspec.Raw(packet))  # type: ignore[arg-type]
            if draw.random() < 0.2:
                self.serve()
            connection.close()
        self.serve()

    def _path(self, name: str) -> Path:
        return socket_path(self._folder, f"{self.owner} {name}", kind="a-")


def hung_up_on(plan: Plan, draw: random.Random) -> Plan:
    """The same with strangers that hang up on listeners, for some of the plans. Where engines are
    killed anyway, the thread of a listener may end, too.

    Args:
        draw: of this, and of nothing else.
    """
    if draw.random() >= _OFTEN:
        return plan
    events = list(plan.events)
    names = [engine.name for engine in plan.engines]
    for _ in range(draw.choice((1, 2, 4))):
        how: dict[str, Any] = {"engine": draw.choice(names), "number": draw.randrange(1 << 30)}
        event = Event("hang_up", how, draw.choice((0, 3, 10, 30, 100)), 0)
        events.insert(draw.randrange(1, len(events) + 1), event)
    if {"kill", "restart"} & {each.what for each in events} and draw.random() < _ENDS_OFTEN:
        how = {"engine": draw.choice(names), "thread": LISTENS}
        event = Event("end_thread", how, draw.choice((0, 10, 30)), 0)
        events.insert(draw.randrange(1, len(events) + 1), event)
    numbered = (replace(each, number=number) for number, each in enumerate(events))
    return replace(plan, events=tuple(numbered))
