# SPDX-License-Identifier: Apache-2.0
"""Names and form of entries: who reads them, and what is not taken for one."""

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.errors import ChecksumError
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.stores.shared_blocks import (
    TRAILER_BYTES,
    add_trailer,
    block_key,
    key_prefix,
    owning_rank,
    owning_ranks,
    readers_id,
    verify,
)

SHAPE = GroupShape(
    kind="full_attention", block_size=16, attention_type="all", layers="x", pages=("p",)
)
OURS = CompatibilityKey(
    model="m@1", dtype="a", kv_dtype="auto", integrity="full", kv_heads=2, ranks=1, groups=(SHAPE,)
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "m@2"),
        ("weights", "w"),
        ("dtype", "b"),
        ("kv_dtype", "fp8"),
        ("quantization", "fp8 x"),
        ("overrides", "x"),
        ("scales", "x"),
        ("numerics", "x"),
        ("kv_heads", 4),
        ("ranks", 2),
        ("groups", (msgspec.structs.replace(SHAPE, pages=("q",)),)),
        ("groups", (msgspec.structs.replace(SHAPE, attention="other"),)),
        ("groups", (msgspec.structs.replace(SHAPE, states="3x7 float16"),)),
        ("groups", (msgspec.structs.replace(SHAPE, block_size=32),)),
    ],
)
def test_engines_that_differ_have_other_keys(field: str, value: object) -> None:
    theirs = msgspec.structs.replace(OURS, **{field: value})
    assert key_prefix("n", OURS, "h") != key_prefix("n", theirs, "h")


def test_so_do_namespaces_hashes_and_versions_of_vllm() -> None:
    told = ("n", "h", ""), ("o", "h", ""), ("n", "i", ""), ("n", "h", "0.32"), ("n", "h", "0.33")
    assert len({key_prefix(name, OURS, by, version) for name, by, version in told}) == 5


def test_how_slots_are_checked_makes_no_difference() -> None:
    theirs = msgspec.structs.replace(OURS, integrity="generation")
    assert key_prefix("n", OURS, "h") == key_prefix("n", theirs, "h")


def test_names_count_where_weights_are_unknown() -> None:
    def replaced(**changes: object) -> CompatibilityKey:
        return msgspec.structs.replace(OURS, **changes)

    known, renamed = replaced(weights="w"), replaced(weights="w", model="m@2")
    assert key_prefix("n", known, "h") == key_prefix("n", renamed, "h")
    assert readers_id(known, "h") == readers_id(renamed, "h")
    others = [OURS, known, replaced(model="m@2"), replaced(weights="v")]
    assert len({key_prefix("n", other, "h") for other in others}) == 4
    assert len({readers_id(other, "h") for other in others}) == 4


def test_who_spreads_its_slots_shares_no_arena_with_one_who_does_not_and_every_store() -> None:
    groups = (msgspec.structs.replace(SHAPE, replicated=True),)
    older, apart, spread = (
        msgspec.structs.replace(OURS, ranks=2, groups=groups, stripes=each)
        for each in (msgspec.UNSET, 1, 2)
    )
    assert readers_id(older, "h") == readers_id(apart, "h") != readers_id(spread, "h")
    assert len({key_prefix("n", each, "h", "0.32") for each in (older, apart, spread)}) == 1


def test_every_block_has_a_key_of_its_own() -> None:
    keys = {block_key("p", g, r, bytes([h])) for g in range(3) for r in range(3) for h in range(3)}
    assert len(keys) == 27


def test_what_all_ranks_hold_alike_is_the_first_ones() -> None:
    latent = msgspec.structs.replace(SHAPE, replicated=True)
    assert [owning_rank(SHAPE, 1, 2), owning_rank(latent, 1, 2)] == [1, 0]


def test_of_the_ranks_that_hold_one_head_the_first_owns_it() -> None:
    heads = msgspec.structs.replace(SHAPE, pages=("H1.N16.C8",) * 2, copies=(4, 2))
    assert [owning_rank(heads, rank, 8) for rank in range(8)] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert owning_ranks([heads, SHAPE], 4) == [0, 2, 4, 5, 6, 7]
    assert owning_rank(heads, 13, 8) == 12


def test_each_pipeline_stage_owns_what_it_holds() -> None:
    latent = msgspec.structs.replace(SHAPE, replicated=True)
    nothing = msgspec.structs.replace(latent, pages=())
    assert owning_ranks([SHAPE, SHAPE], 2) == [0, 1, 2, 3]
    assert owning_ranks([latent, nothing, latent], 2) == [0, 4]
    assert owning_rank(latent, 5, 2) == 4
    assert owning_rank(nothing, 3, 2) is None


@given(
    content=st.binary(min_size=1, max_size=80),
    place=st.integers(0, 200),
    change=st.integers(1, 255),
)
def test_a_changed_byte_is_noticed_wherever_it_is(content: bytes, place: int, change: int) -> None:
    size = len(content)
    row = np.zeros(size + TRAILER_BYTES + 8, np.uint8)
    row[:size] = np.frombuffer(content, np.uint8)
    length = add_trailer(row, size, xxhash.xxh3_64_intdigest(content), "key")
    assert length == size + TRAILER_BYTES
    verify(row, size, xxhash.xxh3_64_intdigest(row[:size].tobytes()), "key")
    row[place % length] ^= change
    with pytest.raises(ChecksumError, match="key"):
        verify(row, size, xxhash.xxh3_64_intdigest(row[:size].tobytes()), "key")


def test_a_sound_entry_of_another_key_is_refused() -> None:
    row = np.zeros(64, np.uint8)
    add_trailer(row, 40, xxhash.xxh3_64_intdigest(bytes(40)), "one")
    with pytest.raises(ChecksumError):
        verify(row, 40, xxhash.xxh3_64_intdigest(bytes(40)), "other")
