# SPDX-License-Identifier: Apache-2.0
"""The memory node of a rank, and of the pages of its arena.

A copy between nodes is slower, and takes bandwidth from both. So a rank's arena lies on the node of
its GPU, or on that of the cores that vLLM has pinned it to, and its copy threads run there. Where
that cannot be said, or the kernel refuses it, pages lie where they are first touched.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from omni_connector.arena.nodes import cores_of_nodes

ARENA_NAME: Final = "omni-connector-arena"
"""Of the memfds of arenas."""


class _Calls(NamedTuple):
    """Numbers of system calls."""

    mbind: int
    get_mempolicy: int
    move_pages: int


_GENERIC: Final = _Calls(235, 236, 239)
_CALLS: Final = {
    "x86_64": _Calls(237, 239, 279),
    "aarch64": _GENERIC,
    "riscv64": _GENERIC,
}

# Policies of Linux for memory.
_DEFAULT: Final = 0
_PREFERRED: Final = 1
_LOCAL: Final = 4

_MASK_WORDS: Final = 16
"""Length of a set of nodes, in words of 64 bits: as many nodes as a kernel may have."""

System = Callable[..., int]
"""Makes a system call by its number; raises OSError."""

_libc = ctypes.CDLL(None, use_errno=True)


def _system(number: int, *arguments: Any) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class MemoryNodes:
    """The memory nodes of this host.

    Args:
        root: the folder with /sys and /proc.
        system: makes system calls.
        machine: the processor's architecture, as `platform.machine` names it.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        system: System = _system,
        machine: str = platform.machine(),
    ) -> None:
        self._root = root
        self._system = system
        self._calls = _CALLS.get(machine)

    def cores(self) -> dict[int, frozenset[int]]:
        """The cores of each node that has cores and memory; none where the kernel hides them."""
        folder = self._root / "sys/devices/system/node"
        return {
            node: cores
            for node, cores in cores_of_nodes(folder).items()
            if cores and _has_memory(folder / f"node{node}")
        }

    def of_rank(self, pinned: frozenset[int], pci: str | None = None) -> int | None:
        """The node for the arena and the threads of a rank.

        Args:
            pinned: the cores that its engine's thread may run on.
            pci: address of its GPU on the PCI bus, such as `0000:3b:00.0`; None without one.

        Returns:
            None where nothing is to be done: the host has one node, the cores lie on several, or
            vLLM's NUMA binding or numactl has set a policy for this process's memory.
        """
        nodes = self.cores()
        if len(nodes) < 2 or self._has_policy():
            return None
        if pci is not None:
            with contextlib.suppress(OSError, ValueError):
                file = self._root / "sys/bus/pci/devices" / pci.lower() / "numa_node"
                node = int(file.read_text())
                if node in nodes:
                    return node
        near = [node for node, cores in nodes.items() if cores & pinned]
        return near[0] if len(near) == 1 else None

    def prefer(self, memory: mmap.mmap, node: int) -> bool:
        """Have the kernel allocate pages of a shared mapping on a node, as long as it has some.

        Of shared memory this holds for whoever touches a page first. Only its owner may call it.

        Returns:
            Whether the kernel does so. It refuses a node that the cgroup forbids, and containers
            without CAP_SYS_NICE may not ask.
        """
        if self._calls is None:
            return False
        mask = (ctypes.c_uint64 * _MASK_WORDS)()
        mask[node // 64] = 1 << node % 64
        start = np.frombuffer(memory, np.uint8).ctypes.data
        try:
            self._system(
                self._calls.mbind,
                ctypes.c_void_p(start),
                ctypes.c_ulong(len(memory)),
                ctypes.c_int(_PREFERRED),
                mask,
                ctypes.c_ulong(_MASK_WORDS * 64),
                ctypes.c_uint(0),
            )
        except OSError:
            return False
        return True

    def of_pages(self, memory: np.ndarray[Any, Any], most: int = 1024) -> Counter[int]:
        """How many pages of some memory lie on each node, of `most` at even distances.

        Pages that are not there yet do not count, nor does anything where the kernel does not tell.
        """
        if self._calls is None or not memory.nbytes:
            return Counter()
        start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        pages = -(-(memory.ctypes.data + memory.nbytes - start) // mmap.PAGESIZE)
        chosen = range(0, pages, max(1, pages // most))
        addresses = (ctypes.c_void_p * len(chosen))(
            *(start + page * mmap.PAGESIZE for page in chosen)
        )
        found = (ctypes.c_int * len(chosen))(*[-errno.ENOENT] * len(chosen))
        try:
            self._system(
                self._calls.move_pages,
                ctypes.c_int(0),  # of this process
                ctypes.c_ulong(len(chosen)),
                addresses,
                None,  # look, and move nothing
                found,
                ctypes.c_int(0),
            )
        except OSError:
            return Counter()
        return Counter(node for node in found if node >= 0)

    def of_arenas(self) -> Iterator[tuple[int, Counter[int]]]:
        """The arenas of running processes of this user: the owner's process id, and how many KiB
        of it lie on each node."""
        for folder in sorted((self._root / "proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):  # another user's, or it has ended
                # Only owners map an arena writable.
                owned = {
                    line.partition("-")[0].lstrip("0")
                    for line in (folder / "maps").read_text().splitlines()
                    if ARENA_NAME in line and " rw-s " in line
                }
                if owned:
                    yield int(folder.name), _kib_on_nodes(folder / "numa_maps", owned)

    def _has_policy(self) -> bool:
        """Whether the memory of this thread has a policy of somebody's choice."""
        if self._calls is None:
            return False
        mode = ctypes.c_int(_DEFAULT)
        try:
            self._system(
                self._calls.get_mempolicy,
                ctypes.byref(mode),
                None,
                ctypes.c_ulong(0),
                None,
                ctypes.c_ulong(0),
            )
        except OSError:  # it was not allowed to set one either
            return False
        return mode.value not in (_DEFAULT, _LOCAL)


def _has_memory(folder: Path) -> bool:
    try:
        lines = (folder / "meminfo").read_text().splitlines()
    except OSError:
        return False
    return any("MemTotal:" in line and line.split()[-2] != "0" for line in lines)


def _kib_on_nodes(file: Path, starts: set[str]) -> Counter[int]:
    found: Counter[int] = Counter()
    for line in file.read_text().splitlines():
        start, *words = line.split()
        if start.lstrip("0") not in starts:
            continue
        pages = {name: value for name, _, value in (word.partition("=") for word in words)}
        size = int(pages.get("kernelpagesize_kB", mmap.PAGESIZE // 1024))
        for name, value in pages.items():
            if name[:1] == "N" and name[1:].isdigit():
                found[int(name[1:])] += int(value) * size
    return found
