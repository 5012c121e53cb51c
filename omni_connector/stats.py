# SPDX-License-Identifier: Apache-2.0
"""The rooms count with this. `vllm_v1.metrics` passes the counts on to vLLM."""

from typing import Final, Protocol

from omni_connector.errors import (
    ChecksumError,
    PeerRefusedError,
    PeerUnreachableError,
    StaleSlotError,
)

FAILURE: Final = "failure:"
"""What the names of counted failures begin with, before their kind."""

MISSED: Final = "missed:"
"""What the names of counted tokens that were missed begin with, before their cause."""

PEER: Final = "peer:"
"""What the names of counted arenas of peers begin with, before transport and reason."""

_KINDS: Final[dict[type[Exception], str]] = {
    StaleSlotError: "stale_slot",
    ChecksumError: "checksum_mismatch",
    PeerUnreachableError: "peer_unreachable",
    PeerRefusedError: "peer_refused",
}


class Stats(Protocol):
    """Counts since the last report."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""

    def fail(self, kind: str, number: int = 1) -> None:
        """Count failures of this kind."""

    def miss(self, cause: str, tokens: int) -> None:
        """Count tokens of prompts that are computed because no cache had them."""

    def time(self, name: str, seconds: float) -> None:
        """Record a duration."""


def failure_kind(error: Exception, other: str) -> str:
    """What failures of this error are counted as; `other` where it is none that peers cause."""
    return next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), other)
