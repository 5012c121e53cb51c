# SPDX-License-Identifier: Apache-2.0
"""What tests show, each with its control, is read from their marks."""

from pathlib import Path

import pytest

from .support_table import Shown, shown

MARKED = """
import pytest


@pytest.mark.shows("rings", control="{control}")
@pytest.mark.parametrize("size", [1, 2])
def test_a_ring_is_moved(size): ...


def test_a_ring_that_is_lost_is_noticed(): ...


def a_ring(): ...
"""
CONTROL = "test_a_ring_that_is_lost_is_noticed"


def marked(folder: Path, control: str) -> Path:
    (folder / "kv").mkdir()
    (folder / "kv" / "test_rings.py").write_text(MARKED.format(control=control))
    return folder


@pytest.mark.parametrize("control", [CONTROL, f"kv/test_rings.py::{CONTROL}"])
def test_a_row_names_the_test_and_its_control(tmp_path: Path, control: str) -> None:
    [row] = shown(marked(tmp_path, control))
    assert row == Shown("rings", "kv/test_rings.py", "test_a_ring_is_moved", CONTROL)
    assert row.cells == (
        "rings",
        "a ring is moved (`kv/test_rings.py`)",
        "a ring that is lost is noticed",
    )


@pytest.mark.parametrize("control", ["test_nothing", "a_ring", "kv/test_rings.py::test_nothing"])
def test_a_control_that_is_no_test_is_refused(tmp_path: Path, control: str) -> None:
    with pytest.raises(ValueError, match=f"test_a_ring_is_moved has no control {control}"):
        shown(marked(tmp_path, control))
