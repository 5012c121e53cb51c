# SPDX-License-Identifier: Apache-2.0
"""What a change costs: a benchmark here and at another commit, in turns.

    python benchmarks/paired.py [--rounds 5] [--differ 5 | --columns] objects HEAD~1 [-- ARGUMENTS]

Runs benchmarks/objects.py of this checkout and of a temporary one of that commit, by default with
`--quick`, and swaps their order in each round, so that both meet the same machine. For every number
of their tables it prints the medians of both, and the median, lowest and highest of the rounds'
ratios, here by there; with `--columns` these of the mean of a column. Nothing is written to
results/; results/paired.md is put together by hand from what was printed.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")

Row = tuple[str, str, str]
"""(heading above the table, the row's label, the column's name)."""


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A working tree of a commit, removed in the end."""
    with tempfile.TemporaryDirectory(prefix="omni-paired-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def run(tree: Path, name: str, arguments: list[str]) -> dict[Row, float]:
    """The numbers that a tree's benchmark tells of that tree's package."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    where = [sys.executable, "-c", "import omni_connector; print(omni_connector.__file__)"]
    package = subprocess.check_output(where, env=environment, cwd=tree, text=True).strip()
    if not Path(package).is_relative_to(tree):
        raise SystemExit(f"{package} would be measured in place of the package in {tree}")
    with tempfile.TemporaryDirectory(prefix="omni-paired-") as folder:
        script = tree / "benchmarks" / f"{name}.py"
        command = [sys.executable, str(script), "--output", folder, *arguments]
        done = subprocess.run(
            command, env=environment, cwd=tree, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        found: dict[Row, float] = {}
        for page in sorted(Path(folder).glob("*.md")):
            found |= numbers(page.read_text(encoding="utf-8"))
        return found


def numbers(page: str) -> dict[Row, float]:
    """The numbers in the tables of a Markdown page.

    A row's label is its first cell, and as many of the next ones as tell it from the others.
    Numbers in brackets are those of the column's name with brackets.
    """
    found: dict[Row, float] = {}
    heading, tables = "", 0
    for part in re.split(r"\n(?:[ \t]*\n)+", page):
        lines = part.strip().splitlines()
        if lines and lines[0].startswith("#"):
            heading, tables = lines[0].lstrip("# "), 0
        if len(lines) < 3 or not lines[0].startswith("|"):
            continue
        tables += 1
        title = heading if tables == 1 else f"{heading} ({tables})"
        names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        width = next(
            (n for n in range(1, len(names)) if len({tuple(row[:n]) for row in rows}) == len(rows)),
            1,
        )
        for row in rows:
            label = ", ".join(row[:width])
            for place, cell in enumerate(row[width:], width):
                for count, number in enumerate(_NUMBER.findall(cell)):
                    column = f"({names[place]})" if count else names[place]
                    while (title, label, column) in found:  # two columns of one name
                        column += "'"
                    found[title, label, column] = float(number)
    return found


def table(here: list[dict[Row, float]], there: list[dict[Row, float]], differ: float) -> str:
    """The rows that both have, without numbers that are settings and never change."""
    lines = [
        "| table | row | column | there | here | here / there | lowest | highest |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    common = set.intersection(*(set(each) for each in (*here, *there)))
    for row in (each for each in here[0] if each in common):
        ours, theirs = [each[row] for each in here], [each[row] for each in there]
        if len({*ours, *theirs}) == 1 or 0.0 in theirs:
            continue
        ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
        middle = statistics.median(ratios)
        if abs(middle - 1) * 100 < differ:
            continue
        medians = f"{statistics.median(theirs):g} | {statistics.median(ours):g}"
        spread = f"{middle:.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f}"
        lines.append(f"| {' | '.join(row)} | {medians} | {spread} |")
    return "\n".join(lines)


def columns(here: list[dict[Row, float]], there: list[dict[Row, float]]) -> str:
    """For each column the geometric mean of its rows' ratios: the median of the rounds, the lowest
    and the highest. Columns that never change are settings, and are left out."""
    common = set.intersection(*(set(each) for each in (*here, *there)))
    ratios: dict[tuple[str, str], list[list[float]]] = {}
    for row in (each for each in here[0] if each in common):
        ours, theirs = [each[row] for each in here], [each[row] for each in there]
        if len({*ours, *theirs}) == 1 or min(*ours, *theirs) <= 0.0:
            continue
        pairs = [one / other for one, other in zip(ours, theirs, strict=True)]
        ratios.setdefault((row[0], row[2]), []).append(pairs)
    lines = [
        "| table | column | figures | here / there | lowest | highest |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (table, column), rows in ratios.items():
        means = sorted(map(statistics.geometric_mean, zip(*rows, strict=True)))
        spread = f"{statistics.median(means):.2f} | {means[0]:.2f} | {means[-1]:.2f}"
        lines.append(f"| {table} | {column} | {len(rows)} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benchmark", help="such as objects: a module of this folder")
    parser.add_argument("commit", help="that this checkout is compared with")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument(
        "--differ", type=float, default=0.0, help="leave out what differs by less, in percent"
    )
    parser.add_argument(
        "--columns", action="store_true", help="one line a column: the mean of its rows' ratios"
    )
    parser.add_argument("arguments", nargs="*", help="of the benchmark, behind --")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    given = arguments.arguments or ["--quick"]
    here: list[dict[Row, float]] = []
    there: list[dict[Row, float]] = []
    with checkout(arguments.commit) as tree:
        for number in range(arguments.rounds):
            sides = [(ROOT, here), (tree, there)]
            for side, found in sides if number % 2 else reversed(sides):
                found.append(run(side, arguments.benchmark, given))
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    print(columns(here, there) if arguments.columns else table(here, there, arguments.differ))


if __name__ == "__main__":
    main()
