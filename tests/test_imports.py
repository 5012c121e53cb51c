# SPDX-License-Identifier: Apache-2.0
"""No modules import each other in a circle, not even within a folder, a function, or for types."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imports(folder: Path) -> dict[str, set[str]]:
    """The modules of a package, and which of them each imports wherever an import stands.

    The package's own `__init__` imports nothing here: it names what stands below for type checkers.
    """
    paths = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & paths.keys()
            elif isinstance(node, ast.ImportFrom):
                above = path.relative_to(folder.parent).parts[: -node.level] if node.level else ()
                source = ".".join((*above, *filter(None, [node.module])))
                dotted = [f"{source}.{alias.name}" for alias in node.names]
                found[name] |= {each if each in paths else source for each in dotted}
        found[name] &= paths.keys() - {name}
    found[folder.name] = set()
    return found


@pytest.mark.parametrize("package", ["omni_connector", "tests"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    TopologicalSorter(imports(ROOT / package)).prepare()


def test_a_circle_is_found_also_through_functions_and_types(tmp_path: Path) -> None:
    package = tmp_path / "example"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from example.high import tile\n")
    (package / "high.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from example.inner import box\n"
        "from . import __doc__\n"
    )
    (package / "inner" / "box.py").write_text("def open():\n    from .. import high\n")
    with pytest.raises(CycleError) as found:
        TopologicalSorter(imports(package)).prepare()
    assert set(found.value.args[1]) == {"example.high", "example.inner.box"}
