# SPDX-License-Identifier: Apache-2.0
"""How much memory is left for an arena: of the machine, and of this process's cgroups.

The size of /dev/shm does not bound an arena, which is a memfd. The machine's memory does, and so
does each cgroup of this process: a page is charged to them when it is first touched.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# (limit, use, name in memory.stat of memory that can be reclaimed), for both versions of cgroups.
_Files = tuple[str, str, str]
_V1: Final[_Files] = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final[_Files] = ("memory.max", "memory.current", "inactive_file")


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or what the tightest of its cgroups
    allows if that is less.

    Args:
        root: the folder with /proc and /sys.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_number(folder, names[0]) for folder, names in _own_cgroups(root))
    return min([machine, *(limit for limit in limits if limit is not None)])


def spared_bytes() -> int:
    """Bytes of available memory that an arena leaves to others.

    1/20 of the memory limit, 4 GiB at most.
    """
    return min(memory_limit_bytes() // 20, 4 << 30)


def available_bytes(root: Path = Path("/"), *, claimed: int = 0, in_cgroup: int = 0) -> int:
    """Bytes of memory that the machine, and the cgroups of this process, have left.

    Args:
        root: the folder with /proc and /sys.
        claimed: bytes of the machine's memory that others have claimed.
        in_cgroup: the part of `claimed` that is charged to the cgroups of this process.
    """
    available = memory_limit_bytes(root)
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
    for folder, (limit_file, use_file, reclaimable) in _own_cgroups(root):
        limit, use = _number(folder, limit_file), _number(folder, use_file)
        if limit is None or use is None:
            continue
        stat = dict(
            line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line
        )
        yield folder, limit - use + int(stat.get(reclaimable, 0))


def _own_cgroups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The cgroup of this process that counts memory, and all around it, the innermost first."""
    for line in _lines(root / "proc/self/cgroup"):  # a host may have both versions
        number, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if number == "0":
            files, mounts = _V2, _mounts(root, "cgroup2", "")
        elif "memory" in controllers.split(","):
            files, mounts = _V1, _mounts(root, "cgroup", "memory")
        else:
            continue
        inside = [
            (point, own.removeprefix(shown))
            for point, shown in mounts
            if f"{own}/".startswith(f"{shown}/")
        ]
        # Else a container may have the host's path, and only the mount itself is visible.
        for point, path in inside or [(point, own) for point, _ in mounts[:1]]:
            within = Path(path.lstrip("/"))
            if ".." in within.parts:  # outside of the namespace's root
                within = Path()
            for folder in (within, *within.parents):
                yield point / folder, files


def _mounts(root: Path, kind: str, controller: str) -> list[tuple[Path, str]]:
    """Where cgroups of a kind are mounted, and the path of the one that is shown there, "" for all.

    A container without a namespace of cgroups is shown a part of the host's.
    """
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        file_system, *options = after.split()
        if file_system == kind and (not controller or controller in options[-1].split(",")):
            shown, point = before.split()[3:5]
            found.append((root / point.lstrip("/"), shown.rstrip("/")))
    return found or [(root / "sys/fs/cgroup" / controller, "")]  # the usual place


def _number(folder: Path, name: str) -> int | None:
    """What a file of a cgroup says; None where there is no limit, or no such cgroup."""
    text = next(_lines(folder / name), "")
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:  # not on this machine
        return
