# SPDX-License-Identifier: Apache-2.0
"""References that cannot be used: the prompt is computed, the engine goes on, the log says why."""

import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, assert_clean, prompt

pytestmark = pytest.mark.vllm

PROMPT = prompt(3 * BLOCK + 5)
NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "6f2c",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def without(key: str):
    return lambda answer: {k: v for k, v in answer.items() if k != key}


def having(**changes):
    return lambda answer: {**answer, **changes}


BAD = {
    "no token": (without("omni_token"), "malformed_params"),
    "no epoch": (without("omni_epoch"), "malformed_params"),
    "no version": (without("omni_version"), "malformed_params"),
    "no engine": (without("remote_engine_id"), "malformed_params"),
    "token of another type": (having(omni_token=7), "malformed_params"),
    "token null": (having(omni_token=None), "malformed_params"),
    "token too short": (having(omni_token="ab"), "malformed_params"),
    "token not hex": (having(omni_token="x" * 32), "malformed_params"),
    "token with a newline": (having(omni_token="a" * 31 + "\n"), "malformed_params"),
    "epoch a list": (having(omni_epoch=[1]), "malformed_params"),
    "engine a number": (having(remote_engine_id=5), "malformed_params"),
    "engine empty": (having(remote_engine_id=""), "malformed_params"),
    "flag a word": (having(do_remote_prefill="yes"), "malformed_params"),
    "flag a number": (having(do_remote_prefill=1), "malformed_params"),
    "version of tomorrow": (having(omni_version=2), "malformed_params"),
    "version a word": (having(omni_version="1"), "malformed_params"),
    "version huge": (having(omni_version=(1 << 64) - 1), "malformed_params"),
    "port out of range": (having(remote_port=1 << 20), "malformed_params"),
    "both flags, one ill": (having(do_remote_decode="no"), "malformed_params"),
    "a list": (lambda answer: [answer], "malformed_params"),
    "a word": (lambda answer: "do_remote_prefill", "malformed_params"),
    "a number": (lambda answer: 5, "malformed_params"),
    "of another connector": (lambda answer: NIXL, "foreign_params"),
    "an address": (
        having(remote_engine_id="far", remote_host="10.0.0.1", remote_port=5600),
        "disallowed_peer",
    ),
    "an address of all hosts": (having(remote_host="0.0.0.0", remote_port=9), "malformed_params"),
    "an address of several": (having(remote_host="a;b", remote_port=9), "malformed_params"),
    "a host only": (having(remote_host="localhost"), "malformed_params"),
    "unknown token": (having(omni_token="0" * 32), "unknown_token"),
    "unknown engine": (having(remote_engine_id="nobody"), "peer_unreachable"),
    "engine a path": (having(remote_engine_id="../../../tmp/x\0\n"), "peer_unreachable"),
    "another epoch": (having(omni_epoch="0" * 32), "other_epoch"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_reference_costs_one_line_and_one_count(engine, tokens, log, case):
    spoil, kind = BAD[case]
    prefill, decode = engine("kv_producer"), engine("kv_consumer", prefix_caching=False)
    good = prefill.generate(PROMPT, params=HANDOFF).params
    assert decode.generate(PROMPT, 6, params=spoil(good)).tokens == tokens(PROMPT, 6)
    assert decode.failures() == {kind: 1}
    assert len(log) == 1, log
    assert kind in log[0]
    assert "\n" not in log[0]
    assert decode.count("handoffs_received") == 0
    # The hand-off itself is unharmed.
    assert decode.generate(PROMPT, 6, params=good).tokens == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1
    assert len(log) == 1
    assert_clean(prefill, decode)


def test_the_reference_of_another_prompt_is_refused(engine, tokens, log):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    prompts = [prompt(3 * BLOCK + 5, seed) for seed in range(2)]
    answers = [prefill.generate(each, params=HANDOFF).params for each in prompts]
    for each, answer in zip(prompts, reversed(answers), strict=True):
        assert decode.generate(each, 6, params=answer).tokens == tokens(each, 6)
    assert decode.failures() == {"other_prompt": 2}
    assert len(log) == 2
    assert decode.count("blocks_loaded") == 0


@pytest.mark.parametrize("change", ["first token", "last but one", "one more", "one less"])
def test_a_prompt_that_differs_in_one_token_is_another_prompt(engine, tokens, change):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    other = {
        "last but one": [*PROMPT[:-2], PROMPT[-2] + 1, PROMPT[-1]],
        "first token": [PROMPT[0] + 1, *PROMPT[1:]],
        "one more": [*PROMPT, 5],
        "one less": PROMPT[:-1],
    }[change]
    assert decode.generate(other, 6, params=answer).tokens == tokens(other, 6)
    assert decode.failures() == {"other_prompt": 1}


def test_the_last_token_is_the_decode_engines_own(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    other = [*PROMPT[:-1], PROMPT[-1] + 1]
    assert decode.generate(other, 6, params=answer).tokens == tokens(other, 6)
    assert decode.count("tokens_loaded") == len(PROMPT) - 1


def test_a_used_reference_is_void(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", prefix_caching=False)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert_clean(prefill, decode)
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.failures() == {"unknown_token": 1}
    assert decode.count("handoffs_received") == 1


def test_a_reference_does_not_outlive_its_engine(engine, tokens, log):
    prefill, decode = engine("kv_producer", engine_id="p"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    prefill.shutdown()
    again = engine("kv_producer", engine_id="p")
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.failures() == {"other_epoch": 1}
    assert len(log) == 1
    fresh = prompt(40, seed=4)
    answer = again.generate(fresh, params=HANDOFF).params
    assert decode.generate(fresh, 6, params=answer).tokens == tokens(fresh, 6)
    assert decode.count("handoffs_received") == 1


@pytest.mark.parametrize("flag", ["true", 1, [True]])
def test_an_ill_typed_wish_for_a_handoff_is_served_without(engine, tokens, log, flag):
    prefill = engine("kv_producer")
    answer = prefill.generate(PROMPT, params={"do_remote_decode": flag})
    assert answer.tokens == tokens(PROMPT, 1)
    assert prefill.failures() == {"malformed_params": 1}
    assert len(log) == 1
    assert_clean(prefill)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("model", {"extra": {"model_id": "another"}}),
        ("integrity", {"extra": {"integrity": "generation"}}),
        ("block_size", {"block_size": 3 * BLOCK // 2}),
    ],
)
def test_an_incompatible_peer_is_refused_by_the_field_that_differs(
    engine, tokens, log, field, options
):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", **options)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    for _ in range(2):  # the second time it is known already
        assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.failures() == {"incompatible_peer": 2}
    assert prefill.failures() == {"refused_peer": 1}
    assert len(log) == 2
    assert all(field in line for line in log)


integers = st.integers(-(1 << 63), (1 << 64) - 1)  # vLLM itself refuses others
json_values = st.recursive(
    st.none() | st.booleans() | integers | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
keys = st.sampled_from([*NIXL, "omni_version", "omni_epoch", "omni_token", "omni_x"])
likely = {
    "do_remote_prefill": st.just(True),
    "do_remote_decode": st.booleans(),
    "remote_engine_id": st.sampled_from(["prefill", "decode", "nobody"]),
    "remote_host": st.none(),
    "remote_port": st.none(),
    "omni_version": st.just(1),
    "omni_epoch": st.text("0123456789abcdef", min_size=32, max_size=32),
    "omni_token": st.text("0123456789abcdef", min_size=32, max_size=32),
}


@st.composite
def references(draw: st.DrawFn):
    """Something that may stand in `kv_transfer_params`: mostly nearly right."""
    if draw(st.integers(0, 9)) == 0:
        return draw(json_values)
    changes = draw(st.dictionaries(keys | st.text(string.printable, max_size=9), json_values))
    kept = draw(st.sets(st.sampled_from(sorted(likely)), min_size=4))
    return {**{key: draw(likely[key]) for key in kept}, **changes}


@pytest.fixture
def pair(engine) -> tuple[InProcessEngine, InProcessEngine]:
    options = {"prefix_caching": False, "extra": {"load_timeout_s": 5.0}}
    return (
        engine("kv_both", engine_id="prefill", **options),
        engine("kv_both", engine_id="decode", **options),
    )


def test_no_reference_stops_an_engine_or_changes_its_tokens(pair, tokens):
    prefill, decode = pair
    good = prefill.generate(PROMPT, params=HANDOFF).params
    expected = tokens(PROMPT, 3)

    @settings(
        max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(references(), st.sets(st.sampled_from(["omni_epoch", "omni_token"])))
    def check(params, true):
        if isinstance(params, dict):
            params = {**params, **{key: good[key] for key in true}}
        assert decode.generate(PROMPT, 3, params=params).tokens == expected

    check()
    for each in pair:
        assert each.generate(PROMPT, 3).tokens == expected


def test_a_prompt_without_token_ids_loads_nothing(engine):
    """One of embeddings: no digest of tokens names it."""
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    request = decode.request(PROMPT, params=answer)
    request.prompt_token_ids = None
    decode.half.on_new_request(request)
    assert decode.failures() == {"prompt_embeds": 1}
    assert prefill.usage[2] == 0
