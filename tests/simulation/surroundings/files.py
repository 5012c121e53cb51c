# SPDX-License-Identifier: Apache-2.0
"""A store of files in a simulation: the real store and its sweeps, on a file system with troubles.

The files are real ones, with times of the simulation's clock. What takes time is drawn: each look,
read and write of a thread takes a part of `slow` seconds, or hangs, while other threads of the same
call go on. What is not done when its caller has given up is done later, as by a thread that was
held up.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from omni_connector.arena.format import PAGE_BYTES
from omni_connector.config import FileStoreSettings
from omni_connector.stores.file_folder import BlockFile, BlockFolder
from omni_connector.stores.file_store import FileBlockStore, FileCall
from tests.simulation.surroundings.memory import TroubledShelf
from tests.simulation.surroundings.world import SimulatedTurns, Violation, World

_EPOCH_NS: Final = 10**18
_HANGS_S: Final = 6.0  # longer than a put, the longest call
_FREE_BYTES: Final = 1 << 40
_SWEEP: Final = "omni-store-sweep"
# A sweep goes down to 0.9 of the size, and one file further at most.
_KEPT: Final = 0.9
_RESTED_S: Final = 60.0  # longer than a sweep rests after the one before

_Result = TypeVar("_Result")


def _new_folder() -> str:
    memory = "/dev/shm"  # a disk would take most of a schedule's time
    there = memory if os.access(memory, os.W_OK) else None
    return tempfile.mkdtemp(prefix="omni-sim-files-", dir=there)


class FileShelf(TroubledShelf):
    """The files that the engines of a world share.

    Args:
        pages: how large they may be together.

    Attributes:
        slow: seconds that one look, read or write takes at most.
        hangs: how often one takes longer than anybody waits.
        torn: how often a file is found short.
        folder: where they are.
    """

    def __init__(self, world: World, pages: int) -> None:
        super().__init__(world)
        self.world = world
        self.hangs = 0.0
        self.torn = 0.0
        self.size_bytes: Final = pages * PAGE_BYTES
        self.folder: Final = SimulatedFolder(self, _new_folder())
        self.entries = _Entries(self.folder)
        self._clients: list[SimulatedFileStore] = []

    @property
    def is_steady(self) -> bool:
        return False  # files are swept

    def wall(self) -> int:
        """The time that files have."""
        return _EPOCH_NS + int(self.world.now * 1e9)

    def client(self, owner: str) -> "SimulatedFileStore":
        """What one half of an engine uses."""
        self._clients.append(SimulatedFileStore(self, owner))
        return self._clients[-1]

    def kill(self, owner: str) -> None:
        for client in self._clients:
            client.kill(owner)

    def look(self) -> None:
        """Check what must hold at rest.

        Raises:
            Violation: there are more files than the store may have, and who stores some is alive
                to sweep.
        """
        if not any(client.sweeps for client in self._clients):
            return
        # A sweep that is asked for just after another one comes after a rest.
        self.world.run(
            lambda: not any(client.behind for client in self._clients), self.world.now + _RESTED_S
        )
        total = sum(file.nbytes for file in self.folder.files() if file is not None)
        if total > self.size_bytes:
            raise Violation("beyond_bounds", f"{total} bytes of files, {self.size_bytes} allowed")

    def close(self) -> None:
        """Remove the files. Idempotent."""
        shutil.rmtree(self.folder.path, ignore_errors=True)


class SimulatedFolder(BlockFolder):
    """The files; it sees what sweeps remove."""

    def __init__(self, shelf: FileShelf, path: str) -> None:
        super().__init__(path)
        self.there: dict[str, str] = {}  # keys of the files, by path
        self._keys: dict[str, str] = {}
        self._shelf = shelf
        self._listed: dict[str, BlockFile] = {}  # what a sweep has seen last, by path
        self._swept: list[BlockFile] = []
        # Bytes that others have removed during the scan before, and during this one. A sweep does
        # not know of them: it scans twice, and decides in between.
        self._gone = [0, 0]

    def path_of(self, key: str) -> str:
        # All in the one sub-folder that simulations have.
        path = f"{self.path}/00/{os.path.basename(super().path_of(key))}"
        self._keys[path] = key
        return path

    def open(self, path: str) -> int:
        if self._shelf.world.chance(self._shelf.torn) and os.path.exists(path):
            self._shelf.world.tell("a file is torn")
            os.truncate(path, os.path.getsize(path) // 2)
        return super().open(path)

    def write(self, path: str, content: memoryview, wanted: Callable[[], bool]) -> bool:
        stored = super().write(path, content, wanted)
        if stored:
            self.there[path] = self._keys[path]
            self.touch(path, self._shelf.wall())
            self._shelf.forget()
        return stored

    def files(self) -> Iterator[BlockFile | None]:
        self._swept.clear()
        self._listed.clear()
        self._gone = [self._gone[1], 0]
        kept: list[str] = []
        for file in sorted(each for each in super().files() if each is not None):
            if os.path.exists(file.path):  # another thread may have removed it
                self._listed[file.path] = file
                yield file
                kept.append(file.path)
            yield None
        if self._swept:
            self._look_at_sweep([path for path in kept if os.path.exists(path)])

    def remove(self, path: str) -> bool:
        acting = self._shelf.world.acting
        if self.status(path):
            if acting and acting[-1].name.endswith(_SWEEP):
                self._swept.append(self._listed[path])
            else:
                self._gone[1] += _pages(path)
        self.there.pop(path, None)
        return super().remove(path)

    def free_bytes(self) -> int:
        return _FREE_BYTES

    def _look_at_sweep(self, kept: list[str]) -> None:
        newest = max(file.used_ns for file in self._swept)
        if any(os.stat(path).st_mtime_ns < newest for path in kept):
            raise Violation("swept_wrong", "a sweep keeps what was used before what it removes")
        largest = max(file.nbytes for file in self._swept)
        left = sum(_pages(path) for path in kept) + sum(self._gone)
        if left < _KEPT * self._shelf.size_bytes - largest - PAGE_BYTES:
            raise Violation("swept_wrong", "a sweep removes more than it has to")


def _pages(path: str) -> int:
    """Bytes that a file takes of the disk."""
    return -(-os.path.getsize(path) // PAGE_BYTES) * PAGE_BYTES


class _Entries(MutableMapping[str, bytes]):
    """The whole files by their keys, as other shelves have their entries."""

    def __init__(self, folder: SimulatedFolder) -> None:
        self._folder = folder

    def __getitem__(self, key: str) -> bytes:
        try:
            return Path(self._folder.path_of(key)).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, entry: bytes) -> None:
        path = Path(self._folder.path_of(key))
        used_ns = path.stat().st_mtime_ns
        path.write_bytes(entry)
        self._folder.touch(str(path), used_ns)

    def __delitem__(self, key: str) -> None:
        if not self._folder.remove(self._folder.path_of(key)):
            raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._folder.there.values()))

    def __len__(self) -> int:
        return len(self._folder.there)


@dataclass(slots=True)
class _Run:
    """The threads that answer one call.

    Attributes:
        now: seconds since the call began.
        threads: when each is free, in the same seconds.
    """

    now: float = 0.0
    threads: list[float] = field(default_factory=list)


class _AtOnce:
    """Makes calls in the turn that asks for them."""

    def start(self, call: Callable[[], _Result]) -> "Future[_Result]":
        future: Future[_Result] = Future()
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)
        return future

    def close(self) -> None:
        """There is nothing to end."""


class SimulatedFileStore(FileBlockStore):
    """The real store, whose threads are simulated.

    Args:
        shelf: the files.
        owner: engine, whose end ends its threads.
    """

    def __init__(self, shelf: FileShelf, owner: str) -> None:
        self._shelf = shelf
        self._owner = owner
        self._runs: WeakKeyDictionary[FileCall, _Run] = WeakKeyDictionary()
        world = shelf.world
        super().__init__(
            FileStoreSettings(path=shelf.folder.path, gib=shelf.size_bytes / (1 << 30)),
            clock=world.clock,
            start=partial(SimulatedTurns, world, owner),
            wall=shelf.wall,
            folder=shelf.folder,
            calls=_AtOnce(),
        )

    @property
    def sweeps(self) -> bool:
        """Whether its thread sweeps."""
        dead = self._owner in self._shelf.world.dead
        return not dead and self._sweeping is not None and self._sweeping.is_alive()

    @property
    def behind(self) -> bool:
        """Whether its thread is in a sweep, or has been asked for one."""
        return self.sweeps and (self._pieces is not None or self._sweeper.urgent())

    def kill(self, owner: str) -> None:
        """Drop the lock of a sweep, as the kernel does, if its engine is the one that ended."""
        if owner == self._owner and self._pieces is not None:
            self._pieces.close()

    def _begin(self, call: FileCall, *, beside: bool = False) -> None:
        self._shelf.world.forbid_waiting("the files of a store")
        run = self._runs.setdefault(call, _Run())
        run.threads.append(run.now)

    def _await(self, call: FileCall, seconds: float) -> bool:
        world, run = self._shelf.world, self._runs[call]
        began, limit = run.now, run.now + seconds
        while run.threads and not call.ended.is_set():
            run.threads.sort()
            at = run.threads.pop(0)
            cost = self._shelf.slow * world.draw.random() if self._shelf.slow else 0.0
            cost += _HANGS_S if world.chance(self._shelf.hangs) else 0.0
            if at + cost > limit:
                self._held_up(call, at + cost - began)
            elif call.step():
                run.threads.append(at + cost)
                run.now = at + cost
        if call.ended.is_set():
            while call.step():
                pass
        else:
            run.now = limit
        if run.now > began:
            world.wait(run.now - began)
        return call.ended.is_set()

    def _held_up(self, call: FileCall, seconds: float) -> None:
        """A thread has taken a question, and answers it when nobody may wait any more."""
        number = call.take()
        if number is not None:
            self._shelf.world.later(seconds, partial(self._answer_late, call, number))

    def _answer_late(self, call: FileCall, number: int) -> None:
        if self._owner not in self._shelf.world.dead:
            call.answer(number)
