# SPDX-License-Identifier: Apache-2.0
"""What an engine does from time to time keeps nothing for ever."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.handoff.periodic_tasks import PeriodicTasks
from omni_connector.runtime.context import PROCESS_CONTEXT


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("handoffs", [0, 1])
def test_an_engine_rests_while_it_tells_nothing_new_and_hands_nothing_off(
    folder: Path, told: bool, handoffs: int
) -> None:
    directory: Any = SimpleNamespace(num_handoffs=handoffs, expire=lambda: 0)
    periodic_tasks = PeriodicTasks(folder, PROCESS_CONTEXT, directory, lambda: told)
    assert not periodic_tasks.rests
    periodic_tasks.tick()
    assert periodic_tasks.rests == (not told and not handoffs)


def test_a_step_of_an_engine_that_rests_has_it_look_sooner_once(folder: Path) -> None:
    stirred: list[None] = []
    channel: Any = SimpleNamespace(alive=True, stir=lambda: stirred.append(None))
    periodic_tasks = PeriodicTasks(folder, PROCESS_CONTEXT)
    periodic_tasks.channel = channel
    assert not periodic_tasks.ended()
    assert not stirred
    periodic_tasks.tick()
    for _ in range(3):
        assert not periodic_tasks.ended()
    assert len(stirred) == 1


def test_what_is_counted_while_nobody_looks_takes_no_more_room(folder: Path) -> None:
    periodic_tasks = PeriodicTasks(folder, PROCESS_CONTEXT)
    for _ in range(100_000):
        periodic_tasks.count("malformed_message")
    periodic_tasks.count("handoffs_expired", 3)
    periodic_tasks.count("handoffs_expired", 0)
    assert periodic_tasks.events == {"malformed_message": 100_000, "handoffs_expired": 3}
    assert periodic_tasks.take() == {"malformed_message": 100_000, "handoffs_expired": 3}
    assert periodic_tasks.take() == {}
