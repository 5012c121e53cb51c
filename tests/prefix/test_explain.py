# SPDX-License-Identifier: Apache-2.0
"""An engine answers over its socket what a request with a prompt would find."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.errors import OmniError, PeerRefusedError, TransportError
from omni_connector.net.runtime import socket_path
from omni_connector.net.unix import Connection
from omni_connector.prefix.explain import (
    ANSWERS,
    KIND,
    AskEngine,
    AskEvicted,
    AskPrompt,
    Later,
    ThisEngine,
)
from omni_connector.prefix.explainer import Explainer
from omni_connector.prefix.lookups import Lookup
from omni_connector.testing.clock import FakeClock
from tests.hostile import explain as hostile

TOKENS = list(range(65))


class Lookups:
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Lookup] = []

    def ask(self, lookup: Lookup) -> None:
        self.asked.append(lookup)


def nothing_cached(block_hash: bytes, groups: list[int]) -> object:
    return None


@pytest.fixture
def explainer(place: Path) -> Iterator[Explainer]:
    with hostile.explainer("one", place) as made:
        yield made


@pytest.fixture
def connection(place: Path, explainer: Explainer) -> Iterator[Connection]:
    made = connect(place)
    yield made
    made.close()


def connect(place: Path) -> Connection:
    path = socket_path(place, "explain:one", kind=KIND)
    return Connection(path, time.monotonic() + 60)


def asked(connection: Connection, question: Any) -> Any:
    return connection.ask(question, ANSWERS, time.monotonic() + 60)[0]


def test_an_engine_says_what_it_is(connection: Connection) -> None:
    answer = asked(connection, AskEngine())
    assert isinstance(answer, ThisEngine)
    assert (answer.model, answer.tokenizer.name) == ("m@main", "t")
    assert [shape.attention_type for shape in answer.groups] == ["all", "window"]
    assert answer.traits["model"] == "m@1"
    assert (answer.shares, answer.alone, answer.unsettled) == (False, False, False)


@pytest.mark.parametrize("tokens", [[], [1] * 1024])
def test_a_prompt_without_tokens_or_with_too_many_is_refused(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, tokens: list[int]
) -> None:
    monkeypatch.setattr("omni_connector.prefix.explainer.MAX_TOKENS", 1000)
    with pytest.raises(PeerRefusedError, match=f"a prompt of {len(tokens)} tokens"):
        asked(connection, AskPrompt(1, 0, tokens))


def test_what_fails_in_the_engine_fails_for_the_asker_alone(place: Path) -> None:
    def fails(*tokens: object) -> list[bytes]:
        raise NameError("NONE_HASH")

    with hostile.explainer("one", place, hash_tokens=fails):
        with pytest.raises(PeerRefusedError, match="failed"):
            asked(connect(place), AskPrompt(1, 0, [1] * 16))
        assert isinstance(asked(connect(place), AskEngine()), ThisEngine)


def test_an_engine_says_which_blocks_it_has_evicted(connection: Connection) -> None:
    for first, evicted in ((201, True), (200, False)):
        assert asked(connection, AskEvicted(bytes([first] * 32))).evicted is evicted


def test_the_store_is_asked_once_and_its_answer_waited_for(place: Path) -> None:
    lookups, clock = Lookups(), FakeClock()
    again = AskPrompt(7, len(TOKENS), whole=True)
    with hostile.explainer("one", place, lookups=lookups, clock=clock, cached=nothing_cached) as it:
        for question in (AskPrompt(7, 0, TOKENS, whole=True), again):
            assert it.answer(question) == (Later(), None)
        (lookup,) = lookups.asked
        assert list(map(len, lookup.hashes)) == [4, 4]
        clock.advance(10)
        late: Any = it.answer(again)[0]
        assert (late.late, late.missing.cause, late.sources) == (True, "too_late", {"own": 0})


def test_prompts_that_are_not_asked_about_are_given_up(place: Path) -> None:
    lookups = Lookups()
    with hostile.explainer("one", place, lookups=lookups, cached=nothing_cached) as it:
        for ticket in range(5):
            it.answer(AskPrompt(ticket, 0, TOKENS))
        with pytest.raises(OmniError, match="given up"):
            it.answer(AskPrompt(0, len(TOKENS), TOKENS, whole=True))
        assert it.answer(AskPrompt(1, len(TOKENS), whole=True)) == (Later(), None)


def test_of_very_many_runs_the_first_are_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_connector.prefix.explainer.MAX_RUNS", 3)
    with hostile.explainer("one", place, lookups=Lookups(), cached=nothing_cached) as it:
        it.answer(AskPrompt(1, 0, TOKENS, whole=True))
        found = it._asked[1]
        found.cached[1] = [True, False, False, True]
        prompt: Any = found.prompt
        prompt.lookup.held = [SimpleNamespace(blocks=[True] * 3), SimpleNamespace(blocks=[])]
        runs = (("store", "", 3), ("missing", "", 1)), (("own", "", 1),)
        assert it._runs(found, prompt, True) == runs


def test_two_engines_of_one_name_do_not_answer_for_each_other(
    place: Path, explainer: Explainer
) -> None:
    with pytest.raises(TransportError), hostile.explainer("one", place):
        pass
    with hostile.explainer("two", place):
        pass


def test_what_is_closed_is_not_asked(place: Path, explainer: Explainer) -> None:
    explainer.close()
    explainer.close()
    with pytest.raises(OmniError):
        Connection(socket_path(place, "explain:one", kind=KIND), time.monotonic() + 60)
