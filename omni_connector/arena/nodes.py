# SPDX-License-Identifier: Apache-2.0
"""The cores for threads beside vLLM's compute threads, and so the memory node of an arena."""

import contextlib
import multiprocessing
import os
from collections.abc import Collection, Iterator
from pathlib import Path


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
    cores: frozenset[int],
    pinned: frozenset[int],
    pci: str | None = None,
    root: Path = Path("/"),
) -> frozenset[int]:
    """The cores for what allocates and copies the memory of a rank.

    The kernel allocates a page on the memory node of the core that touches it first. So a rank's
    arena lies on the node of these cores, as long as that has memory.

    Args:
        cores: cores that a thread may run on.
        pinned: the cores that the engine's thread may run on.
        pci: address of the rank's GPU on the PCI bus, such as `0000:3b:00.0`; None without one.
        root: the folder with /sys.

    Returns:
        The part of `cores` on the GPU's node, else on the nodes of `pinned`. All of `cores` if the
        host has one node, hides its nodes, or has none of `cores` there.
    """
    nodes = _cores_of_nodes(root / "sys/devices/system/node")
    near: frozenset[int] = frozenset()
    if pci is not None:
        with contextlib.suppress(OSError, ValueError):
            file = root / "sys/bus/pci/devices" / pci.lower() / "numa_node"
            near = nodes.get(int(file.read_text()), near)
    if not near:
        near = near.union(*(node for node in nodes.values() if node & pinned))
    return cores & near or cores


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


def _cores_of_nodes(nodes: Path) -> dict[int, frozenset[int]]:
    """The cores of each memory node, by its number; none where the kernel hides them."""
    try:
        return {
            int(path.parent.name.removeprefix("node")): _listed(path.read_text())
            for path in sorted(nodes.glob("node[0-9]*/cpulist"))
        }
    except (OSError, ValueError):
        return {}


def _listed(text: str) -> frozenset[int]:
    """The numbers in a list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
