# SPDX-License-Identifier: Apache-2.0
"""A model runner whose every answer depends on every byte of the KV cache.

The KV of a position is drawn from its token and from the KV of all positions before it, as it
lies in the cache; a sampled token is drawn from all the KV of its request. So one wrong byte,
wherever it came from, changes all tokens after it. There are no weights and no arithmetic:
two engines agree exactly, or one of them has read something else.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

VOCAB = 500
BLOCK = 16
LAYERS, HEADS, HEAD_SIZE = 3, 2, 8
PAGE = BLOCK * HEADS * 2 * HEAD_SIZE * 2  # K and V, two bytes each
SLOT = 4096  # LAYERS pages, rounded up
_LAYERS = [f"model.layers.{i}.self_attn" for i in range(LAYERS)]


def write_model(folder: Path) -> Path:
    """The configuration of a model of the toy's shape; there are no weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2 * HEADS * HEAD_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def kv_cache_config(num_blocks: int, block_size: int) -> KVCacheConfig:
    """One group of full attention, laid out as vLLM lays out LBHNC."""
    page = PAGE * block_size // BLOCK
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float16
    )
    assert spec.page_size_bytes == page
    tensor = KVCacheTensor(
        size=LAYERS * page * num_blocks,
        layers=_LAYERS,
        layer_stride=page * num_blocks,
        block_stride=page,
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(_LAYERS, spec)],
        kv_cache_layout="LBHNC",
        hash_block_size=block_size,
    )


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    block_ids: list[int]


class ToyRunner:
    """Follows a scheduler's output as vLLM's model runner does, and computes.

    Args:
        kv_caches: the layers as vLLM registers them, `[B, H, N, C]`.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = [view.view(torch.uint8).numpy() for view in kv_caches.values()]
        _, self._heads, self._block_size, self._content = self._layers[0].shape
        self._rows: dict[str, _Row] = {}

    def execute(self, step: SchedulerOutput) -> tuple[list[str], list[list[int]]]:
        """Compute one step: the request ids of the batch and what each has sampled."""
        self._follow(step)
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = self._rows[request_id]
            end = computed[request_id] + num_tokens
            token = self._forward(row, computed[request_id], end)
            if end == len(row.token_ids):
                row.token_ids.append(token)
                sampled.append([token])
            else:
                sampled.append([])  # a chunk of the prompt
        return list(step.num_scheduled_tokens), sampled

    def _follow(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._rows[new.req_id] = _Row(list(new.prompt_token_ids or ()), list(new.block_ids[0]))
        cached = step.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            row = self._rows[request_id]
            if request_id in cached.resumed_req_ids:
                row.token_ids = list(cached.all_token_ids[request_id])
                row.block_ids = []
            row.block_ids += block_ids[0] if block_ids is not None else []

    def _forward(self, row: _Row, start: int, end: int) -> int:
        past = _fold(b"", self.read(row.block_ids, 0, start))
        state = past
        content = np.empty((end - start, len(self._layers), self._heads, self._content), np.uint8)
        for i, token in enumerate(row.token_ids[start:end]):
            seed = state + token.to_bytes(4, "little")
            content[i].reshape(-1)[:] = _draw(seed, content[i].size)
            state = _fold(state, content[i : i + 1])
        self.write(row.block_ids, start, content)
        seen = _fold(past, self.read(row.block_ids, start, end))
        return 3 + int.from_bytes(seen[:4], "little") % (VOCAB - 3)

    def read(self, block_ids: list[int], start: int, end: int) -> NDArray[np.uint8]:
        """KV of these positions: (positions, layers, heads, content bytes)."""
        blocks, offsets = self._places(block_ids, start, end)
        return np.stack([layer[blocks, :, offsets] for layer in self._layers], axis=1)

    def write(self, block_ids: list[int], start: int, content: NDArray[np.uint8]) -> None:
        """Put KV at the positions from `start` on."""
        blocks, offsets = self._places(block_ids, start, start + len(content))
        for index, layer in enumerate(self._layers):
            layer[blocks, :, offsets] = content[:, index]

    def _places(
        self, block_ids: list[int], start: int, end: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(start, end)
        table = np.asarray(block_ids, np.int64)
        return table[positions // self._block_size], positions % self._block_size

    def spoil(self, block_ids: list[int], seed: int) -> None:
        """Fill whole blocks with noise, which no correct answer can come from."""
        draw = np.random.default_rng(seed)
        for layer in self._layers:
            for block_id in block_ids:
                layer[block_id] = draw.integers(0, 256, layer[block_id].shape, np.uint8)


def _fold(state: bytes, rows: NDArray[np.uint8]) -> bytes:
    for row in rows:
        state = hashlib.blake2b(state + row.tobytes(), digest_size=16).digest()
    return state


def _draw(seed: bytes, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_128(seed).digest(size), np.uint8)
