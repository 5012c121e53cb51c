# SPDX-License-Identifier: Apache-2.0
"""Our connectors and manager beside the classes of the published vLLM-Omni, in both directions.

The package itself cannot be imported beside another vLLM than its own (0.30.0 wants 0.30), and
would bring plugins into every engine of the environment. So `scripts/fetch_wheels.py` unpacks it
into a folder of its own, without its dependencies, and of it only the modules of its connectors,
manager, requests and platforms are loaded (`wheel`). `VLLM_OMNI_PATH` names a folder where it is
unpacked already.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_connector.testing.ports import free_port

from ..masters import Master

PRELUDE = """
import json, os, signal, sys, threading, time, traceback, types
root, runtime, master, engine_port = sys.argv[1:]
from pathlib import Path
from tests.stage.wheel import make_importable, make_loadable
make_importable(Path(root))
make_loadable()

from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
import torch

from vllm_omni.distributed.omni_connectors import kv_transfer_manager as theirs
from vllm_omni.distributed.omni_connectors.utils import kv_utils as their_utils
from vllm_omni.diffusion.request import OmniDiffusionRequest
from omni_connector.objects import OmniConnectorFactory as OurFactory
from omni_connector.stage import KVCacheTransferData, OmniKVCacheConfig, OmniKVTransferManager
from omni_connector.stage import tp
from omni_connector.stage.ports import kv_port
from omni_connector.stage.vllm_omni import register
register()
register()
spec = ConnectorSpec("OmniSharedMemoryConnector", {"stage_id": 0, "role": "sender"})


def start(code):
    pid = os.fork()
    if pid == 0:
        signal.alarm(90)  # none may wait for ever
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
for number, (name, code) in enumerate(codes.items()):
    os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = f"{runtime}/{number}"
    report(name, status(start(code)))
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
    start = time.monotonic()
    assert connector.get_with_deadline("0", "1", "never", deadline=start + 0.2) is None
    assert time.monotonic() - start >= 0.2
    threading.Timer(0.2, connector.abandon_get, ("given up",)).start()
    assert connector.get_with_deadline("0", "1", "given up", deadline=start + 3600) is None
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

MANAGERS = """
SENDS = {"from_stage": "0", "to_stage": "1", "stage_id": 0, "need_send_cache": True}
RECEIVES = {"from_stage": "0", "to_stage": "1", "stage_id": 1, "need_recv_cache": True,
            "recv_timeout": 20.0}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
SENDER = {"host": "127.0.0.1", "zmq_port": kv_port(int(engine_port), 0)}
# Its engine pins memory, for which it wants a GPU.
torch.Tensor.pin_memory = lambda self: self

STORE = {"master": master, "metadata_server": "P2PHANDSHAKE"}
ENGINE = {"host": "127.0.0.1", "zmq_port": int(engine_port), "protocol": "tcp",
          "memory_pool_size": 64 << 20}
# Of each connector: its name for our manager, that for theirs, and the settings.
CONNECTORS = {
    "our shared memory": ("SharedMemoryConnector", "OmniSharedMemoryConnector", {}),
    "our store": ("MooncakeStoreConnector", "OmniMooncakeStoreConnector", STORE),
    "our engine": (
        "MooncakeTransferEngineConnector", "OmniMooncakeTransferEngineConnector", ENGINE),
    "their shared memory": ("vllm_omni.SharedMemoryConnector", "SharedMemoryConnector", {}),
    "their store": ("vllm_omni.MooncakeStoreConnector", "MooncakeStoreConnector",
                    STORE | {"segment": 64 << 20, "localbuf": 64 << 20}),
    "their engine": (
        "vllm_omni.MooncakeTransferEngineConnector", "MooncakeTransferEngineConnector", ENGINE),
}

def our_manager(connector, **config):
    name, _, extra = CONNECTORS[connector]
    config = OmniKVCacheConfig(connector_config={"type": name, **extra}, **config)
    return OmniKVTransferManager(config)

def their_manager(connector, **config):
    _, name, extra = CONNECTORS[connector]
    config = theirs.OmniKVCacheConfig(connector_config={"type": name, **extra}, **config)
    return theirs.OmniKVTransferManager(config)

def put(sender, name, dtype):
    cache = torch.randn(2, 6, 16, 4, 8).to(dtype)
    finished = {name: {"block_ids": [4, 1, 3], "seq_len": 41}}
    done = sender.handle_finished_requests_kv_transfer(finished, [cache, cache], 16, name)
    assert done == [name]
    return [part[[4, 1, 3]].flatten(0, 1)[:41].float() for part in cache]

def same(data, want, dtype):
    for keys, values in zip(*data["layer_blocks"].values()):
        assert keys.dtype == values.dtype == dtype
        assert torch.equal(keys.float(), want[0])
        assert torch.equal(values.float(), want[1])
    assert data["metadata"]["seq_len"] == 41

def transferred(sender, receiver):
    receiver.update_sender_info({0: SENDER})
    arrived = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.") + str(os.getpid())
        want = put(sender, name, dtype)
        data, size = receiver.receive_kv_cache_for_request(name, torch.device("cpu"))
        if isinstance(data, dict):
            same(data, want, dtype)
            arrived.append(dtype)
    return len(arrived), len(DTYPES)
"""

PAIR = """
sender = {sends}_manager({connector!r}, **SENDS)
receiver = {receives}_manager({connector!r}, **RECEIVES)
assert transferred(sender, receiver) == (4, 4)
receiver.close()
sender.close()
os._exit(0)  # Mooncake's threads outlive the interpreter, which then may abort
"""

PAYLOADS = """
def data_of(dtype, kind):
    keys = [torch.randn(41, 2, 8).to(dtype), None, torch.randn(41, 2, 8).to(dtype)]
    values = [torch.randn(41, 2, 8).to(dtype), None, None]
    return kind("request", {"key_cache": keys, "value_cache": values}, [3, 1, 2], META)

def equal(a, b):
    assert [a[n] for n in ("request_id", "block_ids", "metadata")] == \\
        [b[n] for n in ("request_id", "block_ids", "metadata")]
    for name in ("key_cache", "value_cache"):
        for x, y in zip(a["layer_blocks"][name], b["layer_blocks"][name], strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert (x.dtype, x.shape) == (y.dtype, y.shape)
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))

for META in ({"seq_len": 41, "_kv_payload_contract": 1}, None, ["a"], "text"):
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool):
        ours, of_them = data_of(dtype, KVCacheTransferData), None
        packed = ours.to_bytes()
        equal(theirs.KVCacheTransferData.from_bytes(packed), KVCacheTransferData.from_bytes(packed))
        tensor = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        equal(theirs.KVCacheTransferData.from_bytes_device(tensor),
              KVCacheTransferData.from_bytes_device(tensor))
        packed = data_of(dtype, theirs.KVCacheTransferData).to_bytes()
        equal(KVCacheTransferData.from_bytes(packed), theirs.KVCacheTransferData.from_bytes(packed))
"""

ROUTES = """
for base in (5000, 50051):
    for stage in range(16):
        for replica in range(3):
            for rank in range(9):
                want = their_utils.kv_zmq_port(base, stage, rank, replica_id=replica)
                assert kv_port(base, stage, replica=replica, rank=rank) == want
sizes = [(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8)]
for source, target in sizes:
    for rank in range(8):
        ours = tp.Topology(source, target, rank)
        of_them = their_utils.KVTPTopology(source, target, rank)
        for name in ("source_tp_size", "target_tp_size", "local_rank"):
            assert getattr(ours, name) == getattr(of_them, name)
        if rank < source:
            assert ours.send_keys("r", "0", "1") == \\
                their_utils.build_rank_aware_send_keys("r", "0", "1", of_them)
        if rank < target:
            assert ours.receive_keys("r", "0", "1") == \\
                their_utils.build_rank_aware_recv_keys("r", "0", "1", of_them)

def payload(heads, first):
    blocks = {n: [torch.arange(first, first + heads).view(1, heads, 1) + 0.0]
              for n in ("key_cache", "value_cache")}
    return {"request_id": "r", "block_ids": [1], "metadata": {"seq_len": 1},
            "layer_blocks": blocks}

def heads_of(found):
    return [cache[0].flatten().tolist() for cache in found["layer_blocks"].values()]

for source, target in sizes:
    for rank in range(target):
        ours = tp.Topology(source, target, rank)
        of_them = their_utils.KVTPTopology(source, target, rank)
        if source > target:
            parts = [payload(2, 2 * i) for i in ours.source_ranks()]
            assert heads_of(tp.merge_shards(parts, ours, 2 * source)) == \\
                heads_of(their_utils.merge_received_rank_shards(parts))
        else:
            whole = payload(8, 0)
            assert heads_of(tp.own_heads(whole, ours, None)) == \\
                heads_of(their_utils.slice_received_rank_shard(whole, of_them))
"""

WARM_UP = """
from omni_connector.stage.manager import _is_dummy
for name in ("dummy_req_id", "dummy_req_id/2", "dummy", "r"):
    assert _is_dummy(name) == OmniDiffusionRequest.is_dummy_run_request_id(name)
"""

SENDERS = """
RECEIVES = {"from_stage": "0", "to_stage": "1", "stage_id": 1, "need_recv_cache": True}
ours = OmniKVTransferManager(OmniKVCacheConfig(connector_config={"type": "x"}, **RECEIVES))
of_them = theirs.OmniKVTransferManager(
    theirs.OmniKVCacheConfig(connector_config={"type": "x"}, **RECEIVES))
place, other = {"host": "10.0.0.1", "zmq_port": 50151}, {"host": "10.0.0.2", "zmq_port": 50152}
for info in (place, {0: place, 1: other}, {"0": place, "1": other}, {7: other}):
    assert ours._resolve_sender_info(info) == of_them._resolve_sender_info(info)
    assert ours._resolve_sender_info(info, 1) == of_them._resolve_sender_info(info, 1)
    ours.update_sender_info(info)
    of_them.update_sender_info(info)
    assert ours.config.connector_config == of_them.config.connector_config
assert ours.recv_stages == of_them.recv_stages
applied = []
for kind in (ours, of_them):
    req = types.SimpleNamespace(sampling_params=types.SimpleNamespace())
    kind.apply_kv_cache_to_request(req, {"layer_blocks": {"key_cache": [1]}, "metadata": {"a": 1}})
    applied.append(req)
assert applied[0] == applied[1]
"""

OUR_PUTS = """
import logging
from omni_connector.objects import ConnectorSpec as OurSpec, Pieces

ours = OurFactory.create_connector(OurSpec("SharedMemoryConnector"))
connector = OmniConnectorFactory.create_connector(spec)
objects = [{}, {"hidden": [1, 2]}, {"vllm_omni": 3}, {"vllm_omni": b"x", "k": 1}, [b"x"], b"y"]
for number, sent in enumerate(objects):
    assert ours.put("0", "1", f"k{number}", sent)[0]
    assert connector.get("0", "1", f"k{number}")[0] == sent
ours.put("0", "1", "pieces", Pieces([b"ab", b"", b"c"]))
found = connector.get("0", "1", "pieces")
assert found == (b"abc", 3)
assert type(found[0]) is bytes
assert connector.get("0", "1", "pieces") is None
warned = []
handler = logging.Handler()
handler.emit = warned.append
logging.getLogger("omni_connector.stage.vllm_omni").addHandler(handler)
for number, hostile in enumerate([b"", b"\\x81", b"\\xc1" * 9, b"\\x93\\x01"]):
    ours.put("0", "1", "hostile", Pieces([b"vllm_omni object", hostile]))
    assert connector.get("0", "1", "hostile") is None, hostile
    assert len(warned) == number + 1
ours.close()
connector.close()
"""

TYPES = """
import dataclasses, datetime, decimal, enum, logging, uuid
import msgspec, numpy as np
from PIL import Image
from vllm.outputs import CompletionOutput, RequestOutput
from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct

@dataclasses.dataclass
class Chunk:
    text: str
    codes: list
    image: object = None

class Colour(enum.Enum):
    RED = "red"

class Deep(msgspec.Struct):
    chunk: Chunk

output = CompletionOutput(0, "text", [1, 2], None, None)
output.multimodal_output = {"audio": torch.ones(3)}
finished = RequestOutput("r", "prompt", [1], None, [output], True)
image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
dtypes = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8,
          torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
meta = MetaStruct(finished=torch.tensor(True), chunk_seq=3, req_id=["r"])
sent = {
    "payload": OmniPayloadStruct(
        hidden=torch.randn(3, 4), codes=CodesStruct(audio=torch.arange(9)), meta=meta,
        mtp_inputs=(torch.ones(2), torch.zeros(2)), kv_metadata={"seq_len": 3}),
    "tensors": {str(each): torch.ones(2, 3).to(each) for each in dtypes},
    "arrays": [np.ones((2, 3), each) for each in ("u2", "u4", "u8", "f2", "c8", "?", "<U3", ">i4")],
    "dataclass": Chunk("a", [1, (2, 3)], image),
    "struct": Deep(Chunk("b", [torch.ones(1)])),
    "image": [image],
    "request": finished,
    "completion": output,
    "plain": {"set": {1}, "tuple": (1, "a"), "slice": slice(1, 9, 2), "none": None, 7: b"x",
              "int": [2**64 - 1, -(2**63)], "frozen": frozenset("a"),
              "time": datetime.date(2026, 1, 2), "decimal": decimal.Decimal("1.5"),
              "uuid": uuid.UUID(int=3), "enum": Colour.RED},
    "list": [1, [2]],
    "none": None,
}

def text(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [type(value).__name__, str(value.dtype), list(value.shape), str(value.tolist())]
    if isinstance(value, Image.Image):
        return [value.mode, value.size, value.tobytes()]
    if isinstance(value, dict):
        return {key: text(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [text(each) for each in value]
    if isinstance(value, (RequestOutput, CompletionOutput)):
        return [type(value).__name__, text(vars(value))]
    return [type(value).__name__, repr(value)]

ours = OmniConnectorFactory.create_connector(spec)
of_them = OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnector", {}))
for name, value in sent.items():
    found = []
    for number, connector in enumerate((ours, of_them)):
        key = f"{os.getpid()}-{name}"
        ok, size, metadata = connector.put("0", "1", key, value)
        assert ok, name
        found.append(text(connector.get("0", "1", key, None if number == 0 else metadata)[0]))
    assert found[0] == found[1], (name, found)

refused = {
    "object['a'][1]": {"a": [1, object()]},
    "object['meta']['chunk_seq']": OmniPayloadStruct(meta=MetaStruct(chunk_seq=2**64)),
    "object['kv_metadata']['n']": OmniPayloadStruct(kv_metadata={"m": 1, "n": -(2**63) - 1}),
    "object['chunk']['codes'][1]": Deep(Chunk("a", [1, lambda: 0])),
    "object['o']": {"o": np.array([{}])},
    "object[2]": [1, 2, 2**70],
    "object": object(),
}
for place, value in refused.items():
    try:
        ours.put("0", "1", "k", value)
    except TypeError as error:
        assert str(error).startswith(f"{place} cannot be sent: "), (place, error)
    else:
        raise AssertionError(place)
    try:
        of_them.serialize_obj(value)
    except Exception:
        continue
    raise AssertionError(f"they take {place}")
ours.close()
"""

METADATA = """
connector = OmniConnectorFactory.create_connector(spec)
for hint in (None, "shm", b"x", 7, [1], [("a", 1)], torch.ones(2), object(), {},
             "own", {"source_host": "10.0.0.1", "source_port": 1}):
    _, _, metadata = connector.put("0", "1", "k", b"12345")
    if isinstance(hint, str) and hint == "own":
        hint = {"k": metadata}
    assert connector.get("0", "1", "k", hint) == (b"12345", 5), hint
connector.close()
"""

REAPING = """
connector = OmniConnectorFactory.create_connector(spec)
for key in ("r_0_0", "r_0_1", "r"):
    assert connector.put("0", "1", key, {"k": key})[0]
assert connector.get("0", "1", "r_0_0")[0] == {"k": "r_0_0"}
connector.reap_consumed()
assert connector.get("0", "1", "r_0_0") is None
connector.cleanup("r")
assert connector.get("0", "1", "r") is None
assert connector.get("0", "1", "r_0_1")[0] == {"k": "r_0_1"}
connector.close()
"""

# Its `MooncakeStoreConnector` sets an attribute that Mooncake's builds since 0.3.13 have not.
CONNECTORS = [
    f"{whose} {what}"
    for whose in ("our", "their")
    for what in ("shared memory", "store", "engine")
    if (whose, what) != ("their", "store")
]
PAIRS = {
    f"{sends} to {receives} by {connector}": MANAGERS
    + PAIR.format(sends=sends, receives=receives, connector=connector)
    for connector in CONNECTORS
    for sends in ("our", "their")
    for receives in ("our", "their")
}
ALONE = {
    "factory": FACTORY,
    "our puts": OUR_PUTS,
    "types": TYPES,
    "metadata": METADATA,
    "reaping": REAPING,
    "payloads": PAYLOADS,
    "routes": ROUTES,
    "warm-up": WARM_UP,
    "senders": SENDERS,
}


@pytest.fixture(scope="module")
def reports(vllm_omni: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each of the above ended, in a process of its own: forked where vLLM-Omni is loaded,
    which takes longer than all that they do.
    """
    pairs = dict(PAIRS)
    try:
        import mooncake.store  # noqa: F401
    except ImportError:
        pairs = {name: code for name, code in PAIRS.items() if name.endswith("shared memory")}
    master = Master(tmp_path_factory.mktemp("master"))
    try:
        if pairs.keys() == PAIRS.keys():
            master.start()
        folder = tmp_path_factory.mktemp("run")
        arguments = [vllm_omni, folder, master.address, free_port() - 100]
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE, *map(str, arguments)],
            cwd=Path(__file__).parents[2],
            input=json.dumps(ALONE | pairs),
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=True,
        )
    finally:
        master.kill()
    lines = [line for line in done.stdout.splitlines() if line.startswith("report ")]
    return dict(json.loads(line.removeprefix("report ")) for line in lines)


@pytest.mark.parametrize("pair", PAIRS)
def test_kv_travels_between_its_manager_and_ours(reports: dict[str, Any], pair: str) -> None:
    if pair not in reports:
        pytest.skip("Mooncake is not installed")
    assert reports[pair] == 0


@pytest.mark.parametrize("what", ALONE)
def test_its_classes_and_ours_agree(reports: dict[str, Any], what: str) -> None:
    assert reports[what] == 0
