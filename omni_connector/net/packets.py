# SPDX-License-Identifier: Apache-2.0
"""One packet between processes of one user: received with its descriptors, read as an answer."""

import array
import os
import socket
from typing import Any, Final

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder

from omni_connector import __version__
from omni_connector.errors import (
    IncompatiblePeerError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
)
from omni_connector.net.status import plain

PROTOCOL: Final = 2
"""Version of the messages between processes of one host."""

PACKAGE: Final = f"omni-connector {__version__}"
"""What a refusal says of this side, so that its one line names both versions of the package."""

MAX_MESSAGE_BYTES: Final = 65536
"""Longest message, in bytes: a Unix socket takes it in one piece by default."""


def require_protocol(found: int, wanted: int = PROTOCOL) -> None:
    """Raise ValueError unless a message has our version; decoders make it their own error."""
    if found != wanted:
        raise ValueError(f"protocol {found}, wanted {wanted}")


def package_of(said: str) -> str:
    """What a peer says of its package, for a message; it may say anything, or nothing."""
    return plain(said[:64]) or "an omni-connector that does not tell its version"


class Refusal(Struct, frozen=True, tag="refusal"):
    """The question was not understood, or will not be answered.

    Attributes:
        package: of who refuses; see `PACKAGE`.
    """

    reason: str
    protocol: int = PROTOCOL
    package: str = ""


def receive(connection: socket.socket, *, with_fd: bool) -> tuple[bytes, list[int]]:
    """The next packet, and the descriptors beside it, which the caller must close.

    Raises:
        ProtocolError: it is longer than `MAX_MESSAGE_BYTES`.
        OSError: there is none.
    """
    # If there is no room for descriptors, the kernel drops descriptors that nobody asked for.
    room = socket.CMSG_SPACE(array.array("i").itemsize) if with_fd else 0
    packet, ancillary, flags, _ = connection.recvmsg(
        MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if flags & socket.MSG_TRUNC:
        close_all(list(descriptors))
        raise ProtocolError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
    return packet, list(descriptors)


def read_answer(
    packet: bytes, descriptors: list[int], answers: Decoder[Any], with_fd: bool = False
) -> tuple[Any, int | None]:
    """Decode and check a packet as `Connection.ask` does, and the descriptors that came with it."""
    try:
        if not packet:
            raise PeerUnreachableError("the peer closed the connection")
        try:
            answer = answers.decode(packet)
        except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the peer's answer is malformed: {error}") from error
        if isinstance(answer, Refusal):
            theirs = package_of(answer.package)
            if answer.protocol != PROTOCOL:
                raise IncompatiblePeerError(
                    "transport protocol",
                    f"{PROTOCOL} ({PACKAGE})",
                    f"{answer.protocol} ({theirs})",
                )
            said = f"the peer refuses: {plain(answer.reason[:200])}"
            if answer.package != PACKAGE:
                said += f" (it is {theirs}, this is {PACKAGE})"
            raise PeerRefusedError(said)
        if len(descriptors) != int(with_fd):
            raise ProtocolError(f"{type(answer).__name__} came with {len(descriptors)} descriptors")
    except BaseException:
        close_all(descriptors)
        raise
    return answer, descriptors[0] if descriptors else None


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that came beside a packet."""
    for descriptor in descriptors:
        os.close(descriptor)
