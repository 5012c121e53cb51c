# SPDX-License-Identifier: Apache-2.0
"""One rank of a stage receives a KV cache and gives it to the others over `torch.distributed`.

The values travel as the bytes that `objects.codec` makes of them; nothing is pickled.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from omni_connector.objects import codec
from omni_connector.stage.tp import ask_loaded

logger = logging.getLogger(__name__)

_PARALLEL_STATE: Final = "vllm_omni.diffusion.distributed.parallel_state"
_HOST_BACKENDS: Final = ("gloo", "mpi")


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The groups of this rank.

    Attributes:
        world: all ranks of the stage.
        cfg: the ranks of the same tensor-parallel rank that share a request's branches of
            classifier-free guidance. Its rank 0 receives.

    Each is a `torch.distributed` process group, or an object that has one as `cpu_group`; None
    where there is no such group.
    """

    world: Any = None
    cfg: Any = None

    @classmethod
    def find(cls) -> "ParallelGroups":
        """Those of vLLM-Omni where it runs in this process, else torch's default group."""
        world = ask_loaded(_PARALLEL_STATE, "get_world_group")
        if world is not None:
            return cls(world, ask_loaded(_PARALLEL_STATE, "get_cfg_group"))
        if dist.is_available() and dist.is_initialized():
            return cls(world=dist.group.WORLD)
        return cls()


def group_size(group: Any) -> int:
    """Ranks of a group; 1 where there is none."""
    return 1 if group is None else dist.get_world_size(_control(group))


def broadcast_value(group: Any, value: object, device: torch.device | None = None) -> Any:
    """Give the value of a group's rank 0 to its other ranks; all of them call this.

    Args:
        group: see `ParallelGroups`.
        value: at rank 0, what to give: what `objects.codec` encodes, in lists, tuples, dicts and
            objects with `key_cache` and `value_cache`, which arrive as `SimpleNamespace`. None
            for nothing.
        device: where the other ranks want the tensors; None for the host's memory.

    Returns:
        `value` itself at rank 0.

    Raises:
        TypeError: at rank 0, there is something else in `value`; the others get None.
        RuntimeError: a rank died, or the group's own timeout is over.
    """
    if _rank(group) > 0:
        given = _broadcast(group, None, device)
        return _decode(given, device) if given.nbytes else None
    try:
        content = _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        _broadcast(group, b"", device)
        raise TypeError(f"the value cannot be given to the other ranks: {error}") from error
    _broadcast(group, content, device)
    return value


def receive_once(
    group: Any,
    owners: Sequence[Any],
    receive: Callable[[], bool],
    device: torch.device | None = None,
) -> bool:
    """Let rank 0 of a group receive, and set on all ranks' objects what that set on its own.

    Args:
        group: see `ParallelGroups`; all its ranks call this.
        owners: this rank's objects, as many and in the same order on each.
        receive: sets attributes of the objects and says whether it succeeded; rank 0 calls it.
        device: where the other ranks want the tensors.

    Returns:
        Whether all ranks have it.

    Raises:
        RuntimeError: as `broadcast_value`. And what `receive` raises, at rank 0.
    """
    if _rank(group) > 0:
        given = broadcast_value(group, None, device)
        for owner, values in zip(owners, given or (), strict=False):
            for name, value in values.items():
                setattr(owner, name, value)
        return given is not None
    before = [_attributes(owner) for owner in owners]
    news = None
    try:
        if receive():
            news = [_changes(old, owner) for old, owner in zip(before, owners, strict=True)]
    finally:
        # The others wait for this, whatever happened here.
        try:
            broadcast_value(group, news, device)
        except TypeError:
            logger.exception("What was received cannot be given to the other ranks")
            news = None
    return news is not None


def _broadcast(
    group: Any, content: bytes | bytearray | None, device: torch.device | None
) -> memoryview:
    """Send bytes from rank 0 to the others, which pass None; all of them get the bytes."""
    control = _control(group)
    where = _control_device(control, device)
    source = dist.get_global_rank(control, 0)
    length = torch.tensor([len(content or b"")], device=where)
    dist.broadcast(length, source, control)
    if content:
        packed = torch.frombuffer(content, dtype=torch.uint8).to(where)
    else:
        packed = torch.empty(int(length), dtype=torch.uint8, device=where)
    if packed.numel():
        dist.broadcast(packed, source, control)
    return packed.cpu().numpy().data


def _rank(group: Any) -> int:
    return dist.get_rank(_control(group))


def _control(group: Any) -> Any:
    return getattr(group, "cpu_group", group)


def _control_device(control: Any, device: torch.device | None) -> torch.device:
    """Where bytes must lie so that a group can broadcast them."""
    if any(name in str(dist.get_backend(control)) for name in _HOST_BACKENDS):
        return torch.device("cpu")
    if device is not None and device.type != "cpu":
        return device
    found = torch.accelerator.current_accelerator()
    if found is None:
        raise RuntimeError("the process group has no host backend, and there is no accelerator")
    return torch.device(found.type, torch.accelerator.current_device_index())


def _encode(value: object) -> bytearray:
    return bytearray().join(codec.encode(_tagged(value)))


def _decode(content: memoryview, device: torch.device | None = None) -> Any:
    tree, _ = codec.decode(content)
    # A cache that hangs on the request and on its parameters arrives as one, so it moves once.
    place = functools.cache(lambda tensor: tensor if device is None else tensor.to(device))
    return _untagged(tree, place)


def _tagged(value: object) -> Any:
    """The value with a tag beside each container; `codec` alone makes tuples lists."""
    if isinstance(value, list | tuple):
        return ["tuple" if isinstance(value, tuple) else "list", [_tagged(each) for each in value]]
    if isinstance(value, Mapping):
        return ["dict", [[_tagged(key), _tagged(each)] for key, each in value.items()]]
    fields = getattr(value, "__dict__", {})
    if isinstance(value, SimpleNamespace) or {"key_cache", "value_cache"} <= fields.keys():
        return ["namespace", [[name, _tagged(each)] for name, each in fields.items()]]
    return value


def _untagged(tree: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return place(tree)
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    if kind in ("list", "tuple"):
        items = [_untagged(each, place) for each in content]
        return items if kind == "list" else tuple(items)
    fields = {_untagged(key, place): _untagged(each, place) for key, each in content}
    return SimpleNamespace(**fields) if kind == "namespace" else fields


def _attributes(owner: Any) -> dict[str, Any]:
    slots = getattr(type(owner), "__slots__", ())
    named = [slots] if isinstance(slots, str) else slots
    fixed = {name: getattr(owner, name) for name in named if hasattr(owner, name)}
    return fixed | getattr(owner, "__dict__", {})


def _changes(before: dict[str, Any], owner: Any) -> dict[str, Any]:
    missing = object()
    return {
        name: value
        for name, value in _attributes(owner).items()
        if before.get(name, missing) is not value and name != "sampling_params"
    }
