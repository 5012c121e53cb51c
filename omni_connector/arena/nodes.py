# SPDX-License-Identifier: Apache-2.0
"""The cores for threads beside vLLM's compute threads, by memory node."""

import contextlib
import multiprocessing
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_NODES: Final = Path("/sys/devices/system/node")


def process_cores() -> frozenset[int]:
    """The cores that this process may use, whatever its threads are pinned to.

    vLLM starts a worker with OpenMP's variables set. So importing torch pins the main thread, and
    threads made later inherit that. The parent process is not pinned: its cores count, too.
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
    """The part of `cores` that lies on the memory nodes of `pinned`.

    Args:
        cores: cores that a thread may run on.
        pinned: cores near to the memory that the thread works on.
        nodes: the kernel's folder of memory nodes.

    Returns:
        All of `cores` if the host has one node, hides its nodes, or has none of `cores` there.
    """
    near: set[int] = set()
    for node in cores_of_nodes(nodes).values():
        if node & pinned:
            near |= node
    return cores & near or cores


def cores_of_nodes(nodes: Path = _NODES) -> dict[int, frozenset[int]]:
    """The cores of each memory node, by its number; none where the kernel hides them.

    Args:
        nodes: the kernel's folder of memory nodes.
    """
    try:
        return {
            int(path.parent.name.removeprefix("node")): _listed(path.read_text())
            for path in sorted(nodes.glob("node[0-9]*/cpulist"))
        }
    except (OSError, ValueError):
        return {}


def copy_cores() -> frozenset[int]:
    """The cores for threads that copy memory on the node of the calling thread."""
    return near_cores(process_cores(), frozenset(os.sched_getaffinity(0)))


@contextlib.contextmanager
def threads_on(cores: frozenset[int]) -> Iterator[None]:
    """Pin the calling thread to these cores during the body, so that threads started there inherit
    them."""
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
