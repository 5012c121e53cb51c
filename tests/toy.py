# SPDX-License-Identifier: Apache-2.0
"""A model whose every answer depends on every byte of the KV cache that it may read.

What is stored for a position is drawn from the weights, its token and all that its layers read:
the KV of all positions before it, that of a window, or a recurrent state. A sampled token is drawn
from what was read and written last. So one wrong byte, wherever it came from, changes all tokens
after it. There is no arithmetic: two engines agree exactly, or one of them has read something
else. `ToyRunner` (in `toy_runner`) reads and writes a KV cache as vLLM's model runner does;
`Reference` computes the same without one.
"""

import copy
import dataclasses
import functools
import hashlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from omni_connector.vllm_v1.compat import may_load_replayed

VOCAB: Final = 500
BLOCK: Final = 16
LAYERS, HEADS, HEAD_SIZE = 3, 2, 8
MORE_HEADS: Final = 4  # of layers of the kind `more`, which have other heads than the model says
MORE_SIZE: Final = HEAD_SIZE // 2
MOST_GROUPS: Final = 4  # of `FAMILIES`
PAGE: Final = BLOCK * HEADS * 2 * HEAD_SIZE * 2  # K and V, two bytes each
SLOT: Final = 4096  # LAYERS pages, rounded up
MAX_LENGTH: Final = 4096
MAX_LAYERS: Final = 1000
# Of the state of a layer, as of Mamba 2: of a convolution the last inputs (x of all heads, then B
# and C of one group), and a matrix for each head.
STATE_HEADS, HEAD_DIM, STATE_SIZE, INPUTS = 4, 3, 2, 3
STATE_BYTES: Final = (
    INPUTS * (STATE_HEADS * HEAD_DIM + 2 * STATE_SIZE) * 2 + STATE_HEADS * HEAD_DIM * STATE_SIZE * 4
)


def write_model(folder: Path, weights: bytes = b"toy") -> Path:
    """A model of the toy's shape for vLLM: its configuration, and a file of weights.

    Args:
        weights: what the file holds in the place of a tensor; no engine reads it.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2 * HEADS * HEAD_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS * MOST_GROUPS,
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
    tensor = {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}
    header = json.dumps({"toy": tensor}).encode()
    content = len(header).to_bytes(8, "little") + header + weights
    (folder / "model.safetensors").write_bytes(content)
    return folder


WINDOW: Final = 40
# Of layers that vLLM computes again after a prefix hit; of as many positions.
REPLAYED: Final = 48
DRAFTER_LAYER: Final = "mtp.layers"
CHUNK: Final = 16  # a multiple of each block size, as vLLM takes it to be
RATIO: Final = 3  # positions that are compressed into one
# Positions of a ring: those that are being compressed, and the drafts of a step. No block size
# divides it, nor does it divide one.
RING: Final = 12
RING_BYTES: Final = 8  # of a position, in a layer

FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "full": ("full",),
    "window": ("window",),
    "window and full": ("window", "full"),
    "state and full": ("state", "full"),
    "all three": ("full", "window", "state"),
    "latent": ("latent",),
    "chunk": ("chunk",),
    "chunk and full": ("chunk", "full"),
    "ring and full": ("ring", "full"),
    "ring and latent": ("ring", "latent"),
    "all and a ring": ("full", "window", "ring", "state"),
}
"""The kinds of the cache groups, in their order."""

if may_load_replayed():
    FAMILIES["replayed and full"] = ("replayed", "full")
    FAMILIES["ring, replayed and latent"] = ("ring", "replayed", "latent")

DRAFTED: Final = {
    "full and drafter": ("full", "drafter"),
    "window, full and drafter": ("window", "full", "drafter"),
    "state, full and drafter": ("state", "full", "drafter"),
    "full with drafter": ("full+drafter",),
    "window, full with drafter": ("window", "full+drafter"),
}
"""The same of models with a drafter that has a KV cache, in a group of its own or in the last."""

UNDRAFTED: Final = {
    "full and drafter": "full",
    "window, full and drafter": "window and full",
    "state, full and drafter": "state and full",
    "full with drafter": "full",
    "window, full with drafter": "window and full",
}
"""The same models without the drafter."""

OTHER_HEADS: Final = {
    "more": ("more",),
    "more and full": ("more", "full"),
    "latent and full": ("latent", "full"),
    "state and latent": ("state", "latent"),
    "full and wide drafter": ("full", "wide drafter"),
    "latent and drafter": ("latent", "drafter"),
}
"""The same of models whose layers, or whose drafter's, have other numbers of KV heads than the
model says."""

GROUPS: Final = FAMILIES | DRAFTED | OTHER_HEADS
"""Those of all models."""


def kv_cache_config(
    num_blocks: int,
    block_size: int,
    family: str = "full",
    *,
    ranks: int = 1,
    caching: bool = True,
    window: int = WINDOW,
    states: str = "align",
    ring: int = RING,
    replayed: int = REPLAYED,
    drafts: int = 0,
) -> KVCacheConfig:
    """Groups of `LAYERS` layers each, overlaid on the same bytes, as vLLM lays out LBHNC.

    Args:
        states: `--mamba-cache-mode` where prefixes are cached: `align` or `all`.
        ring: positions of a ring.
        replayed: positions of a window that vLLM computes again after a prefix hit.
        drafts: speculative tokens of a step, each of which leaves a state of its own.
    """
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
            sliding_window=window,
        ),
        "chunk": ChunkedLocalAttentionSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=HEAD_SIZE,
            dtype=torch.float16,
            attention_chunk_size=CHUNK,
        ),
    }
    specs["more"] = specs["wide drafter"] = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=max(1, MORE_HEADS // ranks),
        head_size=MORE_SIZE,
        dtype=torch.float16,
    )
    # As MLA: no heads to share out, each rank keeps all of it.
    specs["drafter"] = specs["full+drafter"] = specs["full"]
    specs["latent"] = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=4 * HEAD_SIZE, dtype=torch.float16
    )
    kinds = GROUPS[family]
    if "replayed" in kinds:
        specs["replayed"] = SlidingWindowMLASpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=4 * HEAD_SIZE,
            dtype=torch.float16,
            sliding_window=replayed,
            bounded_replay=True,
        )
    pages = {kind: specs[kind].page_size_bytes for kind in kinds if kind in specs}
    page = max(pages.values())
    for kind in [kind for kind in pages if pages[kind] < page]:
        specs[kind] = dataclasses.replace(specs[kind], page_size_padded=page)  # type: ignore[call-arg]
    # As of an indexer, which has the raw key of a position and its gate in the place of heads. Each
    # rank keeps all of it.
    specs["ring"] = CircularBufferSpec(
        block_size=ring,
        num_kv_heads=2,
        head_size=RING_BYTES // 4,
        head_size_v=0,
        dtype=torch.float16,
        page_size_padded=page,
    )
    specs["state"] = MambaSpec(
        # Kept for every block where prefixes are cached, else one for a request.
        block_size=block_size if caching else MAX_LENGTH,
        shapes=(
            (INPUTS, STATE_HEADS // ranks * HEAD_DIM + 2 * STATE_SIZE),
            (STATE_HEADS // ranks, HEAD_DIM, STATE_SIZE),
        ),
        dtypes=(torch.float16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode=states if caching else "none",
        num_speculative_blocks=drafts,
    )
    groups = []
    for g, kind in enumerate(kinds):
        names = []
        for number, part in enumerate(kind.split("+"), g):
            where = DRAFTER_LAYER if part == "drafter" else "model.layers"
            names += [f"{where}.{number * LAYERS + i}.mixer" for i in range(LAYERS)]
        groups.append(KVCacheGroupSpec(names, specs[kind]))
        if "drafter" in kind and hasattr(groups[-1], "is_eagle_group"):  # from vLLM 0.31 on
            groups[-1].is_eagle_group = True
    most = max(len(group.layer_names) for group in groups)
    tensors = [
        KVCacheTensor(
            size=most * page * num_blocks,
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


class MambaMixer2:
    """A layer with a state, as the connector sees vLLM's layer of this name."""

    norm = SimpleNamespace(n_groups=1)

    @classmethod
    def get_attn_backend(cls) -> type["MambaMixer2"]:
        return cls

    @staticmethod
    def get_name() -> str:
        return "TOY_MAMBA2"


def layers_with_states(config: KVCacheConfig) -> dict[str, Any]:
    """vLLM's layers by name, those that have a state; as in its `static_forward_context`."""
    return {
        name: MambaMixer2()
        for group in config.kv_cache_groups
        if isinstance(group.kv_cache_spec, MambaSpec)
        for name in group.layer_names
    }


def bytes_of_rank(rank: int, ranks: int) -> NDArray[np.int64]:
    """Which bytes of a layer's state of the whole model a rank has, in its order.

    Every rank has a part of the heads, and all of B and C.
    """
    width = STATE_HEADS * HEAD_DIM + 2 * STATE_SIZE
    inputs, matrices = np.split(np.arange(STATE_BYTES), [INPUTS * width * 2])
    heads = np.arange(STATE_HEADS).reshape(ranks, -1)[rank]
    x = (heads[:, None] * HEAD_DIM + np.arange(HEAD_DIM)).ravel()
    channels = [*x, *range(STATE_HEADS * HEAD_DIM, width)]
    return np.concatenate(
        [
            inputs.reshape(INPUTS, width, 2)[:, channels].ravel(),
            matrices.reshape(STATE_HEADS, -1)[heads].ravel(),
        ]
    )


def stage_config(config: KVCacheConfig, layers: range) -> KVCacheConfig:
    """The same groups with only those of their layers that a pipeline stage has, as vLLM makes it;
    maybe none of a group's."""

    def own(names: list[str]) -> list[str]:
        return [name for name in names if int(name.split(".")[2]) in layers]

    groups = [copy.copy(group) for group in config.kv_cache_groups]
    of_all = max(len(group.layer_names) for group in groups)
    for group in groups:
        group.layer_names = own(group.layer_names)
    most = max(len(group.layer_names) for group in groups)
    tensors = [copy.copy(tensor) for tensor in config.kv_cache_tensors]
    for tensor in tensors:  # the groups are overlaid on the same bytes
        tensor.size = tensor.size // of_all * most
        tensor.layers = own(tensor.layers)
    made = copy.copy(config)
    made.kv_cache_groups = groups
    made.kv_cache_tensors = [tensor for tensor in tensors if tensor.layers]
    return made


def drafting(config: VllmConfig, drafter: str, tokens: int) -> SpeculativeConfig:
    """vLLM's configuration of an engine that drafts.

    Args:
        config: of the engine.
        drafter: `ngram` or `ngram_gpu`, which have no KV cache; `mtp`, or `modules` for MTP with a
            module for each token.
        tokens: drafted in a step.
    """
    with_kv = drafter in ("mtp", "modules")
    speculative = SpeculativeConfig(
        method="ngram" if with_kv else drafter,  # type: ignore[arg-type]
        num_speculative_tokens=tokens,
        prompt_lookup_max=2,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    if with_kv:
        # vLLM knows no such model, so that it cannot be asked for by its configuration.
        speculative.method = "mtp"
        model = copy.copy(config.model_config)
        model.hf_config = copy.copy(model.hf_config)
        model.hf_config.num_nextn_predict_layers = tokens if drafter == "modules" else 1
        speculative.draft_model_config = model
    return speculative


@dataclass(frozen=True, slots=True)
class Kind:
    """What the model keeps in one cache group.

    Attributes:
        attention: `all` positions, a `window` of them, a `chunk` of them, or a `state`; or those
            `ahead`, which a drafter keeps of all positions, and the model does not read.
        window: positions, the own one among them.
        size: bytes of a position, or of the state.
        every: whether the state at the end of each block is kept, too.
        replayed: whether vLLM computes the last window of a prefix hit again. Then only what is
            sampled depends on it, so that it does not depend on where the window begins anew.
        cached: whether vLLM's prefix cache has it.
    """

    attention: str
    window: int
    size: int
    every: bool = False
    replayed: bool = False
    cached: bool = True

    def first_read(self, position: int) -> int:
        """The first position before this one that is read with it."""
        if self.attention == "window":
            return max(0, position - self.window + 1)
        if self.attention == "chunk":
            return position // self.window * self.window
        return max(0, position - 1) if self.attention == "state" else 0


_MOST_DRAWN: Final = 10_000
_DRAWN: Final[dict[Any, tuple[list[list[bytes]], bytes, bytes]]] = {}


class Mind:
    """The model after some positions: what it has read so far, and what it drew last."""

    __slots__ = ("_beside", "_full", "_kinds", "_last", "_seed", "_seen", "_weights")

    def __init__(self, weights: bytes, kinds: Sequence[Kind]) -> None:
        self._weights = weights
        self._kinds = kinds
        self._full: Any = hashlib.blake2b(weights, digest_size=16)
        self._seen: list[Any] = []
        for kind in kinds:
            self._seen.append(
                bytes(kind.size)
                if kind.attention == "state"
                # With the own position where that is read when a token is sampled.
                else deque(maxlen=kind.window - (kind.attention != "chunk" and not kind.replayed))
            )
        self._last: list[bytes] = []
        self._seed = b""
        # What is read in the windows that are replayed; None: what `_seen` has of them.
        self._beside: bytes | None = None

    def copy(self) -> "Mind":
        other = copy.copy(self)
        other._full = self._full.copy()
        other._seen = [each if isinstance(each, bytes) else each.copy() for each in self._seen]
        return other

    def read(self, group: int, content: bytes) -> None:
        """Take in what the cache holds: for a `window` or `chunk` the positions in order, else all
        of it.

        The groups that keep `all` are read position by position of all of them.
        """
        kind = self._kinds[group]
        if kind.attention == "state":
            self._seen[group] = content
        else:
            size = kind.size
            self._seen[group].extend(content[i : i + size] for i in range(0, len(content), size))

    def read_full(self, content: bytes | memoryview) -> None:
        """Take in the KV of those groups that keep all positions."""
        self._full.update(content)

    def step(self, token_id: int, cached: Sequence[bytes] | None = None) -> list[bytes]:
        """Compute one position; returns what it stores, by group.

        Args:
            cached: of a position that is computed again, what the cache holds of each group that
                keeps all positions.
        """
        hasher = self._full.copy()
        for kind, seen in zip(self._kinds, self._seen, strict=True):
            if not kind.replayed:
                hasher.update(seen if isinstance(seen, bytes) else b"".join(seen))
        hasher.update(token_id.to_bytes(4, "little"))
        seed = self._seed = hasher.digest()
        drawn = []
        kept = iter(cached or ())
        for group, kind in enumerate(self._kinds):
            content = hashlib.shake_128(seed + bytes([group])).digest(kind.size)
            if kind.attention == "all":
                content = next(kept, content)
            drawn.append(content)
            if kind.attention == "all":
                self._full.update(content)
            elif kind.attention in ("window", "chunk"):
                self._seen[group].append(content)
                if kind.attention == "chunk" and len(self._seen[group]) == kind.window:
                    self._seen[group].clear()  # the next position begins a chunk
            else:
                self._seen[group] = content
        self._last = drawn
        return drawn

    def steps(self, token_ids: Sequence[int]) -> list[list[bytes]]:
        """Compute the last positions; returns what each stores. Only `token` may be called then.

        Engines are given the same prompts again and again: what was drawn from the same bytes is
        remembered.
        """
        read = self._full.copy()
        for seen in self._seen:
            read.update(seen if isinstance(seen, bytes) else b"".join(seen))
        key = tuple(self._kinds), self._weights, read.digest(), tuple(token_ids)
        found = _DRAWN.get(key)
        if found is None:
            drawn = [self.step(token_id) for token_id in token_ids]
            if len(_DRAWN) >= _MOST_DRAWN:
                _DRAWN.clear()
            found = _DRAWN[key] = drawn, self._seed, self._windows()
        drawn, self._seed, self._beside = found
        self._last = drawn[-1]
        return drawn

    def _windows(self) -> bytes:
        pairs = zip(self._kinds, self._seen, strict=True)
        return b"".join(b"".join(seen) for kind, seen in pairs if kind.replayed)

    def token(self, stored: Sequence[bytes] | None = None) -> int:
        """What is sampled after the last position, given what the cache holds of that."""
        hasher = hashlib.blake2b(self._seed, digest_size=4)
        hasher.update(self._windows() if self._beside is None else self._beside)
        for content in self._last if stored is None else stored:
            hasher.update(content)
        return 3 + int.from_bytes(hasher.digest(), "little") % (VOCAB - 3)


def embedded(embeds: torch.Tensor) -> list[int]:
    """What the toy reads in the place of token ids: a number for the values of each embedding."""
    rows = embeds.to(torch.float32).contiguous().view(torch.uint8).numpy()
    digests = (hashlib.blake2b(row.tobytes(), digest_size=4).digest() for row in rows)
    return [int.from_bytes(each, "little") for each in digests]


@functools.lru_cache(maxsize=20_000)
def drafters_kv(weights: bytes, token_ids: tuple[int, ...], size: int) -> bytes:
    """What a drafter keeps of a position: of the tokens up to it, and of some after it.

    Args:
        token_ids: all of these.
        size: bytes of a position.
    """
    numbers = np.asarray(token_ids, np.int64).tobytes()
    return hashlib.shake_128(b"drafter" + weights + numbers).digest(size)


_MOST_MINDS: Final = 10_000


class Reference:
    """What the model answers, computed without a cache.

    Args:
        kinds: of the cache groups of all ranks; see `kinds_of`.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds
        self._minds: dict[tuple[bytes, tuple[int, ...]], Mind] = {}

    def next_token(self, weights: bytes, token_ids: Sequence[int]) -> int:
        """The token after these."""
        known = tuple(token_ids)
        mind = self._minds.get((weights, known))
        if mind is None:
            before = self._minds.get((weights, known[:-1]))
            mind = Mind(weights, self._kinds) if before is None else before.copy()
            for token_id in known if before is None else known[-1:]:
                mind.step(token_id)
            if len(self._minds) >= _MOST_MINDS:
                self._minds.clear()
            self._minds[weights, known] = mind
        return mind.token()


@functools.cache
def reference(kinds: tuple[Kind, ...]) -> Reference:
    """The one of all engines whose cache groups are of these kinds."""
    return Reference(kinds)


def kinds_of(config: KVCacheConfig) -> tuple[Kind, ...]:
    """What the model keeps in the groups of an engine, on all ranks together; then what its drafter
    keeps.

    Args:
        config: cache groups of one rank.
    """
    found, drafters = [], []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        drafted = sum(name.startswith(DRAFTER_LAYER) for name in group.layer_names)
        layers = len(group.layer_names) - drafted
        if isinstance(spec, MambaSpec):
            found.append(Kind("state", 1, layers * STATE_BYTES, spec.mamba_cache_mode == "all"))
            continue
        if isinstance(spec, CircularBufferSpec):
            found.append(Kind("chunk", RATIO, layers * RING_BYTES, cached=False))
            continue
        heads = heads_of(spec)
        real: Any = spec
        content = real.real_page_size_bytes // spec.block_size // spec.num_heads
        window = getattr(spec, "sliding_window", None)
        chunk = getattr(spec, "attention_chunk_size", None)
        attention = "window" if window else "chunk" if chunk else "all"
        if drafted:
            drafters.append(Kind("ahead", 1, drafted * heads * content))
        if layers:
            replayed = bool(getattr(spec, "prefix_replay_tokens", 0))
            size = layers * heads * content
            kind = Kind(
                attention, window or chunk or 1, size, replayed=replayed, cached=not replayed
            )
            found.append(kind)
    return (*found, *drafters)


def heads_of(spec: KVCacheSpec) -> int:
    """Heads of a group on all ranks; one of latents, which every rank keeps."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return 1
    return MORE_HEADS if getattr(spec, "head_size", 0) == MORE_SIZE else HEADS


def head_copies(config: KVCacheConfig, ranks: int) -> dict[str, int]:
    """How many ranks hold the same head, by layer, as a model's projections would say it."""
    return {
        name: max(1, ranks // heads_of(group.kv_cache_spec))
        for group in config.kv_cache_groups
        if isinstance(group.kv_cache_spec, AttentionSpec)
        and not isinstance(group.kv_cache_spec, MLAAttentionSpec | SlidingWindowMLASpec)
        for name in group.layer_names
    }


def tell_hash_block_size(kv_cache_config: KVCacheConfig, tokens: int) -> None:
    """Set it as vLLM's `EngineCore` does from 0.32 on."""
    if hasattr(kv_cache_config, "hash_block_size"):
        kv_cache_config.hash_block_size = tokens
