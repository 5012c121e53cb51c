# SPDX-License-Identifier: Apache-2.0
"""The phases of a request. The simulation shows that vLLM goes no ways that the table lacks."""

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.prefix.hints import Hints
from omni_connector.requests.phases import WAYS, Phase
from omni_connector.requests.state import RequestState
from omni_connector.runtime.trace import NO_TRACE, FileTrace, spans

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "requests.md"


def state() -> RequestState:
    return RequestState(SimpleNamespace(request_id="r"), Hints())


def test_every_phase_is_reached_and_ends() -> None:
    assert set(WAYS) == set(Phase)
    reached = {Phase.ARRIVED}
    for _ in Phase:
        reached |= {way for phase in reached for way in WAYS[phase]}
    assert reached == set(Phase)
    assert all(Phase.ENDED in WAYS[phase] for phase in Phase if phase is not Phase.ENDED)
    assert not WAYS[Phase.ENDED]


def test_a_way_that_the_table_lacks_is_logged_with_both_phases(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_connector.requests.state.logger", logging.getLogger("requests"))
    each = state()
    each.enter(Phase.ROOM, NO_TRACE)
    each.enter(Phase.ROOM, NO_TRACE)  # it is in it
    each.enter(Phase.LOAD, NO_TRACE)
    assert not caplog.records
    each.enter(Phase.COMPUTING, NO_TRACE)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "'load'" in record.getMessage()
    assert "'computing'" in record.getMessage()
    assert each.phase is Phase.COMPUTING  # the request is served all the same


@pytest.mark.parametrize(
    ("half", "name"), [("send", "prefill"), ("fetch", "decode"), (None, "computing")]
)
def test_phases_are_spans_one_after_the_other(half: Any, name: str, tmp_path: Path) -> None:
    trace = FileTrace(str(tmp_path), "engine", "scheduler")
    each = state()
    if half is not None:
        setattr(each, half, object())
    for phase in (Phase.ROOM, Phase.LOAD, Phase.SCHEDULING, Phase.COMPUTING, Phase.ENDED):
        each.enter(phase, trace)
    trace.close()
    found = [span for _, span in spans(tmp_path) if span.ph == "X"]
    assert [span.name for span in found] == ["room", "load", "scheduling", name]
    assert {span.id for span in found} == {"r"}
    for one, following in itertools.pairwise(found):
        assert one.ts + one.dur == pytest.approx(following.ts, rel=0, abs=1)


def test_the_page_has_the_table() -> None:
    rows = [
        f"| `{phase}` | {', '.join(f'`{way}`' for way in Phase if way in WAYS[phase] - {phase})} |"
        for phase in Phase
    ]
    assert "\n".join(rows) in PAGE.read_text()
