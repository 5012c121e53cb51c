# SPDX-License-Identifier: Apache-2.0
"""What both halves trace of hand-offs."""

import itertools
from pathlib import Path

import pytest

from omni_connector.runtime.trace import NO_TRACE, Span, spans
from tests import inspection
from tests.toy import BLOCK, LAYERS, PAGE

from .harness import HANDOFF, assert_clean, hand_off, prompt
from .test_layers import announce

pytestmark = pytest.mark.vllm

PROMPT = prompt(5 * BLOCK - 3)


@pytest.fixture
def traced(engine, tmp_path):
    """Makes engines that trace, each to a folder of its name."""

    def make(role, name, **options):
        return engine(role, extra={"trace": str(tmp_path / name)}, **options)

    return make


def found(folder: Path, half: str) -> list[Span]:
    """The spans of one half, by their beginnings."""
    each = [span for _, span in spans(folder) if span.ph == "X" and span.cat == half]
    return sorted(each, key=lambda span: span.ts)


def ended(span: Span) -> float:
    """When a span ended, in µs, without the error of the sum: a trace tells nanoseconds."""
    return round(span.ts + span.dur, 3)


def test_a_handoff_is_traced_from_its_prefill_to_its_decode(traced, tokens, tmp_path):
    prefill, decode = traced("kv_producer", "p"), traced("kv_consumer", "d")
    prefill.runner.layer_computed = lambda layer: announce(prefill, layer)
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert_clean(prefill, decode)
    for each in (prefill, decode):
        each.shutdown()

    queued, computed, answer = found(tmp_path / "p", "scheduler")
    assert (queued.name, computed.name, answer.name) == ("queued", "prefill", "answer")
    assert len({queued.id, computed.id, answer.id}) == 1
    assert ended(computed) <= answer.ts

    (save,) = (span for span in found(tmp_path / "p", "worker0") if span.name == "save")
    parts = [span for span in found(tmp_path / "p", "worker0") if span.name == "save part"]
    assert save.args["blocks"] == 5
    assert sum(part.args["bytes"] for part in parts) == save.args["bytes"] == 5 * LAYERS * PAGE
    assert {part.args["job"] for part in parts} == {save.args["job"]}
    names = prefill.kv_config.kv_cache_groups[0].layer_names
    # Layers that the copy had no time for before the forward pass has ended are saved whole.
    assert {part.args.get("layer") for part in parts} <= {*names, None}
    assert all(save.ts <= part.ts <= ended(save) for part in parts)

    phases = found(tmp_path / "d", "scheduler")
    assert [span.name for span in phases] == ["lease", "room", "load", "scheduling", "decode"]
    for one, next_one in itertools.pairwise(phases):
        assert ended(one) <= next_one.ts

    copies = found(tmp_path / "d", "worker0")
    assert [span.name for span in copies if span.name != "load part"] == ["load", "attach"]
    load = copies[0]
    assert load.args["request"] == phases[0].id
    assert load.args["bytes"] == save.args["bytes"]
    loading = phases[2]
    assert loading.ts <= load.ts
    assert ended(load) <= ended(loading)


def test_nothing_of_a_prompt_is_traced(traced, tmp_path):
    prefill, decode = traced("kv_producer", "p"), traced("kv_consumer", "d")
    hand_off(prefill, decode, PROMPT)
    for each in (prefill, decode):
        each.shutdown()
    keys = {key for _, span in spans(tmp_path) for key in span.args}
    assert keys <= {
        *("name", "request", "job", "blocks", "bytes", "layer", "group", "failure", "transport")
    }


def test_the_phase_of_an_aborted_request_ends(traced, tmp_path):
    prefill = traced("kv_producer", "p")
    request_id = prefill.submit(PROMPT, params=HANDOFF)
    prefill.abort(request_id)
    prefill.settle()
    prefill.shutdown()
    assert [span.name for span in found(tmp_path / "p", "scheduler")] == ["queued"]


def test_a_folder_that_has_gone_breaks_no_handoff(traced, tokens, tmp_path):
    prefill, decode = traced("kv_producer", "p"), traced("kv_consumer", "d")
    for name in ("p", "d"):
        (tmp_path / name).rmdir()
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert_clean(prefill, decode)


def test_an_engine_that_traces_nothing_has_no_trace(engine):
    prefill = engine("kv_producer")
    assert inspection.traces(prefill.half, prefill.worker_half) == [NO_TRACE, NO_TRACE]
