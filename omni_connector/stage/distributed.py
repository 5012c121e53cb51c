# SPDX-License-Identifier: Apache-2.0
"""A received KV cache, passed on between the ranks of one stage over `torch.distributed`.

Nothing is pickled: a header of msgpack tells the values and the tensors' dtypes and shapes, and
the tensors follow as bytes.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from omni_connector.stage.payload import DTYPE_NAMES, DTYPES

logger = logging.getLogger(__name__)

_PARALLEL_STATE: Final = "vllm_omni.diffusion.distributed.parallel_state"
_FAILED: Final = 0
_HOST_BACKENDS: Final = ("gloo", "mpi")


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The groups of this rank.

    Attributes:
        world: all ranks of the stage.
        cfg: the ranks of the same tensor-parallel rank that share a request's branches of
            classifier-free guidance. Its rank 0 receives.

    Each is a `torch.distributed` process group, or an object with one of them as `cpu_group` and
    another as `device_group`; None where there is no such group.
    """

    world: Any = None
    cfg: Any = None

    @classmethod
    def find(cls) -> "ParallelGroups":
        """Those of vLLM-Omni where it runs in this process, else torch's default group."""
        state = sys.modules.get(_PARALLEL_STATE)
        if state is not None:
            found = cls(_ask(state, "get_world_group"), _ask(state, "get_cfg_group"))
            if found.world is not None:
                return found
        if dist.is_available() and dist.is_initialized():
            return cls(world=dist.group.WORLD)
        return cls()


def _ask(state: object, question: str) -> Any:
    ask = getattr(state, question, None)
    try:
        return ask() if callable(ask) else None
    except AssertionError:
        # There is no such group in this deployment.
        return None


def group_size(group: Any) -> int:
    """Ranks of a group; 1 where there is none."""
    return 1 if group is None else dist.get_world_size(_control(group))


def group_rank(group: Any) -> int:
    """This process's rank in a group; 0 where there is none."""
    return 0 if group is None else dist.get_rank(_control(group))


def broadcast_value(group: Any, value: object, device: torch.device | None = None) -> Any:
    """Give the value of a group's rank 0 to its other ranks; all of them call this.

    Args:
        group: see `ParallelGroups`.
        value: at rank 0, what to give: tensors in None, bool, int, float, str, bytes, lists,
            tuples, dicts and objects with `key_cache` and `value_cache`, which arrive as
            `SimpleNamespace`. None for nothing.
        device: where the other ranks want the tensors.

    Returns:
        `value` itself at rank 0.

    Raises:
        TypeError: at rank 0, there is something else in `value`; the others get None.
        RuntimeError: the group is broken, by a rank that died or by its own time-out.
    """
    if group_rank(group) == 0:
        return _give(group, value, device)
    return _take(group, device)


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
        RuntimeError: the group is broken. And what `receive` raises, at rank 0.
    """
    if group_rank(group) > 0:
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
            logger.exception("what was received cannot be shared with the other ranks")
            news = None
    return news is not None


def _give(group: Any, value: object, device: torch.device | None) -> object:
    control = _control(group)
    tensors: list[torch.Tensor] = []
    try:
        tree = _split(value, tensors)
        shapes = [(DTYPE_NAMES[each.dtype], list(each.shape)) for each in tensors]
        header = msgspec.msgpack.encode((tree, shapes))
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        _send_header(control, b"", device)
        raise TypeError(f"cannot be given to the other ranks: {error}") from error
    _send_header(control, header, device)
    group_of_tensors, where = _data(group, device)
    for tensor in tensors:
        if tensor.numel():
            content = tensor.detach().contiguous().to(where)
            flat = content.as_strided((content.numel(),), (1,)).view(torch.uint8)
            dist.broadcast(flat, _source(group_of_tensors), group_of_tensors)
    return value


def _take(group: Any, device: torch.device | None) -> Any:
    header = _receive_header(_control(group), device)
    if not header:
        return None
    tree, shapes = msgspec.msgpack.decode(header, type=tuple[Any, list[tuple[str, list[int]]]])
    group_of_tensors, where = _data(group, device)
    tensors = []
    for name, shape in shapes:
        tensor = torch.empty(shape, dtype=DTYPES[name], device=where)
        if tensor.numel():
            flat = tensor.view(-1).view(torch.uint8)
            dist.broadcast(flat, _source(group_of_tensors), group_of_tensors)
        tensors.append(tensor if device is None else tensor.to(device))
    return _join(tree, tensors)


def _send_header(group: Any, header: bytes, device: torch.device | None) -> None:
    where = _control_device(group, device)
    dist.broadcast(torch.tensor([len(header)], device=where), _source(group), group)
    if header:
        content = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(where)
        dist.broadcast(content, _source(group), group)


def _receive_header(group: Any, device: torch.device | None) -> bytes:
    where = _control_device(group, device)
    length = torch.empty(1, dtype=torch.int64, device=where)
    dist.broadcast(length, _source(group), group)
    if int(length) == _FAILED:
        return b""
    content = torch.empty(int(length), dtype=torch.uint8, device=where)
    dist.broadcast(content, _source(group), group)
    return content.cpu().numpy().tobytes()


def _control(group: Any) -> Any:
    return getattr(group, "cpu_group", group)


def _source(group: Any) -> int:
    return dist.get_global_rank(group, 0)


def _on_host(group: Any) -> bool:
    return any(name in str(dist.get_backend(group)) for name in _HOST_BACKENDS)


def _control_device(group: Any, device: torch.device | None) -> torch.device:
    return torch.device("cpu") if _on_host(group) else _accelerator(device)


def _data(group: Any, device: torch.device | None) -> tuple[Any, torch.device]:
    """The process group that carries tensors, and where they must lie for it."""
    own = getattr(group, "device_group", group)
    if device is not None and device.type != "cpu" and not _on_host(own):
        return own, device
    control = _control(group)
    return control, _control_device(control, device)


def _accelerator(device: torch.device | None) -> torch.device:
    if device is not None and device.type != "cpu":
        return device
    found = torch.accelerator.current_accelerator()
    if found is None:
        raise RuntimeError("a process group without a host backend, and no accelerator")
    return torch.device(found.type, torch.accelerator.current_device_index())


def _split(value: object, tensors: list[torch.Tensor]) -> Any:
    """The value as msgpack can say it, in tagged lists; its tensors go to `tensors`."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        # A cache that hangs on the request and on its parameters travels once.
        for index, known in enumerate(tensors):
            if known is value:
                return ["tensor", index]
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, list | tuple):
        name = "list" if isinstance(value, list) else "tuple"
        return [name, [_split(each, tensors) for each in value]]
    if isinstance(value, Mapping):
        items = [[_split(key, tensors), _split(each, tensors)] for key, each in value.items()]
        return ["dict", items]
    fields = getattr(value, "__dict__", {})
    if isinstance(value, SimpleNamespace) or {"key_cache", "value_cache"} <= fields.keys():
        return ["namespace", [[name, _split(each, tensors)] for name, each in fields.items()]]
    raise TypeError(f"a {type(value).__name__}")


def _join(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "list":
        return [_join(each, tensors) for each in content]
    if kind == "tuple":
        return tuple(_join(each, tensors) for each in content)
    joined = {_join(key, tensors): _join(each, tensors) for key, each in content}
    return SimpleNamespace(**joined) if kind == "namespace" else joined


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
