# SPDX-License-Identifier: Apache-2.0
"""Which transport reads which peer, and what is said of it."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from omni_connector.arena.arena import Arena
from omni_connector.config import MooncakeSettings, OmniConfig
from omni_connector.errors import (
    ConfigError,
    MissingDependencyError,
    PeerRefusedError,
    TransportError,
)
from omni_connector.transports import choice
from omni_connector.transports.base import Endpoint
from omni_connector.transports.choice import Choice, Transports, make_transports
from omni_connector.transports.mooncake import transport as mooncake_module
from omni_connector.transports.mooncake.transport import MooncakeTransport
from omni_connector.transports.shm import SharedMemoryTransport
from tests import inspection


def shm_endpoint(address: str) -> Endpoint:
    return Endpoint(transport="shm", address=address, epoch=bytes(16), n_slots=1, slot_bytes=4096)


MOONCAKE = Endpoint(
    transport="mooncake",
    address="tcp://127.0.0.1:15000/1000",
    epoch=bytes(16),
    n_slots=1,
    slot_bytes=4096,
)


@pytest.fixture
def both(place: Path) -> Iterator[Transports]:
    """Shared memory in a folder of its own, and Mooncake, which nothing here starts."""
    readers = [SharedMemoryTransport(folder=place), MooncakeTransport()]
    transports = Transports(readers, readers[:1])
    yield transports
    transports.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(1, 4096) as arena:
        yield arena


def test_shared_memory_where_the_peer_listens_in_our_folder(both, place, arena) -> None:
    with SharedMemoryTransport(folder=place) as peer:
        endpoints = (peer.export(arena, "a"), MOONCAKE)
        assert both.choose(endpoints)[1] == endpoints[0]
        assert both.choose(endpoints)[1] == endpoints[0]
        [choice] = both.take_choices()
        assert choice == Choice(
            "shm", endpoints[0].address, "nearest", "same kernel, user and runtime folder"
        )
    assert not both.take_choices()


def test_mooncake_where_the_folder_is_another(both, place, arena) -> None:
    other = place / "other"
    other.mkdir(mode=0o700)
    with SharedMemoryTransport(folder=other) as peer:
        endpoints = (peer.export(arena, "a"), MOONCAKE)
        assert both.choose(endpoints)[1] == MOONCAKE
    [choice] = both.take_choices()
    assert choice.reason == "nearer_ones_cannot"
    assert choice.why == "shm: another host, user or runtime folder"


def test_mooncake_where_nobody_listens_here(both, place, arena) -> None:
    """As in a folder that several hosts mount, or with the socket of an engine that was killed."""
    with SharedMemoryTransport(folder=place) as peer:
        address = Path(peer.export(arena, "a").address)
        kept = address.with_name("a-" + "0" * 24 + ".sock")
        address.rename(kept)
    endpoints = (shm_endpoint(str(kept)), MOONCAKE)
    assert both.choose(endpoints)[1] == MOONCAKE
    assert both.take_choices()[0].why == "shm: nobody listens there on this host"


def test_the_only_way_is_tried_whatever_speaks_against_it(both, place) -> None:
    alone = (shm_endpoint(str(place / "a-000000000000000000000000.sock")),)
    assert both.choose(alone)[1] == alone[0]


def test_a_peer_that_no_transport_reaches(both) -> None:
    other = Endpoint(
        transport="pigeon", address="loft", epoch=bytes(16), n_slots=1, slot_bytes=4096
    )
    with pytest.raises(PeerRefusedError, match="by pigeon, this engine reads by shm, mooncake"):
        both.choose((other,))
    with pytest.raises(PeerRefusedError, match="by no transport"):
        both.choose(())
    assert not both.take_choices()


def test_a_single_transport_is_configured_only_where_it_was_named(place) -> None:
    reader = SharedMemoryTransport(folder=place)
    for configured, reason in ((True, "configured"), (False, "nearest")):
        transports = Transports([reader], [reader], configured=configured)
        transports.choose((shm_endpoint("/anywhere"), MOONCAKE))
        assert transports.take_choices()[0].reason == reason
    reader.close()


def test_an_export_that_fails_leaves_none(place, arena, monkeypatch) -> None:
    shm, mooncake = SharedMemoryTransport(folder=place), MooncakeTransport()

    def fail(arena: Arena, name: str) -> Endpoint:
        raise TransportError("no")

    monkeypatch.setattr(mooncake, "export", fail)
    transports = Transports([shm, mooncake], [shm, mooncake])
    with pytest.raises(TransportError, match="no"):
        transports.export(arena, "a")
    assert shm.details()["exports"] == 0
    transports.close()


@pytest.mark.parametrize(
    ("settings", "readers", "exporters"),
    [
        ({}, ["shm"], ["shm"]),
        ({"transport": "shm", "peers": ["10.0.0.1"]}, ["shm"], ["shm"]),
        ({"transport": "mooncake"}, ["mooncake"], ["mooncake"]),
        ({"peers": ["10.0.0.1"]}, ["shm", "mooncake"], ["shm"]),
        ({"listen": "127.0.0.1:0"}, ["shm", "mooncake"], ["shm", "mooncake"]),
    ],
)
def test_what_a_configuration_asks_for(settings, readers, exporters, place, monkeypatch) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(place))
    transports = make_transports(OmniConfig.load(settings))
    with ExitStack() as stack:
        stack.callback(transports.close)
        assert [each.transport for each in inspection.readers(transports)] == readers
        assert [each.transport for each in inspection.exporters(transports)] == exporters


def test_who_offers_nothing_is_not_read_from_other_hosts(place, monkeypatch) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(place))
    config = OmniConfig.load({"listen": "127.0.0.1:0", "peers": ["127.0.0.1"]})
    with closing(make_transports(config, offers=False)) as transports:
        assert [each.transport for each in inspection.exporters(transports)] == ["shm"]


@pytest.mark.parametrize("settings", [{"peers": ["10.0.0.1"]}, {"transport": "mooncake"}])
def test_an_engine_that_needs_mooncake_does_not_start_without(settings, place, monkeypatch) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(place))
    for check in ("engine_module", "require_package"):
        monkeypatch.setattr(mooncake_module, check, no_module)
    with pytest.raises(MissingDependencyError, match="no wheel"):
        make_transports(OmniConfig.load(settings))
    make_transports(OmniConfig.load({})).close()


def no_module(family: str | None = None) -> None:
    raise MissingDependencyError("no wheel")


class OwlSettings(msgspec.Struct, frozen=True):
    wings: Annotated[int, msgspec.Meta(ge=2)] = 2
    name: str = "owl"


class Owl(SharedMemoryTransport):
    """Another package's transport."""

    transport = "owl"
    Settings = OwlSettings
    nearness = 50

    def __init__(self, *, namespace: str, wings: int, name: str) -> None:
        super().__init__(namespace=namespace)
        self.wings = wings


class FarOwl(Owl):
    transport = "far-owl"
    nearness = 200
    beyond_host = True


class ShyOwl(Owl):
    transport = "shy-owl"
    nearness = None


@pytest.fixture
def owls(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(place))
    monkeypatch.setattr(choice, "_registered", {})
    for kind in (Owl, FarOwl, ShyOwl):
        choice.register_transport(kind.transport, kind)


@pytest.mark.usefixtures("owls")
@pytest.mark.parametrize(
    ("settings", "readers", "exporters"),
    [
        ({}, ["shm", "owl"], ["shm", "owl"]),
        ({"transport": "shy-owl"}, ["shy-owl"], ["shy-owl"]),
        ({"peers": ["10.0.0.1"]}, ["shm", "owl", "mooncake", "far-owl"], ["shm", "owl"]),
        (
            {"listen": "127.0.0.1:0"},
            ["shm", "owl", "mooncake", "far-owl"],
            ["shm", "owl", "mooncake", "far-owl"],
        ),
    ],
)
def test_a_transport_is_a_candidate_of_auto_by_what_it_says_of_itself(
    settings, readers, exporters
) -> None:
    with closing(make_transports(OmniConfig.load(settings))) as transports:
        assert [each.transport for each in inspection.readers(transports)] == readers
        assert [each.transport for each in inspection.exporters(transports)] == exporters


@pytest.mark.usefixtures("owls")
def test_mooncake_is_not_needed_where_another_reaches_as_far(monkeypatch, caplog) -> None:
    monkeypatch.setattr(mooncake_module, "engine_module", no_module)
    with closing(make_transports(OmniConfig.load({"peers": ["10.0.0.1"]}))) as transports:
        names = [each.transport for each in inspection.readers(transports)]
    assert names == ["shm", "owl", "far-owl"]
    assert "'mooncake' is left out: no wheel" in caplog.text


@pytest.mark.usefixtures("owls")
def test_a_transport_gets_its_own_settings() -> None:
    for settings in (
        {"transport": "owl", "transport_config": {"wings": 4}},
        {"transport_config": {"owl": {"wings": 4}}},
    ):
        with closing(make_transports(OmniConfig.load(settings))) as transports:
            assert [
                each.wings for each in inspection.readers(transports) if isinstance(each, Owl)
            ] == [4]


@pytest.mark.usefixtures("owls")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "owl", "transport_config": {"wing": 4}}, "transport_config: .*'wings'"),
        ({"transport": "owl", "transport_config": {"wings": "x"}}, "`transport_config.wings`"),
        ({"transport": "owl", "transport_config": {"wings": 1}}, ">= 2.*transport_config.wings"),
        ({"transport": "shm", "transport_config": {"wings": 1}}, "transport_config: .*none"),
        ({"transport_config": {"owls": {}}}, "transport_config: .*did you mean 'owl'"),
        ({"transport_config": {"owl": {"wings": 1}}}, "`transport_config.owl.wings`"),
        ({"transport_config": {"owl": 5}}, "transport_config.owl must be an object"),
        (
            {
                "transport": "mooncake",
                "mooncake": {"timeout_s": 1.0},
                "transport_config": {"timeout_s": 2.0},
            },
            "mooncake and transport_config say the same",
        ),
    ],
)
def test_errors_of_settings_name_their_key(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make_transports(OmniConfig.load(settings))


@pytest.mark.parametrize("key", ["mooncake", "transport_config"])
def test_the_engine_is_configured_by_either_key(key) -> None:
    config = OmniConfig.load({"transport": "mooncake", key: {"timeout_s": 3.0, "host": "10.0.0.9"}})
    with closing(make_transports(config)) as transports:
        [mooncake] = inspection.readers(transports)
        assert mooncake._engine._settings == MooncakeSettings(timeout_s=3.0, host="10.0.0.9")


def test_a_candidate_that_is_broken_is_in_nobodys_way(place, monkeypatch, caplog) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(place))
    point = EntryPoint("owl", "no_such_module:Owl", choice.ENTRY_POINT_GROUP)
    monkeypatch.setattr(choice, "entry_points", lambda group: [point])
    with closing(make_transports(OmniConfig.load({}))) as transports:
        assert [each.transport for each in inspection.readers(transports)] == ["shm"]
    assert "'owl' is left out" in caplog.text
