# SPDX-License-Identifier: Apache-2.0
"""`OmniKVTransferManager`: what is sent, what is received, and what is said of failures."""

import logging
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from omni_connector.errors import (
    ChecksumError,
    ConfigError,
    IncompatiblePeerError,
    MissingDependencyError,
    PeerRefusedError,
    PeerUnreachableError,
    TransportError,
)
from omni_connector.objects.base import OmniConnector
from omni_connector.stage import link
from omni_connector.stage.config import OmniKVCacheConfig
from omni_connector.stage.contract import CONTRACT_KEY
from omni_connector.stage.manager import OmniKVTransferManager
from omni_connector.stage.payload import KVCacheTransferData

from .caches import cache_of, sequence
from .connectors import DictConnector, manager, register, send

KEY = ("0", "1", "omni_0_to_1_kv_cache_r")


def _key(data: dict) -> torch.Tensor:
    return data["layer_blocks"]["key_cache"][0]


def test_connector_lazy_init() -> None:
    made = []

    def make(extra: dict) -> DictConnector:
        made.append(extra)
        return DictConnector()

    kv = manager(connector_config={"type": register(make), "port": 7})
    assert made == []
    assert kv.connector is kv.connector is kv.get_connector
    assert made == [{"port": 7}]


def starts_late(connector: DictConnector, *errors: Exception) -> str:
    """The type of a connector whose first starts fail."""
    starts = iter([*errors, connector])

    def make(extra: dict) -> DictConnector:
        start = next(starts)
        if isinstance(start, Exception):
            raise start
        return start

    return register(make)


def test_a_connector_that_did_not_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    connector = DictConnector()
    errors = OSError("no port"), ConfigError("unknown"), RuntimeError("theirs")
    kv = manager(connector_config={"type": starts_late(connector, *errors)})
    with caplog.at_level(logging.WARNING):
        assert [kv.connector for _ in range(4)] == [None, None, None, connector]
    assert "did not start: no port" in caplog.text
    # Only the first failure is told with its traceback.
    told = [bool(each.exc_info) for each in caplog.records if "did not start" in each.message]
    assert told == [True, False, False]


def test_one_thread_makes_the_connector_for_all() -> None:
    barrier = threading.Barrier(8)
    made = []

    def make(extra: dict) -> DictConnector:
        made.append(1)
        return DictConnector()

    kv = manager(connector_config={"type": register(make)})

    def use() -> None:
        barrier.wait()
        assert kv.connector is not None

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_what_is_sent_is_received() -> None:
    seq = sequence()
    connector = DictConnector()
    sender, receiver = manager(connector), manager(connector)
    assert send(sender, seq, custom_metadata={"image": [1, 2]})
    assert list(connector.objects) == [KEY]
    assert type(connector.objects[KEY]) is bytes
    data, size = receiver.receive_kv_cache_for_request("r")
    assert size == len(connector.objects[KEY])
    assert torch.equal(_key(data), seq.key)
    assert torch.equal(data["layer_blocks"]["value_cache"][0], seq.value)
    assert data["metadata"] == {
        "block_size": 4, "num_layers": 1, "dtype": "auto", "seq_len": 10, "image": [1, 2],
        "_kv_payload_contract": 1,
    }  # fmt: skip
    assert sender.time.slept == receiver.time.slept == []


def test_the_next_stage_knows_the_request_by_the_resolved_id() -> None:
    connector = DictConnector()
    kv = manager(connector)
    seq = sequence()
    finished = {"r-17": {"block_ids": seq.block_ids, "seq_len": seq.tokens}}
    done = kv.handle_finished_requests_kv_transfer(
        finished, [cache_of(seq, "pair")], 4, "auto", lambda request_id: request_id[0]
    )
    assert done == ["r-17"]
    assert list(connector.objects) == [KEY]
    data, _ = kv.receive_kv_cache_for_request("r")
    assert data["request_id"] == "r"


def test_send_with_retry() -> None:
    answers = iter([(False, 0, None), OSError("down"), None])
    connector = DictConnector()

    def fail():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    connector.on_put = fail
    kv = manager(connector)
    assert send(kv, sequence())
    assert connector.puts == [KEY[2]] * 3
    assert kv.time.slept == [0.1, 0.2]


def _no_port(extra: dict) -> DictConnector:
    raise OSError("no port yet")


@pytest.mark.parametrize("failure", ["refused", "raised", "no connector"])
def test_a_failed_send_is_told_and_its_blocks_are_free_all_the_same(
    failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    connector = DictConnector()

    def fail():
        if failure == "raised":
            raise OSError("down")
        return False, 0, None

    connector.on_put = fail
    config = {"connector_config": {"type": register(_no_port)}} if failure == "no connector" else {}
    kv = manager(connector, **config)
    assert not send(kv, sequence())
    assert kv.time.slept == [0.1, 0.2]
    assert list(kv.last_failures) == ["r"]
    assert "was not put in 3 tries" in kv.last_failures["r"]
    assert "request r was not sent" in caplog.text
    assert connector.objects == {}
    connector.on_put = None
    if failure != "no connector":
        assert send(kv, sequence())
        assert kv.last_failures == {}


def test_a_connector_that_starts_late_is_used_by_the_next_try() -> None:
    kv = manager(connector_config={"type": starts_late(DictConnector(), OSError("not yet"))})
    assert send(kv, sequence())
    assert kv.time.slept == [0.1]


def test_one_bad_request_does_not_stop_the_others() -> None:
    seq = sequence()
    good = {"block_ids": seq.block_ids, "seq_len": 10}
    finished = {
        "out of range": {"block_ids": [1, 2, 7], "seq_len": 10},
        "a": good,
        "no blocks": {"block_ids": [], "seq_len": 10},
        "no length": {"block_ids": [1, 2, 3]},
        "no JSON": {**good, "custom_metadata": {"k": object()}},
        "NaN": {**good, "custom_metadata": {"k": float("nan")}},
        "b": good,
    }
    connector = DictConnector()
    kv = manager(connector)
    caches = [cache_of(seq, "pair")]
    # By this list vLLM-Omni frees the blocks: an id that is left out holds them for ever.
    assert kv.handle_finished_requests_kv_transfer(finished, caches, 4, "auto") == list(finished)
    assert sorted(kv.last_failures) == ["NaN", "no JSON", "no blocks", "no length", "out of range"]
    assert "block 7 is not one of 7" in kv.last_failures["out of range"]
    assert len(connector.objects) == 2
    assert kv.time.slept == []


def test_a_stage_that_does_not_send_is_done_with_all() -> None:
    kv = manager(need_send_cache=False)
    assert kv.handle_finished_requests_kv_transfer({"a": {}, "b": {}}, [], 4, "auto") == ["a", "b"]
    assert kv.last_failures == {}
    assert kv.handle_finished_requests_kv_transfer({}, [], 4, "auto") == []


def test_without_stages_nothing_can_be_sent_or_received() -> None:
    kv = manager(from_stage=None, to_stage=None, stage_id=None)
    assert (kv.send_stages, kv.recv_stages) == ((None, None), (None, None))
    assert not send(kv, sequence())
    assert "omni_from_stage" in kv.last_failures["r"]
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert kv.time.slept == []


@pytest.mark.parametrize("on", ["host", "raw"])
def test_raw_data_connectors_get_a_tensor(on: str) -> None:
    seq = sequence()
    connector = DictConnector(raw=on == "raw")
    kv = manager(connector)
    assert send(kv, seq)
    packed = connector.objects[KEY]
    if on == "raw":
        assert (packed.dtype, packed.dim()) == (torch.uint8, 1)
    data, size = kv.receive_kv_cache_for_request("r")
    assert torch.equal(_key(data), seq.key)
    assert size == len(packed)


class _Buffer:
    """Memory of a connector's, lent until it is released."""

    def __init__(self, packed: bytes) -> None:
        self.tensor = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self.released = 0

    def __len__(self) -> int:
        return self.tensor.numel()

    def release(self) -> None:
        self.released += 1
        self.tensor.zero_()


def _packed(seq, **changes) -> KVCacheTransferData:
    metadata = {"block_size": 4, "num_layers": 1, "dtype": "auto", "seq_len": seq.tokens}
    fields = {
        "request_id": "r",
        "layer_blocks": {"key_cache": [seq.key], "value_cache": [seq.value]},
        "block_ids": seq.block_ids,
        "metadata": metadata,
    }
    return KVCacheTransferData(**(fields | changes))


FORMS = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "tensor": lambda packed: torch.frombuffer(bytearray(packed), dtype=torch.uint8),
    "strided tensor": lambda packed: torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    .repeat_interleave(2)[::2],
    "buffer": _Buffer,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_payloads_come_in_every_form(form: str) -> None:
    seq = sequence()
    connector = DictConnector()
    kv = manager(connector)
    given = FORMS[form](_packed(seq).to_bytes())
    connector.objects[KEY] = given
    data, _ = kv.receive_kv_cache_for_request("r")
    assert torch.equal(_key(data), seq.key)
    if form == "buffer":
        assert given.released == 1


def test_a_payload_that_was_never_packed_is_checked_and_taken() -> None:
    seq = sequence()
    connector = DictConnector()
    kv = manager(connector)
    connector.objects[KEY] = _packed(seq).to_dict()
    data, _ = kv.receive_kv_cache_for_request("r")
    assert torch.equal(_key(data), seq.key)
    packed = _packed(seq).to_dict()
    packed["layer_blocks"]["value_cache"] = None
    connector.objects[KEY] = packed
    data, _ = kv.receive_kv_cache_for_request("r")
    assert data["layer_blocks"]["value_cache"] == []
    connector.objects[KEY] = _packed(seq).to_dict() | {"metadata": 7}
    data, _ = kv.receive_kv_cache_for_request("r")
    assert data["metadata"] == 7
    for wrong in ({"layer_blocks": None}, {"block_ids": "ab"}, {"metadata": {1j}}):
        connector.objects[KEY] = _packed(seq).to_dict() | wrong
        assert kv.receive_kv_cache_for_request("r") == (None, 0)
    del connector.objects[KEY]["metadata"]
    assert kv.receive_kv_cache_for_request("r") == (None, 0)


def test_a_hook_that_loses_a_layer_or_the_contract_is_found_out() -> None:
    seq = sequence()
    connector = DictConnector()
    kv = manager(connector)
    connector.objects[KEY] = _packed(seq).to_dict()
    connector.objects[KEY]["metadata"] |= {"_kv_payload_contract": 1}
    kv.kv_payload_slicer = lambda payload: payload
    assert kv.receive_kv_cache_for_request("r")[1] > 0
    for lost in ({"metadata": {}}, {"layer_blocks": {"key_cache": [seq.key], "value_cache": []}}):
        kv.kv_payload_slicer = lambda payload, lost=lost: payload | lost
        assert kv.receive_kv_cache_for_request("r") == (None, 0)
    del connector.objects[KEY]["metadata"]["_kv_payload_contract"]
    kv.kv_payload_slicer = lambda payload: payload | {"metadata": {}}
    assert kv.receive_kv_cache_for_request("r")[1] > 0


BAD = {
    "truncated": lambda seq: _packed(seq).to_bytes()[:-1],
    "longer": lambda seq: _packed(seq).to_bytes() + b"x",
    "no payload": lambda seq: b"",
    "a list": lambda seq: [1],
    "of another request": lambda seq: _packed(seq, request_id="q").to_bytes(),
    "short of tokens": lambda seq: _packed(
        seq, metadata={"block_size": 4, "num_layers": 1, "dtype": "auto", "seq_len": 11}
    ).to_bytes(),
    "another dtype of tensor": lambda seq: torch.zeros(9),
    "a damaged buffer": lambda seq: _Buffer(_packed(seq).to_bytes()[:-1]),
}


@pytest.mark.parametrize("form", BAD)
def test_a_bad_payload_is_a_failure_at_once(form: str, caplog: pytest.LogCaptureFixture) -> None:
    connector = DictConnector()
    kv = manager(connector)
    connector.objects[KEY] = given = BAD[form](sequence())
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert kv.time.slept == []
    assert "request r cannot be used" in caplog.text
    if form == "a damaged buffer":
        assert given.released == 1


def test_receive_timeout(caplog: pytest.LogCaptureFixture) -> None:
    connector = DictConnector()
    kv = manager(connector)
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert sum(kv.time.slept) == pytest.approx(2.0)
    assert kv.time.slept[:7] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5]
    assert max(kv.time.slept) == 0.5
    assert len(connector.gets) == len(kv.time.slept) + 1
    assert "omni_0_to_1_kv_cache_r" in caplog.text


def test_a_time_out_of_nothing_asks_once() -> None:
    connector = DictConnector()
    kv = manager(connector, recv_timeout=0.0)
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert len(connector.gets) == 1
    assert send(kv, sequence())
    assert kv.receive_kv_cache_for_request("r")[0] is not None


def test_at_the_deadline_no_further_part_is_asked_for() -> None:
    connector = DictConnector()
    kv = manager(connector, from_tp=8, to_tp=1, tp_rank=0)
    connector.on_get = lambda: kv.time.advance(5.0)
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert len(connector.gets) == 1


def test_a_connector_of_ours_waits_no_longer_than_the_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "LEAST_ASK_S", 0.5)

    class Silent(OmniConnector):
        transport = "silent"
        store_object = drop_objects = close = lambda self, *arguments: None
        waited: ClassVar[list[float]] = []

        def load_object(self, key: object, metadata: object, *, timeout: float) -> None:
            self.waited.append(timeout)
            kv.time.advance(timeout)

    kv = manager(Silent(), recv_timeout=0.75)
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert Silent.waited == [0.75]
    kv.config.recv_timeout = 0.1
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert Silent.waited == [0.75, 0.5]
    kv.config.recv_timeout = 60.0
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert max(Silent.waited) == Silent.object_timeout
    Silent.is_store, Silent.waited = True, []
    kv.config.recv_timeout = 0.1
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert Silent.waited == [Silent.object_timeout]


def test_what_comes_while_waiting_is_received() -> None:
    connector = DictConnector()
    kv = manager(connector)
    seq = sequence()

    def arrive() -> None:
        if kv.time() > 101:
            connector.objects[KEY] = _packed(seq).to_bytes()

    kv.time.on_sleep = arrive
    data, _ = kv.receive_kv_cache_for_request("r")
    assert torch.equal(_key(data), seq.key)
    assert 101 < kv.time() < 102


def test_a_connector_that_fails_or_starts_while_waiting_is_asked_again() -> None:
    connector = DictConnector()
    failures = iter([OSError("a"), ValueError("b")])

    def fail():
        failure = next(failures, None)
        if failure is not None:
            raise failure

    connector.on_get = fail
    kv = manager(connector_config={"type": starts_late(connector, OSError("not yet"))})
    connector.objects[KEY] = _packed(sequence()).to_bytes()
    assert kv.receive_kv_cache_for_request("r")[0] is not None
    assert kv.time.slept == [0.01, 0.02, 0.04]


def test_a_stage_that_does_not_receive_or_has_no_connector_does_not_wait() -> None:
    connector = DictConnector()
    connector.objects[KEY] = _packed(sequence()).to_bytes()
    for kv in (manager(connector, need_recv_cache=False), manager(connector_config=None)):
        assert kv.receive_kv_cache_for_request("r") == (None, 0)
        assert kv.time.slept == []
    assert connector.gets == []


def test_tensors_go_to_the_device_that_is_asked_for() -> None:
    kv = manager()
    assert send(kv, sequence())
    data, _ = kv.receive_kv_cache_for_request("r", torch.device("meta"))
    for layers in data["layer_blocks"].values():
        assert [tensor.device.type for tensor in layers] == ["meta"]


@pytest.mark.parametrize("raw", [False, True])
def test_a_request_of_an_id_that_was_used_before_gets_its_own_kv_or_none(
    caplog: pytest.LogCaptureFixture, raw: bool
) -> None:
    kv = manager(DictConnector(raw=raw))
    assert send(kv, sequence(seed=1), custom_metadata={"a": 1})
    data, _ = kv.receive_kv_cache_for_request("r")
    assert torch.equal(_key(data), sequence(seed=1).key)
    assert data["metadata"].keys() == {
        *("block_size", "num_layers", "dtype", "seq_len", "a", CONTRACT_KEY)
    }
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert "is missing: an earlier request of this id has used it" in caplog.text
    sends = iter([sequence(seed=2)])

    def sleeps() -> None:
        for seq in sends:
            assert send(kv, seq)

    kv.time.on_sleep = sleeps
    data, _ = kv.receive_kv_cache_for_request("r")
    assert torch.equal(_key(data), sequence(seed=2).key)
    assert send(kv, sequence(seed=2))  # a request may be sent once more, as it was
    data, _ = kv.receive_kv_cache_for_request("r")
    assert torch.equal(_key(data), sequence(seed=2).key)


@pytest.mark.parametrize("fails", ["put", "extraction"])
def test_a_request_that_is_not_sent_leaves_nothing_of_one_of_the_same_id(fails: str) -> None:
    connector = DictConnector()
    kv = manager(connector)
    assert send(kv, sequence(seed=1))
    assert send(kv, sequence(seed=1), "other")
    if fails == "put":
        connector.on_put = lambda: (False, 0, None)
        assert not send(kv, sequence(seed=2))
    else:
        assert not send(kv, sequence(seed=2), block_ids=[10_000])
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert kv.receive_kv_cache_for_request("other")[1] > 0


def test_a_received_cache_hangs_on_the_request_and_its_parameters() -> None:
    kv = manager()
    seq = sequence()
    assert send(kv, seq)
    req = SimpleNamespace(request_id="r", sampling_params=SimpleNamespace())
    assert kv.receive_kv_cache(req) is True
    assert torch.equal(req.past_key_values.key_cache[0], seq.key)
    assert torch.equal(req.past_key_values.value_cache[0], seq.value)
    assert req.kv_metadata["seq_len"] == 10
    assert req.sampling_params.past_key_values is req.past_key_values
    assert req.sampling_params.kv_metadata is req.kv_metadata
    for params in ({}, {"sampling_params": None}):
        assert send(kv, seq)
        bare = SimpleNamespace(request_id="r", **params)
        assert kv.receive_kv_cache(bare) is True
        assert torch.equal(bare.past_key_values.key_cache[0], seq.key)
    only = SimpleNamespace()
    kv.apply_kv_cache_to_request(only, {"metadata": {"a": 1}})
    assert vars(only) == {"kv_metadata": {"a": 1}}


def test_a_request_without_cache_or_id_stays_as_it_was() -> None:
    kv = manager()
    for req in (SimpleNamespace(request_id="r"), SimpleNamespace(request_id=None), object()):
        assert kv.receive_kv_cache(req) is False
        assert not hasattr(req, "past_key_values")
        assert kv.receive_multi_kv_cache(req, lambda *args: {"a": 1}) is False


def _multi() -> tuple[OmniKVTransferManager, SimpleNamespace]:
    kv = manager()
    assert send(kv, sequence(seed=1))
    assert send(kv, sequence(seed=2), "r-text")
    params = SimpleNamespace(cfg_kv_request_ids={"text": "r-text"})
    return kv, SimpleNamespace(request_id="r", sampling_params=params)


def test_companions_are_collected_after_the_requests_own_cache() -> None:
    kv, req = _multi()
    device = torch.device("cpu")

    def collect(request_id, companions, given, where):
        assert (request_id, companions, given, where) == ("r", {"text": "r-text"}, kv, device)
        assert req.past_key_values is not None
        data, _ = given.receive_kv_cache_for_request(companions["text"], where)
        return {"cfg_text_past_key_values": SimpleNamespace(**data["layer_blocks"])}

    assert kv.receive_multi_kv_cache(req, collect, device) is True
    found = req.sampling_params.cfg_text_past_key_values.key_cache[0]
    assert torch.equal(found, sequence(seed=2).key)
    assert torch.equal(req.past_key_values.key_cache[0], sequence(seed=1).key)


def test_companions_that_cannot_be_collected_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv, req = _multi()

    def collect(*args):
        raise KeyError("text")

    assert kv.receive_multi_kv_cache(req, collect) is True
    assert "companions of request r were not collected" in caplog.text
    for collect_nothing in (lambda *args: None, None):
        assert send(kv, sequence(seed=1))
        assert kv.receive_multi_kv_cache(req, collect_nothing) is True


def test_companions_are_collected_also_where_the_request_has_no_cache() -> None:
    kv, req = _multi()
    req.request_id = "never sent"
    found = {"cfg_text_past_key_values": "kv"}
    assert kv.receive_multi_kv_cache(req, lambda *args: found) is False
    assert req.sampling_params.cfg_text_past_key_values == "kv"
    assert not hasattr(req, "past_key_values")


def test_nothing_is_waited_for_in_a_warm_up_run() -> None:
    kv = manager()
    for request_id in ("dummy_req_id", "dummy_req_id/3"):
        assert kv.receive_kv_cache_for_request(request_id) == (None, 0)
    assert kv.time.slept == []
    assert kv.receive_kv_cache_for_request("dummy_req_id3") == (None, 0)
    assert kv.time.slept != []


def test_a_call_may_name_the_sender_of_its_request() -> None:
    connector = DictConnector()
    connector.update_sender_info = lambda host, port: None
    kv = manager(connector, recv_timeout=0.0)
    info = {"0": {"host": "a", "zmq_port": 5}}
    assert kv.receive_kv_cache_for_request("r", sender_info=info) == (None, 0)
    assert connector.gets[0][1] == {"source_host": "a", "source_port": 5}
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert connector.gets[1][1] is None
    assert kv.receive_kv_cache_for_request("r", sender_info={"host": "two words"}) == (None, 0)
    assert len(connector.gets) == 2
    assert kv._resolve_sender_info(info, 0) == {"host": "a", "zmq_port": 5}
    assert kv._resolve_sender_info({}) is None


def test_a_request_may_be_extracted_and_sent_by_hand() -> None:
    seq = sequence()
    connector = DictConnector()
    kv = manager(connector)
    caches = [cache_of(seq, "pair")]
    data = kv.extract_kv_cache("r", seq.block_ids, seq.tokens, caches, seq.block_size, "auto")
    assert kv.send_kv_cache(data) is True
    found, _ = kv.receive_kv_cache_for_request("r")
    assert torch.equal(_key(found), seq.key)
    connector.on_put = lambda: (False, 0, None)
    assert kv.send_kv_cache(data) is False
    assert list(kv.last_failures) == ["r"]


def test_one_rank_alone_receives_for_itself() -> None:
    kv, req = _multi()
    assert kv.receive_multi_kv_cache_distributed(req) is True
    assert req.past_key_values is not None


def test_key_hooks_take_the_place_of_the_usual_keys() -> None:
    connector = DictConnector()
    kv = manager(connector)
    calls = []

    def build(request_id, from_stage, to_stage):
        calls.append((request_id, from_stage, to_stage))
        return [f"my/{request_id}"]

    kv.kv_send_key_builder = kv.kv_recv_key_builder = build
    assert send(kv, sequence())
    assert list(connector.objects) == [("0", "1", "my/r")]
    assert kv.receive_kv_cache_for_request("r")[0] is not None
    assert calls == [("r", "0", "1")] * 2
    kv.kv_recv_key_builder = lambda *args: [("my/r", 3)]
    assert send(kv, sequence())
    assert kv.receive_kv_cache_for_request("r")[0] is not None
    # Nothing from a hook: the usual keys.
    kv.kv_send_key_builder = kv.kv_recv_key_builder = lambda *args: []
    assert send(kv, sequence())
    assert KEY in connector.objects
    assert kv.receive_kv_cache_for_request("r")[0] is not None


def test_hooks_that_raise_fail_their_request_only() -> None:
    kv = manager()

    def fail(*args):
        raise KeyError("hook")

    kv.kv_send_key_builder = kv.kv_recv_key_builder = fail
    assert not send(kv, sequence())
    assert kv.last_failures == {"r": "KeyError: 'hook'"}
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert kv.time.slept == []


def test_the_slicer_and_merger_get_and_give_payloads() -> None:
    kv = manager()
    assert send(kv, sequence(seed=1), "a")
    assert send(kv, sequence(seed=2), "b")
    kv.kv_recv_key_builder = lambda *args: [
        "omni_0_to_1_kv_cache_a",
        "omni_0_to_1_kv_cache_b",
    ]
    kv.kv_payload_merger = lambda payloads: payloads[1] | {"request_id": payloads[0]["request_id"]}
    kv.kv_payload_slicer = lambda payload: payload | {"sliced": True}
    data, _ = kv.receive_kv_cache_for_request("r")
    assert (data["request_id"], data["sliced"]) == ("a", True)
    assert torch.equal(_key(data), sequence(seed=2).key)
    kv.kv_payload_merger = lambda payloads: None
    kv.kv_payload_slicer = None
    assert kv.receive_kv_cache_for_request("r") == (None, 0)


def test_cleanup_and_close() -> None:
    connector = DictConnector()
    with manager(connector) as kv:
        kv.cleanup("r")
        assert connector.cleaned == []
        assert send(kv, sequence())
        kv.cleanup("r")
        assert connector.objects == {}
        assert kv.receive_kv_cache_for_request("r") == (None, 0)
    kv.close()
    assert connector.closed == 1
    assert kv.connector is None
    assert not send(kv, sequence())


def test_cleanup_frees_the_keys_of_the_request_alone() -> None:
    connector = DictConnector()
    with manager(connector) as kv:
        kv.kv_send_key_builder = lambda request_id, *stages: [f"my/{request_id}", f"x{request_id}"]
        for request_id in ("user_1", "user_1_2"):
            assert send(kv, sequence(), request_id)
        kv.cleanup("user_1")
        assert connector.cleaned == ["my/user_1", "xuser_1"]
        # What this manager has not put may be that of another one, or of an earlier one.
        kv.cleanup("user_1")
        assert connector.cleaned[2:] == ["user_1"]


def test_the_keys_of_many_requests_are_forgotten_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_MAX_REMEMBERED", 2)
    connector = DictConnector()
    with manager(connector) as kv:
        for request_id in ("a", "b", "c"):
            assert send(kv, sequence(), request_id)
        for request_id in ("a", "b", "c"):
            kv.cleanup(request_id)
    assert connector.cleaned == ["a", "omni_0_to_1_kv_cache_b", "omni_0_to_1_kv_cache_c"]


@pytest.mark.parametrize("config", [None, {}, {"type": ""}])
def test_without_a_connector_a_send_fails_at_once(config: dict | None) -> None:
    kv = manager(connector_config=config)
    assert kv.connector is None
    assert not send(kv, sequence())
    assert kv.time.slept == []
    assert "no connector is configured" in kv.last_failures["r"]


def _without_dependency(extra: dict) -> DictConnector:
    raise MissingDependencyError("pip install it")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"type": "NoSuchConnector"}, "NoSuchConnector"),
        ({"type": "SharedMemoryConnector", "object_gibs": 1}, "object_gib"),
        ({"type": register(_without_dependency)}, "pip install it"),
    ],
)
def test_a_connector_that_can_never_start_ends_a_request_at_once(
    config: dict, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv = manager(connector_config=config)
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert reason in caplog.text
    assert not send(kv, sequence())
    assert reason in kv.last_failures["r"]
    assert kv.time.slept == []
    # Each request tries once: the name may be registered meanwhile.
    assert caplog.text.count("did not start") == 2


class Failing(OmniConnector):
    """Finds nothing, for a reason."""

    transport = "failing"
    store_object = drop_objects = close = lambda self, *arguments: None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def load_object(self, key: object, metadata: object, *, timeout: float) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (PeerRefusedError("no"), True),
        (IncompatiblePeerError("protocol", 1, 2), True),
        (ConfigError("key_file is needed"), True),
        (MissingDependencyError("torch"), True),
        (PeerUnreachableError("gone"), False),
        (TransportError("closed"), False),
        (ChecksumError("wrong"), False),
        (OSError("no descriptors"), False),
    ],
)
def test_a_refusal_ends_a_wait_and_a_failure_that_may_pass_does_not(
    error: Exception, ends: bool
) -> None:
    failing = Failing(error)
    kv = manager(failing)
    assert kv.receive_kv_cache_for_request("r") == (None, 0)
    assert sum(kv.time.slept) == (0 if ends else pytest.approx(2.0))
    assert failing.get("0", "1", "k") is None
    waited = failing.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 0.05)
    assert waited is None


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_time_to_wait_that_has_no_end_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="recv_timeout"):
        OmniKVTransferManager(OmniKVCacheConfig(recv_timeout=seconds))
