# SPDX-License-Identifier: Apache-2.0
"""KV pools that loads would fill to the last block: their requests find blocks to go on."""

from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.prefix.hints import Hints
from omni_connector.requests.state import RequestState
from omni_connector.vllm_v1.load_room import LoadRoom
from tests.kv.shapes import group_shape
from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, prompt, run

pytestmark = pytest.mark.vllm


def handed_off(prefill, lengths):
    """Prompts of these lengths that were prefilled, with the params for a decode engine."""
    asked = [prompt(length, seed=seed) for seed, length in enumerate(lengths)]
    return [(each, prefill.generate(each, params=HANDOFF).params) for each in asked]


LOADED = {"full": 8, "window and full": 11, "all three": 12}
"""Blocks of all groups that a load of eight blocks' tokens takes."""


@pytest.mark.parametrize("family", LOADED)
@pytest.mark.parametrize("spare", range(5))
@pytest.mark.values
def test_prompts_whose_kv_fills_all_blocks_are_decoded(engine, family, spare):
    """The next token of each needs a block more in each group."""
    length = 8 * BLOCK + 1
    prefill = engine("kv_producer", family=family)
    usable = 2 * LOADED[family] + spare
    decode = engine(
        "kv_consumer", family=family, usable_blocks=usable, max_tokens_a_step=BLOCK, policy="fail"
    )
    handed = handed_off(prefill, [length] * 4)
    ids = [decode.submit(asked, max_tokens=3, params=params) for asked, params in handed]
    run([prefill, decode], lambda: decode.done(*ids))
    reference = engine(family=family)
    for request_id, (asked, _) in zip(ids, handed, strict=True):
        assert decode.answers[request_id].tokens == reference.generate(asked, 3).tokens
    assert decode.stats.data["counts"]["handoffs_received"] > 1
    decode.settle()
    prefill.settle()
    assert_clean(prefill, decode)


@pytest.mark.parametrize("spare", range(4, 10))
def test_the_request_of_a_load_that_fails_finds_the_blocks_to_be_computed(engine, spare):
    """It takes nine blocks in each of the two groups, more than the load's eleven, and vLLM lets
    nobody pass it."""
    length = 8 * BLOCK + 1
    prefill = engine("kv_producer", family="window and full")
    usable = 2 * LOADED["window and full"] + spare
    decode = engine("kv_consumer", family="window and full", usable_blocks=usable)
    handed = handed_off(prefill, [length] * 3)
    prefill.arena().slots[prefill.handoffs[0].slots[0][0]][0] ^= 0x01
    ids = [decode.submit(asked, max_tokens=3, params=params) for asked, params in handed]
    run([prefill, decode], lambda: decode.done(*ids))
    reference = engine(family="window and full")
    for request_id, (asked, _) in zip(ids, handed, strict=True):
        assert decode.answers[request_id].tokens == reference.generate(asked, 3).tokens
    assert decode.failures() == {"checksum_mismatch": 1}
    assert decode.count("handoffs_received") == 2
    decode.settle()
    prefill.settle()
    assert_clean(prefill, decode)


def request(request_id: str, blocks: int) -> RequestState:
    """One whose prompt has so many full blocks, and one token more."""
    asked = SimpleNamespace(request_id=request_id, num_tokens=blocks * BLOCK + 1)
    return RequestState(asked, Hints())


@pytest.mark.parametrize("large_goes", ["it is loaded", "it is over"])
def test_no_load_overtakes_one_that_waits_for_room(large_goes: str) -> None:
    """Else small ones could keep a large one waiting for ever."""
    pool: Any = SimpleNamespace(hash_block_size=BLOCK, get_num_free_blocks=lambda: free)
    room = LoadRoom(pool, (group_shape(block_size=BLOCK),), [None], 0)
    under_way, large, small = request("under way", 4), request("large", 8), request("small", 1)

    def admits(each: RequestState) -> bool:
        return room.admits(each, 0, each.request.num_tokens - 1)

    free = 10
    assert admits(under_way)
    room.begins(under_way)
    free = 6
    assert not admits(large)
    assert not admits(small)
    if large_goes == "it is over":
        room.ends(large)
    else:
        free = 20
        assert admits(large)
        room.begins(large)
        free = 12
    assert admits(small)
