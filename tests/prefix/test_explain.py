# SPDX-License-Identifier: Apache-2.0
"""An engine answers over its socket where blocks of a prompt are, and refuses what it cannot."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.errors import OmniError, PeerRefusedError, TransportError
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.runtime import socket_path
from omni_connector.net.unix import Connection
from omni_connector.prefix.explain import (
    ANSWERS,
    KIND,
    AskCause,
    AskEngine,
    AskHashes,
    AskPlaces,
    AskStored,
    ExplainedEngine,
    Explainer,
    Places,
    ThisEngine,
)
from omni_connector.prefix.lookups import Lookup
from omni_connector.prefix.misses import Misses
from omni_connector.testing.clock import FakeClock
from tests.hostile.control import compatibility

SHAPE: GroupShape = compatibility().groups[0]
HASHES = tuple(bytes([i]) * 32 for i in range(4))


class Lookups:
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Lookup] = []

    def ask(self, lookup: Lookup) -> None:
        self.asked.append(lookup)


def make(place: Path, **changes: Any) -> Explainer:
    stats: Any = None
    engine = ExplainedEngine(
        folder=place,
        engine_id=changes.pop("engine_id", "one"),
        compatibility=compatibility(),
        hash_id="sha256:16:x",
        model=SimpleNamespace(
            tokenizer=str(place), tokenizer_revision=None, trust_remote_code=None
        ),
        hash_block_size=16,
        group_ids=(3, 5),
        hash_tokens=changes.pop("hash_tokens", lambda tokens, salt, after: [b"h" * 32]),
        cached=lambda block_hash, groups: block_hash if groups == [5] else None,
    )
    settings: dict[str, Any] = {
        "host": None,
        "lookups": None,
        "tails": None,
        "misses": Misses((SHAPE,), 16, lambda group, key: key == HASHES[3], stats),
        "prefix": lambda: "p",
        "alone": lambda: False,
        "clock": time.monotonic,
    }
    return Explainer(engine, **settings | changes)


@pytest.fixture
def explainer(place: Path) -> Iterator[Explainer]:
    made = make(place)
    yield made
    made.close()


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


def test_an_engine_says_what_it_is(connection: Connection, place: Path) -> None:
    answer = asked(connection, AskEngine())
    assert isinstance(answer, ThisEngine)
    assert answer.tokenizer.name == str(place)
    assert answer.tokenizer.trust_remote_code is False
    assert [shape.attention_type for shape in answer.groups] == ["all", "window"]
    assert answer.traits["model"] == "m@1"
    assert (answer.shares, answer.stores, answer.alone) == (False, False, False)


def test_blocks_are_looked_for_in_their_group(connection: Connection) -> None:
    assert asked(connection, AskPlaces(1, HASHES)).cached == (True,) * 4
    assert asked(connection, AskPlaces(0, HASHES)) == Places((False,) * 4, (-1,) * 4, ())


def test_what_there_is_not_is_refused(connection: Connection) -> None:
    with pytest.raises(PeerRefusedError, match="no group 2"):
        asked(connection, AskPlaces(2, HASHES))


def test_an_engine_without_store_refuses(connection: Connection) -> None:
    with pytest.raises(PeerRefusedError, match="no store"):
        asked(connection, AskStored(1, 0, HASHES))


def test_what_fails_in_the_engine_fails_for_the_asker_alone(place: Path) -> None:
    def fails(*tokens: object) -> list[bytes]:
        raise NameError("NONE_HASH")

    made = make(place, hash_tokens=fails)
    try:
        with pytest.raises(PeerRefusedError, match="failed"):
            asked(connect(place), AskHashes(None, [1] * 16))
        assert isinstance(asked(connect(place), AskEngine()), ThisEngine)
    finally:
        made.close()


def test_the_cause_is_that_by_which_misses_are_counted(connection: Connection) -> None:
    def cause(block: int, key: bytes) -> str:
        return str(asked(connection, AskCause(block, key, [1] * 16, HASHES[0])).cause)

    assert cause(3, HASHES[3]) == "evicted"
    assert cause(2, HASHES[2]) == "never_seen"


def test_the_store_is_asked_once_and_its_answer_waited_for(place: Path) -> None:
    lookups, clock = Lookups(), FakeClock()
    made = make(place, lookups=lookups, clock=clock)
    try:
        question = AskStored(7, 1, HASHES)
        for _ in range(2):
            assert made.answer(question)[0].held is None  # type: ignore[attr-defined]
        (lookup,) = lookups.asked
        assert lookup.hashes == [[], list(HASHES)]
        lookup.held = [SimpleNamespace(blocks=[]), SimpleNamespace(blocks=[True, False])]  # type: ignore[list-item]
        answer: Any = made.answer(question)[0]
        assert answer.held == (True, False, False, False)
        assert made.answer(question)[0].held is None  # type: ignore[attr-defined]
        clock.advance(10)
        answer = made.answer(question)[0]
        assert (answer.held, answer.late) == (None, True)
        for ticket in range(100):
            made.answer(AskStored(ticket, 1, HASHES))
        assert len(made._tickets) == 16
    finally:
        made.close()


def test_two_engines_of_one_name_do_not_answer_for_each_other(
    place: Path, explainer: Explainer
) -> None:
    with pytest.raises(TransportError):
        make(place)
    make(place, engine_id="two").close()


def test_what_is_closed_is_not_asked(place: Path, explainer: Explainer) -> None:
    explainer.close()
    explainer.close()
    with pytest.raises(OmniError):
        Connection(socket_path(place, "explain:one", kind=KIND), time.monotonic() + 60)
