# SPDX-License-Identifier: Apache-2.0
"""Pages are converted only where it is known what the kernels put where."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.config.cache import CacheDType  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.torch_utils import (  # noqa: E402
    STR_DTYPE_TO_TORCH_DTYPE,
    nvfp4_kv_cache_full_dim,
    nvfp4_split_data_scale,
)
from vllm.v1.attention.backends.triton_attn import (  # noqa: E402
    TritonAttentionBackend,
    TritonAttentionImpl,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    compute_layer_kv_cache_shape_bytes,
    get_kv_quant_mode,
    is_quantized_kv_cache,
)

from omni_connector.kv.convert import SlotConverter  # noqa: E402
from omni_connector.kv.heads import HeadSlice, head_sources  # noqa: E402
from omni_connector.kv.shapes import (  # noqa: E402
    GroupShape,
    converter,
    difference,
    same_bytes,
)
from omni_connector.vllm_v1 import kernels  # noqa: E402
from omni_connector.vllm_v1.kernels import attention_of, kept_of, kernel_orders  # noqa: E402
from omni_connector.vllm_v1.specs import group_shapes  # noqa: E402

KV_HEADS = 4
HEAD_SIZE = 32


def layer(kernel: str, **attributes: Any) -> Any:
    backend = SimpleNamespace(get_name=lambda: kernel)
    return SimpleNamespace(get_attn_backend=lambda: backend, **attributes)


def flashinfer(writer: str) -> Any:
    return layer(
        "FLASHINFER", impl=SimpleNamespace(is_kvcache_nvfp4=True, nvfp4_fa2=writer == "fa2")
    )


def shapes(
    layers: dict[str, Any], specs: dict[str, KVCacheSpec], dims: str = "HNC"
) -> tuple[GroupShape, ...]:
    """What an engine with one group tells its peers."""
    block_size = next(iter(specs.values())).block_size
    group = KVCacheGroupSpec(
        list(specs), UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=specs)
    )
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
    views = []
    for spec in specs.values():
        sizes = dict(zip("BHNC", compute_layer_kv_cache_shape_bytes(spec, 1), strict=True))
        views.append(".".join(f"{dim}{sizes[dim]}" for dim in dims if sizes[dim] > 1))
    return group_shapes(
        config,
        kernel_orders(config, layers, [views]),
        attention_of(config, layers),
        kept_of(config, layers),
    )


def nvfp4(ranks: int, block_size: int) -> FullAttentionSpec:
    """As `FlashInferBackend.customize_spec` makes it, which needs FlashInfer to be imported."""
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=KV_HEADS // ranks,
        head_size=HEAD_SIZE,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.NVFP4,
    )
    return replace(
        spec,
        num_head_slots=2 * spec.num_kv_heads,
        state_content_bytes=nvfp4_kv_cache_full_dim(HEAD_SIZE),
    )


def nvfp4_shapes(
    ranks: int, block_size: int, dims: str = "HNC", writer: str = "trtllm"
) -> tuple[GroupShape, ...]:
    return shapes({"a": flashinfer(writer)}, {"a": nvfp4(ranks, block_size)}, dims)


def nvfp4_page(heads: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """A block whose every number tells its head, token and kind, by vLLM's own views of it."""
    full = nvfp4_kv_cache_full_dim(HEAD_SIZE)
    page = torch.zeros(2, len(heads), len(tokens), full, dtype=torch.uint8)
    for side in range(2):
        views = nvfp4_split_data_scale(page[side : side + 1])
        for kind, view in enumerate(views):
            for h, head in enumerate(heads):
                for t, token in enumerate(tokens):
                    view.view(torch.uint8)[0, h, t] = 128 * side + 64 * kind + 16 * head + token
    return page.flatten().numpy()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((2, 16, "HNC"), (1, 16, "HNC")),
        ((1, 16, "HNC"), (2, 16, "HNC")),
        ((1, 16, "HNC"), (1, 32, "HNC")),
        ((1, 16, "HNC"), (1, 16, "NHC")),
    ],
)
def test_nvfp4_is_not_converted(ours: Any, theirs: Any) -> None:
    """An engine refuses to read what it would have to rewrite, and the pages are named."""
    source, target = nvfp4_shapes(*ours), nvfp4_shapes(*theirs)
    found = difference(source, ours[0], target, theirs[0], KV_HEADS)
    assert found is not None
    assert found[0].startswith("pages of group 0 (full_attention)")
    assert found[1:] == (source[0].pages[0], target[0].pages[0])


def test_nvfp4_pages_are_not_the_rows_that_their_views_say() -> None:
    one, two = nvfp4_page(range(KV_HEADS), range(8)), nvfp4_page(range(KV_HEADS), range(8, 16))
    views = [f"H{2 * KV_HEADS}.N{n}.C{nvfp4_kv_cache_full_dim(HEAD_SIZE)}" for n in (8, 16)]
    rows = SlotConverter(views[:1], views[1:], source_block_size=8, target_block_size=16)
    made = np.zeros(rows.target_bytes, np.uint8)
    for block, page in enumerate((one, two)):
        rows.copy(page, block, made, 0, [HeadSlice(0, 0, 2 * KV_HEADS)], end_token=16)
    assert (made != nvfp4_page(range(KV_HEADS), range(16))).any()


@pytest.mark.parametrize("writer", ["fa2", "trtllm"])
def test_nvfp4_of_like_engines_is_copied_whole(writer: str) -> None:
    for ranks in (1, 2):
        ours, theirs = (nvfp4_shapes(ranks, 16, writer=writer) for _ in range(2))
        assert difference(ours, ranks, theirs, ranks, KV_HEADS) is None
        assert same_bytes(ours[0], theirs[0])


def test_the_two_writers_of_nvfp4_refuse_each_other() -> None:
    ours, theirs = (nvfp4_shapes(1, 16, writer=writer) for writer in ("fa2", "trtllm"))
    assert ours[0].pages == theirs[0].pages
    assert difference(ours, 1, theirs, 1, KV_HEADS) == (
        "attention of group 0",
        "FLASHINFER.fa2.nvfp4",
        "FLASHINFER.trtllm.nvfp4",
    )


SCALED = [mode for mode in KVQuantMode if mode.is_per_token_head]


def scaled_spec(mode: KVQuantMode, ranks: int, block_size: int) -> FullAttentionSpec:
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=KV_HEADS // ranks,
        head_size=HEAD_SIZE,
        dtype=torch.int8 if mode == KVQuantMode.INT8_PER_TOKEN_HEAD else torch.uint8,
        kv_quant_mode=mode,
    )
    return TritonAttentionBackend.customize_spec(spec)


def scaled_page(
    mode: KVQuantMode, ranks: int, block_size: int, dims: str, rank: int, block: int
) -> np.ndarray:
    """A block of a rank, whose numbers and scales are others for each token and head, by vLLM's own
    views of it."""
    spec = scaled_spec(mode, ranks, block_size)
    heads, content = spec.num_kv_heads, spec.state_content_size_bytes
    sizes = (1, heads, block_size, content) if dims == "HNC" else (1, block_size, heads, content)
    page = torch.zeros(sizes, dtype=spec.dtype)
    kernels = object.__new__(TritonAttentionImpl)
    kernels._k_scale_cache = None
    kernels._kv_quant_mode = mode
    kernels.fp8_dtype = torch.float8_e4m3fn
    keys, values = kernels._pth_key_value_caches(page if dims == "HNC" else page.transpose(1, 2))
    scales = (kernels._k_scale_cache, kernels._v_scale_cache)
    for side, (numbers, scale) in enumerate(zip((keys, values), scales, strict=True)):
        width = numbers.shape[-1] - 4  # the last four bytes are the scale
        for h in range(heads):
            for t in range(block_size):
                head, token = rank * heads + h, block * block_size + t
                row = np.random.default_rng([side, head, token]).integers(0, 256, width, np.uint8)
                numbers.view(torch.uint8)[0, t, h, :width] = torch.from_numpy(row)
                scale[0, t, h] = 1000 * side + 100 * head + token
    return page.flatten().view(torch.uint8).numpy()


@pytest.mark.shows(
    "scales of each token and head, between other tensor-parallel and block sizes",
    control="test_numbers_without_their_scales_are_noticed",
)
@pytest.mark.parametrize("mode", SCALED, ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((2, 16, "HNC"), (1, 16, "HNC")),
        ((1, 16, "HNC"), (2, 16, "HNC")),
        ((1, 16, "HNC"), (1, 32, "HNC")),
        ((2, 32, "NHC"), (1, 16, "HNC")),
    ],
    ids=["TP 2 to 1", "TP 1 to 2", "larger blocks", "all of it"],
)
def test_scales_of_tokens_and_heads_move_with_these(
    mode: KVQuantMode, theirs: tuple[int, int, str], ours: tuple[int, int, str]
) -> None:
    source, target = (
        shapes({"a": layer("TRITON_ATTN")}, {"a": scaled_spec(mode, ranks, block_size)}, dims)
        for ranks, block_size, dims in (theirs, ours)
    )
    assert difference(source, theirs[0], target, ours[0], KV_HEADS) is None
    convert, tokens = converter(source[0], target[0]), 32
    for rank in range(ours[0]):
        parts = head_sources(
            total=KV_HEADS,
            source_heads=KV_HEADS // theirs[0],
            source_ranks=theirs[0],
            target_heads=KV_HEADS // ours[0],
            target_rank=rank,
            target_ranks=ours[0],
        )
        for block in range(tokens // ours[1]):
            made = np.zeros(convert.target_bytes, np.uint8)
            for source_rank, part in parts:
                for number in range(tokens // theirs[1]):
                    page = scaled_page(mode, *theirs, source_rank, number)
                    convert.copy(page, number, made, block, [part], end_token=tokens)
            assert (made == scaled_page(mode, *ours, rank, block)).all()


@pytest.mark.parametrize("mode", SCALED, ids=lambda mode: mode.name)
def test_numbers_without_their_scales_are_noticed(mode: KVQuantMode) -> None:
    """The heads of two ranks one after the other are those of one rank."""
    expected = scaled_page(mode, 1, 16, "HNC", 0, 0)
    heads = [scaled_page(mode, 2, 16, "HNC", rank, 0) for rank in range(2)]
    sides = np.concatenate(heads).reshape(KV_HEADS, 16, 2, -1)
    assert (sides.ravel() == expected).all()
    sides[..., -4:] = 0
    assert (sides.ravel() != expected).any()


def test_flashinfer_is_converted_where_it_keeps_rows() -> None:
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    kernel = layer("FLASHINFER", impl=SimpleNamespace(is_kvcache_nvfp4=False, nvfp4_fa2=False))
    ours = shapes({"a": kernel}, {"a": spec})
    theirs = shapes({"a": kernel}, {"a": replace(spec, block_size=64, num_kv_heads=4)}, "NHC")
    assert difference(ours, 2, theirs, 1, KV_HEADS) is None


def test_engines_refuse_each_other_where_one_interleaves_values() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    plain, interleaved = (
        shapes({"a": layer("ROCM_ATTN", impl=impl)}, {"a": spec})
        for impl in (SimpleNamespace(), SimpleNamespace(_use_interleaved_v_cache=True))
    )
    assert difference(plain, 1, plain, 1, KV_HEADS) is None
    assert difference(plain, 1, interleaved, 1, KV_HEADS) == (
        "attention of group 0",
        "ROCM_ATTN",
        "ROCM_ATTN.interleaved",
    )


FULL = FullAttentionSpec(
    block_size=32, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
)
LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def page_of(kernel: Any, tokens: int, dims: str) -> tuple[GroupShape, np.ndarray]:
    """A group of one layer, and a page of it in which each number tells its head, token, and place
    in the token, as a converter from plain rows writes it."""
    (shape,) = shapes({"a": kernel}, {"a": replace(FULL, block_size=tokens)}, dims)
    halves = "|" in shape.pages[0]
    row = f"N{tokens}.C{2 * HEAD_SIZE}"
    rows = f"H{KV_HEADS}.({row}|{row})" if halves else f"H{KV_HEADS}.N{tokens}.C{4 * HEAD_SIZE}"
    numbers = np.arange(KV_HEADS * tokens * 2 * HEAD_SIZE, dtype=np.uint16)
    numbers = numbers.reshape(KV_HEADS, tokens, 2, HEAD_SIZE)
    if halves:
        numbers = numbers.swapaxes(1, 2)
    plain = np.ascontiguousarray(numbers).view(np.uint8).ravel()
    made = np.zeros_like(plain)
    convert = SlotConverter([rows], shape.pages, source_block_size=tokens, target_block_size=tokens)
    convert.copy(plain, 0, made, 0, [HeadSlice(0, 0, KV_HEADS)], end_token=tokens)
    return shape, made


@pytest.mark.shows(
    "attention kernels that differ",
    control="test_pages_of_other_kernels_that_are_copied_as_they_are_are_noticed",
)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((layer("FLASH_ATTN"), "HNC"), (layer("FLASHINFER"), "NHC")),
        ((layer("TRITON_ATTN"), "NHC"), (layer("FLASH_ATTN"), "NHC")),
        ((layer("CPU_ATTN", isa="vec"), "HNC"), (layer("CPU_ATTN", isa="amx"), "HNC")),
        ((layer("CPU_ATTN", isa="amx"), "HNC"), (layer("CPU_ATTN", isa="vec16"), "HNC")),
    ],
    ids=["layout", "same-bytes", "to-tiles", "from-tiles"],
)
def test_pages_of_other_kernels_are_made_ours(ours: Any, theirs: Any) -> None:
    source, page = page_of(ours[0], 32, ours[1])
    target, expected = page_of(theirs[0], 32, theirs[1])
    assert source.attention != target.attention
    assert difference((source,), 1, (target,), 1, KV_HEADS) is None
    made = np.zeros_like(page)
    convert = converter(source, target, like_ranks=True)
    convert.copy(page, 0, made, 0, [HeadSlice(0, 0, KV_HEADS)], end_token=32)
    assert (made == expected).all()
    assert same_bytes(source, target) == (page == expected).all()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((layer("FLASH_ATTN"), "HNC"), (layer("FLASHINFER"), "NHC")),
        ((layer("CPU_ATTN", isa="vec"), "HNC"), (layer("CPU_ATTN", isa="amx"), "HNC")),
    ],
    ids=["layout", "tiles"],
)
def test_pages_of_other_kernels_that_are_copied_as_they_are_are_noticed(
    ours: Any, theirs: Any
) -> None:
    source, page = page_of(ours[0], 32, ours[1])
    target, expected = page_of(theirs[0], 32, theirs[1])
    assert source.kept == target.kept
    assert page.size == expected.size
    assert (page != expected).any()


def test_latents_are_read_by_other_kernels_for_latents_only() -> None:
    one, other, full = (
        shapes({"a": layer(name)}, {"a": spec})
        for name, spec in (("FLASHMLA", LATENT), ("TRITON_MLA", LATENT), ("FLASH_ATTN", FULL))
    )
    assert difference(one, 2, other, 1, 1) is None
    assert difference(one, 1, full, 1, 1) is not None


@pytest.mark.parametrize(
    ("kernel", "spec"),
    [
        (layer("ROCM_ATTN"), FULL),
        (layer("OF_ANOTHER_PACKAGE"), FULL),
        (layer("CPU_ATTN", isa="neon"), FULL),
        (layer("FLASHINFER"), replace(FULL, dtype=torch.uint8)),
        (layer("TRITON_ATTN"), replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)),
    ],
    ids=["pieces", "unknown", "unknown-instructions", "fp8", "scales-of-tokens"],
)
def test_kernels_that_differ_refuse_each_other_where_a_page_is_not_known(
    kernel: Any, spec: FullAttentionSpec
) -> None:
    ours = shapes({"a": kernel}, {"a": spec})
    theirs = shapes({"a": layer("FLASH_ATTN")}, {"a": spec})
    found = difference(ours, 1, theirs, 1, KV_HEADS)
    assert found == ("attention of group 0", ours[0].attention, theirs[0].attention)
    assert difference(ours, 1, ours, 1, KV_HEADS) is None


def test_pages_of_a_cpu_and_of_a_gpu_are_refused_by_their_orders() -> None:
    ours = shapes({"a": layer("CPU_ATTN", isa="vec")}, {"a": FULL})
    theirs = shapes({"a": layer("FLASH_ATTN")}, {"a": FULL})
    found = difference(ours, 1, theirs, 1, KV_HEADS)
    assert found is not None
    assert found[0].startswith("pages of group 0 (full_attention)")


def test_an_engine_that_does_not_say_what_it_keeps_is_read_by_like_engines_only() -> None:
    """As engines of the last release."""
    ours, theirs = (
        shapes({"a": layer(name)}, {"a": FULL}) for name in ("FLASH_ATTN", "FLASHINFER")
    )
    older = tuple(msgspec.structs.replace(group, kept=msgspec.UNSET) for group in ours)
    assert difference(older, 1, theirs, 1, KV_HEADS) is not None
    assert difference(older, 1, ours, 1, KV_HEADS) is None


def sparse(block_size: int) -> tuple[GroupShape, ...]:
    """As DeepSeek V3.2 has it; its indexers keep the scales of a block behind all its tokens."""
    spec = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    layers = {"mla": layer("FLASHMLA_SPARSE"), "indexer": layer("DEEPSEEK_V32_INDEXER")}
    return shapes(layers, {"mla": spec, "indexer": replace(spec, head_size=132, dtype=torch.uint8)})


def test_what_all_ranks_hold_is_copied_whole_whatever_its_order() -> None:
    assert sparse(64)[0].pages == ("N64.C1152?", "N64.C132?")
    assert difference(sparse(64), 4, sparse(64), 1, 1) is None
    (shape,) = sparse(64)
    convert = converter(shape, shape)
    assert convert.source_bytes == convert.target_bytes == 64 * (1152 + 132)
    page = np.random.default_rng(0).integers(0, 256, convert.source_bytes, np.uint8)
    made = np.zeros_like(page)
    convert.copy(page, 3, made, 3, [HeadSlice(0, 0, 1)] * 2, end_token=4 * 64)
    assert (made == page).all()
    assert difference(sparse(64), 1, sparse(128), 1, 1) is not None


def test_names_for_the_same_bytes_must_agree_in_what_they_keep() -> None:
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    group = KVCacheGroupSpec(["a", "b"], spec)
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
    view = [["H2.N16.C128"]]
    rows, other = layer("TRITON_ATTN"), layer("OF_ANOTHER_PACKAGE")
    assert kernel_orders(config, {"a": rows, "b": rows}, view) == (("H2.N16.C128",),)
    assert kernel_orders(config, {"a": rows, "b": other}, view) == (("H2.N16.C128?",),)


def test_states_are_what_their_views_say() -> None:
    spec = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,))
    config = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)]
    )
    assert kernel_orders(config, {"a": layer("GDN_ATTN")}, [["C32"]]) == (("C32",),)


def test_fp8_in_tiles_of_its_own_is_told_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for here in (False, True):
        monkeypatch.setattr(kernels, "has_amx_fp8", lambda here=here: here)
        for dtype in ("auto", "fp8_e4m3"):
            one = layer("CPU_ATTN", isa="amx", kv_cache_dtype=dtype)
            kept = torch.bfloat16 if dtype == "auto" else torch.uint8
            spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=kept)
            names.append(shapes({"a": one}, {"a": spec})[0].attention)
    plain, fp8 = "CPU_ATTN.amx", "CPU_ATTN.amx.fp8_e4m3"
    assert names == [plain, fp8, plain, "CPU_ATTN.amx_fp8.fp8_e4m3"]


def quantized(kernel: str, kind: str, heads: int = 2, **impl: Any) -> tuple[GroupShape, ...]:
    """What an engine with KV of a kind tells its peers."""
    one = layer(kernel, kv_cache_dtype=kind, impl=SimpleNamespace(**impl))
    kept = STR_DTYPE_TO_TORCH_DTYPE.get(kind, torch.bfloat16)
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=heads,
        head_size=HEAD_SIZE,
        dtype=kept,
        kv_quant_mode=get_kv_quant_mode(kind),
    )
    return shapes({"a": one}, {"a": spec})


def test_each_kind_of_quantized_kv_has_a_name_of_its_own() -> None:
    kinds = [each for each in get_args(CacheDType) if is_quantized_kv_cache(each) and each != "fp8"]
    told = {kind: quantized("KERNEL", kind)[0].attention for kind in kinds}
    assert len(set(told.values())) == len(kinds) > 10
    assert quantized("KERNEL", "fp8") == quantized("KERNEL", "fp8_e4m3")
    assert quantized("KERNEL", "auto")[0].attention == "KERNEL"


FNUZ = ("TRITON_ATTN", "fp8_e4m3", {"is_fp8_fnuz": True})
AMPERE = ("TURBOQUANT", "turboquant_k8v4", {"is_cuda": True, "has_device_capability": False})


@pytest.mark.parametrize(
    ("kernel", "kind", "there", "told"),
    [
        (*FNUZ, ".fnuz"),
        ("TRITON_ATTN", "auto", FNUZ[2], ""),
        ("TRITON_ATTN", "int8_per_token_head", FNUZ[2], ""),
        (*AMPERE, ".e4b15"),
        ("TURBOQUANT", "turboquant_4bit_nc", AMPERE[2], ""),
        ("TRITON_ATTN", "fp8_e4m3", AMPERE[2], ""),
    ],
)
def test_numbers_that_a_platform_encodes_in_its_own_way_are_told(
    monkeypatch: pytest.MonkeyPatch, kernel: str, kind: str, there: dict[str, bool], told: str
) -> None:
    here = quantized(kernel, kind)
    for name, value in there.items():
        monkeypatch.setattr(current_platform, name, lambda *_, value=value: value)
    other = quantized(kernel, kind)
    assert other[0].attention == here[0].attention + told
    found = difference(here, 1, other, 1, KV_HEADS)
    assert (found is None) == (not told)


def test_turboquant_with_its_scales_apart_is_no_rows() -> None:
    rows, apart = (
        quantized("TURBOQUANT", "turboquant_4bit_nc", _soa_store=soa) for soa in (False, True)
    )
    found = difference(rows, 1, apart, 1, KV_HEADS)
    names = ("TURBOQUANT.turboquant_4bit_nc", "TURBOQUANT.soa.turboquant_4bit_nc")
    assert found == ("attention of group 0", *names)
    assert not rows[0].pages[0].endswith("?")
    assert difference(apart, 1, apart, 1, KV_HEADS) is None
    one_rank = quantized("TURBOQUANT", "turboquant_4bit_nc", heads=4, _soa_store=True)
    found = difference(apart, 2, one_rank, 1, KV_HEADS)
    assert found is not None
    assert found[0].startswith("pages of group 0")


@pytest.mark.parametrize("kernel", ["TRITON_ATTN", "CPU_ATTN"])
def test_a_kind_that_is_not_known_is_copied_whole_or_refused(kernel: str) -> None:
    """vLLM takes the names of kinds that packages register."""
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    one = layer(kernel, kv_cache_dtype="of_a_package", isa="vec")
    (ours,) = shapes({"a": one}, {"a": spec})
    assert ours.pages[0].endswith("?")
    assert ours.kept is msgspec.UNSET
    plain = shapes({"a": layer(kernel, isa="vec")}, {"a": spec})
    assert difference((ours,), 1, (ours,), 1, KV_HEADS) is None
    assert difference((ours,), 1, plain, 1, KV_HEADS) is not None


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_the_order_named_is_what_vllms_kernels_on_cpus_write(isa: str, kv_dtype: str) -> None:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is no CPU build")
    current_platform.import_kernels()
    dtype = torch.bfloat16
    heads, tokens, dim = 2, 32, 64
    kept = dtype if kv_dtype == "auto" else torch.uint8
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=dim, dtype=kept)
    (shape,) = shapes({"a": layer("CPU_ATTN", isa=isa, kv_cache_dtype=kv_dtype)}, {"a": spec})
    if shape.pages[0].endswith("?"):
        pytest.skip(f"the order of {shape.attention} is not known")
    key, value = torch.randint(0, 8, (2, tokens, heads, dim)).to(dtype)  # FP8 has these numbers
    cache = torch.zeros(1, heads, 2 * tokens, dim, dtype=kept)
    try:  # it takes a CPU with tiles to compute with them, but not to write them
        ops.cpu_attn_reshape_and_cache(
            key, value, *cache.chunk(2, dim=2), torch.arange(tokens), isa, 1.0, 1.0, kv_dtype
        )
    except RuntimeError as error:
        pytest.skip(f"vLLM has no {isa} kernels for this CPU: {error}")
    rows = f"H{heads}.(N{tokens}.C{dim * kept.itemsize}|N{tokens}.C{dim * kept.itemsize})"
    plain = SlotConverter(shape.pages, [rows], source_block_size=32, target_block_size=32)
    made = np.zeros(plain.target_bytes, np.uint8)
    page = cache.view(torch.uint8).flatten().numpy()
    plain.copy(page, 0, made, 0, [HeadSlice(0, 0, heads)], end_token=tokens)
    found = torch.from_numpy(made)
    found = found.view(torch.float8_e4m3fn if kv_dtype != "auto" else dtype).to(dtype)
    want = torch.stack([key, value]).permute(2, 0, 1, 3)
    assert torch.equal(found.view(heads, 2, tokens, dim), want)
