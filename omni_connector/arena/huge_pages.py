# SPDX-License-Identifier: Apache-2.0
"""Huge pages for arenas: what the kernel offers, and what a mapping got.

The owner of an arena advises them, and the kernel uses them if
/sys/kernel/mm/transparent_hugepage/shmem_enabled allows it.
"""

from pathlib import Path
from typing import Final

SHMEM_ENABLED: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"

_REFUSING: Final = ("never", "deny")


def transparent(root: Path = Path("/")) -> str:
    """The kernel's setting for shared memory, such as `advise`; `absent` if there is none."""
    try:
        words = (root / SHMEM_ENABLED).read_text().split()
    except OSError:  # a kernel without transparent huge pages, or a container that hides it
        return "absent"
    return next((word.strip("[]") for word in words if word.startswith("[")), "absent")


def expected(root: Path = Path("/")) -> bool:
    """Whether an arena may get huge pages."""
    return transparent(root) not in (*_REFUSING, "absent")


def explain(root: Path = Path("/")) -> str:
    """One line that says which pages an arena gets, and why."""
    kernel = transparent(root)
    if expected(root):
        return f"huge pages where the kernel has some (shmem_enabled is {kernel})"
    hint = "" if kernel == "absent" else f"; `echo advise > /{SHMEM_ENABLED}` allows huge ones"
    return f"ordinary pages (shmem_enabled is {kernel}{hint})"


def mapped_huge(address: int) -> int:
    """Bytes in transparent huge pages of the mapping at this address; 0 if unknown."""
    start = f"{address:x}-"
    inside = False
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                if line[0].islower() or line[0].isdigit():
                    inside = line.startswith(start)
                elif inside and line.startswith("ShmemPmdMapped:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # hidden
        pass
    return 0
