# SPDX-License-Identifier: Apache-2.0
"""The rooms count with this. `vllm_v1.metrics` passes the counts on to vLLM."""

from typing import Protocol


class Stats(Protocol):
    """Counts since the last report."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""

    def fail(self, kind: str, number: int = 1) -> None:
        """Count failures of this kind."""

    def time(self, name: str, seconds: float) -> None:
        """Record a duration."""
