# SPDX-License-Identifier: Apache-2.0
"""A drafter with a KV cache on one side only: the answers are those of an engine that computes the
prompt itself, and the KV of the model is the prefill engine's, byte for byte."""

import pytest

from omni_connector.testing.reference import ROUNDING

from . import vllm_itself
from .harness import Pair
from .pool import Member, Pool
from .prompts import new_salt, random_prompt
from .test_speculative_drafters import LENGTHS, MAX_TOKENS, METHODS, Drafting

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(vllm_itself.DRAFTS), reason=vllm_itself.DRAFTS),
]


def by_method(where: str) -> pytest.MarkDecorator:
    """All drafters, one after the other; `where` says which side has one."""
    return pytest.mark.parametrize(
        "method",
        [
            pytest.param(name, marks=pytest.mark.supports(f"{word} on {where} alone", "Llama"))
            for name, (_, word) in METHODS.items()
        ],
        scope="module",  # the pool cannot hold the engines of all drafters
    )


@pytest.fixture
def engines(pool: Pool, method: str) -> tuple[Member, Member]:
    """One without a drafter, and one with. Both prefill and decode."""
    recipe, _ = METHODS[method]
    without, drafts = pool.take(("both", recipe, "a"), (method, recipe, "b"))
    following = list(METHODS)[list(METHODS).index(method) + 1 :]
    if following:
        recipe, _ = METHODS[following[0]]
        pool.begin(("both", recipe, "a"), (following[0], recipe, "b"))
    return without, drafts


@pytest.mark.shows(
    "a drafter on the decode side alone",
    control="test_a_model_that_drafts_and_has_lost_its_kv_is_noticed",
)
@by_method("the decode side")
def test_the_decode_engine_alone_drafts(engines: tuple[Member, Member]) -> None:
    pair = Pair.of(*engines)
    drafting = Drafting(pair)
    drafters = pair.decode_probe.call("draft_layers")[0]
    assert drafters
    received, failures = pair.received(), pair.failures()
    for number, length in enumerate(LENGTHS.values()):
        prompt = random_prompt(140 + number, length)
        own = drafting.count(prompt, new_salt())
        handed = drafting.hand_off(prompt)
        handed.answer.require_same(own.answer, tolerance=ROUNDING)
        pair.require_same_kv(prompt, zeroed=drafters)
        assert handed.drafted > 0
    assert pair.received() == received + len(LENGTHS)
    assert pair.failures() == failures
    pair.wait_until_idle()


@by_method("the decode side")
def test_a_model_that_drafts_and_has_lost_its_kv_is_noticed(
    engines: tuple[Member, Member],
) -> None:
    pair = Pair.of(*engines)
    drafting = Drafting(pair)
    prompt = random_prompt(160, 300)
    own = drafting.count(prompt, new_salt())
    pair.decode_probe.call("probe_loses", "everything")
    try:
        handed = drafting.hand_off(prompt)
    finally:
        pair.decode_probe.call("probe_loses", "nothing")
    with pytest.raises(AssertionError, match=r"token \d+"):
        handed.answer.require_same(own.answer, tolerance=ROUNDING)
    with pytest.raises(AssertionError, match="found"):
        pair.require_same_kv(prompt, zeroed=pair.decode_probe.call("draft_layers")[0])


@pytest.mark.shows(
    "a drafter on the prefill side alone",
    control="test_a_model_that_does_not_draft_and_has_lost_its_kv_is_noticed",
)
@by_method("the prefill side")
def test_the_prefill_engine_alone_drafts(engines: tuple[Member, Member]) -> None:
    pair = Pair.of(*reversed(engines))
    received, failures = pair.received(), pair.failures()
    for number, length in enumerate(LENGTHS.values()):
        prompt = random_prompt(180 + number, length)
        own = pair.decode(prompt, new_salt(), max_tokens=MAX_TOKENS)
        params = pair.prefill(prompt, salt := new_salt())
        pair.decode_probe.spoil()
        handed = pair.decode(prompt, salt, params, max_tokens=MAX_TOKENS)
        handed.require_same(own, tolerance=ROUNDING)
        pair.require_same_kv(prompt)
    assert pair.received() == received + len(LENGTHS)
    assert pair.failures() == failures
    pair.wait_until_idle()


@by_method("the prefill side")
def test_a_model_that_does_not_draft_and_has_lost_its_kv_is_noticed(
    engines: tuple[Member, Member],
) -> None:
    pair = Pair.of(*reversed(engines))
    prompt = random_prompt(200, 300)
    own = pair.decode(prompt, new_salt(), max_tokens=MAX_TOKENS)
    params = pair.prefill(prompt, salt := new_salt())
    pair.decode_probe.call("probe_loses", "everything")
    try:
        handed = pair.decode(prompt, salt, params, max_tokens=MAX_TOKENS)
    finally:
        pair.decode_probe.call("probe_loses", "nothing")
    with pytest.raises(AssertionError, match=r"token \d+"):
        handed.require_same(own, tolerance=ROUNDING)
    with pytest.raises(AssertionError, match="found"):
        pair.require_same_kv(prompt)
