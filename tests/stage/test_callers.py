# SPDX-License-Identifier: Apache-2.0
"""Each public member of the manager has a caller, which the page names."""

import re
from pathlib import Path

from omni_connector.stage import OmniKVCacheConfig, OmniKVTransferManager

PAGE = Path(__file__).parents[2] / "docs" / "stage.md"


def _callers() -> dict[str, str]:
    """Who calls each member, by the page."""
    text = PAGE.read_text(encoding="utf-8").partition("| member | caller |")[2]
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", text.partition("\n\n")[0], re.MULTILINE)
    return {member: caller for names, caller in rows for member in re.findall(r"`(\w+)`", names)}


def test_the_page_names_all_public_members_and_no_others() -> None:
    kv = OmniKVTransferManager(OmniKVCacheConfig())
    there = {name for name in {*dir(kv), *vars(kv)} if not name.startswith("_")}
    assert there == {name for name in _callers() if not name.startswith("_")}


def test_the_files_of_the_wheel_call_what_the_page_says(vllm_omni: Path) -> None:
    missed = []
    for member, caller in _callers().items():
        if caller.endswith(".py"):
            source = (vllm_omni / "vllm_omni" / caller).read_text(encoding="utf-8")
            # As an attribute, or by its name for `getattr`.
            if not re.search(rf"""[.\"]{member}\b""", source):
                missed.append(member)
    assert not missed
