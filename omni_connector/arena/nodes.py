# SPDX-License-Identifier: Apache-2.0
"""The cores that threads beside vLLM's compute threads may run on, and the memory near to them."""

import contextlib
import multiprocessing
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_NODES: Final = Path("/sys/devices/system/node")


def process_cores() -> frozenset[int]:
    """The cores that this process may use, whatever its threads are pinned to.

    vLLM starts a worker with OpenMP's variables set, so that importing torch pins its main thread,
    and with it each thread that is made later. The process that started it is not pinned.
    """
    cores = frozenset(os.sched_getaffinity(0))
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        try:
            cores |= frozenset(os.sched_getaffinity(parent.pid))
        except OSError:  # it has ended
            return cores
    return cores


def near_cores(
    cores: frozenset[int], pinned: frozenset[int], nodes: Path = _NODES
) -> frozenset[int]:
    """Those of some cores that share a memory node with others.

    Args:
        cores: what a thread may run on.
        pinned: cores on whose nodes the memory lies that it works on.
        nodes: the folder in which the kernel tells of the nodes.

    Returns:
        All of `cores` where the host has one node, does not tell, or has none of them near.
    """
    near: set[int] = set()
    try:
        for path in nodes.glob("node[0-9]*/cpulist"):
            node = _listed(path.read_text())
            if node & pinned:
                near |= node
    except (OSError, ValueError):
        return cores
    return cores & near or cores


def copy_cores() -> frozenset[int]:
    """The cores for threads that copy memory on the node of the calling thread."""
    return near_cores(process_cores(), frozenset(os.sched_getaffinity(0)))


@contextlib.contextmanager
def threads_on(cores: frozenset[int]) -> Iterator[None]:
    """Have the threads that the body starts run on these cores: they inherit the caller's."""
    before = os.sched_getaffinity(0)
    _run_on(cores)
    try:
        yield
    finally:
        _run_on(before)


def _run_on(cores: Collection[int]) -> None:
    with contextlib.suppress(OSError):  # the cpuset has shrunk since
        os.sched_setaffinity(0, cores)


def _listed(text: str) -> frozenset[int]:
    """The numbers in a list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
