# SPDX-License-Identifier: Apache-2.0
"""200 schedules: half of them are the same each time, and half are new with each commit."""

from collections.abc import Mapping

import pytest

from .beside import SEEDS, Run

pytestmark = [pytest.mark.vllm, pytest.mark.beside, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("half", ["known", "new"])
def test_all_holds(campaigns: Mapping[str, Run], half: str) -> None:
    run = campaigns[half]
    story = run.finish()
    assert f"{SEEDS} schedules, seeds {run.seeds}: 0 failed" in story
    print(story.splitlines()[-1])
