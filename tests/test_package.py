# SPDX-License-Identifier: Apache-2.0
"""What the package shows to its users: names, metadata, and what importing it costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points, metadata, requires, version
from importlib.resources import files
from pathlib import Path

import pytest

import omni_connector
from omni_connector import plugin

NAMES = {
    "ArenaFullError",
    "ChecksumError",
    "ConfigError",
    "ConnectorSpec",
    "IncompatiblePeerError",
    "IntegrityError",
    "KVCacheTransferData",
    "LayoutError",
    "MissingDependencyError",
    "OmniConfig",
    "OmniConnector",
    "OmniConnectorFactory",
    "OmniError",
    "OmniKVCacheConfig",
    "OmniKVConnector",
    "OmniKVTransferManager",
    "PeerRefusedError",
    "PeerUnreachableError",
    "Pieces",
    "ProtocolError",
    "StaleSlotError",
    "TransportError",
    "UnsupportedVersionError",
    "__version__",
    "load_omni_transfer_config",
}
NEEDS_VLLM = {"OmniKVConnector"}
NOT_IN_ENGINES = {"cli", "objects", "stage", "testing"}


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_these() -> None:
    assert set(omni_connector.__all__) == NAMES
    assert set(dir(omni_connector)) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES - NEEDS_VLLM))
def test_each_public_name_is_there(name: str) -> None:
    assert getattr(omni_connector, name) is not None


@pytest.mark.vllm
@pytest.mark.parametrize("name", sorted(NEEDS_VLLM))
def test_each_public_name_that_needs_vllm_is_there(name: str) -> None:
    assert getattr(omni_connector, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Omnibus"):
        omni_connector.Omnibus  # noqa: B018


def test_importing_the_package_loads_neither_vllm_nor_torch() -> None:
    loaded = _run(
        "import sys, omni_connector, omni_connector.plugin\n"
        "assert omni_connector.ConfigError and omni_connector.OmniConfig\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'vllm', 'torch'})"
    )
    assert loaded.strip() == "set()"


def test_folders_that_copy_no_kv_load_neither_vllm_nor_torch() -> None:
    loaded = _run(
        "import sys, pkgutil, importlib\n"
        "for name in ('arena', 'identity', 'net', 'objects', 'runtime', 'transports'):\n"
        "    folder = importlib.import_module('omni_connector.' + name)\n"
        "    for found in pkgutil.walk_packages(folder.__path__, folder.__name__ + '.'):\n"
        "        if not found.name.endswith('.loaded_weights'):  # it hashes torch's tensors\n"
        "            importlib.import_module(found.name)\n"
        "for name in ('channel', 'client', 'leases', 'messages', 'server'):\n"
        "    importlib.import_module('omni_connector.handoff.' + name)\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'vllm', 'torch'})"
    )
    assert loaded.strip() == "set()"


def test_the_version_is_that_of_the_distribution() -> None:
    assert omni_connector.__version__ == version("omni-connector")


def test_vllm_and_torch_are_no_requirement() -> None:
    hard = [line for line in requires("omni-connector") or [] if "extra ==" not in line]
    assert {name.partition(">")[0] for name in hard} == {"msgspec", "numpy", "pyzmq", "xxhash"}


def test_the_extra_names_the_range_that_the_plugin_checks() -> None:
    (line,) = [line for line in requires("omni-connector") or [] if line.startswith("vllm<")]
    specifier = line.removeprefix("vllm").partition(";")[0].strip()
    assert set(specifier.split(",")) == set(plugin.supported_range().split(","))


def test_the_distribution_is_typed_licensed_and_for_python_311() -> None:
    assert files("omni_connector").joinpath("py.typed").is_file()
    found = metadata("omni-connector")
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("vllm.general_plugins", "omni_connector", "omni_connector.plugin:register"),
        ("console_scripts", "omni-connector", "omni_connector.cli.main:main"),
    ],
)
def test_an_entry_point_leads_to_something(group: str, name: str, value: str) -> None:
    (found,) = entry_points(group=group, name=name)
    assert found.value == value
    assert callable(found.load())


def _logger_names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in {"getLogger", "init_logger"}:
                yield ast.unparse(node.args[0]) if node.args else ""


def test_what_an_engine_logs_is_in_its_log() -> None:
    """Of an engine's loggers, only those below vLLM's have a handler."""
    root = Path(omni_connector.__file__).parent
    files = [
        path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in NOT_IN_ENGINES
    ]
    found = [(path.name, name) for path in files for name in _logger_names(path)]
    assert len(found) > 20
    assert not [each for each in found if not each[1].startswith("'vllm.omni_connector.")]
