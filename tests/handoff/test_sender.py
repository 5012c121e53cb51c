# SPDX-License-Identifier: Apache-2.0
"""Which hand-offs get the room that there is in the arena, and how often it is looked for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.handoff.prompt import Prompt, PromptRules
from omni_connector.handoff.sender import HandoffSender
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock

WAIT_S = 10.0


class Directory:
    """Has room, or none."""

    def __init__(self) -> None:
        self.pool = SimpleNamespace(releases=0)
        self.room = 0
        self.looks = 0

    def open(self, prompt: Prompt, *_: object) -> Any:
        self.looks += 1
        if prompt.num_tokens > self.room:
            return None
        self.room -= prompt.num_tokens
        return object()


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def sender(
    directory: Directory, compatibility: CompatibilityKey, clock: FakeClock
) -> HandoffSender:
    parts: Any = {"directory": directory, "ledger": None}
    return HandoffSender(
        **parts,
        rules=PromptRules(lambda *_: None),
        alone=True,
        ended=lambda: False,
        compatibility=compatibility,
        group_ids=(0, 1),
        engine_id="p",
        epoch=b"e" * 16,
        address=None,
        arena_wait=WAIT_S,
        context=EngineContext(clock),
        on_complete=lambda: None,
    )


@pytest.fixture
def waiting(sender: HandoffSender, make_prompt: Callable[..., Prompt]) -> dict[str, Any]:
    """What found no room, by the request's id, the first of it the largest."""
    sends: dict[str, Any] = {}
    for name, length in (("large", 100), ("small", 20), ("smaller", 10)):
        request: Any = SimpleNamespace(
            request_id=name, status=SimpleNamespace(name="FINISHED_ABORTED")
        )
        sends[name] = sender.add(request, make_prompt(length))
        assert not sender.may_schedule(sends[name])
    return sends


def test_room_is_looked_for_only_when_there_may_be_more(
    sender: HandoffSender, directory: Directory, waiting: dict[str, Any], clock: FakeClock
) -> None:
    """vLLM asks for each request that waits, in each step."""
    assert directory.looks == 1
    directory.pool.releases += 1
    directory.room = 50  # too little for the first, whom nobody overtakes
    for _ in range(10):
        assert not any(map(sender.may_schedule, waiting.values()))
        clock.advance(0.01)
    assert directory.looks == 2
    directory.pool.releases += 1
    directory.room = 100
    assert sender.may_schedule(waiting["large"])
    assert not any(sender.may_schedule(waiting[name]) for name in ("small", "smaller"))
    assert directory.looks == 4  # with whom is the first now
    clock.advance(WAIT_S)
    assert all(map(sender.may_schedule, waiting.values()))  # without a hand-off
