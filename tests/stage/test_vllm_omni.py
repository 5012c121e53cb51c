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
import json, os, sys, threading, time, traceback, types
root, runtime = sys.argv[1:]
for name in ("vllm_omni", "vllm_omni.distributed", "vllm_omni.distributed.omni_connectors"):
    package = types.ModuleType(name)
    package.__path__ = [root + "/" + name.replace(".", "/")]
    sys.modules[name] = package
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
import torch


# What its manager imports beside its connectors, which needs its engines.
class NoRequest:
    is_dummy_run_request_id = staticmethod(lambda request_id: False)


for name, attributes in {
    "diffusion": {}, "diffusion.sched": {},
    "diffusion.request": {"OmniDiffusionRequest": NoRequest},
    "diffusion.sched.interface": {"KVPrefetchJob": object},
    "platforms": {"current_omni_platform": None},
}.items():
    module = types.ModuleType("vllm_omni." + name)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[module.__name__] = module
from vllm_omni.distributed.omni_connectors import kv_transfer_manager as theirs
from omni_connector.stage import OmniKVCacheConfig, OmniKVTransferManager
from omni_connector.stage.vllm_omni import register
register()
register()
spec = ConnectorSpec("OmniSharedMemoryConnector", {"stage_id": 0, "role": "sender"})
open_end, closed_by_us = os.pipe()


def start(code):
    pid = os.fork()
    if pid == 0:
        os.close(closed_by_us)
        failed = 1
        try:
            exec(code, globals())
            failed = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(failed)
    return pid


def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def report(name, value):
    print("report", json.dumps([name, value]), flush=True)


codes = json.load(sys.stdin)
sender, receiver = codes.pop("sender"), codes.pop("receiver")
for number, (name, code) in enumerate(codes.items()):
    os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = f"{runtime}/{number}"
    report(name, status(start(code)))
os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = runtime + "/stages"
sender, receiver = start(sender), start(receiver)
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
get, asked = connector._inner.get, []
connector._inner.get = lambda *a, timeout: asked.append(timeout) or get(*a, timeout=timeout)
assert connector.get_with_deadline("0", "1", "never", deadline=time.monotonic() + 0.2) is None
assert set(asked) == {0.5}
found = connector.get_with_deadline("0", "1", "request-7", deadline=time.monotonic() + 60)
data, size = found
report("received", [size, data == b"x" * 5_000_000])
connector.close()
"""


MANAGERS = """
SENDS = {"from_stage": "0", "to_stage": "1", "stage_id": 0, "need_send_cache": True}
RECEIVES = {"from_stage": "0", "to_stage": "1", "stage_id": 1, "need_recv_cache": True,
            "recv_timeout": 2.0}
OURS, THEIRS = "SharedMemoryConnector", "OmniSharedMemoryConnector"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)

def our_manager(**config):
    return OmniKVTransferManager(OmniKVCacheConfig(connector_config={"type": OURS}, **config))

def their_manager(**config):
    config = theirs.OmniKVCacheConfig(connector_config={"type": THEIRS}, **config)
    return theirs.OmniKVTransferManager(config)

def transferred(sender, receiver):
    arrived = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        cache = torch.randn(2, 6, 16, 2, 8).to(dtype)
        finished = {name: {"block_ids": [4, 1, 3], "seq_len": 41}}
        done = sender.handle_finished_requests_kv_transfer(finished, [cache, cache], 16, name)
        assert done == [name]
        data, size = receiver.receive_kv_cache_for_request(name, torch.device("cpu"))
        if not isinstance(data, dict):
            continue
        want = [part[[4, 1, 3]].flatten(0, 1)[:41].float() for part in cache]
        for keys, values in zip(*data["layer_blocks"].values()):
            assert keys.dtype == values.dtype == dtype
            assert torch.equal(keys.float(), want[0])
            assert torch.equal(values.float(), want[1])
        assert data["metadata"]["seq_len"] == 41
        arrived.append(dtype)
    return len(arrived), len(DTYPES)
"""

BETWEEN_MANAGERS = """
sender, receiver = {}_manager(**SENDS), {}_manager(**RECEIVES)
assert transferred(sender, receiver) == (4, 4)
sender.close()
receiver.close()
"""

OUR_PUTS = """
import logging
from omni_connector.objects import ConnectorSpec as OurSpec, OmniConnectorFactory as OurFactory
from omni_connector.objects import Pieces

ours = OurFactory.create_connector(OurSpec("SharedMemoryConnector"))
connector = OmniConnectorFactory.create_connector(spec)
objects = [{}, {"hidden": [1, 2]}, {"vllm_omni": 3}, {"vllm_omni": b"x", "k": 1}, [b"x"], b"y"]
for number, sent in enumerate(objects):
    assert ours.put("0", "1", f"k{number}", sent)[0]
    assert connector.get("0", "1", f"k{number}")[0] == sent
ours.put("0", "1", "pieces", Pieces([b"ab", b"", b"c"]))
assert connector.get("0", "1", "pieces") == (b"abc", 3)
assert type(connector.get("0", "1", "pieces")[0]) is bytes
warned = []
handler = logging.Handler()
handler.emit = warned.append
logging.getLogger("omni_connector.stage.vllm_omni").addHandler(handler)
for number, hostile in enumerate([b"", b"\\x81", b"\\xc1" * 9, b"\\x93\\x01"]):
    ours.put("0", "1", "hostile", {"vllm_omni": hostile})
    assert connector.get("0", "1", "hostile") is None, hostile
    assert len(warned) == number + 1
ours.close()
connector.close()
"""

METADATA = """
connector = OmniConnectorFactory.create_connector(spec)
_, _, metadata = connector.put("0", "1", "k", b"12345")
for hint in (None, metadata, "shm", b"x", 7, [1], [("a", 1)], torch.ones(2), object(), {},
             {"k": metadata}, {"source_host": "10.0.0.1", "source_port": 1}):
    assert connector.get("0", "1", "k", hint) == (b"12345", 5), hint
connector.close()
"""

TIME_TO_LIVE = """
extra = {"stage_id": 0, "object_gib": 2 / 1024, "buffer_ttl_seconds": 2.0}
connector = OmniConnectorFactory.create_connector(ConnectorSpec("OmniSharedMemoryConnector", extra))
assert connector.put("0", "1", "a", bytes(1000))[0]
assert connector.put("0", "1", "b", bytes(1000))[0]
assert not connector.put("0", "1", "c", bytes(1000))[0]
time.sleep(2.1)
assert connector.put("0", "1", "c", bytes(1000))[0]
connector.close()
"""

ALONE = {
    "factory": FACTORY,
    "our to their": MANAGERS + BETWEEN_MANAGERS.format("our", "their"),
    "their to our": MANAGERS + BETWEEN_MANAGERS.format("their", "our"),
    "our puts": OUR_PUTS,
    "metadata": METADATA,
    "time to live": TIME_TO_LIVE,
}


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
        input=json.dumps({**ALONE, "sender": SENDER, "receiver": RECEIVER}),
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


@pytest.mark.parametrize(("sends", "receives"), [("our", "their"), ("their", "our")])
def test_kv_travels_between_its_manager_and_ours(
    reports: dict[str, Any], sends: str, receives: str
) -> None:
    assert reports[f"{sends} to {receives}"] == 0


def test_what_a_stage_of_ours_has_put_arrives_as_that_put_it(reports: dict[str, Any]) -> None:
    assert reports["our puts"] == 0


def test_metadata_of_any_kind_is_no_reason_to_find_nothing(reports: dict[str, Any]) -> None:
    assert reports["metadata"] == 0


def test_its_time_to_live_is_kept(reports: dict[str, Any]) -> None:
    assert reports["time to live"] == 0
