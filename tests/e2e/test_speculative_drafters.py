# SPDX-License-Identifier: Apache-2.0
"""Drafters with a KV cache of their own, the same on both sides: hand-offs, and shared prefixes.

A drafter that lacks its KV changes no answer: fewer of its drafts are accepted. So drafts are
counted, and compared with those of an engine that computes the prompt itself. Each test has a
control in which what was loaded is spoiled, of the drafter alone or of all layers.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from omni_connector.testing.reference import ROUNDING, Answer

from . import vllm_itself
from .configurations import BLOCK, DRAFTS
from .harness import WAIT_S, Pair, publish
from .pool import Pool
from .prompts import new_salt, random_prompt

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(vllm_itself.DRAFTS), reason=vllm_itself.DRAFTS),
]

METHODS = {
    "eagle": ("llama-drafted", "EAGLE"),
    "eagle3": ("llama-drafted", "EAGLE-3"),
    "draft_model": ("llama-drafted", "a draft model"),
    "mtp": ("mimo", "MTP"),
}
LENGTHS = {
    "within-a-block": 57,
    "one-block": BLOCK,
    "one-block-and-a-token": BLOCK + 1,
    "in-chunks": 1100,
}
MAX_TOKENS = 24

by_method = pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=pytest.mark.supports(f"speculative decoding by {word}", "Llama"))
        for name, (_, word) in METHODS.items()
    ],
    indirect=True,
)


@dataclass(frozen=True)
class Drafted:
    """An answer, and what was drafted of it."""

    answer: Answer
    drafted: float
    accepted: float


@dataclass
class Drafting:
    """Two engines with the same drafter."""

    pair: Pair

    def count(self, prompt: list[int], salt: str, params: object = None) -> Drafted:
        """What the decode engine answers, and drafts."""
        before = self._counts()
        answer = self.pair.decode(prompt, salt, params, max_tokens=MAX_TOKENS)
        drafted, accepted = (now - then for now, then in zip(self._counts(), before, strict=True))
        return Drafted(answer, drafted, accepted)

    def _counts(self) -> tuple[float, float]:
        engine = self.pair.decode_engine
        drafted = engine.metric("vllm:spec_decode_num_draft_tokens_total")
        return drafted, engine.metric("vllm:spec_decode_num_accepted_tokens_total")

    def hand_off(self, prompt: list[int]) -> Drafted:
        """Prefill, then decode into blocks that hold nobody's bytes."""
        params = self.pair.prefill(prompt, salt := new_salt())
        self.pair.decode_probe.spoil()
        return self.count(prompt, salt, params)

    def share(self, prompt: list[int], salt: str) -> Drafted:
        """Ask for a prompt whose blocks the prefill engine has in its arena."""
        self.pair.decode_probe.spoil()
        return self.count(prompt, salt)

    def publish(self, prompt: list[int], salt: str) -> None:
        """Have the prefill engine compute a prompt, and wait until its blocks are in its arena."""
        blocks = (len(prompt) - 1) // BLOCK
        publish(self.pair.prefill_engine, prompt, salt, "blocks_saved", blocks, max_tokens=1)

    def meet(self, prompt: list[int]) -> None:
        """Wait until the engines have met."""
        deadline = time.monotonic() + WAIT_S
        while not self.from_host():
            assert time.monotonic() < deadline, self.pair.decode_engine.log_tail()
            self.pair.decode(prompt, new_salt(), max_tokens=1)
            self.publish(prompt, salt := new_salt())
            self.pair.decode(prompt, salt, max_tokens=1)

    def from_host(self) -> float:
        """Tokens that the decode engine has found in the other's arena."""
        return self.pair.count(self.pair.decode_engine, "tokens_from_host")


@pytest.fixture(scope="module")
def method(request: pytest.FixtureRequest) -> str:
    """Its scope has all tests of one drafter run before those of the next: the pool cannot hold the
    engines of all drafters."""
    name: str = request.param
    return name


@pytest.fixture
def drafting(pool: Pool, method: str) -> Iterator[Drafting]:
    recipe, _ = METHODS[method]
    prefill, decode = pool.take((method, recipe, "a"), (method, recipe, "b"))
    following = list(METHODS)[list(METHODS).index(method) + 1 :]
    if following:
        recipe, _ = METHODS[following[0]]
        pool.begin((following[0], recipe, "a"), (following[0], recipe, "b"))
    try:
        yield Drafting(Pair.of(prefill, decode))
    finally:
        decode.probe.call("probe_loses", "nothing")


@pytest.mark.shows(
    "the same drafter on both sides (EAGLE, EAGLE-3, MTP, a draft model): hand-offs",
    control="test_a_drafter_that_has_lost_its_kv_is_noticed",
)
@by_method
def test_the_drafter_goes_on_as_if_it_had_computed_the_prompt(drafting: Drafting) -> None:
    received = drafting.pair.received()
    for number, length in enumerate(LENGTHS.values()):
        prompt = random_prompt(40 + number, length)
        own = drafting.count(prompt, new_salt())
        handed = drafting.hand_off(prompt)
        handed.answer.require_same(own.answer, tolerance=ROUNDING)
        drafting.pair.require_same_kv(prompt)
        assert handed.accepted == own.accepted
        # vLLM has none for its first step after a load, and takes so many wrong ones.
        assert handed.drafted == own.drafted + DRAFTS
    assert drafting.pair.received() == received + len(LENGTHS)
    drafting.pair.wait_until_idle()


@by_method
def test_a_drafter_that_has_lost_its_kv_is_noticed(drafting: Drafting) -> None:
    own: list[Drafted] = []
    handed: list[Drafted] = []
    drafting.pair.decode_probe.call("probe_loses", "drafter")
    for number, length in enumerate((300, 500)):
        prompt = random_prompt(50 + number, length)
        own.append(drafting.count(prompt, new_salt()))
        handed.append(drafting.hand_off(prompt))
        handed[-1].answer.require_same(own[-1].answer, tolerance=ROUNDING)
    assert sum(each.accepted for each in handed) < sum(each.accepted for each in own)


@by_method
def test_a_model_that_has_lost_its_kv_is_noticed(drafting: Drafting) -> None:
    prompt = random_prompt(60, 300)
    own = drafting.count(prompt, new_salt())
    drafting.pair.decode_probe.call("probe_loses", "everything")
    handed = drafting.hand_off(prompt)
    with pytest.raises(AssertionError, match=r"token \d+"):
        handed.answer.require_same(own.answer, tolerance=ROUNDING)


@pytest.mark.shows(
    "the same drafter on both sides: shared prefixes",
    control="test_a_prefix_that_is_shared_without_the_kv_of_the_drafter_is_noticed",
)
@by_method
def test_a_prefix_is_shared_with_the_kv_of_the_drafter(drafting: Drafting, method: str) -> None:
    shared = random_prompt(70, 4 * BLOCK)
    first, salt = [*shared, *random_prompt(71, 30)], new_salt()
    drafting.publish(first, salt)
    drafting.meet(first)
    # Of the last block the drafter's KV depends on the token after it, which differs here: EAGLE
    # and MTP compute it anew, and a draft model does not need to.
    other = [*shared, (first[4 * BLOCK] + 1) % 500 + 3, *random_prompt(72, 40)]
    for prompt, blocks in ((first, 4), (other, 4 if method == "draft_model" else 3)):
        own = drafting.count(prompt, new_salt())
        before = drafting.from_host()
        found = drafting.share(prompt, salt)
        assert drafting.from_host() == before + blocks * BLOCK
        found.answer.require_same(own.answer, tolerance=ROUNDING)
        assert found.accepted == own.accepted
        drafting.publish(first, salt := new_salt())


@by_method
def test_a_prefix_that_is_shared_without_the_kv_of_the_drafter_is_noticed(
    drafting: Drafting,
) -> None:
    prompts = [random_prompt(80 + number, 4 * BLOCK + 30) for number in range(2)]
    drafting.publish(prompts[0], new_salt())
    drafting.meet(prompts[0])
    drafting.pair.decode_probe.call("probe_loses", "drafter")
    own: list[Drafted] = []
    found: list[Drafted] = []
    for prompt in prompts:
        drafting.publish(prompt, salt := new_salt())
        own.append(drafting.count(prompt, new_salt()))
        before = drafting.from_host()
        found.append(drafting.share(prompt, salt))
        assert drafting.from_host() == before + 4 * BLOCK
        found[-1].answer.require_same(own[-1].answer, tolerance=ROUNDING)
    assert sum(each.accepted for each in found) < sum(each.accepted for each in own)
