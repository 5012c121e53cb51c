# SPDX-License-Identifier: Apache-2.0
"""Hints of agents: newer states of a session replace older ones, and branches may be over."""

import time

import pytest

from tests import inspection
from tests.vllm_v1.harness import assert_clean, prompt

pytestmark = pytest.mark.vllm

BLOCK = 16
ROOT = prompt(4 * BLOCK, seed=1)
LEFT = [*ROOT, *prompt(4 * BLOCK, seed=2)]
RIGHT = [*ROOT, *prompt(4 * BLOCK, seed=3)]


@pytest.fixture
def alone(engine):
    return engine("kv_both", extra={"share": True})


def serve(engine, tokens, **hints):
    """Serve a prompt with these hints; all of its blocks but the last are full."""
    engine.generate([*tokens, 5], 1, params={"omni_hints": hints} if hints else None)
    assert_clean(engine)


def pinned(engine):
    return len(inspection.pinned(engine.half))


def test_a_newer_state_of_a_session_ends_the_pins_that_it_does_not_ask_for(alone):
    serve(alone, LEFT, session="s", pin_s=600)
    assert pinned(alone) == 8
    serve(alone, RIGHT, session="s", pin_s=600)
    assert pinned(alone) == 8
    assert alone.count("pins_superseded") == 4
    serve(alone, ROOT, session="s")
    assert pinned(alone) == 0


def test_pins_of_others_stay(alone):
    serve(alone, LEFT, session="s", pin_s=600)
    serve(alone, ROOT, session="other", pin_s=600)
    serve(alone, LEFT[: 6 * BLOCK], pin_s=300)
    serve(alone, prompt(BLOCK, seed=9), session="s", over=True)
    assert pinned(alone) == 6


@pytest.mark.parametrize("session", ["s", "another"])
def test_a_branch_that_is_over_is_let_go_and_what_was_there_before_stays(alone, session):
    serve(alone, ROOT)
    serve(alone, LEFT, session="s", pin_s=600)
    assert inspection.indexed(alone.half) == 8
    serve(alone, LEFT, session=session, over=True)
    left = 4 if session == "s" else 8
    assert inspection.indexed(alone.half) == left
    assert pinned(alone) == (0 if session == "s" else 8)
    assert alone.count("blocks_let_go") == 8 - left


def test_a_session_of_another_salt_is_another_session(alone):
    alone.generate([*LEFT, 5], 1, params={"omni": {"session": "s", "pin_s": 60}}, salt="a")
    alone.generate([*ROOT, 5], 1, params={"omni": {"session": "s", "over": True}}, salt="b")
    assert_clean(alone)
    assert pinned(alone) == 8


def test_a_pin_by_the_clock_and_a_pin_of_a_part(alone):
    serve(alone, ROOT, pin_until=time.time() + 600)
    assert pinned(alone) == 4
    serve(alone, LEFT, pin_prefix={"token_ids": LEFT[: 6 * BLOCK + 3], "ttl_seconds": 600})
    assert pinned(alone) == 6
    serve(alone, RIGHT, pin_prefix={"token_ids": LEFT, "ttl_seconds": 600})
    serve(alone, RIGHT, pin_until=time.time() - 1)
    assert pinned(alone) == 6
    assert alone.count("bad_hints") == 1


def test_the_operator_may_refuse_that_a_branch_is_over(engine):
    alone = engine("kv_both", extra={"share": True, "hints": ["pin_s"]})
    serve(alone, LEFT, session="s", pin_s=600)
    serve(alone, LEFT, session="s", over=True)
    assert alone.count("hints_refused") == 1
    assert inspection.indexed(alone.half) == 8


def test_hints_of_agents_change_no_answer(alone, engine):
    expected = engine().generate([*LEFT, 5], 6).tokens
    for hints in ({"session": "s", "pin_s": 60}, {"session": "s", "over": True}, {"session": 7}):
        answer = alone.generate([*LEFT, 5], 6, params={"omni_hints": hints})
        assert answer.tokens == expected
    assert_clean(alone)
