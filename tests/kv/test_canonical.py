# SPDX-License-Identifier: Apache-2.0
"""The canonical form: which bytes are named, what is shared, what is refused."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector.errors import LayoutError
from omni_connector.kv import GroupSpec, LayerSpec, SlotLayout, canonicalize
from omni_connector.kv.runs import runs_of, split


def canonical_of(cache):
    return canonicalize(cache.groups, cache.views, cache.num_blocks)


def named_bytes(canonical, group, block):
    """The bytes that a group's refs name of a block, in order."""
    rows = [
        canonical.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes]
        for ref in canonical.group_data_refs[group]
    ]
    return torch.cat(rows).view(torch.uint8).numpy()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_groups_refs_name_exactly_its_layers_bytes(kv, data):
    cache, _ = data.draw(kv.caches())
    canonical = canonical_of(cache)
    assert canonical.num_blocks == cache.num_blocks
    for group in range(len(cache.groups)):
        for block in range(cache.num_blocks):
            assert (
                named_bytes(canonical, group, block).tolist() == cache.slot(group, block).tolist()
            )
    for entry in canonical.tensors:
        assert entry.tensor.dtype == torch.int8
        assert entry.tensor.shape == (cache.num_blocks, entry.page_size_bytes)
        assert entry.tensor.untyped_storage().data_ptr() == cache.buffer.data_ptr()
    keys = [(entry.tensor.data_ptr(), entry.tensor.stride()) for entry in canonical.tensors]
    assert len(set(keys)) == len(keys)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_runs_name_the_same_bytes_as_refs_however_they_are_split(kv, data):
    cache, _ = data.draw(kv.caches())
    canonical = canonical_of(cache)
    layout = SlotLayout.of(canonical)
    limit = data.draw(st.integers(1, 200))
    flat = cache.buffer.view(torch.uint8)
    for group in range(len(cache.groups)):
        block = data.draw(st.integers(0, cache.num_blocks - 1))
        for runs in (
            runs_of(canonical, layout, group),
            [part for run in runs_of(canonical, layout, group) for part in split(run, limit)],
        ):
            found = []
            for run in runs:
                assert run.slot_offset == len(found)
                steps = [step for _, step in run.dims]
                rows = flat.as_strided(
                    (*run.counts, run.row_bytes),
                    (*steps, 1),
                    run.start + block * run.block_stride,
                )
                found += rows.flatten().tolist()
            assert found == cache.slot(group, block).tolist()
        assert all(
            part.nbytes <= limit
            for run in runs_of(canonical, layout, group)
            for part in split(run, limit)
        )


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_layers_of_one_shape_are_one_run(kv, layout):
    cache = kv.build(layout, 5, [[kv.Shape(layers=4, heads=3, tokens=2, content=8)]])
    canonical = canonical_of(cache)
    assert len(runs_of(canonical, SlotLayout.of(canonical), 0)) == 1


def test_groups_that_overlay_each_other_share_their_tensors(kv):
    shape = kv.Shape(layers=3, heads=2, tokens=4, content=8)
    canonical = canonical_of(kv.build("LBHNC", 4, [[shape], [shape]]))
    assert len(canonical.tensors) == 3
    assert canonical.group_data_refs[0] == canonical.group_data_refs[1]


def test_a_layer_that_reads_anothers_cache_is_stored_once(kv):
    shape = kv.Shape(layers=2, heads=1, tokens=4, content=8)
    cache = kv.build("LBHNC", 4, [[shape]], shared_layers=True)
    assert len(cache.groups[0].layers) == 3
    canonical = canonical_of(cache)
    assert [ref.tensor_idx for ref in canonical.group_data_refs[0]] == [0, 1]
    assert SlotLayout.of(canonical).group_bytes == (64,)


def test_padding_is_part_of_the_tensor_and_not_of_the_ref(kv):
    cache = kv.build("LBHNC", 4, [[kv.Shape(layers=2, heads=1, tokens=1, content=40, padding=24)]])
    canonical = canonical_of(cache)
    assert [entry.page_size_bytes for entry in canonical.tensors] == [64, 64]
    assert [ref.page_size_bytes for ref in canonical.group_data_refs[0]] == [40, 40]
    assert SlotLayout.of(canonical).group_bytes == (80,)


def test_a_shared_tensor_is_as_wide_as_its_widest_page():
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
    assert [entry.page_size_bytes for entry in canonical.tensors] == [64]
    assert [[ref.page_size_bytes for ref in refs] for refs in canonical.group_data_refs] == [
        [24],
        [64],
    ]


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
        ref_offsets=((0, 1000, 2000, 3000, 4000), (0,)),
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


@pytest.mark.parametrize(("first", "second", "stride"), [(0, 16, 64), (0, 48, 64), (0, 16, 128)])
def test_layers_of_a_group_that_share_bytes_are_refused(first, second, stride):
    buffer = torch.zeros(1024, dtype=torch.int8)
    views = {
        "a": buffer.as_strided((4, 1, 1, 32), (64, 32, 32, 1), first),
        "b": buffer.as_strided((4, 1, 1, 32), (stride, 32, 32, 1), second),
    }
    group = GroupSpec("full_attention", 16, (LayerSpec("a", 32, 32), LayerSpec("b", 32, 32)))
    with pytest.raises(LayoutError, match="share bytes"):
        canonicalize((group,), views, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerSpec("a", 0, 8), "layer a"),
        (lambda: LayerSpec("a", 16, 8), "layer a"),
        (lambda: GroupSpec("mamba", 0, ()), "block size 0"),
        (lambda: GroupSpec("mamba", 16, (), 0), "window 0"),
        (lambda: GroupSpec("mamba", 16, (LayerSpec("a", 8, 8),) * 2), "named twice: a"),
    ],
)
def test_specs_that_make_no_sense_are_refused_when_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()
