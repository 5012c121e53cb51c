# SPDX-License-Identifier: Apache-2.0
"""What an engine has kept, over a restart in which systemd keeps its descriptors."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.arena.block_index import BlockIndex, tags_of
from omni_connector.errors import PeerRefusedError
from omni_connector.net import runtime, service_manager
from omni_connector.prefix.neighbours import HostNeighbours, LocalEngine
from omni_connector.prefix.restarts import (
    STAY_S,
    WAIT_S,
    Label,
    StandIn,
    leave_arena,
    leave_index,
    stand_in,
)
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import Turn
from omni_connector.testing import FakeClock
from omni_connector.transports import Endpoint
from omni_connector.transports.shm import SharedMemoryTransport
from tests.prefix.test_orphans import RanksThatKeep
from tests.systemd import Systemd

TAGS = tags_of(b"key", 0, [b"a" * 16, b"b" * 16])
MODEL = bytes(16)
SLOT_BYTES = 4096


@dataclass
class Ended:
    """A thread that has no turns of its own."""

    turn: Turn

    def wake(self) -> None:
        """Nobody waits."""

    def join(self, timeout: float) -> None:
        """The last turn."""
        self.turn()

    def is_alive(self) -> bool:
        return False


@dataclass
class Service:
    """A service of one engine, which is restarted.

    Attributes:
        clock: of the stand-ins; their turns are made by `pass_time`.
        moved: descriptors that were put where a service finds them.
    """

    folder: Path
    systemd: Systemd
    monkeypatch: pytest.MonkeyPatch
    clock: FakeClock = field(default_factory=FakeClock)
    turns: list[Turn] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)

    def run_and_kill(self, ranks: int = 2) -> None:
        """An engine keeps two blocks, in two ranks, and is gone."""
        with contextlib.ExitStack() as ends:
            arenas = []
            for rank in range(ranks):
                arena = Arena.create(8, SLOT_BYTES)
                ends.callback(arena.close)
                arena.slots[3] = 10 + rank
                leave_arena(self.systemd.environment, arena)
                arenas.append((Endpoint.of(arena, "shm", f"{self.folder}/a-{rank}.sock"),))
            index = ends.enter_context(contextlib.closing(BlockIndex.create(8, os.urandom(16))))
            index.add(TAGS, np.array([3, 5]), np.array([1, 2]))
            engine = self._engine("engine", index, tuple(arenas))
            label = Label("default", engine.gives)
            leave_index(self.systemd.environment, label, index.fd)

    def _engine(self, name: str, index: BlockIndex, arenas: object) -> LocalEngine:
        folder, ranks = runtime.runtime_dir(), RanksThatKeep(name)
        return LocalEngine(folder, name, MODEL, index, arenas, ranks, lambda *_: None, 60.0)

    def restart(self) -> list[StandIn]:
        """The main process starts again."""
        kept = self.systemd.kept
        first = 400 + len(self.moved)
        for number, (_, descriptor) in enumerate(kept):
            assert fcntl.fcntl(descriptor, fcntl.F_DUPFD, first + number) == first + number
            self.moved.append(first + number)
        self.monkeypatch.setattr(service_manager, "FIRST_DESCRIPTOR", first)
        environ = self.systemd.environment | self.systemd.listen_environment()
        context = EngineContext(self.clock, self._start)
        return stand_in(environ | {"LISTEN_PID": str(os.getpid())}, context)

    def _start(self, name: str, turn: Turn, *, end: Callable[[], object], **_: object) -> Ended:
        def one() -> float | None:
            if (seconds := turn()) is None:
                end()
            return seconds

        self.turns.append(one)
        return Ended(one)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.turns = [turn for turn in self.turns if turn() is not None]

    @contextlib.contextmanager
    def successor(self, ranks: int = 2) -> Iterator[HostNeighbours]:
        """An engine that starts, and has looked once."""
        name = "successor"
        with contextlib.closing(BlockIndex.create(8, os.urandom(16))) as index:
            own = Endpoint(
                transport="shm",
                address=name,
                epoch=os.urandom(16),
                n_slots=8,
                slot_bytes=SLOT_BYTES,
            )
            local_engine = self._engine(name, index, ((own,),) * ranks)
            made = HostNeighbours(local_engine, EngineContext(FakeClock()), lambda: False)
            with contextlib.closing(made):
                made.look()
                yield made


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        contextlib.closing(Systemd(Path(folder))) as systemd,
    ):
        monkeypatch.setenv(runtime.RUNTIME_DIR_VARIABLE, f"{folder}/run")
        yield Service(Path(folder), systemd, monkeypatch)


@pytest.fixture
def restarted(service: Service) -> Iterator[tuple[Service, StandIn]]:
    service.run_and_kill()
    [stand] = service.restart()
    with contextlib.closing(stand):
        yield service, stand


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_successor_finds_what_its_predecessor_kept(restarted: tuple[Service, StandIn]) -> None:
    service, _ = restarted
    with service.successor() as engine, contextlib.ExitStack() as ends:
        [found] = engine.present()
        assert found.index.find(TAGS)[0].tolist() == [3, 5]
        shm = ends.enter_context(contextlib.closing(SharedMemoryTransport()))
        for rank, (endpoint,) in enumerate(found.arenas):
            arena = ends.enter_context(contextlib.closing(shm.attach(endpoint, timeout=60.0)))
            assert (arena.slots[3] == 10 + rank).all()
        # Now the stand-in goes, and the engine has an orphan, which systemd does not keep.
        service.pass_time(STAY_S)
        engine.look()
        [orphan] = engine.present()
        assert orphan.orphan
        assert orphan.index.find(TAGS)[0].tolist() == [3, 5]
        assert not service.systemd.kept


def test_without_systemd_nothing_is_found(service: Service) -> None:
    service.systemd.most = 0
    service.run_and_kill()
    assert not service.restart()
    with service.successor() as engine:
        assert not engine.present()


def test_a_stand_in_waits_until_each_rank_has_its_arena(
    restarted: tuple[Service, StandIn],
) -> None:
    service, _ = restarted
    with service.successor() as engine, contextlib.ExitStack() as ends:
        [found] = engine.present()
        shm = ends.enter_context(contextlib.closing(SharedMemoryTransport()))
        for (endpoint,) in found.arenas:
            service.pass_time(STAY_S)
            assert service.turns
            ends.enter_context(contextlib.closing(shm.attach(endpoint, timeout=60.0)))
        service.pass_time(STAY_S)
        assert not service.turns


def test_nothing_is_kept_for_ever(service: Service) -> None:
    before = open_descriptors()
    service.run_and_kill()
    service.restart()
    service.pass_time(WAIT_S)
    assert not service.systemd.kept
    assert open_descriptors() == before
    assert not list(runtime.runtime_dir().glob("*.sock"))
    with service.successor() as engine:
        assert not engine.present()


def test_two_restarts_in_a_row_lose_nothing(service: Service) -> None:
    service.run_and_kill()
    first = service.restart()
    service.run_and_kill()  # before anybody has asked the stand-in
    for stand in first:
        stand._listener.close()  # its process is killed
    with contextlib.ExitStack() as ends:
        for stand in service.restart():
            ends.callback(stand.close)
        with service.successor() as engine:
            assert len(engine.present()) == 2
    for stand in first:
        stand.close()


def without(service: Service, part: str) -> None:
    [name] = [name for name, _ in service.systemd.kept if f"-{part}-" in name]
    service_manager.forget(service.systemd.environment, name)


def another_file(service: Service, part: str, content: bytes) -> None:
    [name] = [name for name, _ in service.systemd.kept if f"-{part}-" in name]
    without(service, part)
    with tempfile.TemporaryFile(dir=service.folder) as file:
        file.write(content)
        file.flush()
        service_manager.store(service.systemd.environment, name, file.fileno())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda service: without(service, "label"),
        lambda service: without(service, "index"),
        lambda service: without(service, "arena"),
        lambda service: another_file(service, "label", b""),
        lambda service: another_file(service, "label", os.urandom(100)),
    ],
    ids=["no label", "no index", "no arena", "an empty label", "another label"],
)
def test_what_is_not_whole_is_given_up(service: Service, spoil: Callable[[Service], None]) -> None:
    before = open_descriptors()
    service.run_and_kill(ranks=1)
    spoil(service)
    assert not service.restart()
    assert not service.systemd.kept
    assert open_descriptors() == before


def test_an_index_that_is_no_memfd_of_ours_is_read_by_nobody(service: Service) -> None:
    service.run_and_kill(ranks=1)
    another_file(service, "index", bytes(1 << 20))
    [stand] = service.restart()
    with contextlib.closing(stand), service.successor(ranks=1) as engine:
        assert not engine.present()


def test_an_arena_that_is_no_memfd_of_ours_is_read_by_nobody(service: Service) -> None:
    service.run_and_kill(ranks=1)
    another_file(service, "arena", bytes(1 << 20))
    [stand] = service.restart()
    with (
        contextlib.closing(stand),
        service.successor(ranks=1) as engine,
        contextlib.closing(SharedMemoryTransport()) as shm,
    ):
        [found] = engine.present()
        with pytest.raises(PeerRefusedError, match="memfd"):
            shm.attach(found.arenas[0][0], timeout=60.0)


def test_descriptors_of_others_are_left_alone(service: Service) -> None:
    service_manager.store(service.systemd.environment, "a-socket", 0)
    assert not service.restart()
    assert [name for name, _ in service.systemd.kept] == ["a-socket"]
    os.fstat(service.moved[0])
    os.close(service.moved[0])


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere"},
        {"NOTIFY_SOCKET": "/nowhere", "FDSTORE": "0"},
        {"NOTIFY_SOCKET": "/nowhere", "FDSTORE": "many"},
        {"FDSTORE": "8"},
    ],
)
def test_a_service_whose_unit_does_not_ask_leaves_nothing(environ: dict[str, str]) -> None:
    assert not service_manager.keeps_descriptors(environ)


def test_an_engine_goes_on_where_systemd_does_not_answer(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    gone = {"NOTIFY_SOCKET": f"{service.folder}/gone", "FDSTORE": "8"}
    with contextlib.closing(Arena.create(2, SLOT_BYTES)) as arena:
        leave_arena(gone, arena)
    assert "does not outlive a restart" in caplog.text
