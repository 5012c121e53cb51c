# SPDX-License-Identifier: Apache-2.0
"""What the metadata of an object says of where it is. The rest of it may be anybody's."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from omni_connector.errors import ProtocolError
from omni_connector.net.peers import HostPort, parse_host


class _Socket(msgspec.Struct, frozen=True):
    transport: str | None = None
    address: str | None = None


class _Sender(msgspec.Struct, frozen=True):
    source_host: str | None = None
    source_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


def read_socket(metadata: object, transport: str) -> str | None:
    """Address of the socket that a `put` of this transport has named; None where none has.

    Raises:
        ProtocolError: it is ill-typed.
    """
    # Pipelines pass on whatever came along, and what is no mapping says nothing.
    if not isinstance(metadata, Mapping):
        return None
    try:
        hint = msgspec.convert(dict(metadata), _Socket)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ProtocolError(f"the metadata of an object is malformed: {error}") from error
    return hint.address if hint.transport == transport else None


def read_sender(metadata: object) -> HostPort | None:
    """Where the sender that is named listens; None where none is.

    Raises:
        ProtocolError: it is ill-typed, or no host.
    """
    if not isinstance(metadata, Mapping):
        return None
    try:
        hint = msgspec.convert(dict(metadata), _Sender)
        if hint.source_host is None or hint.source_port is None:
            return None
        return HostPort(str(parse_host(hint.source_host)), hint.source_port)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ProtocolError(f"the metadata of an object is malformed: {error}") from error
