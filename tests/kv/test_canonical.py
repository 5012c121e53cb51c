# SPDX-License-Identifier: Apache-2.0
"""The canonical form: which bytes are named, what is shared, what is refused."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector.errors import LayoutError
from omni_connector.kv.canonical import (
    GroupSpec,
    LayerSpec,
    SlotLayout,
    canonicalize,
    canonicalize_cross_layers,
)
from omni_connector.kv.segments import content_of


def canonical_of(cache):
    return canonicalize(cache.groups, cache.views, cache.num_blocks)


def named_bytes(canonical, group, block):
    """The bytes that a group's pages name of a block, in order."""
    pages = [canonical.view(page, torch.uint8)[block] for page in canonical.pages[group]]
    return torch.cat([page.flatten() for page in pages]).numpy()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_groups_pages_and_segments_name_exactly_its_layers_bytes(kv, data):
    cache, _ = data.draw(kv.caches())
    canonical = canonical_of(cache)
    assert canonical.num_blocks == cache.num_blocks
    flat = cache.buffer.view(torch.uint8)
    for group in range(len(cache.groups)):
        for block in range(cache.num_blocks):
            expected = cache.slot(group, block).tolist()
            assert named_bytes(canonical, group, block).tolist() == expected
            found = []
            for segment in content_of(canonical.pages[group]):
                assert segment.slot_offset == len(found)
                rows = flat.as_strided(
                    (*segment.counts, segment.row_bytes),
                    (*(step for _, step in segment.dims), 1),
                    segment.start + block * segment.block_stride,
                )
                found += rows.flatten().tolist()
            assert found == expected
    assert list(canonical.storages) == [cache.buffer.untyped_storage().data_ptr()]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_layers_of_one_shape_are_one_segment(kv, layout):
    cache = kv.build(layout, 5, [[kv.Shape(layers=4, heads=3, tokens=2, content=8)]])
    canonical = canonical_of(cache)
    assert len(content_of(canonical.pages[0])) == 1


def test_a_layer_that_reads_anothers_cache_is_stored_once(kv):
    shape = kv.Shape(layers=2, heads=1, tokens=4, content=8)
    cache = kv.build("LBHNC", 4, [[shape]], shared_layers=True)
    assert len(cache.groups[0].layers) == 3
    canonical = canonical_of(cache)
    assert len(canonical.pages[0]) == 2
    assert canonical.page_orders == (("N4.C8", "N4.C8"),)
    assert SlotLayout.of(canonical).group_bytes == (64,)


def test_pages_of_several_sizes_may_lie_in_the_same_bytes():
    buffer = torch.zeros(4 * 64, dtype=torch.int8)
    views = {
        "narrow": buffer.as_strided((4, 1, 1, 24), (64, 24, 24, 1)),
        "wide": buffer.as_strided((4, 1, 1, 64), (64, 64, 64, 1)),
    }
    groups = (
        GroupSpec("sliding_window", 16, (LayerSpec("narrow", 24, 32),)),
        GroupSpec("mamba", 16, (LayerSpec("wide", 64, 64),)),
    )
    canonical = canonicalize(groups, views, 4)
    sizes = [
        [(page.start, page.row_bytes, page.padded_bytes) for page in pages]
        for pages in canonical.pages
    ]
    assert sizes == [[(0, 24, 32)], [(0, 64, 64)]]


def test_byte_orders_are_told_apart_and_equal_ones_are_equal(kv):
    shape = kv.Shape(layers=1, heads=2, tokens=8, content=4, dtype=torch.bfloat16)
    orders = {
        layout: canonical_of(kv.build(layout, 4, [[shape]])).page_orders for layout in kv.LAYOUTS
    }
    for layout, order in orders.items():
        token_major = layout.index("N") < layout.index("H")
        assert order == (("N8.H2.C8",) if token_major else ("H2.N8.C8",),)

    split = kv.Shape(2, 2, 8, 4, torch.bfloat16, kernel_blocks=4)
    assert canonical_of(kv.build("LBHNC", 4, [[split]])).page_orders == (("N4.H2.N2.C8",) * 2,)
    assert canonical_of(kv.build("LBNHC", 4, [[split]])).page_orders == (("N8.H2.C8",) * 2,)


def test_a_slot_is_the_largest_group_rounded_up_to_a_memory_page(kv):
    cache = kv.build("LBHNC", 2, [[kv.Shape(5, 1, 1, 1000)], [kv.Shape(1, 1, 1, 8)]])
    layout = SlotLayout.of(canonical_of(cache))
    assert layout == SlotLayout(
        group_bytes=(5000, 8),
        slot_bytes=8192,
    )


def one_layer(page, padded=None):
    return (GroupSpec("full_attention", 16, (LayerSpec("model.0", page, padded or page),)),)


@pytest.mark.parametrize(
    ("view", "page", "padded", "num_blocks", "message"),
    [
        (torch.zeros(4, 2, 2, 8), 100, None, 4, "expected 100 bytes a block, found 128"),
        (torch.zeros(4, 2, 16), 128, None, 4, "expected a view [B, H, N, C]"),
        (torch.zeros(2, 4, 2, 2, 8), 128, None, 4, "expected a view [B, H, N, C]"),
        (torch.zeros(5, 2, 2, 8), 128, None, 4, "expected a multiple of 4 blocks"),
        (torch.zeros(0, 2, 2, 8), 128, None, 4, "expected a multiple of 4 blocks"),
        (torch.zeros(1, 2, 2, 8).expand(4, 2, 2, 8), 128, None, 4, "128 bytes apart or more"),
        (torch.zeros(4, 1, 2, 8).expand(4, 2, 2, 8), 128, None, 4, "overlap"),
        (torch.zeros(4, 2, 2, 8), 128, 160, 4, "160 bytes apart or more"),
        (torch.zeros(2, 4, 2, 8).transpose(0, 1), 128, 160, 4, "padded page in several runs"),
        (torch.zeros(4, 32).as_strided((4, 1, 1, 24), (32, 24, 24, 1), 8), 96, 128, 4, "buffer of"),
    ],
)
def test_a_view_that_is_not_what_its_spec_says_is_refused(view, page, padded, num_blocks, message):
    with pytest.raises(LayoutError, match=f"layer model.0: .*{re.escape(message)}"):
        canonicalize(one_layer(page, padded), {"model.0": view}, num_blocks)


def one_tensor(draw):
    """One tensor of all layers, its dimensions in any order in memory, and their names."""
    split = draw(st.booleans())  # K and V apart
    kernel_blocks = draw(st.integers(1, 3))
    num_blocks, layers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = {
        "L": layers,
        "B": num_blocks * kernel_blocks,
        "H": draw(st.integers(1, 3)),
        "N": draw(st.integers(1, 4)),
        "C": 2 * draw(st.integers(1, 3)),
    }
    dims = [*draw(st.permutations("LBHN")), "C"]
    shape = [sizes[dim] for dim in dims]
    if split:
        at = draw(st.integers(0, 4))
        dims.insert(at, "C")
        shape.insert(at, 2)
    dtype = draw(st.sampled_from((torch.int8, torch.bfloat16)))
    elements = torch.Size(shape).numel()
    memory = torch.arange(elements * dtype.itemsize).to(torch.int8).view(dtype).view(shape)
    # Engines show the dimensions in another order than they have in memory.
    seen = draw(st.permutations(range(len(dims))))
    page = elements * dtype.itemsize // num_blocks // layers
    group = GroupSpec(
        "full_attention",
        sizes["N"] * kernel_blocks,
        tuple(LayerSpec(f"layer{i}", page, page) for i in range(layers)),
    )
    return (group,), memory.permute(*seen), num_blocks, "".join(dims[i] for i in seen)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_one_tensor_of_all_layers_is_its_layers_views(data):
    groups, tensor, num_blocks, dims = one_tensor(data.draw)
    names = data.draw(st.permutations([layer.name for layer in groups[0].layers]))
    found = canonicalize_cross_layers(groups, tensor, names, num_blocks, dims=dims)
    axis, block_axis = dims.index("L"), dims.replace("L", "").index("B")
    for block in range(num_blocks):
        expected = []
        for layer in groups[0].layers:
            view = tensor.select(axis, names.index(layer.name)).movedim(block_axis, 0)
            ratio = len(view) // num_blocks
            page = view[block * ratio : (block + 1) * ratio]
            order = sorted(
                range(page.ndim), key=lambda i: (page.stride(i), page.shape[i] == 1), reverse=True
            )
            expected += page.permute(*order).contiguous().view(torch.int8).flatten().tolist()
        assert named_bytes(found, 0, block).view("int8").tolist() == expected
    if "C" not in dims.replace("C", "", 1):
        views = {
            name: tensor.select(axis, i).permute(
                *(dims.replace("L", "").index(dim) for dim in "BHNC")
            )
            for i, name in enumerate(names)
        }
        same = canonicalize(groups, views, num_blocks)
        assert found.page_orders == same.page_orders
        assert found.pages == same.pages


@pytest.mark.parametrize(
    ("dims", "shape", "order"),
    [
        ("CBNHC", (2, 3, 16, 4, 8), "C2.N16.H4.C16"),
        ("BCNHC", (3, 2, 16, 4, 8), "C2.N16.H4.C16"),
        ("BCHNC", (3, 2, 4, 16, 8), "C2.H4.N16.C16"),
        ("BNC", (3, 16, 64), "N16.C128"),
        ("BHNC", (3, 4, 16, 16), "H4.N16.C32"),
        ("CBNHC", (2, 6, 8, 4, 8), "C2.N16.H4.C16"),
        ("BCHNC", (6, 2, 4, 8, 8), "N2.C2.H4.N8.C16"),
    ],
)
def test_views_with_k_and_v_apart_are_told_by_their_dimensions_names(dims, shape, order):
    view = torch.zeros(shape, dtype=torch.bfloat16)
    page = view.numel() * 2 // 3
    found = canonicalize(one_layer(page), {"model.0": view}, 3, dims=dims)
    assert found.page_orders == ((order,),)


@pytest.mark.parametrize(
    ("dims", "shape", "message"),
    [
        ("BLCNHC", (4, 2, 16, 4, 8), r"expected a tensor \[B, L, C, N, H, C\]"),
        ("BLHNC", (4, 3, 2, 2, 8), "expected 2 layers, found 3 in dimension 1"),
        ("BLHNC", (5, 2, 2, 2, 8), "expected a multiple of 4 blocks"),
        ("BLHNC", (4, 2, 2, 2, 9), "expected 128 bytes a block, found 144"),
    ],
)
def test_a_tensor_of_all_layers_that_is_not_what_was_said_is_refused(dims, shape, message):
    layers = (LayerSpec("a", 128, 128), LayerSpec("b", 128, 128))
    groups = (GroupSpec("full_attention", 2, layers),)
    with pytest.raises(LayoutError, match=message):
        canonicalize_cross_layers(groups, torch.zeros(shape), ["a", "b"], 4, dims=dims)


@pytest.mark.parametrize("dims", ["HNC", "BBHN", "LBHNC", "BXNC", ""])
def test_dimensions_that_make_no_sense_are_refused(dims):
    with pytest.raises(ValueError, match="dimensions"):
        canonicalize(one_layer(128), {"model.0": torch.zeros(4, 2, 2, 8)}, 4, dims=dims)
    with pytest.raises(ValueError, match="dimensions"):
        canonicalize_cross_layers(
            one_layer(128), torch.zeros(4, 2, 2, 8), ["model.0"], 4, dims=dims.replace("L", "")
        )


def test_a_layer_without_a_cache_is_refused():
    with pytest.raises(LayoutError, match=r"layer model\.0: no KV cache"):
        canonicalize(one_layer(128), {"model.1": torch.zeros(4, 2, 2, 8)}, 4)


@pytest.mark.parametrize("groups", [(), (GroupSpec("mamba", 16, ()),)])
def test_a_cache_without_layers_is_refused(groups):
    with pytest.raises(LayoutError, match="without layers"):
        canonicalize(groups, {}, 4)


def test_a_cache_without_blocks_is_refused():
    with pytest.raises(LayoutError, match="0 blocks"):
        canonicalize(one_layer(128), {"model.0": torch.zeros(4, 2, 2, 8)}, 0)


ROW = 4, 1, 1, 32
ROWS = 64, 32, 32, 1


@pytest.mark.parametrize(
    ("first", "second", "padded"),
    [
        # Shape, strides and start of a view.
        ((ROW, ROWS, 0), (ROW, ROWS, 16), 32),
        ((ROW, ROWS, 0), (ROW, ROWS, 48), 32),
        ((ROW, ROWS, 0), (ROW, (128, 32, 32, 1), 16), 32),
        ((ROW, ROWS, 0), (ROW, (128, 32, 32, 1), 0), 32),
        ((ROW, ROWS, 0), (ROW, (96, 32, 32, 1), 32), 32),
        (((1, 1, 1, 32), (0, 32, 32, 1), 0), ((1, 1, 1, 32), (0, 32, 32, 1), 16), 32),
        # Two heads far from each other; of the second layer, one of them.
        (((4, 2, 2, 4), (8, 64, 4, 1), 0), ((4, 1, 2, 4), (8, 64, 4, 1), 0), 16),
        # The padding of the first holds bytes of the second.
        (((4, 1, 1, 16), (64, 16, 16, 1), 0), ((4, 1, 1, 16), (64, 16, 16, 1), 24), 32),
    ],
)
def test_layers_of_a_group_that_share_bytes_are_refused(first, second, padded):
    buffer = torch.zeros(1024, dtype=torch.int8)
    views = {"a": buffer.as_strided(*first), "b": buffer.as_strided(*second)}
    pages = [view[0].numel() for view in views.values()]
    layers = LayerSpec("a", pages[0], padded), LayerSpec("b", pages[1], pages[1])
    with pytest.raises(LayoutError, match="share bytes"):
        canonicalize((GroupSpec("full_attention", 16, layers),), views, first[0][0])


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((4, 4, 2, 4), (32, 8, 4, 1), None),
        ((4, 2, 4, 4), (32, 16, 4, 1), "its pages .* are another layer's"),
        ((4, 4, 2, 4), (32, 4, 16, 1), "its pages .* are another layer's"),
    ],
)
def test_a_layer_that_reads_anothers_cache_reads_it_in_the_same_order(shape, strides, message):
    buffer = torch.zeros(128, dtype=torch.int8)
    views = {
        "a": buffer.as_strided((4, 4, 2, 4), (32, 8, 4, 1)),
        "b": buffer.as_strided(shape, strides),
    }
    group = GroupSpec("full_attention", 2, (LayerSpec("a", 32, 32), LayerSpec("b", 32, 32)))
    if message is None:
        assert canonicalize((group,), views, 4).page_orders == (("H4.N2.C4",),)
        return
    with pytest.raises(LayoutError, match=f"layer b: {message}"):
        canonicalize((group,), views, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerSpec("a", 0, 8), "layer a"),
        (lambda: LayerSpec("a", 16, 8), "layer a"),
        (lambda: GroupSpec("mamba", 0, ()), "block size 0"),
        (lambda: GroupSpec("mamba", 16, (LayerSpec("a", 8, 8),) * 2), "named twice: a"),
    ],
)
def test_specs_that_make_no_sense_are_refused_when_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()
