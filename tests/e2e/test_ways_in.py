# SPDX-License-Identifier: Apache-2.0
"""The other ways to use the connector: `kv_both`, by module path, and in process."""

import json

import pytest

from omni_connector.testing.engines import PREFILL_PARAMS
from omni_connector.testing.reference import Answer

from .harness import Case, Pair
from .pool import Pool
from .programs import Program
from .prompts import MAX_TOKENS

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("unlike")]


def test_both_sides_hand_off_to_each_other(pool: Pool, case: Case) -> None:
    # One was not told of the plugin: it knows the connector by its module.
    members = pool.take(("unlike", "llama", ""), ("both", "llama", "a"))
    for pair in (Pair.of(*members), Pair.of(*reversed(members))):
        received = pair.received()
        case.check(pair.hand_off(case.prompt))
        assert pair.received() == received + 1
    pair.wait_until_idle()


def test_an_engine_in_process_takes_a_hand_off(
    pool: Pool, cases: dict[str, Case], in_process: Program
) -> None:
    case = cases["two-thousand-not-aligned"]
    [member] = pool.take(("both", "llama", "a"))
    answer = member.engine.complete(
        case.prompt, max_tokens=1, kv_transfer_params=dict(PREFILL_PARAMS)
    )
    params = answer["kv_transfer_params"]
    task = {"prompt": case.prompt, "max_tokens": MAX_TOKENS, "params": params}
    printed = in_process.finish(json.dumps(task), timeout=200)
    [line] = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    likeliest = ({int(token): value for token, value in row} for row in result["likeliest"])
    case.check(Answer(tuple(result["tokens"]), tuple(result["logprobs"]), tuple(likeliest)))
    assert result["received"] == [1]
