# SPDX-License-Identifier: Apache-2.0
"""Receiving on several ranks: real processes, real groups of `torch.distributed` (gloo)."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_connector.stage import groups
from omni_connector.stage.distributed import _attributes, _changes, _decode, _encode
from omni_connector.stage.groups import ParallelGroups, group_size

from .caches import sequence
from .connectors import send


def _sum(tensor: torch.Tensor) -> float:
    return round(float(tensor.double().sum()), 4)


def _run(spawn, place: Path, kind: str, world: int) -> list[list[Any]]:
    """What each rank printed."""
    ranks = [spawn("ranks", kind, rank, world, place / "meeting") for rank in range(world)]
    said = []
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=120)
        expected = 9 if (kind, rank) in {("world", 0), ("agree", 1)} else 0
        assert process.returncode == expected, err
        said.append([json.loads(line) for line in out.splitlines() if line[:1] in '{["'])
    return said


def test_without_tensor_parallelism_rank_0_receives_and_gives_to_all(spawn, place, shared) -> None:
    sender = shared()
    seq, text = sequence(seed=1), sequence(seed=2)
    for request_id, each in (("r", seq), ("text", text), ("text again", text), ("q", seq)):
        assert send(sender, each, request_id)
    first, second = _run(spawn, place, "world", 2)
    both = {
        "received": True, "steps": 3, "key": _sum(seq.key), "value": _sum(seq.value),
        "shape": [10, 2, 4], "shared": True, "seq_len": 10, "text": _sum(text.key),
        "extra": "((1, None), [2.5, b'x'], {3: 2, 'é': True})",
    }  # fmt: skip
    assert first[0] == both | {"collects": 1, "gets": 2}
    assert second[0] == both | {"collects": 0, "gets": 0}
    # Companions are collected also where the request's own KV did not come.
    text_alone = {"received": False, "steps": 3, "text": both["text"], "extra": both["extra"]}
    assert first[1] == text_alone | {"collects": 2, "gets": 4}
    assert second[1] == text_alone | {"collects": 0, "gets": 0}
    nothing = {"received": False, "steps": 3}
    # What cannot be given to the others is nobody's.
    assert first[2]["received"] is False
    assert second[2] == nothing | {"collects": 0, "gets": 0}
    assert first[3] == {"raised": "disk"}
    assert second[3] == nothing | {"collects": 0, "gets": 0}
    tensors = [[[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5]], 7.0,
               [0, 3], "torch.float8_e4m3fn", None]  # fmt: skip
    assert first[4] == second[4] == [tensors, True]
    assert second[5:] == ["broken group"]


def test_with_tensor_parallelism_alone_each_rank_receives(spawn, place, shared) -> None:
    seqs = [sequence(seed=rank) for rank in range(2)]
    for rank, seq in enumerate(seqs):
        sender = shared(tp_rank=rank, tp_size=2)
        for request_id in ("r", "text", "text again"):
            assert send(sender, seq, request_id)
    for seq, said in zip(seqs, _run(spawn, place, "tp", 2), strict=True):
        assert said[0]["received"] is True
        assert (said[0]["key"], said[0]["collects"], said[0]["gets"]) == (_sum(seq.key), 1, 2)
        assert [line.get("received") for line in said[1:3]] == [False, False]
        assert said[3] == {"raised": "disk"}


def test_with_branches_the_first_of_the_same_tensor_parallel_rank_receives(
    spawn, place, shared
) -> None:
    seqs = [sequence(seed=rank) for rank in range(2)]
    for rank, seq in enumerate(seqs):
        sender = shared(tp_rank=rank, tp_size=2)
        for request_id in ("r", "text", "text again", "q"):
            assert send(sender, seq, request_id)
    said = _run(spawn, place, "cfg", 4)
    for rank, lines in enumerate(said):
        key = _sum(seqs[rank % 2].key)
        assert (lines[0]["received"], lines[0]["key"], lines[0]["text"]) == (True, key, key)
        assert lines[0]["gets"] == (2 if rank < 2 else 0)
        own = [None, []] if rank < 2 else ["cfg_text", ["cfg_text"]]
        assert lines[0]["branch"] == [own[0], ["cfg_text"], own[1]]
        assert [line["received"] for line in lines[1:3]] == [False, False]
    assert [lines[3] for lines in said[:2]] == [{"raised": "disk"}] * 2
    assert [lines[3]["received"] for lines in said[2:]] == [False] * 2


def test_with_a_shared_sequence_the_first_of_the_same_tensor_parallel_rank_receives(
    spawn, place, shared
) -> None:
    seqs = [sequence(seed=rank) for rank in range(2)]
    for rank, seq in enumerate(seqs):
        sender = shared(tp_rank=rank, tp_size=2)
        for request_id in ("r", "text", "text again", "q"):
            assert send(sender, seq, request_id)
    for rank, lines in enumerate(_run(spawn, place, "sp", 4)):
        key = _sum(seqs[rank % 2].key)
        assert (lines[0]["received"], lines[0]["key"], lines[0]["text"]) == (True, key, key)
        assert lines[0]["gets"] == (2 if rank < 2 else 0)
        assert "branch" not in lines[0]
        assert [line["received"] for line in lines[1:3]] == [False, False]


def _send_halves(shared: Any) -> list[Any]:
    """What two tensor-parallel ranks send: both halves come to rank 0 alone, "long" differs."""
    seqs = [sequence(seed=rank) for rank in range(2)]
    for rank, seq in enumerate(seqs):
        sender = shared(tp_rank=rank, tp_size=2)
        for request_id in ("r", "text", "one", "late", "raises", "again", "dead"):
            assert send(sender, seq, request_id)
        for request_id in ("half", "half text") if rank == 0 else ():
            assert send(sender, seq, request_id)
        assert send(sender, sequence(10 + rank, seed=rank), "long")
    return seqs


def _nothing(case: str, said: Any = False) -> list[Any]:
    return [case, said, "old", False, False]


def test_tensor_parallel_ranks_use_what_came_to_all_of_them_or_nothing(
    spawn, place, shared
) -> None:
    seqs = _send_halves(shared)
    first, second = _run(spawn, place, "agree", 2)
    for seq, said in zip(seqs, (first, second), strict=True):
        whole = ["whole", True, _sum(seq.key), True, True]
        cases = ("nowhere", "half", "companion of one", "other lengths", "late")
        assert said[:6] == [whole, *map(_nothing, cases)]
        assert said[7] == ["whole again", True, _sum(seq.key), True, False]
    assert first[6] == _nothing("raises")
    assert second[6] == _nothing("raises", "OSError: disk")
    # "half", "companion of one", "other lengths", "late", and at rank 0 "raises".
    assert first[8] == ["disagreements", 5]
    assert second[8] == ["disagreements", 3]
    case, said, *kept = first[9]
    assert said.startswith("RuntimeError")
    assert [case, *kept] == ["dead", "old", False, False]


def test_ranks_that_give_to_others_agree_before_they_do(spawn, place, shared) -> None:
    seqs = _send_halves(shared)
    for rank, said in enumerate(_run(spawn, place, "both", 4)):
        assert said[0] == ["whole", True, _sum(seqs[rank % 2].key), True, True]
        cases = ("nowhere", "half", "companion of one", "other lengths")
        assert said[1:] == [_nothing(case) for case in cases]


def test_a_world_of_as_many_ranks_is_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    world, tp = object(), object()
    monkeypatch.setattr(groups, "group_size", lambda group: 2 if group is world else 1)
    assert ParallelGroups(world).of_tensor_parallel(2) is world
    assert ParallelGroups(world, tp=tp).of_tensor_parallel(2) is tp
    assert ParallelGroups(world).of_tensor_parallel(4) is None  # replicas, or stages
    assert ParallelGroups(world).of_tensor_parallel(1) is None


def test_groups_are_found_in_vllm_omni_else_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm_omni.diffusion.distributed.parallel_state"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert ParallelGroups.find() == ParallelGroups()
    assert group_size(None) == 1

    def none() -> None:
        raise AssertionError("group is not initialized")

    world, cfg = object(), object()
    state = SimpleNamespace(get_world_group=lambda: world, get_cfg_group=lambda: cfg)
    monkeypatch.setitem(sys.modules, name, state)
    assert ParallelGroups.find() == ParallelGroups(world, cfg)
    state.get_cfg_group = none
    assert ParallelGroups.find() == ParallelGroups(world)
    state.get_world_group = none
    assert ParallelGroups.find() == ParallelGroups()


def test_only_plain_values_are_given_to_other_ranks() -> None:
    value = [1, {"a": (None, "b"), 3: b"c"}, SimpleNamespace(c=torch.ones(2), d=[])]
    assert str(_decode(memoryview(_encode(value)))) == str(value)
    for wrong in (object(), {1, 2}, SimpleNamespace(a=print), torch.float32):
        with pytest.raises(TypeError):
            _encode([wrong])


def test_what_receiving_changed_is_told_by_identity() -> None:
    class Slotted:
        __slots__ = ("a", "b")

    owner = Slotted()
    owner.a = value = [1]
    before = _attributes(owner)
    owner.b = 2
    assert _changes(before, owner) == {"b": 2}
    owner.a = list(value)
    assert _changes(before, owner) == {"a": [1], "b": 2}
