# SPDX-License-Identifier: Apache-2.0
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from omni_connector.errors import ConfigError, MissingDependencyError
from omni_connector.transports import ConnectorSpec, OmniConnector, OmniConnectorFactory, registry
from omni_connector.transports.shm import SharedMemoryConnector

MOONCAKE = ("MooncakeStoreConnector", "MooncakeConnector", "MooncakeTransferEngineConnector")


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(
        OmniConnectorFactory, "_constructors", dict(OmniConnectorFactory._constructors)
    )
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(place))


def create(name: str, **extra: Any) -> OmniConnector:
    return OmniConnectorFactory.create_connector(ConnectorSpec(name, extra))


def test_the_names_that_users_configure_are_listed() -> None:
    names = OmniConnectorFactory.list_registered_connectors()
    assert {"SharedMemoryConnector", "shm", *MOONCAKE} <= set(names)
    assert names == sorted(names)


def test_shared_memory_needs_no_settings(place: Path) -> None:
    with OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnector")) as made:
        assert isinstance(made, SharedMemoryConnector)
        assert made.folder == place / "default"
        assert made.supports_raw_data is False


def test_settings_of_shared_memory_arrive(place: Path) -> None:
    settings = {"namespace": "team", "object_gib": 0.125, "object_timeout": 2.5, "peer_timeout": 1}
    with create("SharedMemoryConnector", **settings) as made:
        assert isinstance(made, SharedMemoryConnector)
        assert made.folder == place / "team"
        assert made.object_timeout == 2.5
        assert made.health()["free_object_slots"] == 128


def test_two_connectors_of_a_pipeline_meet() -> None:
    with create("SharedMemoryConnector") as sender, create("SharedMemoryConnector") as receiver:
        assert sender.put(0, 1, "key", {"a": 1})[0]
        found = receiver.get("0", "1", "key")
        assert found is not None
        assert found[0] == {"a": 1}


def test_settings_that_pipelines_add_are_no_error() -> None:
    added = {"stage_id": 1, "role": "sender", "from_stage": 0, "to_stage": 1}
    create("SharedMemoryConnector", shm_threshold_bytes=65536, **added).close()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"object_gb": 1}, "did you mean 'object_gib'"),
        ({"object_gib": "1"}, "object_gib"),
        ({"object_gib": 0}, "object_gib must be a positive number"),
        ({"object_gib": float("nan")}, "object_gib must be a positive number"),
        ({"peer_timeout": 0}, "timeouts must be positive"),
        ({"namespace": 5}, "namespace"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        create("SharedMemoryConnector", **extra)
    assert isinstance(failure.value, ConfigError)


@pytest.mark.parametrize("name", MOONCAKE)
def test_mooncake_says_that_it_is_not_there(name: str) -> None:
    with pytest.raises(MissingDependencyError, match=f"{name} is not in this version"):
        create(name)


def test_registered_connector_is_made_with_its_settings() -> None:
    seen: list[dict[str, Any]] = []

    def construct(extra: dict[str, Any]) -> OmniConnector:
        seen.append(extra)
        return SharedMemoryConnector()

    OmniConnectorFactory.register_connector("Mine", construct)
    spec = ConnectorSpec("Mine", {"x": 1})
    OmniConnectorFactory.create_connector(spec).close()
    assert seen == [{"x": 1}]
    assert seen[0] is not spec.extra
    assert "Mine" in OmniConnectorFactory.list_registered_connectors()


@pytest.mark.parametrize("name", ["Mine", "SharedMemoryConnector", "MooncakeConnector", "shm"])
def test_taken_name_is_a_value_error(name: str) -> None:
    OmniConnectorFactory.register_connector("Mine", lambda extra: SharedMemoryConnector())
    with pytest.raises(ValueError, match="registered already"):
        OmniConnectorFactory.register_connector(name, lambda extra: SharedMemoryConnector())


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown connector 'Shared'; known are .*SharedMemory"):
        create("Shared")


def test_transport_of_a_package_is_made_by_its_name(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    point = EntryPoint(
        "owl", "omni_connector.transports.shm:SharedMemoryConnector", registry.ENTRY_POINT_GROUP
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    with create("owl", namespace="nest") as made:
        assert isinstance(made, SharedMemoryConnector)
        assert made.folder == place / "nest"
    with pytest.raises(ConfigError, match=r"owl.*nonsense"):
        create("owl", nonsense=1)
