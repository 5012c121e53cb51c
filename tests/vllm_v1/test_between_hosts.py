# SPDX-License-Identifier: Apache-2.0
"""Engines that do not meet in a runtime folder: asked over TCP, if they may be asked at all.

Namespaces of their own keep two engines of one host as far apart as two hosts do.
"""

import os
import socket

import pytest

from omni_connector.errors import ConfigError
from omni_connector.net import links as control_sockets
from omni_connector.net import resolver as resolver_module
from omni_connector.net.keys import write_new_key
from omni_connector.net.runtime import runtime_dir, socket_path
from omni_connector.testing.ports import free_ports
from tests import inspection
from tests.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, assert_clean, prompt

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("reused_engines")]

PROMPT = prompt(3 * BLOCK + 5)
BYTES = {"transport": "mooncake", "mooncake": {"host": "127.0.0.1"}}
SERVES = {**BYTES, "namespace": "far", "listen": "127.0.0.1:0"}
ASKS = {**BYTES, "namespace": "near", "peers": ["127.0.0.1"]}


@pytest.fixture
def key_file(tmp_path):
    write_new_key(tmp_path / "key")
    return str(tmp_path / "key")


def offered(prefill: InProcessEngine, **changes):
    params = prefill.generate(PROMPT, params=HANDOFF).params
    assert params is not None
    return {**params, **changes}


def assert_computed_here(decode: InProcessEngine, tokens, params, kind: str) -> None:
    assert decode.generate(PROMPT, 6, params=params).tokens == tokens(PROMPT, 6)
    assert decode.failures() == {kind: 1}
    assert decode.count("handoffs_received") == 0


@pytest.mark.parametrize("keyed", [True, False], ids=["key", "no key"])
def test_a_prompt_is_handed_off_over_tcp(engine, tokens, key_file, keyed):
    key = {"key_file": key_file} if keyed else {}
    prefill = engine("kv_producer", extra={**SERVES, **key})
    decode = engine("kv_consumer", extra={**ASKS, **key})
    params = offered(prefill)
    assert params["remote_host"] == "127.0.0.1"
    assert params["remote_port"] == inspection.channel(prefill.half).tcp_address.port
    assert decode.generate(PROMPT, 6, params=params).tokens == tokens(PROMPT, 6)
    assert decode.count("tokens_loaded") == len(PROMPT) - 1
    assert decode.failures() == {}
    assert_clean(prefill, decode)


def test_in_one_runtime_folder_neither_peers_nor_key_are_asked_for(engine, tokens):
    prefill = engine("kv_producer", extra={"listen": "127.0.0.1:0", "transport": "shm"})
    decode = engine("kv_consumer", extra={"transport": "shm"})
    params = offered(prefill, remote_host="192.0.2.1")
    assert decode.generate(PROMPT, 6, params=params).tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert decode.failures() == {}
    assert_clean(prefill, decode)


@pytest.fixture
def kill(engine):
    """Leaves the socket of an engine that was killed on this host, and runs on another one now.

    An engine that finds a peer gone sweeps its folder, unless it is stopped before: see `engine`.
    """
    left = []

    def leave(engine_id: str) -> None:
        left.append(socket_path(runtime_dir(ASKS["namespace"]), f"control:{engine_id}"))
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(left[-1]))

    yield leave
    for path in left:
        path.unlink(missing_ok=True)


def test_a_socket_that_refuses_is_no_reason_not_to_ask_over_tcp(engine, tokens, key_file, kill):
    prefill = engine("kv_producer", extra={**SERVES, "key_file": key_file})
    decode = engine("kv_consumer", extra={**ASKS, "key_file": key_file})
    params = offered(prefill)
    kill(params["remote_engine_id"])
    assert decode.generate(PROMPT, 6, params=params).tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert decode.failures() == {}
    assert_clean(prefill, decode)


def test_where_tcp_is_not_allowed_a_socket_that_refuses_is_an_engine_that_is_gone(
    engine, tokens, key_file, kill
):
    prefill = engine("kv_producer", extra={**SERVES, "key_file": key_file})
    decode = engine("kv_consumer", extra={**ASKS, "peers": []})
    params = offered(prefill)
    kill(params["remote_engine_id"])
    assert_computed_here(decode, tokens, params, "peer_unreachable")


@pytest.mark.parametrize(
    ("settings", "host", "remedy"),
    [
        ({"peers": []}, "127.0.0.1", "'peers'"),
        ({"peers": ["10.0.0.0/8"]}, "127.0.0.1", "'peers'"),
        ({"peers": ["10.0.0.0/8"]}, "10.0.0.1", "'key_file'"),
        ({"peers": ["node"]}, "node", "'key_file'"),
        ({"peers": ["node"]}, "other.node", "'peers'"),
    ],
)
def test_who_may_not_be_asked_is_neither_looked_up_nor_connected_to(
    engine, tokens, log, monkeypatch, settings, host, remedy
):
    def touched(*_: object, **__: object) -> None:
        raise AssertionError("it was looked up, or connected to")

    monkeypatch.setattr(control_sockets, "Link", touched)
    monkeypatch.setattr(resolver_module.socket, "getaddrinfo", touched)
    prefill = engine("kv_producer", extra=SERVES)
    decode = engine("kv_consumer", extra={**ASKS, **settings})
    params = offered(prefill, remote_host=host)
    assert_computed_here(decode, tokens, params, "disallowed_peer")
    assert len(log) == 1
    assert remedy in log[0]
    assert repr(host) in log[0]
    assert inspection.engines_asked(inspection.channel(decode.half)) == []


def test_an_engine_with_another_key_is_unreachable(engine, tokens, key_file, tmp_path, log):
    write_new_key(tmp_path / "other")
    prefill = engine("kv_producer", extra={**SERVES, "key_file": key_file})
    decode = engine("kv_consumer", extra={**ASKS, "key_file": str(tmp_path / "other")})
    assert_computed_here(decode, tokens, offered(prefill), "peer_unreachable")
    assert "key_file" in log[-1]


def test_a_prefill_engine_that_is_gone_is_unreachable(engine, tokens, key_file):
    prefill = engine("kv_producer", extra={**SERVES, "key_file": key_file})
    decode = engine("kv_consumer", extra={**ASKS, "key_file": key_file})
    params = offered(prefill)
    prefill.shutdown()
    assert_computed_here(decode, tokens, params, "peer_unreachable")


def test_without_listen_the_answer_has_no_address(engine):
    params = offered(engine("kv_producer"))
    assert (params["remote_host"], params["remote_port"]) == (None, None)


def test_a_decode_engine_listens_nowhere(engine):
    decode = engine("kv_consumer", extra={**ASKS, "listen": "127.0.0.1:0"})
    assert inspection.channel(decode.half).tcp_address is None


def test_what_a_decode_engine_shares_is_read_by_nobody_on_other_hosts(engine):
    far = {"mooncake": {"host": "127.0.0.1"}, "listen": "127.0.0.1:0", "share": True}
    for role, ways in {"kv_consumer": ["shm"], "kv_producer": ["shm", "mooncake"]}.items():
        endpoints = engine(role, extra=far).worker_half.handshake.endpoints
        assert [each.transport for each in endpoints] == ways


def test_a_key_file_open_to_others_stops_the_engine(engine, key_file):
    os.chmod(key_file, 0o644)
    with pytest.raises(ConfigError, match="chmod it to 600"):
        engine("kv_producer", extra={"listen": "127.0.0.1:0", "key_file": key_file})


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_key_file_without_a_name_is_not_taken_for_none(engine, role):
    with pytest.raises(ConfigError, match="omni-connector keygen"):
        engine(role, extra={"key_file": ""})


def test_a_port_that_is_taken_stops_the_engine(engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=listen):
            engine("kv_producer", extra={"listen": listen, "transport": "shm"})


def test_data_parallel_ranks_listen_at_ports_of_their_own(engine, tokens, key_file):
    port = free_ports(3)
    extra = {**SERVES, "listen": f"127.0.0.1:{port}", "key_file": key_file}
    ranks = [engine("kv_producer", extra=extra, data_parallel_index=n) for n in range(3)]
    decode = engine("kv_consumer", extra={**ASKS, "key_file": key_file}, prefix_caching=False)
    for number, prefill in enumerate(ranks):
        params = offered(prefill)
        assert params["remote_port"] == port + number
        assert decode.generate(PROMPT, 6, params=params).tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 3
    assert_clean(decode, *ranks)


def test_a_rank_whose_port_there_is_not_stops_the_engine(engine):
    extra = {"listen": "127.0.0.1:65535", "transport": "shm"}
    with pytest.raises(ConfigError, match="rank 1 would listen at port 65536"):
        engine("kv_producer", extra=extra, data_parallel_index=1)


def test_ranks_that_let_the_system_choose_add_nothing(engine):
    extra = {"listen": "127.0.0.1:0", "transport": "shm"}
    prefill = engine("kv_producer", extra=extra, data_parallel_index=7)
    assert offered(prefill)["remote_port"] > 1023
