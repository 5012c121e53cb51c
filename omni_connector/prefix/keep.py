# SPDX-License-Identifier: Apache-2.0
"""`omni-connector keep`: holds what engines have kept over their end, for engines that start later.

`Keep` meets the engines of a namespace as neighbours do, but maps and reads nothing: it takes the
descriptors of each engine's index and arenas, so that the memory stays when the engine ends. Then
it gives them at a socket in the runtime folder, as the engine did. An engine that starts meets that
socket as it meets any neighbour. `GiveIndex.ended` says that the blocks will go, so that it keeps
in its own arena what it reads there.

Nothing has a name in any file system. If this process is killed, engines that have met what it
kept go on reading it as an orphan (see `neighbours`).
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from omni_connector.arena.arena import require_sealed
from omni_connector.arena.block_index import BlockIndexView
from omni_connector.errors import OmniError, PeerRefusedError, PeerUnreachableError, TransportError
from omni_connector.net import runtime
from omni_connector.net.packets import PACKAGE, Refusal
from omni_connector.net.unix import Connection, Listener
from omni_connector.prefix.neighbours import (
    ANSWERS,
    INDEX_KIND,
    AskIndex,
    GiveIndex,
    Hits,
    memory_is_short,
)
from omni_connector.transports import Endpoint
from omni_connector.transports.shm import (
    Attach,
    AttachReply,
    SharedMemoryTransport,
    ask_arena,
)

logger = logging.getLogger("vllm.omni_connector.sharing")

SECONDS: Final = 1800.0
"""Seconds for which an ended engine is kept by default. Loading a large model takes minutes."""

MOST_ENGINES: Final = 256
"""Most living engines whose descriptors are held, which bounds the descriptors."""

MOST_KEPT: Final = 16
"""Most ended engines that are kept. Each has a thread, and costs every look-up a little."""

# Longest wait for the answers of one engine, in seconds.
_ANSWER_S: Final = 1.0
# Seconds until an engine that could not be met is asked again.
_AGAIN_S: Final = 5.0
_BLOCK_BYTES: Final = 512  # of `st_blocks`
_GIB: Final = 1 << 30
_QUESTIONS: Final = msgspec.msgpack.Decoder(AskIndex | Hits | Attach)


class Kept(Protocol):
    """What is kept of one engine that has ended.

    Attributes:
        name: of the engine, for the log.
        nbytes: of its memory.
        used_at: when the engine ended, or its blocks were read last.
    """

    name: str
    used_at: float

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Let go of it. Idempotent."""


class KeptEngines:
    """Ended engines, each kept for a bounded time, and all of them in bounded memory.

    Args:
        most_bytes: of memory that all of them take together.
        seconds: for which each is kept.
        clock: seconds, monotonic.
        memory_is_short: whether what is kept has to make room.
    """

    def __init__(
        self,
        most_bytes: int,
        seconds: float,
        clock: Callable[[], float],
        memory_is_short: Callable[[], bool] = memory_is_short,
    ) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._memory_is_short = memory_is_short
        self._kept: dict[bytes, tuple[Kept, float]] = {}  # with its end, by the epoch of its index

    def __contains__(self, epoch: bytes) -> bool:
        return epoch in self._kept

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all of them take."""
        return sum(each.nbytes for each, _ in self._kept.values())

    def keep(self, epoch: bytes, engine: Kept) -> None:
        """Keep an engine that has just ended; its index has this epoch."""
        self._kept[epoch] = engine, self._clock() + self._seconds
        if engine.nbytes > self._most_bytes:
            self.let_go(epoch, f"it takes {engine.nbytes / _GIB:.2f} GiB, more than --gib allows")

    def follow(self) -> None:
        """Let go of those whose time is over, and of the least recently used that do not fit."""
        now = self._clock()
        for epoch in [epoch for epoch, (_, until) in self._kept.items() if now >= until]:
            self.let_go(epoch, "its time is over")
        while len(self._kept) > MOST_KEPT or self.nbytes > self._most_bytes:
            self.let_go(self._least_used(), "others were used later")
        if self._kept and self._memory_is_short():
            self.let_go(self._least_used(), "memory is short")

    def let_go(self, epoch: bytes, why: str) -> None:
        """Keep an engine no longer. Nothing happens if it is not kept."""
        engine, _ = self._kept.pop(epoch, (None, 0.0))
        if engine is not None:
            engine.close()
            logger.info("%s is kept no longer: %s", engine.name, why)

    def close(self) -> None:
        """Let go of all. Idempotent."""
        while self._kept:
            self._kept.popitem()[1][0].close()

    def _least_used(self) -> bytes:
        return min(self._kept, key=lambda epoch: self._kept[epoch][0].used_at)


class Keep:
    """Holds the memory of the engines of a namespace beyond their end.

    Args:
        namespace: of the engines.
        most_bytes: of memory of engines that have ended. Memory of living engines is their own.
        seconds: for which an ended engine is kept.
        clock: seconds, monotonic.
        memory_is_short: whether what is kept has to make room.

    Raises:
        TransportError: another process keeps engines of this namespace.
        ConfigError: the runtime folder cannot be had, or is not private.
    """

    def __init__(
        self,
        namespace: str,
        most_bytes: int,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        memory_is_short: Callable[[], bool] = memory_is_short,
    ) -> None:
        self._clock = clock
        self._folder = runtime.runtime_dir(namespace)
        runtime.tidy(self._folder)
        self._kept = KeptEngines(most_bytes, seconds, clock, memory_is_short)
        self._living: dict[str, _Living] = {}  # by the names of their sockets
        self._own: set[str] = set()  # names of the sockets at which ended engines are given
        self._not_before: dict[str, float] = {}
        self._why_not: dict[str, str] = {}
        # Only to be the only one: nobody is answered there, and the kernel frees it at the end.
        path = runtime.socket_path(self._folder, "keep", kind="k-")
        if path.exists() and not runtime.is_dead(path):
            raise TransportError(
                f"another omni-connector keep holds what engines of namespace {namespace} leave; "
                "end it first"
            )
        self._alone = runtime.listen(path)
        self._remove = partial(runtime.remove_own, path, runtime.identity(path))

    def look(self) -> None:
        """Keep the engines that have ended, and meet new ones. Call it about once a second; it
        waits a second at most for each engine that does not answer, once in five."""
        for name, living in list(self._living.items()):
            if not living.connection.alive:
                del self._living[name]
                self._ended(living)
        self._kept.follow()
        here = self._sockets()
        self._not_before = {n: at for n, at in self._not_before.items() if n in here}
        self._why_not = {n: why for n, why in self._why_not.items() if n in here}
        for name in sorted(here - self._living.keys())[: MOST_ENGINES - len(self._living)]:
            if self._clock() >= self._not_before.get(name, -1.0):
                self._not_before[name] = self._clock() + _AGAIN_S
                self._meet(name)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._remove()
        self._alone.close()
        while self._living:
            self._living.popitem()[1].close()
        self._kept.close()

    def _sockets(self) -> set[str]:
        names = {each for each in os.listdir(self._folder) if each.startswith(INDEX_KIND)}
        self._own &= names
        return names - self._own

    def _meet(self, name: str) -> None:
        try:
            with contextlib.ExitStack() as undo:
                living = _Living(self._folder / name, undo)
                undo.pop_all()
        except (OmniError, OSError) as error:
            if self._why_not.get(name) != str(error):
                self._why_not[name] = str(error)
                level = (
                    logging.DEBUG if isinstance(error, PeerUnreachableError) else logging.WARNING
                )
                logger.log(level, "%s will not be kept when it ends: %s", name, error)
            return
        self._kept.let_go(living.gives.epoch, "it has not ended after all")
        self._living[name] = living
        logger.info("%s will be kept when it ends", living.name)

    def _ended(self, living: "_Living") -> None:
        if living.lists_nothing:
            logger.info("%s has ended, and had kept nothing", living.name)
            living.close()
            return
        epoch = living.gives.epoch
        path = runtime.socket_path(self._folder, f"kept:{epoch.hex()}", kind=INDEX_KIND)
        self._own.add(path.name)
        try:
            ended = _Ended(living, path, self._clock)
        except OmniError as error:  # there are no more descriptors, or threads
            logger.warning("%s has ended, and cannot be kept: %s", living.name, error)
            living.close()
            return
        logger.info("%s has ended: its %.2f GiB are kept", living.name, ended.nbytes / _GIB)
        self._kept.keep(epoch, ended)


class _Living:
    """An engine, and descriptors of its memory.

    Args:
        path: of the socket at which it gives its index.
        undo: ends what was begun.

    Attributes:
        name: of the engine, for the log.
        connection: ends with the engine.
        gives: what the engine answers there.
        descriptors: of its index and its arenas, by their epochs.

    Raises:
        OmniError: it does not answer, or not as an engine of this version, or its arenas cannot be
            had on this host.
        OSError: there are no more descriptors.
    """

    def __init__(self, path: Path, undo: contextlib.ExitStack) -> None:
        self.descriptors: Final[dict[bytes, int]] = {}
        undo.callback(self._close_descriptors)
        deadline = time.monotonic() + _ANSWER_S
        self.connection: Final = Connection(path, deadline)
        undo.callback(self.connection.close)
        gives, descriptor = self.connection.ask(AskIndex(), ANSWERS, deadline, True)
        assert descriptor is not None
        self.gives: Final[GiveIndex] = gives
        self.name: Final = gives.named(path.name)
        self.descriptors[gives.epoch] = descriptor
        if gives.ended:
            raise PeerRefusedError("it is kept by another process")
        self._index = BlockIndexView.open(descriptor, epoch=gives.epoch, num_slots=gives.num_slots)
        undo.callback(self._index.close)
        self.endpoints: Final = tuple(map(_mapped, gives.arenas))
        for endpoint in self.endpoints:
            deadline = time.monotonic() + _ANSWER_S
            with contextlib.closing(Connection(Path(endpoint.address), deadline)) as owner:
                self.descriptors[endpoint.epoch] = arena = ask_arena(owner, endpoint, deadline)
            require_sealed(arena)

    @property
    def lists_nothing(self) -> bool:
        """Whether no block can be found in its arenas."""
        return self._index.is_empty

    def close(self) -> None:
        self.connection.close()
        self._index.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


class _Ended:
    """An engine that has ended: gives its index and its arenas, as the engine did.

    Args:
        engine: as it was met; closed with this.
        path: where this listens.
        clock: seconds, monotonic.

    Raises:
        TransportError: somebody listens there, or there are no more descriptors.
    """

    def __init__(self, engine: _Living, path: Path, clock: Callable[[], float]) -> None:
        self.name = engine.name
        self.used_at = clock()
        self._engine = engine
        self._clock = clock
        arenas = tuple(
            (msgspec.structs.replace(each, address=str(path)),) for each in engine.endpoints
        )
        self._index = msgspec.structs.replace(engine.gives, arenas=arenas, orphans=(), ended=True)
        self._replies: Mapping[bytes, AttachReply] = {
            each.epoch: AttachReply(each.epoch, each.n_slots, each.slot_bytes)
            for each in engine.endpoints
        }
        self._listener = Listener(_QUESTIONS, self._answer)
        try:
            self._listener.add(path)
        except BaseException:
            self._listener.close()
            raise

    @property
    def nbytes(self) -> int:
        descriptors = self._engine.descriptors.values()
        return sum(os.fstat(each).st_blocks for each in descriptors) * _BLOCK_BYTES

    def close(self) -> None:
        self._listener.close()
        self._engine.close()

    def _answer(self, question: Struct) -> tuple[Struct | None, int | None]:
        # On the listener's thread, which has ended when the descriptors are closed.
        descriptors = self._engine.descriptors
        if isinstance(question, AskIndex):
            return self._index, os.dup(descriptors[self._index.epoch])
        if isinstance(question, Attach) and question.epoch in self._replies:
            return self._replies[question.epoch], os.dup(descriptors[question.epoch])
        if isinstance(question, Hits):
            self.used_at = self._clock()
            return None, None
        return Refusal("there is no such arena here", package=PACKAGE), None


def _mapped(rank: tuple[Endpoint, ...]) -> Endpoint:
    """The endpoint of one rank's arena at which processes of the host map it.

    Raises:
        PeerRefusedError: it has none.
    """
    for endpoint in rank:
        if endpoint.transport == SharedMemoryTransport.transport:
            return endpoint
    raise PeerRefusedError("an arena of it cannot be mapped by processes of the host")
