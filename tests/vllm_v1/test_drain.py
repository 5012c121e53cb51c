# SPDX-License-Identifier: Apache-2.0
"""Engines that drain, leave, or have another role: nothing that they hold is lost."""

import signal

import pytest

from omni_connector.handoff import receiver
from omni_connector.net import status
from omni_connector.net.orders import DRAIN, ROLE, give_order, take_back
from omni_connector.net.runtime import of_kernel
from omni_connector.net.status import EngineStatus
from omni_connector.vllm_v1 import patches
from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, count_computed, prompt, wait

pytestmark = pytest.mark.vllm

PROMPT = prompt(5 * BLOCK + 3)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "WRITE_S", 0.0)


class Operator:
    """Gives orders to the engines of a runtime folder, and waits until they are obeyed."""

    def __init__(self, runtime):
        self._runtime = runtime

    def _found(self, name):
        found, _ = status.read_each(of_kernel(self._runtime / "default"))
        return next(((p, s) for p, s in found.items() if s.engine_id == name), None)

    def told(self, name) -> EngineStatus:
        return self._found(name)[1]

    def drain(self, name) -> None:
        wait(lambda: self._found(name))
        give_order(self._found(name)[0], DRAIN)
        wait(lambda: self.told(name).service.phase != "serving")

    def undo(self, name) -> None:
        take_back(self._found(name)[0], DRAIN)
        wait(lambda: self.told(name).service.phase == "serving")

    def role(self, name, role) -> None:
        wait(lambda: self._found(name))
        give_order(self._found(name)[0], ROLE, role)
        wait(lambda: self.told(name).service.role == role)


@pytest.fixture
def operator(runtime) -> Operator:
    return Operator(runtime)


@pytest.mark.parametrize("family", ["full", "window", "all three"])
def test_a_draining_engine_answers_what_it_holds_and_offers_nothing_new(
    engine, operator, tokens, log, family
):
    prefill = engine("kv_producer", engine_id="prefill", family=family)
    decode = engine("kv_consumer", engine_id="decode", family=family)
    reference = engine(None, family=family).generate(PROMPT, 6).tokens
    held = prefill.generate(PROMPT, params=HANDOFF).params
    operator.drain("prefill")
    assert operator.told("prefill").service.phase == "draining"
    other = prompt(5 * BLOCK, 7)
    refused = prefill.generate(other, params=HANDOFF)
    assert refused.params["omni_no_handoff"] == "draining"
    assert refused.params["do_remote_prefill"] is False
    assert len(refused.tokens) == 1
    assert prefill.failures() == {"draining": 1}
    assert log == []
    # The router's next choice: the decode engine computes the prompt.
    assert decode.generate(PROMPT, 6, params=held).tokens == reference
    assert decode.count("handoffs_received") == 1
    wait(lambda: operator.told("prefill").service.phase == "drained")
    assert operator.told("prefill").usage.handoffs_open == 0
    assert_clean(prefill, decode)


def test_a_prefill_that_is_refused_is_not_computed(engine, operator):
    prefill = engine("kv_producer", engine_id="prefill")
    operator.drain("prefill")
    request_id = prefill.submit(PROMPT, params=HANDOFF)
    computed = count_computed(prefill)
    prefill.run(lambda: prefill.done(request_id))
    assert sum(computed) == 1
    assert prefill.answers[request_id].params["omni_no_handoff"] == "draining"


@pytest.mark.parametrize(
    "options", [{"max_tokens": 2}, {"prompt_logprobs": 1}], ids=["answers", "prompt_logprobs"]
)
def test_who_wants_more_than_a_hand_off_is_computed(engine, operator, tokens, options):
    prefill = engine("kv_producer", engine_id="prefill")
    operator.drain("prefill")
    answer = prefill.generate(PROMPT, params=HANDOFF, **options)
    assert answer.tokens == tokens(PROMPT, len(answer.tokens))
    assert answer.params["omni_no_handoff"] == "draining"


def test_beside_other_connectors_no_prompt_is_cut(engine, operator, tokens):
    prefill = engine("kv_both", connector="MultiConnector", engine_id="prefill")
    operator.drain("prefill")
    answer = prefill.generate(PROMPT, params=HANDOFF)
    assert answer.tokens == tokens(PROMPT, 1)
    assert answer.params["omni_no_handoff"] == "draining"


def test_a_drain_is_taken_back(engine, operator):
    both = engine("kv_both", engine_id="both")
    operator.drain("both")
    wait(lambda: operator.told("both").service.phase == "drained")
    operator.undo("both")
    assert both.generate(PROMPT, params=HANDOFF).params["do_remote_prefill"] is True


def test_a_decode_role_offers_nothing_and_a_prefill_role_fetches_nothing(engine, operator, tokens):
    one, two = engine("kv_both", engine_id="one"), engine("kv_both", engine_id="two")
    operator.role("one", "decode")
    assert one.generate(PROMPT, params=HANDOFF).params["omni_no_handoff"] == "decode_role"
    answer = two.generate(PROMPT, params=HANDOFF).params
    assert one.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert one.count("handoffs_received") == 1
    operator.role("one", "prefill")
    other = prompt(6 * BLOCK, 3)
    answer = two.generate(other, params=HANDOFF).params
    assert one.generate(other, 6, params=answer).tokens == tokens(other, 6)
    assert one.failures() == {"decode_role": 1, "prefill_role": 1}
    assert one.count("handoffs_received") == 1
    wait(lambda: not two.handoffs)  # it was told that nobody comes
    answer = one.generate(prompt(7 * BLOCK, 4), params=HANDOFF).params
    assert answer["do_remote_prefill"] is True
    operator.role("one", "both")
    assert two.generate(prompt(7 * BLOCK, 4), 3, params=answer).tokens
    assert two.count("handoffs_received") == 1
    assert_clean(one, two)


def test_the_decode_engines_log_says_why_it_computes_a_prompt(
    engine, operator, tokens, monkeypatch
):
    said = []
    warn = lambda text, *arguments: said.append(text % arguments)  # noqa: E731
    monkeypatch.setattr(receiver.logger, "warning", warn)
    prefill, decode = engine("kv_both", engine_id="prefill"), engine("kv_both", engine_id="decode")
    operator.drain("prefill")
    wait(lambda: operator.told("prefill").service.phase == "drained")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert len(said) == 1
    assert said[0].endswith("the prefill engine hands nothing off (it drains)")
    operator.undo("prefill")
    operator.role("prefill", "decode")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    decode.generate(PROMPT, params=answer)
    assert said[1].endswith("(its role is decode)")
    operator.role("prefill", "both")
    operator.role("decode", "prefill")
    answer = prefill.generate(prompt(6 * BLOCK, 3), params=HANDOFF).params
    decode.generate(prompt(6 * BLOCK, 3), params=answer)
    assert said[2].endswith("(prefill_role: the role of this engine is prefill)")
    answer["do_remote_prefill"], answer["omni_no_handoff"] = False, "forged\nline"
    decode.generate(PROMPT, params=answer)
    assert len(said) == 3


def test_an_order_that_cannot_be_obeyed_is_counted_and_named(engine, operator, log):
    one = engine("kv_producer", engine_id="one")
    wait(lambda: operator._found("one"))
    give_order(operator._found("one")[0], ROLE, "decode")
    wait(lambda: log)
    assert "its configuration allows prefill" in log[0]
    one.generate(PROMPT)
    assert one.failures() == {"bad_order": 1}
    assert one.generate(PROMPT, params=HANDOFF).params["do_remote_prefill"] is True
    assert len(log) == 1


def test_gauges_tell_role_and_drain(engine, operator):
    one = engine("kv_both", engine_id="one")

    def gauges():
        one.generate(prompt(BLOCK))
        gauges = one.stats.data["gauges"]
        return [gauges[n] for n in ("draining", "offers_handoffs", "fetches_handoffs")]

    assert gauges() == [0, 1, 1]
    operator.role("one", "decode")
    assert gauges() == [0, 0, 1]
    operator.drain("one")
    assert gauges() == [1, 0, 1]
    operator.role("one", "prefill")
    assert gauges() == [1, 0, 0]


def test_an_idle_engine_does_not_step_unless_it_is_shut_down(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    assert not prefill.scheduler.has_requests()
    prefill.half.leave(60.0)
    assert prefill.scheduler.has_requests()  # vLLM steps, and does not end
    prefill.step()
    assert prefill.scheduler.has_requests()
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    wait(lambda: not prefill.scheduler.has_requests())
    assert_clean(prefill, decode)


def test_without_a_time_out_a_shutdown_waits_for_nobody(engine):
    prefill = engine("kv_producer")
    prefill.generate(PROMPT, params=HANDOFF)
    prefill.half.leave(0.0)
    assert not prefill.scheduler.has_requests()


def test_only_the_signals_of_an_engine_core_are_noticed():
    called = []

    def theirs(signum, frame):
        called.append("theirs")

    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, theirs)
        assert not patches.notice_shutdown(lambda: called.append("ours"))
        assert signal.getsignal(signal.SIGTERM) is theirs
        theirs.__module__ = "vllm.v1.engine.core"
        assert patches.notice_shutdown(lambda: called.append("ours"))
        signal.raise_signal(signal.SIGTERM)
        assert called == ["ours", "theirs"]
    finally:
        signal.signal(signal.SIGTERM, before)
