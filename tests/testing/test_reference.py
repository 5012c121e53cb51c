# SPDX-License-Identifier: Apache-2.0
"""What tells a wrong answer from a rounded one."""

import pytest

pytest.importorskip("vllm")

from omni_connector.testing.reference import ROUNDING, Answer

pytestmark = pytest.mark.vllm

RIGHT = Answer((5, 9, 7), (-0.5, -0.25, -1.0), ({5: -0.5}, {9: -0.25, 8: -2.0}, {7: -1.0}))


def answer(*tokens: int, logprobs: tuple[float, ...], second: dict[int, float]) -> Answer:
    """Like RIGHT, but for what is given."""
    return Answer(tokens, logprobs, (RIGHT.likeliest[0], second, RIGHT.likeliest[2]))


def test_the_same_is_the_same() -> None:
    RIGHT.require_same(RIGHT)
    assert RIGHT.agrees(RIGHT)


def test_rounding_is_allowed_up_to_the_tolerance() -> None:
    rounded = answer(5, 9, 7, logprobs=(-0.5, -0.2505, -1.0), second={9: -0.2505})
    rounded.require_same(RIGHT, tolerance=ROUNDING)
    with pytest.raises(AssertionError, match=r"token 1 .9. has log-probability"):
        rounded.require_same(RIGHT)


def test_another_token_is_another_answer() -> None:
    other = answer(5, 8, 7, logprobs=(-0.5, -0.25, -1.0), second={8: -0.25, 9: -2.0})
    with pytest.raises(AssertionError, match="token 1 is 8"):
        other.require_same(RIGHT, tolerance=ROUNDING)
    assert not other.agrees(RIGHT, tolerance=ROUNDING)


def test_of_two_tokens_that_are_equally_likely_either_is_right() -> None:
    tied = {8: -0.7001, 9: -0.7003}
    one = answer(5, 8, 3, logprobs=(-0.5, -0.7001, -2.0), second=tied)
    other = answer(5, 9, 7, logprobs=(-0.5, -0.7002, -1.0), second={9: -0.7002, 8: -0.7004})
    one.require_same(other, tolerance=ROUNDING)
    with pytest.raises(AssertionError, match="token 1 is 8"):
        one.require_same(other, tolerance=1e-5)


def test_a_tie_that_only_one_side_sees_is_a_difference() -> None:
    one = answer(5, 8, 7, logprobs=(-0.5, -0.7, -1.0), second={8: -0.7, 9: -0.7})
    with pytest.raises(AssertionError, match="token 1 is 8"):
        one.require_same(RIGHT, tolerance=ROUNDING)


def test_without_the_likeliest_tokens_nothing_is_a_tie() -> None:
    one, other = Answer((5,), (-0.7,)), Answer((6,), (-0.7,))
    with pytest.raises(AssertionError, match="token 0 is 5"):
        one.require_same(other, tolerance=ROUNDING)


def test_a_number_that_is_none_is_never_right() -> None:
    nothing = answer(5, 9, 7, logprobs=(-0.5, float("nan"), -1.0), second={})
    assert not nothing.agrees(RIGHT, tolerance=1e9)


def test_an_answer_is_read_with_its_likeliest_tokens() -> None:
    rows = [{"token_id:5": -0.5, "token_id:6": -1.0}, {"token_id:9": -0.25}]
    logprobs = {"token_logprobs": [-0.5, -0.25], "top_logprobs": rows}
    found = Answer.of({"choices": [{"token_ids": [5, 9], "logprobs": logprobs}]})
    assert found == Answer((5, 9), (-0.5, -0.25), ({5: -0.5, 6: -1.0}, {9: -0.25}))
