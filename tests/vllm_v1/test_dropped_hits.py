# SPDX-License-Identifier: Apache-2.0
"""Hits that vLLM does not take, as with `--enable-return-routed-experts`.

It takes only whole blocks whose experts it has seen itself, so no prompt of another engine.
"""

import pytest

from tests.toy import BLOCK

from .harness import InProcessEngine, assert_clean, hand_off, prompt

aux_output = pytest.importorskip("vllm.distributed.aux_output_connector.connector")
AuxOutputSchedulerConnector = aux_output.AuxOutputSchedulerConnector

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not hasattr(AuxOutputSchedulerConnector, "cap_external_hit"),
        reason="vLLM before 0.33 takes every hit whole: it has no `cap_external_hit`",
    ),
]


class WithoutWorkers(AuxOutputSchedulerConnector):
    """What caps the hits, without the experts that workers would send."""

    def build_connector_meta(self, *args):
        return None

    def take_output(self, *args):
        return None


def return_experts(engine: InProcessEngine) -> None:
    """Have vLLM cap the hits of an engine."""
    scheduler = engine.scheduler
    scheduler.aux_output_connector = WithoutWorkers(scheduler.kv_cache_manager, scheduler.connector)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("length", [3 * BLOCK - 5, 3 * BLOCK, 3 * BLOCK + 1])
def test_a_hand_off_that_is_not_taken_is_let_go_of(engine, tokens, length, overlap):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", async_scheduling=overlap)
    return_experts(decode)
    text = prompt(length)
    assert hand_off(prefill, decode, text) == tokens(text, 6)
    assert decode.count("handoffs_received") == 0
    assert_clean(prefill, decode)


def test_a_prefix_of_its_own_is_taken_from_the_arena(engine, tokens):
    sharer = engine("kv_both", extra={"share": True}, usable_blocks=8)
    return_experts(sharer)
    text, other = prompt(4 * BLOCK + 3), prompt(7 * BLOCK, seed=1)
    for each in (text, other, text):
        assert sharer.generate(each, 6).tokens == tokens(each, 6)
        assert_clean(sharer)
    assert sharer.count("tokens_kept") > 0
