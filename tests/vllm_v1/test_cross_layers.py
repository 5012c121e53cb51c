# SPDX-License-Identifier: Apache-2.0
"""Caches that older model runners allocate as one tensor of all layers."""

import contextlib

import pytest
import torch

from omni_connector.copy.ended import RankCopies
from omni_connector.errors import LayoutError
from omni_connector.net.runtime import runtime_dir
from omni_connector.vllm_v1.cross_layers import cross_layer_dims
from tests.toy import BLOCK
from tests.toy_runner import ToyRunner

from .harness import (
    InProcessEngine,
    assert_clean,
    hand_off,
    lose_loads,
    prompt,
)
from .runners import OlderRunner

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)


class Backend:
    """An attention backend of the time of cross-layer tensors, K and V apart."""

    ORDER = (1, 0, 2, 3, 4, 5)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool) -> tuple[int, ...]:
        assert include_num_layers_dimension
        return cls.ORDER


class HeadsFirst(Backend):
    ORDER = (1, 4, 0, 2, 3, 5)


class BlocksSecond(Backend):
    ORDER = (2, 0, 1, 3, 4, 5)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size


class Unordered(Backend):
    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool) -> tuple[int, ...]:
        raise NotImplementedError


class Latent:
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


class Folded:
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks * block_size, num_kv_heads, head_size


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        (Backend, "BLCNHC"),
        (HeadsFirst, "BHLCNC"),
        (BlocksSecond, "BLCNHC"),
        (Unordered, "LBCNHC"),
        (Latent, "LBNC"),
    ],
)
def test_a_backend_says_what_the_dimensions_are(backend, dims):
    assert cross_layer_dims(backend) == dims


def test_dimensions_that_cannot_be_told_apart_are_refused():
    with pytest.raises(LayoutError, match=r"Folded: dimension 0 .*'B', 'N'"):
        cross_layer_dims(Folded)


class Packed(Backend):
    """K and V in one dimension, as the toy model takes them."""

    ORDER = (1, 0, 2, 3, 4)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks, block_size, num_kv_heads, 2 * head_size


class PackedHeadsFirst(Packed):
    ORDER = (1, 3, 0, 2, 4)


class CrossLayerRunner(OlderRunner):
    """It allocates one tensor of all layers, where the connector prefers that."""

    def __init__(self, backend: type[Backend]) -> None:
        self._backend = backend

    def register(self, engine: InProcessEngine, kv_caches: list[dict[str, torch.Tensor]]) -> None:
        (worker,), (names,) = engine.workers, kv_caches
        assert worker.prefer_cross_layer_blocks
        spec = engine.kv_config.kv_cache_groups[0].kv_cache_spec
        num_blocks = engine.kv_config.num_blocks
        shape = self._backend.get_kv_cache_shape(
            num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
        )
        order = self._backend.ORDER
        tensor = torch.zeros([(len(names), *shape)[i] for i in order], dtype=spec.dtype)
        layers = tensor.permute(*[order.index(i) for i in range(len(order))])
        views = {name: layers[i].transpose(1, 2) for i, name in enumerate(names)}  # B, H, N, C
        engine.runner = ToyRunner([views], engine.kv_config)
        worker.register_cross_layers_kv_cache(tensor, self._backend)


class OwnProcess(CrossLayerRunner):
    """Its worker has a process of its own, as vLLM says."""

    def register(self, engine: InProcessEngine, kv_caches: list[dict[str, torch.Tensor]]) -> None:
        engine.config.parallel_config.distributed_executor_backend = "mp"
        super().register(engine, kv_caches)


def test_a_worker_with_such_a_tensor_says_which_copies_have_ended(engine):
    one = engine("kv_producer", lifecycle=OwnProcess(Packed), engine_id="own-process")
    with contextlib.closing(RankCopies(runtime_dir(), "own-process", 1, timeout=60.0)) as ranks:
        assert ranks.ended([1 << 40]) == set()
    assert_clean(one)


@pytest.mark.shows(
    "caches that older model runners allocate as one tensor of all layers",
    control="test_a_tensor_that_has_lost_what_was_loaded_is_noticed",
)
@pytest.mark.parametrize("backend", [Packed, PackedHeadsFirst])
def test_a_tensor_of_all_layers_is_handed_off(engine, tokens, backend):
    prefill = engine("kv_producer", lifecycle=CrossLayerRunner(backend))
    decode = engine("kv_consumer", lifecycle=CrossLayerRunner(backend))
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("backend", [Packed, PackedHeadsFirst])
def test_a_tensor_that_has_lost_what_was_loaded_is_noticed(engine, tokens, monkeypatch, backend):
    prefill = engine("kv_producer", lifecycle=CrossLayerRunner(backend))
    decode = engine("kv_consumer", lifecycle=CrossLayerRunner(backend))
    lose_loads(decode, 0, monkeypatch)
    assert hand_off(prefill, decode, PROMPT) != tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1


@pytest.mark.parametrize("backend", [Packed, PackedHeadsFirst])
def test_a_tensor_of_all_layers_comes_from_and_goes_to_an_engine_without_one(
    engine, tokens, backend
):
    old = engine("kv_both", lifecycle=CrossLayerRunner(backend))
    new = engine("kv_both")
    for prefill, decode in ((old, new), (new, old)):
        text = prompt(6 * BLOCK - 3, seed=decode is old)
        assert hand_off(prefill, decode, text) == tokens(text, 6)
        assert decode.count("handoffs_received") == 1
        assert_clean(prefill, decode)
