# SPDX-License-Identifier: Apache-2.0
"""`docs/internals/imports.svg` shows the imports that the code has."""

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
    package = tmp_path / "example"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from example.inner import box\n")
    (package / "low.py").write_text("import sys\n")
    (package / "inner" / "box.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from example import high\n"
        "else:\n    import example.inner\n"
        "def open():\n    from example import low, __doc__\n"
    )
    (package / "high.py").write_text("import example.low\nfrom example.inner.box import open\n")
    folders = script.read_folders(package)
    assert folders == {"inner": {"low"}, "low": set(), "high": {"inner", "low"}}
    assert script.reduced(folders) == {"inner": {"low"}, "low": set(), "high": {"inner"}}


def test_imports_in_a_circle_are_not_drawn(script: Any) -> None:
    with pytest.raises(CycleError):
        script.picture({"inner": {"low"}, "low": {"inner"}})
