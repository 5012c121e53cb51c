# SPDX-License-Identifier: Apache-2.0
"""`docs/modules.md` lists the modules that there are, by what they say of themselves."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .scripts import module_at

SCRIPT = Path(__file__).parents[1] / "scripts" / "modules_page.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return module_at(SCRIPT)


def test_the_page_is_the_one_that_the_script_makes_now() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_each_file_of_code_is_listed_by_its_first_sentence(script: Any, tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "cellar" / "kernels").mkdir(parents=True)
    (package / "__init__.py").write_text('"""A house. It has rooms."""\n')
    (package / "roof.py").write_text('"""Keeps rain\nout, e.g. here.\n\nAlways."""\n')
    (package / "cellar" / "__init__.py").write_text('"""Wine | beer."""\n')
    (package / "cellar" / "door.py").write_text('"""`Door` | gate: opens."""\n')
    key = package / "cellar" / "kernels" / "key.c"
    key.write_text("// 1\n/* Turns\n * twice. Or not.\n */\n")
    found = [line for line in script.page(package).splitlines() if line.startswith(("##", "| `"))]
    assert found == [
        "## `house/`",
        "| `roof.py` | Keeps rain out, e.g. here |",
        "## `cellar/`",
        "| `cellar/door.py` | `Door` \\| gate: opens |",
        "| `cellar/kernels/key.c` | Turns twice |",
    ]


@pytest.mark.parametrize("content", ["", "import sys\n"])
def test_a_module_that_does_not_say_what_it_is_is_refused(
    script: Any, tmp_path: Path, content: str
) -> None:
    (tmp_path / "__init__.py").write_text('"""A house."""\n')
    (tmp_path / "roof.py").write_text(content)
    with pytest.raises(SystemExit, match="does not say what it is"):
        script.page(tmp_path)
