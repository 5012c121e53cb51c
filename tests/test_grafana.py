# SPDX-License-Identifier: Apache-2.0
"""The dashboard in the wheel asks for the metrics that there are, and for all of them."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector import cli

pytestmark = pytest.mark.vllm

TEXT = (Path(cli.__file__).parent / "dashboards" / "grafana.json").read_text(encoding="utf-8")
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(TEXT)


@pytest.fixture(scope="module")
def registered() -> dict[str, set[str]]:
    """The names of the samples of each metric that the connector registers with vLLM."""
    prometheus = pytest.importorskip("prometheus_client")
    metrics = pytest.importorskip("omni_connector.vllm_v1.metrics")
    registry = prometheus.CollectorRegistry()
    kinds = (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)
    metric_types = {kind: partial(kind, registry=registry) for kind in kinds}
    transfer = SimpleNamespace(engine_id="a", kv_role="kv_both", kv_connector_extra_config={})
    parallel = SimpleNamespace(data_parallel_size=1)
    config: Any = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
    metrics.OmniPromMetrics(config, metric_types, ["model_name", "engine"], {0: ["m", "0"]})
    return {
        family.name: {family.name + suffix for suffix in SUFFIXES[family.type]}
        for family in registry.collect()
    }


def panels(dashboard: Any) -> Iterator[Any]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions(dashboard: Any) -> list[str]:
    asked = [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", ())]
    return asked + [each["query"]["query"] for each in variables(dashboard, "query")]


def variables(dashboard: Any, kind: str) -> list[Any]:
    return [each for each in dashboard["templating"]["list"] if each["type"] == kind]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\bvllm:\w+", expression))


def test_every_name_that_it_asks_for_is_registered(
    dashboard: Any, registered: dict[str, set[str]]
) -> None:
    samples = set().union(*registered.values())
    for expression in expressions(dashboard):
        assert names(expression), expression
        assert names(expression) <= samples, expression


def test_every_metric_that_is_registered_is_on_it(
    dashboard: Any, registered: dict[str, set[str]]
) -> None:
    asked = set().union(*map(names, expressions(dashboard)))
    asked.add("vllm:omni_connector_engine_info")  # which joins names to others; it draws nothing
    unseen = {name for name, samples in registered.items() if not samples & asked}
    assert not unseen


def test_it_works_with_any_source_and_names_none(dashboard: Any) -> None:
    (source,) = variables(dashboard, "datasource")
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    asking = [panel for panel in panels(dashboard) if panel["type"] != "row"]
    for each in (*asking, *variables(dashboard, "query")):
        assert each["datasource"] == wanted, each
    assert dashboard["id"] is None


def test_its_panels_have_room_and_names_of_their_own(dashboard: Any) -> None:
    found = list(panels(dashboard))
    assert len({panel["id"] for panel in found}) == len(found)
    assert len({panel["title"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_each_expression_is_of_the_engines_that_were_chosen(dashboard: Any) -> None:
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            expression = target["expr"]
            selectors = re.findall(r"vllm:\w+(\{[^}]*\})?", expression)
            chosen = '{model_name=~"$model", instance=~"$instance", engine=~"$engine"}'
            assert selectors == [chosen] * len(selectors), expression


def test_engines_that_serve_one_model_are_told_apart(dashboard: Any) -> None:
    """vLLM's `engine` is a data-parallel rank, 0 in each `vllm serve`; `instance` is the scraped
    address, which Prometheus adds.
    """
    model, instance, engine = variables(dashboard, "query")
    asked = "label_values(vllm:omni_connector_handoffs_offered_total"
    of_model, of_both = '{model_name=~"$model"}', '{model_name=~"$model", instance=~"$instance"}'
    assert model["query"]["query"] == f"{asked}, model_name)"
    assert instance["query"]["query"] == f"{asked}{of_model}, instance)"
    assert engine["query"]["query"] == f"{asked}{of_both}, engine)"
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            if "by (model_name" in target["expr"]:
                parts = re.findall(r"by \((model_name[^)]*)\)", target["expr"])
                assert set(parts) == {"model_name, instance, engine"}
                assert target["legendFormat"] == "{{model_name}} {{instance}} {{engine}}"
