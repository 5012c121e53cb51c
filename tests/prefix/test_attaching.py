# SPDX-License-Identifier: Apache-2.0
"""How a scheduler half has its ranks attach arenas, and what it knows of that."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_connector.net import rank_socket
from omni_connector.prefix import attaching
from omni_connector.prefix.attaching import RankSockets, attached_ahead
from omni_connector.transports import Endpoint


def endpoint(address: str) -> tuple[Endpoint, ...]:
    return (Endpoint(transport="t", address=address, epoch=bytes(16), n_slots=1, slot_bytes=4096),)


ONE = endpoint("one 0"), endpoint("one 1")
OTHER = endpoint("other 0"), endpoint("other 1")
APART = ((0,), (1,))  # each rank reads the arena of its own number
STRIPED = ((0, 1), (0, 1))


class Worker:
    """A rank, and what it is asked for.

    Attributes:
        attached: the addresses of the arenas that it has attached.
        asked: the addresses that it was asked to attach.
        broken: whether it raises.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.attached: set[str] = set()
        self.asked: list[str] = []
        self.broken = False
        answers = attached_ahead(self.attach, self.keep)
        self.end = rank_socket.listen(folder, "engine", rank, answers)

    def keep(self, arena: tuple[Endpoint, ...], seconds: float) -> tuple[Endpoint, ...] | None:
        self.asked.append(f"{arena[0].address} for {seconds:g} s")
        return arena if arena[0].address in self.attached else None

    def attach(self, arena: tuple[Endpoint, ...]) -> bool:
        self.asked.append(arena[0].address)
        if self.broken:
            raise RuntimeError("this rank fails")
        return arena[0].address in self.attached


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def test_an_arena_is_attached_where_every_rank_says_so(folder: Path) -> None:
    workers = [Worker(folder, rank) for rank in range(2)]
    with contextlib.closing(RankSockets(folder, "engine", APART)) as ranks:
        assert ranks.attached([ONE, OTHER]) == [False, False]
        assert [each.asked for each in workers] == [["one 0", "other 0"], ["one 1", "other 1"]]
        workers[0].attached |= {"one 0", "other 0"}
        workers[1].attached |= {"other 1"}
        assert ranks.attached([ONE, OTHER]) == [False, True]
        workers[0].attached.clear()
        assert ranks.attached([ONE, OTHER]) == [False, False]
        assert ranks.attached([]) == []
    for each in workers:
        each.end()
        each.end()


def test_what_a_rank_that_does_not_answer_now_said_last_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "_SILENT_S", 0.0)
    warned: list[object] = []
    monkeypatch.setattr(attaching.logger, "warning", lambda *text: warned.append(text))
    workers = [Worker(folder, rank) for rank in range(2)]
    with contextlib.closing(RankSockets(folder, "engine", APART)) as ranks:
        for number, worker in enumerate(workers):
            worker.attached |= {f"one {number}"}
        assert ranks.attached([ONE]) == [True]
        workers[1].end()
        with monkeypatch.context() as hasty:
            hasty.setattr(attaching, "_ANSWER_S", 0.2)
            for _ in range(2):
                assert ranks.attached([ONE, OTHER]) == [True, False]
            assert len(warned) == 1
            assert ranks.attached([OTHER]) == [False]
            assert ranks.attached([ONE]) == [False], "nobody knows any more"
        workers[1] = Worker(folder, 1)
        workers[1].attached |= {"one 1"}
        assert ranks.attached([ONE]) == [True]
    for each in workers:
        each.end()


def test_a_rank_that_fails_answers_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(attaching.logger, "exception", lambda *text: told.append(text))
    worker = Worker(folder, 0)
    worker.attached |= {"one 0"}
    with contextlib.closing(RankSockets(folder, "engine", APART[:1])) as ranks:
        worker.broken = True
        assert ranks.attached([ONE[:1]]) == [False]
        worker.broken = False
        assert ranks.attached([ONE[:1]]) == [True]
    assert len(told) == 1
    worker.end()


def test_a_closed_one_asks_nobody(folder: Path) -> None:
    worker = Worker(folder, 0)
    ranks = RankSockets(folder, "engine", APART[:1])
    ranks.attached([ONE[:1]])
    ranks.close()
    ranks.close()
    ranks.attached([ONE[:1]])
    assert worker.asked == ["one 0"]
    worker.end()


def test_an_orphan_is_kept_where_every_rank_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [Worker(folder, rank) for rank in range(2)]
    workers[0].attached |= {"one 0", "other 0"}
    workers[1].attached |= {"other 1"}
    with contextlib.closing(RankSockets(folder, "engine", APART)) as ranks:
        assert ranks.kept([(ONE, 3.0), (OTHER, 7.0)]) == [None, OTHER]
        assert workers[1].asked == ["one 1 for 3 s", "other 1 for 7 s"]
        workers[1].end()
        monkeypatch.setattr(attaching, "_ANSWER_S", 0.2)
        assert ranks.kept([(OTHER, 7.0)]) == [None]
    workers[0].end()


def test_each_rank_attaches_the_arenas_of_all_over_which_slots_are_spread(folder: Path) -> None:
    workers = [Worker(folder, rank) for rank in range(2)]
    with contextlib.closing(RankSockets(folder, "engine", STRIPED)) as ranks:
        assert ranks.attached([ONE, OTHER]) == [False, False]
        everything = ["one 0", "one 1", "other 0", "other 1"]
        assert [each.asked for each in workers] == [everything, everything]
        workers[0].attached |= set(everything)
        workers[1].attached |= {"one 1", "other 0", "other 1"}
        assert ranks.attached([ONE, OTHER]) == [False, True]
    for each in workers:
        each.end()


def test_an_orphan_with_stripes_is_kept_where_every_rank_has_all_of_it(folder: Path) -> None:
    workers = [Worker(folder, rank) for rank in range(2)]
    workers[0].attached |= {"one 0", "one 1", "other 0", "other 1"}
    workers[1].attached |= {"one 1", "other 0", "other 1"}
    with contextlib.closing(RankSockets(folder, "engine", STRIPED)) as ranks:
        assert ranks.kept([(ONE, 3.0), (OTHER, 7.0)]) == [None, OTHER]
    for each in workers:
        each.end()
