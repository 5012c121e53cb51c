#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws which folder of the package imports which, from the code's own imports.

    python scripts/imports_picture.py           writes the picture into docs/architecture.md
    python scripts/imports_picture.py --check   fails where the picture there is not this one

Modules beside the folders count like folders. Imports within functions count,
those for type checkers do not. An arrow that follows from others is left out.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "omni_connector"
PAGE: Final = ROOT / "docs" / "architecture.md"
BEGIN: Final = "<!-- scripts/imports_picture.py writes what stands from here -->\n"
END: Final = "<!-- to here -->\n"

Folders = Mapping[str, set[str]]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a tree imports, except for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise SystemExit("a relative import, which this script does not resolve")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imported(other)
        else:
            yield from imported(node)


def read_folders(package: Path) -> Folders:
    """Return the folders that each folder imports. The package's own names are no folder."""
    found: dict[str, set[str]] = {}
    names = {path.stem for path in package.iterdir()} - {"__init__", "__pycache__"}
    for path in sorted(package.rglob("*.py")):
        folder = path.relative_to(package).with_suffix("").parts[0]
        if folder not in names:
            continue
        reached = found.setdefault(folder, set())
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            first, _, rest = name.partition(".")
            if first == package.name:
                reached |= {rest.partition(".")[0]} & (names - {folder})
    return found


def reduced(folders: Folders) -> dict[str, set[str]]:
    """Leave out each arrow whose target is also reached over another folder.

    Raises:
        graphlib.CycleError: the imports of some folders run in a circle.
    """
    reach: dict[str, set[str]] = {}
    direct: dict[str, set[str]] = {}
    for folder in TopologicalSorter(folders).static_order():
        targets = folders.get(folder, set())
        over = set().union(*(reach[target] for target in targets))
        direct[folder] = targets - over
        reach[folder] = targets | over
    return direct


def picture(folders: Folders) -> str:
    """Return a Mermaid flow chart of the folders, the same for the same imports."""
    direct = reduced(folders)
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {folder}" for folder in sorted(direct)]
    lines += [
        f"    {folder} --> {to}" for folder in sorted(direct) for to in sorted(direct[folder])
    ]
    return "\n".join([*lines, "```\n"])


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    try:
        drawn = picture(read_folders(PACKAGE))
    except CycleError as error:
        print(f"imports run in a circle: {' -> '.join(error.args[1])}", file=sys.stderr)
        return 1
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    there, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{PAGE} has no place for the picture", file=sys.stderr)
        return 1
    if check and there != drawn:
        print(f"the picture in {PAGE} is an older one: run {sys.argv[0]}", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(before + begin + drawn + end + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
