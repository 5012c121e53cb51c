# SPDX-License-Identifier: Apache-2.0
"""How ranks share out states, compared with what vLLM's own layers load on each rank.

A layer of vLLM is made for each rank, and loads weights that are the numbers of their channels and
heads. So it says which of the model's channels and heads are in the state of that rank.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import MiniMaxText01LinearAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec

from omni_connector.errors import LayoutError
from omni_connector.kv.states import StateCut, cut_bytes, state_sources
from omni_connector.vllm_v1 import states
from omni_connector.vllm_v1.states import cuts_of

NAME = "model.layers.0"
HEADS, HEAD_DIM, KERNEL = 8, 3, 4
Ids = NDArray[np.int64]


def delta_config() -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=32,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        linear_num_key_heads=4,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=2,
        linear_value_head_dim=HEAD_DIM,
        linear_conv_kernel_dim=KERNEL,
        linear_attn_config={"head_dim": 16, "num_heads": HEADS, "short_conv_kernel_size": KERNEL},
        num_attention_heads=HEADS,
        num_hidden_layers=4,
    )


def mamba(kind: Any, config: VllmConfig, **sizes: Any) -> Any:
    return kind(
        hidden_size=32,
        ssm_state_size=2,
        conv_kernel_size=KERNEL,
        intermediate_size=HEADS * HEAD_DIM,
        use_conv_bias=True,
        use_bias=False,
        model_config=config.model_config,
        cache_config=config.cache_config,
        prefix=NAME,
        **sizes,
    )


def mamba2(groups: int) -> Callable[[VllmConfig], Any]:
    def made(config: VllmConfig) -> Any:
        return mamba(MambaMixer2, config, n_groups=groups, num_heads=HEADS, head_dim=HEAD_DIM)

    return made


def short_convolution(config: VllmConfig) -> Any:
    return ShortConv(
        SimpleNamespace(conv_L_cache=KERNEL, conv_bias=False),
        dim=24,
        layer_idx=0,
        model_config=config.model_config,
        cache_config=config.cache_config,
        prefix=NAME,
    )


LAYERS: dict[str, Callable[[VllmConfig], Any]] = {
    "Mamba 1": lambda config: mamba(MambaMixer, config, time_step_rank=4, use_rms_norm=False),
    "Mamba 2, one group": mamba2(1),
    "Mamba 2, eight groups": mamba2(8),
    "short convolution": short_convolution,
    "Qwen": lambda config: QwenGatedDeltaNetAttention(delta_config(), config, prefix=NAME),
    "Olmo": lambda config: olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention(
        delta_config(), config, prefix=NAME
    ),
    "Kimi": lambda config: KimiGatedDeltaNetAttention(delta_config(), config, prefix=NAME),
    "MiniMax": lambda config: MiniMaxText01LinearAttention(delta_config(), config, prefix=NAME),
}


@pytest.fixture
def toy_config(model: Path) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True),
        device_config=DeviceConfig("cpu"),
    )


@pytest.fixture
def layer_of(
    monkeypatch: pytest.MonkeyPatch, toy_config: VllmConfig
) -> Callable[[str, int, int], Any]:
    monkeypatch.setattr(olmo_gdn_linear_attn, "set_triton_allocator", lambda device: None)
    toy_config.cache_config.mamba_block_size = 16

    def made(name: str, rank: int, ranks: int) -> Any:
        group = SimpleNamespace(world_size=ranks, rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "_TP", group)
        toy_config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(toy_config):
            return LAYERS[name](toy_config)

    return made


def loaded(weight: torch.nn.Parameter, ids: Ids, shards: int | None = None) -> Ids:
    """The numbers that a weight has after its rank has loaded its part of all of them."""
    weight.data = torch.zeros_like(weight.data, dtype=torch.float32)
    full = torch.from_numpy(ids).float().reshape(-1, *[1] * (weight.dim() - 1))
    full = full.expand(-1, *weight.shape[1:]).contiguous()
    if shards is None:
        weight.weight_loader(weight, full)  # type: ignore[attr-defined]
    else:
        for shard, part in enumerate(full.chunk(shards)):
            weight.weight_loader(weight, part, shard)  # type: ignore[attr-defined]
    return (
        weight.data.flatten(1)[:, 0].long().numpy() if weight.dim() > 1 else weight.long().numpy()
    )


def channels_of(name: str, layer: Any) -> Ids:
    """Which channels of the model's convolution are in a rank's state."""
    if name == "short convolution":
        return loaded(layer.conv.weight, np.arange(24))
    if name == "Kimi":
        return loaded(layer.conv1d.weight, np.arange(3 * HEADS * 16), shards=3)
    if name == "Olmo":
        parts = np.split(np.arange(40), [8, 16])
        weight = layer.conv1d.weight
        weight.data = torch.zeros_like(weight.data, dtype=torch.float32)
        for shard, ids in enumerate(parts):
            full = torch.from_numpy(ids).float().reshape(-1, 1, 1).expand(-1, 1, KERNEL)
            weight.weight_loader(weight, full.contiguous(), shard)
        found: Ids = weight.data[:, 0, 0].long().numpy()
        return found
    widths = {"Mamba 1": 24, "Mamba 2, one group": 28, "Mamba 2, eight groups": 56, "Qwen": 40}
    return loaded(layer.conv1d.weight, np.arange(widths[name]))


def heads_of(name: str, layer: Any, whole: Any) -> Ids:
    """Which heads of the model have a matrix in a rank's state; of Mamba 1 which channels."""
    if name == "Mamba 1":
        return loaded(layer.D, np.arange(HEADS * HEAD_DIM))
    if name == "Kimi":
        return loaded(layer.dt_bias, np.arange(HEADS * 16))[::16] // 16
    if name == "MiniMax":
        slopes = whole.tp_slope.flatten().tolist()
        return np.array([slopes.index(slope) for slope in layer.tp_slope.flatten().tolist()])
    return loaded(layer.dt_bias, np.arange(HEADS))


def page_of(name: str, layer: Any, whole: Any) -> NDArray[np.uint8]:
    """The state of a rank, of which each number tells its place in the whole model's."""
    tensors = []
    shapes = list(layer.get_state_shape())
    dtypes = layer.get_state_dtype()
    wide = [{2: np.uint16, 4: np.uint32}[dtype.itemsize] for dtype in dtypes]
    if name != "MiniMax":
        ids = channels_of(name, layer)
        rows = np.arange(KERNEL - 1)[:, None] * 500 + ids
        assert rows.shape in (shapes[0], shapes[0][::-1])
        dim_first = mamba_utils.is_conv_state_dim_first()
        tensors.append((rows.T if dim_first else rows).astype(wide[0]))
    if len(tensors) < len(shapes):
        ids, inner = heads_of(name, layer, whole), shapes[-1][1:]
        numbers = ids[:, None] * 300 + np.arange(int(np.prod(inner)))
        assert numbers.shape == (shapes[-1][0], int(np.prod(inner)))
        tensors.append(numbers.astype(wide[-1]))
    return np.concatenate([np.ascontiguousarray(each).view(np.uint8).ravel() for each in tensors])


def config_of(layer: Any, config: VllmConfig) -> KVCacheConfig:
    spec = layer.get_kv_cache_spec(config)
    assert isinstance(spec, MambaSpec)
    tensor = KVCacheTensor(
        size=2 * spec.page_size_bytes,
        layers=[NAME],
        layer_stride=2 * spec.page_size_bytes,
        block_stride=spec.page_size_bytes,
    )
    return KVCacheConfig(
        num_blocks=2,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec([NAME], spec)],
    )


@pytest.mark.shows(
    "the channels and heads of states that vLLM's own layers give each rank",
    control="test_a_convolution_that_is_cut_as_one_piece_is_another",
)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (4, 2), (2, 4), (1, 4)], ids=str)
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.pairs
def test_a_rank_gets_the_channels_and_heads_that_vllm_gives_it(
    name: str,
    ranks: tuple[int, int],
    layout: str,
    layer_of: Callable[[str, int, int], Any],
    toy_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
    whole = layer_of(name, 0, 1)
    cuts: list[StateCut] = []
    pages: list[list[NDArray[np.uint8]]] = []
    for number in ranks:
        told = set()
        pages.append([])
        for rank in range(number):
            layer = layer_of(name, rank, number)
            # Some weights ask which rank they are on only when they are loaded.
            pages[-1].append(page_of(name, layer, whole))
            told.update(cuts_of(config_of(layer, toy_config), {NAME: layer}, number))
        (cut,) = told  # all ranks say the same
        cuts.append(cut)
    for rank, expected in enumerate(pages[1]):
        made = np.full(cut_bytes(cuts[1]), 255, np.uint8)
        sources = state_sources(cuts[0], ranks[0], cuts[1], rank, ranks[1])
        for source, slices in sources.items():
            slices.copy(pages[0][source], 0, made, 0, (), end_token=0)
        assert made.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["Mamba 2, one group", "Mamba 2, eight groups", "Qwen", "Kimi"])
def test_a_convolution_that_is_cut_as_one_piece_is_another(
    name: str,
    layer_of: Callable[[str, int, int], Any],
    toy_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control."""
    monkeypatch.setattr(states, "_RULES", dict.fromkeys(states._RULES, states._channels))
    whole = layer_of(name, 0, 1)
    page = page_of(name, whole, whole)
    (cut,) = cuts_of(config_of(whole, toy_config), {NAME: whole}, 1)
    layer = layer_of(name, 1, 2)
    expected = page_of(name, layer, whole)
    (own,) = cuts_of(config_of(layer, toy_config), {NAME: layer}, 2)
    made = np.zeros(len(expected), np.uint8)
    if name == "Mamba 2, one group":  # as many channels on each rank as B and C are more
        with pytest.raises(LayoutError):
            state_sources(cut, 1, own, 1, 2)
        return
    for slices in state_sources(cut, 1, own, 1, 2).values():
        slices.copy(page, 0, made, 0, (), end_token=0)
    assert made.tobytes() != expected.tobytes()


def test_layers_of_other_classes_and_other_states_have_no_rule(
    layer_of: Callable[[str, int, int], Any], toy_config: VllmConfig
) -> None:
    layer = layer_of("Mamba 2, one group", 0, 1)
    config = config_of(layer, toy_config)
    other = type("OtherMixer", (MambaMixer2,), {})
    for layers in ({}, {NAME: SimpleNamespace()}, {NAME: other.__new__(other)}):
        assert cuts_of(config, layers, 1) == ((),)
    spec = config.kv_cache_groups[0].kv_cache_spec
    # As with `--use-replayssm`, which keeps the latest inputs, too.
    more = MambaSpec(
        block_size=16, shapes=(*spec.shapes, (8, 4, 3)), dtypes=(*spec.dtypes, torch.float16)
    )
    config.kv_cache_groups[0].kv_cache_spec = more
    assert cuts_of(config, {NAME: layer}, 1) == ((),)


def test_a_state_that_every_rank_has_is_read_whole(toy_config: VllmConfig) -> None:
    spec = MambaSpec(block_size=16, shapes=((3, 8),), dtypes=(torch.float16,), tp_replicated=True)
    config = KVCacheConfig(
        num_blocks=2, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([NAME], spec)]
    )
    (cut,) = cuts_of(config, {}, 4)
    page = np.arange(48, dtype=np.uint8)
    ((rank, slices),) = state_sources(cut, 4, cut, 1, 2).items()
    made = np.zeros(48, np.uint8)
    slices.copy(page, 0, made, 0, (), end_token=0)
    assert made.tobytes() == page.tobytes()
    assert 0 <= rank < 4
