# SPDX-License-Identifier: Apache-2.0
"""What engines say to each other on the control channel.

Messages are msgspec structs in MessagePack, tagged by type, one to a ZeroMQ message. Every
field is bounded, and a decoded message has only these types: nothing from the network chooses
a class. The protocol version stands in `Hello`; sides of different versions do not talk.
"""

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from omni_connector.errors import ProtocolError
from omni_connector.transports.base import Endpoint

PROTOCOL_VERSION: Final = 1
TOKEN_BYTES: Final = 16
DIGEST_BYTES: Final = 32
MAX_MESSAGE_BYTES: Final = 8 << 20
MAX_RANKS: Final = 1024

Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
Sequence = Annotated[int, Meta(ge=0, lt=1 << 62)]
Generation = Annotated[int, Meta(ge=0, lt=1 << 62)]
SlotRef = tuple[Count, Generation]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]  # neither nan nor infinity
DigestKind = Literal["blocks", "tokens"]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What two engines must agree on before one may read the other's KV.

    Attributes:
        model: model id and revision.
        dtype: dtype of the weights and activations.
        kv_dtype: dtype of the KV cache.
        block_sizes: tokens a block, one entry a cache group.
        groups: kind and page bytes of the layers, one entry a cache group.
        page_order: order of heads, tokens and content inside a layer's page.
        ranks: tensor- and pipeline-parallel sizes.
        integrity: whether slots carry checksums.
    """

    model: Text
    dtype: Text
    kv_dtype: Text
    block_sizes: Annotated[tuple[Count, ...], Meta(max_length=256)]
    groups: Annotated[tuple[Text, ...], Meta(max_length=256)]
    page_order: Text
    ranks: tuple[Count, Count]
    integrity: Text

    def difference(self, other: "Fingerprint") -> tuple[str, object, object] | None:
        """The first field that differs, with both values; None when there is none."""
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return field, ours, theirs
        return None


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a session, from the side that wants to read."""

    protocol: Count
    fingerprint: Fingerprint


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Hello`: who we are and where our ranks' arenas are.

    Attributes:
        epoch: changes each time the engine starts; references of an earlier one are void.
        hash_id: how this engine hashes blocks ("" when it does not): sides with the same id
            compare block hashes, others the prompt's tokens.
        arenas: one endpoint a rank, in rank order.
    """

    epoch: Token
    hash_id: Text
    arenas: Annotated[tuple[Endpoint, ...], Meta(max_length=MAX_RANKS)]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answer to a `Hello` that does not fit: the field that differs and both values."""

    field: Text
    ours: Text
    theirs: Text


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Asks for the slots of one hand-off.

    Attributes:
        sequence: repeated in the answer.
        num_tokens: tokens of the prompt on the asking side.
        digest: `prompt_digest` of these tokens, by `digest_kind`.
    """

    sequence: Sequence
    token: Token
    num_tokens: Count
    digest: Digest
    digest_kind: DigestKind


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The slots are leased to the asker.

    Attributes:
        num_tokens: tokens whose KV the slots hold.
        groups: (slot, generation) of each logical block, one list a cache group.
        lease_s: seconds from now until the slots may be reused.
    """

    sequence: Sequence
    num_tokens: Count
    groups: Annotated[
        tuple[Annotated[tuple[SlotRef, ...], Meta(max_length=1 << 20)], ...], Meta(max_length=256)
    ]
    lease_s: Seconds


class Denied(msgspec.Struct, frozen=True, tag=True):
    """The claim is refused; `reason` is one of the `REASONS` of the metrics."""

    sequence: Sequence
    reason: Text


class Release(msgspec.Struct, frozen=True, tag=True):
    """The asker is done with the hand-off, or no longer wants it. Not answered."""

    token: Token


Request = Hello | Claim | Release
Reply = Welcome | Refused | Granted | Denied

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """MessagePack of `message`."""
    return _encoder.encode(message)


def decode_request(raw: bytes | memoryview) -> Request:
    """Decode what an asking peer sent.

    Raises:
        ProtocolError: oversized, malformed or of another type.
    """
    request: Request = _decode(_request_decoder, raw)
    return request


def decode_reply(raw: bytes | memoryview) -> Reply:
    """Decode what a serving peer answered.

    Raises:
        ProtocolError: oversized, malformed or of another type.
    """
    reply: Reply = _decode(_reply_decoder, raw)
    return reply


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", raw: bytes | memoryview) -> _T:
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(raw)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from None
