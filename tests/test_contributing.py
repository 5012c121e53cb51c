# SPDX-License-Identifier: Apache-2.0
"""The walks of CONTRIBUTING.md are ways through the code that is there."""

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
@pytest.mark.parametrize("step", [step for steps in WALKS.values() for step in steps])
def test_each_step_is_there(step: str) -> None:
    pytest.importorskip("vllm")
    assert callable(pkgutil.resolve_name(f"omni_connector.{step}"))


def test_folders_that_are_named_are_there() -> None:
    for folder in re.findall(r"`((?:tests|omni_connector)/[\w/.]+)`", TEXT):
        assert (ROOT / folder).exists(), folder
