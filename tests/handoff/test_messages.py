# SPDX-License-Identifier: Apache-2.0
"""Wire messages: what is sent arrives, and nothing else gets past the decoder."""

import math
from typing import Any

import msgspec
import pytest

from omni_connector.errors import ProtocolError
from omni_connector.handoff.messages import (
    DIGEST_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_TRANSPORTS,
    TOKEN_BYTES,
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseGranted,
    LeaseRequest,
    Refused,
    Release,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode,
)
from omni_connector.kv.compatibility import MAX_RANKS
from omni_connector.transports.base import Endpoint

from ..kv.shapes import compatibility_key, group_shape

PRINT = compatibility_key()
OF_TWO = msgspec.structs.replace(PRINT, ranks=2)
ENDPOINT = Endpoint(transport="shm", address="x", epoch=b"a" * 16, n_slots=8, slot_bytes=4096)
TOKEN = b"t" * TOKEN_BYTES
DIGEST = b"d" * DIGEST_BYTES

REQUESTS: list[Request] = [
    Handshake.of(PRINT),
    LeaseRequest(3, TOKEN, 40, DIGEST, "blocks"),
    Release(TOKEN),
]
REPLIES: list[Reply] = [
    HandshakeReply(TOKEN, "sha256", OF_TWO, ((ENDPOINT,), (ENDPOINT, ENDPOINT))),
    Refused("dtype", "a", "b"),
    LeaseGranted(3, 40, (0, 2), (((0, 1), (5, 2)), ((7, 9),)), 12.5),
    LeaseDenied(3, "unknown_token"),
]


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Any) -> None:
    decode = decode_request if message in REQUESTS else decode_reply
    assert decode(encode(message)) == decode(memoryview(encode(message))) == message
    if isinstance(message, Handshake):
        assert message.decode_compatibility() == PRINT


def test_a_request_is_no_reply_and_a_reply_no_request() -> None:
    for request in REQUESTS:
        with pytest.raises(ProtocolError):
            decode_reply(encode(request))
    for reply in REPLIES:
        with pytest.raises(ProtocolError):
            decode_request(encode(reply))


def test_an_oversized_message_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match=f"limit is {MAX_MESSAGE_BYTES}"):
        decode_request(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ProtocolError, match="malformed"):
        decode_request(bytes(MAX_MESSAGE_BYTES))


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda m: type(m).__name__)
def test_every_truncation_is_refused(message: Any) -> None:
    raw = encode(message)
    decode = decode_request if message in REQUESTS else decode_reply
    for end in range(len(raw)):
        with pytest.raises(ProtocolError):
            decode(raw[:end])
    with pytest.raises(ProtocolError):
        decode(raw + b"\0")


def edited(message: Any, **changes: Any) -> bytes:
    """The message with fields changed to what its constructor's types forbid."""
    plain = msgspec.msgpack.decode(encode(message))
    assert changes.keys() <= plain.keys()
    return msgspec.msgpack.encode(plain | changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (REQUESTS[1], {"token": TOKEN[1:]}),
        (REQUESTS[1], {"token": TOKEN + b"x"}),
        (REQUESTS[1], {"token": "t" * TOKEN_BYTES}),
        (REQUESTS[1], {"digest": DIGEST[1:]}),
        (REQUESTS[1], {"digest": DIGEST + b"x"}),
        (REQUESTS[1], {"digest_kind": "pages"}),
        (REQUESTS[1], {"num_tokens": -1}),
        (REQUESTS[1], {"num_tokens": 0}),
        (REQUESTS[1], {"num_tokens": 1 << 40}),
        (REQUESTS[1], {"num_tokens": 1.5}),
        (REQUESTS[1], {"sequence": -1}),
        (REQUESTS[1], {"sequence": 1 << 62}),
        (REQUESTS[1], {"sequence": 1 << 63}),
        (REQUESTS[2], {"token": b""}),
        (REQUESTS[0], {"protocol": -1}),
    ],
)
def test_requests_out_of_bounds_are_refused(message: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_request(edited(message, **changes))


PLAIN_ENDPOINT = msgspec.to_builtins(ENDPOINT, builtin_types=(bytes,))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (REPLIES[0], {"epoch": b"e"}),
        (REPLIES[0], {"hash_id": "h" * 1025}),
        (REPLIES[0], {"arenas": []}),
        (REPLIES[0], {"arenas": [[PLAIN_ENDPOINT]]}),
        (REPLIES[0], {"arenas": [[PLAIN_ENDPOINT]] * 3}),
        (REPLIES[0], {"arenas": [[PLAIN_ENDPOINT], []]}),
        (REPLIES[0], {"arenas": [[PLAIN_ENDPOINT]] * (MAX_RANKS + 1)}),
        (REPLIES[0], {"arenas": [[PLAIN_ENDPOINT] * (MAX_TRANSPORTS + 1)] * 2}),
        (REPLIES[0], {"arenas": [[PLAIN_ENDPOINT | {"n_slots": 0}]] * 2}),
        (REPLIES[0], {"arenas": [[PLAIN_ENDPOINT | {"slot_bytes": 5}]] * 2}),
        (REPLIES[0], {"arenas": [[PLAIN_ENDPOINT | {"epoch": b""}]] * 2}),
        (REPLIES[1], {"ours": "x" * 1025}),
        (REPLIES[2], {"groups": [[[-1, 0]]]}),
        (REPLIES[2], {"groups": [[[1 << 40, 0]]]}),
        (REPLIES[2], {"groups": [[[0, -1]]]}),
        (REPLIES[2], {"groups": [[[0, 1 << 63]]]}),
        (REPLIES[2], {"groups": [[[0, 1, 2]]]}),
        (REPLIES[2], {"groups": [[]] * 257, "first_blocks": [0] * 257}),
        (REPLIES[2], {"groups": [], "first_blocks": []}),
        (REPLIES[2], {"first_blocks": [0]}),
        (REPLIES[2], {"num_tokens": 0}),
        (REPLIES[2], {"lease_s": -0.5}),
        (REPLIES[2], {"lease_s": math.nan}),
        (REPLIES[2], {"lease_s": math.inf}),
        (REPLIES[3], {"reason": "x" * 1025}),
    ],
)
def test_replies_out_of_bounds_are_refused(message: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_reply(edited(message, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 0},
        {"ranks": MAX_RANKS + 1},
        {"kv_heads": -1},
        {"model": "m" * 1025},
        {"groups": []},
        {"groups": [msgspec.to_builtins(group_shape()) | {"pages": []}]},
        {"groups": [msgspec.to_builtins(group_shape()) | {"pages": [""]}]},
        {"groups": [msgspec.to_builtins(group_shape()) | {"pages": ["H0.N16.C64"]}]},
        {"groups": [msgspec.to_builtins(group_shape())] * 257},
        {"groups": [msgspec.to_builtins(group_shape()) | {"block_size": 0}]},
        {"groups": [msgspec.to_builtins(group_shape()) | {"attention_type": "some"}]},
        {"groups": [msgspec.to_builtins(group_shape()) | {"window": 5}]},
        {"groups": [msgspec.to_builtins(group_shape()) | {"pages": ["x" * 1025] * 2}]},
    ],
)
def test_a_compatibility_key_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    handshake = decode_request(
        edited(REQUESTS[0], compatibility=msgspec.to_builtins(PRINT) | changes)
    )
    assert isinstance(handshake, Handshake)
    with pytest.raises(ProtocolError):
        handshake.decode_compatibility()


@pytest.mark.parametrize("field", ["model", "dtype", "kv_dtype", "integrity", "kv_heads"])
def test_a_compatibility_key_names_the_field_that_differs(field: str) -> None:
    other = 4 if field == "kv_heads" else "other"
    theirs = msgspec.structs.replace(PRINT, **{field: other})
    assert PRINT.difference(theirs) == (field, getattr(PRINT, field), other)
    assert PRINT.difference(msgspec.structs.replace(PRINT)) is None
