# SPDX-License-Identifier: Apache-2.0
"""What is said of huge pages is what the kernel says, and a setting that cannot be is an error."""

from pathlib import Path

import numpy as np
import pytest

from omni_connector.arena import huge_pages
from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.huge_pages import (
    SHMEM_ENABLED,
    Pool,
    expected,
    explain,
    mapped_huge,
    pool,
    transparent,
)
from omni_connector.errors import ConfigError

MEMINFO = """MemTotal:       24000000 kB
AnonHugePages:    520192 kB
HugePages_Total:     100
HugePages_Free:       60
HugePages_Rsvd:       15
HugePages_Surp:        0
Hugepagesize:       2048 kB
"""


def host(root: Path, shmem_enabled: str | None, meminfo: str | None = MEMINFO) -> Path:
    for name, text in ((SHMEM_ENABLED, shmem_enabled), ("proc/meminfo", meminfo)):
        if text is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("line", "word", "huge"),
    [
        ("always within_size advise [never] deny force\n", "never", False),
        ("always within_size [advise] never deny force\n", "advise", True),
        ("[always] within_size advise never deny force\n", "always", True),
        ("always within_size advise never [deny] force\n", "deny", False),
        ("\n", "absent", False),
        (None, "absent", False),
    ],
)
def test_the_kernels_setting_says_whether_an_arena_gets_them(
    line: str | None, word: str, huge: bool, tmp_path: Path
) -> None:
    root = host(tmp_path, line)
    assert transparent(root) == word
    assert expected("auto", root) is huge
    assert f"shmem_enabled is {word}" in explain("auto", root)
    assert explain("auto", root).startswith("huge" if huge else "ordinary")
    assert ("echo advise" in explain("auto", root)) is (word in ("never", "deny"))
    assert expected("hugetlb", root)
    assert not expected("off", root)
    assert "45 of 100 are free" in explain("hugetlb", root)
    assert "off" in explain("off", root)


def test_the_pool_is_what_nobody_uses_or_was_promised(tmp_path: Path) -> None:
    found = pool(host(tmp_path, None))
    assert found == Pool(2 << 20, 100, 45)
    assert "needs 51 huge pages of 2 MiB, and 45 of 100 are free" in found.advice(101 << 20)
    assert "nr_hugepages=106" in found.advice(101 << 20)
    nothing = pool(tmp_path / "elsewhere")
    assert nothing == Pool(0, 0, 0)
    assert "set huge_pages to auto" in nothing.advice(1)


def test_reserved_pages_that_are_not_there_are_an_error_that_says_what_to_do() -> None:
    there = pool()
    slots = (there.free + 2) * max(1, there.page_bytes >> 20)
    with pytest.raises(ConfigError, match=r"huge_pages.*set huge_pages to auto"):
        Arena.create(slots, 1 << 20, huge_pages="hugetlb")


def test_an_arena_of_reserved_pages_is_read_by_a_peer() -> None:
    if pool().free < 2:
        pytest.skip("no huge pages are reserved: /proc/sys/vm/nr_hugepages is 0, or they are taken")
    with Arena.create(4, 4096, huge_pages="hugetlb", prefault=True) as arena:
        arena.begin_write(3, 1)
        arena.slots[3] = 7
        arena.publish(3, 1, b"", 4096, 0)
        with ArenaView.open(
            arena.fd, epoch=arena.epoch, n_slots=4, slot_bytes=4096, prefault=True
        ) as view:
            assert view.verify(3, 1).length == 4096
            assert (view.slots[3] == 7).all()


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_any_setting_gives_an_arena(setting: huge_pages.HugePages) -> None:
    with Arena.create(600, 4096, huge_pages=setting) as arena:
        arena.slots[:] = 3
        assert (arena.slots == 3).all()


def test_a_mapping_without_huge_pages_has_none() -> None:
    assert mapped_huge(int(np.zeros(1, np.uint8).ctypes.data) | 1) == 0
