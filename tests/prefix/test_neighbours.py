# SPDX-License-Identifier: Apache-2.0
"""What an engine is told of its slots that were read: all of it, the beginnings of prompts last."""

import contextlib
import gc
import socket
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_connector.arena.block_index import BlockIndex
from omni_connector.prefix import neighbours
from omni_connector.prefix.neighbours import Hits, HostNeighbours, LocalEngine
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.transports import Endpoint
from tests.patience import wait_until

ARENA = Endpoint(transport="shm", address="a", epoch=bytes(16), n_slots=8, slot_bytes=4096)


class AllAttached:
    """Ranks that have attached whatever they are asked for."""

    def attached(self, engines: Any) -> list[bool]:
        return [True] * len(engines)

    def kept(self, orphans: Any) -> list[Any]:
        return [None] * len(orphans)

    def close(self) -> None:
        """Nothing is held."""


class Reader:
    """An engine that reads slots of another one.

    Attributes:
        told: the messages to the other, each as pairs of slot and generation.
        room: of the other's socket, in messages.
    """

    def __init__(self, met: HostNeighbours) -> None:
        self.neighbours = met
        self.told: list[list[tuple[int, int]]] = []
        self.room = 1000
        (other,) = met._met.values()
        other.connection.tell = self._tell  # type: ignore[assignment, method-assign]

    def _tell(self, note: Hits) -> bool:
        self.room -= 1
        if self.room >= 0:
            pair = (np.frombuffer(each, np.int64) for each in (note.slots, note.generations))
            self.told.append(list(zip(*(each.tolist() for each in pair), strict=True)))
        return self.room >= 0

    def hit(self, slots: list[int], generation: int = 1) -> None:
        (other,) = self.neighbours.present()
        generations = np.full(len(slots), generation, np.int64)
        self.neighbours.hit(other, np.array(slots, np.int64), generations)

    def tell(self) -> list[tuple[int, int]]:
        """What is told with the next look, one message after the other."""
        self.told.clear()
        self.neighbours._tell()
        return [pair for message in self.told for pair in message]


@contextlib.contextmanager
def met_engines() -> Iterator[HostNeighbours]:
    """The neighbours of an engine that has met another one. Its own thread tells nothing."""
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))

        def engine(name: str) -> Any:
            index = ends.enter_context(contextlib.closing(BlockIndex.create(8, bytes(16))))
            home = LocalEngine(
                folder, name, bytes(16), index, ((ARENA,),), AllAttached(), lambda *_: None
            )
            return ends.enter_context(contextlib.closing(HostNeighbours(home, PROCESS_CONTEXT)))

        reader = engine("reader")
        engine("owner")

        def met() -> object:
            reader._thread.wake()
            return reader.present()

        wait_until(met)
        with contextlib.ExitStack() as still:
            patch = still.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(reader, "look", lambda: None)
            yield reader


@pytest.fixture(scope="module")
def met() -> Iterator[HostNeighbours]:
    with met_engines() as reader:
        yield reader


def test_of_what_was_read_the_latest_is_told_in_messages_of_a_bounded_size(
    met: HostNeighbours,
) -> None:
    reader = Reader(met)
    prompts = [list(range(1024 * n, 1024 * (n + 1)))[::-1] for n in range(20)]
    for each in prompts:
        reader.hit(each)
    assert reader.tell() == [(slot, 1) for each in prompts[4:] for slot in each]
    assert max(map(len, reader.told)) == 1024
    assert not reader.tell()


def test_what_a_full_socket_does_not_take_is_told_later(met: HostNeighbours) -> None:
    reader = Reader(met)
    reader.hit(list(range(3000)))
    reader.room = 1
    assert len(reader.tell()) == 1024
    reader.hit([7], generation=2)
    reader.room = 10
    assert reader.tell() == [*((slot, 1) for slot in range(1024, 3000)), (7, 2)]


@pytest.mark.parametrize("avoided", [False, True])
def test_what_was_not_told_before_the_end_keeps_no_index_mapped(avoided: bool) -> None:
    with met_engines() as reader:
        (other,) = reader.present()
        index = weakref.ref(other.index)
        if avoided:
            reader.avoid(other.arenas)
        else:
            reader.hit(other, np.array([3]), np.array([1]))
        del other
        reader.close()
        gc.collect()
        assert index() is None


@given(
    uses=st.lists(
        st.tuples(st.lists(st.integers(0, 7), max_size=9), st.integers(1, 3)), max_size=6
    ),
    size=st.integers(1, 4),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_slot_is_told_once_where_it_was_read_last(
    met: HostNeighbours, uses: list[tuple[list[int], int]], size: int
) -> None:
    reader = Reader(met)
    for slots, generation in uses:
        reader.hit(slots, generation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "_MAX_HITS", size)
        told = reader.tell()
    latest = {}
    for slots, generation in uses:
        for slot in slots:
            latest.pop(slot, None)
            latest[slot] = generation
    assert told == list(latest.items())
    assert all(len(message) <= size for message in reader.told)


def test_engines_that_do_not_answer_delay_the_meeting_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "_ANSWER_S", 120.0)
    monkeypatch.setattr(neighbours, "_CONNECT_S", 1.0)
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        silent = []
        for number in range(6):
            each = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            each.bind(str(folder / f"i-{number:024x}.sock"))
            each.listen(0 if number == 0 else 8)
            silent.append(each)
        for _ in range(3):  # of one not even the queue has room
            full = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            full.setblocking(False)
            full.connect_ex(silent[0].getsockname())

        def engine(name: str) -> Any:
            index = ends.enter_context(contextlib.closing(BlockIndex.create(8, bytes(16))))
            home = LocalEngine(
                folder, name, bytes(16), index, ((ARENA,),), AllAttached(), lambda *_: None
            )
            return ends.enter_context(contextlib.closing(HostNeighbours(home, PROCESS_CONTEXT)))

        owner, reader = engine("owner"), engine("reader")
        wait_until(reader.present)
        assert len(reader.present()) == 1
        del owner


def test_an_engine_counts_once_its_arenas_are_attached(met: HostNeighbours) -> None:
    ranks = AllAttached()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(met._local_engine.ranks, "attached", lambda engines: [False] * len(engines))
        met._follow()
        assert not met.present()
    met._follow()
    assert len(met.present()) == len(ranks.attached([1]))
