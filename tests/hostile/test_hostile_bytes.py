# SPDX-License-Identifier: Apache-2.0
"""Ten thousand hostile inputs for each parser, 500 where it is slow.

`benchmarks/hostile_bytes.py` has a million.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from omni_connector.errors import ProtocolError
from tests.hostile import (
    FOLLOWED,
    PARSERS,
    Parser,
    UnsafeParserError,
    attack,
    opened,
    trial,
)
from tests.hostile.mutation import (
    ODD_VALUES,
    damage,
    distort,
    distort_json,
    distort_msgpack,
    nested,
)
from tests.patience import wait_until

INPUTS = 10_000
FOLLOWED_INPUTS = 500
SEED = 11
MARKS = {"loads": pytest.mark.vllm, "engines": pytest.mark.vllm}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name.partition(".")[0], ())) for name in PARSERS],
)
def test_hostile_inputs_are_refused_by_name_and_nothing_dies(name: str) -> None:
    if name.startswith("payloads"):
        pytest.importorskip("torch")
    through_engines = name == "engines.params"  # six times as slow as any other
    inputs = FOLLOWED_INPUTS if through_engines or name in FOLLOWED else INPUTS
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    with opened(name) as parser:
        running = set(threading.enumerate()) - before
        tally = attack(parser, inputs, SEED, traced=min(500, inputs // 2))
        assert running <= set(threading.enumerate()), "a thread has ended"
    assert tally.inputs == inputs
    assert tally.accepted < inputs or name == "settings.object_keys"
    assert tally.accepted > inputs // 1000, (
        "so few are valid that little behind the first check was tried"
    )
    assert tally.peak_bytes > 0
    wait_until(lambda: set(threading.enumerate()) <= before)


# The attack must see what is unsafe: parsers that are so on purpose.


class _Point(msgspec.Struct):
    x: int
    name: str
    parts: list[int]


_CORPUS = [msgspec.msgpack.encode(_Point(3, "abc", [1, 2, 3]))]


def _parser(parse: Callable[[bytes], Any], **changes: Any) -> Parser:
    def make(rng: random.Random) -> bytes:
        return distort_msgpack(rng.choice(_CORPUS), rng)

    return Parser("unsafe", make, parse, (ProtocolError,), **changes)


def _decode(raw: bytes) -> _Point:
    try:
        return msgspec.msgpack.decode(raw, type=_Point)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def _believes_counts(raw: bytes) -> bool:
    return len(bytes(abs(_decode(raw).x) % (1 << 26))) >= 0


def _takes_the_first(raw: bytes) -> bool:
    return _decode(raw).parts[0] >= 0


def _catches_too_little(raw: bytes) -> bool:
    try:
        return msgspec.msgpack.decode(raw, type=_Point).x >= 0
    except msgspec.ValidationError as error:
        raise ProtocolError(str(error)) from error


def test_a_safe_parser_passes() -> None:
    tally = attack(_parser(lambda raw: _decode(raw).x >= 0), 3000, SEED)
    assert tally.inputs == 3000
    assert tally.refused["ProtocolError"] > 100
    assert tally.accepted > 100


@pytest.mark.parametrize(
    ("parse", "found"),
    [
        (_takes_the_first, "IndexError"),
        (_catches_too_little, "DecodeError|RecursionError|UnicodeDecodeError"),
        (_believes_counts, "bytes of memory"),
        (lambda raw: nested() == nested() if len(raw) > 300 else True, "RecursionError"),
    ],
)
def test_an_unsafe_parser_is_caught(parse: Callable[[bytes], bool], found: str) -> None:
    with pytest.raises(UnsafeParserError, match=found) as caught:
        attack(_parser(parse), 3000, SEED, traced=3000)
    assert f"unsafe, seed {SEED}, input " in str(caught.value)


def test_a_slow_parser_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SLOWEST_S", 0.0)
    with pytest.raises(UnsafeParserError, match="it took"):
        attack(_parser(lambda raw: sum(range(1000)) > 0), 1, SEED)


def test_what_died_behind_a_parser_is_noticed() -> None:
    worker = threading.Thread(target=lambda: None)
    worker.start()
    worker.join()

    def alive() -> None:
        assert worker.is_alive(), "the thread has ended"

    with pytest.raises(UnsafeParserError, match="the thread has ended"):
        attack(_parser(lambda raw: True, alive=alive), 10, SEED)


def test_the_same_seed_makes_the_same_inputs() -> None:
    def inputs(seed: int) -> list[bytes]:
        seen: list[bytes] = []
        attack(_parser(lambda raw: seen.append(raw) is None), 200, seed)
        return seen

    assert inputs(1) == inputs(1)
    assert inputs(1) != inputs(2)


def test_every_part_of_a_message_is_changed_and_the_original_is_not() -> None:
    rng = random.Random(SEED)
    message = {"a": 1, "deep": [{"b": [1, 2]}, {"c": {"d": "x"}}], "e": b"y"}
    odd = repr(ODD_VALUES)
    seen: set[str] = set()
    for _ in range(3000):
        other = distort(message, rng)
        seen.add(repr(other))
        assert message == {"a": 1, "deep": [{"b": [1, 2]}, {"c": {"d": "x"}}], "e": b"y"}
    assert repr(ODD_VALUES) == odd, "the values that others are replaced by have changed"
    for part in ("'b': []", "'c': {}", "'e': b''", "'a': 2", "'deep': []", "{'b': [1, 2]}"):
        assert any(part in each for each in seen), part
    raw = msgspec.msgpack.encode(message)
    assert len({distort_msgpack(raw, rng) for _ in range(500)}) > 400
    assert len({distort_json(b'{"a":[1,2,{"b":"c"}]}', rng) for _ in range(500)}) > 200
    assert len({damage(raw, rng) for _ in range(500)}) > 400
