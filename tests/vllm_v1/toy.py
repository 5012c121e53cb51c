# SPDX-License-Identifier: Apache-2.0
"""A model runner whose every answer depends on every byte of the KV cache that it may read.

What is stored for a position is drawn from its token and from all that its layers read, as it
lies in the cache: the KV of all positions before it, that of a window, or a recurrent state. A
sampled token is drawn from what was read and written last. So one wrong byte, wherever it came
from, changes all tokens after it. There are no weights and no arithmetic: two engines agree
exactly, or one of them has read something else.
"""

import hashlib
import json
import math
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
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

VOCAB = 500
BLOCK = 16
LAYERS, HEADS, HEAD_SIZE = 3, 2, 8
PAGE = BLOCK * HEADS * 2 * HEAD_SIZE * 2  # K and V, two bytes each
SLOT = 4096  # LAYERS pages, rounded up
MAX_LENGTH = 4096
STATE_BYTES = 3 * 7 * 2 + 5 * 5 * 4


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


WINDOW = 40

FAMILIES = {
    "full": ("full",),
    "window": ("window",),
    "window and full": ("window", "full"),
    "state and full": ("state", "full"),
    "all three": ("full", "window", "state"),
    "latent": ("latent",),
}
"""The kinds of the cache groups, in their order."""


def kv_cache_config(
    num_blocks: int, block_size: int, family: str = "full", *, ranks: int = 1, caching: bool = True
) -> KVCacheConfig:
    """Groups of `LAYERS` layers each, overlaid on the same bytes, as vLLM lays out LBHNC."""
    heads = max(1, HEADS // ranks)
    specs: dict[str, KVCacheSpec] = {
        "full": FullAttentionSpec(
            block_size=block_size, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float16
        ),
        "window": SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=HEAD_SIZE,
            dtype=torch.float16,
            sliding_window=WINDOW,
        ),
    }
    # As MLA: no heads to share out, each rank keeps all of it.
    specs["latent"] = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=4 * HEAD_SIZE, dtype=torch.float16
    )
    kinds = FAMILIES[family]
    page = specs[kinds[0] if kinds[0] != "state" else "full"].page_size_bytes
    specs["state"] = MambaSpec(
        # Kept for every block where prefixes are cached, else one for a request.
        block_size=block_size if caching else MAX_LENGTH,
        shapes=((3, 7), (5, 5)),
        dtypes=(torch.float16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align" if caching else "none",
    )
    kinds = FAMILIES[family]
    groups = [
        KVCacheGroupSpec([f"model.layers.{g * LAYERS + i}.mixer" for i in range(LAYERS)], specs[k])
        for g, k in enumerate(kinds)
    ]
    tensors = [
        KVCacheTensor(
            size=LAYERS * page * num_blocks,
            layers=group.layer_names,
            layer_stride=page * num_blocks,
            block_stride=page,
        )
        for group in groups
    ]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
    )


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    tables: list[list[int]]


Layers = list[list[NDArray[np.uint8]]]
"""For each layer the caches of all ranks."""


class _Attention:
    """The layers of a group that store something for every position."""

    def __init__(self, layers: Layers, window: int | None, heads: int = HEADS) -> None:
        self.window = window
        self._layers = layers
        _, self._heads, self._block_size, content = layers[0][0].shape
        self.shape = (len(layers), min(heads, len(layers[0]) * self._heads), content)
        self.row_bytes = math.prod(self.shape)

    def read(self, table: list[int], start: int, end: int) -> NDArray[np.uint8]:
        """KV of these positions: (positions, layers, heads, content bytes)."""
        blocks, offsets = self._places(table, start, end)
        _, heads, _ = self.shape
        copies = len(self._layers[0]) * self._heads // heads
        found = np.stack(
            [
                np.concatenate([rank[blocks, :, offsets] for rank in layer], axis=1)
                for layer in self._layers
            ],
            axis=1,
        )
        for copy in range(1, copies):  # of a head that several ranks keep
            assert (found[:, :, ::copies] == found[:, :, copy::copies]).all()
        return found[:, :, ::copies]

    def write(self, table: list[int], start: int, rows: NDArray[np.uint8]) -> None:
        """Put KV at positions, as `read` gives it."""
        blocks, offsets = self._places(table, start, start + len(rows))
        for number, layer in enumerate(self._layers):
            for which, rank in enumerate(layer):
                first = which * self.shape[1] // len(layer)
                rank[blocks, :, offsets] = rows[:, number, first : first + self._heads]

    def _places(
        self, table: list[int], start: int, end: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(start, end)
        blocks = np.asarray(table, np.int64)[positions // self._block_size]
        assert blocks.all(), "vLLM gave no block, or has taken one away that is still read"
        return blocks, positions % self._block_size


class _State:
    """The layers of a group that keep one state, in the block of the last position."""

    def __init__(self, layers: Layers, block_size: int, size: int) -> None:
        self._layers = [[rank.reshape(len(rank), -1)[:, :size] for rank in each] for each in layers]
        self._block_size = block_size
        self.shape = (len(layers), len(layers[0]), size)

    def read(self, table: list[int], end: int) -> NDArray[np.uint8]:
        """State after `end` positions: (layers, ranks, bytes)."""
        if end == 0:
            return np.zeros(self.shape, np.uint8)
        block = self._block(table, end)
        return np.stack([np.stack([rank[block] for rank in layer]) for layer in self._layers])

    def write(self, table: list[int], end: int, state: NDArray[np.uint8]) -> None:
        """Put the state after `end` positions."""
        for layer, rows in zip(self._layers, state, strict=True):
            for rank, row in zip(layer, rows, strict=True):
                rank[self._block(table, end)] = row

    def _block(self, table: list[int], end: int) -> int:
        block = table[(end - 1) // self._block_size]
        assert block != 0, "vLLM has taken a block away that holds a state"
        return block


class ToyRunner:
    """Follows a scheduler's output as vLLM's model runner does, and computes.

    Args:
        kv_caches: for each rank the layers as vLLM registers them, `[B, H, N, C]`.
        config: their groups.
    """

    def __init__(self, kv_caches: list[dict[str, torch.Tensor]], config: KVCacheConfig) -> None:
        self._layers = {
            name: [rank[name].view(torch.uint8).numpy() for rank in kv_caches]
            for name in kv_caches[0]
        }
        self._groups: list[_Attention | _State] = []
        for group in config.kv_cache_groups:
            layers = [self._layers[name] for name in group.layer_names]
            spec = group.kv_cache_spec
            if isinstance(spec, MambaSpec):
                content = spec.state_content_size_bytes
                self._groups.append(_State(layers, spec.block_size, content))
            else:
                heads = 1 if isinstance(spec, MLAAttentionSpec) else HEADS
                window = getattr(spec, "sliding_window", None)
                self._groups.append(_Attention(layers, window, heads))
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
            tables = [list(ids) for ids in new.block_ids]
            self._rows[new.req_id] = _Row(list(new.prompt_token_ids or ()), tables)
        cached = step.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            row = self._rows[request_id]
            if request_id in cached.resumed_req_ids:
                row.token_ids = list(cached.all_token_ids[request_id])
                row.tables = [[] for _ in self._groups]
            for table, ids in zip(row.tables, block_ids or (), strict=False):
                table += ids

    def _forward(self, row: _Row, start: int, end: int) -> int:
        """Compute positions, each from all that its layers read, and sample a token."""
        contexts: dict[int, _Context] = {}
        states: dict[int, NDArray[np.uint8]] = {}
        for g, group in enumerate(self._groups):
            if isinstance(group, _State):
                states[g] = group.read(row.tables[g], start)
            else:
                contexts[g] = _Context(group, row.tables[g], start)
        seed = b""
        for position in range(start, end):
            read = [context.digest(position) for context in contexts.values()]
            read += [state.tobytes() for state in states.values()]
            seed = b"".join(read) + row.token_ids[position].to_bytes(4, "little")
            for g, group in enumerate(self._groups):
                if isinstance(group, _State):
                    drawn = _draw(seed + bytes([g]), math.prod(group.shape))
                    states[g] = np.frombuffer(drawn, np.uint8).reshape(group.shape)
                else:
                    contexts[g].add(_draw(seed + bytes([g]), group.row_bytes))
        for g, context in contexts.items():
            context.group.write(row.tables[g], start, context.added())
        for g, state in states.items():
            self._groups[g].write(row.tables[g], end, state)
        # What was written is read once more: it, too, has to be where it belongs.
        seen = hashlib.blake2b(seed, digest_size=16)
        for g, group in enumerate(self._groups):
            if isinstance(group, _State):
                seen.update(group.read(row.tables[g], end).tobytes())
            else:
                seen.update(group.read(row.tables[g], end - 1, end).tobytes())
        return 3 + int.from_bytes(seen.digest()[:4], "little") % (VOCAB - 3)

    def spoil(self, block_ids: list[int], seed: int) -> None:
        """Fill whole blocks with noise, which no correct answer can come from."""
        draw = np.random.default_rng(seed)
        for layer in self._layers.values():
            for rank in layer:
                noise = draw.bytes(len(block_ids) * math.prod(rank.shape[1:]))
                rank[block_ids] = np.frombuffer(noise, np.uint8).reshape(-1, *rank.shape[1:])


class _Context:
    """What a group's layers read for one position after the other.

    Args:
        start: the first position that is computed; what lies before it is in the cache.
    """

    def __init__(self, group: _Attention, table: list[int], start: int) -> None:
        self.group = group
        self._first = 0 if group.window is None else max(0, start - group.window + 1)
        self._rows = bytearray(group.read(table, self._first, start).tobytes())
        self._cached = len(self._rows)
        self._all = hashlib.blake2b(self._rows, digest_size=16)

    def digest(self, position: int) -> bytes:
        """Of all that is read for a position."""
        if self.group.window is None:
            return self._all.copy().digest()
        begin = max(0, position - self.group.window + 1) - self._first
        read = memoryview(self._rows)[begin * self.group.row_bytes :]
        return hashlib.blake2b(read, digest_size=16).digest()

    def add(self, row: bytes) -> None:
        """The KV of the next position."""
        self._rows += row
        if self.group.window is None:
            self._all.update(row)

    def added(self) -> NDArray[np.uint8]:
        """The KV of all positions that were computed."""
        return np.frombuffer(self._rows, np.uint8, -1, self._cached).reshape(-1, *self.group.shape)


def _draw(seed: bytes, size: int) -> bytes:
    return hashlib.shake_128(seed).digest(size)
