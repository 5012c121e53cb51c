# SPDX-License-Identifier: Apache-2.0
"""A worker tells its engine's scheduler half who it is, at a socket in the runtime folder.

It does so where vLLM does not pass this on: beside other connectors. The worker listens before
there is a scheduler half, so that the asker need not wait for it. Like every socket of the folder,
this one is for this user alone, and the next engine removes that of a worker that was killed.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.msgpack import Decoder

from omni_connector.net.packets import PROTOCOL, Refusal, require_protocol
from omni_connector.net.runtime import socket_path
from omni_connector.net.unix import Connection, Listener

ANSWER_S: Final = 10.0


class _Ask(Struct, frozen=True, tag="ask_introduction"):
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class _Introduction(Struct, frozen=True, tag="introduction"):
    content: bytes


_QUESTIONS: Final = Decoder(_Ask)
_ANSWERS: Final = Decoder(_Introduction | Refusal)


def introduce(folder: Path, engine_id: str, rank: int, content: bytes) -> Callable[[], None]:
    """Answer this user's processes that ask who this rank is.

    Args:
        folder: a runtime folder.
        content: the answer; some 60 KB at most.

    Returns:
        A function that ends this; to call it again does nothing.

    Raises:
        TransportError: another process has this rank's socket.
    """
    listener = Listener(_QUESTIONS, lambda question: (_Introduction(content), None))
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


def _path(folder: Path, engine_id: str, rank: int) -> Path:
    return socket_path(folder, f"worker:{engine_id}:{rank}", kind="w-")
