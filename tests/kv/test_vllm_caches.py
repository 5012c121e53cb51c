# SPDX-License-Identifier: Apache-2.0
"""Caches that vLLM itself lays out and allocates, beside vLLM's own canonical form of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (  # noqa: E402
    OffloadingConnectorWorker,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

from omni_connector.kv import CpuCopier, SlotLayout, canonicalize  # noqa: E402
from omni_connector.vllm_v1.specs import group_specs  # noqa: E402

BLOCKS = 7


def full(**changes):
    return FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16, **changes}
    )


def sliding(**changes):
    return SlidingWindowSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.bfloat16,
        sliding_window=32,
        **changes,
    )


def mla(head_size=72, **changes):
    return MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=head_size, dtype=torch.bfloat16, **changes
    )


def mamba(**changes):
    return MambaSpec(
        block_size=64,
        shapes=((3, 20), (2, 4, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        **changes,
    )


def group(prefix, count, spec):
    return KVCacheGroupSpec([f"{prefix}.{i}" for i in range(count)], spec)


def mixed(prefix):
    specs = {f"{prefix}.{i}": mla() if i % 2 else mla(head_size=24) for i in range(4)}
    return KVCacheGroupSpec(
        list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    )


FAMILIES = {
    "full attention": lambda: [group("full", 4, full())],
    "values narrower than keys": lambda: [group("full", 3, full(head_size_v=4))],
    "sliding window in groups": lambda: (
        [group(f"window{g}", 2, sliding()) for g in range(3)] + [group("full", 2, full())]
    ),
    "mla": lambda: [group("mla", 3, mla())],
    "mla, padded": lambda: [group("mla", 3, mla(alignment=256))],
    "mla beside an indexer": lambda: [mixed("mla")],
    "hybrid, padded states": lambda: [
        group("full", 2, full()),
        group("state", 2, mamba(page_size_padded=full().page_size_bytes)),
    ],
    "hybrid, padded attention": lambda: [
        group("full", 2, full(page_size_padded=2048)),
        group("state", 2, mamba(page_size_padded=2048)),
    ],
}

# Padded pages and pages of several sizes exist in block-compact layouts alone.
COMPACT = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    if layout in COMPACT or not ("padded" in family or "indexer" in family)
]


def allocate(kv, family, layout, num_blocks=BLOCKS, kernel_block_size=None):
    """A cache as vLLM allocates it, of random bytes, and vLLM's configuration of it."""
    resolved = KVCacheLayout[layout]
    groups = FAMILIES[family]()
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: resolved,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=num_blocks,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    config = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
    assert config.num_blocks == num_blocks
    kernel = None if kernel_block_size is None else [kernel_block_size] * len(groups)
    views = allocate_kv_cache(config, torch.device("cpu"), resolved, kernel)
    storage = next(iter(views.values())).untyped_storage()
    buffer = torch.empty(0, dtype=torch.int8).set_(storage)
    generator = torch.Generator().manual_seed(num_blocks)
    buffer.copy_(torch.randint(-128, 128, buffer.shape, dtype=torch.int8, generator=generator))
    return kv.Cache(layout, num_blocks, buffer, group_specs(config), views), config


def vllms_own(config, views):
    """vLLM's canonical form, taken from the worker that hands it to an offloading backend."""
    seen = []
    spec = SimpleNamespace(
        replicated_layout=False,
        get_worker=seen.append,
        config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0)),
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1, prefill_context_parallel_size=1, world_size=2
    )
    worker = OffloadingConnectorWorker(spec, SimpleNamespace(parallel_config=parallel), config)
    worker.register_kv_caches(dict(views))
    return seen[0]


def bytes_of_block(canonical, group, block):
    """The addresses of the bytes that a canonical form names of one block."""
    found = set()
    for ref in canonical.group_data_refs[group]:
        tensor = canonical.tensors[ref.tensor_idx].tensor
        first = tensor.data_ptr() + block * tensor.stride(0)
        found.update(range(first, first + ref.page_size_bytes))
    return found


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_bytes_of_a_block_are_those_of_its_layers_views(kv, family, layout):
    cache, _ = allocate(kv, family, layout)
    canonical = canonicalize(cache.groups, cache.views, BLOCKS)
    addresses = torch.arange(cache.buffer.numel()) + cache.buffer.data_ptr()
    for g, spec in enumerate(cache.groups):
        for block in range(BLOCKS):
            expected = set()
            for layer in spec.layers:
                page = cache.block(layer.name, block).view(torch.int8)
                seen = addresses.as_strided(page.shape, page.stride(), page.storage_offset())
                expected.update(seen.flatten().tolist())
            assert bytes_of_block(canonical, g, block) == expected


# vLLM takes a block of LHBNC for one page of contiguous bytes, which it is for one head only.
@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case[1] != "LHBNC"])
def test_the_bytes_of_a_block_are_those_that_vllm_names(kv, family, layout):
    cache, config = allocate(kv, family, layout)
    ours = canonicalize(cache.groups, cache.views, BLOCKS)
    theirs = vllms_own(config, cache.views)
    for g in range(len(cache.groups)):
        for block in range(BLOCKS):
            named = bytes_of_block(ours, g, block)
            if layout.startswith("L"):
                assert named == bytes_of_block(theirs, g, block)
            else:
                # vLLM names a block-outermost block whole, other groups' layers included.
                assert named <= bytes_of_block(theirs, g, block)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_blocks_move_between_caches_of_vllm(kv, family, layout):
    source, _ = allocate(kv, family, layout)
    target, _ = allocate(kv, family, layout, num_blocks=BLOCKS + 4)
    canonical = canonicalize(source.groups, source.views, BLOCKS)
    slot_layout = SlotLayout.of(canonical)
    to_target = canonicalize(target.groups, target.views, BLOCKS + 4)
    assert SlotLayout.of(to_target) == slot_layout
    slots = np.zeros((4, slot_layout.slot_bytes), np.uint8)
    for g in range(len(source.groups)):
        expected = target.clone()
        for block, other in ((6, 1), (2, 10), (3, 0)):
            for layer in source.groups[g].layers:
                expected.block(layer.name, other)[...] = source.block(layer.name, block)
        sums = CpuCopier(canonical, slot_layout).save(
            g, np.array([6, 2, 3]), slots, np.array([3, 1, 0]), checksum=True
        )
        CpuCopier(to_target, slot_layout).load(
            g, np.array([1, 10, 0]), slots, np.array([3, 1, 0]), checksum=True
        )
        assert torch.equal(target.buffer, expected.buffer)
        assert sums.tolist() == [
            xxhash.xxh3_64_intdigest(source.slot(g, block).tobytes()) for block in (6, 2, 3)
        ]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_blocks_split_into_kernel_blocks_are_regrouped(kv, layout):
    cache, config = allocate(kv, "full attention", layout, kernel_block_size=4)
    assert cache.views["full.0"].shape[0] == 4 * BLOCKS
    ours = canonicalize(cache.groups, cache.views, BLOCKS)
    theirs = vllms_own(config, cache.views)
    for block in range(BLOCKS):
        assert bytes_of_block(ours, 0, block) == bytes_of_block(theirs, 0, block)
    whole, _ = allocate(kv, "full attention", layout)
    same = canonicalize(whole.groups, whole.views, BLOCKS).page_orders == ours.page_orders
    assert same == (layout == "LBNHC")
