#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws which folder of the package imports which, from the code's own imports.

    python scripts/imports_picture.py           writes docs/internals/imports.svg
    python scripts/imports_picture.py --check   fails where the picture there is not this one

Modules beside the folders count like folders. Imports within functions count,
those for type checkers do not. An arrow that follows from others is left out.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "omni_connector"
PICTURE: Final = ROOT / "docs" / "internals" / "imports.svg"

Folders = Mapping[str, set[str]]
Bend = tuple[str, str, int]
"""Where an arrow passes a row: its two ends, and the row."""

# In pixels: a box, the distance of rows, and what a box and a passing arrow take of a row's width.
_WIDTH, _HEIGHT, _ROW = 100, 30, 78
_BOX_SPACE, _BEND_SPACE = 120, 36
_SWEEPS: Final = 12
"""How often rows are sorted by what their boxes are joined to. More changed nothing."""
_HEAD: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" \
font-family="sans-serif" font-size="14">
<title>Which folder of the package imports which</title>
<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0L8 4L0 8z" fill="#5c6b7a"/></marker></defs>
<rect width="100%" height="100%" rx="8" fill="#f7f9fb"/>
<g fill="none" stroke="#5c6b7a">"""


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


def laid_out(direct: Folders) -> tuple[dict[str | Bend, tuple[float, int]], int]:
    """Return where the middle of each box and bend lies, in pixels and rows; and the width.

    A folder stands above all that it imports.
    """
    rows: dict[str, int] = {}
    for folder in TopologicalSorter(direct).static_order():
        rows[folder] = 1 + max((rows[target] for target in direct[folder]), default=-1)
    table: list[list[str | Bend]] = [[] for _ in range(1 + max(rows.values()))]
    for folder in sorted(rows):
        table[rows[folder]].append(folder)
    joined: dict[str | Bend, list[str | Bend]] = {}
    for folder in sorted(direct):
        for target in sorted(direct[folder]):
            bends = [(folder, target, row) for row in range(rows[target] + 1, rows[folder])]
            for bend in bends:
                table[bend[2]].append(bend)
            for low, high in pairwise((target, *bends, folder)):
                joined.setdefault(low, []).append(high)
                joined.setdefault(high, []).append(low)
    total = max(map(_space, table))
    at: dict[str | Bend, float] = {}
    for sweep in range(_SWEEPS):
        for row in table if sweep % 2 else reversed(table):
            row.sort(key=lambda each: _middle([at[o] for o in joined.get(each, ()) if o in at]))
            left = (total - _space(row)) / 2
            for each in row:
                half = (_BOX_SPACE if isinstance(each, str) else _BEND_SPACE) / 2
                at[each] = left + half
                left += 2 * half
    return {e: (at[e], len(table) - 1 - y) for y, row in enumerate(table) for e in row}, total


def _space(row: list[str | Bend]) -> int:
    return sum(_BOX_SPACE if isinstance(each, str) else _BEND_SPACE for each in row)


def _middle(places: list[float]) -> float:
    return sum(places) / len(places) if places else 0.0


def picture(folders: Folders) -> str:
    """Return an SVG picture of the folders, the same for the same imports."""
    direct = reduced(folders)
    places, width = laid_out(direct)
    height = (1 + max(row for _, row in places.values())) * _ROW
    lines = [_HEAD.format(width=width, height=height)]
    for folder in sorted(direct):
        for target in sorted(direct[folder]):
            bends = [e for e in places if isinstance(e, tuple) and e[:2] == (folder, target)]
            points = [(x, row * _ROW + _ROW / 2) for x, row in (places[e] for e in bends[::-1])]
            (x, row), (end, last) = places[folder], places[target]
            path = f"M{x:g} {row * _ROW + (_ROW + _HEIGHT) / 2:g}"
            path += "".join(f"L{x:g} {y:g}" for x, y in points)
            path += f"L{end:g} {last * _ROW + (_ROW - _HEIGHT) / 2:g}"
            lines.append(f'<path d="{path}" marker-end="url(#end)"/>')
    lines.append('</g>\n<g fill="#dce9f5" stroke="#2f6690">')
    boxes = {each: place for each, place in places.items() if isinstance(each, str)}
    for x, row in boxes.values():
        corner = f'x="{x - _WIDTH / 2:g}" y="{row * _ROW + (_ROW - _HEIGHT) / 2:g}"'
        lines.append(f'<rect {corner} width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>')
    lines.append('</g>\n<g text-anchor="middle" fill="#16324a">')
    for folder, (x, row) in boxes.items():
        lines.append(f'<text x="{x:g}" y="{row * _ROW + _ROW / 2 + 5:g}">{folder}</text>')
    return "\n".join([*lines, "</g>\n</svg>\n"])


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
    if check and (not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn):
        print(f"{PICTURE} is an older one: run {sys.argv[0]}", file=sys.stderr)
        return 1
    if not check:
        PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
