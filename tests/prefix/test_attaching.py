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


@pytest.mark.parametrize(
    ("read", "asked"),
    [
        (APART, [["one 0", "other 0"], ["one 1", "other 1"]]),
        (STRIPED, [["one 0", "one 1", "other 0", "other 1"]] * 2),
    ],
)
def test_an_arena_is_attached_and_an_orphan_kept_where_every_rank_has_all_that_it_reads(
    folder: Path, read: tuple[tuple[int, ...], ...], asked: list[list[str]]
) -> None:
    workers = [Worker(folder, rank) for rank in range(2)]
    with contextlib.closing(RankSockets(folder, "engine", read)) as ranks:
        assert ranks.attached([]) == []
        assert ranks.attached([ONE, OTHER]) == [False, False]
        assert [each.asked for each in workers] == asked
        workers[0].attached |= {"one 0", "one 1", "other 0", "other 1"}
        workers[1].attached |= {"other 0", "other 1"}
        assert ranks.attached([ONE, OTHER]) == [False, True]
        assert ranks.kept([(ONE, 3.0), (OTHER, 7.0)]) == [None, OTHER]
        assert workers[1].asked[-1] == "other 1 for 7 s"
        workers[0].attached.clear()
        assert ranks.attached([ONE, OTHER]) == [False, False]
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


def test_what_a_rank_is_silent_about_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [Worker(folder, rank) for rank in range(2)]
    for number, worker in enumerate(workers):
        worker.attached |= {f"other {number}"}
    with contextlib.closing(RankSockets(folder, "engine", APART)) as ranks:
        assert ranks.kept([(OTHER, 7.0)]) == [OTHER]
        workers[1].end()
        monkeypatch.setattr(attaching, "_ANSWER_S", 0.2)
        assert ranks.kept([(OTHER, 7.0)]) == [None]
    workers[0].end()
