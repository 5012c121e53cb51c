# SPDX-License-Identifier: Apache-2.0
"""What engines say to each other on the control channel.

Messages are msgspec structs in MessagePack, tagged by type, one in each ZeroMQ message. Every
field is bounded, and only these types are decoded. `Handshake` has the protocol version: engines of
different versions do not talk.
"""

from typing import Annotated, Final, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from omni_connector.errors import ProtocolError
from omni_connector.identity.epochs import WeightsName
from omni_connector.kv.compatibility import MAX_GROUPS, MAX_RANKS, CompatibilityKey, Count, Text
from omni_connector.net.packets import PACKAGE
from omni_connector.net.status import plain
from omni_connector.net.zeromq import MAX_MESSAGE_BYTES
from omni_connector.transports.base import Endpoint

PROTOCOL_VERSION: Final = 3
"""Version of these messages. It changes with each of them that an older engine cannot read."""

TOKEN_BYTES: Final = 16
"""Bytes of a hand-off's token, which nobody can guess, and of an engine's epoch."""

DIGEST_BYTES: Final = 32
"""Bytes of the digest of a prompt; see `Prompt.digest`."""

MAX_TRANSPORTS: Final = 8
"""Most endpoints of one arena, each for another transport. It bounds a message."""

Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 40)]
Sequence = Annotated[int, Meta(ge=0, lt=1 << 62)]
Generation = Annotated[int, Meta(ge=0, lt=1 << 62)]
SlotRef = tuple[Count, Generation]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]  # neither nan nor infinity
DigestKind = Literal["blocks", "tokens"]


class Handshake(msgspec.Struct, frozen=True, tag=True):
    """First message of a session, from the side that wants to read.

    Attributes:
        protocol: its version of these messages.
        compatibility: a `CompatibilityKey`. It stays encoded, as another version's may have other
            fields.
        package: what a refusal says of the reader; see `net.packets.PACKAGE`.
    """

    protocol: Count
    compatibility: msgspec.Raw
    package: Text = ""

    @classmethod
    def of(cls, compatibility: CompatibilityKey) -> "Handshake":
        """Our own first message."""
        return cls(PROTOCOL_VERSION, msgspec.Raw(_encoder.encode(compatibility)), PACKAGE)

    def decode_compatibility(self) -> CompatibilityKey:
        """The peer's compatibility key.

        Raises:
            ProtocolError: it is malformed.
        """
        return _decode(_key_decoder, self.compatibility)


class HandshakeReply(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Handshake`: who we are and where our ranks' arenas are.

    Attributes:
        epoch: changes with each start of the engine, and voids the tokens from before.
        hash_id: how this engine hashes blocks; "": it does not. Engines with the same id compare
            block hashes, others the prompt's tokens.
        compatibility: what the slots hold.
        arenas: of each rank, stage by stage (`CompatibilityKey.num_arenas`): an endpoint for each
            transport that exports its arena.
    """

    epoch: Token
    hash_id: Text
    compatibility: CompatibilityKey
    arenas: Annotated[
        tuple[Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=MAX_TRANSPORTS)], ...],
        Meta(min_length=1, max_length=MAX_RANKS),
    ]

    def __post_init__(self) -> None:
        if len(self.arenas) != self.compatibility.num_arenas:
            raise ValueError(f"{len(self.arenas)} arenas of {self.compatibility.num_arenas} ranks")


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answer to a `Handshake` that does not fit: which field differs, and both values."""

    field: Text
    ours: Text
    theirs: Text


class LeaseRequest(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Asks for the slots of one hand-off; the answer repeats the `sequence`.

    `num_tokens` and `digest` are of the asker's prompt: see `Prompt.digest`. `weights` are the
    asker's; those that it was started with where it does not say.
    """

    sequence: Sequence
    token: Token
    num_tokens: Positive
    digest: Digest
    digest_kind: DigestKind
    weights: WeightsName = WeightsName()


class LeaseGranted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The slots are leased to the asker.

    Attributes:
        num_tokens: tokens whose KV the slots hold.
        first_blocks: for each slot group the logical index of the first block that is held; no
            later token reads those before. See `CompatibilityKey.slot_groups`.
        groups: for each slot group (slot, generation) of each block from there.
        lease_s: seconds from now until the slots may be reused.
        weights: that the KV was computed with; those that the engine was started with where it
            does not say.
    """

    sequence: Sequence
    num_tokens: Positive
    first_blocks: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    groups: Annotated[
        tuple[Annotated[tuple[SlotRef, ...], Meta(max_length=1 << 20)], ...],
        Meta(min_length=1, max_length=MAX_GROUPS),
    ]
    lease_s: Seconds
    weights: WeightsName = WeightsName()

    def __post_init__(self) -> None:
        if len(self.first_blocks) != len(self.groups):
            raise ValueError(f"{len(self.first_blocks)} first blocks of {len(self.groups)} groups")


class LeaseDenied(msgspec.Struct, frozen=True, tag=True):
    """No lease is given; `reason` is one of the failure kinds of the metrics."""

    sequence: Sequence
    reason: Text


class Release(msgspec.Struct, frozen=True, tag=True):
    """Ends a lease. It has no answer.

    `sequence` is that of the lease request. 0 ends the hand-off itself unless it is leased, because
    nobody will ask for it.
    """

    token: Token
    sequence: Sequence = 0


Request = Handshake | LeaseRequest | Release
Reply = HandshakeReply | Refused | LeaseGranted | LeaseDenied

_KINDS: Final = {each.__struct_config__.tag for each in get_args(Request | Reply)}


class _Tagged(msgspec.Struct):
    """A message of any kind."""

    type: str


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_tag_decoder = msgspec.msgpack.Decoder(_Tagged)
_key_decoder = msgspec.msgpack.Decoder(CompatibilityKey)


def encode(message: Request | Reply) -> bytes:
    """MessagePack of `message`."""
    return _encoder.encode(message)


def decode_request(raw: bytes | memoryview) -> Request:
    """Decode a message of an asking peer, or raise `ProtocolError`."""
    request: Request = _decode(_request_decoder, raw)
    return request


def unknown_kind(raw: bytes | memoryview) -> str:
    """The kind of a message that only a newer version knows; "" for all others."""
    try:
        kind = _decode(_tag_decoder, raw).type
    except ProtocolError:
        return ""
    return "" if kind in _KINDS else plain(kind[:100])


def decode_reply(raw: bytes | memoryview) -> Reply:
    """Decode a message of a serving peer, or raise `ProtocolError`."""
    reply: Reply = _decode(_reply_decoder, raw)
    return reply


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", raw: bytes | memoryview) -> _T:
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(raw)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from None
