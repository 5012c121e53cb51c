# SPDX-License-Identifier: Apache-2.0
"""One rank of a stage that receives in several processes; prints one line of JSON a case.

Arguments: how the ranks are grouped, this rank, their number, and the file they meet at.
"""

import datetime
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from omni_connector.stage import distributed
from omni_connector.stage.distributed import Distribution, _decode, _encode
from omni_connector.stage.groups import ParallelGroups, ReceiveRole, ReceiveTopology

from ..patience import lengthen_objects
from .shared import shared_manager


def _groups(kind: str, rank: int, world: int) -> tuple[ParallelGroups | None, int, int]:
    """The groups, the tensor-parallel rank and size."""
    if kind == "world":
        return None, 0, 1
    if kind in ("tp", "agree"):
        return ParallelGroups(world=dist.group.WORLD), rank, world
    # Ranks (0, 1) and (2, 3) are tensor-parallel; (0, 2) and (1, 3) share branches, or a sequence.
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    coordinator = SimpleNamespace(cpu_group=pairs[rank % 2], device_group=pairs[rank % 2])
    tp = None
    if kind == "both":
        tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    shared_by = {"sp" if kind == "sp" else "cfg": coordinator}
    return ParallelGroups(world=dist.group.WORLD, tp=tp, **shared_by), rank % 2, 2


def _request(request_id: str) -> SimpleNamespace:
    text = "text again" if request_id == "never sent" else "text"  # a rank gets each once
    params = SimpleNamespace(cfg_kv_request_ids={"text": text}, steps=3)
    return SimpleNamespace(request_id=request_id, sampling_params=params)


def _sum(tensor: torch.Tensor) -> float:
    return round(float(tensor.double().sum()), 4)


def _describe(req: SimpleNamespace) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": req.sampling_params.steps}
    kv = getattr(req, "past_key_values", None)
    if kv is not None:
        same = req.sampling_params.past_key_values
        found |= {
            "key": _sum(kv.key_cache[0]),
            "value": None if kv.value_cache[0] is None else _sum(kv.value_cache[0]),
            "shape": list(kv.key_cache[0].shape),
            "shared": same.key_cache[0] is kv.key_cache[0],
            "seq_len": req.kv_metadata["seq_len"],
        }
    params = req.sampling_params
    if hasattr(params, "cfg_active_branch"):
        kept = getattr(params, "cfg_branch_past_key_values", {})
        found["branch"] = [params.cfg_active_branch, params.cfg_branch_roles, sorted(kept)]
    text = getattr(req.sampling_params, "cfg_text_past_key_values", None)
    if hasattr(text, "key_cache"):
        found["text"] = _sum(text.key_cache[0])
        found["extra"] = repr(req.sampling_params.cfg_text_extra)
    return found


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _agree(kv: Any, rank: int, kind: str, given_up: Path) -> None:
    """Receives what came to some tensor-parallel ranks only; says what each rank does with it.

    Args:
        given_up: made when the first rank waits no more for one that is late.
    """
    one = rank % 2 == 1

    def collect(request_id, companions, manager, device):
        data, _ = manager.receive_kv_cache_for_request(companions["text"], device)
        return data and {"cfg_text_past_key_values": SimpleNamespace(**data["layer_blocks"])}

    def receive(case: str, request_id: str, *, companion: str | None = None) -> None:
        req = _request(request_id)
        req.past_key_values = "old"
        req.sampling_params.cfg_kv_request_ids = {"text": companion} if companion else None
        try:
            said: Any = kv.receive_multi_kv_cache_distributed(req, collect)
        except (OSError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        kept = req.past_key_values
        held = kept if kept == "old" else _sum(kept.key_cache[0])
        text = hasattr(req.sampling_params, "cfg_text_past_key_values")
        print(json.dumps([case, said, held, hasattr(req, "kv_metadata"), text]), flush=True)

    kv.config.recv_timeout = 1.0
    receive("whole", "r", companion="text")
    receive("nowhere", "never sent")
    receive("half", "half")
    receive("companion of one", "one", companion="half text")
    receive("other lengths", "long")
    if kind == "agree":
        distributed._SLACK_S = 0.5
        real = kv.receive_multi_kv_cache
        if one:
            kv.receive_multi_kv_cache = lambda *arguments: _wait_for(given_up) or real(*arguments)
        receive("late", "late")
        if not one:
            given_up.touch()
        distributed._SLACK_S = 30.0
        kv.receive_multi_kv_cache = real

        def fail(*arguments: object) -> bool:
            raise OSError("disk")

        if one:
            kv.receive_multi_kv_cache = fail
        receive("raises", "raises")
        kv.receive_multi_kv_cache = real
        receive("whole again", "again")
        print(json.dumps(["disagreements", kv.stats.disagreements]), flush=True)
        if one:
            os._exit(9)
        receive("dead", "dead")


def main(kind: str, rank: int, world: int, meeting: str) -> None:
    lengthen_objects(pytest.MonkeyPatch())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    groups, tp_rank, tp_size = _groups(kind, rank, world)
    kv = shared_manager(
        groups=groups, tp_rank=tp_rank, tp_size=tp_size, recv_timeout=50.0, need_send_cache=False
    )
    collects = 0

    def collect(request_id, companions, manager, device):
        nonlocal collects
        collects += 1
        if request_id == "q":
            return {"cfg_text_past_key_values": object()}
        data, _ = manager.receive_kv_cache_for_request(companions["text"], device)
        blocks = SimpleNamespace(**data["layer_blocks"])
        return {
            "cfg_text_past_key_values": blocks,
            "cfg_text_extra": ((1, None), [2.5, b"x"], {3: torch.zeros(0, 2).shape[1], "é": True}),
        }

    def say(received: bool, req: SimpleNamespace) -> None:
        line = {"received": received, "collects": collects, **_describe(req)}
        print(json.dumps(line | {"gets": kv.stats.received + kv.stats.receive_timeouts}))
        sys.stdout.flush()

    if kind in ("agree", "both"):
        _agree(kv, rank, kind, Path(meeting).with_suffix(".given-up"))
        os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts
    for request_id in ("r", "never sent", "q"):
        req = _request(request_id)
        absent = request_id == "never sent" or (request_id == "q" and kind == "tp")
        kv.config.recv_timeout = 0.2 if absent else 50.0
        say(kv.receive_multi_kv_cache_distributed(req, collect), req)

    # A receiver that raises tells the others before it does.
    def fail(*arguments: object) -> bool:
        raise OSError("disk")

    kv.receive_multi_kv_cache = fail
    req = _request("r")
    try:
        say(kv.receive_multi_kv_cache_distributed(req, collect), req)
    except OSError as error:
        print(json.dumps({"raised": str(error)}))
    sys.stdout.flush()
    if kind != "world":
        os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts
    # Tensors of every kind of shape, each once.
    shared = torch.arange(6).view(2, 3)
    value = {"t": [shared.t(), shared, shared, torch.tensor(7, dtype=torch.bfloat16)],
             "e": torch.empty(0, 3, dtype=torch.float8_e4m3fn), "n": None}  # fmt: skip
    role = ReceiveRole.FOLLOWER if rank else ReceiveRole.LEADER
    passing = Distribution(ReceiveTopology(role, world=dist.group.WORLD), 60.0)
    if rank == 0:
        passing.give([_encode(value)])
    got = _decode(passing.take()) if rank else value
    line = [t.tolist() for t in got["t"]] + [list(got["e"].shape), str(got["e"].dtype), got["n"]]
    print(json.dumps([line, got["t"][1] is got["t"][2]]))
    sys.stdout.flush()
    # The rank that would receive dies; the group tells the ranks that wait.
    if rank == 0:
        os._exit(9)
    try:
        kv.receive_multi_kv_cache_distributed(_request("r"), collect)
    except RuntimeError:
        print(json.dumps("broken group"))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
