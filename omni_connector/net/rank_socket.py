# SPDX-License-Identifier: Apache-2.0
"""The socket of a rank, at which the scheduler half of its engine asks it.

The ranks may be other processes than the scheduler half, and vLLM carries what the halves tell each
other with its steps only. So a rank listens at one socket in the runtime folder, before there is a
scheduler half, so that the asker need not wait for it. Who has a question defines it, and registers
by its type what answers it. Like every socket of the folder, this one is for this user alone, and
other engines remove that of a worker that was killed.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder

from omni_connector.net.runtime import socket_path
from omni_connector.net.unix import Connection, Listener

RankAnswers = Mapping[type[Struct], Callable[[Any], Struct]]
"""For each type of question the function that answers it, on another thread. It must not block."""


def listen(folder: Path, engine_id: str, rank: int, answers: RankAnswers) -> Callable[[], None]:
    """Answer this user's processes that ask a rank.

    Args:
        folder: a runtime folder.
        engine_id, rank: of this rank.
        answers: one for each question; everything else is refused.

    Returns:
        A function that ends this; to call it again does nothing.

    Raises:
        TransportError: another process has this rank's socket.
    """
    questions: Any = functools.reduce(operator.or_, answers)
    listener = Listener(
        Decoder(questions), lambda question: (answers[type(question)](question), None)
    )
    try:
        listener.add(path(folder, engine_id, rank))
    except BaseException:
        listener.close()
        raise
    return listener.close


def connect(folder: Path, engine_id: str, rank: int, deadline: float) -> Connection:
    """A connection for questions to a rank.

    Raises:
        ConfigError: as `socket_path`.
        PeerUnreachableError, PeerRefusedError, TransportError: as `Connection`.
    """
    return Connection(path(folder, engine_id, rank), deadline)


def path(folder: Path, engine_id: str, rank: int) -> Path:
    """Where a rank listens, if it does.

    Raises:
        ConfigError: as `socket_path`.
    """
    return socket_path(folder, f"rank:{engine_id}:{rank}", kind="r-")
