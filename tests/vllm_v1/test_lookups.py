# SPDX-License-Identifier: Apache-2.0
"""Questions to the store, and what is made of the answers."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.kv.shapes import GroupShape
from omni_connector.prefix import lookups
from omni_connector.prefix.lookups import Held, Lookup, StoreLookups
from omni_connector.runtime.context import PROCESS_CONTEXT, EngineContext
from omni_connector.stores.shared_blocks import block_key
from omni_connector.testing import FakeClock
from tests.simulation.surroundings.memory import SimulatedStore

from .harness import wait
from .stores import SwitchedShelf

FULL = GroupShape(
    kind="full_attention", block_size=16, attention_type="all", layers="x", pages=("p",)
)
WINDOW = GroupShape(
    kind="sliding_window",
    block_size=16,
    attention_type="window",
    window=40,
    layers="x",
    pages=("p",),
)
LATENT = GroupShape(
    kind="mla_attention",
    block_size=16,
    attention_type="all",
    layers="x",
    replicated=True,
    pages=("p",),
)


@pytest.fixture
def made() -> Iterator[list[StoreLookups]]:
    """Lookups of the test, closed at its end."""
    made: list[StoreLookups] = []
    yield made
    for each in made:
        each.close()


def names(count: int) -> list[bytes]:
    return [bytes([i // 256, i % 256]) for i in range(count)]


def ask(asked: StoreLookups, hashes: list[list[bytes]], seconds: float = 20.0) -> Lookup:
    lookup = Lookup("p", hashes, time.monotonic() + seconds)
    asked.ask(lookup)
    wait(lambda: lookup.held is not None)
    return lookup


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 45), st.integers(0, 45))
def test_runs_and_gaps_say_what_the_blocks_say(blocks: list[bool], start: int, stop: int) -> None:
    held = Held.of(blocks)
    has = held.has(np.array([start]), np.array([stop]))
    assert has.tolist() == [all(i < len(blocks) and blocks[i] for i in range(start, stop))]
    reach = held.reach(start)
    assert reach >= start
    assert all(blocks[i] for i in range(start, reach))
    assert reach >= len(blocks) or not blocks[reach]


def test_a_block_is_held_when_all_ranks_have_it(made: list[StoreLookups]) -> None:
    shelf, hashes = SwitchedShelf(), names(3)
    for rank, i in ((0, 0), (1, 0), (0, 1), (1, 2)):
        shelf.entries[block_key("p", 0, rank, hashes[i])] = b""
    shelf.entries[block_key("p", 1, 0, hashes[2])] = b""
    made.append(StoreLookups(shelf.connect(), [[FULL, LATENT]], 2, PROCESS_CONTEXT))
    lookup = ask(made[0], [hashes, hashes])
    assert [held.blocks for held in lookup.held] == [[True, False, False], [False, False, True]]


@pytest.mark.parametrize(("groups", "asked"), [(1, 0), (10, 3)])
def test_long_prompts_are_asked_for_in_parts_up_to_the_first_gap(
    made: list[StoreLookups], monkeypatch: pytest.MonkeyPatch, groups: int, asked: int
) -> None:
    monkeypatch.setattr(lookups, "_MAX_KEYS", 10)
    shelf, hashes = SwitchedShelf(), names(40)
    shelf.entries = {block_key("p", asked, 0, each): b"" for each in hashes if each != hashes[12]}
    made.append(StoreLookups(shelf.connect(), [[FULL] * groups], 1, PROCESS_CONTEXT))
    held = ask(made[0], [hashes if g == asked else [] for g in range(groups)]).held
    assert len(shelf.asked) == 20  # the other groups make no part smaller
    assert [each.reach(0) for each in held] == [12 if g == asked else 0 for g in range(groups)]
    assert (held[asked].reach(13), held[asked].misses) == (20, [12])


def test_before_a_window_there_may_be_gaps(
    made: list[StoreLookups], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "_MAX_KEYS", 10)
    shelf, hashes = SwitchedShelf(), names(30)
    shelf.entries = {block_key("p", 0, 0, each): b"" for each in hashes[27:]}
    made.append(StoreLookups(shelf.connect(), [[WINDOW]], 1, PROCESS_CONTEXT))
    assert ask(made[0], [hashes]).held[0].runs[29] == 3


def test_groups_of_other_block_sizes_are_asked_for_together(made: list[StoreLookups]) -> None:
    shelf, hashes = SwitchedShelf(), names(8)
    shelf.entries = {block_key("p", 0, 0, each): b"" for each in hashes}
    shelf.entries |= {block_key("p", 1, 0, each): b"" for each in hashes[1::2]}
    made.append(StoreLookups(shelf.connect(), [[FULL, WINDOW]], 1, PROCESS_CONTEXT))
    lookup = ask(made[0], [hashes, hashes[1::2]])
    assert [len(held.blocks) for held in lookup.held] == [8, 4]
    assert not any(held.misses.size for held in lookup.held)


def test_what_is_distrusted_is_not_held(made: list[StoreLookups]) -> None:
    shelf, hashes = SwitchedShelf(), names(3)
    shelf.entries = {block_key("p", 0, 0, each): b"" for each in hashes}
    made.append(StoreLookups(shelf.connect(), [[FULL]], 1, PROCESS_CONTEXT))
    made[0].distrust([(0, hashes[1])])
    assert ask(made[0], [hashes]).held[0].blocks == [True, False, True]


def test_a_late_answer_is_none(made: list[StoreLookups]) -> None:
    shelf = SwitchedShelf()
    shelf.stalled = True
    made.append(StoreLookups(shelf.connect(), [[FULL]], 1, PROCESS_CONTEXT))
    late = Lookup("p", [names(2)], time.monotonic() + 0.05)
    gone = Lookup("p", [names(2)], time.monotonic())
    made[0].ask(late)
    made[0].ask(gone)
    wait(lambda: time.monotonic() > late.deadline)
    shelf.stalled = False
    assert ask(made[0], [names(1)]).held is not None
    assert late.held is gone.held is None


class Slow(SimulatedStore):
    """Has half of the answers when its time is over."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(SwitchedShelf())
        self._clock = clock

    def exists(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        self._clock.advance(timeout)
        return [i < len(keys) // 2 for i in range(len(keys))]


def test_what_a_slow_store_has_answered_in_time_is_used(made: list[StoreLookups]) -> None:
    clock = FakeClock()
    made.append(StoreLookups(Slow(clock), [[FULL]], 1, EngineContext(clock)))
    lookup = Lookup("p", [names(8)], clock() + 2.0)
    made[0].ask(lookup)
    wait(lambda: lookup.held is not None)
    assert clock() < lookup.deadline
    assert lookup.held[0].reach(0) == 4


def test_a_question_that_cannot_be_asked_stops_no_other(
    made: list[StoreLookups], log: list[str]
) -> None:
    shelf = SwitchedShelf()
    store = shelf.connect()
    made.append(StoreLookups(store, [[FULL]], 1, PROCESS_CONTEXT))
    made[0].ask(Lookup("p", [[None]], time.monotonic() + 20))  # type: ignore[list-item]
    assert ask(made[0], [names(1)]).held[0].blocks == [False]
    assert any("lookup" in line for line in log)
