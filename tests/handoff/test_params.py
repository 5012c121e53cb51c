# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: what we answer can be read back, and nothing else gets through."""

import json
from typing import Any

import pytest

from omni_connector.handoff.params import (
    MAX_TOKENS_AHEAD,
    PARAMS_VERSION,
    BadParamsError,
    RemotePrefill,
    handoff_answer,
    no_handoff_answer,
    parse_remote_prefill,
    tcp_address,
    wants_handoff,
    wants_remote_kv,
)
from omni_connector.net.packets import PACKAGE
from omni_connector.net.peers import HostPort, Peers

EPOCH, TOKEN = bytes(range(16)), b"\xff" * 16
MISSING = object()


def answer(**changes: Any) -> dict[str, Any]:
    params = handoff_answer(
        engine_id="engine-1",
        request_id="cmpl-1",
        epoch=EPOCH,
        token=TOKEN,
        num_tokens=33,
        tokens_ahead=0,
        tp_size=2,
        address=None,
    )
    params |= changes
    return {key: value for key, value in params.items() if value is not MISSING}


def reason_of(params: dict[str, Any]) -> str:
    with pytest.raises(BadParamsError) as error:
        parse_remote_prefill(params)
    assert str(error.value)
    return error.value.reason


def test_an_answer_is_understood_by_the_decode_side_after_json() -> None:
    params = json.loads(json.dumps(answer()))
    assert wants_remote_kv(params)
    assert not wants_handoff(params)
    remote = parse_remote_prefill(params)
    assert remote.remote_engine_id == "engine-1"
    assert (remote.epoch, remote.token) == (EPOCH, TOKEN)


def test_an_answer_has_the_keys_that_routers_made_for_nixl_forward() -> None:
    assert answer() == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],
        "remote_engine_id": "engine-1",
        "remote_request_id": "cmpl-1",
        "remote_host": None,
        "remote_port": None,
        "remote_num_tokens": 33,
        "tp_size": 2,
        "omni_version": PARAMS_VERSION,
        "omni_epoch": EPOCH.hex(),
        "omni_token": TOKEN.hex(),
        "omni_package": PACKAGE,
        "omni_tokens_ahead": 0,
    }


def test_an_answer_of_a_version_that_says_nothing_of_drafters_is_understood() -> None:
    assert parse_remote_prefill(answer(x_router="r", remote_tp="?")).omni_tokens_ahead == 0
    assert parse_remote_prefill(answer(omni_tokens_ahead=MISSING)).omni_tokens_ahead is None


def test_the_answer_without_handoff_asks_for_nothing() -> None:
    params = no_handoff_answer("arena_full")
    assert not wants_remote_kv(params)
    assert not wants_handoff(params)
    assert params["omni_no_handoff"] == "arena_full"


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"do_remote_decode": True}, "hand-off"),
        ({"do_remote_decode": True, "do_remote_prefill": False}, "hand-off"),
        ({"do_remote_prefill": True}, "remote KV"),
        ({"do_remote_prefill": "yes"}, "remote KV"),  # looked at, and then refused as malformed
        ({"do_remote_decode": False, "do_remote_prefill": False}, ""),
        ({"do_remote_decode": "true", "do_remote_prefill": None}, ""),
        ({"do_remote_decode": 1}, ""),
        *((nothing, "") for nothing in ({}, None, [], ["do_remote_prefill"], "do_remote_decode")),
    ],
)
def test_what_is_wanted_is_asked_for_with_true(params: Any, wanted: str) -> None:
    assert wants_handoff(params) is (wanted == "hand-off")
    assert wants_remote_kv(params) is (wanted == "remote KV")


def test_params_of_another_connector_are_foreign() -> None:
    params = {key: value for key, value in answer().items() if not key.startswith("omni_")}
    assert reason_of(params) == "foreign_params"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_remote_prefill", "true"),
        ("do_remote_prefill", 1),
        ("omni_tokens_ahead", -1),
        ("omni_tokens_ahead", MAX_TOKENS_AHEAD + 1),
        ("omni_tokens_ahead", "1"),
        ("remote_engine_id", MISSING),
        ("remote_engine_id", None),
        ("remote_engine_id", ""),
        ("remote_engine_id", "e" * 513),
        ("remote_engine_id", 7),
        ("remote_host", 7),
        ("remote_host", "h" * 254),
        ("remote_host", "10.0.0.1"),  # and no port
        ("remote_port", 5600),  # and no host
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", "80"),
        ("omni_version", MISSING),
        ("omni_version", PARAMS_VERSION + 1),
        ("omni_version", str(PARAMS_VERSION)),
        ("omni_version", True),
        ("omni_epoch", MISSING),
        ("omni_epoch", EPOCH),
        ("omni_token", MISSING),
        ("omni_token", None),
        ("omni_token", ""),
        ("omni_token", TOKEN.hex()[:-2]),
        ("omni_token", TOKEN.hex() + "00"),
        ("omni_token", TOKEN.hex().upper()),
        ("omni_token", "g" * 32),
        ("omni_token", "f" * 31 + "\n"),
        ("omni_token", "f" * 30 + "  "),
        ("omni_token", "\u0663" * 32),
        ("omni_token", [TOKEN.hex()]),
    ],
)
def test_what_does_not_fit_is_malformed(key: str, value: Any) -> None:
    assert reason_of(answer(**{key: value})) == "malformed_params"


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_host", "omni_epoch", "omni_token"])
def test_half_a_surrogate_pair_which_json_can_say_is_malformed(key: str) -> None:
    params = json.loads(json.dumps(answer(remote_port=5, **{key: "\ud800"})))
    assert reason_of(params) == "malformed_params"


def test_keys_that_are_no_strings_are_malformed() -> None:
    assert reason_of(answer() | {7: "omni_"}) == "malformed_params"  # type: ignore[operator]


NO_HOSTS = """* 0.0.0.0 :: ::ffff:0.0.0.0 224.0.0.1 10.0.0.1:5600 10.0.0.1;192.168.0.1
eth0;10.0.0.1 10.0.0.1/../../x [::1] fe80::1%eth0 user@node n\u00f6de 127.1 2130706433 0x7f000001
node. -node"""


@pytest.mark.parametrize("host", [*NO_HOSTS.split(), "", "a b", "a\n", "a\0b"])
def test_what_is_no_host_is_malformed_whoever_is_allowed(host: str) -> None:
    params = answer(remote_host=host, remote_port=5600)
    assert reason_of(params) == "malformed_params"


def remote(host: str, port: int = 5600) -> RemotePrefill:
    return parse_remote_prefill(answer(remote_host=host, remote_port=port))


def test_an_answer_says_where_its_engine_listens() -> None:
    params = handoff_answer(
        engine_id="engine-1",
        request_id="cmpl-1",
        epoch=EPOCH,
        token=TOKEN,
        num_tokens=33,
        tokens_ahead=0,
        tp_size=1,
        address=HostPort("fd00::1", 5600),
    )
    assert (params["remote_host"], params["remote_port"]) == ("fd00::1", 5600)
    found = tcp_address(
        parse_remote_prefill(json.loads(json.dumps(params))), Peers(["fd00::/8"]), has_key=True
    )
    assert str(found) == "[fd00::1]:5600"


@pytest.mark.parametrize(
    ("host", "peers", "has_key", "remedy"),
    [
        ("10.0.0.1", [], True, "'peers'"),
        ("10.0.0.1", ["10.0.0.2", "192.168.0.0/16", "node"], True, "'peers'"),
        ("127.0.0.1", [], True, "'peers'"),
        ("node", ["10.0.0.0/8"], True, "'peers'"),
        ("10.0.0.1", ["10.0.0.0/8"], False, "'key_file'"),
        ("node", ["node"], False, "'key_file'"),
        ("localhost", ["localhost"], False, "'key_file'"),  # whatever that may mean here
    ],
)
def test_a_peer_that_may_not_be_asked_is_disallowed_and_the_key_to_set_is_named(
    host: str, peers: list[str], has_key: bool, remedy: str
) -> None:
    with pytest.raises(BadParamsError, match=remedy) as error:
        tcp_address(remote(host), Peers(peers), has_key=has_key)
    assert error.value.reason == "disallowed_peer"
    assert repr(host) in str(error.value)


@pytest.mark.parametrize(
    ("host", "peers", "has_key", "address"),
    [
        ("10.0.0.1", ["10.0.0.0/8"], True, "10.0.0.1:5600"),
        ("NODE-7", ["node-7"], True, "node-7:5600"),
        ("::ffff:10.0.0.1", ["10.0.0.1"], True, "10.0.0.1:5600"),
        ("fd00:0::1", ["fd00::1"], True, "[fd00::1]:5600"),
        ("127.0.0.1", ["127.0.0.1"], False, "127.0.0.1:5600"),
        ("::1", ["::1"], False, "[::1]:5600"),
    ],
)
def test_a_peer_that_is_allowed_gets_an_address(
    host: str, peers: list[str], has_key: bool, address: str
) -> None:
    assert str(tcp_address(remote(host), Peers(peers), has_key=has_key)) == address
