# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark ran, and a memcpy there beside which it measures."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
KIB = 1024

LOAD = os.getloadavg()[0]
"""When the benchmark started, so that its own work is not in it."""

_VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
"""Flags of `/proc/cpuinfo`, the widest first."""


def machine() -> str:
    """The processor, its cores, the load before the benchmark, the system and Python."""
    return (
        f"{_processor()}, {os.cpu_count()} cores, load average {LOAD:.2f} at the start; "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def _processor() -> str:
    """As the system names it, and its widest vectors."""
    said = Path("/proc/cpuinfo").read_text()
    known = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    known = {name.strip(): value.strip() for name, value in known.items()}
    model = known.get("model name") or platform.machine()
    flags = known.get("flags", "").split()
    vectors = next((name for flag, name in _VECTORS.items() if flag in flags), None)
    return f"{model} ({vectors})" if vectors else model


def yields() -> str:
    """What is to be said of processes that yield; "" where they do what vLLM does."""
    if os.sched_yield.__module__ != "sitecustomize":
        return ""
    return (
        " vLLM's processes sleep for 20 µs where they would yield "
        "(`PYTHONPATH=tests/e2e/site`): Linux 6.18 keeps others off a core that yields "
        "([why](../../docs/troubleshooting.md#engines-that-share-cpu-cores))."
    )


class Memcpy:
    """The yardstick: one copy between two plain arrays, of up to `size` bytes."""

    def __init__(self, size: int) -> None:
        self.source = torch.full((size,), 3, dtype=torch.uint8).numpy()
        self.target = torch.full((size,), 1, dtype=torch.uint8).numpy()

    def beside(self, size: int, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds of a memcpy (the mean of one before and one after) and of the work."""
        before = timed(lambda: np.copyto(self.target[:size], self.source[:size]))
        took = timed(work)
        after = timed(lambda: np.copyto(self.target[:size], self.source[:size]))
        return (before + after) / 2, took


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
