# SPDX-License-Identifier: Apache-2.0
"""Every error this package raises.

    OmniError
    ├── ConfigError (also ValueError)      a setting is unknown, ill-typed or out of range
    ├── UnsupportedVersionError            the installed vLLM is missing or not supported
    ├── LayoutError                        a KV cache layout that is not understood
    ├── DeviceMemoryError                  a device has no memory to copy KV through
    ├── TransportError
    │   ├── PeerUnreachableError           nobody answers at the peer's address
    │   ├── PeerRefusedError               we may not talk to the peer, or it refused us
    │   ├── MissingDependencyError         the transport needs a package that is not installed
    │   └── ArenaFullError                 no room, now or ever, for what was asked
    ├── IntegrityError
    │   ├── StaleSlotError                 the slot was reused since it was leased
    │   │   └── SlotPendingError           the slot is not committed yet, but may still be
    │   └── ChecksumError                  the bytes differ from the committed ones
    └── ProtocolError                      a malformed, oversized or unexpected message
        └── IncompatiblePeerError          the two sides differ in a named field

Catch `OmniError` around anything that talks to a peer: each of these errors means that this KV
cannot be loaded, which is never a reason to stop an engine. `ConfigError`,
`UnsupportedVersionError` and `LayoutError` are raised at start only, and are meant to stop it.
"""

import difflib
from collections.abc import Iterable


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The message of an error about an unknown name: it suggests the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name)[:200], names, n=1, cutoff=0.0)
    meant = f"did you mean {near[0]!r}? Known are {', '.join(names)}" if near else "there is none"
    return f"unknown {what} {name!r:.200}; {meant}"


class OmniError(Exception):
    """Base of all errors of this package."""


class ConfigError(OmniError, ValueError):
    """A setting is unknown, ill-typed or out of range; the message names the key."""


class UnsupportedVersionError(OmniError):
    """The installed vLLM is missing or outside the supported range."""


class LayoutError(OmniError):
    """A KV cache layout that is not understood: it is refused, never guessed."""


class DeviceMemoryError(OmniError):
    """A device has no memory to copy KV through."""


class TransportError(OmniError):
    """A transport could not do what it was asked."""


class PeerUnreachableError(TransportError):
    """Nobody answers at the peer's address, or not before the deadline."""


class PeerRefusedError(TransportError):
    """The peer is not one we may talk to, or it refused us."""


class MissingDependencyError(TransportError):
    """A transport needs a package that is not installed; the message names it."""


class ArenaFullError(TransportError):
    """There is no room in the arena for what was asked."""


class IntegrityError(OmniError):
    """Bytes were read that must not be used."""


class StaleSlotError(IntegrityError):
    """The slot has been reused since it was leased, or is not committed yet."""


class SlotPendingError(StaleSlotError):
    """The slot is not committed yet with the expected generation, but may still be."""


class ChecksumError(IntegrityError):
    """The bytes read are not the bytes that were committed."""


class ProtocolError(OmniError):
    """A malformed, oversized or unexpected message."""


class IncompatiblePeerError(ProtocolError):
    """The two sides differ in a field that must be equal.

    Args:
        field: the name of that field of the handshake.
        ours: this side's value.
        theirs: the peer's value.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: ours is {ours!r}, the peer's is {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs
