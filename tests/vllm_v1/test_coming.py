# SPDX-License-Identifier: Apache-2.0
"""What is coming in vLLM, each against a stand-in for it; in no release up to 0.33."""

import json
from types import SimpleNamespace

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from omni_connector.errors import ProtocolError, UnsupportedVersionError
from omni_connector.net.packets import PACKAGE, Refusal
from omni_connector.prefix.explain import (
    AskEngine,
    AskHashes,
    AskPlaces,
    Hashes,
    Places,
    ThisEngine,
)
from omni_connector.vllm_v1.connector import OmniKVConnector
from omni_connector.vllm_v1.control_calls import MAX_BYTES, AskStatus, ControlCalls, Status
from omni_connector.vllm_v1.vllm_names import misfits
from tests.toy import BLOCK

from .harness import prompt

pytestmark = pytest.mark.vllm

PROMPT = prompt(4 * BLOCK + 3)
SHARING = {"share": True}


# `on_rpc(bytes)` with POST /v1/kv_connector/rpc (pull request 51639)


def ask(connector, question, answer):
    """What comes back through vLLM, which carries bytes alone."""
    raw = connector.on_rpc(msgspec.msgpack.encode(question))
    assert type(raw) is bytes
    return msgspec.msgpack.decode(raw, type=answer)


def test_an_engine_tells_its_status_through_vllm(engine):
    each = engine("kv_both")
    each.generate(PROMPT, 1)
    each.count("")
    status = ask(each.scheduler.connector, AskStatus(), Status).status
    assert (status.engine_id, status.role) == (each.engine_id, "kv_both")
    assert status.prompt_tokens == len(PROMPT)
    said = json.loads(each.scheduler.connector.on_rpc(b'{"type": "ask-status"}'))
    assert said["type"] == "status"
    assert said["status"]["engine_id"] == each.engine_id


def test_an_engine_explains_a_prompt_through_vllm(engine):
    each = engine("kv_both", extra=SHARING)
    each.generate(PROMPT, 1)
    assert ask(each.scheduler.connector, AskEngine(), ThisEngine).engine_id == each.engine_id
    hashes = ask(each.scheduler.connector, AskHashes(None, list(PROMPT)), Hashes).hashes
    assert len(hashes) == 4
    places = ask(each.scheduler.connector, AskPlaces(0, hashes), Places)
    assert places.cached == (True,) * 4
    other = ask(each.scheduler.connector, AskHashes(None, list(PROMPT), "salt"), Hashes).hashes
    assert ask(each.scheduler.connector, AskPlaces(0, other), Places).cached == (False,) * 4


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "truncated"),
        (b"\xff" * 100, "Expected `object`"),
        (b'{"type": "format-disk"}', "Invalid value 'format-disk'"),
        (b'{"type": "ask-hashes", "after": 7, "tokens": [1]}', "Expected"),
        (b'{"type": "ask-status"', "truncated"),
        (b'{"type": "\xff"}', ""),
        (b"{" * 10_000, ""),
        (b"\x91" * 10_000, ""),
        (b" " * (MAX_BYTES + 1), f"{MAX_BYTES} at most"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(engine, payload, reason):
    each = engine("kv_both", extra=SHARING)
    raw = each.scheduler.connector.on_rpc(payload)
    as_json = payload[:1] == b"{"
    answer = (msgspec.json if as_json else msgspec.msgpack).decode(raw, type=Refusal)
    assert reason in answer.reason
    assert answer.package == PACKAGE


def test_an_engine_without_workers_refuses(engine):
    made = engine("kv_both")
    unbound = OmniKVConnector(made.config, KVConnectorRole.SCHEDULER, made.kv_config)
    answer = ask(unbound, AskStatus(), Refusal)
    assert answer.reason == "this engine answers nothing yet"
    unbound.shutdown()


class Question(msgspec.Struct, tag="question"):
    """One that another part has."""

    number: int


class Answer(msgspec.Struct, tag="answer"):
    number: int


def test_other_parts_register_messages_of_their_own():
    calls = ControlCalls()
    calls.register({AskStatus: lambda _: Answer(0)})
    calls.register({})
    calls.register({Question: lambda question: Answer(question.number + 1)})
    raw = calls.answer(msgspec.msgpack.encode(Question(6)))
    assert msgspec.msgpack.decode(raw, type=Answer) == Answer(7)
    with pytest.raises(ValueError, match="Question is answered already"):
        calls.register({Question: lambda question: Answer(0)})


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ProtocolError("there is no engine 7"), "there is no engine 7"), (KeyError(1), "failed")],
)
def test_an_answer_that_fails_is_a_refusal(error, reason):
    def fail(question):
        raise error

    calls = ControlCalls()
    calls.register({Question: fail})
    raw = calls.answer(msgspec.msgpack.encode(Question(6)))
    assert reason in msgspec.msgpack.decode(raw, type=Refusal).reason


# `KVConnectorSchedulerContext` in place of what vLLM binds today (53067)


class KVConnectorSchedulerContext(SimpleNamespace):
    """vLLM's, as far as its pull request tells."""


@pytest.fixture
def with_context(monkeypatch):
    """A vLLM that binds a context instead of its manager."""
    monkeypatch.delattr(KVConnectorBase_V1, "bind_kv_cache_manager")
    monkeypatch.setattr(
        KVConnectorBase_V1,
        "bind_scheduler_context",
        lambda self, scheduler_context: None,
        raising=False,
    )


@pytest.mark.usefixtures("with_context")
@pytest.mark.parametrize("name", ["kv_cache_manager", "_kv_cache_manager"])
def test_the_manager_is_taken_from_a_context(engine, name):
    assert misfits() == []
    made = engine("kv_both")
    connector = OmniKVConnector(made.config, KVConnectorRole.SCHEDULER, made.kv_config)
    manager = SimpleNamespace(reset_prefix_cache=lambda: True)
    connector.bind_scheduler_context(KVConnectorSchedulerContext(**{name: manager}))
    assert connector._manager is manager
    assert manager.reset_prefix_cache()
    connector.shutdown()


@pytest.mark.usefixtures("with_context")
def test_a_context_without_a_manager_is_refused_by_name(engine):
    made = engine("kv_both")
    connector = OmniKVConnector(made.config, KVConnectorRole.SCHEDULER, made.kv_config)
    with pytest.raises(UnsupportedVersionError, match="KVConnectorSchedulerContext, which has no"):
        connector.bind_scheduler_context(KVConnectorSchedulerContext(block_pool=None))
    connector.shutdown()


def test_a_vllm_that_binds_neither_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(KVConnectorBase_V1, "bind_kv_cache_manager")
    (problem,) = misfits()
    assert "bind_kv_cache_manager is missing" in problem
    assert "bind_scheduler_context is missing" in problem


# Lookahead hashes of drafters (50897)


def test_lookahead_hashes_stay_off_whatever_vllm_takes_for_granted(engine, monkeypatch):
    monkeypatch.setattr(
        KVConnectorBase_V1, "supports_eagle_prefix_cache_hashing", True, raising=False
    )
    assert engine("kv_both").scheduler.connector.supports_eagle_prefix_cache_hashing is False
