# SPDX-License-Identifier: Apache-2.0
"""How much memory is left for an arena: of the machine, and of this process's cgroups.

The size of /dev/shm does not bound an arena, which is a memfd. The machine's memory does, and so
does each cgroup of this process: a page is charged to them when it is first touched.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omni_connector.config import memory_limit_bytes

# (limit, use, name in memory.stat of memory that can be reclaimed), for both versions of cgroups.
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = ("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/"), *, claimed: int = 0, in_cgroup: int = 0) -> int:
    """Bytes of memory that the machine, and the cgroups of this process, have left.

    Args:
        root: the folder with /proc and /sys.
        claimed: bytes of the machine's memory that others have claimed.
        in_cgroup: the part of `claimed` that is charged to the cgroups of this process.
    """
    available = memory_limit_bytes()
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = min(available, int(value.split()[0]) * 1024)
    of_cgroups = [left - in_cgroup for _, left in _left_in_cgroups(root)]
    return max(0, min([available - claimed, *of_cgroups]))


def memory_cgroup(root: Path = Path("/")) -> int:
    """The inode of the innermost cgroup that limits this process's memory; 0 if none does.

    Unlike its path the inode is the same in every namespace.
    """
    for folder, _ in _left_in_cgroups(root):
        try:
            return folder.stat().st_ino
        except OSError:  # it has just been removed
            break
    return 0


def _left_in_cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        mount = root / "sys/fs/cgroup"
        if number == "0":
            names = _V2
        elif "memory" in controllers.split(","):
            mount, names = mount / "memory", _V1
        else:
            continue
        # In a container this may be the host's path; then only the mount itself is visible.
        within = Path(own.strip().lstrip("/"))
        for folder in [mount / within, *(mount / parent for parent in within.parents)]:
            yield from ((folder, left) for left in _left_in(folder, *names))


def _left_in(folder: Path, limit_file: str, use_file: str, reclaimable: str) -> Iterator[int]:
    limit, use = (next(_lines(folder / name), "") for name in (limit_file, use_file))
    if not (limit.isdigit() and use.isdigit()):  # no limit, or no such cgroup
        return
    stat = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
    yield int(limit) - int(use) + int(stat.get(reclaimable, 0))


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:  # not on this machine
        return
