# SPDX-License-Identifier: Apache-2.0
"""Sessions of streamed input on a decode engine: the first prompt comes by a hand-off, and the
session goes on from there with prompts that vLLM computes."""

import itertools

import pytest

from tests.toy import BLOCK, FAMILIES

from .harness import HANDOFF, Answer, assert_clean, prompt

pytestmark = pytest.mark.vllm

TOKENS = 3  # of each answer
FIRST = prompt(2 * BLOCK + 5)
LATER = ([7, 8, 9], prompt(BLOCK, seed=3), [11])

of_all = pytest.mark.parametrize("family", FAMILIES)
_numbers = itertools.count()


def converse(engine, params=None):
    """What an engine answers to all prompts of a session; nothing of it is left."""
    session = f"session-{next(_numbers)}"
    answer = engine.answers[session] = Answer()
    for number, part in enumerate((FIRST, *LATER), 1):
        given = params if number == 1 else None
        request = engine.request(
            part, max_tokens=TOKENS, params=given, request_id=session, resumable=True
        )
        engine.scheduler.add_request(request)
        engine.run(lambda number=number: len(answer.tokens) == number * TOKENS)
    engine.scheduler.add_request(engine.request([0], request_id=session))  # the client ends it
    engine.settle()
    return answer.tokens


@pytest.mark.shows(
    "sessions of streamed input on the decode side",
    control="test_a_connector_that_moves_nothing_is_noticed",
)
@of_all
def test_a_session_goes_on_from_a_hand_off(engine, family):
    prefill = engine("kv_producer", family=family)
    decode = engine("kv_consumer", family=family)
    right = converse(engine(None, family=family))
    params = prefill.generate(FIRST, 1, HANDOFF).params
    assert converse(decode, params) == right
    assert decode.count("handoffs_received") == 1
    assert not decode.failures()
    assert_clean(prefill, decode)


@of_all
def test_a_connector_that_moves_nothing_is_noticed(engine, family):
    options = {"family": family, "connector": "NoOpConnector"}
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer", **options)
    params = prefill.generate(FIRST, 1, HANDOFF).params
    assert converse(decode, params) != converse(engine(None, family=family))


def test_a_session_is_not_handed_off_and_the_log_says_so(engine, log):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    request = prefill.request(FIRST, params=HANDOFF, request_id="session", resumable=True)
    prefill.answers["session"] = Answer()
    prefill.scheduler.add_request(request)
    prefill.run(lambda: bool(prefill.answers["session"].tokens))
    prefill.scheduler.add_request(prefill.request([0], request_id="session"))
    prefill.settle()
    assert prefill.failures() == {"resumable": 1}
    assert any("session is not handed off (resumable)" in line for line in log)
    assert converse(decode) == converse(engine(None))
