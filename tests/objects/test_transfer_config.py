# SPDX-License-Identifier: Apache-2.0
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_connector.errors import ConfigError, MissingDependencyError
from omni_connector.objects.factory import ConnectorSpec
from omni_connector.objects.transfer_config import OmniTransferConfig, load_omni_transfer_config

PIPELINE: dict[str, Any] = {
    "model": "some/model",
    "connectors": {
        "local": {"name": "SharedMemoryConnector", "extra": {"object_gib": 2}},
        "far": {"name": "MooncakeStoreConnector", "extra": {"host": "10.0.0.1"}},
        "plain": {"name": "SharedMemoryConnector"},
    },
    "stages": [
        {"stage_id": 0, "output_connectors": {"to_stage_1": "local"}, "devices": "0"},
        {
            "stage_id": 1,
            "input_connectors": {"from_stage_0": "local"},
            "output_connectors": {"to_stage_2": "far"},
        },
        {"stage_id": 2, "engine_input_source": [1, 0]},
    ],
}
LOCAL = ConnectorSpec("SharedMemoryConnector", {"object_gib": 2})
FAR = ConnectorSpec("MooncakeStoreConnector", {"host": "10.0.0.1"})
SHARED = ConnectorSpec("SharedMemoryConnector")

YAML = """
connectors:
  local: {name: SharedMemoryConnector, extra: {object_gib: 2}}
  far:
    name: MooncakeStoreConnector
    extra:
      host: 10.0.0.1
stages:
  - stage_id: 0
    output_connectors: {to_stage_1: local}
  - stage_id: 1
    input_connectors: {from_stage_0: local}
    output_connectors: {to_stage_2: far}
  - stage_id: 2
    engine_input_source: [1, 0]
"""


def load(**config: Any) -> OmniTransferConfig:
    found = load_omni_transfer_config(config_dict=config)
    assert found is not None
    return found


def stage(**fields: Any) -> dict[str, Any]:
    return {"stage_id": 0, **fields}


def test_edges_get_the_connectors_that_stages_name() -> None:
    found = load(**PIPELINE)
    assert found.connectors == {("0", "1"): LOCAL, ("1", "2"): FAR, ("0", "2"): SHARED}
    assert found.default_connector is None


def test_connector_of_an_edge() -> None:
    found = load(**PIPELINE)
    assert found.get_connector_for_edge(1, 2) == found.get_connector_for_edge("1", "2") == FAR
    assert found.get_connector_for_edge("2", "1") is None
    assert found.has_connector_for_edge("0", "1")
    assert not found.has_connector_for_edge("5", "6")
    found.default_connector = SHARED
    assert found.get_connector_for_edge("5", "6") == SHARED


@pytest.mark.parametrize("name", ["p.json", "p.yaml", "p.YML"])
def test_files_say_the_same_as_a_mapping(tmp_path: Path, name: str) -> None:
    if not name.endswith(".json"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(json.dumps(PIPELINE) if name.endswith(".json") else YAML)
    for given in (path, str(path)):
        assert load_omni_transfer_config(given) == load(**PIPELINE)
    assert load_omni_transfer_config(config_path=path, config_dict={}) == load(**PIPELINE)


def test_older_places_of_the_same_settings() -> None:
    old = {
        "runtime": {
            "connectors": PIPELINE["connectors"],
            "edges": [{"from": 0, "to": 1}, {"from": 2, "to": 3, "window_size": -1}],
        },
        "stage_args": PIPELINE["stages"],
    }
    wanted = {**load(**PIPELINE).connectors, ("2", "3"): SHARED}
    assert load(**old).connectors == wanted


def test_edge_without_a_connector_gets_shared_memory() -> None:
    found = load(stages=[stage()], edges=[{"from": 0, "to": "1"}, {"from": "a", "to": "b"}])
    assert found.connectors == {("0", "1"): SHARED, ("a", "b"): SHARED}


def test_connector_may_stand_where_its_name_would() -> None:
    inline = {"name": "SharedMemoryConnector", "extra": {"object_gib": 2}}
    found = load(stages=[stage(output_connectors={"to_stage_1": inline})])
    assert found.connectors == {("0", "1"): LOCAL}


def test_specs_do_not_share_settings() -> None:
    found = load(
        connectors=PIPELINE["connectors"],
        stages=[stage(output_connectors={"to_stage_1": "local", "to_stage_2": "local"})],
    )
    found.connectors["0", "1"].extra["object_gib"] = 5
    assert found.connectors["0", "2"] == LOCAL
    assert PIPELINE["connectors"]["local"]["extra"] == {"object_gib": 2}


def test_nothing_given_is_nothing() -> None:
    assert load_omni_transfer_config() is None
    assert load().connectors == {}
    assert load(connectors=None, stages=None).connectors == {}
    assert load(stages=[stage(output_connectors=None)]).connectors == {}


def test_settings_that_differ_between_the_two_stages_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = {"name": "SharedMemoryConnector", "extra": {"object_gib": 3}}
    stages = [
        stage(output_connectors={"to_stage_1": "local"}),
        {"stage_id": 1, "input_connectors": {"from_stage_0": other}},
    ]
    found = load(connectors=PIPELINE["connectors"], stages=stages)
    assert found.connectors == {("0", "1"): LOCAL}
    assert "edge 0 -> 1: its two stages give different settings" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**PIPELINE, "stages": [stage(output_connectors={"to_stage_1": "locl"})]},
            "0 -> 1 refers to connector 'locl', which is not defined; defined are: far, local",
        ),
        ({"stages": [stage(input_connectors={"from_stage_1": "x"})]}, "1 -> 0 .* are: none"),
        (
            {
                **PIPELINE,
                "stages": [
                    stage(output_connectors={"to_stage_1": "local"}),
                    {"stage_id": 1, "input_connectors": {"from_stage_0": "far"}},
                ],
            },
            "0 -> 1 has two types of connector: 'SharedMemoryConnector' and 'MooncakeStore",
        ),
        ({**PIPELINE, "stages": [stage(output_connectors={"stage_1": "local"})]}, "'stage_1'"),
        ({**PIPELINE, "stages": [stage(output_connectors={"to_stage_": "local"})]}, "to_stage_<"),
        ({**PIPELINE, "stages": [stage(input_connectors={"to_stage_1": "local"})]}, "from_stage_<"),
        ({"stages": [{}]}, "stage_id"),
        ({"stages": {"0": {}}}, "malformed.*stages"),
        ({"connectors": {"a": {"extra": {}}}}, "malformed.*name.*connectors"),
        ({"connectors": {"a": {"name": 5}}}, "malformed.*connectors"),
        ({"edges": [{"from": 0}]}, "malformed.*to.*edges"),
        ({"runtime": []}, "malformed.*runtime"),
        ({"edges": "\ud800"}, "malformed"),
    ],
)
def test_wrong_configuration_is_a_value_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        load(**config)
    assert isinstance(failure.value, ConfigError)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.toml", "", "must be a .json, .yaml or .yml file"),
        ("p.json", "{", "is not JSON"),
        ("p.json", "[]", "must hold a mapping, not list"),
        ("p.json", "[" * 100_000, "is not JSON"),
        ("p.yaml", "a: [", "is not YAML"),
        ("p.yaml", "[" * 10_000, "is not YAML"),
        ("p.json", b"\xff", "is no text"),
        ("p.yaml", "", "must hold a mapping, not NoneType"),
        ("p.yaml", "!!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_wrong_file_is_a_value_error(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        load_omni_transfer_config(path)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_omni_transfer_config(tmp_path / "none.json")


def test_yaml_without_pyyaml_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependencyError, match="PyYAML"):
        load_omni_transfer_config(path)
    (tmp_path / "p.json").write_text(json.dumps(PIPELINE))
    assert load_omni_transfer_config(tmp_path / "p.json") == load(**PIPELINE)


def test_a_file_takes_what_it_does_not_say_from_its_base(tmp_path: Path) -> None:
    base = {
        "connectors": {"c": {"name": "SharedMemoryConnector", "extra": {"a": 1, "b": {"x": 1}}}},
        "stages": [
            {"stage_id": 0, "output_connectors": {"to_stage_1": "c"}},
            {"stage_id": 1, "input_connectors": {"from_stage_0": "c"}},
        ],
    }
    own = {
        "base_config": "base.json",
        "connectors": {"c": {"extra": {"b": {"y": 2}}}, "d": {"name": "MooncakeConnector"}},
        "stages": [{"stage_id": 1, "output_connectors": {"to_stage_2": "d"}}],
    }
    (tmp_path / "base.json").write_text(json.dumps(base))
    (tmp_path / "own.json").write_text(json.dumps(own))
    found = load_omni_transfer_config(tmp_path / "own.json")
    assert found is not None
    assert found.connectors == {
        ("0", "1"): ConnectorSpec("SharedMemoryConnector", {"a": 1, "b": {"x": 1, "y": 2}}),
        ("1", "2"): ConnectorSpec("MooncakeConnector"),
    }


@pytest.mark.parametrize("base", ["own.json", "./own.json", "other.json"])
def test_a_file_that_is_its_own_base_is_refused(tmp_path: Path, base: str) -> None:
    for name, other in (("own.json", base), ("other.json", "own.json")):
        (tmp_path / name).write_text(json.dumps({"base_config": other}))
    with pytest.raises(ConfigError, match="based on itself"):
        load_omni_transfer_config(tmp_path / "own.json")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        *(({"stages": each}, "stage_id") for each in (5, [5], [{}], [{"stage_id": [1]}])),
        *(({"connectors": each}, "malformed") for each in (5, [5], {"c": 5})),
    ],
)
def test_a_base_that_makes_no_sense_is_refused(
    tmp_path: Path, base: dict[str, Any], message: str
) -> None:
    (tmp_path / "base.json").write_text(json.dumps(base))
    (tmp_path / "own.json").write_text(json.dumps({"base_config": "base.json"}))
    with pytest.raises(ConfigError, match=message):
        load_omni_transfer_config(tmp_path / "own.json")
