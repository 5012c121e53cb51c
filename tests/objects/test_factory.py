# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_connector.errors import ConfigError, MissingDependencyError
from omni_connector.net.runtime import of_kernel
from omni_connector.objects import mooncake_store
from omni_connector.objects.base import OmniConnector
from omni_connector.objects.factory import ConnectorSpec, OmniConnectorFactory, settings_of
from omni_connector.objects.mooncake_store import MooncakeStoreConnector
from omni_connector.objects.shm import SharedMemoryConnector

STORES = ("MooncakeStoreConnector", "MooncakeConnector")


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(
        OmniConnectorFactory, "_constructors", dict(OmniConnectorFactory._constructors)
    )
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(place))


@pytest.fixture
def made_stores(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each store that would be connected to."""
    made: list[dict[str, Any]] = []

    class Recorded(MooncakeStoreConnector):
        def __new__(cls, **settings: Any) -> Any:
            made.append(settings)

    monkeypatch.setattr(mooncake_store, "MooncakeStoreConnector", Recorded)
    return made


def create(name: str, **extra: Any) -> OmniConnector:
    return OmniConnectorFactory.create_connector(ConnectorSpec(name, extra))


def test_the_names_that_users_configure_are_listed() -> None:
    names = OmniConnectorFactory.list_registered_connectors()
    assert {"SharedMemoryConnector", "MooncakeTransferEngineConnector", *STORES} <= set(names)
    assert names == sorted(names)


def test_shared_memory_needs_no_settings(place: Path) -> None:
    with OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnector")) as made:
        assert isinstance(made, SharedMemoryConnector)
        assert made.health()["folder"] == str(of_kernel(place / "default"))
        assert made.supports_raw_data is False


def test_settings_of_shared_memory_arrive(place: Path) -> None:
    settings = {"namespace": "team", "object_gib": 0.125, "object_timeout": 2.5, "peer_timeout": 1}
    with create("SharedMemoryConnector", **settings) as made:
        assert isinstance(made, SharedMemoryConnector)
        assert made.health()["folder"] == str(of_kernel(place / "team"))
        assert made.object_timeout == 2.5
        assert made.health()["free_object_bytes"] == 128 << 20


def test_settings_of_models_and_stages_are_left_to_them(caplog: pytest.LogCaptureFixture) -> None:
    added = {"stage_id": 1, "role": "sender", "from_stage": 0, "to_stage": 1}
    with caplog.at_level("INFO", "omni_connector.objects.factory"):
        create("SharedMemoryConnector", codec_chunk_frames=25, **added).close()
    assert "codec_chunk_frames" in caplog.text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"object_gb": 1}, "did you mean 'object_gib'"),
        ({"object_gib": "1"}, "object_gib"),
        ({"object_gib": 0}, "object_gib must be a positive number"),
        ({"object_gib": float("nan")}, "object_gib must be a positive number"),
        ({"peer_timeout": 0}, "timeouts must be positive"),
        ({"peer_timeout": float("nan")}, "timeouts must be positive"),
        ({"object_timeout": float("inf")}, "timeouts must be positive"),
        ({"buffer_ttl_seconds": "1"}, "buffer_ttl_seconds"),
        ({"buffer_ttl_seconds": float("nan")}, "buffer_ttl_seconds must be a number"),
        ({"namespace": 5}, "namespace"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        create("SharedMemoryConnector", **extra)
    assert isinstance(failure.value, ConfigError)


@pytest.mark.parametrize("name", STORES)
def test_settings_of_the_store_arrive(name: str, made_stores: list[dict[str, Any]]) -> None:
    settings = {"master": "10.0.0.1:50051", "protocol": "rdma", "device": "mlx5_0", "host": "h"}
    settings |= {"metadata_server": "http://m", "segment_gib": 2, "buffer_mib": 8}
    settings |= {"namespace": "team", "object_timeout": 3}
    create(name, stage_id=1, role="sender", buffer_ttl_seconds=300, **settings)
    assert made_stores == [settings]


def test_settings_of_the_store_have_the_names_of_vllm_omni(
    made_stores: list[dict[str, Any]],
) -> None:
    create(
        "MooncakeStoreConnector",
        host="127.0.0.1",
        metadata_server="http://127.0.0.1:8080/metadata",
        master="127.0.0.1:50051",
        segment=512 << 20,
        localbuf=64 << 20,
        proto="tcp",
        rdma="",
    )
    (made,) = made_stores
    assert (made["segment_gib"], made["buffer_mib"]) == (0.5, 64)
    assert (made["protocol"], made["device"], made["host"]) == ("tcp", "", "127.0.0.1")
    assert made["metadata_server"] == "http://127.0.0.1:8080/metadata"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"metadata_serve": "x"}, "did you mean 'metadata_server'"),
        ({"protocol": "udp"}, "protocol"),
        ({"segment": "512MB"}, "segment_gib"),
        ({"segment": 1, "segment_gib": 1}, "'segment' and 'segment_gib' say the same"),
        ({"object_timeout": 0}, "object_timeout must be positive"),
        *(({"segment_gib": each}, "segment_gib") for each in (float("nan"), float("inf"), -1)),
    ],
)
@pytest.mark.parametrize("name", STORES)
def test_wrong_settings_of_the_store_are_refused_by_name(
    name: str, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        create(name, **extra)


@pytest.mark.parametrize("name", STORES)
def test_store_without_mooncake_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(MissingDependencyError, match="pip install mooncake-transfer-engine"):
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


@pytest.mark.parametrize("name", ["Mine", "SharedMemoryConnector", "MooncakeConnector"])
def test_taken_name_is_a_value_error(name: str) -> None:
    OmniConnectorFactory.register_connector("Mine", lambda extra: SharedMemoryConnector())
    with pytest.raises(ValueError, match="registered already"):
        OmniConnectorFactory.register_connector(name, lambda extra: SharedMemoryConnector())


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown connector 'Shared'; did you mean 'Shared"):
        create("Shared")


def test_settings_are_the_arguments_of_the_constructor() -> None:
    settings = settings_of(SharedMemoryConnector)
    assert settings.__struct_fields__ == (
        "namespace",
        "object_gib",
        "object_timeout",
        "peer_timeout",
        "buffer_ttl_seconds",
    )
    with SharedMemoryConnector() as plain, create("SharedMemoryConnector") as made:
        assert plain.object_timeout == made.object_timeout
        assert plain.health()["free_object_bytes"] == made.health()["free_object_bytes"]
