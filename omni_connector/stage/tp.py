# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks on both sides: who sends to whom, which heads, under which keys."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from omni_connector.errors import ConfigError
from omni_connector.stage.contract import metadata_of

logger = logging.getLogger(__name__)

# A key, and the sender's rank where there are several senders.
ReceiveKey = tuple[str, int | None]

_PARALLEL_STATE: Final = "vllm.distributed.parallel_state"


@dataclass(frozen=True, slots=True)
class Topology:
    """How many tensor-parallel ranks send and receive, and this process's rank on its side.

    Raises:
        ConfigError: a size is below one, neither size divides the other, or the rank is negative.
    """

    from_tp: int
    to_tp: int
    rank: int = 0

    def __post_init__(self) -> None:
        small, large = sorted((self.from_tp, self.to_tp))
        if small < 1 or large % small:
            raise ConfigError(
                f"tensor-parallel sizes must divide: {self.from_tp} ranks send, "
                f"{self.to_tp} receive"
            )
        if self.rank < 0:
            raise ConfigError(f"the tensor-parallel rank must not be negative: rank {self.rank}")

    @property
    def source_tp_size(self) -> int:
        """`from_tp` by vLLM-Omni's name."""
        return self.from_tp

    @property
    def target_tp_size(self) -> int:
        """`to_tp` by vLLM-Omni's name."""
        return self.to_tp

    @property
    def local_rank(self) -> int:
        """`rank` by vLLM-Omni's name."""
        return self.rank

    @property
    def single(self) -> bool:
        """Whether both sides have one rank."""
        return self.from_tp == self.to_tp == 1

    @property
    def fan_in(self) -> int:
        """Number of senders whose heads one receiver joins."""
        return max(1, self.from_tp // self.to_tp)

    @property
    def fan_out(self) -> int:
        """How many receivers share the heads of one sender."""
        return max(1, self.to_tp // self.from_tp)

    def target_ranks(self) -> list[int]:
        """The receivers of this sender.

        Raises:
            ValueError: this is no rank of the senders.
        """
        self._check(self.from_tp, "send")
        first = self.rank * self.fan_out // self.fan_in
        return list(range(first, first + self.fan_out))

    def source_ranks(self) -> list[int]:
        """The senders of this receiver.

        Raises:
            ValueError: this is no rank of the receivers.
        """
        self._check(self.to_tp, "receive")
        first = self.rank * self.fan_in // self.fan_out
        return list(range(first, first + self.fan_in))

    def send_keys(self, request_id: str, from_stage: str, to_stage: str) -> list[str]:
        """The keys of a request, one for each of `target_ranks`."""
        if self.single:
            return [_single_key(request_id, from_stage, to_stage)]
        return [_rank_key(request_id, from_stage, self.rank, to) for to in self.target_ranks()]

    def receive_keys(self, request_id: str, from_stage: str, to_stage: str) -> list[ReceiveKey]:
        """The keys of a request and the ranks that put them; no rank where both sides have one."""
        if self.single:
            return [(_single_key(request_id, from_stage, to_stage), None)]
        return [
            (_rank_key(request_id, from_stage, sender, self.rank), sender)
            for sender in self.source_ranks()
        ]

    def _check(self, ranks: int, verb: str) -> None:
        if self.rank >= ranks:
            raise ValueError(f"rank {self.rank} is not one of the {ranks} that {verb}")


def _single_key(request_id: str, from_stage: str, to_stage: str) -> str:
    return f"omni_{from_stage}_to_{to_stage}_kv_cache_{request_id}"


def _rank_key(request_id: str, from_stage: str, from_rank: int, to_rank: int) -> str:
    return f"{request_id}_{from_stage}_0_{from_rank}_{to_rank}"


def local_rank() -> int:
    """This process's tensor-parallel rank: vLLM's where that runs here, else of LOCAL_RANK."""
    rank = ask_loaded(_PARALLEL_STATE, "get_tensor_model_parallel_rank")
    if rank is None:
        text = os.environ.get("LOCAL_RANK", "0")
        rank = text if text.isascii() and text.isdigit() else 0
    return int(rank)


def local_size() -> int:
    """Tensor-parallel ranks of this stage: vLLM's where that runs here, else 1."""
    return int(ask_loaded(_PARALLEL_STATE, "get_tensor_model_parallel_world_size") or 1)


def ask_loaded(module: str, function: str) -> Any:
    """What a function of a module returns, if this process has loaded that module.

    This package imports neither vLLM nor vLLM-Omni. None where the module is not loaded, or has not
    made its groups yet.
    """
    ask = getattr(sys.modules.get(module), function, None)
    try:
        return ask() if callable(ask) else None
    except AssertionError:
        return None


def slice_heads(data: dict[str, Any], topology: Topology, target: int, side: str) -> dict[str, Any]:
    """Slice out the heads that one of a sender's receivers needs.

    If there are fewer heads than receivers, several receivers get the same head.

    Args:
        data: a payload with the heads of one sender.
        topology: has more receivers than senders.
        target: the receiver's rank.
        side: the side that slices, `sender` or `receiver`.

    Returns:
        Views of the tensors, and `tp_head_slice` in the metadata.

    Raises:
        ValueError: the heads cannot be divided evenly.
    """
    ratio = topology.fan_out
    widest = 1

    def own(tensor: torch.Tensor | None) -> torch.Tensor | None:
        nonlocal widest
        if tensor is None:
            return None
        heads = _heads(tensor)
        if heads % ratio and ratio % heads:
            raise ValueError(f"{heads} KV heads cannot be shared out to {ratio} ranks")
        slices = min(heads, ratio)
        widest = max(widest, slices)
        each = heads // slices
        return tensor.narrow(1, target % ratio * slices // ratio * each, each)

    blocks = {name: [own(each) for each in layers] for name, layers in _blocks(data).items()}
    mark = {
        "applied": True,
        "side": side,
        "target_rank": target,
        "source_rank": target // ratio,
        "from_tp": topology.from_tp,
        "to_tp": topology.to_tp,
        "offset_in_shard": target % ratio * widest // ratio,
        "num_slices": widest,
    }
    metadata = {**metadata_of(data), "tp_head_slice": mark}
    return {**data, "layer_blocks": blocks, "metadata": metadata}


def own_heads(
    data: dict[str, Any], topology: Topology, slicer: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """What this receiver uses of a payload: its heads, unless the sender has sliced already.

    Raises:
        ValueError: the payload was sliced for another rank, or for other sizes.
    """
    if slicer is not None:
        sliced: dict[str, Any] = slicer(data)
        return sliced
    mark = metadata_of(data).get("tp_head_slice")
    if isinstance(mark, dict) and mark.get("applied"):
        ours = {"target_rank": topology.rank, "from_tp": topology.from_tp, "to_tp": topology.to_tp}
        for name, value in ours.items():
            if mark.get(name, value) != value:
                raise ValueError(f"the heads were cut for {name} {mark[name]}, not for {value}")
        return data
    if topology.fan_out == 1:
        return data
    return slice_heads(data, topology, topology.rank, "receiver")


def merge_shards(
    shards: Sequence[dict[str, Any]], topology: Topology, num_kv_heads: int | None
) -> dict[str, Any]:
    """Join the heads of several senders, in the order of their ranks, each head once.

    If vLLM has more ranks than KV heads, several ranks hold the same head. Which ones do follows
    from the number of heads in the model: `num_kv_heads`, or what the senders say it is. If nobody
    says it, shards that are equal in every bit of all layers are taken to be the same head.

    Args:
        shards: whole payloads.
        topology: has more senders than receivers.
        num_kv_heads: KV heads of the model, if known.

    Raises:
        ValueError: the shards are not those of one request, or their heads do not fit together.
    """
    first = shards[0]
    stated = metadata_of(first)
    total = num_kv_heads
    for offset, shard in enumerate(shards):
        for name in ("request_id", "block_ids"):
            if shard[name] != first[name]:
                raise ValueError(f"shards of different {name}: {first[name]} and {shard[name]}")
        for name in ("seq_len", "block_size", "num_layers", "dtype"):
            if metadata_of(shard).get(name) != stated.get(name):
                raise ValueError(f"shards differ in {name}")
        told = metadata_of(shard).get("tp_kv_heads")
        if isinstance(told, dict):
            expected = topology.rank * topology.fan_in + offset
            if told.get("source_rank") != expected or told.get("from_tp") != topology.from_tp:
                raise ValueError(f"a shard of {told} in the place of sender {expected}")
            heads = told.get("total")
            if total is None and isinstance(heads, int) and heads > 0:
                total = heads
    keys = [_blocks(shard)["key_cache"] for shard in shards]
    values = [_blocks(shard)["value_cache"] for shard in shards]
    if len({(len(a), len(b)) for a, b in zip(keys, values, strict=True)}) != 1:
        raise ValueError("shards of different numbers of layers")
    copies = _Copies(topology, total, keys, values)
    merged = {
        "key_cache": [
            copies.join(layer, latent=len(values[0]) <= number or values[0][number] is None)
            for number, layer in enumerate(zip(*keys, strict=True))
        ],
        "value_cache": [copies.join(layer, latent=False) for layer in zip(*values, strict=True)],
    }
    metadata: Any = {name: each for name, each in stated.items() if name != "tp_kv_heads"}
    return {**first, "layer_blocks": merged, "metadata": metadata}


class _Copies:
    """Tells which shards hold a head that the shard before does not hold."""

    def __init__(
        self,
        topology: Topology,
        total: int | None,
        keys: list[list[torch.Tensor | None]],
        values: list[list[torch.Tensor | None]],
    ) -> None:
        self._topology = topology
        self._total = total
        layers = [
            [each for each in layer if each is not None and each.numel()]
            for cache in (keys, values)
            for layer in zip(*cache, strict=True)
        ]
        # Shards that hold one head can be compared.
        self._single_heads = [
            layer
            for layer in layers
            if len(layer) == len(keys) and all(_heads(each) == 1 for each in layer)
        ]

    def join(self, layer: Sequence[torch.Tensor | None], *, latent: bool) -> torch.Tensor | None:
        tensors = [each for each in layer if each is not None]
        if not tensors:
            return None
        if len(tensors) != len(layer) or len({tuple(each.shape) for each in tensors}) != 1:
            raise ValueError("a layer is absent, or of another shape, in some of the shards")
        heads = _heads(tensors[0])
        if heads > 1:
            step = 1
        elif latent:
            step = self._topology.from_tp
        else:
            step = self._copies
        start = self._topology.rank * len(tensors)
        kept = [each for i, each in enumerate(tensors) if not i or (start + i) % step == 0]
        return kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)

    @cached_property
    def _copies(self) -> int:
        """How many senders hold each head."""
        ranks = self._topology.from_tp
        if self._total is None:
            return self._compare()
        if self._total >= ranks:
            return 1
        if self._total < 1 or ranks % self._total:
            raise ValueError(f"{self._total} KV heads cannot be shared out over {ranks} ranks")
        return ranks // self._total

    def _compare(self) -> int:
        layers = self._single_heads
        count = self._topology.fan_in
        new = [
            not layers or not all(_same(layer[i - 1], layer[i]) for layer in layers)
            for i in range(1, count)
        ]
        step = new.index(True) + 1 if any(new) else count
        if count % step or new != [(i % step) == 0 for i in range(1, count)]:
            raise ValueError("some shards are copies of others, in no order that vLLM makes")
        if step > 1:
            logger.info("%d senders each hold the same KV head; it is taken once", step)
        # If all are alike there is one head, whatever the senders of other receivers hold.
        return step if step < count else self._topology.from_tp


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape are equal in every bit, NaN or not."""
    if a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _blocks(data: dict[str, Any]) -> dict[str, list[torch.Tensor | None]]:
    blocks: dict[str, list[torch.Tensor | None]] = data["layer_blocks"]
    return {name: blocks.get(name) or [] for name in ("key_cache", "value_cache")}


def _heads(tensor: torch.Tensor) -> int:
    if tensor.dim() < 2 or not tensor.shape[1]:
        raise ValueError(f"{tuple(tensor.shape)} has no dimension of heads")
    return int(tensor.shape[1])
