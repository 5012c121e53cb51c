# SPDX-License-Identifier: Apache-2.0
"""Huge pages for arenas: what the kernel offers, and what a mapping got.

A memfd gets them in two ways. With `auto` the owner advises them, and the kernel uses them if
/sys/kernel/mm/transparent_hugepage/shmem_enabled allows it. With `hugetlb` they come from the pool
that an administrator has reserved.
"""

from pathlib import Path
from typing import Final, Literal, NamedTuple

HugePages = Literal["auto", "hugetlb", "off"]

SHMEM_ENABLED: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"

_MIB: Final = 1 << 20
_REFUSING: Final = ("never", "deny")


class Pool(NamedTuple):
    """The kernel's pool of reserved huge pages, of the default size.

    Attributes:
        page_bytes: of one page; 0 if the kernel has no such pages.
        total, free: numbers of pages; `free` ones are neither used nor promised.
    """

    page_bytes: int
    total: int
    free: int

    def advice(self, nbytes: int) -> str:
        """What to do so that an arena of `nbytes` fits."""
        if not self.page_bytes:
            return "this kernel has no reserved huge pages; set huge_pages to auto"
        wanted = -(-nbytes // self.page_bytes)
        return (
            f"the arena needs {wanted} huge pages of {self.page_bytes // _MIB} MiB, and "
            f"{self.free} of {self.total} are free: run `sysctl vm.nr_hugepages="
            f"{self.total - self.free + wanted}` as root, or set huge_pages to auto"
        )


def pool(root: Path = Path("/")) -> Pool:
    """The pool as it is now.

    Args:
        root: the folder with /proc.
    """
    found: dict[str, int] = {}
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # hidden
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.startswith("Huge"):
            found[name] = int(value.split()[0])
    return Pool(
        found.get("Hugepagesize", 0) * 1024,
        found.get("HugePages_Total", 0),
        max(0, found.get("HugePages_Free", 0) - found.get("HugePages_Rsvd", 0)),
    )


def transparent(root: Path = Path("/")) -> str:
    """The kernel's setting for shared memory, such as `advise`; `absent` if there is none."""
    try:
        words = (root / SHMEM_ENABLED).read_text().split()
    except OSError:  # a kernel without transparent huge pages, or a container that hides it
        return "absent"
    return next((word.strip("[]") for word in words if word.startswith("[")), "absent")


def expected(setting: HugePages, root: Path = Path("/")) -> bool:
    """Whether an arena with this setting may get huge pages."""
    if setting == "auto":
        return transparent(root) not in (*_REFUSING, "absent")
    return setting == "hugetlb"


def explain(setting: HugePages, root: Path = Path("/")) -> str:
    """One line that says which pages an arena with this setting gets, and why."""
    if setting == "off":
        return "ordinary pages (huge_pages is off)"
    if setting == "hugetlb":
        there = pool(root)
        return (
            f"reserved huge pages of {there.page_bytes // _MIB} MiB (huge_pages is hugetlb; "
            f"{there.free} of {there.total} are free)"
        )
    kernel = transparent(root)
    if expected(setting, root):
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
