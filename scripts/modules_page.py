#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists the modules and kernels of the package, each with the first sentence of its docstring.

python scripts/modules_page.py           writes docs/modules.md
python scripts/modules_page.py --check   fails where the page there is not this one
"""

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "omni_connector"
PAGE: Final = ROOT / "docs" / "modules.md"
HEAD: Final = """\
# Modules

<!-- Written by `python scripts/modules_page.py`; do not edit. -->

All modules and kernels of the package, each by the first sentence of its docstring.
[How the package is laid out](architecture.md) says how they work together.
"""


def said_in(path: Path) -> str:
    """Return the first sentence of a module's docstring, or of a kernel's first comment.

    Raises:
        SystemExit: it has none.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.search(r"/\*(.*?)\*/", text, re.DOTALL)
        said = "" if comment is None else re.sub(r"\n \*", "\n", comment[1])
    paragraph = " ".join(re.split(r"\n\s*\n", said.strip())[0].split())
    if not paragraph:
        raise SystemExit(f"{path} does not say what it is")
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].removesuffix(".")


def page(package: Path) -> str:
    """Return the page: a table for each folder that has modules."""
    lines = [HEAD]
    for init in sorted(package.rglob("__init__.py")):
        folder = init.parent
        name = package.name if folder == package else folder.relative_to(package)
        lines += [f"## `{name}/`", "", f"{said_in(init)}.", "", "| | |", "| --- | --- |"]
        modules = sorted(set(folder.glob("*.py")) - {init})
        for path in (*modules, *sorted(folder.glob("kernels/*.[ch]"))):
            said = said_in(path).replace("|", r"\|")
            lines.append(f"| `{path.relative_to(package)}` | {said} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    made = page(PACKAGE)
    if check and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made):
        print(f"{PAGE} is an older one: run {sys.argv[0]}", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
