# SPDX-License-Identifier: Apache-2.0
"""The picture of `docs/architecture.md` shows the imports that the code has."""

import subprocess
import sys
from graphlib import CycleError
from pathlib import Path
from typing import Any

import pytest

from .scripts import module_at

SCRIPT = Path(__file__).parents[1] / "scripts" / "imports_picture.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return module_at(SCRIPT)


def test_the_page_has_the_picture_that_the_script_makes_now() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_import_that_is_new_changes_the_picture(script: Any) -> None:
    folders = script.read_folders(script.PACKAGE)
    before = script.picture(folders)
    assert script.picture({**folders, "errors": folders["errors"] | {"turns"}}) != before


def test_imports_are_read_wherever_they_stand(script: Any, tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "attic").mkdir(parents=True)
    (package / "__init__.py").write_text("from house.attic import box\n")
    (package / "cellar.py").write_text("import sys\n")
    (package / "attic" / "box.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from house import roof\n"
        "else:\n    import house.attic\n"
        "def open():\n    from house import cellar, __doc__\n"
    )
    (package / "roof.py").write_text("import house.cellar\nfrom house.attic.box import open\n")
    folders = script.read_folders(package)
    assert folders == {"attic": {"cellar"}, "cellar": set(), "roof": {"attic", "cellar"}}
    assert script.reduced(folders) == {"attic": {"cellar"}, "cellar": set(), "roof": {"attic"}}


def test_imports_in_a_circle_are_not_drawn(script: Any) -> None:
    with pytest.raises(CycleError):
        script.picture({"attic": {"cellar"}, "cellar": {"attic"}})
