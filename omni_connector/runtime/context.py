# SPDX-License-Identifier: Apache-2.0
"""`EngineContext`: what all parts of one half of an engine share."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_connector.runtime.stats import NO_STATS, Stats
from omni_connector.runtime.trace import NO_TRACE, Trace
from omni_connector.runtime.turns import MakeLock, StartTurns, TurnThread


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Clock, threads, randomness, statistics and trace of one half of an engine.

    `vllm_v1.assembly` makes one for each half. A part that needs only one of the attributes takes
    that one. Loggers are not part of it: each module has its own, below vLLM's.

    Attributes:
        clock: seconds, monotonic.
        start: starts a thread that makes turns.
        lock: makes a lock that the threads of this half share.
        randbytes: returns that number of bytes, from a cryptographic source.
        stats: the counters. Only the engine's thread may use them.
        trace: takes spans, from any thread.
    """

    clock: Callable[[], float] = time.monotonic
    start: StartTurns = TurnThread
    lock: MakeLock = threading.Lock
    randbytes: Callable[[int], bytes] = secrets.token_bytes
    stats: Stats = NO_STATS
    trace: Trace = NO_TRACE


PROCESS_CONTEXT: Final = EngineContext()
"""The clock, threads and randomness of the process; nothing is counted or traced."""
