# SPDX-License-Identifier: Apache-2.0
"""The control channel's sockets in a simulation: messages arrive when the seed says, if they do."""

import itertools
import random
from collections import deque
from pathlib import Path
from typing import Any, Final

import zmq

from omni_connector.handoff.messages import Handshake, decode_request
from tests.simulation.surroundings.world import NEVER, Actor, World

STRANGER: Final = "stranger"

# Most messages of a connection that are sent again when it was made anew.
_SENT_AGAIN: Final = 4


class Weather:
    """What becomes of messages.

    Attributes:
        lost, doubled, late: how often a message is.
        late_answers: how often an answer is late, beside that, but not too late to be used.
    """

    def __init__(
        self,
        lost: float = 0.0,
        doubled: float = 0.0,
        late: float = 0.0,
        late_answers: float = 0.0,
    ) -> None:
        self.lost = lost
        self.doubled = doubled
        self.late = late
        self.late_answers = late_answers


class Pipe(Actor):
    """One direction of a connection: what is sent arrives in order, each at a time of its own."""

    def __init__(
        self,
        net: "Net",
        name: str,
        inbox: "deque[Any]",
        poller: "SimulatedPoller",
        *,
        brings_answers: bool = False,
    ) -> None:
        super().__init__(name)
        self._brings_answers = brings_answers
        self._net = net
        self._inbox = inbox
        self._poller = poller
        self._frames: deque[tuple[float, Any]] = deque()

    def send(self, frame: Any) -> None:
        """Have a frame arrive, or be lost."""
        world, weather = self._net.world, self._net.weather
        if world.chance(weather.lost):
            world.tell(f"a message is lost ({self.name})")
            return
        delay = 0.0
        if world.chance(weather.late):
            delay = world.draw.uniform(0.5, 6.0)
        elif self._brings_answers and world.chance(weather.late_answers):
            delay = world.draw.uniform(0.5, 3.0)
        if delay:
            world.tell(f"a message is {delay:.1f} s late ({self.name})")
        self._frames.append((world.now + delay, frame))
        if world.chance(weather.doubled):
            world.tell(f"a message comes twice ({self.name})")
            self._frames.append((world.now + world.draw.uniform(0.0, 6.0), frame))
        self.due = self._frames[0][0]

    def may_interrupt(self, owner: str) -> bool:
        return True

    def act(self) -> None:
        _, frame = self._frames.popleft()
        self.due = self._frames[0][0] if self._frames else NEVER
        self._inbox.append(frame)
        self._poller.wake()

    def close(self) -> None:
        """What has not arrived is lost."""
        self._frames.clear()
        self._net.world.remove(self)


class SimulatedPoller:
    """See `omni_connector.net.links.Poller`."""

    def __init__(self) -> None:
        self.turns: Any = None
        self._sockets: list[Any] = []

    def register(self, socket: Any) -> None:
        self._sockets.append(socket)

    def unregister(self, socket: Any) -> None:
        self._sockets.remove(socket)

    def ready(self) -> dict[Any, int]:
        return {socket: zmq.POLLIN for socket in self._sockets if socket.inbox}

    def used(self, socket: Any) -> None:
        """A simulated send takes no news of the socket."""

    def wait(self, seconds: float) -> None:
        """Never called: turns are made when the world says."""

    def wake(self) -> None:
        if self.turns is not None:
            self.turns.wake()

    def close(self) -> None:
        self._sockets.clear()


class _Socket:
    def __init__(self) -> None:
        self.inbox: deque[Any] = deque()


class RouterSocket(_Socket):
    """The serving end."""

    def __init__(self, poller: SimulatedPoller) -> None:
        super().__init__()
        self.poller = poller
        self.clients: dict[bytes, SimulatedLink] = {}

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        frames: list[bytes] = self.inbox.popleft()
        return frames

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        client = self.clients.get(frames[0])
        if client is not None:  # else it has hung up
            client.to_client.send(frames[1])


class SimulatedLink:
    """The asking end; see `omni_connector.net.zeromq.Link`."""

    def __init__(
        self, net: "Net", owner: str, name: bytes, router: RouterSocket, poller: Any
    ) -> None:
        self._net = net
        self._name = name
        self._router: RouterSocket | None = router
        self.owner = owner
        self.socket: Any = self
        self.inbox: deque[Any] = deque()
        self._sent: deque[bytes] = deque(maxlen=_SENT_AGAIN)
        self.monitor = _Socket()
        self.to_client = Pipe(net, f"to {name.decode()}", self.inbox, poller, brings_answers=True)
        self._to_server = Pipe(net, f"from {name.decode()}", router.inbox, router.poller)
        self._lost = Pipe(net, f"end of {name.decode()}", self.monitor.inbox, poller)
        for pipe in (self.to_client, self._to_server, self._lost):
            net.world.add(pipe)
        router.clients[name] = self

    def send(self, frame: bytes, flags: int = 0) -> None:
        if self._net.heard is None and self.owner != STRANGER:
            message = decode_request(frame)
            if isinstance(message, Handshake):
                self._net.heard = message.decode_compatibility()
        if self._router is not None:
            self._sent.append(frame)
            self._to_server.send([self._name, frame])

    def recv(self, flags: int = 0) -> bytes:
        if not self.inbox:
            raise zmq.Again
        frame: bytes = self.inbox.popleft()
        return frame

    @property
    def lost(self) -> bool:
        """Whether who served it has gone."""
        return self._router is None

    def why_lost(self) -> str | None:
        if not self.monitor.inbox:
            return None
        self.monitor.inbox.popleft()
        return "is gone"

    def reconnect(self, name: bytes, again: int) -> None:
        """The connection is another one from now on.

        Args:
            name: by which the serving end knows it.
            again: how many of the latest messages are sent once more.
        """
        if self._router is None:
            return
        del self._router.clients[self._name]
        self._name = name
        self._router.clients[name] = self
        for frame in list(self._sent)[len(self._sent) - again :]:
            self._to_server.send([name, frame])

    def hang_up(self) -> None:
        """The serving process has ended."""
        self._router = None
        self._to_server.close()
        self._lost._frames.append((self._net.world.now, "gone"))
        self._lost.due = self._net.world.now

    def close(self) -> None:
        if self._router is not None:
            self._router.clients.pop(self._name, None)
        for pipe in (self.to_client, self._to_server, self._lost):
            pipe.close()
        self._net.links.discard(self)


class Net:
    """All control sockets of a world."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.routers: dict[str, tuple[str, RouterSocket]] = {}
        self.links: set[SimulatedLink] = set()
        self.heard: Any = None  # how an engine has introduced itself
        self._numbers = itertools.count()

    def link(self, owner: str, path: str, poller: SimulatedPoller) -> SimulatedLink:
        """A connection to who serves at a path."""
        number = next(self._numbers)
        _, router = self.routers.get(path, ("", RouterSocket(SimulatedPoller())))
        link = SimulatedLink(self, owner, f"{owner}:{number}".encode(), router, poller)
        self.links.add(link)
        if path not in self.routers:
            link.hang_up()
        return link

    def reconnect(self, path: str, draw: random.Random) -> None:
        """Whoever is connected to a path is so anew."""
        if path not in self.routers:
            return
        for link in list(self.routers[path][1].clients.values()):
            name = f"{link.owner}:{next(self._numbers)}".encode()
            link.reconnect(name, min(draw.randrange(_SENT_AGAIN + 1), len(link._sent)))

    def lost_by(self, owner: str) -> int:
        """How many connections somebody keeps to who has gone."""
        return sum(link.owner == owner and link.lost for link in self.links)

    def kill(self, owner: str) -> None:
        """The process of an engine has ended."""
        for path, (name, router) in list(self.routers.items()):
            if name == owner:
                del self.routers[path]
                for client in list(router.clients.values()):
                    client.hang_up()
        for link in [link for link in self.links if link.owner == owner]:
            link.close()


class SimulatedSockets:
    """Those of one channel; see `omni_connector.net.links.Sockets`."""

    def __init__(self, net: Net, owner: str) -> None:
        self._net = net
        self._owner = owner
        self._path: str | None = None
        self.poller: Any = SimulatedPoller()

    def serve(self, path: Path) -> RouterSocket:
        router = RouterSocket(self.poller)
        self._path = str(path)
        self._net.routers[self._path] = (self._owner, router)
        return router

    def serve_tcp(self, *_: Any) -> Any:
        raise NotImplementedError("a simulation has no TCP")

    def exists(self, path: str) -> bool:
        return path in self._net.routers

    def link(self, target: Any, key: Any) -> SimulatedLink:
        return self._net.link(self._owner, str(target), self.poller)

    def close(self) -> None:
        self._net.kill(self._owner)
