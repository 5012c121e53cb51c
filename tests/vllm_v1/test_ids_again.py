# SPDX-License-Identifier: Apache-2.0
"""A client leaves, and its request's id is used again at once: the second gets nothing of the
first. vLLM itself refuses an id whose KV is still being loaded."""

import pytest

from tests import inspection
from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, prompt, wait

pytestmark = pytest.mark.vllm

FIRST = prompt(6 * BLOCK - 3, seed=1)
# Of other tokens, and as long.
SECOND = prompt(6 * BLOCK - 3, seed=2)
SHARES = {"share": True}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def options(request):
    return {"max_tokens_a_step": 2 * BLOCK, "async_scheduling": request.param}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.values
def test_what_is_handed_off_is_that_of_the_second(engine, tokens, options, steps):
    """The first was computed in part, or as a whole, and its copies are under way."""
    prefill, decode = engine("kv_producer", **options), engine("kv_consumer")
    held = prefill.hold(saves=True)
    request_id = prefill.submit(FIRST, params=HANDOFF, request_id="same")
    for _ in range(steps):
        prefill.step()
    prefill.abort(request_id)
    prefill.submit(SECOND, params=HANDOFF, request_id="same")
    prefill.step()
    held.open()
    prefill.run(lambda: prefill.done("same"))
    params = prefill.answers["same"].params
    assert decode.generate(SECOND, 6, params=params).tokens == tokens(SECOND, 6)
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.values
def test_the_lease_of_the_first_is_not_used_for_the_second(engine, tokens, options, steps):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", **options)
    params = [prefill.generate(each, params=HANDOFF).params for each in (FIRST, SECOND)]
    request_id = decode.submit(FIRST, max_tokens=6, params=params[0], request_id="same")
    if steps:
        assert decode.lease_answer(request_id) is not None
    held = decode.hold(loads=True)
    for _ in range(steps):
        decode.step()
    decode.abort(request_id)
    held.open()
    decode.settle()
    decode.submit(SECOND, max_tokens=6, params=params[1], request_id="same")
    decode.settle()
    assert decode.answers["same"].tokens == tokens(SECOND, 6)
    assert decode.count("handoffs_received") >= 1
    assert_clean(prefill, decode)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.values
def test_what_is_shared_is_that_of_the_second(engine, tokens, options, steps):
    first, second = (engine("kv_both", extra=SHARES, **options) for _ in range(2))
    wait(lambda: inspection.meets(first.half) and inspection.meets(second.half))
    held = first.hold(saves=True)
    request_id = first.submit(FIRST, request_id="same")
    for _ in range(steps):
        first.step()
    first.abort(request_id)
    first.submit(SECOND, request_id="same")
    first.step()
    held.open()
    first.settle()
    for each in (FIRST, SECOND):
        assert second.generate(each, 6).tokens == tokens(each, 6)
    assert second.count("tokens_from_host") >= 5 * BLOCK
    assert not first.half.copying()
