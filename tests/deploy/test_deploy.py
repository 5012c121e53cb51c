# SPDX-License-Identifier: Apache-2.0
"""The files of `deploy/` keep their schemas, and their settings are those of the code."""

import importlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_connector.cli.dashboard import FILES
from omni_connector.cli.main import main, parser
from omni_connector.config import OmniConfig
from omni_connector.runtime.metric_names import COUNTERS, GAUGES
from omni_connector.vllm_v1.drain_middleware import DrainMiddleware

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def transfers(node: Any) -> Iterator[dict[str, Any]]:
    """Each `--kv-transfer-config` that stands anywhere in a document."""
    for each in node.values() if isinstance(node, dict) else node:
        if isinstance(each, (dict, list)):
            yield from transfers(each)
        elif isinstance(each, str) and each.startswith('{"kv_connector"'):
            yield json.loads(each)


def check(transfer: dict[str, Any]) -> None:
    """Read one as vLLM and an engine do."""
    assert transfer["kv_connector"] == "OmniKVConnector"
    assert transfer["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
    assert transfer["kv_load_failure_policy"] == "recompute"
    extra = json.dumps(transfer.get("kv_connector_extra_config", {}))
    OmniConfig.load(json.loads(extra.replace("$(POD_IP)", "10.0.0.1")), environ={})


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_settings_of_a_manifest_are_right(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text("utf-8")))
    found = [each for document in documents for each in transfers(document)]
    assert found
    for transfer in found:
        check(transfer)


def require_keep(words: list[str]) -> None:
    """Raise AssertionError unless this is a command line of `omni-connector keep`."""
    assert words[0] == "omni-connector"
    assert parser().parse_args(words[1:]).command == "keep"


def test_the_pod_has_room_for_what_it_keeps() -> None:
    document = next(yaml.safe_load_all((DEPLOY / "kubernetes" / "pod.yaml").read_text("utf-8")))
    containers = document["spec"]["template"]["spec"]["containers"]
    [keep] = [each for each in containers if each["name"] == "keep"]
    require_keep(keep["command"])
    room = float(keep["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert parser().parse_args(keep["command"][1:]).gib < room
    engine = containers[0]  # they meet where the engines do
    assert {"env": keep["env"], "volumeMounts": keep["volumeMounts"]}.items() <= engine.items()


def stops_without_loss(arguments: list[str], seconds_until_killed: float) -> None:
    """An engine with these arguments ends before it is killed: the middleware may wait for its
    time-out, and then vLLM for the same."""
    given = dict(each.split("=", 1) for each in arguments if "=" in each and each.startswith("--"))
    module, _, name = given["--middleware"].rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), name), DrainMiddleware)
    assert 0 < 2 * float(given["--shutdown-timeout"]) <= seconds_until_killed


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_each_engine_of_a_manifest_stops_without_loss(path: Path) -> None:
    engines = 0
    for document in yaml.safe_load_all(path.read_text("utf-8")):
        pod = document["spec"].get("template", {}).get("spec", {})
        for container in pod.get("containers", ()):
            if "--kv-transfer-config" in container.get("args", ()):
                engines += 1
                stops_without_loss(container["args"], pod["terminationGracePeriodSeconds"])
                [port] = [each["containerPort"] for each in container["ports"]]
                assert f"--port={port}" in container["args"]
                assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": port}
    assert engines


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_each_engine_of_a_manifest_has_a_private_runtime_folder(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text("utf-8")):
        pod = document["spec"].get("template", {}).get("spec", {})
        for container in pod.get("containers", ()):
            if "--kv-transfer-config" not in container.get("args", ()):
                continue
            variables = {each["name"]: each.get("value") for each in container["env"]}
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            folder = variables["OMNI_CONNECTOR_RUNTIME_DIR"]
            assert folder not in mounts, "a volume's own folder is open to others"
            assert str(Path(folder).parent) in mounts
            assert {*mounts.values()} <= {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_keeps_the_schema_of_kubernetes(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(path.read_text("utf-8")):
        validate.validate(document, "1.31", strict=True)


def test_the_settings_of_the_compose_file_are_right() -> None:
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    found = list(transfers(document["services"]))
    assert len(found) == 2
    assert "--enable-prompt-tokens-details" in document["services"]["prefill"]["command"]
    for transfer in found:
        check(transfer)
    assert set(document["services"]) == {"prefill", "decode", "router", "keep"}
    require_keep(document["services"]["keep"]["entrypoint"])
    for name in ("prefill", "decode"):
        engine = document["services"][name]
        stops_without_loss(engine["command"], float(engine["stop_grace_period"].removesuffix("s")))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_command_of_a_unit_is_right(path: Path) -> None:
    [command] = re.findall(r"^ExecStart=(.*)$", path.read_text("utf-8"), re.M)
    words = shlex.split(command)
    if "--kv-transfer-config" in words:
        check(json.loads(words[words.index("--kv-transfer-config") + 1]))
        options = [f"{name}={value}" for name, value in itertools.pairwise(words)]
        unit = dict(
            line.split("=", 1) for line in path.read_text("utf-8").splitlines() if "=" in line
        )
        stops_without_loss(options, float(unit["TimeoutStopSec"]))
        assert unit["KillMode"] == "mixed"
    elif path.stem == "omni-keep":
        require_keep(words[1:])
    else:
        assert words[1] == "vllm-router"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_one_that_systemd_takes(path: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FILES)
def test_the_command_prints_what_grafana_and_prometheus_read(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", name]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed


def test_alerts_ask_for_metrics_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["dashboard", "alerts"])
    asked = set(re.findall(r"vllm:omni_connector_(\w+)", capsys.readouterr().out))
    there = {f"{name}_total" for name in (*COUNTERS, "failures")} | {*GAUGES}
    assert asked
    assert asked <= there


def test_alerts_ask_for_failures_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["dashboard", "alerts"])
    asked = re.findall(r'kind[!=~]+"([\w|]+)"', capsys.readouterr().out)
    explained = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")
    kinds = {kind for each in asked for kind in each.split("|")}
    assert kinds
    assert {kind for kind in kinds if f"`{kind}`" not in explained} == set()
