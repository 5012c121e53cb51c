# SPDX-License-Identifier: Apache-2.0
"""Ranks of a stage that use the KV of one request: who receives it, and who is given it.

What ranks tell each other goes as bytes through the host's memory. Nothing is pickled. They wait
for each other as in each collective of the model: at most for the time-out of their group.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
import torch.distributed as dist

from omni_connector.objects import codec
from omni_connector.stage.tp import Topology, ask_loaded

logger = logging.getLogger(__name__)

_OMNI_STATE: Final = "vllm_omni.diffusion.distributed.parallel_state"
_VLLM_STATE: Final = "vllm.distributed.parallel_state"

_VOTE_BYTES: Final = 32

_NOTHING: Final = torch.empty(0, dtype=torch.uint8)

Received = Mapping[str, tuple[dict[str, Any], int]]
"""By request id, of each payload that came: the payload, and its bytes as packed."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that a request's KV concerns, as this rank sees them.

    Attributes:
        receives: whether this rank asks the sender.
        agreeing: the tensor-parallel ranks, if they are several and this one receives. Each has
            other heads; all must use the KV of a request, or none.
        sharing: groups in which rank 0 gives to the others all that it has, one after the other.

    A group is one of `torch.distributed` that carries tensors of the host (gloo).
    """

    receives: bool = True
    agreeing: Any = None
    sharing: tuple[Any, ...] = ()

    @classmethod
    def find(cls, topology: Topology) -> Self:
        """Those of vLLM-Omni's groups, or vLLM's, where these are made, else of torch's world.

        With tensor parallelism each rank receives. Where ranks of the same tensor-parallel rank
        share branches of classifier-free guidance, or a sequence, the first of them receives for
        all. Without tensor parallelism rank 0 of the world receives for all.
        """
        world = _group("get_world_group")
        if world is None:
            world = _group("get_world_group", _VLLM_STATE)
        if world is None and dist.is_available() and dist.is_initialized():
            world = dist.group.WORLD
        if _size(world) == 1:
            return cls()
        if topology.single:
            return cls(dist.get_rank(world) == 0, None, (world,))
        branches, sequence = _group("get_cfg_group"), _group("get_sp_group")
        first = sequence is None or dist.get_rank(sequence) == 0
        sharing = [branches] if first and _size(branches) > 1 else []
        sharing += [sequence] if _size(sequence) > 1 else []
        receives = all(dist.get_rank(group) == 0 for group in sharing)
        ranks = _group("get_tp_group", _VLLM_STATE)
        return cls(receives, ranks if receives and _size(ranks) > 1 else None, tuple(sharing))

    @property
    def alone(self) -> bool:
        """Whether this rank receives for itself and needs nobody's consent."""
        return self.agreeing is None and not self.sharing

    def exchange(self, received: Received | None) -> Received:
        """What this rank uses of what the ranks have received; each of them calls this.

        Args:
            received: what came to this rank; None where it does not receive.

        Returns:
            Nothing where the same did not come to all ranks that must agree, or where the payloads,
            as a hook has changed them, cannot be given to others.

        Raises:
            RuntimeError: a rank died, or did not call this in the time-out of its group.
        """
        packed = None
        if received is not None:
            if self.sharing:
                received, packed = _pack(received)
            if self.agreeing is not None and not self._agree(received):
                received, packed = {}, _NOTHING
        for group in self.sharing:
            packed = _broadcast(group, packed)
        return _unpack(packed) if received is None else received

    def _agree(self, received: Received) -> bool:
        votes = [torch.empty(_VOTE_BYTES, dtype=torch.uint8) for _ in range(_size(self.agreeing))]
        vote = torch.frombuffer(bytearray(_digest(received)), dtype=torch.uint8)
        dist.all_gather(votes, vote, group=self.agreeing)
        if all(torch.equal(each, vote) for each in votes):
            return True
        logger.error(
            "Not all of %d ranks have received the same, so that none uses it. To this one came %s",
            *(len(votes), list(received) or "nothing"),
        )
        return False


def _group(function: str, module: str = _OMNI_STATE) -> Any:
    """A group of vLLM-Omni or vLLM, as one of torch; None where there is none."""
    return getattr(ask_loaded(module, function), "cpu_group", None)


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _digest(received: Received) -> bytes:
    """Which payloads came, and how many tokens each layer has. Ranks have other heads, so that
    their bytes differ, but not these."""
    found = [
        (name, [[each if each is None else each.shape[0] for each in layers] for layers in caches])
        for name, caches in sorted(
            (name, data["layer_blocks"].values()) for name, (data, _) in received.items()
        )
    ]
    return hashlib.sha256(repr(found).encode("utf-8", "surrogatepass")).digest()


def _pack(received: Received) -> tuple[Received, torch.Tensor]:
    try:
        packed = bytearray().join(codec.encode(dict(received)))
    except (TypeError, ValueError, RecursionError):  # a hook may have made anything of a payload
        logger.exception("KV of %s cannot be given to other ranks: none uses it", list(received))
        return {}, _NOTHING
    return received, torch.frombuffer(packed, dtype=torch.uint8)


def _unpack(packed: torch.Tensor | None) -> Received:
    if packed is None or not packed.numel():
        return {}
    found, _ = codec.decode(packed.numpy().data)
    return {name: (data, size) for name, (data, size) in found.items()}


def _broadcast(group: Any, content: torch.Tensor | None) -> torch.Tensor:
    """Bytes of rank 0; the others have none."""
    source = dist.get_global_rank(group, 0)
    length = torch.tensor([0 if content is None else content.numel()])
    dist.broadcast(length, source, group)
    if content is None:
        content = torch.empty(int(length), dtype=torch.uint8)
    if content.numel():
        dist.broadcast(content, source, group)
    return content
