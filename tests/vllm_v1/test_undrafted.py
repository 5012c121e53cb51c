# SPDX-License-Identifier: Apache-2.0
"""Which blocks lack the drafter's KV, to the last one."""

from dataclasses import dataclass

import pytest

pytest.importorskip("vllm")

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from omni_connector.vllm_v1.undrafted import DraftedGroup, UndraftedBlocks

pytestmark = pytest.mark.vllm

SIZE = 16
GROUP = DraftedGroup(number=0, block_size=SIZE, hash_block_size=SIZE)


@dataclass
class Block:
    block_id: int
    block_hash: bytes | None
    is_null: bool = False


@dataclass
class Request:
    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0


def blocks(full: int, partial: bool) -> list[Block]:
    """Those of a request: full ones, which vLLM has hashed, and one that is not full."""
    hashed = [
        Block(index, make_block_hash_with_group_id(BlockHash(b"%d" % index), 0))
        for index in range(full)
    ]
    return [*hashed, Block(full, None)] if partial else hashed


@given(
    cached=st.integers(0, 3),
    loaded=st.integers(0, 3),
    computed=st.integers(0, 3),
    partial=st.booleans(),
    ended=st.booleans(),
    used_anew=st.booleans(),
)
def test_a_request_that_finds_any_block_without_the_drafter_s_kv_has_some(
    cached: int, loaded: int, computed: int, partial: bool, ended: bool, used_anew: bool
) -> None:
    """The first request has blocks in vLLM's cache, then loads some and computes more; the second
    finds the first blocks of these."""
    full = cached + loaded + computed
    table = blocks(full, partial)
    first = Request("first", [b"%d" % index for index in range(full)])
    known = UndraftedBlocks([GROUP])
    known.asked("first", cached * SIZE)
    assert known.loaded(first, [table], loaded * SIZE) == cached * SIZE
    assert known.has(first, lambda request_id: [table])
    if ended:
        known.finish(first, lambda request_id: [table])
        if used_anew and full:
            table[-1 - partial].block_hash = make_block_hash_with_group_id(BlockHash(b"other"), 0)
    for found in range(full + 1):
        name = f"finds {found}"
        second = Request(name, first.block_hashes[:found])
        known.asked(name, found * SIZE)
        lacking = range(cached, found)
        if ended and used_anew:
            lacking = range(cached, min(found, full - 1))
        assert known.has(second, lambda request_id: [table]) == bool(lacking)
        if lacking:
            known.finish(second, lambda request_id, found=found: [table[:found]])
