# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half tells the workers, as vLLM pickles it."""

import pickle
from dataclasses import fields
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from omni_connector.kv.spans import BlockSpans  # noqa: E402
from omni_connector.vllm_v1.metadata import OmniConnectorMetadata  # noqa: E402

SPEC: Any = BlockSpans.of([(0, [1])])  # stands for a job
CHANGES: list[dict[str, Any]] = [
    {},
    {"saves": {1: SPEC}},
    {"loads": {2: SPEC}},
    {"cancel": [3]},
    {"idle": True},
    {"weights_asked": 4},
    {"void": ([5], [6])},
    {"idle": True, "void": ([5], [6])},
    {"saves": {1: SPEC}, "loads": {2: SPEC}, "cancel": [3], "idle": True, "weights_asked": 4},
]


def told(metadata: OmniConnectorMetadata) -> dict[str, Any]:
    """Its fields; of jobs the numbers and blocks."""
    values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    for name in ("saves", "loads"):
        values[name] = {job: spec.held for job, spec in values[name].items()}
    return values


def test_each_field_is_tried_by_itself() -> None:
    tried = {name for each in CHANGES for name in each if len(each) == 1}
    assert tried == {field.name for field in fields(OmniConnectorMetadata)}


@pytest.mark.parametrize("changes", CHANGES, ids=lambda each: "-".join(each) or "nothing")
def test_a_worker_gets_what_the_scheduler_half_tells(changes: dict[str, Any]) -> None:
    metadata = OmniConnectorMetadata(**changes)
    got = pickle.loads(pickle.dumps(metadata, 5))  # noqa: S301 - our own bytes
    assert type(got) is OmniConnectorMetadata
    assert told(got) == told(metadata)


def test_workers_of_two_steps_share_nothing() -> None:
    content = pickle.dumps(OmniConnectorMetadata(), 5)
    first, second = (pickle.loads(content) for _ in range(2))  # noqa: S301 - our own bytes
    first.saves[1] = SPEC
    assert not second.saves
