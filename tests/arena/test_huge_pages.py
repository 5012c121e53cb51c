# SPDX-License-Identifier: Apache-2.0
"""What is said of huge pages is what the kernel says."""

from pathlib import Path

import numpy as np
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.arena.huge_pages import (
    SHMEM_ENABLED,
    expected,
    explain,
    mapped_huge,
    transparent,
)


def host(root: Path, shmem_enabled: str | None) -> Path:
    if shmem_enabled is not None:
        path = root / SHMEM_ENABLED
        path.parent.mkdir(parents=True)
        path.write_text(shmem_enabled)
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
    assert expected(root) is huge
    assert f"shmem_enabled is {word}" in explain(root)
    assert explain(root).startswith("huge" if huge else "ordinary")
    assert ("echo advise" in explain(root)) is (word in ("never", "deny"))


def test_any_kernel_gives_an_arena() -> None:
    with Arena.create(600, 4096) as arena:
        arena.slots[:] = 3
        assert (arena.slots == 3).all()


def test_a_mapping_without_huge_pages_has_none() -> None:
    assert mapped_huge(int(np.zeros(1, np.uint8).ctypes.data) | 1) == 0
