# SPDX-License-Identifier: Apache-2.0
"""What an engine has kept can be read for a while after its end, and by engines that start then."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from omni_connector.arena.block_index import BlockIndex, tags_of
from omni_connector.prefix.attaching import Arenas
from omni_connector.prefix.neighbours import HostNeighbours, LocalEngine, Neighbour
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock
from omni_connector.transports import Endpoint

TAGS = tags_of(b"key", 0, [b"a" * 16, b"b" * 16])


class RanksThatKeep:
    """Ranks that have attached everything, and hand orphans on.

    Attributes:
        name: of their engine.
        lacks: whether they have no orphan.
        asked: the orphans that they were last asked to keep.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lacks = False
        self.asked: list[tuple[Arenas, float]] = []

    def attached(self, engines: Sequence[Arenas]) -> list[bool]:
        return [True] * len(engines)

    def kept(self, orphans: Sequence[tuple[Arenas, float]]) -> list[Arenas | None]:
        self.asked = list(orphans)
        return [None if self.lacks else self._handed_on(arenas) for arenas, _ in orphans]

    def _handed_on(self, arenas: Arenas) -> Arenas:
        return tuple(
            tuple(replace(each, address=f"{each.address} at {self.name}") for each in rank)
            for rank in arenas
        )

    def close(self) -> None:
        """Nothing is held."""


class Host:
    """Engines of a host, which look for each other when they are told to.

    Attributes:
        clock: of all engines.
        short: whether memory is short.
    """

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        self._folder = folder
        self._ends = ends
        self.clock = FakeClock()
        self.short = False
        self.ranks: dict[str, RanksThatKeep] = {}

    def engine(self, name: str, *, model: bytes = bytes(16)) -> HostNeighbours:
        epoch = name.encode().ljust(16, b".")
        index = self._ends.enter_context(contextlib.closing(BlockIndex.create(8, epoch)))
        index.add(TAGS, np.array([3, 5]), np.array([1, 2]))
        arena = Endpoint(transport="shm", address=name, epoch=epoch, n_slots=8, slot_bytes=4096)
        self.ranks[name] = RanksThatKeep(name)
        local_engine = LocalEngine(
            self._folder,
            name,
            model,
            index,
            ((arena,),),
            self.ranks[name],
            lambda *_: None,
        )
        made = HostNeighbours(local_engine, EngineContext(self.clock), lambda: self.short)
        return self._ends.enter_context(contextlib.closing(made))


@pytest.fixture
def host() -> Iterator[Host]:
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        yield Host(folder, ends)


def addresses(engine: HostNeighbours, *, orphans: bool) -> list[str]:
    """Where the arenas of living neighbours, or of orphans, are attached."""
    return sorted(each.arenas[0][0].address for each in engine.present() if each.orphan == orphans)


def look(*engines: HostNeighbours) -> None:
    for engine in engines:
        engine.look()


def left_alone(host: Host) -> HostNeighbours:
    """An engine whose neighbour, "gone", has ended."""
    reader, gone = host.engine("reader"), host.engine("gone")
    look(reader, gone)
    assert addresses(reader, orphans=False) == ["gone"]
    gone.close()
    look(reader)
    return reader


def found(neighbour: Neighbour) -> list[int]:
    return neighbour.index.find(TAGS)[0].tolist()


def test_an_engine_that_has_ended_is_read_on_until_its_time_is_over(host: Host) -> None:
    reader = left_alone(host)
    (orphan,) = reader.present()
    assert orphan.orphan
    assert found(orphan) == [3, 5]
    host.clock.advance(59.0)
    look(reader)
    assert reader.present() == (orphan,)
    host.clock.advance(1.0)
    look(reader)
    assert not reader.present()
    assert not reader._orphans


def test_an_engine_that_starts_then_gets_it_from_who_has_it(host: Host) -> None:
    reader = left_alone(host)
    host.clock.advance(20.0)
    successor = host.engine("successor")
    look(successor)
    assert addresses(successor, orphans=False) == ["reader"]
    assert addresses(successor, orphans=True) == ["gone at reader"]
    (orphan,) = (each for each in successor.present() if each.orphan)
    assert found(orphan) == [3, 5]
    reader.close()  # what it has handed on, its successors hand on
    look(successor)
    last = host.engine("last")
    look(last)
    assert "gone at reader at successor" in addresses(last, orphans=True)
    host.clock.advance(40.0)  # no chain of engines keeps it for longer
    look(successor, last)
    assert not any("gone" in each for each in addresses(last, orphans=True))


@pytest.mark.parametrize("why", ["ranks", "memory"])
def test_an_orphan_that_cannot_be_kept_is_let_go(host: Host, why: str) -> None:
    reader, gone = host.engine("reader"), host.engine("gone")
    look(reader, gone)
    gone.close()
    host.ranks["reader"].lacks = why == "ranks"
    host.short = why == "memory"
    look(reader)
    if why != "memory":
        assert not reader.present()
    host.clock.advance(6.0)
    look(reader)
    assert not reader.present()
    assert not reader._orphans


def test_an_engine_of_another_model_takes_no_orphan(host: Host) -> None:
    left_alone(host)
    stranger = host.engine("stranger", model=b"another model...")
    look(stranger)
    assert not stranger.present()
    assert not stranger._orphans


def test_an_engine_that_was_taken_for_gone_is_no_orphan(host: Host) -> None:
    reader, other = host.engine("reader"), host.engine("other")
    look(reader, other)
    for met in reader._met.values():
        met.connection.close()  # as after a fault of the connection
    look(reader)
    host.clock.advance(10.0)
    look(reader)
    assert addresses(reader, orphans=False) == ["other"]
    assert not reader._orphans
