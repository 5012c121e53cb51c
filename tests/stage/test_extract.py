# SPDX-License-Identifier: Apache-2.0
"""Taking a request's KV out of a paged cache: every layout, nothing guessed, nothing skipped."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_connector.errors import LayoutError
from omni_connector.stage.extract import KVLayout, extract_kv_cache

from .caches import Sequence, cache_of, paged, sequence

PLAIN = ["pair", KVLayout.KV_FIRST, KVLayout.BLOCKS_FIRST, KVLayout.PACKED]


def _extract(seq: Sequence, *caches, **options):
    return extract_kv_cache(
        "r", seq.block_ids, seq.tokens, list(caches), seq.block_size, "auto", **options
    )


def _check(seq: Sequence, data, layer: int = 0) -> None:
    key, value = (data.layer_blocks[name][layer] for name in ("key_cache", "value_cache"))
    assert torch.equal(key.view(torch.uint8), seq.key.contiguous().view(torch.uint8))
    assert torch.equal(value.view(torch.uint8), seq.value.contiguous().view(torch.uint8))
    assert key.is_contiguous()
    assert value.is_contiguous()


@pytest.mark.parametrize("layout", PLAIN)
def test_extract_kv_cache(layout: str) -> None:
    seq = sequence()
    data = _extract(seq, cache_of(seq, layout), None, cache_of(seq, layout))
    _check(seq, data, 0)
    _check(seq, data, 2)
    assert data.layer_blocks["key_cache"][1] is None
    assert data.layer_blocks["value_cache"][1] is None
    assert data.request_id == "r"
    assert data.block_ids == seq.block_ids
    assert data.metadata == {"block_size": 4, "num_layers": 3, "dtype": "auto", "seq_len": 10}


@given(
    layout=st.sampled_from(PLAIN),
    tokens=st.integers(0, 20),
    heads=st.integers(2, 3),
    dim=st.integers(1, 5),
    block_size=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]),
    seed=st.integers(0, 999),
)
@settings(max_examples=100)
def test_every_token_comes_out_of_its_place(layout, tokens, heads, dim, block_size, dtype, seed):
    seq = sequence(tokens, heads, dim, block_size=block_size, num_blocks=23, dtype=dtype, seed=seed)
    _check(seq, _extract(seq, cache_of(seq, layout)))


def test_caches_that_are_strided_views_are_read_through_their_strides() -> None:
    seq = sequence()
    packed = cache_of(seq, KVLayout.PACKED)
    storage = torch.zeros(seq.num_blocks, 3, *packed.shape[1:])
    storage[:, 1] = packed
    by_token = packed.transpose(1, 2).contiguous().transpose(1, 2)
    for view in (storage[:, 1], by_token):
        assert torch.equal(view, packed)
        _check(seq, _extract(seq, view))


def test_what_is_extracted_is_a_copy() -> None:
    seq = sequence()
    cache = cache_of(seq, KVLayout.KV_FIRST)
    data = _extract(seq, cache)
    cache.zero_()
    _check(seq, data)


@pytest.mark.parametrize("behind", [[99], [-1], [6, 6, 6]])
def test_blocks_behind_the_last_token_are_neither_looked_at_nor_stated(behind: list[int]) -> None:
    seq = sequence(tokens=7)
    caches = [cache_of(seq, "pair")]
    data = extract_kv_cache("r", [*seq.block_ids, *behind], 7, caches, 4, "auto")
    _check(seq, data)
    assert data.block_ids == seq.block_ids
    # The same block is an error where tokens need it.
    if behind[0] != 6:
        with pytest.raises(ValueError, match=r"not one of|not exist"):
            extract_kv_cache("r", [*seq.block_ids[:1], behind[0]], 7, caches, 4, "auto")


def test_the_contract_is_stated_where_it_holds_and_by_nobody_else() -> None:
    seq = sequence()
    for custom in (None, {"_kv_payload_contract": 999}):
        data = _extract(seq, cache_of(seq, "pair"), custom_metadata=custom)
        assert data.metadata["_kv_payload_contract"] == 1
        latent = _extract(seq, cache_of(seq, KVLayout.LATENT), custom_metadata=custom)
        assert "_kv_payload_contract" not in latent.metadata


@pytest.mark.parametrize("form", ["three dimensions", "packed"])
def test_the_latent_of_mla_takes_the_place_of_the_key(form: str) -> None:
    seq = sequence(heads=1, dim=6)
    cache = cache_of(seq, KVLayout.LATENT)
    if form == "packed":
        cache = cache.unsqueeze(1)
        data = _extract(seq, cache, layout="latent")
    else:
        data = _extract(seq, cache)
    assert torch.equal(data.layer_blocks["key_cache"][0], seq.key)
    assert data.layer_blocks["value_cache"] == [None]


def test_keys_and_values_of_different_width_are_told_by_the_head_dim() -> None:
    seq = sequence(dim=6)
    wide = Sequence(seq.key[..., :4], seq.value[..., :2], seq.block_ids, 4, 7)
    pages = torch.cat((paged(wide.key, seq), paged(wide.value, seq)), dim=-1).transpose(1, 2)
    _check(wide, _extract(wide, pages, head_dim=4))
    with pytest.raises(LayoutError, match="keys of 6 elements leave no value"):
        _extract(wide, pages, head_dim=6, layout="packed")
    with pytest.raises(LayoutError, match="has no known layout"):
        _extract(wide, pages, head_dim=6)


def test_the_metadata_of_the_caller_goes_over_ours() -> None:
    seq = sequence()
    data = _extract(seq, cache_of(seq, "pair"), custom_metadata={"image": [1, 2], "seq_len": 9})
    assert data.metadata["image"] == [1, 2]
    assert data.metadata["seq_len"] == 9


@pytest.mark.parametrize("layout", [KVLayout.KV_FIRST, KVLayout.BLOCKS_FIRST])
def test_two_blocks_are_not_taken_for_keys_and_values(layout: KVLayout) -> None:
    seq = sequence(tokens=6, num_blocks=2)
    cache = cache_of(seq, layout)
    with pytest.raises(LayoutError, match="may be kv_first or blocks_first; name its layout"):
        _extract(seq, cache)
    _check(seq, _extract(seq, cache, layout=layout))


def test_one_head_is_not_taken_for_a_latent_nor_the_other_way() -> None:
    seq = sequence(heads=1)
    cache = cache_of(seq, KVLayout.PACKED)
    with pytest.raises(LayoutError, match="may be latent or packed"):
        _extract(seq, cache)
    _check(seq, _extract(seq, cache, layout="packed"))
    _check(seq, _extract(seq, cache, head_dim=4))
    latent = _extract(seq, cache, head_dim=8)
    assert latent.layer_blocks["key_cache"][0].shape == (10, 1, 8)


def test_the_layout_may_be_given_by_layer() -> None:
    seq = sequence(heads=1, tokens=6, num_blocks=2)
    caches = [
        cache_of(seq, "pair"),
        cache_of(seq, "blocks_first"),
        cache_of(seq, "packed"),
        cache_of(seq, "kv_first"),
    ]
    data = _extract(seq, *caches, layout=[None, "blocks_first", "packed", "kv_first"])
    for layer in range(4):
        _check(seq, data, layer)
    with pytest.raises(LayoutError, match="1 layouts for 4 layers"):
        _extract(seq, *caches, layout=["packed"])
    with pytest.raises(LayoutError, match=r"'nhd'.*known are kv_first"):
        _extract(seq, *caches, layout="nhd")


SHAPES = {
    "wrong block size": torch.zeros(7, 2, 5, 8),
    "wrong block size, pair": (torch.zeros(7, 5, 2, 4), torch.zeros(7, 5, 2, 4)),
    "wrong block size, kv first": torch.zeros(2, 7, 5, 2, 4),
    "no pair of dimensions": torch.zeros(7, 3, 4, 2, 4),
    "two dimensions": torch.zeros(7, 4),
    "six dimensions": torch.zeros(2, 7, 4, 2, 2, 2),
    "odd content": torch.zeros(7, 2, 4, 7),
    "pair of latents": (torch.zeros(7, 4, 4), torch.zeros(7, 4, 4)),
    "pair of different heads": (torch.zeros(7, 4, 2, 4), torch.zeros(7, 4, 1, 4)),
    "pair of different blocks": (torch.zeros(7, 4, 2, 4), torch.zeros(6, 4, 2, 4)),
    "three tensors": (torch.zeros(7, 4, 2, 4),) * 3,
    "an array": np.zeros((2, 7, 4, 2, 4)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_fits_no_layout_is_refused_with_its_layer(name: str) -> None:
    seq = sequence()
    with pytest.raises(LayoutError, match="request r, layer 1: "):
        _extract(seq, cache_of(seq, "pair"), SHAPES[name])


@pytest.mark.parametrize("layout", KVLayout)
def test_a_named_layout_must_fit(layout: KVLayout) -> None:
    seq = sequence()
    wrong = torch.zeros(7, 3, 4, 2, 7)
    with pytest.raises(LayoutError, match=f"is not {layout} with blocks of 4"):
        _extract(seq, wrong, layout=layout)
    with pytest.raises(LayoutError, match="key and value with no layout named"):
        _extract(seq, cache_of(seq, "pair"), layout=layout)


@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize("block", [7, 1 << 40, -1])
def test_a_block_that_does_not_exist_is_an_error_and_never_left_out(layout, block) -> None:
    seq = sequence()
    for place in range(3):
        blocks = [*seq.block_ids]
        blocks[place] = block
        with pytest.raises(ValueError, match=f"block {block} "):
            extract_kv_cache("r", blocks, 10, [cache_of(seq, layout)], 4, "auto")


def test_a_block_that_one_layer_lacks_is_an_error() -> None:
    seq = sequence(num_blocks=7)
    short = sequence(num_blocks=3)
    caches = [cache_of(seq, "pair"), cache_of(short, "pair")]
    with pytest.raises(ValueError, match="layer 1: block 6 is not one of 3"):
        extract_kv_cache("r", [1, 6], 8, caches, 4, "auto")
    with pytest.raises(ValueError, match="layer 0: block 6 is not one of 3"):
        extract_kv_cache("r", [6], 4, [torch.zeros(3, 4, 6)], 4, "auto")


def test_too_few_blocks_are_an_error_and_not_a_shorter_sequence() -> None:
    seq = sequence()
    with pytest.raises(ValueError, match="10 tokens do not fit in 2 blocks of 4"):
        extract_kv_cache("r", seq.block_ids[:2], 10, [cache_of(seq, "pair")], 4, "auto")


@pytest.mark.parametrize(
    ("blocks", "tokens", "block_size", "error", "says"),
    [
        ([[0, 1]], 4, 4, TypeError, "one flat list"),
        ([0.0], 4, 4, TypeError, "one flat list"),
        ([0], -1, 4, ValueError, "-1 tokens"),
        ([0], 4, 0, ValueError, "blocks of 0"),
    ],
)
def test_other_nonsense_is_refused(blocks, tokens, block_size, error, says) -> None:
    with pytest.raises(error, match=says):
        extract_kv_cache("r", blocks, tokens, [torch.zeros(7, 4, 6)], block_size, "auto")


def test_without_any_layer_there_is_nothing_to_extract() -> None:
    with pytest.raises(ValueError, match="no layer has a KV cache"):
        extract_kv_cache("r", [0], 4, [None], 4, "auto")


def test_a_cpu_engines_packed_cache_must_be_named() -> None:
    seq = sequence()
    with pytest.raises(LayoutError, match="may be cpu_vec or cpu_amx"):
        _extract(seq, cache_of(seq, "packed"), cpu_engine=True)
    seq = sequence(heads=1)
    latent = cache_of(seq, "latent").unsqueeze(1)
    data = _extract(seq, latent, cpu_engine=True, head_dim=4)
    assert data.layer_blocks["value_cache"] == [None]


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cache_that_vllms_cpu_kernels_write_is_read(dtype: torch.dtype) -> None:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is no CPU build")
    # What vLLM's choice comes to by data type and head size, on this CPU.
    kinds = (torch.bfloat16, torch.float32)
    here = {_get_attn_isa(kind, 32, dim) for kind in kinds for dim in (64, 80)}
    isas = here & {"vec", "vec16", "amx"}
    if not isas:
        pytest.skip(f"vLLM's kernels for this CPU write another order: {', '.join(sorted(here))}")
    for isa in isas:
        seq = sequence(70, heads=2, dim=64, block_size=32, num_blocks=5, dtype=dtype)
        cache = torch.randn(5, 2, 32, 128).to(dtype)
        key, value = cache.view(5, 2, 64, 64).chunk(2, dim=2)
        tokens = torch.arange(seq.tokens)
        slots = torch.tensor(seq.block_ids)[tokens // 32] * 32 + tokens % 32
        scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
        ops.cpu_attn_reshape_and_cache(seq.key, seq.value, key, value, slots, isa, **scales)
        layout = KVLayout.CPU_AMX if isa == "amx" else KVLayout.CPU_VEC
        _check(seq, _extract(seq, cache, layout=layout, cpu_engine=True))


def test_cpu_layouts_that_do_not_fit_are_refused() -> None:
    seq = sequence()
    with pytest.raises(LayoutError, match="does not consist of tiles"):
        _extract(seq, torch.zeros(7, 2, 4, 8), layout="cpu_amx")
    apart = torch.zeros(7, 4, 2, 8).transpose(1, 2)
    with pytest.raises(LayoutError, match="do not lie together"):
        _extract(seq, apart, layout="cpu_vec")
