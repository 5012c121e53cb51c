# SPDX-License-Identifier: Apache-2.0
"""The socket of a rank: one for all questions of the scheduler half."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.msgpack import Decoder

from omni_connector.errors import PeerRefusedError, PeerUnreachableError, TransportError
from omni_connector.net import rank_socket, unix
from omni_connector.net.packets import Refusal
from omni_connector.net.runtime import sweep

ASK_S = 30.0


class AskSum(Struct, tag="ask_sum"):
    terms: list[int]


class Sum(Struct, tag="sum"):
    value: int


class AskName(Struct, tag="ask_name"):
    """It has no fields."""


class Name(Struct, tag="name"):
    name: str


ANSWERS = Decoder(Sum | Name | Refusal)


def add(question: AskSum) -> Sum:
    return Sum(sum(question.terms))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def ask(folder: Path, rank: int, *questions: Struct) -> list[Struct]:
    deadline = time.monotonic() + ASK_S
    connection = rank_socket.connect(folder, "engine", rank, deadline)
    with contextlib.closing(connection):
        return [connection.ask(each, ANSWERS, deadline)[0] for each in questions]


@pytest.fixture
def listen(folder: Path) -> Iterator[Callable[..., Callable[[], None]]]:
    with contextlib.ExitStack() as stack:

        def listen(rank: int, answers: rank_socket.RankAnswers) -> Callable[[], None]:
            end = rank_socket.listen(folder, "engine", rank, answers)
            stack.callback(end)
            return end

        yield listen


def test_one_socket_a_rank_answers_all_questions(folder: Path, listen) -> None:
    for rank in range(2):
        listen(rank, {AskSum: add, AskName: lambda _, rank=rank: Name(f"rank {rank}")})
    assert len(list(folder.iterdir())) == 2
    for rank in range(2):
        answers = ask(folder, rank, AskSum([1, 2]), AskName(), AskSum([5]))
        assert answers == [Sum(3), Name(f"rank {rank}"), Sum(5)]


def test_what_nobody_registered_is_refused(folder: Path, listen) -> None:
    listen(0, {AskSum: add})
    with pytest.raises(PeerRefusedError, match="ask_name"):
        ask(folder, 0, AskName())
    assert ask(folder, 0, AskSum([1])) == [Sum(1)]


def test_an_answer_that_fails_is_a_refusal_and_the_other_questions_are_answered(
    folder: Path, listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(unix.logger, "exception", lambda *text: told.append(text))
    listen(0, {AskSum: add, AskName: lambda _: Name(str(1 // 0))})
    with pytest.raises(PeerRefusedError, match="failed"):
        ask(folder, 0, AskSum([1]), AskName())
    assert len(told) == 1
    assert ask(folder, 0, AskSum([1])) == [Sum(1)]


def test_two_engines_of_one_name_are_an_error(folder: Path, listen) -> None:
    listen(0, {AskSum: add})
    with pytest.raises(TransportError, match="listens"):
        rank_socket.listen(folder, "engine", 0, {AskName: lambda _: Name("")})
    assert ask(folder, 0, AskSum([2])) == [Sum(2)]


def test_what_ends_it_leaves_nothing_and_may_be_called_again(folder: Path, listen) -> None:
    end = listen(0, {AskSum: add})
    end()
    assert not list(folder.iterdir())
    again = listen(0, {AskSum: add})
    end()
    assert ask(folder, 0, AskSum([3])) == [Sum(3)]
    again()
    with pytest.raises(PeerUnreachableError):
        ask(folder, 0, AskSum([3]))
    assert sweep(folder) == []
