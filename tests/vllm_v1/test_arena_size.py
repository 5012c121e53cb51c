# SPDX-License-Identifier: Apache-2.0
"""The arena of an engine whose configuration does not say how large it is."""

import pytest

from omni_connector.arena import size as arena_size
from omni_connector.arena.size import ArenaSize
from omni_connector.errors import ConfigError
from tests import inspection
from tests.toy import BLOCK

from ..kv.shapes import group_shape
from .harness import HANDOFF, assert_clean, prompt

pytestmark = pytest.mark.vllm

DERIVED = {"arena_gib": None}
LONGEST = 4096 // BLOCK  # blocks


@pytest.fixture
def memory(monkeypatch):
    """Sets how much there is."""

    def there_is(available: int) -> None:
        monkeypatch.setattr(arena_size, "unclaimed_bytes", lambda deployment: available)

    return there_is


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_and_kv_cache_say_how_large_it_is(engine, memory, ranks, tokens):
    memory(1 << 40)
    prefill, decode = (
        engine("kv_producer", extra=DERIVED, ranks=ranks),
        engine("kv_consumer", ranks=ranks),
    )
    assert prefill.directory.num_slots == 2 * 65
    text = prompt(6 * BLOCK - 3)
    answer = prefill.generate(text, params=HANDOFF).params
    assert decode.generate(text, 6, params=answer).tokens == tokens(text, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_what_there_is(engine, memory, log, ranks):
    given = engine("kv_producer", ranks=ranks)
    slot_bytes = inspection.arena(given.worker_half).slots.shape[1]
    caches = ranks * sum(tensor.size for tensor in given.kv_config.kv_cache_tensors)
    memory(caches + 4 * ranks * 50 * slot_bytes)  # a quarter: 50 blocks for each
    assert not log
    assert engine("kv_producer", extra=DERIVED, ranks=ranks).directory.num_slots == 50
    assert sum(f"take {LONGEST} slots, the arena has 50" in line for line in log) == ranks


def test_without_memory_for_a_single_block_it_does_not_start(engine, memory):
    memory(4096)
    with pytest.raises(ConfigError, match="set arena_gib"):
        engine("kv_producer", extra=DERIVED)


@pytest.mark.parametrize(
    ("given", "slots", "warned"), [(None, 3, True), (None, 4, False), (1 << 20, 3, False)]
)
def test_of_long_prompts_without_room_it_warns_unless_the_user_has_set_the_size(
    log, given, slots, warned
):
    arena = arena_size.ArenaSizing(given, cache_blocks=9, max_tokens=4 * BLOCK)
    groups = (group_shape(block_size=BLOCK),)
    arena.tell(0, 1, ArenaSize(slots, "memory"), 4096, groups)
    assert any("longest prompts" in line for line in log) == warned
