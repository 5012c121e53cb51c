# SPDX-License-Identifier: Apache-2.0
"""Where a manager's configuration comes from, and what its connector is told."""

import threading
from types import SimpleNamespace as Namespace

import pytest

from omni_connector.errors import ConfigError
from omni_connector.objects.factory import ConnectorSpec, OmniConnectorFactory
from omni_connector.stage.config import OmniKVCacheConfig
from omni_connector.stage.manager import OmniKVTransferManager
from omni_connector.stage.ports import kv_port

from .caches import sequence
from .connectors import DictConnector, manager, register, send

FULL = {
    "connector_config": {"type": "SharedMemoryConnector"},
    "omni_from_stage": "0",
    "omni_to_stage": 1,
    "stage_id": 1,
    "engine_input_source": [0],
    "need_recv_cache": True,
    "need_send_cache": True,
    "recv_timeout": 3,
    "rank_mapping": {"from_tp": 4, "to_tp": 2},
    "enable_kv_async_prefetch": False,
}


@pytest.mark.parametrize("make", ["from_model_config", "from_od_config"])
def test_a_model_configuration_tells_all(make: str) -> None:
    kv = getattr(OmniKVTransferManager, make)(Namespace(omni_kv_config=FULL))
    assert kv.config == OmniKVCacheConfig(
        connector_config={"type": "SharedMemoryConnector"},
        from_stage="0",
        to_stage=1,
        stage_id=1,
        engine_input_source=[0],
        need_recv_cache=True,
        need_send_cache=True,
        recv_timeout=3.0,
        from_tp=4,
        to_tp=2,
    )
    assert (kv.send_stages, kv.recv_stages) == (("0", "1"), ("0", "1"))


@pytest.mark.parametrize("settings", [None, {}, "text"])
def test_without_settings_nothing_is_transferred(settings: object) -> None:
    for config in (Namespace(omni_kv_config=settings), Namespace()):
        kv = OmniKVTransferManager.from_model_config(config)
        assert kv.config == OmniKVCacheConfig()
        assert kv.connector is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("recv_timeout", "soon"),
        ("recv_timeout", float("nan")),
        ("recv_timeout", float("inf")),
        ("recv_timeout", -1.0),
        ("need_send_cache", 1),
        ("rank_mapping", {"from_tp": "x"}),
    ],
)
def test_ill_typed_settings_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"omni_kv_config: .*\$\.{key}"):
        OmniKVTransferManager.from_model_config(Namespace(omni_kv_config=FULL | {key: value}))


def test_the_model_tells_its_heads() -> None:
    model = Namespace(get_total_num_kv_heads=lambda: 8, get_head_size=lambda: 128)
    config = OmniKVTransferManager.from_model_config(model).config
    assert (config.num_kv_heads, config.head_dim) == (8, 128)
    model.omni_kv_config = {"num_kv_heads": 4, "kv_layout": "packed"}
    config = OmniKVTransferManager.from_model_config(model).config
    assert (config.num_kv_heads, config.kv_layout) == (4, "packed")


def test_vllms_configuration_is_the_fallback() -> None:
    connector = {"type": "SharedMemoryConnector"}
    direct = Namespace(kv_transfer_config=Namespace(omni_connector_config=connector))
    nested = Namespace(
        kv_transfer_config=Namespace(
            kv_connector_extra_config={"omni_connector_config": connector, "arena_gib": 1}
        )
    )
    for vllm_config in (direct, nested):
        kv = OmniKVTransferManager.from_vllm_config(vllm_config, Namespace())
        assert kv.config == OmniKVCacheConfig(connector_config=connector)
    model = Namespace(omni_kv_config={"connector_config": {"type": "Other"}})
    kv = OmniKVTransferManager.from_vllm_config(direct, model)
    assert kv.config.connector_config == {"type": "Other"}
    for nothing in (
        Namespace(),
        Namespace(kv_transfer_config=None),
        Namespace(kv_transfer_config=Namespace(kv_connector_extra_config=None)),
    ):
        kv = OmniKVTransferManager.from_vllm_config(nothing, Namespace())
        assert kv.config == OmniKVCacheConfig()


def test_vllms_configuration_tells_rank_and_device() -> None:
    vllm_config = Namespace(
        parallel_config=Namespace(tensor_parallel_size=2, rank=3),
        device_config=Namespace(device_type="cpu"),
    )
    config = OmniKVTransferManager.from_vllm_config(vllm_config, Namespace()).config
    assert (config.tp_size, config.tp_rank, config.cpu_engine) == (2, 1, True)


@pytest.mark.vllm
def test_vllms_own_objects_have_what_is_asked_for() -> None:
    from vllm.config import DeviceConfig, KVTransferConfig, ModelConfig, ParallelConfig

    extra = {"omni_connector_config": {"type": "SharedMemoryConnector"}}
    transfer = KVTransferConfig(
        kv_connector="OmniKVConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    vllm_config = Namespace(
        kv_transfer_config=transfer,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    config = OmniKVTransferManager.from_vllm_config(vllm_config, Namespace()).config
    assert config.connector_config == {"type": "SharedMemoryConnector"}
    assert (config.tp_size, config.tp_rank, config.cpu_engine) == (1, 0, True)
    assert callable(ModelConfig.get_total_num_kv_heads)
    assert callable(ModelConfig.get_head_size)


@pytest.mark.parametrize(
    ("config", "send", "receive"),
    [
        ({"from_stage": "0", "to_stage": "1"}, ("0", "1"), (None, None)),
        ({"from_stage": 0, "to_stage": 1}, ("0", "1"), (None, None)),
        ({"from_stage": "", "to_stage": "1"}, (None, None), (None, None)),
        ({"from_stage": "0", "stage_id": "dit"}, (None, None), ("0", "dit")),
        ({"from_stage": "0", "stage_id": 3}, (None, None), ("2", "3")),
        ({"from_stage": "a", "stage_id": 0}, (None, None), ("a", "0")),
        ({"stage_id": 3, "engine_input_source": [1, 2]}, (None, None), ("1", "3")),
        ({"stage_id": 3, "engine_input_source": [0]}, (None, None), ("0", "3")),
        ({"stage_id": 3, "engine_input_source": []}, (None, None), ("2", "3")),
        ({"stage_id": "dit"}, (None, None), (None, None)),
    ],
)
def test_the_stages(config: dict, send: tuple, receive: tuple) -> None:
    kv = OmniKVTransferManager(OmniKVCacheConfig(**config))
    assert (kv.send_stages, kv.recv_stages) == (send, receive)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[ConnectorSpec]:
    made: list[ConnectorSpec] = []

    def create(spec: ConnectorSpec) -> DictConnector:
        made.append(spec)
        return DictConnector()

    monkeypatch.setattr(OmniConnectorFactory, "create_connector", create)
    return made


ENGINE = {"type": "MooncakeTransferEngineConnector", "zmq_port": 5000, "host": "h"}


def test_a_sending_engine_is_told_what_it_is(specs: list[ConnectorSpec]) -> None:
    sender = manager(connector_config=ENGINE, from_tp=4, to_tp=4, tp_rank=2)
    assert sender.connector is not None
    assert specs[0].name == "MooncakeTransferEngineConnector"
    assert specs[0].extra == {
        "zmq_port": 5132, "host": "h", "role": "sender", "from_stage": "0", "to_stage": "1",
    }  # fmt: skip
    assert ENGINE["zmq_port"] == 5000


@pytest.mark.parametrize(
    ("configured", "stage", "replica", "rank", "port"),
    [
        (None, "0", "0", 0, 50151),
        (None, "0", "0", 2, 50183),
        (0, "0", "0", 2, 0),  # any free one
        ("${STAGE_PORT}", "3", "2", 1, 5000 + 100 + 3 + 2048 + 16),
        ("${STAGE_PORT}", "text", "x", 1, 5116),
        ("${STAGE_PORT}", "0", "-1", 1, 5116),
    ],
)
def test_the_port_tells_stage_replica_and_rank(
    specs: list[ConnectorSpec],
    monkeypatch: pytest.MonkeyPatch,
    configured: object,
    stage: str,
    replica: str,
    rank: int,
    port: int,
) -> None:
    monkeypatch.setenv("VLLM_OMNI_REPLICA_ID", replica)
    monkeypatch.setenv("STAGE_PORT", "5000")
    config = {"type": ENGINE["type"]} | ({} if configured is None else {"zmq_port": configured})
    sender = manager(connector_config=config, from_stage=stage, from_tp=4, to_tp=4, tp_rank=rank)
    assert sender.connector is not None
    assert specs[0].extra["zmq_port"] == port


@pytest.mark.parametrize(
    ("base", "stage", "replica", "rank"),
    [(5000, 16, 0, 0), (5000, -1, 0, 0), (60000, 0, 6, 0), (5000, 0, -1, 0), (5000, 0, 0, -1)],
)
def test_what_would_be_no_port_of_its_own_is_refused(
    base: int, stage: int, replica: int, rank: int
) -> None:
    with pytest.raises(ConfigError):
        kv_port(base, stage, replica=replica, rank=rank)


def test_any_free_port_is_one_for_every_rank(specs: list[ConnectorSpec]) -> None:
    sender = manager(connector_config=ENGINE | {"zmq_port": 0}, from_tp=4, to_tp=4, tp_rank=2)
    assert sender.connector is not None
    assert specs[0].extra["zmq_port"] == 0


def test_a_sender_in_the_settings_is_that_of_rank_0(specs: list[ConnectorSpec]) -> None:
    settings = ENGINE | {"sender_host": "far", "sender_zmq_port": 6000}
    receiver = manager(
        connector_config=settings,
        need_send_cache=False,
        from_tp=4,
        to_tp=2,
        tp_rank=1,
        recv_timeout=0.0,
    )
    connector = receiver.connector
    assert specs[0].extra["sender_host"] == "far"
    assert specs[0].extra["sender_zmq_port"] == 6016
    receiver.config.recv_timeout = 1.0
    assert receiver.receive_kv_cache_for_request("r") == (None, 0)
    assert connector.gets[:2] == [
        ("r_0_0_2_1", {"source_host": "far", "source_port": 6032}),
        ("r_0_0_3_1", {"source_host": "far", "source_port": 6048}),
    ]


def test_a_receiving_engine_is_told_the_senders_port(specs: list[ConnectorSpec]) -> None:
    receiver = manager(
        connector_config=ENGINE, need_send_cache=False, from_tp=4, to_tp=4, tp_rank=2
    )
    receiver.update_sender_info({"host": "far", "zmq_port": "6000"})
    assert receiver.connector is not None
    assert specs[0].extra == {
        "zmq_port": 5000, "host": "h", "role": "receiver", "from_stage": "0", "to_stage": "1",
        "sender_host": "far", "sender_zmq_port": 6032,
    }  # fmt: skip


class _Told(DictConnector):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int | None]] = []

    def update_sender_info(self, host: str, port: int | None) -> None:
        self.told.append((host, port))
        if host == "bad":
            raise OSError("cannot connect")


def test_the_sender_is_told_before_and_after_the_connector_is_made() -> None:
    connector = _Told()
    receiver = manager(connector)
    receiver.update_sender_info({"host": "a", "zmq_port": 5000})
    assert connector.told == []
    assert receiver.connector is connector
    assert connector.told == [("a", 5000)]
    receiver.update_sender_info({"host": "b"})
    assert connector.told[1:] == [("b", 50151)]
    receiver.update_sender_info({"host": "bad", "zmq_port": 5000})
    assert receiver.connector is connector


@pytest.mark.parametrize(
    ("info", "stage", "told"),
    [
        ({"0": {"host": "a", "zmq_port": 1}, "2": {"host": "b", "zmq_port": 2}}, None, ("a", 1)),
        ({0: {"host": "a", "zmq_port": 1}, 2: {"host": "b", "zmq_port": 2}}, "2", ("b", 2)),
        ({"7": {"host": "a", "zmq_port": 1}}, None, ("a", 1)),
        ({"7": {"host": "a"}, "8": {"host": "b"}}, None, None),
        ({"7": 1, "8": {"host": "b"}}, None, ("b", 50151)),
        ({}, None, None),
        (None, None, None),
        ("host", None, None),
        ({"host": ""}, None, None),
        ({"host": 7}, None, None),
        ({"host": "two words"}, None, None),
        ({"host": "10.0.0.1:5000", "zmq_port": 5000}, None, None),
        ({"host": "0.0.0.0", "zmq_port": 5000}, None, None),
        ({"host": "h" * 300, "zmq_port": 5000}, None, None),
        ({"host": "localhost", "zmq_port": 5000}, None, ("localhost", 5000)),
        ({"host": "fe80::1", "zmq_port": 5000}, None, ("fe80::1", 5000)),
        ({"host": "a", "zmq_port": "x"}, None, None),
        ({"host": "a", "zmq_port": 0}, None, None),
        ({"host": "a", "zmq_port": 1 << 16}, None, None),
        ({"host": "a", "zmq_port": [1]}, None, None),
    ],
)
def test_sender_info_comes_in_several_forms(
    info: object, stage: str | None, told: tuple | None, caplog: pytest.LogCaptureFixture
) -> None:
    connector = _Told()
    receiver = manager(connector)
    assert receiver.connector is connector
    receiver.update_sender_info(info, stage)
    assert connector.told == ([] if told is None else [told])
    assert ("names no host and port" in caplog.text) == (told is None)


def test_a_stage_that_does_not_receive_takes_no_sender_info() -> None:
    connector = _Told()
    kv = manager(connector, need_recv_cache=False)
    assert kv.connector is connector
    kv.update_sender_info({"host": "a", "zmq_port": 1})
    assert connector.told == []


def test_a_request_may_carry_its_senders_address() -> None:
    connector = _Told()
    receiver = manager(connector, recv_timeout=0.0)
    info = {"0": {"host": "a", "zmq_port": 1}, "1": {"host": "b", "zmq_port": 2}}
    assert receiver.receive_kv_cache(Namespace(request_id="r", kv_sender_info=info)) is False
    assert connector.gets == [
        ("omni_0_to_1_kv_cache_r", {"source_host": "a", "source_port": 1}),
    ]
    assert connector.told == []


@pytest.mark.parametrize("host", ["two words", "10.0.0.1:5000", "0.0.0.0"])
def test_a_malformed_sender_of_a_request_is_refused_once(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    connector = _Told()
    receiver = manager(connector, recv_timeout=0.1)
    receiver.update_sender_info({"host": "default", "zmq_port": 9})
    req = Namespace(request_id="r", kv_sender_info={"host": host, "zmq_port": 5})
    assert receiver.receive_kv_cache(req) is False
    assert len(connector.gets) > 2
    assert all(metadata is None for _, metadata in connector.gets), "the default sender is asked"
    [refusal] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert f"{host!r} is no host" in refusal.getMessage()
    assert refusal.exc_info is None


def test_companions_of_a_request_with_a_malformed_sender_refuse_it_no_second_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver = manager(_Told())
    assert send(receiver, sequence())
    req = Namespace(
        request_id="r",
        kv_sender_info={"host": "two words"},
        sampling_params=Namespace(cfg_kv_request_ids={"text": "r__text"}),
    )
    assert receiver.receive_multi_kv_cache(req, lambda *_: {}) is True
    assert caplog.text.count("is no host") == 1


def test_a_get_that_fails_for_one_reason_at_each_poll_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(DictConnector):
        def get(self, *args: object, **fields: object) -> None:
            polls.append(len(polls))
            raise OSError("no way" if len(polls) < 3 else "no memory")

    polls: list[int] = []
    receiver = manager(Failing(), recv_timeout=0.3)
    for request_id in ("r", "s"):
        polls.clear()
        assert receiver.receive_kv_cache_for_request(request_id) == (None, 0)
        assert len(polls) > 4
    for reason in ("OSError: no way", "OSError: no memory"):
        assert caplog.text.count(reason) == 2, "once a request"


def test_the_sender_of_one_request_is_not_that_of_another() -> None:
    connector = _Told()
    receiver = manager(connector, recv_timeout=0.0)
    receiver.update_sender_info({"host": "default", "zmq_port": 9})
    hosts = {"a": "10.0.0.1", "b": "10.0.0.2"}
    inside = threading.Barrier(2)
    seen = {}

    def ask(key: str) -> None:
        # Both are under way before either asks again.
        info = {"host": hosts[key], "zmq_port": 5}
        req = Namespace(request_id=key, kv_sender_info=info)
        inside.wait(60)
        assert receiver.receive_kv_cache(req) is False
        inside.wait(60)
        assert receiver.receive_kv_cache(req) is False
        seen[key] = True

    threads = [threading.Thread(target=ask, args=(key,)) for key in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {"a": True, "b": True}
    assert receiver.receive_kv_cache(Namespace(request_id="c")) is False
    assert sorted(connector.gets[:4]) == [
        (f"omni_0_to_1_kv_cache_{key}", {"source_host": host, "source_port": 5})
        for key, host in hosts.items()
        for _ in range(2)
    ]
    assert connector.gets[4] == ("omni_0_to_1_kv_cache_c", None)
    assert connector.told == [("default", 9)]


def test_companions_come_from_the_sender_of_their_request() -> None:
    connector = _Told()
    receiver = manager(connector)
    assert send(receiver, sequence())
    info = {"host": "a", "zmq_port": 5}
    req = Namespace(
        request_id="r",
        kv_sender_info=info,
        sampling_params=Namespace(cfg_kv_request_ids={"text": "r__text"}),
    )

    def collect(request_id, companions, kv, device):
        kv.config.recv_timeout = 0.0
        assert kv.receive_kv_cache_for_request(companions["text"], device) == (None, 0)

    assert receiver.receive_multi_kv_cache(req, collect) is True
    assert connector.gets == [
        (f"omni_0_to_1_kv_cache_{key}", {"source_host": "a", "source_port": 5})
        for key in ("r", "r__text")
    ]


def test_a_sender_without_a_port_is_asked_at_the_default_one() -> None:
    connector = _Told()
    receiver = manager(connector, recv_timeout=0.0)
    req = Namespace(request_id="r", kv_sender_info={"host": "a"})
    assert receiver.receive_kv_cache(req) is False
    assert connector.gets[0][1] == {"source_host": "a", "source_port": 50151}


def test_addresses_are_no_settings_of_connectors_that_have_none() -> None:
    seen = []

    def make(extra: dict) -> DictConnector:
        seen.append(extra)
        return DictConnector()

    receiver = manager(connector_config={"type": register(make)})
    receiver.update_sender_info({"host": "a", "zmq_port": 1})
    assert receiver.connector is not None
    assert seen == [{}]
    # It is the configuration that says where the sender is, as vLLM-Omni's does.
    assert receiver.config.connector_config["sender_host"] == "a"
    assert receiver.config.connector_config["sender_zmq_port"] == 1
