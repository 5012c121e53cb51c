# SPDX-License-Identifier: Apache-2.0
"""What connectors say to each other about objects, whatever carries it."""

from typing import Final

import msgspec

from omni_connector.net.unix import require_protocol
from omni_connector.objects.object_store import StoredObject
from omni_connector.transports.base import Endpoint

PROTOCOL: Final = 2


class Find(msgspec.Struct, frozen=True, tag="find"):
    """Asks for the object whose key has this digest; answered with `Found` or `Missing`."""

    digest: bytes
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol, PROTOCOL)


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Says that its sender has a verified copy of this object of the arena `epoch`; no answer."""

    epoch: bytes
    digest: bytes
    generation: int
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol, PROTOCOL)


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The object of this digest is in the arena at this endpoint."""

    digest: bytes
    endpoint: Endpoint
    stored: StoredObject


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """There is no object of this digest."""

    digest: bytes


ENCODER: Final = msgspec.msgpack.Encoder()
QUESTIONS: Final[msgspec.msgpack.Decoder[Find | Read]] = msgspec.msgpack.Decoder(Find | Read)
