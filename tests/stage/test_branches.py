# SPDX-License-Identifier: Apache-2.0
"""Which rank uses the KV of which branch, and which part in receiving each rank has."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.stage.branches import apply, collect, is_dummy, rank_payloads, roles_of
from omni_connector.stage.groups import ParallelGroups, ReceiveRole, ReceiveTopology

MAIN = {
    "past_key_values": "kv", "kv_metadata": "meta",
    "sp.past_key_values": "kv", "sp.kv_metadata": "meta",
}  # fmt: skip


def _request(**params: Any) -> SimpleNamespace:
    own = {"past_key_values": "kv", "kv_metadata": "meta"}
    return SimpleNamespace(
        request_id="r", steps=3, **own, sampling_params=SimpleNamespace(seed=1, **own, **params)
    )


def test_only_kv_is_collected_from_a_request() -> None:
    branches = {
        "cfg_text_past_key_values": "text", "cfg_text_kv_metadata": {}, "cfg_kv_request_ids": {},
        "cfg_branch_past_key_values": {"cfg_img": "img"}, "cfg_active_branch": None,
        "cfg_scale": 4.0, "text_past_key_values": "other",
    }  # fmt: skip
    found = collect(_request(**branches))
    for name in ("cfg_active_branch", "cfg_scale", "text_past_key_values"):
        del branches[name]
    assert found == MAIN | {f"sp.{name}": value for name, value in branches.items()}
    assert collect(SimpleNamespace(request_id="r")) == {}


def test_what_was_collected_is_applied_to_another_request() -> None:
    req = SimpleNamespace(sampling_params=SimpleNamespace())
    sent = collect(_request(cfg_text_past_key_values="text"))
    apply(req, sent)
    assert collect(req) == sent
    alone = SimpleNamespace()
    apply(alone, sent)
    assert vars(alone) == {"past_key_values": "kv", "kv_metadata": "meta"}


def _branch(role: str, roles: list[str], kv: str, metadata: Any = None) -> dict[str, Any]:
    fields = MAIN | {
        "sp.cfg_branch_roles": roles,
        "sp.cfg_active_branch": role,
        "sp.cfg_branch_past_key_values": {role: kv},
        f"sp.{role}_past_key_values": kv,
    }
    if metadata is not None:
        fields |= {
            "sp.cfg_branch_kv_metadata": {role: metadata}, f"sp.{role}_kv_metadata": metadata,
        }  # fmt: skip
    return fields


@pytest.mark.parametrize(
    "given",
    [
        {"cfg_img_past_key_values": "img", "cfg_text_past_key_values": "text",
         "cfg_text_kv_metadata": "t"},
        {"cfg_branch_past_key_values": {"cfg_img": "img", "cfg_text": "text"},
         "cfg_branch_kv_metadata": {"cfg_text": "t"}},
        {"cfg_branch_past_key_values": {"cfg_img": "img"}, "cfg_text_past_key_values": "text",
         "cfg_text_kv_metadata": "t", "cfg_img_past_key_values": "older"},
    ],
)  # fmt: skip
def test_each_rank_gets_its_own_branch_and_no_other(given: dict[str, Any]) -> None:
    roles = ["cfg_text", "cfg_img"]
    prompt = MAIN | {"sp.cfg_branch_roles": roles, "sp.cfg_active_branch": None}
    text = _branch("cfg_text", roles, "text", "t")
    img = _branch("cfg_img", roles, "img")
    fields = collect(_request(**given))
    assert roles_of(fields) == roles
    assert rank_payloads(fields, 3) == [prompt, text, img]
    assert rank_payloads(fields, 2) == [prompt, text]
    assert rank_payloads(fields, 4) == [prompt, text, img, None]


def test_roles_of_the_model_follow_those_that_are_known() -> None:
    fields = collect(
        _request(
            cfg_own_past_key_values="own",
            cfg_branch_past_key_values={"negative": "n", "none": None, "cfg_img": "img"},
        )
    )
    assert roles_of(fields) == ["cfg_img", "negative", "cfg_own"]


def test_without_branches_two_ranks_share_the_prompts_kv_and_more_do_without() -> None:
    fields = collect(_request())
    assert rank_payloads(fields, 2) == [MAIN, MAIN]
    assert rank_payloads(fields, 3) == [MAIN, None, None]
    assert rank_payloads({}, 2) == [None, None]


def test_what_the_model_collects_besides_goes_to_all() -> None:
    fields = collect(_request(cfg_text_past_key_values="text")) | {"sp.ropes": [1]}
    assert [payload and payload["sp.ropes"] for payload in rank_payloads(fields, 2)] == [[1], [1]]


def test_warm_up_requests_are_told_by_their_id() -> None:
    assert [is_dummy(each) for each in ("dummy_req_id", "dummy_req_id/1", "dummy", None)] == [
        True, True, False, False,
    ]  # fmt: skip


def _group(size: int, rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(world_size=size, rank_in_group=rank)


ROLES = [
    ("alone", False, _group(1), None, None, "local"),
    ("no group", False, None, None, None, "local"),
    ("tensor parallel", True, _group(2, 1), None, None, "local"),
    ("leads branches", True, _group(4), _group(2), None, "leader"),
    ("has a branch", True, _group(4, 2), _group(2, 1), None, "follower"),
    ("leads a sequence", True, _group(4), _group(1), _group(2), "leader"),
    ("has a part", True, _group(4, 2), None, _group(2, 1), "follower"),
    ("has both", True, _group(8, 6), _group(2, 1), _group(2, 0), "follower"),
    ("leads the world", False, _group(2), _group(2), None, "leader"),
    ("follows the world", False, _group(2, 1), _group(2, 0), None, "follower"),
]


@pytest.mark.parametrize(
    ("tp", "world", "cfg", "sp", "role"), [each[1:] for each in ROLES], ids=[r[0] for r in ROLES]
)
def test_the_part_of_a_rank_follows_from_its_groups(
    tp: bool, world: Any, cfg: Any, sp: Any, role: str
) -> None:
    groups = ParallelGroups(world, cfg, _group(2), sp)
    part = ReceiveTopology.of(groups, tp_active=tp, tp_size=2)
    assert part.role is ReceiveRole(role)
    assert [part.is_local, part.is_leader, part.is_follower].count(True) == 1
    assert part.tp_size == (2 if tp else 1)


def test_vllm_omni_is_asked_for_sizes_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(
        get_world_group=lambda: _group(8),
        get_cfg_group=lambda: None,
        get_sp_group=lambda: "sp",
        get_classifier_free_guidance_world_size=lambda: 2,
        get_classifier_free_guidance_rank=lambda: 1,
        get_sequence_parallel_world_size=lambda: 2,
        get_sequence_parallel_rank=lambda: 0,
    )
    monkeypatch.setitem(sys.modules, "vllm_omni.diffusion.distributed.parallel_state", state)
    groups = ParallelGroups.find()
    assert groups.sp == "sp"
    part = ReceiveTopology.of(groups, tp_active=True, tp_size=2)
    assert (part.cfg_size, part.cfg_rank, part.sp_size, part.sp_rank) == (2, 1, 2, 0)
    assert (part.is_follower, part.by_branch) == (True, True)
