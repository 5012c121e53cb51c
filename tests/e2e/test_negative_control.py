# SPDX-License-Identifier: Apache-2.0
"""The connector that moves nothing must fail what the others are tested with."""

import pytest

from .harness import Case, References

pytestmark = pytest.mark.e2e


def test_a_connector_that_moves_nothing_is_noticed(case: Case, references: References) -> None:
    answer = references.no_op("llama", case.prompt)
    assert answer is not None
    with pytest.raises(AssertionError, match=r"token \d+"):
        case.check(answer)


def test_the_same_engine_answers_right_when_it_computes(case: Case, references: References) -> None:
    answer = references.plain("llama", case.prompt)
    case.check(answer)
