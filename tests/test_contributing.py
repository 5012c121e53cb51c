# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md: its walks are ways through the code that is there, and tests keep its rules."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WALKS = {
    title: re.findall(r"^\|[^|]*\| `([\w.]+)` \|$", body, re.MULTILINE)
    for title, body in re.findall(
        r"^\*\*([^*]+)\*\*(.*?)(?=^\*\*|\Z)", TEXT, re.MULTILINE | re.DOTALL
    )
}


def test_the_walks_have_these_lengths() -> None:
    assert [len(steps) for steps in WALKS.values()] == [9, 14, 11, 17, 8, 6, 8]


@pytest.mark.parametrize("title", [title for title in WALKS if title.startswith("An object")])
def test_an_object_passes_few_modules(title: str) -> None:
    assert len({tuple(step.split(".")[:2]) for step in WALKS[title]}) <= 7


@pytest.mark.vllm
def test_each_step_is_there() -> None:
    pytest.importorskip("vllm")
    for step in [step for steps in WALKS.values() for step in steps]:
        assert callable(pkgutil.resolve_name(f"omni_connector.{step}")), step


def test_folders_that_are_named_are_there() -> None:
    for folder in re.findall(r"`((?:tests|omni_connector)/[\w/.]+)`", TEXT):
        assert (ROOT / folder).exists(), folder


def test_only_one_module_looks_into_the_halves_of_a_connector() -> None:
    """Tests ask `tests.inspection` instead, so that a private name stands in one place."""
    private = re.compile(
        r"\b(?:half|_worker|_scheduler|halves\[\d+\])\._|inspection\.\w+\([\w.]*\)\._"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "tests").rglob("*.py")
        if path not in (ROOT / "tests" / "inspection.py", Path(__file__))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert not found
    assert private.search("engine.half._shared.saves")


def test_tests_of_engines_are_where_make_test_looks_for_them() -> None:
    script = (ROOT / "scripts" / "run_tests.sh").read_text(encoding="utf-8")
    [folders] = re.findall(r"^engines=\((tests/.+)\)$", script, re.MULTILINE)
    mark = re.compile(r"\bmark\.(?:e2e|beside)\b")
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__) and mark.search(path.read_text(encoding="utf-8"))
    ]
    assert found
    assert not [name for name in found if not name.startswith(tuple(folders.split()))]
