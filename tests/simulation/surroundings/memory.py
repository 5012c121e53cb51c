# SPDX-License-Identifier: Apache-2.0
"""Arenas of peers and the shared store in a simulation: real memory, and what can go wrong. And the
file for `omni-connector top`, which stays unwritten."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.pinning import Pins
from omni_connector.copy.arena_copies import AskCopy, Copied
from omni_connector.errors import PeerUnreachableError, ProtocolError, TransportError
from omni_connector.net.orders import Orders
from omni_connector.net.rank_socket import RankAnswers
from omni_connector.net.status import StatusFile
from omni_connector.prefix.attaching import Arenas, AskAttached, Attached, SlotCopy
from omni_connector.stores.block_store import BlockStore
from omni_connector.transports.base import ArenaInPlace, ArenaTransport, Endpoint, RemoteArena
from omni_connector.transports.shm import Attach, AttachReply
from tests.simulation.surroundings.listeners import ArenaListener
from tests.simulation.surroundings.neighbours import Neighbourhood
from tests.simulation.surroundings.world import Violation, World


class HandedOn(Protocol):
    """An arena whose engine has ended.

    Attributes:
        epoch, fd: of the arena.
    """

    epoch: bytes
    fd: int


class Host:
    """The memory that engines of a world let each other read.

    Attributes:
        mapped: whether arenas are read in place; else they are fetched.
        silent: engines that do not answer who attaches.
        failing: how often an attach or a fetch fails.
        slow: seconds that a fetch takes at most.
        garbled: how often a fetch brings other bytes.
        lied: whether a peer may have named a reader's own arena as its own.
        views: mappings that readers have, by reader.
        listeners: at which an arena is asked for, by its address; strangers' arenas have none.
        ranks: what answers the scheduler half, by engine and rank.
        neighbourhood: the engines that share their prefixes.
    """

    def __init__(self, world: World, *, mapped: bool) -> None:
        self.world = world
        self.neighbourhood = Neighbourhood(world)
        self.mapped = mapped
        self.silent: set[str] = set()
        self.failing = 0.0
        self.slow = 0.0
        self.garbled = 0.0
        self.lied = False
        self.arenas: dict[str, tuple[str, Arena]] = {}
        self.handed_on: dict[str, tuple[str, HandedOn]] = {}
        self.views: dict[str, list[View]] = {}
        self.listeners: dict[str, ArenaListener] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.ranks: dict[tuple[str, int], RankAnswers] = {}

    def kill(self, owner: str) -> None:
        """The process of an engine has ended: its own mappings go, those of others stay."""
        for address, (name, arena) in list(self.arenas.items()):
            if name == owner:
                del self.arenas[address]
                arena.close()
                if (listener := self.listeners.pop(address, None)) is not None:
                    listener.close()
        for address in [each for each, (name, _) in self.handed_on.items() if name == owner]:
            del self.handed_on[address]
        for view in list(self.views.get(owner, ())):
            view.kill()
        for key in [key for key in self.ranks if key[0] == owner]:
            del self.ranks[key]
        self.neighbourhood.kill(owner)
        self.silent.discard(owner)

    @property
    def folder(self) -> Path:
        """Where sockets are, private to this user."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="oc-", dir="/tmp")
        return Path(self._folder.name)

    def close(self) -> None:
        """Remove the folder of the sockets."""
        if self._folder is not None:
            self._folder.cleanup()

    def maps(self, reader: str, address: int) -> bool:
        """Whether a reader has an arena of a peer mapped there."""
        return any(view.covers(address) for view in self.views.get(reader, ()))

    def found(self, address: str) -> "tuple[str, Arena | HandedOn] | None":
        """The owner of what can be attached at an address, and that."""
        return self.arenas.get(address) or self.handed_on.get(address)

    def answer_for_rank(self, owner: str, rank: int, answers: RankAnswers) -> Callable[[], None]:
        """A worker of an engine answers its scheduler half; returns what ends that."""
        self.ranks[owner, rank] = answers

        def end() -> None:
            self.ranks.pop((owner, rank), None)

        return end


class SimulatedRanks:
    """The ranks of an engine; see `attaching.Ranks`."""

    def __init__(self, host: Host, owner: str, reads: Sequence[Sequence[int]]) -> None:
        self._host = host
        self._owner = owner
        self._reads = reads

    def attached(self, engines: Sequence[Arenas]) -> list[bool]:
        found = []
        for arenas in engines:
            answers = [
                self._ask(rank, AskAttached(arenas[each]))
                for rank, read in enumerate(self._reads)
                for each in read
            ]
            found.append(all(each.attached for each in answers))
        return found

    def kept(self, orphans: Sequence[tuple[Arenas, float]]) -> list[Arenas | None]:
        found: list[Arenas | None] = []
        for arenas, seconds in orphans:
            answers = {
                (rank, each): self._ask(rank, AskAttached(arenas[each], seconds))
                for rank, read in enumerate(self._reads)
                for each in read
            }
            there = all(each.attached for each in answers.values())
            handed_on = tuple(answers[rank, rank].handed_on for rank in range(len(self._reads)))
            found.append(handed_on if there else None)
        return found

    def copied(self, copy: SlotCopy) -> bool | None:
        said: list[bool | None] = []
        for rank in range(len(self._reads)):
            answers = self._host.ranks.get((self._owner, rank))
            if answers is None or self._host.world.chance(0.1):  # it does not answer in time
                return None
            answer = answers[AskCopy](copy.of_rank(rank))
            assert isinstance(answer, Copied)
            said.append(answer.copied)
        return None if None in said else all(said)

    def _ask(self, rank: int, question: AskAttached) -> Attached:
        answers = self._host.ranks.get((self._owner, rank))
        if answers is None:
            return Attached(False)
        answer = answers[AskAttached](question)
        assert isinstance(answer, Attached)
        return answer

    def close(self) -> None:
        """Nothing is held."""


class View(ArenaInPlace):
    """An arena of a peer."""

    _view: ArenaView

    def __init__(
        self, host: Host, reader: str, endpoint: Endpoint, view: ArenaView, descriptor: int
    ) -> None:
        super().__init__(endpoint, view)
        self.epoch = endpoint.epoch
        self.fd = descriptor
        self._host = host
        self._reader = reader
        self._first = view.slots.ctypes.data
        host.views.setdefault(reader, []).append(self)

    def covers(self, address: int) -> bool:
        """Whether it lies in this mapping."""
        return 0 <= address - self._first < self.endpoint.n_slots * self.endpoint.slot_bytes

    @property
    def slots(self) -> NDArray[np.uint8]:
        if not self._host.mapped:
            raise TransportError("the arena is not mapped")
        return super().slots

    def descriptor(self) -> int:
        return os.dup(self.fd)

    def pin_with(self, pins: Pins) -> None:
        if not self._host.mapped:
            return
        world = self._host.world
        self._view.pin_with(pins)
        after = end = 0.0
        while end < 1.0 and world.chance(0.85):
            after += world.draw.choice((0.0, 0.05, 1.0))
            end += world.draw.choice((0.1, 0.3, 1.0))
            mapped = int(min(end, 1.0) * os.fstat(self.fd).st_size)
            world.later(after, partial(self._view.mapped_until, mapped))

    @property
    def alive(self) -> bool:
        address = self.endpoint.address
        found, listener = self._host.found(address), self._host.listeners.get(address)
        if listener is not None and not listener.is_alive():  # it has hung up on all
            return False
        return found is not None and found[1].epoch == self.endpoint.epoch

    def read_into(self, slot_ids: Sequence[int], dst: NDArray[np.uint8]) -> None:
        host = self._host
        host.world.forbid_waiting("a fetch")
        if host.slow:
            host.world.wait(host.slow * host.world.draw.random())
        if not self.alive or host.world.chance(host.failing):
            raise PeerUnreachableError("the fetch failed")
        dst[:] = self._view.slots[np.asarray(slot_ids), : dst.shape[1]]
        if host.world.chance(host.garbled):
            host.world.tell(f"a fetch from {self.endpoint.address} brings other bytes")
            dst ^= 0x10

    def kill(self) -> None:
        """The reader's process has ended."""
        self.close()

    def close(self) -> None:
        self._view.close()
        descriptor, self.fd = self.fd, -1
        if descriptor >= 0:
            os.close(descriptor)
        views = self._host.views.get(self._reader, [])
        if self in views:
            views.remove(self)


class SimulatedTransport(ArenaTransport):
    """Reads and exports arenas within a world, for one rank of an engine."""

    transport = "shm"

    def __init__(self, host: Host, owner: str) -> None:
        self._host = host
        self._owner = owner
        self._exported: set[str] = set()  # addresses
        self._listener: ArenaListener | None = None

    @property
    def supports_mapping(self) -> bool:
        return self._host.mapped

    def export(self, arena: Arena, name: str) -> Endpoint:
        host = self._host
        if self._listener is None:
            self._listener = ArenaListener(host.world, self._owner, host.folder, self._give)
        self._listener.add(name)
        host.listeners[name] = self._listener
        host.arenas[name] = (self._owner, arena)
        self._exported.add(name)
        return Endpoint.of(arena, self.transport, name)

    def _give(self, question: Attach) -> tuple[AttachReply | None, int | None]:
        for _, arena in self._host.arenas.values():
            if arena.epoch == question.epoch:
                return AttachReply(arena.epoch, arena.n_slots, arena.slot_bytes), os.dup(arena.fd)
        raise ProtocolError("there is no such arena here")

    def hand_on(self, arena: RemoteArena) -> Endpoint | None:
        assert isinstance(arena, View)
        address = f"orphan {arena.epoch.hex()} at {self._owner}, mapped anew"
        self._host.handed_on[address] = (self._owner, arena)
        return msgspec.structs.replace(arena.endpoint, address=address)

    def withdraw(self, endpoint: Endpoint) -> None:
        self._host.arenas.pop(endpoint.address, None)
        if (listener := self._host.listeners.pop(endpoint.address, None)) is not None:
            listener.remove(endpoint.address)
        self._host.handed_on.pop(endpoint.address, None)

    def attach(self, endpoint: Endpoint, *, timeout: float) -> RemoteArena:
        host, world = self._host, self._host.world
        world.forbid_waiting("attach")
        owner, arena = host.found(endpoint.address) or ("", None)
        if endpoint.address in self._exported and not host.lied:
            raise Violation("own_arena", f"a rank of {owner} attaches its own arena")
        if owner in host.silent and owner != self._owner:
            world.wait(timeout)
            raise PeerUnreachableError(f"{owner} does not answer")
        if arena is None or arena.epoch != endpoint.epoch or world.chance(host.failing):
            raise PeerUnreachableError(f"nobody has the arena at {endpoint.address}")
        listener = host.listeners.get(endpoint.address)
        if listener is None:
            descriptor = os.dup(arena.fd)
        else:
            descriptor = listener.attach(endpoint.address, endpoint.epoch)
        try:
            view = ArenaView.open(
                descriptor,
                epoch=endpoint.epoch,
                n_slots=endpoint.n_slots,
                slot_bytes=endpoint.slot_bytes,
            )
        except BaseException:
            os.close(descriptor)
            raise
        return View(host, self._owner, endpoint, view, descriptor)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for address, (owner, _) in list(self._host.arenas.items()):
            if owner == self._owner:
                del self._host.arenas[address]
                self._host.listeners.pop(address, None)
        for address, (owner, _) in list(self._host.handed_on.items()):
            if owner == self._owner:
                del self._host.handed_on[address]


class Shelf:
    """What clients of a shared store have in common: its entries."""

    def __init__(self) -> None:
        self.entries: MutableMapping[str, bytes] = {}

    def answers(self, timeout: float) -> bool:
        """Whether a call finds the store, in time."""
        return True

    def forget(self) -> None:
        """Lose entries, as stores do when something is put."""

    def keeps(self) -> bool:
        """Whether an entry that is put stays."""
        return True

    def taken(self, key: str) -> bytes | None:
        """An entry that is read; None where there is none."""
        return self.entries.get(key)


class TroubledShelf(Shelf):
    """The entries, and what goes wrong with them.

    Attributes:
        absent: how often a call finds nobody.
        slow: seconds that a call takes at most.
        forgets: how often an entry is evicted when something is put.
        holes: how often an entry is lost when it is put, so that the store answers for some blocks
            of a prompt only.
        vanishing: how often an entry is gone when it is read.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.absent = 0.0
        self.slow = 0.0
        self.forgets = 0.0
        self.holes = 0.0
        self.vanishing = 0.0
        self._world = world

    @property
    def is_steady(self) -> bool:
        """Whether all that it says to have can be read."""
        return not (self.absent or self.slow or self.forgets or self.vanishing)

    def answers(self, timeout: float) -> bool:
        world = self._world
        world.forbid_waiting("the shared store")
        if self.slow:
            seconds = self.slow * world.draw.random()
            world.wait(min(seconds, timeout))
            if seconds > timeout:
                return False
        return not world.chance(self.absent)

    def forget(self) -> None:
        if self.forgets:
            for key in list(self.entries):
                if self._world.chance(self.forgets):
                    del self.entries[key]

    def keeps(self) -> bool:
        return not self._world.chance(self.holes)

    def taken(self, key: str) -> bytes | None:
        if self._world.chance(self.vanishing):
            self.entries.pop(key, None)
        return super().taken(key)

    def client(self, owner: str) -> BlockStore:
        """What one half of an engine uses.

        Args:
            owner: the engine.
        """
        return SimulatedStore(self)

    def kill(self, owner: str) -> None:
        """The process of an engine has ended."""

    def look(self) -> None:
        """Check what must hold at rest."""

    def close(self) -> None:
        """Let go of the entries."""


class SimulatedStore(BlockStore):
    """One client of a shelf.

    Args:
        shelf: that it asks.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def exists(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        there = self._shelf.answers(timeout)
        return [there and key in self._shelf.entries for key in keys]

    def buffer(self, rows: int, row_bytes: int) -> NDArray[np.uint8]:
        return np.zeros((rows, row_bytes), np.uint8)

    def put(
        self,
        keys: Sequence[str],
        rows: NDArray[np.uint8],
        lengths: Sequence[int],
        *,
        timeout: float,
    ) -> list[bool]:
        if not self._shelf.answers(timeout):
            return [False] * len(keys)
        for key, row, length in zip(keys, rows, lengths, strict=True):
            if self._shelf.keeps():
                self._shelf.entries.setdefault(key, row[:length].tobytes())
        self._shelf.forget()
        return [True] * len(keys)

    def get(
        self,
        keys: Sequence[str],
        rows: NDArray[np.uint8],
        lengths: Sequence[int],
        *,
        timeout: float,
    ) -> list[bool]:
        there = self._shelf.answers(timeout)
        found = []
        for key, row, length in zip(keys, rows, lengths, strict=True):
            entry = self._shelf.taken(key) if there else None
            found.append(entry is not None and len(entry) == length)
            if entry is not None and found[-1]:
                row[:length] = np.frombuffer(entry, np.uint8)
        return found

    def discard(self, keys: Sequence[str], *, timeout: float) -> None:
        if self._shelf.answers(timeout):
            for key in keys:
                self._shelf.entries.pop(key, None)

    @property
    def failures(self) -> Mapping[str, int]:
        return Counter()

    def close(self) -> None:
        """Nothing to let go of."""


class UnwrittenFile(StatusFile):
    """Sees that no thread uses it that may not wait for a disk, and writes nothing.

    Args:
        world: that the engine lives in.
        orders: what its operator asks of it now.
        folder: where the file of a real engine would lie.
    """

    def __init__(self, world: World, orders: Callable[[], Orders], folder: Path) -> None:
        self._world = world
        self._orders = orders

    def write(self, text: bytes) -> None:
        self._world.forbid_engine("the status file")

    def orders(self) -> Orders:
        self._world.forbid_engine("the status file")
        return self._orders()

    def sweep(self) -> None:
        self._world.forbid_engine("the status file")

    def close(self) -> None:
        """There is none."""
