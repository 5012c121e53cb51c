# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a stage tell each other about a KV cache, over `torch.distributed`.

One rank gives what it received to the others, as the bytes that `objects.codec` makes of it.
Nothing is pickled. Ranks that receive for themselves agree whether all of them have it: a rank that
computes without it would make other collectives than the rest, and all would hang until a watchdog
kills them.
"""

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from omni_connector.objects import codec
from omni_connector.runtime.backoff import Backoff
from omni_connector.stage.branches import BRANCH_FIELDS, PARAMS, Fields, apply, rank_payloads
from omni_connector.stage.groups import (
    ReceiveTopology,
    control_of,
    group_rank,
)

logger = logging.getLogger(__name__)

_HOST_BACKENDS: Final = ("gloo", "mpi")

# Seconds beyond what receiving may take, for ranks that are busy, or began a little later.
_SLACK_S: Final = 10.0

# Seconds between two looks at whether the other ranks have voted: at first, and at most.
_FIRST_POLL_S: Final = 0.0005
_LAST_POLL_S: Final = 0.02

# What a vote begins with.
_FAILED: Final = b"\0"
_MISSED: Final = b"\1"
_CAME: Final = b"\2"

# Bytes of a vote: the byte that it begins with, and a digest.
_VOTE_BYTES: Final = 33


@dataclass(frozen=True, slots=True)
class Distribution:
    """Brings what a leader has received to its followers, as bytes.

    Args:
        topology: this rank's part.
        patience: seconds in which the leader has received, or given up.
        device: one that the groups can send from, where their backend has no host memory.
    """

    topology: ReceiveTopology
    patience: float
    device: torch.device | None = None

    def give(self, contents: Sequence[bytes | bytearray]) -> None:
        """Give to each follower; the leader calls this.

        Args:
            contents: one for each rank that shares branches, or one for all.

        Raises:
            RuntimeError: a follower died, or does not take it in time.
        """
        part = self.topology
        if not part.tp_active:
            self._broadcast(part.world, contents[0])
            return
        if part.cfg_active:
            for rank in range(1, part.cfg_size):
                self._send(part.cfg_group, contents[rank], rank)
        if part.sp_active:
            self._broadcast(part.sp_group, contents[0])

    def take(self) -> memoryview:
        """What the leader gives to this rank; each follower calls this.

        Raises:
            RuntimeError: the leader died, or gives nothing in time.
        """
        part = self.topology
        if not part.tp_active:
            return self._broadcast(part.world, None)
        content: memoryview | None = None
        if part.cfg_active and part.sp_rank == 0:
            content = self._receive(part.cfg_group, 0)
        if part.sp_active:
            content = self._broadcast(part.sp_group, content)
        assert content is not None
        return content

    def _broadcast(self, group: Any, content: bytes | bytearray | memoryview | None) -> memoryview:
        control = control_of(group)
        source = dist.get_global_rank(control, 0)

        def move(tensor: torch.Tensor) -> Any:
            return dist.broadcast(tensor, source, control, async_op=True)

        return self._move(control, content, move)

    def _send(self, group: Any, content: bytes | bytearray, rank: int) -> None:
        control = control_of(group)
        to = dist.get_global_rank(control, rank)
        self._move(control, content, lambda tensor: dist.isend(tensor, to, group=control))

    def _receive(self, group: Any, rank: int) -> memoryview:
        control = control_of(group)
        source = dist.get_global_rank(control, rank)
        return self._move(control, None, lambda tensor: dist.irecv(tensor, source, group=control))

    def _move(
        self,
        control: Any,
        content: bytes | bytearray | memoryview | None,
        move: Callable[[torch.Tensor], Any],
    ) -> memoryview:
        """Move bytes, first their number; without content they come from elsewhere."""
        where = _control_device(control, self.device)
        # The leader may wait for the votes of other ranks, and those ranks for the verdict.
        limit = timedelta(seconds=3 * (self.patience + _SLACK_S))
        length = torch.tensor([0 if content is None else len(content)], device=where)
        move(length).wait(limit)
        if content is not None and len(content):
            writable = content if isinstance(content, bytearray) else bytearray(content)
            packed = torch.frombuffer(writable, dtype=torch.uint8).to(where)
        else:
            packed = torch.empty(int(length), dtype=torch.uint8, device=where)
        if packed.numel():
            move(packed).wait(limit)
        return packed.cpu().numpy().data


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
            vote: 33 bytes that tell what this rank has (see `receive_together`); None where
                receiving failed.

        Raises:
            RuntimeError: a rank died, or rank 0 gave no verdict in time.
        """
        control = control_of(self.group)
        size = dist.get_world_size(control)
        where = _control_device(control, self.device)
        cast = _FAILED * _VOTE_BYTES if vote is None else vote
        mine = torch.frombuffer(bytearray(cast), dtype=torch.uint8)
        votes = [torch.zeros(_VOTE_BYTES, dtype=torch.uint8, device=where) for _ in range(size)]
        # Both operations are started on every rank, whoever is late: else the next ones of the
        # group would meet these.
        collected = dist.all_gather(votes, mine.to(where), group=control, async_op=True)
        source = dist.get_global_rank(control, 0)
        if group_rank(self.group) == 0:
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
        having = [rank for rank, vote in enumerate(votes) if vote[0] == ord(_CAME)]
        valid = all(vote[0] != ord(_FAILED) for vote in votes)
        if valid and all(torch.equal(vote, votes[0]) for vote in votes):
            return True
        if having or valid:
            logger.error(
                "KV of request %s came to ranks %s of %d, %s: no rank uses it",
                *(request_id, having, len(votes)),
                "and not to the others" if 0 < len(having) < len(votes) else "and differs",
            )
        return False


def receive_together(
    request_id: str,
    req: Any,
    receive: Callable[[], bool],
    *,
    topology: ReceiveTopology,
    agreement: Agreement | None = None,
    distribution: Distribution | None = None,
    device: torch.device | None = None,
) -> bool:
    """Receive on several ranks, so that all of them have what was received, or none.

    Args:
        request_id: what is received.
        req: the request; it and its `sampling_params` get what was received.
        receive: sets attributes of these and says whether the request's own KV came.
        topology: this rank's part.
        agreement: of the ranks that receive. Unless the same came to all of them, what was set is
            taken back.
        distribution: to the followers; None where there are none.
        device: where the tensors are wanted.

    Returns:
        Whether this rank has the request's own KV.

    Raises:
        RuntimeError: as `Distribution` and `Agreement.reached`. And what `receive` raises, on the
            rank that receives; the others have nothing then.
    """
    if distribution is not None and topology.is_follower:
        taken = unpack(distribution.take(), device)
        if taken is None:
            return False
        came, given = taken
        apply(req, given)
        return came
    owners = owners_of(req)
    before = [_attributes(owner) for owner in owners]
    nothing: list[bytes | bytearray] = [b""] * topology.cfg_size
    contents = nothing
    fields: Fields = {}
    came = agreed = False
    # The other ranks wait for the vote and for what is given, whatever happens here.
    try:
        vote = None
        try:
            came = receive()
            fields = _news(before, owners)
            if distribution is None:
                vote = _vote(request_id, came, before, owners)
            elif (packed := pack(request_id, came, fields, topology)) is not None:
                contents = packed
                vote = _vote(request_id, came, before, owners)
        finally:
            agreed = vote is not None
            if agreement is not None:
                agreed = False  # also if this raises
                agreed = agreement.reached(request_id, vote)
    finally:
        if not agreed:
            for old, owner in zip(before, owners, strict=True):
                _restore(old, owner)
        if distribution is not None:
            distribution.give(contents if agreed else nothing)
    if agreed and topology.by_branch and distribution is not None:
        main = rank_payloads(fields, topology.cfg_size)[0] or {}
        apply(req, {name: main[name] for name in BRANCH_FIELDS if name in main})
    return agreed and came


def owners_of(req: Any) -> list[Any]:
    """The objects that KV is set on: a request, and its `sampling_params`."""
    params = getattr(req, "sampling_params", None)
    return [req] if params is None else [req, params]


def pack(
    request_id: str, came: bool, fields: Fields, topology: ReceiveTopology
) -> list[bytes | bytearray] | None:
    """What a leader gives: whether the request's own KV came, and fields; none if none came.

    Returns:
        One for each rank that shares branches, which get their own branch; else the same for all.
        None if it cannot be given to other ranks; the log says why.
    """
    size = topology.cfg_size
    payloads = rank_payloads(fields, size) if topology.by_branch else [fields or None] * size
    packed: dict[int, bytearray] = {}
    try:
        for payload in payloads:
            if payload is not None and id(payload) not in packed:
                packed[id(payload)] = _encode([came, payload])
    except (TypeError, ValueError, RecursionError):
        logger.exception("KV of request %s cannot be given to the other ranks", request_id)
        return None
    return [b"" if payload is None else packed[id(payload)] for payload in payloads]


def unpack(content: memoryview, device: torch.device | None) -> tuple[bool, Fields] | None:
    """What `pack` has made of a payload; None for nothing."""
    if not content.nbytes:
        return None
    came, fields = _decode(content, device)
    return bool(came), fields


def _news(before: Sequence[dict[str, Any]], owners: Sequence[Any]) -> Fields:
    """What receiving has set, by field."""
    changes = [_changes(old, owner) for old, owner in zip(before, owners, strict=True)]
    found: Fields = dict(changes[0])
    for name, value in changes[1].items() if len(changes) > 1 else ():
        found[PARAMS + name] = value
    return found


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
    """The value with a tag beside each container, because `codec` alone turns tuples into lists."""
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


def _restore(before: dict[str, Any], owner: Any) -> None:
    for name in _changes(before, owner):
        if name in before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)


def _vote(
    request_id: str, came: bool, before: Sequence[dict[str, Any]], owners: Sequence[Any]
) -> bytes:
    """Whether the request's own KV came, and a digest of what was received with it: which
    attributes, and how many tokens each cache has.

    Ranks have other heads, so their bytes differ, but not these.
    """
    found = [
        sorted((name, _tokens(value)) for name, value in _changes(old, owner).items())
        for old, owner in zip(before, owners, strict=True)
    ]
    text = repr((request_id, found)).encode("utf-8", "surrogatepass")
    return (_CAME if came else _MISSED) + hashlib.sha256(text).digest()


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
