# SPDX-License-Identifier: Apache-2.0
"""What is read of the models that vLLM has loaded."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import QKVParallelLinear

from omni_connector.identity.loaded_weights import UnreadableWeightsError, digest_of
from omni_connector.plugin import CONNECTOR_NAME
from omni_connector.vllm_v1 import loaded_models
from omni_connector.vllm_v1.layer_weights import weights_of
from omni_connector.vllm_v1.loaded_models import head_copies, loaded_digest
from omni_connector.vllm_v1.patches import WORKERS, watch_workers

pytestmark = pytest.mark.vllm

# The first has experts. Each is looked at for weights that those before it have not.
FAMILIES = ("gptoss", "deepseek_v2", "qwen3_next")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By family, what the digests of small models tell, as vLLM loads them."""
    command = [sys.executable, "-m", "tests.vllm_v1.loaded_families"]
    ended = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("families")), *FAMILIES],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_element_of_any_weight_in_the_files_is_seen_in_memory(told, family):
    of = told[family]
    assert of["changed"]
    assert of["the same again"]
    assert of["unseen"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_that_settings_size_are_left_out(told, family):
    assert all("cache" in name for name in told[family]["left out"])
    assert told[family]["left out"]
    assert not [name for name in told[family]["hashed"] if "cache" in name]


class Worker:
    """What `watch_workers` sees of one of vLLM's workers."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.asleep = False
        self.model = torch.nn.Linear(64, 64)
        self.model_runner = SimpleNamespace()

    def get_model(self):
        return self.model

    def sleep(self, level=1):
        self.asleep = True
        return level

    def wake_up(self, tags=None):
        self.asleep = False
        return tags

    def discard(self, tags):
        return tags


@pytest.fixture
def worker(monkeypatch):
    """A worker that was made while workers are watched, on a device; and its configuration."""
    module = SimpleNamespace(WorkerBase=type("W", (Worker,), {}))
    monkeypatch.setitem(sys.modules, WORKERS.partition(":")[0], module)
    monkeypatch.setattr(loaded_models, "_workers", type(loaded_models._workers)())
    platform = SimpleNamespace(
        is_cpu=lambda: False, device_name="device", get_device_capability=lambda: (9, 0)
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    watch_workers()
    watch_workers()
    parallel = SimpleNamespace(
        enable_eplb=False, enable_expert_parallel=False, data_parallel_size=1, data_parallel_rank=0
    )
    transfer = SimpleNamespace(kv_connector=CONNECTOR_NAME, kv_connector_extra_config={})
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    return module.WorkerBase(vllm_config=config), config


def read(config):
    reading = loaded_digest(config)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


def test_a_worker_is_known_by_its_configuration(worker):
    one, config = worker
    assert read(config).content == digest_of(dict(one.model.named_parameters())).content
    copied = SimpleNamespace(parallel_config=config.parallel_config)  # as MultiConnector has it
    assert read(copied) == read(config)
    with pytest.raises(UnreadableWeightsError, match="not loaded before the model"):
        read(SimpleNamespace(parallel_config=SimpleNamespace()))


def test_weights_that_sleep_are_not_read(worker):
    one, config = worker
    before = read(config)
    reading = loaded_digest(config)
    next(reading)  # falls asleep while it is read
    assert one.sleep(level=2) == 2
    with pytest.raises(UnreadableWeightsError, match="sleep"):
        next(reading)
    with pytest.raises(UnreadableWeightsError, match="sleep"):
        read(config)
    one.wake_up(tags=["kv_cache"])
    with pytest.raises(UnreadableWeightsError, match="sleep"):
        read(config)
    one.wake_up(tags=["weights"])
    assert read(config) == before
    one.discard(("kv_cache",))
    assert read(config) == before
    one.discard(("weights",))
    with pytest.raises(UnreadableWeightsError, match="sleep"):
        read(config)
    one.wake_up()
    assert read(config) == before


def test_digests_of_other_expert_ranks_cannot_be_compared(worker):
    _, config = worker
    alone = read(config)
    parallel = config.parallel_config
    parallel.enable_expert_parallel, parallel.data_parallel_size = True, 2
    first = read(config)
    parallel.data_parallel_rank = 1
    second = read(config)
    assert len({alone.form, first.form, second.form}) == 3
    assert alone.content == first.content == second.content


def test_how_layers_process_their_weights_is_a_part_of_the_form(worker):
    one, config = worker
    before = read(config)
    one.model.quant_method = SimpleNamespace(repacked=True, calls=3)
    after = read(config)
    assert after.form != before.form
    assert after.content == before.content
    one.model.quant_method.calls = 4
    assert read(config) == after


class Around(BaseLayerWithLoRA):
    """A layer that vLLM has put another one into, as it does with `--enable-lora`."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = (torch.zeros(4),)


def test_an_engine_with_lora_has_the_weights_of_one_without(worker):
    one, config = worker

    def told(value=1.0, around=lambda layer: layer):
        layer = torch.nn.Linear(8, 8)
        torch.nn.init.constant_(layer.weight, value)
        torch.nn.init.constant_(layer.bias, value)
        layer.quant_method = SimpleNamespace(repacked=True)
        one.model = torch.nn.ModuleDict({"proj": around(layer)})
        return read(config)

    assert told(around=Around) == told()
    assert told(2.0, around=Around).content != told().content


@pytest.mark.parametrize(("dynamic", "counts"), [(True, False), (False, True)])
def test_scales_that_follow_the_images_of_requests_are_no_weights(dynamic, counts):
    """Those of a file are."""
    told = []
    for scale in (1.0, 2.0):
        model = torch.nn.Linear(8, 8)
        torch.nn.init.constant_(model.weight, 1)
        torch.nn.init.constant_(model.bias, 1)
        model._fp8_dynamic_scale = dynamic  # as an encoder of vLLM's has it
        for part in "qkv":
            model.register_buffer(f"_fp8_{part}_scale", torch.full((1, 1, 1, 1), scale))
        told.append(digest_of(weights_of(model)).content)
    assert (told[0] != told[1]) == counts


def test_counters_and_caches_are_no_weights():
    model = torch.nn.Linear(8, 8)
    model.register_buffer("cos_sin_cache", torch.ones(4), persistent=False)
    model.register_buffer("scale", torch.ones(1))
    model.calls = torch.zeros(1)
    assert sorted(weights_of(model)) == ["bias", "scale", "weight"]


def test_weights_that_are_packed_away_are_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model[0].weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(UnreadableWeightsError, match=r"packed 0\.weight"):
        weights_of(model)


# Copies of KV heads


class Attention(torch.nn.Module):
    """As vLLM's models have it: beside the projection whose keys and values it keeps."""

    def __init__(self, *projections):
        super().__init__()
        self.rope = torch.nn.Identity()
        for number, each in enumerate(projections):
            setattr(self, f"qkv_proj_{number}", each)
        self.attn = torch.nn.Identity()


def projection(copies, inner=torch.nn.Identity):
    made = inner()
    made.num_kv_head_replicas = copies
    return made


def test_a_layer_has_as_many_copies_as_the_projection_beside_it(worker):
    one, config = worker
    wrapped = torch.nn.Identity()  # as LoRA wraps it
    wrapped.base_layer = projection(4)
    layers = {
        "two": Attention(projection(2)),
        "wrapped": Attention(wrapped),
        "same": Attention(projection(2), projection(2)),
        "unlike": Attention(projection(2), projection(4)),
        "unknown": Attention(),
        "elsewhere": torch.nn.Sequential(projection(8), Attention()),
    }
    one.model = torch.nn.ModuleDict(layers)
    drafter = Attention(projection(8))
    one.model_runner.drafter = SimpleNamespace(model=drafter)
    layers["elsewhere"] = layers["elsewhere"][1]
    config.compilation_config = SimpleNamespace(
        static_forward_context={name: each.attn for name, each in layers.items()}
        | {"drafter": drafter.attn}
    )
    assert head_copies(config) == {"two": 2, "wrapped": 4, "same": 2, "drafter": 8}


def test_of_a_worker_that_is_not_known_no_copies_are(worker):
    _, config = worker
    assert head_copies(SimpleNamespace(parallel_config=SimpleNamespace())) == {}
    one, _ = worker
    one.get_model = lambda: (_ for _ in ()).throw(NotImplementedError)
    assert head_copies(config) == {}


@pytest.mark.parametrize(("heads", "ranks"), [(2, 4), (2, 8), (4, 8), (1, 4), (8, 4), (4, 4)])
def test_as_many_ranks_as_vllm_says_load_the_weights_of_one_head(monkeypatch, heads, ranks):
    """The rows of keys and values that vLLM's own projection loads on each rank."""
    size = 3
    loaded = []
    for rank in range(ranks):
        group = SimpleNamespace(world_size=ranks, rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "_TP", group)
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
            made = QKVParallelLinear(5, size, 8, heads, bias=False, params_dtype=torch.float32)
        made.weight.data.zero_()
        for name in ("k", "v"):
            rows = torch.arange(heads * size).float()[:, None].expand(-1, 5)
            made.weight.weight_loader(made.weight, rows.contiguous(), name)
        found = made.weight.data[-2 * size * max(1, heads // ranks) :, 0].chunk(2)
        assert torch.equal(*found)
        loaded.append(found[0].tolist())
    copies = made.num_kv_head_replicas
    assert copies == max(1, ranks // heads)
    own = max(1, heads // ranks) * size
    assert loaded == [
        list(range(rank // copies * own, (rank // copies + 1) * own)) for rank in range(ranks)
    ]
