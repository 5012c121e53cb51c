# SPDX-License-Identifier: Apache-2.0
"""The next turn of a conversation goes on, at another engine, within the block in which the last
turn has ended.

An engine that reads the end of a request computes from there on what the engine would have computed
that goes on with the request itself. So the two agree bit for bit.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from omni_connector.testing.engines import EngineError
from omni_connector.testing.reference import Answer, same_path

from . import kv
from .families import BY_RECIPE, Family
from .harness import WAIT_S, ask, counted, publish
from .pool import Member, Pool
from .prompts import MAX_TOKENS, new_salt, random_prompt

pytestmark = pytest.mark.e2e

# Tokens of the first turn's answer.
TURN = 9
LENGTHS = ("within-a-block", "one-block-and-a-part", "two-blocks-and-a-part")


@dataclass
class Talk:
    """Engines of one family, of which one computes a turn, and another one the next.

    Attributes:
        alone: answers what is right, without a connector.
    """

    family: Family
    writing: Member
    reading: Member
    alone: Member

    @property
    def prompts(self) -> dict[str, list[int]]:
        """Prompts that end within a block, far enough from its beginning to be kept."""
        block = self.reading.block
        lengths = zip(LENGTHS, (0, block, 2 * block), strict=True)
        return {
            name: random_prompt(seed, full + block // 2 + 5)
            for seed, (name, full) in enumerate(lengths, 60)
        }

    def count(self, counter: str) -> float:
        """What the reader has counted."""
        return counted(self.reading.engine, counter)

    def publish(self, prompt: list[int], salt: str, max_tokens: int = 1) -> Answer:
        """Have the writer compute a turn, and wait until its end is kept, and that of its prompt
        where more was computed."""
        writer, ends = self.writing.engine, 1 + (max_tokens > 1)
        return publish(writer, prompt, salt, "tails_kept", ends, max_tokens=max_tokens)

    def meet(self) -> None:
        """Wait until the engines have met."""
        prompt = random_prompt(11, self.reading.block + self.reading.block // 2)
        deadline = time.monotonic() + WAIT_S
        while not self.count("tokens_from_host"):
            assert time.monotonic() < deadline, self.reading.engine.log_tail()
            salt = new_salt()
            self.publish(prompt, salt)
            ask(self.reading.engine, [*prompt, 5], salt)

    def go_on(self, turn: list[int], salt: str, token: int) -> Answer:
        """What the reader answers to a turn and one token more; its blocks hold nobody's bytes."""
        self.reading.probe.spoil()
        return ask(self.reading.engine, [*turn, token], salt)

    def right(self, turn: list[int], token: int) -> Answer:
        """What every engine answers that computes the turn first, and then the token.

        With a prefix of its own cache an engine may round otherwise, and it has computed the turn
        for other tests.
        """
        with self.alone.engine.client() as client:
            return same_path(client, [*turn, token], max_tokens=MAX_TOKENS, cache_salt=new_salt())


@pytest.fixture
def relay(engine_pool: Pool) -> Iterator[Talk]:
    """Engines that have nothing in common but a folder: the one that computes a turn has no arena
    for prefixes, so that its tails are in the folder alone."""
    family = BY_RECIPE["qwen3_next"]
    [alone] = engine_pool.take(("reference", family.recipe, ""))
    folder = {"path": str(engine_pool.folder / "turns"), "gib": 1, "lookup_timeout_s": 30}
    engines = [
        engine_pool.new("store", family.recipe, connector={"store": folder, "share": share})
        for share in (False, True)
    ]
    try:
        for engine in engines:
            engine.start()
        yield Talk(family, *map(engine_pool.adopt, engines), alone)
    finally:
        for engine in engines:
            engine.stop()


def latest(requests: list[list[kv.Held]], prompt: list[int]) -> list[kv.Held]:
    """Of the requests with this prompt the latest one, by rank."""
    return [each for each in requests if each[0].prompt == prompt][-1]


@pytest.fixture(
    scope="module",
    params=[BY_RECIPE["qwen3_next"], BY_RECIPE["lfm2"]],
    ids=lambda family: family.recipe,
)
def family(request: pytest.FixtureRequest) -> Family:
    """Families with recurrent states."""
    chosen: Family = request.param
    return chosen


@pytest.fixture
def talk(family: Family, pool: Pool) -> Talk:
    members = pool.take(
        *(("share", family.recipe, name) for name in ("writes", "reads")),
        ("reference", family.recipe, ""),
    )
    talk = Talk(family, *members)
    talk.meet()
    return talk


def check_goes_on(talk: Talk, prompt: list[int], answered: int) -> None:
    """All tokens of a prompt are loaded where it goes on with another token than its answer, the
    very bytes of the engine that has computed them."""
    salt = new_salt()
    counters = ("tokens_from_host", "tokens_from_tails", "failures")
    before = [talk.count(counter) for counter in counters]
    token = talk.publish(prompt, salt, answered).tokens[0] % 400 + 11
    sent = talk.writing.probe.read_all("prefilled")
    answer = talk.go_on(prompt, salt, token)
    found = talk.reading.probe.read("first")
    assert found[0].computed == len(prompt)
    kv.require_same_kv(latest(sent, prompt), found, len(prompt), answered=answered > 1)
    answer.require_same(talk.right(prompt, token), tolerance=talk.family.exactness)
    grown = [talk.count(counter) - count for counter, count in zip(counters, before, strict=True)]
    assert grown == [len(prompt), len(prompt) % talk.reading.block, 0]


@pytest.mark.shows(
    "hits within a block with a recurrent state",
    control="test_ends_that_are_not_delivered_are_noticed",
)
@pytest.mark.supports("the next turn goes on within a block")
@pytest.mark.parametrize("name", LENGTHS)
def test_a_prompt_goes_on_where_another_has_ended(talk: Talk, name: str) -> None:
    check_goes_on(talk, talk.prompts[name], answered=1)


@pytest.mark.supports("the next turn goes on behind the prompt, whatever was answered")
@pytest.mark.parametrize("name", LENGTHS[:2])
def test_a_prompt_goes_on_where_another_was_answered(talk: Talk, name: str) -> None:
    """Its state has gone on since."""
    check_goes_on(talk, talk.prompts[name], answered=TURN)


@pytest.mark.supports("the next turn goes on within a block")
def test_the_next_turn_goes_on_behind_the_answer(talk: Talk) -> None:
    prompt, salt = talk.prompts["one-block-and-a-part"], new_salt()
    whole = ask(talk.alone.engine, prompt, max_tokens=TURN + MAX_TOKENS)
    first = talk.publish(prompt, salt, TURN)
    assert first.tokens == whole.tokens[:TURN]
    before = talk.count("tokens_from_host")
    turn = [*prompt, *first.tokens[:-1]]
    answer = talk.go_on(turn, salt, first.tokens[-1])
    assert answer.tokens == whole.tokens[TURN:][: len(answer.tokens)]
    assert talk.count("tokens_from_host") - before == len(turn)


def test_ends_that_are_not_delivered_are_noticed(talk: Talk) -> None:
    prompt, salt, token = talk.prompts["one-block-and-a-part"], new_salt(), 11
    talk.publish(prompt, salt)
    sent = talk.writing.probe.read_all("prefilled")
    right = talk.right(prompt, token)
    talk.reading.probe.call("host_delivers", "nothing")
    try:
        # An answer that is no number at all cannot be written as JSON.
        with pytest.raises((AssertionError, EngineError), match=r"token \d+|not JSON compliant"):
            talk.go_on(prompt, salt, token).require_same(right, tolerance=talk.family.exactness)
    finally:
        talk.reading.probe.call("host_delivers", "all")
    found = talk.reading.probe.read("first")
    assert found[0].computed == len(prompt)
    with pytest.raises(AssertionError, match="found"):
        kv.require_same_kv(latest(sent, prompt), found, len(prompt))


@pytest.mark.supports("the next turn goes on within a block, found in a store", "Qwen3-Next")
def test_a_prompt_goes_on_where_an_engine_that_has_stopped_has_ended(relay: Talk) -> None:
    """The control comes first, with prompts that the reader has not seen: nothing is delivered."""
    names, token = ("within-a-block", "two-blocks-and-a-part"), 11
    counters = ("tokens_shared", "tokens_from_tails", "tokens_from_host", "failures")
    right = {name: relay.right(relay.prompts[name], token) for name in names}
    salts = {name: [new_salt(), new_salt()] for name in names}
    for name in names:
        for salt in salts[name]:
            relay.publish(relay.prompts[name], salt)
    sent = relay.writing.probe.read_all("prefilled")
    relay.writing.engine.stop()
    relay.reading.probe.call("store_delivers", "nothing")
    for name in names:
        prompt = relay.prompts[name]
        with pytest.raises((AssertionError, EngineError), match=r"token \d+|not JSON compliant"):
            relay.go_on(prompt, salts[name][0], token).require_same(
                right[name], tolerance=relay.family.exactness
            )
        found = relay.reading.probe.read("first")
        assert found[0].computed == len(prompt)
        with pytest.raises(AssertionError, match="found"):
            kv.require_same_kv(latest(sent, prompt), found, len(prompt))
    relay.reading.probe.call("store_delivers", "all")
    for name in names:
        prompt = relay.prompts[name]
        before = [relay.count(counter) for counter in counters]
        answer = relay.go_on(prompt, salts[name][1], token)
        found = relay.reading.probe.read("first")
        answer.require_same(right[name], tolerance=relay.family.exactness)
        assert found[0].computed == len(prompt)
        kv.require_same_kv(latest(sent, prompt), found, len(prompt))
        after = [relay.count(counter) for counter in counters]
        grown = [count - old for count, old in zip(after, before, strict=True)]
        assert grown == [len(prompt), len(prompt) % relay.reading.block, 0, 0]
