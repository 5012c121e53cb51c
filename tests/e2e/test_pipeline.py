# SPDX-License-Identifier: Apache-2.0
"""Engines of two pipeline stages and of one: what a stage computes, the other engine reads."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from omni_connector.testing import reference

from . import kv
from .configurations import BLOCK
from .harness import WAIT_S, Case, Pair, ask, counted, publish
from .pool import Member, Pool
from .prompts import new_salt, random_prompt

pytestmark = pytest.mark.e2e

KV_HEADS = 2  # of the model
NAMES = ("within-a-block", "one-block-and-a-token", "not-aligned", "two-thousand-not-aligned")


@dataclass
class Stages:
    """Two engines alike, each of two stages."""

    first: Member
    second: Member

    @property
    def pair(self) -> Pair:
        """Hand-offs from the first to the second."""
        return Pair.of(self.first, self.second)

    def count(self, member: Member, counter: str) -> float:
        """What an engine has counted."""
        return counted(member.engine, counter)

    def share(self, prompt: list[int]) -> reference.Answer:
        """Have the first compute a prompt and keep its full blocks, and the second answer it."""
        salt = new_salt()
        # Each stage has saved its part of each block.
        publish(self.first.engine, prompt, salt, "blocks_saved", 2 * (len(prompt) // BLOCK))
        self.second.probe.spoil()
        return ask(self.second.engine, prompt, salt)


@pytest.fixture(scope="module")
def stages(engine_pool: Pool) -> Iterator[Stages]:
    engines = [engine_pool.new("two-stages") for _ in range(2)]
    try:
        for engine in engines:
            engine.start()
        stages = Stages(*(engine_pool.adopt(engine) for engine in engines))
        prompt, deadline = random_prompt(11, 2 * BLOCK + 1), time.monotonic() + WAIT_S
        while not stages.count(stages.second, "tokens_from_host"):  # until they have met
            assert time.monotonic() < deadline, stages.second.engine.log_tail()
            stages.share(prompt)
        yield stages
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.shows(
    "pipeline stages on both sides: hand-offs",
    control="e2e/test_negative_control.py::test_a_connector_that_moves_nothing_is_noticed",
)
@pytest.mark.supports("PP 2 to PP 2", "Llama")
@pytest.mark.parametrize("name", NAMES)
def test_answer_is_the_reference_and_kv_the_senders(
    stages: Stages, cases: dict[str, Case], name: str
) -> None:
    case, pair = cases[name], stages.pair
    received, failures = pair.received(), pair.failures()
    loaded = stages.count(stages.second, "tokens_loaded")
    case.check(pair.hand_off(case.prompt))
    pair.require_same_kv(case.prompt)
    assert pair.received() == received + 1
    assert stages.count(stages.second, "tokens_loaded") == loaded + len(case.prompt) - 1
    assert pair.failures() == failures


def test_stages_are_not_alike(stages: Stages, cases: dict[str, Case]) -> None:
    """So that the comparison of KV above would tell one from the other."""
    stages.pair.hand_off(cases["not-aligned"].prompt)
    sent = stages.first.probe.read("prefilled")
    assert len(sent) == 2
    assert not set(sent[0].layers(0)) & set(sent[1].layers(0))
    with pytest.raises(StopIteration):
        kv.require_same_kv(sent, sent[::-1], 100)


@pytest.mark.shows(
    "pipeline stages on both sides: shared prefixes",
    control="test_a_stage_that_is_delivered_nothing_is_noticed",
)
@pytest.mark.supports("prefixes shared by engines of PP 2", "Llama")
def test_a_prefix_is_found_in_the_arenas_of_another_engine(
    stages: Stages, cases: dict[str, Case]
) -> None:
    case, failures = cases["two-thousand-not-aligned"], stages.pair.failures()
    before = stages.count(stages.second, "tokens_from_host")
    case.check(stages.share(case.prompt))
    found = stages.count(stages.second, "tokens_from_host") - before
    assert found == len(case.prompt) // BLOCK * BLOCK
    sent, read = (
        stages.first.probe.read("prefilled"),
        stages.second.probe.read("first"),
    )
    assert [each.computed for each in read] == [found] * 2
    kv.require_same_kv(sent, read, int(found))
    assert stages.pair.failures() == failures


@pytest.mark.parametrize("stage", ["0", "1"])
def test_a_stage_that_is_delivered_nothing_is_noticed(
    stages: Stages, cases: dict[str, Case], stage: str
) -> None:
    case = cases["two-thousand-not-aligned"]
    stages.second.probe.call("host_delivers", "nothing", stage)
    try:
        answer = stages.share(case.prompt)
    finally:
        stages.second.probe.call("host_delivers", "all")
    with pytest.raises(AssertionError, match=r"token \d+"):
        case.check(answer)


@pytest.mark.shows(
    "pipeline stages on one side: hand-offs",
    control="e2e/test_negative_control.py::test_a_connector_that_moves_nothing_is_noticed",
)
@pytest.mark.parametrize(
    "to_one",
    [
        pytest.param(True, marks=pytest.mark.supports("PP 2 to PP 1", "Llama"), id="2 to 1"),
        pytest.param(False, marks=pytest.mark.supports("PP 1 to PP 2", "Llama"), id="1 to 2"),
    ],
)
def test_engines_with_other_stages_read_each_other_by_layer(
    stages: Stages, pool: Pool, cases: dict[str, Case], *, to_one: bool
) -> None:
    [one] = pool.take(("both", "llama", "a"))
    sender, receiver = (stages.first, one) if to_one else (one, stages.second)
    pair = Pair.of(sender, receiver)
    received, failures = pair.received(), pair.failures()
    for number, name in enumerate(NAMES, 1):
        case = cases[name]
        case.check(pair.hand_off(case.prompt))
        pair.require_same_kv(case.prompt, other_stages=True)
        assert pair.received() == received + number
    assert pair.failures() == failures


@pytest.mark.supports("PP 2 with TP 2 to PP 1, and back", "Llama")
def test_stages_of_two_ranks_and_one_engine_of_one_rank_read_each_other(
    engine_pool: Pool, pool: Pool, cases: dict[str, Case]
) -> None:
    [one] = pool.take(("both", "llama", "a"))
    with engine_pool.new("two-stages-of-two-ranks") as engine:
        four = engine_pool.adopt(engine)
        for pair in (Pair.of(four, one), Pair.of(one, four)):
            received, failures = pair.received(), pair.failures()
            for number, name in enumerate(NAMES, 1):
                prompt = cases[name].prompt
                own = pair.decode(prompt, new_salt())
                pair.hand_off(prompt).require_same(own, tolerance=reference.ROUNDING)
                pair.require_same_kv(prompt, kv_heads=KV_HEADS, other_stages=True)
                assert pair.received() == received + number
            assert pair.failures() == failures
