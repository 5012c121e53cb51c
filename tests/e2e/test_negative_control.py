# SPDX-License-Identifier: Apache-2.0
"""The connector that moves nothing must fail what the others are tested with."""

from pathlib import Path

import pytest

from .harness import (
    HOLLOW_CONFIG,
    ROUNDING,
    Case,
    Pair,
    StartEngine,
    fill_with_other_bytes,
    new_salt,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def hollow_pair(start_engine: StartEngine, runtime: Path) -> Pair:
    """A decode engine whose hand-offs are all hollow, and its own prefill engine."""
    engine = start_engine("hollow", HOLLOW_CONFIG)
    engine.wait_ready()
    fill_with_other_bytes(engine)
    return Pair(engine, engine, runtime)


def test_a_connector_that_moves_nothing_is_noticed(hollow_pair: Pair, case: Case) -> None:
    # Not prefilled here first: a block just freed may be the next one taken, bytes and all.
    answer = hollow_pair.decode(case.prompt, new_salt(), {"do_remote_prefill": True})
    with pytest.raises(AssertionError, match=r"token \d+"):
        answer.require_same(case.reference, tolerance=ROUNDING)


def test_the_same_engine_answers_right_when_it_computes(hollow_pair: Pair, case: Case) -> None:
    answer = hollow_pair.decode(case.prompt, new_salt())
    answer.require_same(case.reference, tolerance=ROUNDING)
