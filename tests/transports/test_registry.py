# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from omni_connector.errors import ConfigError, MissingDependencyError
from omni_connector.transports import choice
from omni_connector.transports.choice import (
    ENTRY_POINT_GROUP,
    register_transport,
    transport_class,
    transport_names,
)
from omni_connector.transports.shm import SharedMemoryTransport


class Pigeon(SharedMemoryTransport):
    transport = "pigeon"


@pytest.fixture(autouse=True)
def _no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_registered", {})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that a package could have brought; tests write its source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "omni_test_transport.py"
    sys.modules.pop("omni_test_transport", None)


def offer(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = EntryPoint(name, value, ENTRY_POINT_GROUP)
    monkeypatch.setattr(choice, "entry_points", lambda group: [point])


def test_our_transports_are_there() -> None:
    assert transport_class("shm") is SharedMemoryTransport
    assert transport_class("mooncake").transport == "mooncake"
    assert transport_names() == ["mooncake", "shm"]


def test_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'shm'"):
        transport_class("smh")


def test_registered_class_is_found() -> None:
    for _ in range(2):
        register_transport("pigeon", Pigeon)
    assert transport_class("pigeon") is Pigeon
    assert "pigeon" in transport_names()


@pytest.mark.parametrize("name", ["shm", "auto", "pigeon", "mooncake_store"])
def test_taken_name_is_refused(name: str) -> None:
    register_transport("pigeon", Pigeon)
    with pytest.raises(ConfigError, match="exists already"):
        register_transport(name, SharedMemoryTransport)
    assert transport_class("shm") is SharedMemoryTransport


def test_transport_of_a_package_is_found(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text(
        "from omni_connector.transports.shm import SharedMemoryTransport\n"
        "class Owl(SharedMemoryTransport):\n    transport = 'owl'\n"
    )
    offer(monkeypatch, "owl", "omni_test_transport:Owl")
    assert transport_names() == ["mooncake", "owl", "shm"]
    assert "omni_test_transport" not in sys.modules
    assert transport_class("owl").transport == "owl"
    with pytest.raises(ConfigError, match="exists already"):
        register_transport("owl", Pigeon)


def test_package_cannot_take_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "shm", "os:path")
    assert transport_class("shm") is SharedMemoryTransport


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all", "needs the module 'no_such_module_at_all'"),
        ("raise ImportError('libibverbs.so.1: cannot open shared object file')", "libibverbs"),
        ("", "Owl"),
    ],
)
def test_missing_dependency_is_named(
    module: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    module.write_text(source)
    offer(monkeypatch, "owl", "omni_test_transport:Owl")
    with pytest.raises(MissingDependencyError, match=message) as failure:
        transport_class("owl")
    assert "'owl'" in str(failure.value)
    assert transport_class("shm") is SharedMemoryTransport


def test_what_is_no_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("os:getcwd", "pathlib:Path"):
        offer(monkeypatch, "owl", value)
        with pytest.raises(ConfigError, match="no ArenaTransport"):
            transport_class("owl")


def test_the_store_is_no_transport_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "mooncake_store", "os:getcwd")  # as an older version of ours did
    with pytest.raises(ConfigError, match="configure it as `store`"):
        transport_class("mooncake_store")
    assert "mooncake_store" not in transport_names()
