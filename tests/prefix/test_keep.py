# SPDX-License-Identifier: Apache-2.0
"""`omni-connector keep`: what engines have kept outlives them in a process of its own."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena.arena import Arena, memfd
from omni_connector.arena.block_index import BlockIndex, tags_of
from omni_connector.errors import OmniError, TransportError
from omni_connector.net import runtime
from omni_connector.net.packets import PACKAGE, Refusal
from omni_connector.net.unix import Listener
from omni_connector.prefix import keep as keep_module
from omni_connector.prefix.keep import MOST_KEPT, Keep, KeptEngines
from omni_connector.prefix.neighbours import (
    QUESTIONS,
    HostNeighbours,
    LocalEngine,
    index_socket,
)
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock
from omni_connector.transports import Endpoint
from omni_connector.transports.shm import SharedMemoryTransport
from tests.prefix.test_orphans import RanksThatKeep

TAGS = tags_of(b"key", 0, [b"a" * 16, b"b" * 16])
OTHER_TAGS = tags_of(b"key of other weights", 0, [b"a" * 16, b"b" * 16])
MODEL = bytes(16)
SLOTS, SLOT_BYTES = 8, 1 << 16
SECONDS = 100.0


@dataclass
class Running:
    """An engine with its arenas.

    Attributes:
        neighbours: the engines that it has met.
        ends: closes it as a killed process is closed.
    """

    neighbours: HostNeighbours
    ends: contextlib.ExitStack

    def kill(self) -> None:
        self.ends.close()


@dataclass
class Host:
    """Engines of a host, and what keeps them."""

    folder: Path
    ends: contextlib.ExitStack
    clock: FakeClock = field(default_factory=FakeClock)
    short: bool = False

    def keep(self, most_bytes: int = 1 << 30, seconds: float = SECONDS) -> Keep:
        made = Keep("default", most_bytes, seconds, self.clock, lambda: self.short)
        return self.ends.enter_context(contextlib.closing(made))

    def engine(
        self, name: str, *, ranks: int = 2, blocks: bool = True, model: bytes = MODEL
    ) -> Running:
        ends = self.ends.enter_context(contextlib.ExitStack())
        shm = ends.enter_context(contextlib.closing(SharedMemoryTransport()))
        endpoints = []
        for rank in range(ranks):
            arena = ends.enter_context(Arena.create(SLOTS, SLOT_BYTES))
            arena.slots[:] = 10 + rank
            endpoints.append((shm.export(arena, f"arena:{name}:{rank}"),))
        index = ends.enter_context(contextlib.closing(BlockIndex.create(SLOTS, os.urandom(16))))
        if blocks:
            index.add(TAGS, np.array([3, 5]), np.array([1, 2]))
        local_engine = LocalEngine(
            runtime.runtime_dir(),
            name,
            model,
            index,
            tuple(endpoints),
            RanksThatKeep(name),
            lambda *_: None,
        )
        made = HostNeighbours(local_engine, EngineContext(self.clock), lambda: False)
        ends.enter_context(contextlib.closing(made))
        return Running(made, ends)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        contextlib.ExitStack() as ends,
    ):
        monkeypatch.setenv(runtime.RUNTIME_DIR_VARIABLE, f"{folder}/run")
        yield Host(Path(folder), ends)


def kept_by(keep: Keep, engine: Running) -> None:
    """The engine is met, and then killed."""
    keep.look()
    engine.kill()
    keep.look()


def found(engine: Running) -> list[list[int]]:
    """The slots that an engine finds at others."""
    engine.neighbours.look()
    return [each.index.find(TAGS)[0].tolist() for each in engine.neighbours.present()]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_successor_finds_and_reads_what_a_killed_engine_had(host: Host) -> None:
    keep = host.keep()
    kept_by(keep, host.engine("one"))
    successor = host.engine("one")
    assert found(successor) == [[3, 5]]
    [neighbour] = successor.neighbours.present()
    assert neighbour.orphan  # so that it keeps itself what it reads there
    with contextlib.closing(SharedMemoryTransport()) as shm:
        for rank, (endpoint,) in enumerate(neighbour.arenas):
            with contextlib.closing(shm.attach(endpoint, timeout=60.0)) as arena:
                assert (arena.slots[3] == 10 + rank).all()


def test_without_it_a_successor_finds_nothing(host: Host) -> None:
    host.engine("one").kill()
    assert found(host.engine("one")) == []


def test_other_weights_find_nothing_and_another_model_is_refused(host: Host) -> None:
    keep = host.keep()
    kept_by(keep, host.engine("one"))
    successor = host.engine("one")
    successor.neighbours.look()
    [neighbour] = successor.neighbours.present()
    assert (neighbour.index.find(OTHER_TAGS)[0] == -1).all()
    assert found(host.engine("another", model=b"m" * 16)) == []


def test_an_engine_that_had_kept_nothing_takes_no_room_and_no_other_for_ever(host: Host) -> None:
    keep = host.keep()
    before = open_descriptors()
    kept_by(keep, host.engine("one", blocks=False))
    assert open_descriptors() == before
    kept_by(keep, host.engine("other"))
    host.clock.advance(SECONDS)
    keep.look()
    assert open_descriptors() == before
    assert found(host.engine("one")) == []


def test_memory_that_the_kernel_has_allocated_is_counted_once_its_engine_has_ended(
    host: Host,
) -> None:
    keep = host.keep()
    engine = host.engine("one")
    keep.look()
    assert (keep._kept.nbytes, len(keep._living)) == (0, 1)
    engine.kill()
    keep.look()
    arenas = 2 * SLOTS * SLOT_BYTES
    assert arenas <= keep._kept.nbytes <= arenas + (1 << 17)  # headers and the index


def test_an_engine_that_does_not_fit_is_not_kept_and_ends_no_other(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    keep = host.keep(most_bytes=int(1.5 * SLOTS * SLOT_BYTES))
    kept_by(keep, host.engine("small", ranks=1))
    caplog.set_level("INFO")
    kept_by(keep, host.engine("large", ranks=2))
    assert "engine large is kept no longer: it takes" in caplog.text
    assert found(host.engine("next", ranks=1)) == [[3, 5]]


def test_engines_go_on_when_it_is_gone(host: Host) -> None:
    keep = host.keep()
    kept_by(keep, host.engine("one"))
    successor = host.engine("two")
    assert found(successor) == [[3, 5]]
    keep.close()
    assert found(successor) == [[3, 5]]  # as an orphan
    host.clock.advance(60.0)
    assert found(successor) == []


def test_an_engine_that_knew_the_ended_one_reads_it_at_one_place(host: Host) -> None:
    keep = host.keep()
    witness, one = host.engine("witness"), host.engine("one")
    keep.look()
    assert found(witness) == [[3, 5]]
    one.kill()
    assert found(witness) == [[3, 5]]  # as its own orphan
    keep.look()
    assert found(witness) == [[3, 5]]


def test_a_second_one_is_refused(host: Host) -> None:
    first = host.keep()
    with pytest.raises(TransportError, match=r"another omni-connector keep holds .* default"):
        host.keep()
    first.close()
    host.keep()


def test_what_a_second_namespace_leaves_is_not_kept(host: Host) -> None:
    with contextlib.closing(Keep("other", 1 << 30, SECONDS, host.clock, lambda: False)) as other:
        kept_by(other, host.engine("one"))
        assert found(host.engine("one")) == []


def test_an_engine_whose_arena_is_no_memfd_is_not_kept(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsealed(*_: object) -> int:
        return memfd("another")

    keep = host.keep()
    monkeypatch.setattr(keep_module, "ask_arena", unsealed)
    before = open_descriptors()
    engine = host.engine("one")
    keep.look()
    assert "will not be kept when it ends" in caplog.text
    engine.kill()
    keep.look()
    assert open_descriptors() == before
    assert found(host.engine("one")) == []


def test_an_arena_that_only_other_hosts_can_fetch_is_not_kept() -> None:
    endpoint = Endpoint(
        transport="mooncake", address="h:1", epoch=bytes(16), n_slots=1, slot_bytes=4096
    )
    with pytest.raises(OmniError, match="cannot be mapped"):
        keep_module._mapped((endpoint,))


def test_an_engine_of_another_version_is_refused_by_name(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    keep = host.keep()
    refusal = Refusal("protocol 2, wanted 9", protocol=9, package="omni-connector 9.9.9")
    path = index_socket(runtime.runtime_dir(), "newer")
    listener = Listener(QUESTIONS, lambda _: (refusal, None))
    with contextlib.closing(listener):
        listener.add(path)
        keep.look()
    [line] = [each.message for each in caplog.records]
    assert f"{path.name} will not be kept when it ends" in line
    assert "omni-connector 9.9.9" in line
    assert PACKAGE in line


def test_an_engine_that_is_still_there_is_given_back(host: Host) -> None:
    keep = host.keep()
    engine = host.engine("one")
    keep.look()
    next(iter(keep._living.values())).connection.close()  # the engine has hung up
    keep.look()
    host.clock.advance(10.0)
    keep.look()
    assert keep._kept.nbytes == 0
    assert len(keep._living) == 1
    engine.kill()


# What goes first


@dataclass
class Piece:
    """What is kept of an engine, as far as `KeptEngines` knows."""

    nbytes: int
    used_at: float
    name: str = "engine"
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@given(
    sizes=st.lists(st.integers(0, 40), max_size=30),
    uses=st.lists(st.tuples(st.integers(0, 29), st.floats(0, 300)), max_size=30),
    most=st.integers(0, 100),
    short=st.booleans(),
)
def test_what_is_kept_is_bounded_and_least_used_goes_first(
    sizes: list[int], uses: list[tuple[int, float]], most: int, short: bool
) -> None:
    clock = FakeClock()
    shelf = KeptEngines(most, SECONDS, clock, lambda: short)
    pieces: list[Piece] = []
    for number, size in enumerate(sizes):
        pieces.append(Piece(size, clock()))
        shelf.keep(number.to_bytes(2), pieces[-1])
        for which, after in uses[number : number + 1]:
            clock.advance(after / 10)
            pieces[which % len(pieces)].used_at = clock()
        before = [each for each in pieces if not each.closed]
        shelf.follow()
        left = [each for each in pieces if not each.closed]
        assert shelf.nbytes == sum(each.nbytes for each in left) <= most
        assert len(left) <= MOST_KEPT
        now = clock()
        began = {id(each): at for each, at in zip(pieces, starts(clock, uses), strict=False)}
        gone = [e for e in before if e.closed and began[id(e)] + SECONDS > now]
        if gone and left:
            assert max(e.used_at for e in gone) <= min(e.used_at for e in left)
    shelf.close()
    assert all(each.closed for each in pieces)


def starts(clock: Callable[[], float], uses: list[tuple[int, float]]) -> Iterator[float]:
    """When each piece was kept: the clock moved by a tenth of each use's seconds in between."""
    at = FakeClock()()
    for _, after in uses:
        yield at
        at += after / 10
    while True:
        yield at
