# SPDX-License-Identifier: Apache-2.0
"""The peers' arenas that one rank reads: each is attached once, for all loads, and let go in time.

Threads of their own wait for peers; loads are notified when an arena is attached, or cannot be. A
mapped arena is let go when its owner has gone and no load reads it. Nothing tells of the end of the
owner of a fetched arena, which is let go when it was idle for a while.

The bytes of a mapped arena outlive its owner. Such an *orphan* is kept as long as the scheduler
half asks for it (`keep`), and other processes can attach it here.

A load of a hand-off attaches what it reads, and waits for that. A load without a lease waits for no
peer: what it reads must have been attached ahead of it. The own arena is never attached, but read
in place.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Final

from omni_connector.arena.pinning import Pins
from omni_connector.errors import OmniError, PeerUnreachableError
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.trace import now
from omni_connector.runtime.turns import WATCH_S, Watch
from omni_connector.transports import ArenaTransport, Endpoint, RemoteArena
from omni_connector.transports.base import ArenaInPlace
from omni_connector.transports.choice import Transports
from omni_connector.transports.reading import PeerThreads

ATTACH_S: Final = 10.0
"""Longest wait for a peer's arena, in seconds."""

IDLE_S: Final = 10.0
"""Seconds without use after which a fetched arena is let go, and without `keep` an orphan."""

NOTICE_S: Final = 5.0
"""Seconds after its owner's end in which an arena is kept for a first `keep`. The scheduler half
looks once a second who has gone."""


class OwnArena(ArenaInPlace):
    """The arena of this rank itself; its owner closes it."""

    @property
    def alive(self) -> bool:
        return not self._view.closed

    def close(self) -> None:
        """It stays open."""


class _Attached:
    """An arena, or the attempt to attach one, and the loads that have asked for it.

    Args:
        endpoint: of the arena.
        mapped: whether it is read in place.
    """

    def __init__(self, endpoint: Endpoint, mapped: bool) -> None:
        self.endpoint = endpoint
        self.mapped = mapped
        self.arena: Future[RemoteArena] = Future()
        self.users = 0
        self.used_at = 0.0
        self.dropped = False
        self.kept_until: float | None = None  # known from the first look after its owner's end
        self.handed_on: tuple[Endpoint, ...] | None = None

    @property
    def failed(self) -> bool:
        """Whether it could not be attached."""
        return self.arena.done() and self.arena.exception() is not None

    @property
    def attached(self) -> bool:
        """Whether its bytes can be read."""
        return self.arena.done() and not self.failed

    def ready(self, now: float) -> bool:
        """Whether it is attached, and its owner lives or it is kept as an orphan."""
        if not self.attached:
            return False
        if self.arena.result().alive:
            return True
        if self.kept_until is None:
            self.kept_until = now + NOTICE_S
        return self.mapped and now < self.kept_until

    def useless(self, now: float) -> bool:
        """Whether no load reads it, and none is expected to."""
        if self.users or not self.arena.done():
            return False
        return self.failed or not (self.ready(now) if self.mapped else now < self.used_at + IDLE_S)


class PeerArenas:
    """The arenas of all peers, by address. All methods may be called from any thread.

    Args:
        transports: attach them.
        threads: wait for peers.
        context: clock, trace, and how the thread starts that searches for owners that have gone.
        period: seconds between two searches.
        own: the arenas of this rank itself, by their endpoints.
        pins: has the device read mapped arenas itself; used until `close`.
    """

    def __init__(
        self,
        transports: Transports,
        threads: PeerThreads,
        context: EngineContext,
        period: float = WATCH_S,
        own: Mapping[tuple[Endpoint, ...], RemoteArena] | None = None,
        pins: Pins | None = None,
    ) -> None:
        self._pins = pins
        self.own: Final = own or {}
        self._transports = transports
        self._threads = threads
        self._clock = context.clock
        self._trace = context.trace
        self._lock = threading.Lock()
        self._known: dict[Endpoint, _Attached] = {}
        self._unused: list[_Attached] = []  # to be closed
        self._watch = Watch(self.let_go, period, context.start)

    def open(self, *, waits: bool = True) -> "OpenArenas":
        """The arenas that one load reads; see there."""
        return OpenArenas(self, waits=waits)

    def let_go(self) -> bool:
        """Close the arenas that nobody needs any more; returns whether there are others."""
        now = self._clock()
        with self._lock:
            for each in [each for each in self._known.values() if each.useless(now)]:
                self._drop(each)
            others = bool(self._known)
        self._close_unused()
        return others

    def close(self) -> None:
        """Let go of all arenas. No load may be under way."""
        self._watch.close()
        with self._lock:
            for each in list(self._known.values()):
                self._drop(each)
        self._close_unused()

    def take(self, endpoints: tuple[Endpoint, ...]) -> _Attached:
        """The arena with these endpoints, for a load that will `leave` it.

        Raises:
            PeerRefusedError: no transport reaches it.
        """
        transport, endpoint = self._transports.choose(endpoints)
        with self._lock:
            known = self._known.get(endpoint)
            if known is None or known.failed:
                if known is not None:
                    self._drop(known)
                known = _Attached(endpoint, transport.supports_mapping)
                self._known[endpoint] = known
                self._threads.submit(endpoint.address, partial(self._attach, transport, known))
            known.users += 1
        self._close_unused()
        self._watch.start()
        return known

    def take_attached(self, endpoints: tuple[Endpoint, ...]) -> _Attached:
        """The same, if it is attached already.

        Raises:
            PeerUnreachableError: it is not, or its owner has gone.
        """
        now = self._clock()
        with self._lock:
            for endpoint in endpoints:
                known = self._known.get(endpoint)
                if known is not None and known.ready(now):
                    known.users += 1
                    return known
        raise PeerUnreachableError("the arena is not attached (any more)")

    def attach_ahead(self, endpoints: tuple[Endpoint, ...]) -> bool:
        """Have an arena attached before a load reads it; returns at once.

        Returns:
            Whether it is attached now. To keep it where nothing tells of its owner's end, call this
            more often than every `IDLE_S` seconds.
        """
        if endpoints in self.own:
            return True
        try:
            attached = self.take(endpoints)
        except OmniError:  # no transport reaches it now; one may later
            return False
        ready = attached.ready(self._clock())
        self.leave(attached, failed=False)
        return ready

    def keep(self, endpoints: tuple[Endpoint, ...], seconds: float) -> tuple[Endpoint, ...] | None:
        """Keep an orphan for `seconds` more, `IDLE_S` at most; returns at once.

        Returns:
            Where other processes attach it; empty where they cannot. None: it is not attached here.
        """
        with self._lock:
            for endpoint in endpoints:
                known = self._known.get(endpoint)
                if known is not None and known.mapped and known.attached:
                    known.kept_until = self._clock() + min(seconds, IDLE_S)
                    if known.handed_on is None:
                        known.handed_on = self._transports.hand_on(known.arena.result())
                    return known.handed_on
        return None

    def leave(self, attached: _Attached, *, failed: bool) -> None:
        """End a load's use of an arena. If that has failed it, the next load attaches it anew."""
        with self._lock:
            attached.users -= 1
            attached.used_at = self._clock()
            if failed:
                self._drop(attached)
            elif attached.dropped and not attached.users:
                self._unused.append(attached)
        self._close_unused()

    def _attach(self, transport: ArenaTransport, attached: _Attached) -> None:
        began = now()
        arena: RemoteArena | None = None
        try:
            arena = transport.attach(attached.endpoint, timeout=ATTACH_S)
            self._trace.span("attach", began, transport=attached.endpoint.transport)
            if self._pins is not None:
                arena.pin_with(self._pins)
            attached.arena.set_result(arena)
        except BaseException as error:  # noqa: BLE001 - it is raised where the arena is asked for
            attached.arena.set_exception(error)
            if arena is not None:
                arena.close()

    def _drop(self, attached: _Attached) -> None:
        # Holds the lock. Loads that read the arena go on, and the last of them closes it.
        if self._known.get(attached.endpoint) is attached:
            del self._known[attached.endpoint]
        attached.dropped = True
        handed_on, attached.handed_on = attached.handed_on, ()
        if handed_on:
            self._transports.withdraw(handed_on)
        if not attached.users:
            self._unused.append(attached)

    def _close_unused(self) -> None:
        # Without the lock: it takes a while to unmap an arena, and loads of others ask meanwhile.
        with self._lock:
            unused, self._unused = self._unused, []
        for each in unused:
            each.arena.add_done_callback(_close)


class OpenArenas:
    """The arenas that one load reads. One thread at a time uses this.

    Args:
        arenas: all that this rank reads.
        waits: whether the load waits for arenas that are not attached yet.
    """

    def __init__(self, arenas: PeerArenas, *, waits: bool = True) -> None:
        self._arenas = arenas
        self._waits = waits
        self._taken: dict[tuple[Endpoint, ...], _Attached] = {}

    @property
    def addresses(self) -> list[str]:
        """The addresses of the arenas that were asked for."""
        return [attached.endpoint.address for attached in self._taken.values()]

    @property
    def mapped(self) -> bool:
        """Whether all arenas that were asked for are read in place."""
        return all(attached.mapped for attached in self._taken.values())

    def get(self, endpoints: tuple[Endpoint, ...]) -> RemoteArena | None:
        """The arena with these endpoints; None while it is being attached.

        Raises:
            OmniError: it cannot be attached, or is not and must not be waited for.
        """
        if (own := self._arenas.own.get(endpoints)) is not None:
            return own
        attached = self._taken.get(endpoints)
        if attached is None:
            take = self._arenas.take if self._waits else self._arenas.take_attached
            attached = self._taken[endpoints] = take(endpoints)
        return attached.arena.result() if attached.arena.done() else None

    def close(self, *, failed: bool) -> None:
        """End the load's use of its arenas. Later loads attach an arena anew that has failed it.
        Idempotent."""
        taken, self._taken = self._taken, {}
        for attached in taken.values():
            self._arenas.leave(attached, failed=failed)


def _close(future: "Future[RemoteArena]") -> None:
    if future.exception() is None:
        future.result().close()
