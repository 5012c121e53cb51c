# SPDX-License-Identifier: Apache-2.0
"""Asks tests and simulation about a sample of mutants that a library makes.

python -m benchmarks.mutants_sample measure     which tests and seeds execute which line
python -m benchmarks.mutants_sample ask         asks about those not yet asked about
python -m benchmarks.mutants_sample list        the survivors, as entries of reasons.toml
python -m benchmarks.mutants_sample table       writes benchmarks/results/mutants_sample.md

What was measured and answered is kept in `.mutants`, so that a run that was stopped goes on. An
answer holds as long as the mutant's module stays as it is; after that the test that found the
mutant is asked first.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Final

from benchmarks.mutants_sample.answers import Kept, changes, told
from benchmarks.mutants_sample.campaign import ask_about
from benchmarks.mutants_sample.making import KINDS, RULES, Mutation, sample
from benchmarks.mutants_sample.measuring import (
    FOLDER_VARIABLE,
    NAME_VARIABLE,
    ROOT,
    SUBJECTS,
)

SEED: Final = 25
NUMBER: Final = 300
TABLE: Final = ROOT / "benchmarks" / "results" / "mutants_sample.md"
REASONS: Final = Path(__file__).with_name("reasons.toml")

_PARTS: Final = ("path", "function", "text", "operator", "number")
"""Of a mutant's identity."""

_HEAD: Final = "| mutant | where | change | found by |\n|---|---|---|---|"
_TESTS: Final = (
    "tests",
    "--ignore=tests/e2e",
    "--ignore=tests/simulation",  # it is asked by itself
    "--ignore=tests/hostile",
    "-m",
    "not e2e and not beside",
)


def main() -> int:
    """Run a part of the work; 1 when more than 3 % survive without a reason."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutants_sample", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("part", nargs="+", choices=("measure", "ask", "list", "table"))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--number", type=int, default=NUMBER, help="of mutants")
    parser.add_argument("--first", type=int, help="ask only about the first ones of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are asked about at once")
    parser.add_argument("--tests", nargs="+", help="measure only these, beside what was measured")
    parser.add_argument("--seeds", type=int, default=300, help="of the simulation, measured")
    parser.add_argument("--most-seeds", type=int, default=200, help="of the simulation, a mutant")
    parser.add_argument("--most-s", type=float, default=60.0, help="of tests, a mutant")
    parser.add_argument("--again", action="store_true", help="ask about survivors again")
    parser.add_argument("--rounds", type=int, default=3, help="1: only the nearest tests")
    parser.add_argument("--only", default="", help="a part of a path, or the number of a mutant")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    if "measure" in options.part:
        measure(options)
    if options.part == ["measure"]:
        return 0
    chosen, of = sample(options.seed, options.number, options.folder)
    kept = Kept(options.folder / f"answers-{options.seed}.jsonl")
    if "ask" in options.part:
        wanted = [
            (number, mutation)
            for number, mutation in enumerate(chosen[: options.first], start=1)
            if options.only in mutation.path or options.only == str(number)
            if options.again or not kept.holds(mutation)
            if not (kept.found(mutation) and kept.holds(mutation))
        ]
        ask_about(wanted, kept, options)
    if "list" in options.part:
        why = reasons()
        for number, mutation in enumerate(chosen, start=1):
            if kept.answered(mutation) and not kept.found(mutation):
                print(f"# {number}. {told(mutation)}".replace("\n", "\n# "))
                print(entry(mutation, why.get(mutation.identity, "")))
    unexplained = 0
    if "table" in options.part:
        text, unexplained = table(chosen, of, kept, options)
        TABLE.write_text(text, encoding="utf-8")
    return 1 if unexplained > 0.03 * len(chosen) else 0


def measure(options: argparse.Namespace) -> None:
    """Have tests and seeds traced, in processes of their own."""
    environment = {**os.environ, FOLDER_VARIABLE: str(options.folder.resolve())}
    tests: tuple[str, ...] = _TESTS
    if options.tests:
        tests = tuple(options.tests)
        environment[NAME_VARIABLE] = f"tests-{len(list(options.folder.glob('tests-*.json')))}"
    plugin = "benchmarks.mutants_sample.measuring"
    words = ["-p", plugin, "-p", "no:cacheprovider", "--hypothesis-seed=0", "-q", *tests]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, check=False)
    if options.tests:
        return
    words = ["-m", plugin, f"0:{options.seeds}"]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)


def reasons() -> dict[str, str]:
    """Why survivors change nothing, by their identities."""
    if not REASONS.exists():
        return {}
    entries = tomllib.loads(REASONS.read_text(encoding="utf-8")).get("survivor", [])
    return {"\n".join(str(each[part]) for part in _PARTS): each["why"] for each in entries}


def entry(mutation: Mutation, why: str) -> str:
    """What `reasons.toml` says of a survivor."""
    lines = ["[[survivor]]"]
    for part in _PARTS:
        lines.append(f"{part} = {json.dumps(getattr(mutation, part), ensure_ascii=False)}")
    lines.append(f"why = {json.dumps(why, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def table(
    chosen: list[Mutation], of: int, kept: Kept, options: argparse.Namespace
) -> tuple[str, int]:
    """The report, and how many survive without a reason."""
    why = reasons()
    asked = [mutation for mutation in chosen if kept.answered(mutation)]
    alive = [mutation for mutation in asked if not kept.found(mutation)]
    explained = [mutation for mutation in alive if mutation.identity in why]
    left = len(alive) - len(explained)
    layers = Counter(_layer(kept.found(mutation) or "") for mutation in asked)
    lines = [
        "# Mutants nobody chose",
        "",
        f"Of {of} one-line mutants in {', '.join(f'`{each}`' for each in SUBJECTS)} that mutmut's "
        f"operators make, and two that it lacks (a statement dropped, arguments swapped), "
        f"{len(chosen)} were drawn with seed {options.seed}, as many of each kind. Asked were "
        f"{len(asked)}: {len(asked) - len(alive)} were found, {len(explained)} survive with a "
        f"reason, {left} without ({left / max(1, len(asked)):.1%}; at most 3 %).",
        "",
        "Found by "
        + ", ".join(f"{layer}: {n}" for layer, n in layers.most_common() if layer)
        + ".",
        "",
        "Not mutated, by rule:",
        "",
        *(f"- {rule}" for rule in RULES),
        "",
        "Tests of engines (`tests/e2e`) are not asked. `make mutants-sample` repeats this "
        "([CONTRIBUTING](../../CONTRIBUTING.md)).",
        "",
        "| kind | asked | found | with a reason | without |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [mutation for mutation in asked if mutation.kind == kind]
        living = [mutation for mutation in of_kind if mutation in alive]
        reasoned = [mutation for mutation in living if mutation in explained]
        lines.append(
            f"| {kind} | {len(of_kind)} | {len(of_kind) - len(living)} | {len(reasoned)} "
            f"| {len(living) - len(reasoned)} |"
        )
    lines += ["", "## Survivors", "", "| mutant | where | change | why it changes nothing |"]
    lines.append("|---|---|---|---|")
    for number, mutation in enumerate(chosen, start=1):
        if mutation in alive:
            reason = why.get(mutation.identity, "**no reason**")
            lines.append(f"| {number} | {_where(mutation)} | {_change(mutation)} | {reason} |")
    lines += ["", "## Found", "", _HEAD]
    for number, mutation in enumerate(chosen, start=1):
        found = kept.found(mutation)
        if found:
            lines.append(
                f"| {number} | {_where(mutation)} | {_change(mutation)} | {_cell(found)} |"
            )
    return "\n".join(lines) + "\n", left


def _layer(found: str) -> str:
    if not found:
        return ""
    if found.startswith(("seed ", "the simulation")):
        return "simulation"
    if found.startswith("tests/vllm_v1/"):
        return "halves"
    return "units" if found.startswith("tests/") else "the import"


def _where(mutation: Mutation) -> str:
    return f"`{mutation.path}` {_code(mutation.function) if mutation.function else 'at import'}"


def _change(mutation: Mutation) -> str:
    lines = list(changes(mutation))
    gone = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    come = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return f"{_code(gone)} → {_code(come)}" if come else f"{_code(gone)} dropped"


def _code(text: str) -> str:
    text = text if len(text) <= 140 else text[:137] + "..."
    return f"`` {text} ``".replace("|", "\\|") if "`" in text else f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:140]
