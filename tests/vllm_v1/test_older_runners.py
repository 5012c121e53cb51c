# SPDX-License-Identifier: Apache-2.0
"""What older model runners keep to themselves is made up for."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.v1.outputs import KVConnectorOutput

from omni_connector.plugin import CONNECTOR_NAME
from omni_connector.vllm_v1 import scheduler
from omni_connector.vllm_v1.metadata import OmniWorkerMetadata
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.older_runners import ReportingStats, carried_report
from tests.toy import BLOCK

from .harness import (
    HANDOFF,
    assert_clean,
    prompt,
)
from .runners import OlderRunner, spoil_a_slot, trio

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)


def test_a_failed_load_that_the_runner_keeps_to_itself_would_be_served(
    engine, old_runner, monkeypatch
):
    """What the test above would see, were it not for `requests.recompute`."""
    monkeypatch.setattr(scheduler, "recompute", lambda request, manager: None)
    prefill, decode, reference = trio(engine, old_runner, family="all three")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    wrong = decode.generate(PROMPT, 6, params=answer).tokens
    assert wrong != reference.generate(PROMPT, 6).tokens


def test_a_request_that_is_aborted_while_its_load_fails_leaves_nothing(engine, old_runner, family):
    prefill, decode, reference = trio(engine, old_runner, family=family)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    held = decode.hold(loads=True)
    decoded = decode.submit(PROMPT, max_tokens=6, params=answer)
    decode.run(held.waiting.is_set)
    decode.abort(decoded)
    held.open()
    assert_clean(prefill, decode)
    assert decode.generate(PROMPT, 6).tokens == reference.generate(PROMPT, 6).tokens


def test_a_load_ends_no_earlier_than_what_is_said_of_it(engine):
    """The first step of a runner that carries no worker metadata: nobody knows that yet."""
    prefill, _, reference = trio(engine, OlderRunner, family="all three")
    decode = engine("kv_consumer", lifecycle=OlderRunner(), family="all three", instant_copies=True)
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    decoded = decode.submit(PROMPT, max_tokens=6, params=answer)
    # The answer is there before the first step, so that this one starts the load.
    assert decode.lease_answer(decoded) is not None
    decode.settle()
    assert decode.answers[decoded].tokens == reference.generate(PROMPT, 6).tokens
    assert decode.failures() == {"checksum_mismatch": 1}
    assert_clean(prefill, decode)


@pytest.mark.values
def test_what_two_ranks_report_is_added_up(engine, old_runner, family):
    """Also where it comes with the statistics; and one rank alone may fail."""
    prefill, decode, reference = trio(engine, old_runner, family=family, ranks=2)
    for spoiled in (False, True):
        text = prompt(6 * BLOCK - 3, seed=spoiled)
        answer = prefill.generate(text, params=HANDOFF).params
        if spoiled:
            spoil_a_slot(prefill, rank=1)
        assert decode.generate(text, 6, params=answer).tokens == reference.generate(text, 6).tokens
        assert_clean(prefill, decode)
    assert decode.count("handoffs_received") == 1
    assert decode.failures() == {"checksum_mismatch": 1}


def test_a_report_is_found_among_those_of_other_connectors():
    report = OmniWorkerMetadata(done={3: 1})
    ours = ReportingStats({}, report)
    several = MultiKVConnectorStats(data={"Other": OmniStats(), CONNECTOR_NAME: ours})
    for stats, found in (
        (None, None),
        (OmniStats(), None),
        (ours, report),
        (several, report),
        (MultiKVConnectorStats(data={"Other": OmniStats()}), None),
    ):
        assert carried_report(KVConnectorOutput(kv_connector_stats=stats)) is found
