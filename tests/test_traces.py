# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/traces.py`: the conversations that it makes."""

from collections import Counter
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from .scripts import module_at

VOCABULARY = range(3, 512)


@pytest.fixture(scope="module")
def traces() -> Any:
    return module_at(Path(__file__).parents[1] / "benchmarks" / "traces.py")


def test_a_seed_gives_the_same_conversations_and_another_one_others(traces: Any) -> None:
    first, again, other = (traces.dialogues(5, 4, VOCABULARY, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_all_sessions_have_a_turn_before_one_has_another(traces: Any) -> None:
    turns = traces.dialogues(5, 4, VOCABULARY)
    rounds = [turns[start : start + 5] for start in range(0, 20, 5)]
    orders = [[turn.session for turn in each] for each in rounds]
    assert all(Counter(order) == Counter(range(5)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_lengths_are_those_of_the_published_conversations(traces: Any) -> None:
    turns = traces.dialogues(200, 20, VOCABULARY)
    questions = [len(turn.question) for turn in turns]
    answers = [turn.answer for turn in turns]
    assert mean(questions) == pytest.approx(traces.QUESTION_TOKENS, rel=0.1)
    assert median(questions) == pytest.approx(0.85 * traces.QUESTION_TOKENS, rel=0.1)
    assert mean(answers) == pytest.approx(traces.ANSWER_TOKENS, rel=0.1)
    assert min(*questions, *answers) >= 1
    assert max(*questions, *answers) <= 1024
    assert {token for turn in turns for token in turn.question} <= set(VOCABULARY)
