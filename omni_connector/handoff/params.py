# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: what routers carry from the prefill answer to the decode request.

The shape is NIXL's, so that routers made for it forward it unchanged; our own keys start with
`omni_`. It comes from outside, so each field is checked: if one does not fit, the engine computes
the prompt itself.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from omni_connector.handoff.messages import TOKEN_BYTES
from omni_connector.net.packets import PACKAGE, package_of
from omni_connector.net.peers import MAX_HOST_CHARS, HostPort, Peers, is_loopback, parse_host

PARAMS_VERSION: Final = 1
"""Version of the keys that begin with `omni_`."""

MAX_TOKENS_AHEAD: Final = 1024
"""Most tokens that a drafter reads ahead of a position. It bounds a number from outside."""

_Hex = Annotated[
    str, Meta(pattern=r"^[0-9a-f]+\Z", min_length=2 * TOKEN_BYTES, max_length=2 * TOKEN_BYTES)
]

_NO_HANDOFF: Final = "omni_no_handoff"
"""The key under which a prefill answer says why nothing is handed off: a kind of failure."""

_KIND: Final = re.compile(r"[a-z_]{1,64}")

_REFUSALS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "draining": "it drains",
        "decode_role": "its role is decode",
        "arena_full": "its arena is full",
    }
)


class BadParamsError(Exception):
    """The params cannot be used; `reason` is one of the failure kinds of the metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """Where a decode request finds the KV of its prompt.

    Attributes:
        remote_engine_id: `engine_id` of the prefill engine.
        remote_host, remote_port: its control address between hosts; null: it has none.
        omni_version: version of these keys.
        omni_epoch, omni_token: the prefill engine's epoch and the hand-off's token, in hex.
        omni_package: what a refusal says of the prefill engine; see `net.packets.PACKAGE`.
        omni_tokens_ahead: tokens after a position that the KV of this position depends on in the
            prefill engine: its drafter's. As many are left to the decode engine, and at least one.
            null: as in the decode engine, since versions that do not say so hand off only to
            engines with the same drafter.
    """

    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=512)]
    remote_host: Annotated[str, Meta(max_length=MAX_HOST_CHARS)] | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    omni_version: int
    omni_epoch: _Hex
    omni_token: _Hex
    omni_package: Annotated[str, Meta(max_length=64)] = ""
    omni_tokens_ahead: Annotated[int, Meta(ge=0, le=MAX_TOKENS_AHEAD)] | None = None

    @property
    def epoch(self) -> bytes:
        """The prefill engine's epoch."""
        return bytes.fromhex(self.omni_epoch)

    @property
    def token(self) -> bytes:
        """The hand-off's token."""
        return bytes.fromhex(self.omni_token)


def is_usable(params: object) -> bool:
    """Whether `kv_transfer_params` are an object whose `do_remote_decode` is a boolean or null."""
    return isinstance(params, dict) and isinstance(params.get("do_remote_decode"), bool | None)


def wants_handoff(params: Any) -> bool:
    """Whether a request asks to be prefilled here and decoded elsewhere."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def wants_remote_kv(params: Any) -> bool:
    """Whether a request says that its prompt was prefilled elsewhere."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


def refused_there(params: Any) -> str | None:
    """Why the prefill engine of a request hands nothing off, in its words; None where it has not
    said so."""
    kind = params.get(_NO_HANDOFF) if isinstance(params, Mapping) else None
    if not isinstance(kind, str) or _KIND.fullmatch(kind) is None:
        return None
    return _REFUSALS.get(kind, kind)


def parse_remote_prefill(params: Mapping[str, Any]) -> RemotePrefill:
    """Check the params of a request that was prefilled elsewhere.

    Raises:
        BadParamsError: `foreign_params`: another connector made them; `malformed_params`: they are
            ill-typed or incomplete.
    """
    if params.get("do_remote_prefill") is not True:
        raise _malformed("do_remote_prefill is not a boolean")
    if not any(str(key).startswith("omni_") for key in params):
        raise BadParamsError(
            "foreign_params", "the prefill engine's answer was not made by OmniKVConnector"
        )
    try:
        remote = msgspec.convert(dict(params), RemotePrefill)
    except (msgspec.ValidationError, TypeError, UnicodeError) as error:
        # JSON can contain half a surrogate pair, which is no valid text.
        raise _malformed(str(error)) from None
    version, host = remote.omni_version, remote.remote_host
    if version != PARAMS_VERSION:
        theirs = package_of(remote.omni_package)
        raise _malformed(
            f"omni_version is {version} ({theirs}), this engine supports {PARAMS_VERSION} "
            f"({PACKAGE})"
        )
    if (host is None) != (remote.remote_port is None):
        raise _malformed("of remote_host and remote_port only one is set")
    if host is not None:
        try:
            parse_host(host)
        except ValueError as error:
            raise _malformed(f"remote_host is {host!r}: {error}") from None
    return remote


def _malformed(text: str) -> BadParamsError:
    return BadParamsError("malformed_params", text)


def tcp_address(remote: RemotePrefill, peers: Peers, *, has_key: bool) -> HostPort:
    """The control address between hosts that a prefill engine gave; no name is looked up.

    Args:
        peers: the hosts that this engine may ask.
        has_key: whether the peer must prove that it belongs to the cluster.

    Raises:
        BadParamsError: `disallowed_peer`: this engine may not connect there.
    """
    host, port = remote.remote_host, remote.remote_port
    assert host is not None
    assert port is not None
    if not peers.allows(host):
        raise BadParamsError(
            "disallowed_peer",
            f"{host!r} is not among the hosts that the configuration key 'peers' lists",
        )
    if not has_key and not is_loopback(host):
        raise BadParamsError(
            "disallowed_peer",
            f"{host!r} is asked only with a key: set 'key_file' on both engines to the file that "
            "`omni-connector keygen` makes",
        )
    return HostPort(str(parse_host(host)), port)


def handoff_answer(
    *,
    engine_id: str,
    request_id: str,
    epoch: bytes,
    token: bytes,
    num_tokens: int,
    tokens_ahead: int,
    tp_size: int,
    address: HostPort | None,
) -> dict[str, Any]:
    """The prefill answer of a request whose KV is handed off.

    Args:
        tokens_ahead: see `RemotePrefill`.
        address: of our control channel between hosts; None where it has none.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],  # routers expect the key; a lease names the slots
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": None if address is None else address.host,
        "remote_port": None if address is None else address.port,
        "remote_num_tokens": num_tokens,
        "tp_size": tp_size,
        "omni_version": PARAMS_VERSION,
        "omni_epoch": epoch.hex(),
        "omni_token": token.hex(),
        "omni_package": PACKAGE,
        "omni_tokens_ahead": tokens_ahead,
    }


def no_handoff_answer(reason: str) -> dict[str, Any]:
    """The prefill answer that tells the decode engine to compute the prompt itself."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": False,
        "omni_version": PARAMS_VERSION,
        _NO_HANDOFF: reason,
    }
