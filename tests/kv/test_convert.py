# SPDX-License-Identifier: Apache-2.0
"""Slots of other block sizes, heads and byte orders, made ours."""

import re
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_connector.errors import LayoutError
from omni_connector.kv.canonical import SlotLayout, canonicalize
from omni_connector.kv.convert import SlotConverter
from omni_connector.kv.heads import HeadSlice, head_sources
from omni_connector.kv.page_orders import kernel_order

thorough = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


def dims_of(order):
    return [(part[0], int(part[1:])) for part in order.split(".") if part]


def size_of(order, name):
    return prod(size for dim, size in dims_of(order) if dim == name)


def place(order, head, token, byte):
    """Where a byte lies in a page: every dimension's digit, fastest first, one at a time."""
    left = {"H": head, "N": token, "C": byte}
    found, step = 0, 1
    for name, size in reversed(dims_of(order)):
        found += left[name] % size * step
        left[name] //= size
        step *= size
    assert not any(left.values())
    return found


def one_byte_at_a_time(source_pages, target_pages, sizes, source, blocks, target, heads, end):
    """What `copy` does, for one token of one head after the other."""
    source_page = target_page = 0
    for theirs, ours, part in zip(source_pages, target_pages, heads, strict=True):
        for token in range(blocks[0] * sizes[0], (blocks[0] + 1) * sizes[0]):
            at = token - blocks[1] * sizes[1]
            if token >= end or not 0 <= at < sizes[1]:
                continue
            for head in range(part.count):
                for byte in range(size_of(theirs, "C")):
                    target[target_page + place(ours, part.target + head, at, byte)] = source[
                        source_page + place(theirs, part.source + head, token % sizes[0], byte)
                    ]
        source_page += prod(size for _, size in dims_of(theirs))
        target_page += prod(size for _, size in dims_of(ours))


def written(dims):
    """An order as `canonicalize` writes it: neighbours of one name joined, size 1 left out."""
    joined = []
    for name, size in dims:
        if size == 1:
            continue
        if joined and joined[-1][0] == name:
            joined[-1] = (name, joined[-1][1] * size)
        else:
            joined.append((name, size))
    return ".".join(f"{name}{size}" for name, size in joined)


@st.composite
def orders(draw, heads, tokens, contents):
    """A byte order: tokens in kernel blocks or not, content in one place or in two."""
    kernel = draw(st.sampled_from([n for n in range(1, tokens + 1) if tokens % n == 0]))
    parts = [
        [("N", tokens // kernel), ("N", kernel)] if draw(st.booleans()) else [("N", tokens)],
        [("H", heads)],
        [("C", each) for each in contents] if draw(st.booleans()) else [("C", prod(contents))],
    ]
    if draw(st.booleans()):
        # As in engines: content last, tokens and heads in either order.
        dims = [*draw(st.permutations(parts[0] + parts[1])), *parts[2]]
    else:
        dims = draw(st.permutations([dim for part in parts for dim in part]))
    # A name's first factor is its slowest: keep the factors of one name in their order.
    left = {"N": parts[0][:], "H": parts[1][:], "C": parts[2][:]}
    return written([left[name].pop(0) for name, _ in dims])


@st.composite
def conversions(draw):
    sizes = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    source_pages, target_pages, heads = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        theirs, ours = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        contents = draw(st.sampled_from([(2, 3), (4, 2), (1, 5), (1, 1)]))
        one = draw(orders(theirs, sizes[0], contents))
        two = draw(orders(ours, sizes[1], contents))
        parts = []
        for _ in range(draw(st.integers(1, 2))):
            count = draw(st.integers(0, min(theirs, ours)))
            first = draw(st.integers(0, theirs - count)), draw(st.integers(0, ours - count))
            parts.append(HeadSlice(*first, count))
        # Layers alike in a row, not all of them with the same heads.
        for _ in range(draw(st.integers(1, 3))):
            source_pages.append(one)
            target_pages.append(two)
            heads.append(draw(st.sampled_from(parts)))
    blocks = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    end = draw(st.integers(0, 80))
    return source_pages, target_pages, sizes, heads, blocks, end


@thorough
@given(conversions(), st.integers(0, 2**32 - 1))
def test_conversions_give_what_copying_a_byte_at_a_time_gives(conversion, seed):
    source_pages, target_pages, sizes, heads, blocks, end = conversion
    converter = SlotConverter(
        source_pages, target_pages, source_block_size=sizes[0], target_block_size=sizes[1]
    )
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, converter.source_bytes + 7, np.uint8)
    target = rng.integers(0, 256, converter.target_bytes + 5, np.uint8)
    expected, before = target.copy(), source.copy()
    one_byte_at_a_time(source_pages, target_pages, sizes, source, blocks, expected, heads, end)
    converter.copy(source, blocks[0], target, blocks[1], heads, end_token=end)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(source, before)


@thorough
@given(conversions(), st.data())
def test_layers_in_other_places_are_converted_as_each_of_them_alone(conversion, data):
    source_pages, target_pages, sizes, heads, blocks, end = conversion
    # The peer's layers among others of its, ours in an order of our own.
    others = data.draw(st.lists(st.sampled_from(["C3", "H2.N4.C6?", "(C2|C2)"]), max_size=3))
    at = data.draw(st.permutations(range(len(source_pages) + len(others))))
    to = data.draw(st.permutations(range(len(target_pages))))
    theirs, ours = [""] * len(at), [""] * len(to)
    for page, place in zip([*source_pages, *others], at, strict=True):
        theirs[place] = page
    for page, place in zip(target_pages, to, strict=True):
        ours[place] = page
    places = list(zip(at, to, strict=False))
    options = {"source_block_size": sizes[0], "target_block_size": sizes[1]}
    converter = SlotConverter(theirs, ours, places=places, **options)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    source = rng.integers(0, 256, converter.source_bytes + 7, np.uint8)
    target = rng.integers(0, 256, converter.target_bytes + 5, np.uint8)
    expected, before = target.copy(), source.copy()
    starts = [[0], [0]]
    for found, pages in zip(starts, (theirs, ours), strict=True):
        for page in pages:
            found.append(found[-1] + page_bytes(page))
    for part, (begin, end_at) in zip(heads, places, strict=True):
        alone = SlotConverter([theirs[begin]], [ours[end_at]], **options)
        cut = source[starts[0][begin] : starts[0][begin + 1]]
        to_cut = expected[starts[1][end_at] : starts[1][end_at + 1]]
        alone.copy(cut, blocks[0], to_cut, blocks[1], [part], end_token=end)
    converter.copy(source, blocks[0], target, blocks[1], heads, end_token=end)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(source, before)


@given(st.data())
def test_whole_pages_in_other_places_are_copied_byte_for_byte(data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    at = data.draw(st.permutations(range(len(sizes))))
    chosen = data.draw(st.lists(st.sampled_from(at), min_size=1, unique=True))
    theirs, ours = [f"C{size}?" for size in sizes], [f"C{sizes[i]}?" for i in chosen]
    converter = SlotConverter(
        theirs,
        ours,
        source_block_size=3,
        target_block_size=3,
        whole=True,
        places=[(place, number) for number, place in enumerate(chosen)],
    )
    source = np.arange(converter.source_bytes, dtype=np.uint8)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    target = np.zeros(converter.target_bytes, np.uint8)
    converter.copy(source, 0, target, 0, [], end_token=0)
    expected = np.concatenate([source[starts[i] : starts[i + 1]] for i in chosen])
    np.testing.assert_array_equal(target, expected)


def page_bytes(order):
    """Bytes of a page by the sizes in its name."""
    halves = order.removesuffix("?").replace("(", "").replace(")", "").split("|")
    return sum(prod(int(dim[1:]) for dim in half.split(".") if dim) for half in halves)


def whole(heads, layers):
    return [HeadSlice(0, 0, heads)] * layers


@pytest.mark.parametrize("order", ["H{}.N16.C32", "N16.H{}.C32", "N2.H{}.N8.C32"])
def test_two_ranks_made_one_and_two_again_are_the_same_bytes(order):
    layers = 2
    both, one = [order.format(4)] * layers, [order.format(2)] * layers
    rng = np.random.default_rng(6)
    shards = [rng.integers(0, 256, layers * 2 * 16 * 32, np.uint8) for _ in range(2)]
    joined = np.zeros(layers * 4 * 16 * 32, np.uint8)
    to_one = SlotConverter(one, both, source_block_size=16, target_block_size=16)
    for rank, part in head_sources(
        total=4, source_heads=2, source_ranks=2, target_heads=4, target_rank=0, target_ranks=1
    ):
        to_one.copy(shards[rank], 3, joined, 3, [part] * layers, end_token=64)
    to_two = SlotConverter(both, one, source_block_size=16, target_block_size=16)
    for rank, shard in enumerate(shards):
        found = np.zeros_like(shard)
        for _, part in head_sources(
            total=4,
            source_heads=4,
            source_ranks=1,
            target_heads=2,
            target_rank=rank,
            target_ranks=2,
        ):
            to_two.copy(joined, 3, found, 3, [part] * layers, end_token=64)
        np.testing.assert_array_equal(found, shard)


@pytest.mark.parametrize("theirs", ["LBHNC", "LBNHC", "BHLNC", "LHBNC"])
@pytest.mark.parametrize(("ours", "kernel_blocks"), [("LBHNC", 4), ("LBNHC", 4), ("BLNHC", 1)])
def test_slots_of_real_caches_are_converted_as_their_views_say(kv, theirs, ours, kernel_blocks):
    """Blocks of 4 tokens in one layout to blocks of 16 in another, through both caches' views."""
    source = kv.build(theirs, 8, [[kv.Shape(3, 2, 4, 8)]], seed=1)
    target = kv.build(ours, 2, [[kv.Shape(3, 2, 16, 8, kernel_blocks=kernel_blocks)]], seed=2)
    pages = []
    for cache in (source, target):
        canonical = canonicalize(cache.groups, cache.views, cache.num_blocks)
        assert SlotLayout.of(canonical).group_bytes == (len(cache.slot(0, 0)),)
        pages.append(canonical.page_orders[0])
    converter = SlotConverter(*pages, source_block_size=4, target_block_size=16)
    found = target.slot(0, 1)
    blocks = (6, 3, 0, 5)
    for index, block in enumerate(blocks):
        converter.copy(source.slot(0, block), index, found, 0, whole(2, 3), end_token=14)
    for layer in target.groups[0].layers:
        page = target.block(layer.name, 1)
        for token in range(14):
            kernel, at = divmod(token, page.shape[2])
            page[kernel, :, at] = source.block(layer.name, blocks[token // 4])[0, :, token % 4]
    np.testing.assert_array_equal(found, target.slot(0, 1))


def test_states_are_copied_whole_whatever_their_blocks_are():
    converter = SlotConverter(
        ["C24", "N2.C4"], ["C24", "C8"], source_block_size=7, target_block_size=640, whole=True
    )
    assert (converter.source_bytes, converter.target_bytes) == (32, 32)
    source = np.arange(40, dtype=np.uint8)
    target = np.full(36, 255, np.uint8)
    converter.copy(source, 9, target, 2, [], end_token=0)
    assert target.tolist() == [*range(32), 255, 255, 255, 255]


@pytest.mark.parametrize(
    ("theirs", "ours", "sizes", "whole", "message"),
    [
        ("H2.N16.C32", "H2.N16.C64", (16, 16), False, "32 and 64 bytes for a head and token"),
        ("H2.N16.C32", "H2.N16.C32", (32, 16), False, "16 tokens in a block of 32"),
        ("H2.N16.C32", "H2.N16.C32", (16, 32), False, "16 tokens in a block of 32"),
        ("H2.N16.C2.C3.N2", "N32.H2.C6", (32, 32), False, None),
        ("C2.N16.C3", "C3.N16.C2", (16, 16), False, "orders that do not match"),
        ("N2.H2.N2.H3.C4", "N4.H6.C4", (4, 4), False, "not understood"),
        ("N2.H2.N2.C2.N4.C4", "N16.H2.C8", (16, 16), False, "not understood"),
        ("H2.X16.C32", "H2.N16.C32", (16, 16), False, "not understood"),
        ("H2.N16.C32.", "H2.N16.C32", (16, 16), False, "not understood"),
        ("H02.N16.C32", "H2.N16.C32", (16, 16), False, "not understood"),
        ("N16.C999999999999", "N16.C999999999999", (16, 16), False, "pages of"),
        ("C32", "C40", (16, 16), True, "pages of different sizes"),
        ("C32", "K32", (16, 16), True, "not understood"),
        ("H2.N16.C32?", "H2.N16.C32?", (16, 16), False, "not understood"),
        ("H2.N16.C32", "H2.N16.C32?", (16, 16), False, "not understood"),
        ("N4.C33?", "N4.C33?", (16, 16), True, None),
        ("H2.(C8.N16.C4|N16.C32)", "H2.N16.C64", (16, 16), False, "alike"),
        *(  # halves of different sizes, of other heads, or that are no two
            (order, order, (16, 16), False, "not understood")
            for order in (
                "H2.(C8.N16.C4|N16.C16)",
                "H2.(C8.N16.C4|H2.N16.C32)",
                "N2.(C8.N16.C4|N16.C32)",
                "H2.(C8.N16.C4)",
                "H2.(C8.N16.C4|N16.C32|N16.C32)",
                "H2.(|)",
            )
        ),
    ],
)
def test_pages_that_cannot_be_made_ours_are_refused_by_layer(theirs, ours, sizes, whole, message):
    good = "C8" if whole else "N16.C8"

    def make():
        return SlotConverter(
            [good.replace("16", str(sizes[0])), theirs],
            [good.replace("16", str(sizes[1])), ours],
            source_block_size=sizes[0],
            target_block_size=sizes[1],
            whole=whole,
        )

    if message is None:
        make()
        return
    orders = f"'{re.escape(theirs)}' .*'{re.escape(ours)}'"
    with pytest.raises(LayoutError, match=f"layer 1: .*{orders}: .*{message}"):
        make()


def test_other_numbers_of_layers_are_refused():
    with pytest.raises(LayoutError, match="hold 1 layers, ours 2"):
        SlotConverter(["N4.C8"], ["N4.C8"] * 2, source_block_size=4, target_block_size=4)


@pytest.mark.parametrize("sizes", [(0, 4), (4, -1)])
def test_blocks_without_tokens_are_refused(sizes):
    with pytest.raises(ValueError, match="tokens"):
        SlotConverter([], [], source_block_size=sizes[0], target_block_size=sizes[1])


def zeros(size, **kwargs):
    return np.zeros(size, np.uint8, **kwargs)


def read_only(size):
    array = zeros(size)
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": zeros(63)}, "a source of 64 bytes"),
        ({"target": zeros(63)}, "a target of 64 bytes"),
        ({"target": zeros(128)[::2]}, "2 bytes apart"),
        ({"target": zeros((8, 8))}, "a target of 64 bytes"),
        ({"source": np.zeros(64, np.int8)}, "found int8"),
        ({"target": read_only(64)}, "read-only"),
        ({"source_block": -1}, "blocks -1 and 0"),
        ({"target_block": -1}, "blocks 0 and -1"),
        ({"heads": []}, "heads of 0 layers, not of 1"),
        ({"heads": [HeadSlice(1, 0, 2)]}, "pages of 2 and 2 heads"),
        ({"heads": [HeadSlice(0, 2, 1)]}, "pages of 2 and 2 heads"),
    ],
)
def test_what_cannot_be_copied_is_refused(change, message):
    converter = SlotConverter(["H2.N4.C8"], ["N4.H2.C8"], source_block_size=4, target_block_size=4)
    right = {
        "source": zeros(64),
        "source_block": 0,
        "target": zeros(64),
        "target_block": 0,
        "heads": whole(2, 1),
    }
    converter.copy(**right, end_token=4)
    with pytest.raises(ValueError, match=message):
        converter.copy(**right | change, end_token=4)


def in_halves(rows: np.ndarray, kernel: str) -> np.ndarray:
    """Keys and values (heads, tokens, 2, dim) as vLLM's attention on CPUs lays out a block."""
    heads, tokens, _, dim = rows.shape
    keys, values = rows[:, :, 0], rows[:, :, 1]
    if kernel == "vec":
        keys = keys.transpose(0, 2, 1)
    else:  # tiles of 16 rows of pairs
        keys = keys.reshape(heads, tokens // 16, 16, dim // 2, 2).transpose(0, 1, 3, 2, 4)
        values = values.reshape(heads, tokens // 2, 2, dim // 16, 16).transpose(0, 3, 1, 4, 2)
    halves = [half.reshape(heads, 1, -1) for half in (keys, values)]
    return np.concatenate(halves, axis=1).reshape(-1).view(np.uint8)


def halves_order(kernel: str, heads: int, tokens: int, dim: int, item: int) -> str:
    view = f"H{heads}.N{tokens}.C{2 * dim * item}"
    return kernel_order(view, f"CPU_ATTN.{kernel}", item=item, own_heads=True)


@settings(deadline=None, max_examples=60)
@given(
    kernels=st.tuples(st.sampled_from(["vec", "amx"]), st.sampled_from(["vec", "amx"])),
    sizes=st.sampled_from([(32, 32), (32, 64), (64, 32), (16, 64)]),
    heads=st.sampled_from([(1, 1), (2, 2), (2, 1), (1, 2)]),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    layers=st.integers(1, 3),
    data=st.data(),
)
def test_blocks_whose_keys_and_values_lie_in_halves(kernels, sizes, heads, dtype, layers, data):
    dim, total = 32, 128
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = draw.integers(0, 1 << 15, (layers, max(heads), total, 2, dim)).astype(dtype)
    item = rows.itemsize
    pages = [
        [halves_order(kernel, h, size, dim, item)] * layers
        for kernel, h, size in zip(kernels, heads, sizes, strict=True)
    ]
    converter = SlotConverter(*pages, source_block_size=sizes[0], target_block_size=sizes[1])
    for block in range(total // sizes[1]):
        made = np.zeros(converter.target_bytes, np.uint8)
        for rank in range(max(1, heads[1] // heads[0])):
            for number in range(total // sizes[0]):
                span = slice(number * sizes[0], (number + 1) * sizes[0])
                mine = rows[:, rank * heads[0] : (rank + 1) * heads[0], span]
                slot = np.concatenate([in_halves(layer, kernels[0]) for layer in mine])
                part = HeadSlice(0, rank * heads[0], min(heads))
                converter.copy(slot, number, made, block, [part] * layers, end_token=total)
        span = slice(block * sizes[1], (block + 1) * sizes[1])
        wanted = [in_halves(layer[: heads[1], span], kernels[1]) for layer in rows]
        np.testing.assert_array_equal(made, np.concatenate(wanted))


def test_halves_of_a_single_head_need_not_name_it() -> None:
    """As where each rank has one KV head."""
    pages = [(f"({tokens}.C8|{tokens}.C8)",) for tokens in ("N16", "N8")]
    converter = SlotConverter(*pages, source_block_size=16, target_block_size=8)
    source = np.arange(256, dtype=np.uint8)
    target = np.zeros(128, np.uint8)
    converter.copy(source, 0, target, 1, [HeadSlice(0, 0, 1)], end_token=16)
    keys, values = source.reshape(2, 16, 8)
    assert np.array_equal(target.reshape(2, 8, 8), np.stack([keys[8:], values[8:]]))
