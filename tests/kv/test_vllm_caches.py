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
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend  # noqa: E402
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim  # noqa: E402
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import (  # noqa: E402
    add_kv_sharing_layers_to_kv_cache_groups,
    allocate_kv_cache,
)

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before vLLM 0.33
    from vllm.v1.core import kv_cache_utils as planning

from omni_connector.copy.copier import BlockCopy  # noqa: E402
from omni_connector.copy.host import CpuCopier  # noqa: E402
from omni_connector.kv.canonical import SlotLayout, canonicalize  # noqa: E402
from omni_connector.vllm_v1.specs import group_specs  # noqa: E402

BLOCKS = 7


def attention(spec, **changes):
    return spec(
        **{"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16, **changes}
    )


def full(**changes):
    return attention(FullAttentionSpec, **changes)


def sliding(**changes):
    return attention(SlidingWindowSpec, sliding_window=32, **changes)


def mla(spec=MLAAttentionSpec, **changes):
    return attention(spec, **{"num_kv_heads": 1, "head_size": 72, **changes})


def mamba(**changes):
    return MambaSpec(
        **{
            "block_size": 64,
            "shapes": ((3, 20), (2, 4, 8)),
            "dtypes": (torch.bfloat16, torch.float32),
            **changes,
        }
    )


FP8_SCALED = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD}
INT8_SCALED = {"dtype": torch.int8, "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}


def scaled(spec):
    """With room for the scales of each token and head, as vLLM's backends make it."""
    backend = MLACommonBackend if isinstance(spec, MLAAttentionSpec) else TritonAttentionBackend
    made = backend.customize_spec(spec)
    assert made.state_content_size_bytes == spec.state_content_size_bytes + 8
    return made


def group(prefix, count, spec):
    return KVCacheGroupSpec([f"{prefix}.{i}" for i in range(count)], spec)


def mixed(prefix, *kinds):
    """Layers of the same type but of several shapes, in turns."""
    specs = {f"{prefix}.{i}": kinds[i % len(kinds)] for i in range(4)}
    return KVCacheGroupSpec(
        list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    )


def padded(page):
    return mamba(page_size_padded=page.page_size_bytes)


# One head each: what vLLM takes for one page of contiguous bytes is one, in every layout.
ONE_HEAD = (
    "mla",
    "mla of compressed tokens",
    "fp8 mla with scales of tokens",
    "sliding window mla",
    "hidden states",
)

FAMILIES = {
    "full attention": lambda: [group("full", 4, full())],
    "float32": lambda: [group("full", 3, full(dtype=torch.float32))],
    "packed content": lambda: [group("full", 3, full(num_head_slots=1, state_content_bytes=40))],
    "nvfp4": lambda: [
        group(
            "full",
            3,
            full(
                dtype=torch.uint8,
                head_size=32,
                kv_quant_mode=KVQuantMode.NVFP4,
                num_head_slots=4,
                state_content_bytes=nvfp4_kv_cache_full_dim(32),
            ),
        )
    ],
    "fp8 with scales of tokens and heads": lambda: [group("full", 3, scaled(full(**FP8_SCALED)))],
    "int8 with scales of tokens and heads": lambda: [
        group("window", 2, scaled(sliding(**INT8_SCALED))),
        group("full", 2, scaled(full(**INT8_SCALED))),
    ],
    "fp8 mla with scales of tokens": lambda: [group("mla", 3, scaled(mla(**FP8_SCALED)))],
    "sliding window": lambda: [group("window", 3, sliding())],
    "chunked local": lambda: (
        [
            group(f"chunk{g}", 2, attention(ChunkedLocalAttentionSpec, attention_chunk_size=32))
            for g in range(2)
        ]
        + [group("full", 2, full())]
    ),
    "reference sliding window": lambda: [group("rswa", 3, attention(RSWASpec, rswa_window=32))],
    "sinks": lambda: [group("sink", 3, attention(SinkFullAttentionSpec, sink_len=4))],
    "cross attention": lambda: [
        group("self", 3, full()),
        group("cross", 3, attention(CrossAttentionSpec)),
    ],
    "sliding window and full attention overlaid": lambda: [
        group("window", 2, sliding()),
        group("full", 2, full()),
    ],
    "groups of unequal length": lambda: [group("window", 3, sliding()), group("full", 1, full())],
    "full attention of two shapes": lambda: [mixed("full", full(), full(num_kv_heads=1))],
    "blocks further apart than pages": lambda: [group("full", 3, full(block_stride_alignment=768))],
    "sliding window mla": lambda: [group("mla", 3, mla(SlidingWindowMLASpec, sliding_window=32))],
    "mla of compressed tokens": lambda: [group("mla", 3, mla(tokens_per_state=4))],
    "hidden states": lambda: [group("hidden", 1, mla(HiddenStateCacheSpec))],
    "values narrower than keys": lambda: [group("full", 3, full(head_size_v=4))],
    "sliding window in groups": lambda: (
        [group(f"window{g}", 2, sliding()) for g in range(3)] + [group("full", 2, full())]
    ),
    "mla": lambda: [group("mla", 3, mla())],
    "mla, padded": lambda: [group("mla", 3, mla(alignment=256))],
    "mla beside an indexer": lambda: [mixed("mla", mla(), mla(head_size=24))],
    "sliding window, padded": lambda: [
        group("full", 2, full()),
        group("window", 2, sliding(head_size=4, page_size_padded=full().page_size_bytes)),
    ],
    "hybrid": lambda: [group("full", 2, full()), group("state", 2, mamba(shapes=((256,), (128,))))],
    "states": lambda: [group(f"state{g}", 2, mamba()) for g in range(2)],
    "states, padded": lambda: [group(f"state{g}", 2, padded(full())) for g in range(2)],
    "hybrid, padded states": lambda: [
        group("full", 2, full()),
        *(group(f"state{g}", 2, padded(full())) for g in range(2)),
    ],
    "hybrid, padded attention": lambda: [
        group("full", 2, full(page_size_padded=2048)),
        group("state", 2, mamba(page_size_padded=2048)),
    ],
}

if not hasattr(planning, "_get_layer_block_stride"):
    del FAMILIES["blocks further apart than pages"]  # not before vLLM 0.32

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
# Padded pages and pages of several sizes exist in block-compact layouts alone.
COMPACT = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
COMPACT_ONLY = (
    "mla beside an indexer",
    "mla, padded",
    "sliding window, padded",
    "full attention of two shapes",
    "blocks further apart than pages",
    "states, padded",
    "hybrid, padded states",
    "hybrid, padded attention",
)
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if layout in COMPACT or family not in COMPACT_ONLY
    # The heads of attention lie between the blocks of states: vLLM's own views overlap there.
    if (family, layout) != ("hybrid", "LHBNC")
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
    config = planning.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
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
    """The addresses of the bytes that our canonical form names of one block."""
    found = set()
    for page in canonical.pages[group]:
        for start in page.row_starts:
            first = page.storage + start + block * page.block_stride
            found.update(range(first, first + page.row_bytes))
    return found


def vllms_bytes_of_block(canonical, group, block):
    """The same of vLLM's."""
    found = set()
    for ref in canonical.group_data_refs[group]:
        tensor = canonical.tensors[ref.tensor_idx].tensor
        first = tensor.data_ptr() + block * tensor.stride(0)
        found.update(range(first, first + ref.page_size_bytes))
    return found


# vLLM takes a block of LHBNC for one page of contiguous bytes, which it is for one head only.
NAMED = [(family, layout) for family, layout in CASES if layout != "LHBNC" or family in ONE_HEAD]
# It takes the distance of two states for the size of one, which it is in layouts with the layers
# outermost; and blocks further apart than pages for a layout with the blocks outermost.
VLLM_IS_WRONG = [
    (family, layout)
    for family, layout in NAMED
    if (family.startswith("states") and layout[0] == "B")
    or (family == "blocks further apart than pages" and layout[0] == "L")
]


def named_alike(kv, family, layout):
    """Whether vLLM names the bytes of each block that we name."""
    cache, config = allocate(kv, family, layout)
    ours = canonicalize(cache.groups, cache.views, BLOCKS)
    theirs = vllms_own(config, cache.views)
    alike = set.__eq__ if layout.startswith("L") else set.__le__
    # vLLM names a block-outermost block whole, other groups' layers included.
    return all(
        alike(bytes_of_block(ours, g, block), vllms_bytes_of_block(theirs, g, block))
        for g in range(len(cache.groups))
        for block in range(BLOCKS)
    )


@pytest.mark.parametrize(
    ("family", "layout"), [case for case in NAMED if case not in VLLM_IS_WRONG]
)
@pytest.mark.values
def test_the_bytes_of_a_block_are_those_that_vllm_names(kv, family, layout):
    assert named_alike(kv, family, layout)


@pytest.mark.parametrize(("family", "layout"), VLLM_IS_WRONG)
def test_where_vllm_looks_in_the_wrong_place_is_still_known(kv, family, layout):
    assert not named_alike(kv, family, layout)


def test_layers_that_read_anothers_cache_have_no_bytes_of_their_own(kv):
    cache, config = allocate(kv, "sliding window and full attention overlaid", "LBHNC")
    readers = {"reader.0": "full.1", "reader.1": "window.0"}
    add_kv_sharing_layers_to_kv_cache_groups(readers, config.kv_cache_groups)
    views = cache.views | {name: cache.views[target] for name, target in readers.items()}
    assert group_specs(config) == cache.groups
    plain = canonicalize(cache.groups, cache.views, BLOCKS)
    ours = canonicalize(group_specs(config), views, BLOCKS)
    theirs = vllms_own(config, views)
    assert ours.page_orders == plain.page_orders
    for g in range(2):
        for block in range(BLOCKS):
            named = bytes_of_block(ours, g, block)
            assert (
                named == bytes_of_block(plain, g, block) == vllms_bytes_of_block(theirs, g, block)
            )


def test_layers_without_a_cache_of_the_engines_are_left_out(kv):
    cache, config = allocate(kv, "full attention", "LBHNC")
    config.kv_cache_groups.append(group("encoder", 2, attention(EncoderOnlyAttentionSpec)))
    assert group_specs(config) == cache.groups


@pytest.mark.shows(
    "caches of every kind, in every layout of vLLM",
    control="test_a_layer_that_is_left_out_is_noticed",
)
@pytest.mark.parametrize(("family", "layout"), CASES)
@pytest.mark.values
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
            expected.loaded(g, other, source, block)
        sums = CpuCopier(canonical, slot_layout).save(
            BlockCopy(g, np.array([6, 2, 3]), slots, np.array([3, 1, 0]), checksum=True)
        )
        CpuCopier(to_target, slot_layout).load(
            BlockCopy(g, np.array([1, 10, 0]), slots, np.array([3, 1, 0]), checksum=True)
        )
        assert torch.equal(target.buffer, expected.buffer)
        assert sums.tolist() == [
            xxhash.xxh3_64_intdigest(source.slot(g, block).tobytes()) for block in (6, 2, 3)
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_is_left_out_is_noticed(kv, family):
    source, _ = allocate(kv, family, "LBNHC")
    target, _ = allocate(kv, family, "LBNHC", num_blocks=BLOCKS + 4)
    before, expected = target.clone(), target.clone()
    canonical = canonicalize(source.groups, source.views, BLOCKS)
    to_target = canonicalize(target.groups, target.views, BLOCKS + 4)
    layout, group = SlotLayout.of(canonical), len(source.groups) - 1
    slots = np.zeros((1, layout.slot_bytes), np.uint8)
    expected.loaded(group, 1, source, 6)
    save, load = (
        BlockCopy(group, np.array([block]), slots, np.array([0]), checksum=False)
        for block in (6, 1)
    )
    CpuCopier(canonical, layout).save(save)
    CpuCopier(to_target, layout).load(load)
    assert torch.equal(target.buffer, expected.buffer)
    name = source.groups[group].layers[-1].name
    target.block(name, 1).copy_(before.block(name, 1))
    assert not torch.equal(target.buffer, expected.buffer)


@pytest.mark.parametrize("family", ["full attention", "sliding window", "mla"])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_blocks_split_into_kernel_blocks_are_regrouped(kv, family, layout):
    cache, config = allocate(kv, family, layout, kernel_block_size=4)
    assert {view.shape[0] for view in cache.views.values()} == {4 * BLOCKS}
    ours = canonicalize(cache.groups, cache.views, BLOCKS)
    theirs = vllms_own(config, cache.views)
    for block in range(BLOCKS):
        assert bytes_of_block(ours, 0, block) == vllms_bytes_of_block(theirs, 0, block)
    whole, _ = allocate(kv, family, layout)
    same = canonicalize(whole.groups, whole.views, BLOCKS).page_orders == ours.page_orders
    assert same == (layout == "LBNHC" or family in ONE_HEAD)
