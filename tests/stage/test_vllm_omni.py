# SPDX-License-Identifier: Apache-2.0
"""Our connector under the factory and the base class of the published vLLM-Omni.

The package itself cannot be imported beside another vLLM than its own (0.30.0 wants 0.30), and
would bring plugins into every engine of the environment. So it is unpacked into a folder of its
own, without its dependencies, and of it only the modules of its connectors are loaded, under
parent packages that are empty. `VLLM_OMNI_PATH` names a folder where it is unpacked already.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENT = "vllm-omni==0.30.0"

PRELUDE = """
import sys, types, time, threading
root = sys.argv[1]
for name in ("vllm_omni", "vllm_omni.distributed", "vllm_omni.distributed.omni_connectors"):
    package = types.ModuleType(name)
    package.__path__ = [root + "/" + name.replace(".", "/")]
    sys.modules[name] = package
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from omni_connector.stage.vllm_omni import register
register()
register()
spec = ConnectorSpec("OmniSharedMemoryConnector", {"stage_id": 0, "role": "sender"})
"""


@pytest.fixture(scope="session")
def vllm_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the published package."""
    if given := os.environ.get("VLLM_OMNI_PATH"):
        return Path(given)
    folder = tmp_path_factory.mktemp("vllm-omni")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    done = subprocess.run(
        [*command, "--target", str(folder), REQUIREMENT],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"{REQUIREMENT} cannot be had here: {done.stderr.strip()[-200:]}")
    return folder


@pytest.fixture
def run(vllm_omni: Path, tmp_path: Path):
    """Runs code in a process of its own that has vLLM-Omni's factory and our connector in it."""

    def start(code: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, str(vllm_omni)],
            env={**os.environ, "OMNI_CONNECTOR_RUNTIME_DIR": str(tmp_path / "run")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def test_its_factory_makes_ours_by_name(run):
    process = run("""
with OmniConnectorFactory.create_connector(spec) as connector:
    assert isinstance(connector, OmniConnectorBase)
    assert connector.health()["status"] == "healthy"
    ok, size, metadata = connector.put("0", "1", "a/b@0_1", b"12345")
    assert (ok, size) == (True, 5)
    assert connector.get("0", "1", "a/b@0_1", metadata) == (b"12345", 5)
    assert connector.get("0", "1", "other") is None
    import torch

    sent = {"hidden": torch.arange(6.0).view(2, 3), "text": "a", "tokens": [1, 2]}
    assert connector.put("0", "1", "object", sent)[0]
    got, _ = connector.get("0", "1", "object")
    assert torch.equal(got.pop("hidden"), sent.pop("hidden"))
    assert got == sent
    connector.cleanup("a/b@0_1")
    assert connector.get("0", "1", "a/b@0_1", metadata) is None
connector.close()
try:
    OmniConnectorFactory.create_connector(
        ConnectorSpec("OmniSharedMemoryConnector", {"object_timeout": "soon"})
    )
except ValueError as error:
    assert "object_timeout" in str(error)
else:
    raise AssertionError("an ill-typed setting was taken")
""")
    process.communicate(timeout=100)
    assert process.returncode == 0


def test_a_sender_and_a_receiver_of_its_stages(run):
    sender = run("""
connector = OmniConnectorFactory.create_connector(spec)
time.sleep(0.3)  # the receiver waits meanwhile
assert connector.put("0", "1", "request-7", b"x" * 5_000_000)[0]
print("sent", flush=True)
sys.stdin.read()
connector.close()
""")
    receiver = run("""
import json
connector = OmniConnectorFactory.create_connector(spec)
started = time.monotonic()
assert connector.get_with_deadline("0", "1", "never", deadline=started + 0.2) is None
assert time.monotonic() - started < 5
found = connector.get_with_deadline("0", "1", "request-7", deadline=time.monotonic() + 60)
data, size = found
print(json.dumps([size, data == b"x" * 5_000_000]), flush=True)
connector.close()
""")
    out, _ = receiver.communicate(timeout=100)
    assert json.loads(out) == [5_000_000, True]
    sender.communicate(timeout=30)
    assert receiver.returncode == sender.returncode == 0
