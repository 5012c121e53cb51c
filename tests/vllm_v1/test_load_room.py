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

pytestmark = pytest.mark.vllm


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
