# SPDX-License-Identifier: Apache-2.0
"""Hints are read whatever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.config import ALL_HINTS, HintName
from omni_connector.prefix.hints import (
    MAX_PIN_S,
    NO_HINTS,
    Hints,
    read_hints,
    wrong_hint,
)


@pytest.mark.parametrize(
    ("asked", "hints", "bad"),
    [
        ({"cache": "normal", "pin_s": 600, "prefetch": True}, Hints("normal", 600.0, True), 0),
        ({"cache": "no", "pin_s": 0, "prefetch": False}, Hints("no"), 0),
        ({"cache": "no", "prefetch": True}, Hints("no"), 1),
        ({"pin_s": MAX_PIN_S}, Hints(pin_s=MAX_PIN_S), 0),
        ({"pin_s": 2 * MAX_PIN_S, "prefetch": True}, Hints(prefetch=True), 1),
        ({"cache": "high", "pin_s": 5}, Hints(pin_s=5.0), 1),
        ({"pin_s": "5"}, NO_HINTS, 1),
        ({"pin_s": 10**400}, NO_HINTS, 1),
        ({"pin_s": float("inf")}, NO_HINTS, 1),
        ({"pin_s": True}, NO_HINTS, 1),
        ({"cache": None, "prefetch": "yes", "\ud800": 1}, NO_HINTS, 3),
        ({5: 6}, NO_HINTS, 1),
        ([], NO_HINTS, 1),
    ],
)
def test_of_hints_those_that_fit_are_followed(asked: object, hints: Hints, bad: int) -> None:
    assert read_hints({"omni": asked}) == (hints, bad)


@pytest.mark.parametrize(
    ("token_ids", "pinned"), [([1, 2], 2), ([1, 2, 3], 3), ([], 0), ([2], 0), ([1, 2, 3, 4], 0)]
)
def test_a_part_is_pinned_only_if_the_prompt_begins_with_it(
    token_ids: list[int], pinned: int
) -> None:
    asked = {"omni_hints": {"pin_prefix": {"token_ids": token_ids, "ttl_seconds": 5}}}
    hints, bad = read_hints(asked, None, [1, 2, 3])
    assert (hints.pinned_tokens, hints.pin_s, bad) == (pinned, 5.0 * bool(pinned), not pinned)


@pytest.mark.parametrize(
    ("xargs", "params", "hints", "bad"),
    [
        (None, {}, NO_HINTS, 0),
        ({"session_id": 5, "kv_transfer_params": {}, 7: 8}, {}, NO_HINTS, 0),
        (
            {"omni_cache": "normal", "omni_pin_s": 600, "omni_prefetch": 1},
            {},
            Hints("normal", 600.0, True),
            0,
        ),
        ({"omni_pin_s": "600", "omni_prefetch": "0"}, {}, Hints(pin_s=600.0), 0),
        ({"omni_pin_s": [600], "omni_prefetch": 2, "omni_": 1}, {}, NO_HINTS, 3),
        ({"omni_pin_s": 5, "omni_prefetch": 1}, {"pin_s": 6}, Hints("normal", 6.0, True), 0),
        ({"omni_cache": "no"}, {"pin_s": 6}, Hints("no"), 1),
        ({"omni_thinking": "keep"}, {}, Hints(thinking="keep"), 0),
        ({"omni_thinking": "keep"}, {"thinking": "drop"}, Hints(thinking="drop"), 0),
        ({"omni_thinking": 1}, {"thinking": None}, NO_HINTS, 1),
        ({f"omni_{number}": number for number in range(1000)}, {"pin_s": 6}, Hints(pin_s=6.0), 1),
    ],
)
def test_hints_in_xargs_count_where_the_params_say_nothing(
    xargs: dict[object, object] | None, params: dict[str, object], hints: Hints, bad: int
) -> None:
    assert read_hints({"omni": params}, xargs) == (hints, bad)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=6,
)
NAMES = (
    st.sampled_from(["cache", "pin_s", "prefetch", "thinking"])
    | st.text(max_size=5)
    | st.integers()
)


ASKED = st.dictionaries(NAMES, ANYTHING, max_size=20)


@given(ASKED | ANYTHING, ASKED)
def test_whatever_is_asked_is_read_and_each_wrong_hint_is_told_of(
    asked: object, xargs: dict[object, object]
) -> None:
    named = {f"omni_{name}": xargs[name] for name in xargs}
    hints, bad = read_hints({"omni": asked}, named)
    assert 0 <= hints.pin_s <= MAX_PIN_S
    assert 0 <= bad <= 33
    told = wrong_hint({"omni": asked}, named)
    assert (told is not None) == (bad > 0) or (hints == Hints("no") and told is None)


@pytest.mark.parametrize(
    ("params", "xargs", "told"),
    [
        ({"cach": "no"}, {}, "unknown hint 'cach'; did you mean 'cache'?"),
        ({}, {"omni_pinn_s": 5}, "unknown hint 'pinn_s'; did you mean 'pin_s'?"),
        ({"cache": "never"}, {}, "hint cache: Invalid enum value 'never'"),
        ([], {}, "omni must be an object of hints, not list"),
    ],
)
def test_a_wrong_hint_is_named(params: object, xargs: dict[str, object], told: str) -> None:
    assert (wrong_hint({"omni": params}, xargs) or "").startswith(told)


@pytest.mark.parametrize(
    ("asked", "names", "followed", "refused"),
    [
        (Hints("no", 5.0, True), ALL_HINTS, Hints("no", 5.0, True), 0),
        (Hints("normal", 5.0, True), ("no", "prefetch"), Hints(prefetch=True), 1),
        (Hints("no"), ("no", "prefetch"), Hints("no"), 0),
        (Hints("no"), ("pin_s",), NO_HINTS, 1),
        (Hints("no", 5.0, True), (), NO_HINTS, 3),
        (NO_HINTS, (), NO_HINTS, 0),
    ],
)
def test_of_hints_those_are_followed_that_the_operator_allows(
    asked: Hints, names: tuple[HintName, ...], followed: Hints, refused: int
) -> None:
    assert asked.allowed(names) == (followed, refused)
