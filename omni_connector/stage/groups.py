# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a stage receive KV themselves, and to which they give it."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch.distributed as dist

from omni_connector.stage.tp import ask_loaded

_PARALLEL_STATE: Final = "vllm_omni.diffusion.distributed.parallel_state"
_VLLM_PARALLEL_STATE: Final = "vllm.distributed.parallel_state"


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The groups of this rank.

    Attributes:
        world: all ranks of the stage.
        cfg: the ranks of the same tensor-parallel rank that share a request's branches of
            classifier-free guidance. Its rank 0 receives.
        tp: the tensor-parallel ranks, which compute a request together.
        sp: the ranks of the same tensor-parallel rank that share a request's sequence. Its rank 0
            receives.

    Each is a `torch.distributed` process group, or an object that has one as `cpu_group`; None
    where there is no such group.
    """

    world: Any = None
    cfg: Any = None
    tp: Any = None
    sp: Any = None

    @classmethod
    def find(cls) -> "ParallelGroups":
        """Those of vLLM-Omni and vLLM where they run in this process, else torch's default."""
        tp = ask_loaded(_VLLM_PARALLEL_STATE, "get_tp_group")
        world = ask_loaded(_PARALLEL_STATE, "get_world_group")
        if world is not None:
            cfg = ask_loaded(_PARALLEL_STATE, "get_cfg_group")
            return cls(world, cfg, tp, ask_loaded(_PARALLEL_STATE, "get_sp_group"))
        if dist.is_available() and dist.is_initialized():
            return cls(world=dist.group.WORLD, tp=tp)
        return cls()

    def of_tensor_parallel(self, size: int) -> Any:
        """The group of the tensor-parallel ranks; None where it is not known.

        Args:
            size: tensor-parallel ranks of this stage. A world of as many ranks is their group.
        """
        if self.tp is None and size > 1 and group_size(self.world) == size:
            return self.world
        return self.tp


class ReceiveRole(Enum):
    """How a rank comes by the KV of a request.

    Attributes:
        LOCAL: it receives for itself, and gives to nobody.
        LEADER: it receives, and gives to the followers.
        FOLLOWER: a leader gives it.
    """

    LOCAL = "local"
    LEADER = "leader"
    FOLLOWER = "follower"


@dataclass(frozen=True, slots=True)
class ReceiveTopology:
    """This rank's part when a request's KV is received.

    Attributes:
        role: see `ReceiveRole`.
        tp_active: whether a side has several tensor-parallel ranks, and this stage several ranks.
        cfg_size, cfg_rank, cfg_group: see `ParallelGroups.cfg`.
        sp_size, sp_rank, sp_group: see `ParallelGroups.sp`.
        world: see `ParallelGroups.world`.
        tp_group, tp_size: the tensor-parallel ranks, and how many.
    """

    role: ReceiveRole
    tp_active: bool = False
    cfg_size: int = 1
    cfg_rank: int = 0
    cfg_group: Any = None
    sp_size: int = 1
    sp_rank: int = 0
    sp_group: Any = None
    world: Any = None
    tp_group: Any = None
    tp_size: int = 1

    @classmethod
    def of(cls, groups: ParallelGroups, *, tp_active: bool, tp_size: int) -> "ReceiveTopology":
        """The part of this rank in these groups.

        With tensor parallelism each rank receives for itself. Where ranks of the same
        tensor-parallel rank share branches or a sequence, the first of them leads. Without tensor
        parallelism rank 0 of the world leads.

        Args:
            groups: this rank's groups.
            tp_active: whether a side has several tensor-parallel ranks.
            tp_size: tensor-parallel ranks of this stage.
        """
        tp_group = groups.of_tensor_parallel(tp_size) if tp_active else None
        tp_size = group_size(tp_group)
        if group_size(groups.world) == 1:
            return cls(ReceiveRole.LOCAL, world=groups.world, tp_group=tp_group, tp_size=tp_size)
        cfg_size = _ask_size("get_classifier_free_guidance_world_size", groups.cfg)
        cfg_rank = _ask_rank("get_classifier_free_guidance_rank", groups.cfg)
        sp_size = _ask_size("get_sequence_parallel_world_size", groups.sp)
        sp_rank = _ask_rank("get_sequence_parallel_rank", groups.sp)
        if not tp_active:
            leads = group_rank(groups.world) == 0
        elif cfg_size == sp_size == 1:
            leads = None
        else:
            leads = cfg_rank == sp_rank == 0
        role = ReceiveRole.LOCAL
        if leads is not None:
            role = ReceiveRole.LEADER if leads else ReceiveRole.FOLLOWER
        return cls(
            *(role, tp_active, cfg_size, cfg_rank, groups.cfg, sp_size, sp_rank, groups.sp),
            *(groups.world, tp_group, tp_size),
        )

    @property
    def is_local(self) -> bool:
        """Whether this rank receives for itself alone."""
        return self.role is ReceiveRole.LOCAL

    @property
    def is_leader(self) -> bool:
        """Whether this rank receives for others, too."""
        return self.role is ReceiveRole.LEADER

    @property
    def is_follower(self) -> bool:
        """Whether another rank gives to this one."""
        return self.role is ReceiveRole.FOLLOWER

    @property
    def cfg_active(self) -> bool:
        """Whether ranks share branches of classifier-free guidance."""
        return self.cfg_size > 1

    @property
    def sp_active(self) -> bool:
        """Whether ranks share a sequence."""
        return self.sp_size > 1

    @property
    def by_branch(self) -> bool:
        """Whether the leader gives each rank the KV of its own branch."""
        return self.tp_active and self.cfg_active


def group_size(group: Any) -> int:
    """Ranks of a group; 1 where there is none."""
    if group is None:
        return 1
    size = getattr(group, "world_size", None)
    return size if isinstance(size, int) else dist.get_world_size(control_of(group))


def group_rank(group: Any) -> int:
    """This process's rank in a group; 0 where there is none."""
    if group is None:
        return 0
    rank = getattr(group, "rank_in_group", None)
    return rank if isinstance(rank, int) else dist.get_rank(control_of(group))


def control_of(group: Any) -> Any:
    """The process group that carries messages of a group."""
    return getattr(group, "cpu_group", group)


def _ask_size(function: str, group: Any) -> int:
    return int(ask_loaded(_PARALLEL_STATE, function) or group_size(group))


def _ask_rank(function: str, group: Any) -> int:
    rank = ask_loaded(_PARALLEL_STATE, function)
    return group_rank(group) if rank is None else int(rank)
