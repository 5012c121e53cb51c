# SPDX-License-Identifier: Apache-2.0
"""The interface by which all folders count. `metric_names` says what, and `vllm_v1.metrics` passes
the counts on to vLLM."""

from typing import Final, Protocol

from omni_connector.errors import (
    ChecksumError,
    DeviceMemoryError,
    PeerRefusedError,
    PeerUnreachableError,
    StaleSlotError,
)

UNREACHABLE: Final = "peer_unreachable"
"""Kind of failure: a peer does not answer, or its bytes do not come in time."""

THREAD_ENDED: Final = "thread_ended:"
"""Kind of failure: an exception has ended a thread, whose name follows."""

LEASE_EXPIRED: Final = "lease_expired"
"""Kind of failure: the lease of a hand-off ended before its KV was loaded."""

_KINDS: Final[dict[type[Exception], str]] = {
    StaleSlotError: "stale_slot",
    ChecksumError: "checksum_mismatch",
    PeerUnreachableError: UNREACHABLE,
    PeerRefusedError: "peer_refused",
    DeviceMemoryError: "no_device_memory",
}


class Stats(Protocol):
    """Takes counts, failures, misses and durations until the next report to vLLM."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""

    def fail(self, kind: str, number: int = 1) -> None:
        """Count failures of this kind."""

    def miss(self, cause: str, tokens: int) -> None:
        """Count tokens of prompts that are computed because no cache had them."""

    def time(self, name: str, seconds: float) -> None:
        """Record a duration."""


class _NoStats:
    def count(self, name: str, amount: int = 1) -> None: ...

    def fail(self, kind: str, number: int = 1) -> None: ...

    def miss(self, cause: str, tokens: int) -> None: ...

    def time(self, name: str, seconds: float) -> None: ...


NO_STATS: Final[Stats] = _NoStats()
"""Statistics that drop every count."""


def failure_kind(error: Exception, other: str) -> str:
    """Return the kind of failure that an error counts as; `other` if peers do not cause it."""
    return next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), other)
