# SPDX-License-Identifier: Apache-2.0
"""A worker answers its engine's scheduler half, at a socket in the runtime folder.

It says who it is where vLLM does not pass this on: beside other connectors. It listens before there
is a scheduler half, so that the asker need not wait for it. And it says which of its copies have
ended where no step does: while vLLM resets its prefix cache. Like every socket of the folder, this
one is for this user alone, and the next engine removes that of a worker that was killed.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Final, Protocol

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from omni_connector.errors import OmniError
from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.net.runtime import socket_path
from omni_connector.net.unix import Connection, Listener

ANSWER_S: Final = 10.0

MAX_JOBS: Final = 4096
"""Copy jobs that one question names, at most, so that it fits into a packet."""

_Jobs = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=MAX_JOBS)]


class _Ask(Struct, frozen=True, tag="ask_introduction"):
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class _Introduction(Struct, frozen=True, tag="introduction"):
    content: bytes


class _AskEnded(Struct, frozen=True, tag="ask_ended"):
    job_ids: _Jobs
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class _Ended(Struct, frozen=True, tag="ended"):
    job_ids: _Jobs


_QUESTIONS: Final = Decoder(_Ask | _AskEnded)
_ANSWERS: Final = Decoder(_Introduction | Refusal)
_ENDED: Final = Decoder(_Ended | Refusal)


def introduce(
    folder: Path,
    engine_id: str,
    rank: int,
    content: bytes,
    ended: Callable[[Collection[int]], Collection[int]],
) -> Callable[[], None]:
    """Answer this user's processes that ask who this rank is, and which of its copies have ended.

    Args:
        folder: a runtime folder.
        content: who it is; some 60 KB at most.
        ended: returns those of these copy jobs that have ended. Called on another thread; must not
            block.

    Returns:
        A function that ends this; to call it again does nothing.

    Raises:
        TransportError: another process has this rank's socket.
    """

    def answer(question: _Ask | _AskEnded) -> tuple[Struct, None]:
        if isinstance(question, _AskEnded):
            return _Ended(tuple(ended(question.job_ids))), None
        return _Introduction(content), None

    listener = Listener(_QUESTIONS, answer)
    try:
        listener.add(_path(folder, engine_id, rank))
    except BaseException:
        listener.close()
        raise
    return listener.close


def introduced(folder: Path, engine_id: str, rank: int) -> bytes:
    """The content with which a rank introduces itself. Waits `ANSWER_S` seconds at most.

    Raises:
        TransportError: nobody answers for it there.
    """
    deadline = time.monotonic() + ANSWER_S
    connection = Connection(_path(folder, engine_id, rank), deadline)
    try:
        answer, _ = connection.ask(_Ask(), _ANSWERS, deadline)
    finally:
        connection.close()
    content: bytes = answer.content
    return content


class CopiesOfRanks(Protocol):
    """Says which copies of an engine have ended."""

    def ended(self, job_ids: Collection[int]) -> set[int] | None:
        """Those of these jobs that have ended on every rank; None when that cannot be learned."""

    def close(self) -> None:
        """Ask no more. Idempotent."""


class RankCopies:
    """Asks the ranks of an engine which of their copies have ended; closed by its user.

    Args:
        folder, engine_id, ranks: of the engine.
        timeout: seconds that all questions may take together.

    Raises:
        TransportError: a rank does not listen; it is on another host, or has ended.
    """

    def __init__(self, folder: Path, engine_id: str, ranks: int, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout
        self._connections: list[Connection] = []
        try:
            for rank in range(ranks):
                path = _path(folder, engine_id, rank)
                self._connections.append(Connection(path, self._deadline))
        except BaseException:
            self.close()
            raise

    def ended(self, job_ids: Collection[int]) -> set[int] | None:
        """Those of these jobs that have ended on every rank; None when a rank does not answer."""
        left = set(sorted(job_ids)[:MAX_JOBS])
        for connection in self._connections:
            if not left:
                break
            question = _AskEnded(tuple(sorted(left)))
            try:
                answer, _ = connection.ask(question, _ENDED, self._deadline)
            except OmniError:
                return None
            left &= set(answer.job_ids)
        return left

    def close(self) -> None:
        """Hang up. Idempotent."""
        for connection in self._connections:
            connection.close()


def _path(folder: Path, engine_id: str, rank: int) -> Path:
    return socket_path(folder, f"worker:{engine_id}:{rank}", kind="w-")
