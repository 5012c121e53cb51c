# SPDX-License-Identifier: Apache-2.0
"""How much memory there is for an arena, and how large one is unless `arena_gib` says so.

An arena is a memfd: no size of /dev/shm bounds it, but the machine's memory does, and that of each
cgroup around this process, to which its pages are charged as they are touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omni_connector.config import memory_limit_bytes

GIB: Final = 1 << 30

ORDINARY_PART: Final = 10
"""All arenas of a deployment on one host together take this part of the available memory."""

LARGEST_PART: Final = 4
"""Up to this part they take where a single prompt needs more."""

USEFUL_CACHES: Final = 2
"""An arena holds at most as many blocks as so many KV caches: while what fills one waits for its
decode engines, as much is computed."""

# (limit, use, name in memory.stat of what is given back at need), of both versions of cgroups.
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """How many slots an arena has, and why."""

    slots: int
    why: str


def arena_size(
    *,
    available: int,
    slot_bytes: int,
    cache_blocks: int,
    prompt_blocks: int,
    sharers: int,
) -> ArenaSize:
    """The size of one rank's arena where nobody has set it.

    Args:
        available: bytes of memory of the host that nobody uses.
        slot_bytes: of one block.
        cache_blocks: blocks of this rank's KV cache.
        prompt_blocks: blocks of the longest prompt that the engine takes.
        sharers: arenas of this deployment on this host, this one included.
    """
    share = max(0, available) // sharers
    among = "" if sharers == 1 else f", which {sharers} ranks share"
    useful = USEFUL_CACHES * cache_blocks
    ordinary = share // ORDINARY_PART // slot_bytes
    largest = share // LARGEST_PART // slot_bytes
    wanted = max(ordinary, min(prompt_blocks, largest))
    if useful <= wanted:
        return ArenaSize(useful, f"{USEFUL_CACHES} times the KV cache")
    there = f"the {available / GIB:.1f} GiB of memory available{among}"
    if wanted == ordinary:
        return ArenaSize(ordinary, f"1/{ORDINARY_PART} of {there}")
    if wanted == prompt_blocks:
        return ArenaSize(
            wanted, f"one prompt of the longest, more than 1/{ORDINARY_PART} of {there}"
        )
    return ArenaSize(wanted, f"1/{LARGEST_PART} of {there}")


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can still take: of the machine, and of its cgroups.

    Args:
        root: where /proc and /sys lie.
    """
    available = memory_limit_bytes()
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = min(available, int(value.split()[0]) * 1024)
    return max(0, min([available, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
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
        # In a container the path may be the host's, of which only the mount is there.
        within = Path(own.strip().lstrip("/"))
        for folder in [mount / within, *(mount / parent for parent in within.parents)]:
            yield from _left_in(folder, *names)


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
