# SPDX-License-Identifier: Apache-2.0
"""The scheduler half asks the ranks of its engine which of their copies have ended.

Each step tells it, except where no step does: while vLLM resets its prefix cache. Then it asks at
the sockets of the ranks.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Final, Protocol

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from omni_connector.errors import OmniError
from omni_connector.net import rank_socket
from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.net.rank_socket import RankAnswers
from omni_connector.net.unix import Connection

MAX_JOBS: Final = 4096
"""Copy jobs that one question names, at most, so that it fits into a packet."""

_Jobs = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=MAX_JOBS)]


class _Ask(Struct, frozen=True, tag="ask-ended"):
    job_ids: _Jobs
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class _Ended(Struct, frozen=True, tag="ended"):
    job_ids: _Jobs


_ANSWERS: Final = Decoder(_Ended | Refusal)


def ended_copies(ended: Callable[[Collection[int]], Collection[int]]) -> RankAnswers:
    """What answers `RankCopies`.

    Args:
        ended: of these copy jobs, returns the ended ones. Called on another thread; must not
            block.
    """

    def answer(question: _Ask) -> _Ended:
        return _Ended(tuple(ended(question.job_ids)))

    return {_Ask: answer}


class CopiesOfRanks(Protocol):
    """Says which copies of an engine have ended."""

    def ended(self, job_ids: Collection[int]) -> set[int] | None:
        """Those of these jobs that have ended on every rank; None when that cannot be learned."""

    def close(self) -> None:
        """Ask no more. Idempotent."""


class OwnCopies:
    """Says which copies of the only rank have ended, which is in the process of its scheduler half.

    Args:
        ended: of these copy jobs, returns the ended ones.
    """

    def __init__(self, ended: Callable[[Collection[int]], Collection[int]]) -> None:
        self._ended = ended

    def ended(self, job_ids: Collection[int]) -> set[int]:
        """See `CopiesOfRanks`."""
        return set(self._ended(job_ids))

    def close(self) -> None:
        """See `CopiesOfRanks`."""


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
                connection = rank_socket.connect(folder, engine_id, rank, self._deadline)
                self._connections.append(connection)
        except BaseException:
            self.close()
            raise

    def ended(self, job_ids: Collection[int]) -> set[int] | None:
        """Those of these jobs that have ended on every rank; None when a rank does not answer."""
        left = set(sorted(job_ids)[:MAX_JOBS])
        for connection in self._connections:
            if not left:
                break
            question = _Ask(tuple(sorted(left)))
            try:
                answer, _ = connection.ask(question, _ANSWERS, self._deadline)
            except OmniError:
                return None
            left &= set(answer.job_ids)
        return left

    def close(self) -> None:
        """Hang up. Idempotent."""
        for connection in self._connections:
            connection.close()
