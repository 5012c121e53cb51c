# SPDX-License-Identifier: Apache-2.0
"""Which peers can read which slots, and which blocks they need."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from omni_connector.kv.shapes import GroupShape, difference, same_bytes, states_of

from .shapes import group_shape

STATE: dict[str, Any] = {
    "kind": "mamba",
    "attention_type": "last",
    "pages": ("C99", "C99"),
    "states": "3x7 bfloat16, 5x5 float32",
}
LATENT: dict[str, Any] = {
    "kind": "mla_attention",
    "replicated": True,
    "pages": ("N16.C1152", "N16.C1152"),
}
RING: dict[str, Any] = {
    "kind": "circular_buffer",
    "attention_type": "ring",
    "block_size": 8,
    "replicated": True,
    "pages": ("H2.N8.C256?", "H2.N8.C256?"),
    "uncached": True,
}
# As of an indexer, whose scales lie behind all tokens.
SCALED: dict[str, Any] = LATENT | {"pages": ("N16.C132?",)}
# As of NVFP4, which has a head for the keys and one for the values of each KV head.
UNKNOWN = "H{h}.N{n}.C72?"


def of_block(size: int, heads: int = 2, order: str = "H{h}.N{n}.C64", **changes: Any) -> GroupShape:
    page = order.format(h=heads, n=size)
    return group_shape(block_size=size, pages=(page, page), **changes)


def differs(
    ours: GroupShape, theirs: GroupShape, ranks: tuple[int, int] = (1, 1), kv_heads: int = 2
) -> tuple[str, object, object] | None:
    return difference((ours,), ranks[0], (theirs,), ranks[1], kv_heads)


@pytest.mark.parametrize(
    ("ours", "theirs", "ranks"),
    [
        (of_block(16), of_block(16), (1, 1)),
        (of_block(16), of_block(64), (1, 1)),
        (of_block(64), of_block(16), (1, 1)),
        (of_block(16), of_block(16, order="N{n}.H{h}.C64"), (1, 1)),
        (of_block(16), of_block(16, heads=1), (1, 2)),
        (of_block(16, heads=1), of_block(32), (2, 1)),
        (of_block(16, heads=1), of_block(16), (4, 1)),
        (group_shape(**LATENT), group_shape(**LATENT), (2, 1)),
        (group_shape(**LATENT), group_shape(**LATENT), (1, 4)),
        (group_shape(**SCALED), group_shape(**SCALED), (1, 1)),
        (group_shape(**SCALED), group_shape(**SCALED), (2, 4)),
        (of_block(16, order=UNKNOWN), of_block(16, order=UNKNOWN), (2, 2)),
        (group_shape(**STATE), group_shape(**STATE, block_size=640), (2, 2)),
        (group_shape(**RING), group_shape(**RING), (1, 1)),
        (group_shape(**RING), group_shape(**RING), (1, 4)),
        (group_shape(**RING), group_shape(**RING), (4, 2)),
    ],
)
def test_peers_that_can_read(ours: GroupShape, theirs: GroupShape, ranks: tuple[int, int]) -> None:
    assert differs(ours, theirs, ranks) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "ranks", "field"),
    [
        (group_shape(), group_shape(kind="mla_attention"), (1, 1), "kind of group 0"),
        (group_shape(), group_shape(replicated=True), (1, 1), "replicated of group 0"),
        (
            group_shape(),
            group_shape(attention_type="window", window=8),
            (1, 1),
            "attention_type of group 0",
        ),
        (group_shape(), group_shape(layers="odd"), (1, 1), "layers of group 0"),
        (of_block(16), of_block(24), (1, 1), "block_size of group 0"),
        (of_block(16), of_block(16, order="H{h}.N{n}.C32"), (1, 1), "pages of group 0"),
        (of_block(16), of_block(16, order="{n}{h}nonsense"), (1, 1), "pages of group 0"),
        (of_block(16), of_block(16), (1, 2), "pages of group 0"),
        (of_block(16, order=UNKNOWN), of_block(32, order=UNKNOWN), (1, 1), "pages of group 0"),
        (of_block(16, 4, UNKNOWN), of_block(16, 2, UNKNOWN), (1, 2), "pages of group 0"),
        (of_block(16, order=UNKNOWN), of_block(16), (1, 1), "pages of group 0"),
        (
            group_shape(**SCALED),
            group_shape(**SCALED | {"block_size": 32, "pages": ("N32.C132?",)}),
            (1, 1),
            "pages of group 0",
        ),
        (of_block(16, heads=2), of_block(16, heads=2), (3, 2), "pages of group 0"),
        (group_shape(**STATE), group_shape(**STATE), (2, 1), "ranks of group 0"),
        (
            group_shape(**STATE),
            group_shape(**STATE | {"states": "3x14 bfloat16, 5x5 float32"}),
            (2, 1),
            "ranks of group 0",
        ),
        (
            group_shape(**STATE),
            group_shape(**STATE | {"states": "3x7 float16, 5x5 float32"}),
            (1, 1),
            "states of group 0 (mamba)",
        ),
        (
            group_shape(**STATE),
            group_shape(**STATE | {"states": "7x3 bfloat16, 5x5 float32"}),
            (2, 2),
            "states of group 0 (mamba)",
        ),
        (group_shape(**STATE), group_shape(**STATE | {"pages": ("C99", "C98")}), (1, 1), "pages"),
        (
            group_shape(**RING),
            group_shape(**RING | {"block_size": 16, "pages": ("H2.N16.C256?",) * 2}),
            (1, 1),
            "block_size of group 0 (circular_buffer)",
        ),
        (
            group_shape(**RING),
            group_shape(**RING | {"pages": ("N8.H2.C256",) * 2}),
            (1, 1),
            "pages of group 0 (circular_buffer)",
        ),
    ],
)
def test_peers_that_cannot_read_are_told_what_differs(
    ours: GroupShape, theirs: GroupShape, ranks: tuple[int, int], field: str
) -> None:
    found = differs(ours, theirs, ranks)
    assert found is not None
    assert found[0].startswith(field)


def test_another_number_of_groups_is_named_by_the_families() -> None:
    window = group_shape(kind="sliding_window", attention_type="window", window=8)
    found = difference((group_shape(), window), 1, (group_shape(),), 1, 2)
    assert found == ("groups", "full_attention, sliding_window", "full_attention")


def spec(*states: tuple[tuple[int, ...], str]) -> SimpleNamespace:
    return SimpleNamespace(
        shapes=tuple(shape for shape, _ in states), dtypes=tuple(dtype for _, dtype in states)
    )


def test_states_are_told_by_their_shapes_and_dtypes() -> None:
    conv, large, small = ((3, 64), "torch.bfloat16"), ((4, 8, 8), "torch.float32"), ((2,), "half")
    assert states_of([spec(conv, large)]) == "3x64 bfloat16, 4x8x8 float32"
    both = "2 half; 3x64 bfloat16"
    assert states_of([spec(conv), spec(small)]) == states_of([spec(small), spec(conv)]) == both
    assert states_of([spec(conv)] * 2) == "3x64 bfloat16"
    assert states_of([]) is msgspec.UNSET


def test_a_peer_that_does_not_tell_its_states_is_refused() -> None:
    silent = group_shape(**STATE | {"states": msgspec.UNSET})
    found = differs(silent, group_shape(**STATE))
    assert found == ("states of group 0 (mamba)", "", STATE["states"])


def test_states_are_the_same_bytes_in_blocks_of_any_size() -> None:
    assert same_bytes(group_shape(**STATE), group_shape(**STATE, block_size=640))
    assert not same_bytes(of_block(16), of_block(32))
    assert not same_bytes(of_block(16), of_block(16, order="N{n}.H{h}.C64"))


@given(
    attention_type=st.sampled_from(["all", "window", "chunk", "last"]),
    cached=st.booleans(),
    begins=st.integers(0, 200),
    block_size=st.integers(1, 20),
    span=st.integers(1, 60),
    num_tokens=st.integers(1, 200),
)
def test_needed_blocks_are_those_of_the_tokens_that_the_next_one_reads(
    attention_type: Any, cached: bool, begins: int, block_size: int, span: int, num_tokens: int
) -> None:
    bounded = attention_type in ("window", "chunk")
    group = group_shape(
        block_size=block_size,
        attention_type=attention_type,
        window=span if bounded else 0,
        uncached=msgspec.UNSET if cached else True,
    )
    needed = group.needed(num_tokens)
    assert needed.stop == -(-num_tokens // block_size)
    read = {
        "all": range(num_tokens),
        "window": range(max(0, num_tokens + 1 - span), num_tokens),
        "chunk": range(num_tokens - num_tokens % span, num_tokens),
        "last": range(num_tokens - 1, num_tokens),
    }[attention_type]
    assert {token // block_size for token in read} <= set(needed)
    # and at most the block that the first of them lies in more than that
    assert len(needed) <= len({token // block_size for token in read}) + (attention_type != "all")
    # Of what a prefix cache has, none is read again.
    start = min(begins, num_tokens)
    beyond = {each for each in needed if not cached or each >= start // block_size}
    assert set(group.needed(num_tokens, start)) == beyond


@pytest.mark.parametrize(
    ("names", "told"),
    [(("a",), "1 names of 2 pages"), ((), "0 names"), (("a", "a"), "layer a has two pages")],
)
def test_names_that_cannot_be_are_refused(names: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        group_shape(names=names)


def test_some_layers_of_a_group_keep_their_names_and_pages() -> None:
    shape = group_shape(names=("a", "b", "c"), pages=("C1", "C2", "C3"))
    some = shape.of_layers([2, 0])
    assert (some.names, some.pages) == (("c", "a"), ("C3", "C1"))
    assert group_shape().of_layers([1]).pages == ("H2.N16.C64",)


def copied(heads: int, *copies: int) -> GroupShape:
    return of_block(16, heads, copies=copies or UNSET)


@pytest.mark.parametrize(
    ("ours", "theirs", "ranks"),
    [
        (copied(1, 2, 2), copied(1), (8, 4)),  # 4 heads, where the model says 2
        (copied(1), copied(1, 2, 2), (4, 8)),
        (copied(1, 2, 2), copied(1, 4, 4), (8, 16)),
        (copied(1, 2, 4), copied(1, 1, 2), (8, 4)),
        (copied(1, 2, 2), copied(2), (8, 2)),
        (copied(1, 2, 2), copied(1, 2, 2), (8, 8)),
        (copied(1, 2, 2), copied(1), (8, 8)),  # of which copies are not known
    ],
)
def test_layers_have_as_many_heads_as_who_has_copies_of_them_says(
    ours: GroupShape, theirs: GroupShape, ranks: tuple[int, int]
) -> None:
    assert differs(ours, theirs, ranks) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "ranks", "told"),
    [
        (copied(1, 2, 2), copied(1, 2, 2), (8, 16), "a layer of 4 or 8 KV heads"),
        (copied(1, 2, 2), copied(2), (8, 4), "a layer of 4 KV heads, of which one rank of 8 has 1"),
        (copied(1, 2, 2), copied(1, 4, 2), (8, 8), "copies of heads"),
    ],
)
def test_copies_that_contradict_the_other_side_are_refused_by_name(
    ours: GroupShape, theirs: GroupShape, ranks: tuple[int, int], told: str
) -> None:
    found = differs(ours, theirs, ranks)
    assert found is not None
    assert told in found[0]


def test_of_layers_some_keep_their_copies() -> None:
    assert copied(1, 2, 4).of_layers([1]).copies == (4,)
    assert copied(1).of_layers([1]).copies is UNSET
