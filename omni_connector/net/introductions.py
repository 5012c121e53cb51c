# SPDX-License-Identifier: Apache-2.0
"""A worker tells its engine's scheduler half who it is, at the socket of its rank.

That is needed where vLLM does not pass this on: beside other connectors.
"""

import time
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.msgpack import Decoder

from omni_connector.net import rank_socket
from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.net.rank_socket import RankAnswers

ANSWER_S: Final = 10.0
"""Longest wait for a rank's introduction, in seconds. A rank that computes answers slowly."""


class _Ask(Struct, frozen=True, tag="ask-introduction"):
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class _Introduction(Struct, frozen=True, tag="introduction"):
    content: bytes


_ANSWERS: Final = Decoder(_Introduction | Refusal)


def introduction(content: bytes) -> RankAnswers:
    """What answers `introduced`.

    Args:
        content: who the rank is; some 60 KB at most.
    """
    return {_Ask: lambda _: _Introduction(content)}


def introduced(folder: Path, engine_id: str, rank: int) -> bytes:
    """The content with which a rank introduces itself. Waits `ANSWER_S` seconds at most.

    Raises:
        TransportError: nobody answers for it there.
    """
    deadline = time.monotonic() + ANSWER_S
    connection = rank_socket.connect(folder, engine_id, rank, deadline)
    try:
        answer, _ = connection.ask(_Ask(), _ANSWERS, deadline)
    finally:
        connection.close()
    content: bytes = answer.content
    return content
