# SPDX-License-Identifier: Apache-2.0
"""An arena is pinned as it is populated: pinning allocates, and other engines may need the
memory."""

from contextlib import closing

import pytest

from omni_connector.arena.arena import Arena
from omni_connector.arena.format import PAGE_BYTES
from omni_connector.arena.size import ArenaSizing
from omni_connector.runtime.context import EngineContext
from omni_connector.transports.choice import Transports
from omni_connector.vllm_v1 import rank_arena
from omni_connector.vllm_v1.rank_arena import ArenaPlan

from ..kv.shapes import group_shape

pytestmark = pytest.mark.vllm

SLOTS = 8


class Pins:
    """Notes the end of the slots that it was told of, call by call; see `Pins`."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def follow(self, slots):
        assert len(slots) == SLOTS
        return self

    def populated(self, end) -> None:
        self.ends.append(end)


@pytest.mark.parametrize(("prefault", "at_once"), [(True, []), (False, [SLOTS])])
def test_an_arena_is_pinned_by_the_slots_that_are_populated(monkeypatch, prefault, at_once):
    create = Arena.create
    told = []

    def never_populated(*size, prefault, populated, **options):
        told.append(populated)
        return create(*size, **options)

    monkeypatch.setattr(rank_arena.Arena, "create", never_populated)
    plan = ArenaPlan(
        sizing=ArenaSizing(SLOTS * PAGE_BYTES, cache_blocks=SLOTS, max_tokens=16),
        name="arena:pinned:0",
        transports=Transports((), ()),
        rank=0,
        ranks=1,
        near_ranks=1,
        divides=True,
        context=EngineContext(),
        prefault=prefault,
    )
    pins = Pins()
    with closing(plan.open(PAGE_BYTES, (group_shape(block_size=16),), pins, frozenset())) as opened:
        assert pins.ends == at_once
        told[0](opened.arena.slots, 3)
        assert pins.ends == [*at_once, 3]
