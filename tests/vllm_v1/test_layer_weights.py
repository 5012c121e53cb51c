# SPDX-License-Identifier: Apache-2.0
"""What a forward pass computes with is hashed, wherever vLLM's kernels keep it.

The layers are vLLM's own, or are processed by vLLM's own code. Libraries for GPUs (deep_gemm, b12x,
Triton's kernels) are not installed here, and only their functions that pack are stood in for. Of
b12x and Triton's kernels the packed objects are stand-ins, too: with the attributes that vLLM
reads, or where it reads none, dataclasses of tensors.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor import offloader
from vllm.model_executor.kernels.linear.mxfp8 import b12x as b12x_mxfp8
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_oracle
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.offloader import prefetch
from vllm.models.deepseek_v4.nvidia import model as deepseek_v4
from vllm.models.kimi_k3.nvidia import model as kimi

from omni_connector.identity.epochs import WeightsDigest
from omni_connector.identity.loaded_weights import UnreadableWeightsError, digest_of
from omni_connector.vllm_v1.layer_weights import weights_of
from omni_connector.vllm_v1.patches import watch_packing

pytestmark = pytest.mark.vllm

NAME = "experts"  # of the layer in its model


def digest(model: torch.nn.Module) -> WeightsDigest:
    return digest_of(weights_of(model))


def as_loaded(layer: torch.nn.Module, process: Callable[[], object]) -> torch.nn.Module:
    """A model of one layer, as vLLM's loader makes it and processes it."""
    model = torch.nn.ModuleDict({NAME: layer})
    record_metadata_for_reloading(model)
    process()
    return model


def unwatched(method: type) -> Callable[..., object]:
    """vLLM's own processing, which no digests are made before: as on a GPU."""
    process = method.process_weights_after_loading
    return getattr(process, "__wrapped__", process)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    values = torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else values.to(dtype)


def filled(layer: torch.nn.Module, changed: str | None) -> None:
    """Fill the parameters of a layer; one has another last element."""
    for seed, (name, each) in enumerate(sorted(layer.named_parameters())):
        each.data.copy_(drawn(seed, *each.shape, dtype=each.dtype))
        if name == changed:
            each.data.view(torch.uint8).view(-1)[-1] += 1


# Linear layers of int8 on a CPU

INT8 = {
    "format": "int-quantized",
    "quant_method": "compressed-tensors",
    "ignore": [],
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


@pytest.fixture
def int8(monkeypatch) -> torch.nn.Module:
    """A model of one layer that is quantized to int8, with weights that are not processed yet."""
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(parallel_state, "_TP", group)
    config = compressed_tensors.CompressedTensorsConfig.from_config(INT8)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        # Of 40 outputs, which is too few for AMX: oneDNN packs them on every CPU.
        layer = ReplicatedLinear(64, 40, bias=False, quant_config=config, prefix="some.linear")
    model = torch.nn.ModuleDict({NAME: layer})
    record_metadata_for_reloading(model)
    return model


def load(model: torch.nn.Module, *, swapped: bool = False) -> None:
    """Load weights into the model and have vLLM process them, as it loads anew, too.

    Args:
        swapped: whether two elements of a row are exchanged: its scale and its sum, which vLLM
            keeps as parameters, stay.
    """
    layer = model[NAME]
    weight = drawn(0, 40, 64, dtype=torch.int8)
    if swapped:
        weight[3, [5, 6]] = weight[3, [6, 5]]
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.full((40, 1), 0.5), requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight is None


def test_weights_that_onednn_has_packed_are_those_that_were_loaded(int8):
    watch_packing()
    load(int8)
    before = digest(int8)
    assert f"{NAME}.weight" in weights_of(int8)
    load(int8, swapped=True)
    assert digest(int8).content != before.content
    assert digest(int8).form == before.form
    load(int8)
    assert digest(int8) == before


def test_a_layer_that_was_packed_unseen_is_named(int8, monkeypatch):
    """As the plugin would find it if it were loaded after the model."""
    method = type(int8[NAME].quant_method)
    monkeypatch.setattr(method, "process_weights_after_loading", unwatched(method))
    load(int8)
    with pytest.raises(UnreadableWeightsError, match=rf"packed {NAME}\.weight"):
        weights_of(int8)


def test_methods_that_are_defined_later_are_followed():
    watch_packing()

    class Base(QuantizeMethodBase):
        create_weights = apply = None

        def process_weights_after_loading(self, layer):
            layer.weight = None

    class Method(Base):
        def process_weights_after_loading(self, layer):
            layer.scale.data.mul_(2)
            super().process_weights_after_loading(layer)  # is no other processing

    layer = torch.nn.Linear(8, 8)
    layer.scale = torch.nn.Parameter(torch.ones(1))
    loaded = digest_of({"weight": layer.weight})
    Method().process_weights_after_loading(layer)
    found = weights_of(layer)
    assert digest_of({"weight": found["weight"]}) == loaded
    assert found["scale"] == 2


# Experts and linear layers of GPUs


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """What vLLM takes apart of `b12x`: nested dataclasses."""

    values: torch.Tensor
    scales: torch.Tensor
    out_features: int


@dataclasses.dataclass
class Wrapped:
    """As the tensors of Triton's kernels, whose storage has the tensor of torch."""

    storage: SimpleNamespace
    dtype: str = "fp4"


def b12x(changed: str | None, monkeypatch) -> torch.nn.Module:
    layer = torch.nn.Module()
    weight = torch.zeros(32, 64, dtype=torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.zeros(32, 2, dtype=torch.uint8), False)
    filled(layer, changed)

    def pack_weight(weight, scale):
        return Packed(weight.clone(), scale.clone(), len(weight))

    library = SimpleNamespace(pack_weight=pack_weight)
    monkeypatch.setattr(b12x_mxfp8, "_import_b12x_mxfp8", lambda: library)
    kernel = b12x_mxfp8.B12xMxfp8LinearKernel.__new__(b12x_mxfp8.B12xMxfp8LinearKernel)
    layer.quant_method = SimpleNamespace(kernel=kernel)
    return as_loaded(layer, lambda: kernel.process_weights_after_loading(layer))


def triton(changed: str | None, monkeypatch) -> torch.nn.Module:
    experts, hidden, inner = 2, 64, 32
    layer = torch.nn.Module()
    for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        for end, share in (("", 2), ("_scale", 32)):
            weight = torch.zeros(experts, rows, columns // share, dtype=torch.uint8)
            layer.register_parameter(f"{name}_weight{end}", torch.nn.Parameter(weight, False))
        layer.register_parameter(f"{name}_bias", torch.nn.Parameter(torch.zeros(experts, rows)))
    filled(layer, changed)

    def swizzle(weight, scale):
        wrapped = (Wrapped(SimpleNamespace(data=each.clone())) for each in (weight, scale))
        weight, scale = wrapped
        return weight, SimpleNamespace(scale=None), scale

    def made(**parts):
        return SimpleNamespace(**parts)

    monkeypatch.setattr(mxfp4_oracle, "_swizzle_mxfp4", swizzle)
    monkeypatch.setattr(mxfp4_oracle, "FlexCtx", made, raising=False)
    monkeypatch.setattr(mxfp4_oracle, "PrecisionConfig", made, raising=False)
    # vLLM 0.30 imports them when it needs them.
    kernels = SimpleNamespace(FlexCtx=made, PrecisionConfig=made)
    monkeypatch.setitem(sys.modules, "triton_kernels", SimpleNamespace(matmul_ogs=kernels))
    monkeypatch.setitem(sys.modules, "triton_kernels.matmul_ogs", kernels)
    method = GptOssMxfp4MoEMethod.__new__(GptOssMxfp4MoEMethod)
    method.mxfp4_backend = mxfp4_oracle.Mxfp4MoeBackend.TRITON
    method.num_experts, method.hidden_size, method.intermediate_size = experts, hidden, inner
    method.moe = SimpleNamespace(w13_num_shards=2)
    method.experts_cls = method._cache_permute_indices = None
    layer.quant_method = method
    return as_loaded(layer, lambda: unwatched(GptOssMxfp4MoEMethod)(method, layer))


def mega_experts(
    made_by: type[torch.nn.Module] | None, changed: str | None, monkeypatch, **settings: object
) -> torch.nn.Module:
    if made_by is None:
        pytest.skip("from vLLM 0.33 on one class makes them, with other arguments")
    # vLLM 0.30 packs on a GPU alone.
    backends = pytest.importorskip("vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe")
    library = SimpleNamespace(
        transform_sf_into_required_layout=lambda scale, *_: scale,
        transform_weights_for_mega_moe=lambda first, second, **_: (
            (first[0].clone(), first[1]),
            second,
        ),
    )
    monkeypatch.setattr("vllm.utils.deep_gemm._import_deep_gemm", lambda: library)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    layer = made_by(
        config,
        num_experts=2,
        num_local_experts=2,
        experts_start_idx=0,
        top_k=1,
        hidden_size=64,
        intermediate_size=32,
        **settings,
    )
    layer._backend = backends.DeepGemmSm100MegaMoEBackend()
    filled(layer, changed)
    return as_loaded(layer, layer.finalize_weights)


def mega_moe(changed: str | None, monkeypatch) -> torch.nn.Module:
    return mega_experts(
        getattr(deepseek_v4, "DeepseekV4MegaMoEExperts", None), changed, monkeypatch
    )


def kimi_k3(changed: str | None, monkeypatch) -> torch.nn.Module:
    situ = {"activation": "situ", "activation_beta": 4.0, "activation_linear_beta": 25.0}
    return mega_experts(getattr(kimi, "KimiK3MegaMoEExperts", None), changed, monkeypatch, **situ)


_EXPERTS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
KERNELS = [
    pytest.param(b12x, ("weight", "weight_scale"), id="b12x"),
    pytest.param(triton, (*_EXPERTS, "w13_bias", "w2_bias"), id="triton"),
    pytest.param(mega_moe, _EXPERTS, id="mega_moe"),
    pytest.param(kimi_k3, _EXPERTS, id="kimi_k3"),
]


@pytest.mark.parametrize(("made", "parameters"), KERNELS)
def test_one_element_of_a_packed_layer_is_seen(made, parameters, monkeypatch):
    digests = [digest(made(changed, monkeypatch)) for changed in (None, None, *parameters)]
    assert digests[0] == digests[1]
    assert len({each.content for each in digests}) == 1 + len(parameters)
    assert len({each.form for each in digests}) == 1


@pytest.mark.parametrize(("made", "parameters"), KERNELS)
def test_a_layer_whose_weights_are_not_found_is_named(made, parameters, monkeypatch):
    """As if its kernel kept them where Python cannot read."""
    model = made(None, monkeypatch)
    for name, value in list(vars(model[NAME]).items()):
        if isinstance(value, Packed | Wrapped) or (isinstance(value, tuple) and value):
            delattr(model[NAME], name)
    model[NAME]._buffers.clear()
    model[NAME].quant_method = object()
    with pytest.raises(UnreadableWeightsError, match=NAME):
        weights_of(model)


def test_all_layers_that_are_not_known_are_counted():
    model = torch.nn.ModuleDict({name: torch.nn.Module() for name in ("some", "other", "rotary")})
    for name in ("some", "other"):
        model[name].quant_method = SimpleNamespace()
    with pytest.raises(
        UnreadableWeightsError, match="some has a SimpleNamespace and no tensor, and 1 more"
    ):
        weights_of(model)
    model["some"].weight = model["other"].weight = torch.nn.Parameter(torch.ones(3))
    assert list(weights_of(model)) == ["some.weight", "other.weight"]


def test_what_a_kernel_needs_not_is_not_missed():
    """Marlin empties the order of rows where there is none, and attention moves its scales."""
    layer = torch.nn.Linear(64, 64, bias=False)
    layer.g_idx = torch.nn.Parameter(torch.zeros(64, dtype=torch.int32), False)
    layer.positions = torch.zeros(3)  # scratch memory
    attention = torch.nn.Module()
    attention.k_scale = torch.nn.Parameter(torch.ones(1))
    attention.register_buffer("_k_scale", torch.ones(1))
    attention.positions = torch.zeros(3)
    layer.attention = attention

    def process():
        layer.g_idx = torch.nn.Parameter(torch.empty(0), False)
        del attention.k_scale

    found = weights_of(as_loaded(layer, process))
    assert sorted(found) == [f"{NAME}.{name}" for name in ("attention._k_scale", "g_idx", "weight")]


# Attributes that are no parameters


def test_absorbed_weights_and_those_of_an_implementation_count():
    """MLA computes with absorbed weights, whatever has become of `kv_b_proj` since."""
    model = torch.nn.Linear(8, 8)
    model.W_UK_T = torch.ones(8)
    model.impl = SimpleNamespace(_w_uv_packed=torch.ones(4), softmax_scale=0.5)
    assert sorted(weights_of(model)) == ["W_UK_T", "bias", "impl._w_uv_packed", "weight"]
    before = digest(model)
    model.W_UK_T[0] = 2
    assert digest(model).content != before.content
    model.W_UK_T[0] = 1
    assert digest(model) == before
    model.impl._w_uv_packed[0] = 2
    assert digest(model).content != before.content


def test_what_changes_with_each_step_does_not_count(monkeypatch):
    model = b12x(None, monkeypatch)
    layer = model[NAME]
    scratch = torch.zeros(4)
    layer.kv_cache, layer.workspace, layer._weight_buffer = scratch, scratch, [scratch]
    layer.quant_method.kernel.locks = layer.quant_method.kernel.topk_weights = scratch
    layer.quant_method.prepare_finalize = SimpleNamespace(received=scratch)
    layer.register_buffer("scale_cache", scratch, persistent=False)
    before = digest(model)
    scratch += 1
    layer._weight_buffer.append(scratch)
    assert digest(model) == before


def test_views_of_parameters_are_not_read_again():
    model = torch.nn.Linear(8, 8)
    model.expert_weights = [model.weight.view(64), model.weight[1:3]]
    model.fused_weight = torch.cat([model.weight, model.weight])
    assert sorted(weights_of(model)) == ["bias", "fused_weight", "weight"]


def test_names_are_the_same_on_every_device():
    model = torch.nn.Linear(8, 8)
    model.weight = None
    model.scales = {torch.device("cuda", 1): torch.ones(3)}
    assert sorted(weights_of(model)) == ["bias", "scales.0"]


# Offloading


@pytest.fixture
def offloaded(monkeypatch) -> Iterator[torch.nn.Module]:
    """Four layers that share the memory of two, with vLLM's buffers and copies in the CPU."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    for layer, each in enumerate(model):
        for number, parameter in enumerate(each.parameters()):
            parameter.data.copy_(drawn(10 * layer + number, *parameter.shape))
    made = prefetch.PrefetchOffloader.__new__(prefetch.PrefetchOffloader)  # its `__init__` has CUDA
    made.module_offloaders = []
    for layer in model[1:]:
        each = prefetch._ModuleOffloader.__new__(prefetch._ModuleOffloader)
        each._param_offloaders = {
            name: prefetch._CpuParamOffloader(layer, name) for name, _ in layer.named_parameters()
        }
        made.module_offloaders.append(each)
    infos = [info for each in made.module_offloaders for info in each.get_param_infos()]
    pool = prefetch.StaticBufferPool(infos, 2, torch.device("cpu"))
    for i, each in enumerate(made.module_offloaders):
        each.assign_buffer_slot(pool, i % 2)
    monkeypatch.setattr(offloader.base, "_instance", made)
    return model


def fetch(layer: int) -> None:
    """Copy a layer's weights to the memory that it shares, as vLLM does before it computes."""
    fetched = offloader.get_offloader().module_offloaders[layer]
    for each in fetched._param_offloaders.values():
        each._gpu_buffer.copy_(each._cpu_storage)


def test_each_offloaded_layer_counts_whatever_is_in_the_shared_memory(offloaded):
    digests = set()
    for layer in range(4):
        fetch(layer)
        digests.add(digest(offloaded))
    assert len(digests) == 1
    for each in offloader.get_offloader().module_offloaders:
        stored = each._param_offloaders["weight"]._cpu_storage
        stored[0, 0] += 1
        digests.add(digest(offloaded))
    assert len(digests) == 5


def test_weights_that_are_offloaded_in_an_unknown_way_are_not_read(monkeypatch):
    class OtherOffloader:
        pass

    monkeypatch.setattr(offloader.base, "_instance", OtherOffloader())
    with pytest.raises(UnreadableWeightsError, match="OtherOffloader"):
        weights_of(torch.nn.Linear(2, 2))
