# SPDX-License-Identifier: Apache-2.0
"""A cluster in simulated time: the connector's own control channels, servers, sessions and slot
directories, with a clock, threads and a network that are simulated.

A thread handles one message after the other, and each takes `MESSAGE_S`. So messages queue at a
thread, as they would. The order of events at one moment is the order in which they were planned,
and all draws come from a seed: a run gives the same counts each time.
"""

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import zmq

from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.client import Lease, LeaseDeniedError, PendingLease
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.messages import HandshakeReply
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.server import ControlServer
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.net.keys import ClusterKey
from omni_connector.net.peers import HostPort
from omni_connector.runtime.context import PROCESS_CONTEXT, EngineContext
from omni_connector.runtime.turns import Turn

MESSAGE_S: Final = 170e-6
"""CPU seconds of a message at one of its ends: a third of what results/cluster.md has for a
hand-off, which is three messages."""

LATENCY_S: Final = 50e-6
"""Seconds of a message on its way between two hosts."""

CONNECT_TRIPS: Final = 2
"""Round trips before the first message of a connection: TCP's and CURVE's."""

CONNECT_S: Final = 1e-3
"""CPU seconds of a new connection at each end, most of them CURVE's."""

LOAD_S: Final = 0.05
"""Seconds from a lease to its release: 256 MiB at 5 GB/s."""

TTL_S: Final = 120.0
"""`handoff_ttl_s`."""

_WAIT_S: Final = 30.0
_NEVER: Final = float("inf")


class _Tag(msgspec.Struct):
    """The kind of any message of the control channel."""

    type: str


_tags: Final = msgspec.msgpack.Decoder(_Tag)


class Agenda:
    """The clock, and what happens when.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        """Seconds, as `time.monotonic`."""
        return self.now

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have something happen at a time."""
        heapq.heappush(self._entries, (max(when, self.now), next(self._numbers), what))

    def run(self, until: float) -> None:
        """Let all happen that happens before a time."""
        while self._entries and self._entries[0][0] <= until:
            self.now, _, what = heapq.heappop(self._entries)
            what()
        self.now = until


class SimulatedThread:
    """Makes turns when they are due; see `omni_connector.runtime.turns.Turns`.

    Attributes:
        busy: CPU seconds so far.
    """

    def __init__(
        self,
        agenda: Agenda,
        turn: Turn,
        poller: "SimulatedPoller",
        end: Callable[[], object],
    ) -> None:
        self._agenda = agenda
        self._turn = turn
        self._end = end
        self._due = _NEVER
        self._free_at = agenda.now
        self._alive = True
        self.busy = 0.0
        poller.thread = self
        self._plan(agenda.now)

    @property
    def now(self) -> float:
        """The time within a turn: after what it has handled so far."""
        return max(self._free_at, self._agenda.now)

    def work(self, seconds: float) -> float:
        """It is busy for so long; returns until when."""
        self._free_at = self.now + seconds
        self.busy += seconds
        return self._free_at

    def wake(self) -> None:
        """Make the next turn as soon as this one is over."""
        self._plan(self._agenda.now)

    def _plan(self, when: float) -> None:
        when = max(when, self._free_at)
        if self._alive and when < self._due:
            self._due = when
            self._agenda.at(when, self._run)

    def _run(self) -> None:
        if not self._alive or self._agenda.now < self._due:
            return  # it was planned anew meanwhile
        self._due = _NEVER
        seconds = self._turn()
        if seconds is None:
            self._alive = False
            self._end()
        else:
            self._plan(self._agenda.now + seconds)

    def kill(self) -> None:
        """Its process has ended."""
        self._alive = False

    def join(self, timeout: float) -> None:
        """Nothing waits in simulated time."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._alive


class SimulatedPoller:
    """See `omni_connector.net.links.Poller`."""

    def __init__(self) -> None:
        self.thread: SimulatedThread | None = None
        self._news: dict[Any, None] = {}

    def register(self, socket: Any) -> None:
        socket.poller = self

    def unregister(self, socket: Any) -> None:
        self._news.pop(socket, None)

    def ready(self) -> dict[Any, int]:
        self._news = {socket: None for socket in self._news if socket.inbox}
        return dict.fromkeys(self._news, zmq.POLLIN)

    def arrives(self, socket: "Inbox", message: Any) -> None:
        """A socket has a message."""
        socket.inbox.append(message)
        self._news[socket] = None
        self.wake()

    def used(self, socket: Any) -> None:
        """A simulated send takes no news of the socket."""

    def wait(self, seconds: float) -> None:
        """Never called: turns are made when they are due."""

    def wake(self) -> None:
        if self.thread is not None:
            self.thread.wake()

    def close(self) -> None:
        self._news.clear()


class Inbox:
    """What has arrived at one socket."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.inbox: deque[Any] = deque()

    def recv(self, flags: int = 0) -> Any:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()


class SimulatedListener(Inbox):
    """The serving end, and in the place of `TcpListener` what owns it."""

    watched = ()

    def __init__(self, engine: "Engine", address: HostPort) -> None:
        super().__init__(engine)
        self.address = address
        self.router = self
        self.links: dict[bytes, SimulatedLink] = {}

    def attend(self, ready: object) -> None:
        """Nobody without a key is simulated."""

    def receive(self) -> list[bytes]:
        frames: list[bytes] = self.recv()
        self.engine.handles("in", frames[1])
        return frames

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        name, frame = frames
        arrives = self.engine.handles("out", frame) + LATENCY_S
        if (link := self.links.get(name)) is not None:
            link.engine.agenda.at(arrives, lambda: link.poller.arrives(link, frame))


class SimulatedLink(Inbox):
    """The asking end; see `omni_connector.net.zeromq.Link`."""

    poller: SimulatedPoller

    def __init__(self, engine: "Engine", listener: SimulatedListener | None) -> None:
        super().__init__(engine)
        self.socket = self
        self.monitor = Inbox(engine)
        self._listener = listener
        self._name = f"{engine.name}:{next(engine.numbers)}".encode()
        connects = engine.thread_now + 2 * CONNECT_TRIPS * LATENCY_S
        self._open_at = connects
        if listener is None:
            engine.agenda.at(engine.thread_now + 2 * LATENCY_S, self.lose)
            return
        engine.connects()
        listener.engine.connects()
        listener.links[self._name] = self

    def send(self, frame: bytes, flags: int = 0) -> None:
        arrives = max(self.engine.handles("out", frame), self._open_at) + LATENCY_S
        listener = self._listener
        if listener is not None:
            message = [self._name, frame]
            self.engine.agenda.at(arrives, lambda: _deliver(listener, message))

    def recv(self, flags: int = 0) -> bytes:
        frame: bytes = super().recv()
        self.engine.handles("in", frame)
        return frame

    def why_lost(self) -> str | None:
        return self.monitor.inbox.popleft() if self.monitor.inbox else None

    def lose(self) -> None:
        """The serving process has ended, or there is none."""
        self._listener = None
        if hasattr(self.monitor, "poller"):
            self.monitor.poller.arrives(self.monitor, "is gone")

    def close(self) -> None:
        if self._listener is not None:
            self._listener.links.pop(self._name, None)
            self._listener = None


def _deliver(listener: SimulatedListener, message: list[bytes]) -> None:
    if listener.engine.alive:
        listener.engine.poller.arrives(listener, message)


class SimulatedSockets:
    """Those of one engine; see `omni_connector.net.links.Sockets`."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.poller: Any = engine.poller

    def serve(self, path: object) -> Any:
        raise NotImplementedError("each engine here is on a host of its own")

    def serve_tcp(self, address: HostPort, key: object, clock: object) -> Any:
        listener = SimulatedListener(self._engine, address)
        self._engine.network[str(address)] = listener
        self._engine.listener = listener
        return listener

    def exists(self, path: str) -> bool:
        return False

    def link(self, target: object, key: object) -> SimulatedLink:
        listener = self._engine.network.get(str(target))
        link = SimulatedLink(self._engine, listener)
        self._engine.links_made += 1
        return link

    def close(self) -> None:
        """The engines of a run end with it."""


class Engine:
    """One engine's control channel.

    Args:
        serves: makes what answers peers; None where it only asks.

    Attributes:
        messages: how many, by direction and kind.
        sent: bytes that it has sent.
        links_made: how often it has connected to a peer.
        served: connections that peers have made to it.
    """

    def __init__(
        self,
        agenda: Agenda,
        network: dict[str, SimulatedListener],
        name: str,
        compatibility: CompatibilityKey,
        *,
        server: ControlServer | None = None,
        address: HostPort | None = None,
        on_tick: Callable[[], object] = lambda: None,
    ) -> None:
        self.agenda = agenda
        self.network = network
        self.name = name
        self.alive = True
        self.numbers = itertools.count()
        self.poller = SimulatedPoller()
        self.listener: SimulatedListener | None = None
        self.messages: Counter[tuple[str, str]] = Counter()
        self.sent = 0
        self.links_made = 0
        self._thread: SimulatedThread | None = None
        self.channel = ControlChannel(
            compatibility=compatibility,
            server=server,
            listen_tcp=address,
            key=ClusterKey(b"", b""),
            on_tick=on_tick,
            context=replace(PROCESS_CONTEXT, clock=agenda.clock, start=self._start),
            sockets=SimulatedSockets(self),
        )

    def _start(
        self,
        name: str,
        turn: Turn,
        *,
        sleep: Any = None,
        cores: object = None,
        end: Callable[[], object] = lambda: None,
    ) -> SimulatedThread:
        self._thread = SimulatedThread(self.agenda, turn, self.poller, end)
        return self._thread

    @property
    def thread(self) -> SimulatedThread:
        """Its `omni-control`."""
        assert self._thread is not None
        return self._thread

    @property
    def thread_now(self) -> float:
        """The time of its thread."""
        return self.thread.now

    def handles(self, direction: str, frame: bytes) -> float:
        """Its thread handles a message; returns when it has."""
        self.messages[direction, _tags.decode(frame).type] += 1
        self.sent += len(frame) if direction == "out" else 0
        return self.thread.work(MESSAGE_S)

    def connects(self) -> None:
        """A connection is made: ZeroMQ's threads do that, on the same cores."""
        self.thread.busy += CONNECT_S

    @property
    def connections(self) -> int:
        """How many peers are connected to it."""
        return 0 if self.listener is None else len(self.listener.links)

    def kill(self) -> None:
        """Its process ends."""
        self.alive = False
        self.thread.kill()
        if self.listener is not None:
            self.network.pop(str(self.listener.address), None)
            for link in list(self.listener.links.values()):
                self.agenda.at(self.agenda.now + LATENCY_S, link.lose)


class PrefillEngine(Engine):
    """Hands off prompts of which no two have a block in common.

    Args:
        number: of the engine.
        slots: of its arena.
        blocks, block_size: of each prompt, and their tokens.
        reply: what it says of itself.
    """

    def __init__(
        self,
        agenda: Agenda,
        network: dict[str, SimulatedListener],
        number: int,
        *,
        slots: int,
        blocks: int,
        block_size: int,
        reply: HandshakeReply,
        start: int = 0,
    ) -> None:
        draw = random.Random(f"prefill/{number}/{start}")
        context: EngineContext = replace(
            PROCESS_CONTEXT, clock=agenda.clock, randbytes=draw.randbytes
        )
        self.epoch = draw.randbytes(16)
        self.hash_id = reply.hash_id
        self._draw = draw
        self._blocks, self._block_size = blocks, block_size
        self._all = [(0, i) for i in range(blocks)]
        self.directory = SlotDirectory(slots, context, TTL_S)
        self.events: Counter[str] = Counter()
        address = HostPort(f"10.{number >> 8}.{number & 255}.1", 7000)
        server = ControlServer(
            compatibility=reply.compatibility,
            handshake_reply=msgspec.structs.replace(reply, epoch=self.epoch),
            directory=self.directory,
            clock=agenda.clock,
            pending_timeout=_WAIT_S,
            count=lambda name: self.events.update([name]),
        )
        super().__init__(
            agenda,
            network,
            f"P{number}",
            reply.compatibility,
            server=server,
            address=address,
            on_tick=self.directory.expire,
        )
        self.address = f"tcp://{address}"

    def offer(self) -> tuple[bytes, Prompt] | None:
        """Hand off another prompt; None where the arena has no room."""
        seed = self._draw.randbytes(24)
        hashes = [seed + i.to_bytes(8, "big") for i in range(self._blocks)]
        prompt = Prompt(
            token_ids=range(self._blocks * self._block_size),
            num_tokens=self._blocks * self._block_size,
            block_hashes=hashes,
            hash_block_size=self._block_size,
        )
        handoff = self.directory.open(prompt, [list(hashes)])
        if handoff is None:
            return None
        if self.directory.copying(handoff, self._all):
            self.directory.filled(handoff, self._all)
        self.directory.commit(handoff)
        return handoff.token, prompt


@dataclass
class Outcome:
    """What became of the hand-offs.

    Attributes:
        waits: seconds from a lease request to its lease, with the time of the request.
        failures: how many failed, by why.
        met: when each pair of engines first had a lease, by their names.
    """

    waits: list[tuple[float, float]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    met: dict[tuple[str, str], float] = field(default_factory=dict)


class Cluster:
    """Engines of both kinds, and a router that sends requests to random pairs of them.

    Args:
        prefill, decode: how many engines there are.
        reply: what each says of itself.
        slots, blocks, block_size: see `PrefillEngine`.
        seed: of all draws.
    """

    def __init__(
        self,
        prefill: int,
        decode: int,
        reply: HandshakeReply,
        *,
        slots: int,
        blocks: int,
        block_size: int,
        seed: int = 0,
    ) -> None:
        self.agenda = Agenda()
        self.network: dict[str, SimulatedListener] = {}
        self._draw = random.Random(seed)
        self._made = {"slots": slots, "blocks": blocks, "block_size": block_size, "reply": reply}
        self.prefill = [self._prefill(number, 0) for number in range(prefill)]
        self.decode = [
            Engine(self.agenda, self.network, f"D{number}", reply.compatibility)
            for number in range(decode)
        ]
        self.outcome = Outcome()

    def _prefill(self, number: int, start: int) -> PrefillEngine:
        made: Any = self._made
        return PrefillEngine(self.agenda, self.network, number, start=start, **made)

    def restart(self, number: int, down: float) -> None:
        """A prefill engine is killed, and starts anew so many seconds later."""
        self.prefill[number].kill()

        def start() -> None:
            self.prefill[number] = self._prefill(number, 1)

        self.agenda.at(self.agenda.now + down, start)

    def run(self, rate: float, seconds: float) -> None:
        """Send `rate` requests a second for so long."""
        agenda = self.agenda
        end = agenda.now + seconds

        def arrive() -> None:
            self._request()
            after = agenda.now + self._draw.expovariate(rate)
            if after < end:
                agenda.at(after, arrive)

        agenda.at(agenda.now + self._draw.expovariate(rate), arrive)
        agenda.run(end)

    def _request(self) -> None:
        prefill = self._draw.choice(self.prefill)
        decode = self._draw.choice(self.decode)
        if not prefill.alive:  # the router has noticed
            self.outcome.failures["no prefill engine"] += 1
            return
        offered = prefill.offer()
        if offered is None:
            self.outcome.failures["no room in the arena"] += 1
            return
        token, prompt = offered
        began = self.agenda.now
        pending = PendingLease(token, prompt, prefill.epoch, prefill.hash_id, began + _WAIT_S)

        def answered(future: Any) -> None:
            error = future.exception()
            if error is not None:
                why = error.reason if isinstance(error, LeaseDeniedError) else type(error).__name__
                self.outcome.failures[why] += 1
                return
            now = decode.thread_now
            self.outcome.waits.append((began, now - began))
            self.outcome.met.setdefault((decode.name, prefill.name), now)
            lease: Lease = future.result()
            self.agenda.at(now + LOAD_S, lambda: decode.channel.release(lease))

        pending.future.add_done_callback(answered)
        decode.channel.request_lease(prefill.address, pending)
