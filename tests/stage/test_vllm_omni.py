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
from typing import Any

import pytest

REQUIREMENT = "vllm-omni==0.30.0"

PRELUDE = """
import json, os, sys, threading, time, types
root, runtime = sys.argv[1:]
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
open_end, closed_by_us = os.pipe()


def start(code):
    pid = os.fork()
    if pid == 0:
        os.close(closed_by_us)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    return pid


def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def report(name, value):
    print("report", json.dumps([name, value]), flush=True)


codes = json.load(sys.stdin)
os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = runtime + "/1"
report("factory", status(start(codes["factory"])))
os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = runtime + "/2"
sender, receiver = start(codes["sender"]), start(codes["receiver"])
report("receiver", status(receiver))
os.close(closed_by_us)
report("sender", status(sender))
"""

FACTORY = """
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
"""

SENDER = """
connector = OmniConnectorFactory.create_connector(spec)
time.sleep(0.3)  # the receiver waits meanwhile
assert connector.put("0", "1", "request-7", b"x" * 5_000_000)[0]
print("sent", flush=True)
os.read(open_end, 1)  # until the receiver has ended
connector.close()
"""

RECEIVER = """
connector = OmniConnectorFactory.create_connector(spec)
assert connector.get_with_deadline("0", "1", "never", deadline=time.monotonic() + 0.2) is None
found = connector.get_with_deadline("0", "1", "request-7", deadline=time.monotonic() + 60)
data, size = found
report("received", [size, data == b"x" * 5_000_000])
connector.close()
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


@pytest.fixture(scope="module")
def reports(vllm_omni: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each of the above ended, in a process of its own: forked where vLLM-Omni is loaded,
    which takes longer than all that they do.
    """
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE, str(vllm_omni), str(tmp_path_factory.mktemp("run"))],
        input=json.dumps({"factory": FACTORY, "sender": SENDER, "receiver": RECEIVER}),
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("report ")]
    return dict(json.loads(line.removeprefix("report ")) for line in lines)


def test_its_factory_makes_ours_by_name(reports: dict[str, Any]) -> None:
    assert reports["factory"] == 0


def test_a_sender_and_a_receiver_of_its_stages(reports: dict[str, Any]) -> None:
    assert reports["received"] == [5_000_000, True]
    assert (reports["receiver"], reports["sender"]) == (0, 0)
