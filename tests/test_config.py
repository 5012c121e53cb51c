# SPDX-License-Identifier: Apache-2.0
"""`OmniConfig`: where values come from, and what is refused in which words."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_connector.config import (
    _GONE,
    _GONE_HINTS,
    FileStoreSettings,
    OmniConfig,
    StoreSettings,
)
from omni_connector.errors import ConfigError

GIB = 1 << 30
ROOT = Path(__file__).parents[1]


def load(extra: dict[str, Any] | None = None, **environ: str) -> OmniConfig:
    return OmniConfig.load(extra, environ)


@pytest.mark.parametrize("extra", [None, {}])
def test_without_configuration_the_documented_defaults_hold(extra: dict[str, Any] | None) -> None:
    config = load(extra)
    assert config == OmniConfig()
    assert (config.transport, config.namespace, config.integrity) == ("auto", "default", "full")
    assert (config.handoff_ttl_s, config.load_timeout_s) == (120.0, 30.0)
    assert config.arena_gib is None
    assert config.model_id is None


def test_the_page_gives_the_defaults_that_hold() -> None:
    page = ROOT / "docs" / "configuration.md"
    declared = {field.encode_name: field.default for field in msgspec.structs.fields(OmniConfig)}
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.read_text(), re.MULTILINE)
    given = {key: default.strip("` ") for key, default in rows if key in declared}
    assert {"share", "integrity", "handoff_ttl_s"} <= given.keys()
    for key, default in given.items():
        if isinstance(declared[key], bool | float | str):
            assert default == json.dumps(declared[key]).strip('"').removesuffix(".0"), key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transport", "shm"),
        ("arena_gib", 0.5),
        ("namespace", "team-a_1.x"),
        ("model_id", "llama@v2"),
        ("handoff_ttl_s", 3.5),
        ("arena_wait_s", 2),
        ("load_timeout_s", 7),
        ("min_handoff_tokens", 64),
        ("integrity", "generation"),
        ("weights", "fixed"),
        ("trace", "/tmp/spans"),
    ],
)
def test_a_key_is_read_from_the_config_and_from_the_environment(key: str, value: Any) -> None:
    assert getattr(load({key: value}), key) == value
    assert getattr(load(**{f"OMNI_CONNECTOR_{key.upper()}": str(value)}), key) == value


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        ("", ()),
        (" ", ()),
        ("10.0.0.1", ("10.0.0.1",)),
        ("10.0.0.0/8, node-7,fd00::1", ("10.0.0.0/8", "node-7", "fd00::1")),
    ],
)
def test_a_list_in_the_environment_is_separated_by_commas(text: str, peers: tuple[str]) -> None:
    assert load(OMNI_CONNECTOR_PEERS=text).peers == peers
    assert load({"peers": list(peers)}).peers == peers


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "*", ""])
def test_a_peer_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="peers: "):
        load({"peers": [entry]})
    with pytest.raises(ConfigError, match="peers: "):
        load(OMNI_CONNECTOR_PEERS=f"node,{entry}")


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:5600"])
def test_on_loopback_a_port_needs_no_key(listen: str) -> None:
    assert load({"listen": listen}).listen == listen
    assert load(OMNI_CONNECTOR_LISTEN=listen).listen == listen
    assert load().listen is None


@pytest.mark.parametrize("listen", ["10.0.0.1:5600", "[fd00::1]:0", "node-7:5600", "localhost:0"])
def test_any_other_port_needs_a_key(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"key_file.*omni-connector keygen"):
        load({"listen": listen})
    assert load({"listen": listen, "key_file": "/k"}).key_file == "/k"
    assert load({"listen": listen}, OMNI_CONNECTOR_KEY_FILE="/k").key_file == "/k"


@pytest.mark.parametrize("listen", ["0.0.0.0:5600", "[::]:5600", "*:5600", ":5600", "5600", ""])
def test_a_port_at_every_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="name the address that peers shall use"):
        load({"listen": listen, "key_file": "/k"})


def test_the_config_wins_over_the_environment() -> None:
    config = load({"namespace": "a"}, OMNI_CONNECTOR_NAMESPACE="b", OMNI_CONNECTOR_ARENA_GIB="2")
    assert (config.namespace, config.arena_gib) == ("a", 2.0)


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_NAMESPACE", "from-env")
    assert OmniConfig.load({}).namespace == "from-env"


def test_variables_that_are_no_keys_are_left_alone() -> None:
    assert load(OMNI_CONNECTOR_RUNTIME_DIR="/x", PATH="/bin", OMNI_CONNECTORS="?") == OmniConfig()


@pytest.mark.parametrize("key", sorted(_GONE))
def test_a_key_of_an_earlier_version_is_a_warning_that_says_what_became_of_it(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load({key: object()}) == load(**{f"OMNI_CONNECTOR_{key.upper()}": "?"}) == OmniConfig()
    assert [each.getMessage().partition(": ")[2] for each in caplog.records] == 2 * [
        f"the key {key!r} is not there any more: {_GONE[key]}"
    ]


@pytest.mark.parametrize("name", ["", "PREFILL_"])
def test_what_kubernetes_tells_of_a_service_is_left_alone(name: str) -> None:
    """Of a Service `omni-connector`, or `omni-connector-prefill`."""
    tcp = f"{name}PORT_5600_TCP"
    keys = [f"{name}SERVICE_{each}" for each in ("HOST", "PORT", "PORT_HTTP")]
    keys += [f"{name}PORT", tcp, *(f"{tcp}_{each}" for each in ("PROTO", "PORT", "ADDR"))]
    environ = {f"OMNI_CONNECTOR_{key}": "tcp://10.0.0.1:5600" for key in keys}
    assert load(OMNI_CONNECTOR_NAMESPACE="a", **environ) == load({"namespace": "a"})
    del environ[f"OMNI_CONNECTOR_{name}SERVICE_HOST"]
    with pytest.raises(ConfigError, match="unknown key"):
        load(**environ)


def test_keys_that_vllm_adds_are_left_alone() -> None:
    assert load({"engine_id": "abc"}) == OmniConfig()


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("arena_gb", "arena_gib"),
        ("name_space", "namespace"),
        ("handoff_ttl", "handoff_ttl_s"),
        ("integrty", "integrity"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_all_known_ones(unknown: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"unknown key '{unknown}'; did you mean '{nearest}'"
    ) as e:
        load({unknown: 1})
    assert all(key in str(e.value) for key in OmniConfig.__struct_fields__)


def test_an_unknown_key_with_no_likeness_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="unknown key '0'"):
        load({"0": 1})


@pytest.mark.parametrize(
    ("key", "home"),
    [
        ("lookup_timeout_s", "`store`"),
        ("timeout_s", "`mooncake`"),
        ("protocol", "`mooncake` and `store`"),
    ],
)
def test_a_key_of_an_object_that_stands_outside_is_told_where_it_belongs(
    key: str, home: str
) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; it is a key of {home}$"):
        load({key: 1})
    with pytest.raises(ConfigError, match=f"it is a key of {home}$"):
        load(**{f"OMNI_CONNECTOR_{key.upper()}": "1"})


@pytest.mark.parametrize(
    ("store", "needed"),
    [
        ({}, "`path` (a folder) or `master` (a Mooncake Store)"),
        ({"lookup_timeout_s": 1}, "`path` (a folder) or `master` (a Mooncake Store)"),
        ({"gib": 5}, "`path` (a folder)"),
        ({"segment_gib": 1}, "`master` (a Mooncake Store)"),
    ],
)
def test_a_store_that_is_none_yet_is_told_what_it_needs(store: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"store needs {needed}") + "$"):
        load({"store": store})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "224.0.0.1", "a b"])
def test_an_address_of_mooncake_that_peers_do_not_reach_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"mooncake\.host: peers do not reach"):
        load({"mooncake": {"host": host}})
    assert load({"mooncake": {"host": "10.0.0.1"}}).mooncake.host == "10.0.0.1"


def test_an_unknown_variable_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"OMNI_CONNECTOR_ARENA_GB.*did you mean 'arena_gib'"):
        load(OMNI_CONNECTOR_ARENA_GB="1")


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("transport", None, "a string"),
        ("mooncake", "tcp", "an object"),
        ("integrity", "none", "'full' or 'generation'"),
        ("arena_gib", "8", "a number or null"),
        ("arena_gib", True, "a number or null"),
        ("handoff_ttl_s", [], "a number"),
        ("handoff_ttl_s", None, "a number"),
        ("namespace", 3, "a string"),
        ("model_id", 3, "a string or null"),
        ("listen", 5600, "a string or null"),
        ("key_file", [], "a string or null"),
        ("peers", "10.0.0.1", "a list, each item a string"),
        ("peers", [1], "a list, each item a string"),
        ("share", "true", "true or false"),
    ],
)
def test_an_ill_typed_value_names_key_and_accepted_values(
    key: str, value: Any, accepted: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load({key: value})
    assert f"{key} must be {accepted}, not {value!r}" in str(error.value)


@pytest.mark.parametrize("text", ["", "many", "8GiB"])
def test_an_ill_typed_variable_names_itself_and_accepted_values(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(OMNI_CONNECTOR_ARENA_GIB=text)
    assert f"OMNI_CONNECTOR_ARENA_GIB must be a number or null, not {text!r}" in str(error.value)


@pytest.mark.parametrize("key", ["arena_gib", "handoff_ttl_s", "arena_wait_s", "load_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_number_out_of_range_names_the_key(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a positive number, not"):
        load({key: value})
    with pytest.raises(ConfigError, match=f"{key} must be a positive number, not"):
        load(**{f"OMNI_CONNECTOR_{key.upper()}": str(value)})


@pytest.mark.parametrize("names", [(), ("no", "prefetch"), ("pin_s",)])
def test_hints_are_allowed_by_name(names: tuple[str, ...]) -> None:
    assert load({"hints": list(names)}).hints == names
    assert load(OMNI_CONNECTOR_HINTS=",".join(names)).hints == names
    with pytest.raises(ConfigError, match="hints must be a list, each item 'no' or 'prefetch'"):
        load({"hints": ["cache"]})


def test_a_hint_of_an_earlier_version_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert load({"hints": ["no", "high"]}).hints == ("no",)
    assert load(OMNI_CONNECTOR_HINTS="high, pin_s").hints == ("pin_s",)
    assert [each.getMessage() for each in caplog.records] == [
        f"{where}: there is no hint 'high' any more: {_GONE_HINTS['high']}"
        for where in (
            "kv_connector_extra_config: hints",
            "environment variable OMNI_CONNECTOR_HINTS",
        )
    ]


@pytest.mark.parametrize("value", ["", "a/b", "..", ".hidden", "a b", "a\0", "a\n"])
def test_a_namespace_that_is_no_plain_name_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="namespace must"):
        load({"namespace": value})


@pytest.mark.parametrize("extra", [[], "transport", 3, [("transport", "shm")]])
def test_a_configuration_that_is_no_object_is_refused(extra: Any) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config must be an object"):
        OmniConfig.load(extra, {})


def test_values_that_cannot_be_shown_or_encoded_are_refused_by_their_key() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="transport must be a string, not a list that is nested"):
        OmniConfig.load({"transport": deep}, {})
    with pytest.raises(ConfigError, match="model_id must be"):
        OmniConfig.load({"model_id": "\ud800"}, {})
    with pytest.raises(ConfigError, match="OMNI_CONNECTOR_MODEL_ID must be"):
        OmniConfig.load({}, {"OMNI_CONNECTOR_MODEL_ID": "caf\udce9"})  # bytes that are no UTF-8
    with pytest.raises(ConfigError, match="unknown key 7"):
        OmniConfig.load({7: 1}, {})  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as error:
        OmniConfig.load({"integrity": "x" * 100_000}, {})
    assert len(str(error.value)) < 500
    with pytest.raises(ConfigError, match="arena_gib must be a positive number"):
        OmniConfig.load({"arena_gib": 1e308}, {})
    with pytest.raises(ConfigError, match="segment_gib"):
        OmniConfig.load({"store": {"master": "a:1", "segment_gib": 1e308}}, {})


def test_a_store_is_mooncakes_or_a_folder_by_its_keys() -> None:
    mooncake, files = load({"store": {"master": "a:1"}}), load({"store": {"path": "/kv", "gib": 2}})
    assert isinstance(mooncake.store, StoreSettings)
    assert isinstance(files.store, FileStoreSettings)
    assert files.store.size_bytes() == 2 * GIB
    assert load({"store": {"path": "/kv"}}).store == FileStoreSettings(path="/kv")
    environ = {"OMNI_CONNECTOR_STORE": '{"path": "/kv", "gib": 2}'}
    assert OmniConfig.load({}, environ).store == files.store
    assert load({"store": None}).store is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pth": "/kv"}, "store: unknown key 'pth'; did you mean 'path'"),
        ({"path": "/kv", "gb": 1}, "store: unknown key 'gb'; did you mean 'gib'"),
        ({"master": "a:1", "path": "/kv"}, "store: master, path do not go together"),
        ({"path": "kv"}, "store.path must be an absolute path, not 'kv'"),
        ({"path": "/kv\0"}, "store.path must be an absolute path"),
        ({"path": 3}, "store.path must be a string"),
        ({"path": "/kv", "gib": 0}, "store.gib must be a positive number"),
        ({"path": "/kv", "gib": math.nan}, "store.gib must be a positive number"),
        ({"path": "/kv", "lookup_timeout_s": 0}, "store.lookup_timeout_s must be a positive"),
        ("/kv", "store must be an object"),
    ],
)
def test_a_store_that_makes_no_sense_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load({"store": given})


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="integrity"):
        load({"integrity": "x"})


def test_arena_bytes_is_what_was_asked_for() -> None:
    assert load({"arena_gib": 1.5}).arena_bytes() == 3 * GIB // 2
    assert load().arena_bytes() is None
