# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups in our terms: sizes, kinds and windows, and what is refused."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from msgspec import UNSET

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from omni_connector.errors import ConfigError, LayoutError  # noqa: E402
from omni_connector.kv.canonical import GroupSpec, LayerSpec  # noqa: E402
from omni_connector.kv.shapes import difference  # noqa: E402
from omni_connector.vllm_v1.specs import (  # noqa: E402
    attends_to_all,
    fails_by_block,
    group_shapes,
    group_specs,
    own_layers,
    require_supported,
    require_vllm_engine,
    state_refusal,
    transferred_groups,
    with_copies,
)

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}


def config(*groups, own=None):
    """A configuration of these groups; `own` names the layers that have a tensor."""
    tensors = (
        [] if own is None else [KVCacheTensor(size=1, layers=own, layer_stride=1, block_stride=1)]
    )
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=tensors, kv_cache_groups=list(groups))


@pytest.mark.parametrize(
    ("spec", "kind", "page", "padded"),
    [
        (FullAttentionSpec(**SHAPE), "full_attention", 1024, 1024),
        (FullAttentionSpec(**SHAPE, page_size_padded=4096), "full_attention", 1024, 4096),
        (FullAttentionSpec(**SHAPE, sliding_window=64), "full_attention", 1024, 1024),
        (SlidingWindowSpec(**SHAPE, sliding_window=64), "sliding_window", 1024, 1024),
        (
            SlidingWindowSpec(**SHAPE, sliding_window=64, extra_retained_tokens=3),
            "sliding_window",
            1024,
            1024,
        ),
        (MLAAttentionSpec(**SHAPE), "mla_attention", 512, 512),
        (MLAAttentionSpec(**SHAPE, alignment=576), "mla_attention", 512, 576),
        (
            SlidingWindowMLASpec(**SHAPE, sliding_window=128),
            "sliding_window_mla",
            512,
            512,
        ),
        (RSWASpec(**SHAPE, rswa_window=64), "reference_sliding_window", 1024, 1024),
        (
            ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64),
            "chunked_local_attention",
            1024,
            1024,
        ),
        (CircularBufferSpec(**SHAPE, page_size_padded=4096), "circular_buffer", 1024, 4096),
        (CrossAttentionSpec(**SHAPE), "cross_attention", 1024, 1024),
        (
            MambaSpec(
                block_size=16,
                shapes=((3, 20), (2, 4)),
                dtypes=(torch.bfloat16, torch.float32),
                page_size_padded=256,
            ),
            "mamba",
            152,
            256,
        ),
    ],
)
def test_a_groups_spec_is_told_by_kind_and_page(spec, kind, page, padded):
    (group,) = group_specs(config(KVCacheGroupSpec(["a", "b"], spec)))
    assert group == GroupSpec(
        kind, 16, (LayerSpec("a", page, padded), LayerSpec("b", page, padded))
    )


def test_layers_with_specs_of_their_own_keep_them():
    specs = {"a": MLAAttentionSpec(**SHAPE), "b": MLAAttentionSpec(**{**SHAPE, "head_size": 4})}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    (group,) = group_specs(config(KVCacheGroupSpec(["b", "a"], uniform)))
    assert group == GroupSpec(
        "mla_attention", 16, (LayerSpec("b", 256, 256), LayerSpec("a", 512, 512))
    )


@pytest.mark.parametrize(
    "kind",
    [
        lambda **shape: FullAttentionSpec(**shape),
        lambda **shape: SlidingWindowSpec(**shape, sliding_window=64),
        lambda **shape: MLAAttentionSpec(**shape),
    ],
    ids=["full", "window", "latent"],
)
def test_a_group_of_a_target_and_its_drafter_is_the_same_to_scheduler_and_worker(kind):
    """VLLM merges their specs for the workers, and gives the scheduler the first alone."""
    target, drafter = kind(**SHAPE), kind(**{**SHAPE, "head_size": 16})
    merged = UniformTypeKVCacheSpecs.from_specs({"model.0": target, "drafter.0": drafter})
    assert isinstance(merged, UniformTypeKVCacheSpecs)
    worker = config(
        KVCacheGroupSpec(["model.0", "drafter.0"], merged), own=["model.0", "drafter.0"]
    )
    scheduler = generate_scheduler_kv_cache_config([worker])
    assert scheduler.kv_cache_groups[0].kv_cache_spec == target
    sizes = [each.unpadded_page_size_bytes for each in (target, drafter)]
    (group,) = group_specs(worker)
    assert [layer.page_bytes for layer in group.layers] == sizes
    assert sizes[0] < sizes[1]
    # What the scheduler half reads of them.
    for found in (attends_to_all, fails_by_block, state_refusal):
        assert found(scheduler) == found(worker)
    assert list(transferred_groups(scheduler)) == list(transferred_groups(worker))
    for each in (scheduler, worker):
        assert own_layers(each, each.kv_cache_groups[0]) == ["model.0", "drafter.0"]


def test_states_of_as_many_bytes_are_told_apart():
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32
    shapes = ((3, 20), (2, 4))
    forms = [
        (shapes, (bf16, single)),
        (shapes, (half, single)),
        (((20, 3), (2, 4)), (bf16, single)),  # VLLM_SSM_CONV_STATE_LAYOUT=DS
        (((3, 20), (2, 2, 4)), (bf16, bf16)),
    ]
    specs = [MambaSpec(block_size=16, shapes=shape, dtypes=dtypes) for shape, dtypes in forms]
    assert len({spec.state_content_size_bytes for spec in specs}) == 1
    groups = [
        group_shapes(config(KVCacheGroupSpec(["a"], spec)), [["C152"]], ["GDN"]) for spec in specs
    ]
    for ours in groups:
        for theirs in groups:
            found = difference(ours, 1, theirs, 1, 2)
            assert found is None if ours is theirs else found[0] == "states of group 0 (mamba)"
    (attention,) = group_shapes(
        config(KVCacheGroupSpec(["a"], FullAttentionSpec(**SHAPE))), [["H2.N16.C32"]], [""]
    )
    assert attention.states is UNSET


def test_states_in_a_group_with_other_layers_are_not_shared():
    state = MambaSpec(
        block_size=16, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    specs = {"a": state, "b": FullAttentionSpec(**SHAPE)}
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    refusal = state_refusal(config(KVCacheGroupSpec(["a", "b"], mixed)))
    assert refusal == (
        "the recurrent states of layer a share a group with layers that attend to tokens"
    )
    assert state_refusal(config(KVCacheGroupSpec(["a"], state))) is None


def test_only_groups_that_vllm_transfers_are_listed():
    kept = KVCacheGroupSpec(["a"], FullAttentionSpec(**SHAPE))
    ephemeral = KVCacheGroupSpec(["b"], FullAttentionSpec(**SHAPE), enable_kv_transfer=False)
    encoder = KVCacheGroupSpec(["c"], EncoderOnlyAttentionSpec(**SHAPE))
    groups = group_specs(config(ephemeral, kept, encoder))
    assert [[layer.name for layer in group.layers] for group in groups] == [["a"]]


def test_layers_without_a_tensor_of_their_own_are_left_out():
    spec = FullAttentionSpec(**SHAPE)
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": spec})
    for given in (spec, uniform):
        (group,) = group_specs(config(KVCacheGroupSpec(["a", "reader"], given), own=["a"]))
        assert [layer.name for layer in group.layers] == ["a"]


@pytest.mark.parametrize("uniform", [False, True])
def test_a_pipeline_stage_may_hold_no_layer_of_a_group(uniform):
    spec = SlidingWindowSpec(**SHAPE, sliding_window=64)
    if uniform:
        spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"elsewhere": spec})
    groups = group_specs(
        config(KVCacheGroupSpec([], spec), KVCacheGroupSpec(["a"], FullAttentionSpec(**SHAPE)))
    )
    assert groups[0] == GroupSpec("sliding_window", 16, ())
    assert len(groups) == 2


@dataclass(frozen=True, kw_only=True)
class NovelSpec(KVCacheSpec):
    """A cache that nobody has heard of."""


@dataclass(frozen=True, kw_only=True)
class QuantizedFullAttentionSpec(FullAttentionSpec):
    """A third party's full attention."""


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (NovelSpec(block_size=16), "NovelSpec"),
        (HiSparseResidentSpec(block_size=16, page_size=64), "HiSparseResidentSpec"),
    ],
)
def test_an_unknown_spec_is_refused_by_name(spec, name):
    with pytest.raises(LayoutError, match=name):
        group_specs(config(KVCacheGroupSpec(["a"], spec)))


def test_kv_in_a_pool_of_the_host_is_refused():
    group = KVCacheGroupSpec(["a"], FullAttentionSpec(**SHAPE))
    on_host = KVCacheGroupSpec(["b"], FullAttentionSpec(**SHAPE), host_resident=True)
    with pytest.raises(LayoutError, match="HiSparse"):
        require_supported(SimpleNamespace(), config(group, on_host))


def test_a_subclass_of_a_known_spec_is_not_guessed_to_be_like_it():
    with pytest.raises(LayoutError, match="QuantizedFullAttentionSpec"):
        group_specs(config(KVCacheGroupSpec(["a"], QuantizedFullAttentionSpec(**SHAPE))))


def test_a_layer_without_a_spec_is_refused():
    uniform = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a": FullAttentionSpec(**SHAPE)}
    )
    with pytest.raises(LayoutError, match="layer b"):
        group_specs(config(KVCacheGroupSpec(["a", "b"], uniform)))


def test_a_layer_of_another_block_size_is_refused():
    uniform = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={"a": FullAttentionSpec(**SHAPE)}
    )
    with pytest.raises(LayoutError, match="layer a has blocks of 16 tokens"):
        group_specs(config(KVCacheGroupSpec(["a"], uniform)))


def test_a_diffusion_stage_of_vllm_omni_is_refused_and_told_what_to_configure() -> None:
    model_config = type("ModelConfig", (), {"__module__": "vllm_omni.diffusion.vllm_config"})
    with pytest.raises(ConfigError, match=r"MooncakeConnector.*OmniSharedMemoryConnector"):
        require_vllm_engine(SimpleNamespace(model_config=model_config()))
    require_vllm_engine(SimpleNamespace(model_config=SimpleNamespace()))


def test_a_group_tells_the_copies_of_each_layer_that_has_one_head_a_rank():
    one_head = {**SHAPE, "num_kv_heads": 1}
    specs = {
        "a": FullAttentionSpec(**one_head),
        "b": FullAttentionSpec(**one_head),
        "two heads": FullAttentionSpec(**{**SHAPE, "num_kv_heads": 2}),
        "latent": MLAAttentionSpec(**one_head),
    }
    merged = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    groups = [
        KVCacheGroupSpec([*specs], merged),
        KVCacheGroupSpec(["c"], FullAttentionSpec(**one_head)),
        KVCacheGroupSpec(["d"], MLAAttentionSpec(**one_head)),
    ]
    cached = config(*groups)
    pages = (("H1.N16.C8", "H1.N16.C8", "H2.N16.C8", "N16.C8"), ("H1.N16.C8",), ("N16.C8",))
    shapes = group_shapes(cached, pages, ("x", "x", "x"))
    copies = {"a": 4, "b": 2, "two heads": 2, "d": 2}
    found = with_copies(shapes, cached, copies, 8)
    assert [each.copies for each in found] == [(4, 2, 1, 8), UNSET, UNSET]
    assert [each.num_copies(8) for each in found] == [1, 1, 8]
    assert with_copies(shapes, cached, {}, 8)[1:] == shapes[1:]
