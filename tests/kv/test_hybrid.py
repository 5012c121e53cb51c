# SPDX-License-Identifier: Apache-2.0
"""A request's blocks in every group of a hybrid model, moved to another cache of it."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_connector.copy.copier import BlockCopy
from omni_connector.kv.canonical import SlotLayout, canonicalize
from omni_connector.kv.segments import content_of


def value_of(group, layer, place, shape):
    """Bytes that no other page of the request has at these places, for a page of this shape."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 31 + 7 * (group + 1) + 59 * (layer + 1) + 101 * (place + 1)).to(
        torch.int8
    )


def page_bytes(cache, layer, block):
    """A layer's page as bytes `(kernel blocks, H, N, C in bytes)`."""
    return cache.block(layer.name, block).contiguous().view(torch.int8)


def fill(cache, group, block, place):
    for number, layer in enumerate(cache.groups[group].layers):
        page = cache.block(layer.name, block)
        shape = page_bytes(cache, layer, block).shape
        page[...] = value_of(group, number, place, shape).view(shape).view(page.dtype)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_layer_of_every_group_finds_its_values_in_the_blocks_it_was_given(
    kv, make_copier, data
):
    source, target = data.draw(kv.hybrids())
    groups = range(len(source.groups))
    # As from one block pool: a block id belongs to one group of one request.
    room = min(source.num_blocks, target.num_blocks)
    sizes = [data.draw(st.integers(0, room // len(groups))) for _ in groups]
    from_ids = data.draw(st.permutations(range(source.num_blocks)))
    to_ids = data.draw(st.permutations(range(target.num_blocks)))
    starts = np.cumsum([0, *sizes])
    slots_of = data.draw(st.permutations(range(starts[-1] + 2)))

    for group in groups:
        for place, block in enumerate(from_ids[starts[group] : starts[group + 1]]):
            fill(source, group, block, place)
    untouched = source.buffer.clone()
    before = target.buffer.clone()
    canonical = canonicalize(source.groups, source.views, source.num_blocks)
    layout = SlotLayout.of(canonical)
    other = canonicalize(target.groups, target.views, target.num_blocks)
    other_layout = SlotLayout.of(other)
    assert other_layout.group_bytes == layout.group_bytes
    assert other.page_orders == canonical.page_orders
    slots = np.zeros((starts[-1] + 2, layout.slot_bytes), np.uint8)
    saver = make_copier(canonical, layout, slots)
    loader = make_copier(other, other_layout, slots)
    for verb, copier, ids in (("save", saver, from_ids), ("load", loader, to_ids)):
        for group in groups:
            own = slice(starts[group], starts[group + 1])
            getattr(copier, verb)(
                BlockCopy(
                    group,
                    np.array(ids[own], np.int64),
                    slots,
                    np.array(slots_of[own], np.int64),
                    checksum=False,
                )
            )
    assert torch.equal(source.buffer, untouched)

    # Nothing of the target may have changed but what these blocks reserve.
    addresses = torch.arange(len(before))
    owned = torch.zeros(len(before), dtype=torch.bool)
    for group in groups:
        for place, block in enumerate(to_ids[starts[group] : starts[group + 1]]):
            for number, layer in enumerate(target.groups[group].layers):
                found = page_bytes(target, layer, block)
                expected = value_of(group, number, place, found.shape).view(found.shape)
                assert torch.equal(found, expected)
                assert not target.padding(layer, block).any()
                page = target.block(layer.name, block)
                item = page.element_size()
                start = page.storage_offset() * item
                strides = (*(step * item for step in page.stride()), 1)
                owned[addresses.as_strided((*page.shape, item), strides, start)] = True
                owned[start + layer.page_bytes : start + layer.padded_page_bytes] = True
    assert torch.equal(target.buffer[~owned], before[~owned])


def test_only_the_bytes_that_a_group_needs_are_in_its_slots(kv):
    """Groups on the same bytes: a state of half a page, and half as many layers as the others."""
    page = kv.Shape(4, 2, 4, 16)
    state = kv.Shape(2, 1, 1, page.page // 2, padding=page.page // 2)
    for layout in kv.PADDABLE:
        cache = kv.build(layout, 5, [[page], [state]])
        canonical = canonicalize(cache.groups, cache.views, cache.num_blocks)
        slots = SlotLayout.of(canonical)
        assert slots.group_bytes == (4 * page.page, 2 * state.page)
        for group, size in enumerate(slots.group_bytes):
            segments = content_of(canonical.pages[group])
            assert sum(segment.nbytes for segment in segments) == size
