# SPDX-License-Identifier: Apache-2.0
"""Each public member of the manager, and of the connectors in vLLM-Omni, has a caller, which the
page names."""

import ast
import re
from pathlib import Path

import pytest

from omni_connector.stage import OmniKVCacheConfig, OmniKVTransferManager

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stage.md").read_text(encoding="utf-8")


def _callers(of: str) -> dict[str, str]:
    """Who calls each member, by the page's table of `of`."""
    table = PAGE.partition(f"| member of {of} | caller |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", table, re.MULTILINE)
    return {member: caller for names, caller in rows for member in re.findall(r"`(\w+)`", names)}


def _of_the_manager() -> set[str]:
    kv = OmniKVTransferManager(OmniKVCacheConfig())
    return {*dir(kv), *vars(kv)}


def _of_a_connector() -> set[str]:
    # Where vLLM-Omni is not, the module cannot be imported.
    tree = ast.parse((ROOT / "omni_connector" / "stage" / "vllm_omni.py").read_text())
    found: set[str] = set()
    for owner in (each for each in tree.body if isinstance(each, ast.ClassDef)):
        for node in ast.walk(owner):
            match node:
                case ast.FunctionDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
        for line in owner.body:
            if isinstance(line, ast.Assign):
                found |= {ast.unparse(each) for each in line.targets}
    return found


@pytest.mark.parametrize(
    ("of", "there"),
    [("the manager", _of_the_manager()), ("a connector", _of_a_connector())],
    ids=["manager", "connector"],
)
def test_the_page_names_all_public_members_and_no_others(of: str, there: set[str]) -> None:
    public = {name for name in there if not name.startswith("_")}
    assert public == {name for name in _callers(of) if not name.startswith("_")}


@pytest.mark.parametrize("of", ["the manager", "a connector"])
def test_the_files_of_the_wheel_call_what_the_page_says(vllm_omni: Path, of: str) -> None:
    missed = []
    for member, caller in _callers(of).items():
        if caller.endswith(".py"):
            source = (vllm_omni / "vllm_omni" / caller).read_text(encoding="utf-8")
            # As an attribute, or by its name for `getattr`.
            if not re.search(rf'(?i:manager|mgr|connector)(\.|, "){member}\b', source):
                missed.append(member)
    assert not missed
