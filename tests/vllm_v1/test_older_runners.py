# SPDX-License-Identifier: Apache-2.0
"""What model runners before vLLM 0.30 keep to themselves is made up for."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.v1.outputs import KVConnectorOutput

from omni_connector.plugin import CONNECTOR_NAME
from omni_connector.vllm_v1 import scheduler
from omni_connector.vllm_v1.compat import take_worker_stats
from omni_connector.vllm_v1.metadata import WorkerReport
from omni_connector.vllm_v1.metrics import OmniStats
from tests.toy import BLOCK

from .harness import (
    HANDOFF,
    assert_clean,
    prompt,
)
from .runners import OlderRunner, spoil_a_slot, trio

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)


def test_a_failed_load_that_the_runner_keeps_to_itself_would_be_served(engine, monkeypatch):
    """What the test above would see, were it not for `requests.recompute`."""
    monkeypatch.setattr(scheduler, "recompute", lambda request, manager: None)
    prefill, decode, reference = trio(engine, OlderRunner, family="all three")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    spoil_a_slot(prefill)
    wrong = decode.generate(PROMPT, 6, params=answer).tokens
    assert wrong != reference.generate(PROMPT, 6).tokens


@pytest.mark.values
def test_what_two_ranks_report_is_added_up(engine, family):
    """One rank alone may fail."""
    prefill, decode, reference = trio(engine, OlderRunner, family=family, ranks=2)
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
    report = WorkerReport(done={3: 1})
    ours = OmniStats({}, report)
    several = MultiKVConnectorStats(data={"Other": OmniStats(), CONNECTOR_NAME: ours})
    for stats, found in (
        (OmniStats({}, report), report),
        (several, report),
        (several, None),  # it was taken
        (MultiKVConnectorStats(data={"Other": OmniStats({}, report)}), None),
        (None, None),
    ):
        taken = take_worker_stats(KVConnectorOutput(kv_connector_stats=stats))
        assert (None if taken is None else taken.report) is found
