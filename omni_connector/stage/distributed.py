# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a stage tell each other about a KV cache, over `torch.distributed`.

One rank gives what it received to the others, as the bytes that `objects.codec` makes of it.
Nothing is pickled. Ranks that receive for themselves agree whether all of them have it: if one
computes without it, its collectives are not those of the others, and all hang until a watchdog
kills them.
"""

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from omni_connector.objects import codec
from omni_connector.runtime.backoff import Backoff
from omni_connector.stage.tp import ask_loaded

logger = logging.getLogger(__name__)

_PARALLEL_STATE: Final = "vllm_omni.diffusion.distributed.parallel_state"
_VLLM_PARALLEL_STATE: Final = "vllm.distributed.parallel_state"
_HOST_BACKENDS: Final = ("gloo", "mpi")

# Seconds beyond what receiving may take, for ranks that are busy, or began a little later.
_SLACK_S: Final = 10.0
_FIRST_POLL_S: Final = 0.0005
_LAST_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The groups of this rank.

    Attributes:
        world: all ranks of the stage.
        cfg: the ranks of the same tensor-parallel rank that share a request's branches of
            classifier-free guidance. Its rank 0 receives.
        tp: the tensor-parallel ranks, which compute a request together.

    Each is a `torch.distributed` process group, or an object that has one as `cpu_group`; None
    where there is no such group.
    """

    world: Any = None
    cfg: Any = None
    tp: Any = None

    @classmethod
    def find(cls) -> "ParallelGroups":
        """Those of vLLM-Omni and vLLM where they run in this process, else torch's default."""
        tp = ask_loaded(_VLLM_PARALLEL_STATE, "get_tp_group")
        world = ask_loaded(_PARALLEL_STATE, "get_world_group")
        if world is not None:
            return cls(world, ask_loaded(_PARALLEL_STATE, "get_cfg_group"), tp)
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


@dataclass(frozen=True, slots=True)
class Agreement:
    """Lets the ranks of a group say whether each of them has the same KV.

    Rank 0 collects what the ranks say, and its verdict counts on all of them. So a rank that comes
    too late learns that the others do without, though it may have the KV itself. A rank that only
    stopped waiting could not know what the others do next.

    Args:
        group: see `ParallelGroups`; all its ranks call this, for one request after the other.
        patience: seconds in which every rank has received, or given up. Rank 0 waits so long for
            the others, and they wait twice as long for its verdict; each some seconds more.
        device: one that the group can send from, where its backend has no host memory.
        clock: monotonic seconds.
        sleep: waits for seconds.
    """

    group: Any
    patience: float
    device: torch.device | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def reached(self, request_id: str, vote: bytes | None) -> bool:
        """Whether all ranks have cast the same vote, and none of them None.

        Args:
            request_id: for the log.
            vote: 32 bytes that tell what this rank has; None where it has nothing.

        Raises:
            RuntimeError: a rank died, or rank 0 gave no verdict in time.
        """
        control = _control(self.group)
        size = dist.get_world_size(control)
        where = _control_device(control, self.device)
        mine = torch.frombuffer(
            bytearray(b"\0" * 33 if vote is None else b"\1" + vote), dtype=torch.uint8
        )
        votes = [torch.zeros(33, dtype=torch.uint8, device=where) for _ in range(size)]
        # Both operations are started on every rank, whoever is late: else the next ones of the
        # group would meet these.
        collected = dist.all_gather(votes, mine.to(where), group=control, async_op=True)
        source = dist.get_global_rank(control, 0)
        if _rank(self.group) == 0:
            in_time = self._ends(collected, self.patience + _SLACK_S)
            agreed = in_time and self._count(request_id, [each.cpu() for each in votes])
            if not in_time:
                logger.error(
                    "Some of %d ranks did not say in %.0f s whether KV of request %s came: no rank "
                    "uses it",
                    *(size, self.patience + _SLACK_S, request_id),
                )
            verdict = torch.tensor([agreed], dtype=torch.uint8, device=where)
            told = dist.broadcast(verdict, source, control, async_op=True)
            if in_time:  # else it is sent when they come
                self._ends(told, _SLACK_S)
            return agreed
        verdict = torch.zeros(1, dtype=torch.uint8, device=where)
        told = dist.broadcast(verdict, source, control, async_op=True)
        if not self._ends(told, 2 * (self.patience + _SLACK_S)):
            raise RuntimeError(
                f"rank 0 did not say in {2 * (self.patience + _SLACK_S):.0f} s whether all ranks "
                f"have the KV of request {request_id}"
            )
        return bool(verdict.item())

    def _ends(self, work: Any, timeout: float) -> bool:
        # `work.wait(timeout)` would end all connections of a gloo group, for good.
        deadline = self.clock() + timeout
        backoff = Backoff(_FIRST_POLL_S, _LAST_POLL_S, self.clock)
        while not work.is_completed():
            if self.clock() >= deadline:
                return False
            self.sleep(backoff.failed())
        work.wait()
        return True

    def _count(self, request_id: str, votes: list[torch.Tensor]) -> bool:
        having = [rank for rank, vote in enumerate(votes) if vote[0]]
        if not having:
            return False
        if len(having) == len(votes) and all(torch.equal(vote, votes[0]) for vote in votes):
            return True
        logger.error(
            "KV of request %s came to ranks %s of %d, %s: no rank uses it",
            *(request_id, having, len(votes)),
            "and differs between them" if len(having) == len(votes) else "and not to the others",
        )
        return False


def receive_together(
    request_id: str,
    owners: Sequence[Any],
    receive: Callable[[], bool],
    *,
    share: Any = None,
    agreement: Agreement | None = None,
    device: torch.device | None = None,
) -> bool:
    """Receive on several ranks, so that all of them have what was received, or none.

    Args:
        request_id: what is received.
        owners: this rank's objects, as many and in the same order on each rank.
        receive: sets attributes of the objects and says whether it succeeded.
        share: a group of which only rank 0 receives; its other ranks' objects get the same
            attributes. None where this rank receives for itself.
        agreement: of the ranks that receive. Unless all of them have it, what was set on the
            objects is taken back.
        device: where the tensors are wanted.

    Returns:
        Whether all ranks have it.

    Raises:
        RuntimeError: as `broadcast_value` and `Agreement.reached`. And what `receive` raises, on
            the rank that receives; the others have nothing then.
    """
    if share is not None and _rank(share) > 0:
        given = broadcast_value(share, None, device)
        for owner, values in zip(owners, given or (), strict=False):
            for name, value in values.items():
                setattr(owner, name, value)
        return given is not None
    before = [_attributes(owner) for owner in owners]
    content: bytes | bytearray = b""
    received = False
    # The other ranks wait for the vote and for the broadcast, whatever happens here.
    try:
        vote = None
        try:
            if receive():
                if share is not None:
                    content = _encode_news(request_id, before, owners)
                if share is None or content:
                    vote = _vote(request_id, before, owners)
        finally:
            received = vote is not None
            if agreement is not None:
                received = False  # also if this raises
                received = agreement.reached(request_id, vote)
    finally:
        if not received:
            for old, owner in zip(before, owners, strict=True):
                _restore(old, owner)
        if share is not None:
            _broadcast(share, content if received else b"", device)
    return received


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


def _encode_news(
    request_id: str, before: Sequence[dict[str, Any]], owners: Sequence[Any]
) -> bytes | bytearray:
    """What receiving has set, for the other ranks; nothing if it cannot be given to them."""
    news = [_changes(old, owner) for old, owner in zip(before, owners, strict=True)]
    try:
        return _encode(news)
    except (TypeError, ValueError, RecursionError):
        logger.exception("KV of request %s cannot be given to the other ranks", request_id)
        return b""


def _restore(before: dict[str, Any], owner: Any) -> None:
    for name in _changes(before, owner):
        if name in before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)


def _vote(request_id: str, before: Sequence[dict[str, Any]], owners: Sequence[Any]) -> bytes:
    """A digest of what was received: which attributes, and how many tokens each cache has.

    Ranks have other heads, so their bytes differ, but not these.
    """
    found = [
        sorted((name, _tokens(value)) for name, value in _changes(old, owner).items())
        for old, owner in zip(before, owners, strict=True)
    ]
    return hashlib.sha256(repr((request_id, found)).encode("utf-8", "surrogatepass")).digest()


def _tokens(value: object) -> str:
    if isinstance(value, Mapping):
        return str(value.get("seq_len"))
    caches = [getattr(value, name, None) for name in ("key_cache", "value_cache")]
    shapes = [
        [None if layer is None else tuple(getattr(layer, "shape", ()))[:1] for layer in cache]
        for cache in caches
        if isinstance(cache, Sequence)
    ]
    return str(shapes)


def _changes(before: dict[str, Any], owner: Any) -> dict[str, Any]:
    missing = object()
    return {
        name: value
        for name, value in _attributes(owner).items()
        if before.get(name, missing) is not value and name != "sampling_params"
    }
