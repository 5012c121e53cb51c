# SPDX-License-Identifier: Apache-2.0
"""Explores orders: engines, their threads and messages, in one process, one act at a time.

Each seed is a schedule: it draws the engines, what happens to them, and who acts next. Nothing
sleeps and no thread runs by itself, so a seed is the same schedule each time.
`docs/internals/simulation.md` says what must hold; run it with
`python -m tests.simulation --seeds 0:100`.
"""

from typing import Final

HASHES_VARIABLE: Final = "PYTHONHASHSEED"
"""Says how strings are hashed, and what vLLM's hashes of blocks begin with."""
